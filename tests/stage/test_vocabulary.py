"""The last stage computes without a vocabulary, and reads it from its own slice when a grammar needs it."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardwise.deploy import launch_local
from shardwise.errors import StageLoadFailed
from shardwise.records import replace
from shardwise.session.request import GenerationRequest
from shardwise.shards.slicing import slice_model
from shardwise.shards.stage_paths import StageFiles
from shardwise.stage.llama import library
from shardwise.stage.llama.backend import LlamaCppBackend
from shardwise.stage.llama.vocabulary import Vocabulary
from shardwise.transport.messages import SamplingSettings
from tests.deploy.reference import unsharded
from tests.shards.slicing.harness import SETTINGS
from tests.tiny_models import SPECS, make_tiny, vocab_size

NUMBERS = 'root ::= [1-9] [0-9]+ (", " [1-9] [0-9]+)*'


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> StageFiles:
    folder = tmp_path_factory.mktemp("vocabulary")
    return slice_model(make_tiny("llama", path=folder / "llama.gguf"), 2, SPECS["llama"].num_layers, folder)


def texts(vocab: Any) -> list[bytes]:
    """Of every token."""
    api = library.load()
    return [api.llama_vocab_get_text(vocab, token) for token in range(api.llama_vocab_n_tokens(vocab))]


def kind_of(backend: LlamaCppBackend) -> int:
    """Of the vocabulary that was loaded with the weights."""
    api = library.load()
    return int(api.llama_vocab_type(api.llama_model_get_vocab(backend._model)))


def test_the_model_has_a_size_only_and_the_texts_come_when_asked(last: StageFiles) -> None:
    assert last.vocab_size == vocab_size()
    with closing(LlamaCppBackend(last, SETTINGS)) as backend:
        assert kind_of(backend) == library.load().LLAMA_VOCAB_TYPE_NONE
        found = texts(backend.vocabulary.handle)
        assert found == texts(Vocabulary(last.weights).handle)
        assert len(set(found)) == vocab_size()


def test_where_the_size_is_unknown_the_model_is_loaded_with_it(last: StageFiles) -> None:
    with closing(LlamaCppBackend(replace(last, vocab_size=0), SETTINGS)) as backend:
        assert backend.vocab_size == vocab_size()
        assert kind_of(backend) != library.load().LLAMA_VOCAB_TYPE_NONE


@pytest.mark.parametrize("how", ["deleted", "replaced", "a folder"])
def test_the_vocabulary_is_of_the_file_that_was_loaded(how: str, last: StageFiles, tmp_path: Path) -> None:
    copy = Path(shutil.copy(last.weights, tmp_path / "slice.gguf"))
    with closing(LlamaCppBackend(replace(last, weights=str(copy)), SETTINGS)) as backend:
        copy.unlink()
        if how == "replaced":
            copy.write_bytes(b"GGUF" + bytes(1000))
        elif how == "a folder":
            copy.mkdir()
        assert texts(backend.vocabulary.handle) == texts(Vocabulary(last.weights).handle)


def test_a_file_that_is_gone_is_one_line(last: StageFiles, tmp_path: Path) -> None:
    with pytest.raises(StageLoadFailed, match="No such file"):
        LlamaCppBackend(replace(last, weights=str(tmp_path / "none.gguf")), SETTINGS)


@pytest.mark.parametrize("size", [1, vocab_size() - 1, vocab_size() + 1])
def test_a_size_that_is_not_the_heads_is_refused(size: int, last: StageFiles) -> None:
    with pytest.raises(StageLoadFailed, match="refused the slice"):
        LlamaCppBackend(replace(last, vocab_size=size), SETTINGS)


def test_a_grammar_gives_the_tokens_of_an_unsharded_model(sample_gguf: Path) -> None:
    settings = SamplingSettings(temperature=0.8, seed=3, grammar=NUMBERS)
    with launch_local(sample_gguf, num_stages=2, context_tokens=256) as deployment:
        prompt = deployment.tokenizer.encode("Primes: ")
        request = GenerationRequest(prompt=tuple(prompt), max_tokens=24, sampling=settings, ignore_eos=True)
        tokens = [token.id for token in deployment.stream(request)]
        with unsharded(sample_gguf, context_tokens=256, chunk_tokens=128, quantization="Q4_1") as reference:
            assert tokens == reference.generate(prompt, 24, settings)
        assert re.fullmatch(r"[1-9][0-9]*(, ?|[0-9]|, [1-9][0-9]*)*", deployment.tokenizer.decode(tokens))
