"""A model's vocabulary apart from its weights.

A stage needs its size, and its texts only for a grammar. llama.cpp takes 40 ms to build that of 49,152 tokens, and 10 MB: the
last stage therefore loads its slice as if it had none, and reads the vocabulary from the same file when a session first asks.

**Fails with** `StageLoadFailed` where llama.cpp cannot read it. **Called by** the backend, and the driver's tokenizer.
"""

from __future__ import annotations

import os
import re
import weakref
from typing import Any

from shardwise.errors import StageLoadFailed
from shardwise.stage.llama import library

_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


class OpenFile:
    """A file that was checked when it was opened, under a name that stays while somebody deletes or replaces it.

    Where the system has no such name (Windows does not let it be deleted either), or llama.cpp needs the real one to find the
    other parts of a split file, it is the real one.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise StageLoadFailed(f"the slice cannot be read: {error.strerror}", where=path) from error
        self.close = weakref.finalize(self, os.close, self._descriptor)

    @property
    def name(self) -> str:
        """What llama.cpp may open."""
        names = (f"/proc/self/fd/{self._descriptor}", f"/dev/fd/{self._descriptor}")
        steady = next((name for name in names if os.path.exists(name)), self._path)
        return self._path if _SPLIT.search(self._path) else steady


class Vocabulary:
    """llama.cpp's vocabulary of a file, without weights; freed with the last reference."""

    def __init__(self, path: str) -> None:
        api = library.load()
        params = api.llama_model_default_params()
        params.vocab_only = True
        model = library.interruptible(lambda: api.llama_model_load_from_file(path.encode(), params))
        if not model:
            raise StageLoadFailed(f"llama.cpp cannot read the tokenizer: {library.take_log()}", where=path)
        library.take_log()  # warnings of this loading belong to no later error
        weakref.finalize(self, api.llama_model_free, model).atexit = False
        self.handle: Any = api.llama_model_get_vocab(model)
        self.num_tokens = int(api.llama_vocab_n_tokens(self.handle))


def leave_out_vocabulary(params: Any, architecture: str, vocab_size: int) -> Any:
    """Let llama.cpp load a model as if its file said that there are `vocab_size` tokens, and nothing about them.

    `params`: `llama_model_params`, changed in place. Returns what must live until the model is loaded.
    """
    api = library.load()
    entries = (api.llama_model_kv_override * 3)()  # the last one, empty, ends the list
    entries[0].key, entries[0].tag = b"tokenizer.ggml.model", api.LLAMA_KV_OVERRIDE_TYPE_STR
    entries[0].value.val_str = b"no_vocab"
    entries[1].key, entries[1].tag = f"{architecture}.vocab_size".encode(), api.LLAMA_KV_OVERRIDE_TYPE_INT
    entries[1].value.val_i64 = vocab_size
    params.kv_overrides = entries
    return entries
