"""The compiled filter of graph nodes and the Python callback give the same bits."""

from __future__ import annotations

import ctypes
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shardwise.shards.stage_paths import StageFiles
from shardwise.stage.backend import BatchSegment, Floats
from shardwise.stage.llama import tap
from shardwise.stage.llama.backend import LlamaCppBackend
from shardwise.stage.llama.node_filter import NodeFilter, native_library
from tests.shards.slicing.harness import SETTINGS, cut, prompt
from tests.tiny_models import SPECS, make_tiny, vocab_size


def chain(files: list[StageFiles]) -> list[Floats]:
    """Activations of the first slice and logits of the last, for a chunk of 20 tokens and one token after it."""
    out: list[Floats] = []
    with closing(LlamaCppBackend(files[0], SETTINGS)) as first, closing(LlamaCppBackend(files[1], SETTINGS)) as last:
        for position, tokens in ((0, prompt(vocab_size(), 20)), (20, np.array([5], dtype=np.int32))):
            segments = [BatchSegment(slot=0, position=position, num_tokens=len(tokens), sample=True)]
            activations = first.forward(segments, first.embed(tokens)).activations_TH
            assert activations is not None
            logits = last.forward(segments, activations).logits_SV
            assert logits is not None
            out += [activations.copy(), logits]
    return out


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # gemma2's later slices overwrite their input too
def test_the_same_bits_with_and_without(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = cut(make_tiny(name, "F16", path=tmp_path / "tiny.gguf"), [2], SPECS[name].computed_layers, tmp_path)
    assert native_library() is not None, "this installation has no compiled filter"
    native = chain(list(files))
    monkeypatch.setattr(tap, "native_library", lambda: None)
    plain = chain(list(files))
    assert all(np.array_equal(one, other) for one, other in zip(native, plain, strict=True))


def test_only_wanted_names_reach_python() -> None:
    """`l_out-1` is not `l_out-14`: the final 0 is compared too."""
    library, asked = native_library(), []
    assert library is not None
    callback_type = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)

    def matched(tensor: int, ask: bool, _user: int) -> bool:
        asked.append(ask)
        return False

    node_filter = NodeFilter(library, [b"l_out-1\0", b"inp\0"], 0, callback_type(matched))
    function = callback_type(("shardwise_filter_node", library))
    answers = {}
    for name in (b"l_out-1", b"l_out-14", b"inp", b"inpX", b""):
        buffer = ctypes.create_string_buffer(name, 64)
        answers[name] = function(ctypes.addressof(buffer), True, node_filter.user_data)
    assert answers == {b"l_out-1": True, b"l_out-14": False, b"inp": True, b"inpX": False, b"": False}
    assert asked == []
    function(ctypes.addressof(ctypes.create_string_buffer(b"inp", 64)), False, node_filter.user_data)
    assert asked == [False]
