"""llama.cpp, alone or over its RPC backend: `llama_peer.py serve | client`. Needs llama-cpp-python built with -DGGML_RPC=ON."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from common import UserTimes, cut_prompt, measure, read_job, say

_quiet = llama.llama_log_callback(lambda *_: None)
MAX_BATCH = 512


def library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(os.path.dirname(llama.__file__)) / "lib" / f"lib{name}.so"))


def serve(job: dict[str, Any]) -> None:
    """An RPC server that offers this host's CPU."""
    ggml, rpc = library("ggml"), library("ggml-rpc")
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    device = ggml.ggml_backend_dev_by_type(0)  # GGML_BACKEND_DEVICE_TYPE_CPU
    devices = (ctypes.c_void_p * 1)(device)
    rpc.ggml_backend_rpc_start_server.argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p),
    ]  # fmt: skip
    print("ready", flush=True)  # the client connects with retries: the call below does not return
    rpc.ggml_backend_rpc_start_server(job["address"].encode(), None, job["threads"], 1, devices)


class Peer:
    """One context with a sequence a user."""

    def __init__(self, job: dict[str, Any]) -> None:
        llama.llama_log_set(_quiet, None)
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        if job["servers"]:
            self._devices = self._rpc_devices(job["servers"])
            params.devices = ctypes.addressof(self._devices)
            params.n_gpu_layers = 999
        else:
            params.n_gpu_layers = 0
        self.model = llama.llama_model_load_from_file(job["model"].encode(), params)
        if not self.model:
            raise SystemExit("the model was not loaded")
        context = llama.llama_context_default_params()
        users = max(load["num_users"] for load in job["loads"])
        context.n_ctx = job["context_tokens"] * users
        context.n_seq_max = users
        context.n_batch = context.n_ubatch = MAX_BATCH
        context.n_threads = context.n_threads_batch = job["threads"]
        self.context = llama.llama_init_from_model(self.model, context)
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.num_vocab = llama.llama_vocab_n_tokens(self.vocab)
        self.batch = llama.llama_batch_init(MAX_BATCH, 0, 1)
        self.text = job["text"]

    @staticmethod
    def _rpc_devices(servers: list[str]) -> Any:
        ggml, rpc = library("ggml"), library("ggml-rpc")
        rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
        ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
        base = library("ggml-base")
        base.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
        base.ggml_backend_reg_dev_get.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        devices = []
        for server in servers:
            registry = rpc.ggml_backend_rpc_add_server(server.encode())
            if not registry:
                raise SystemExit(f"no RPC server at {server}")
            ggml.ggml_backend_register(registry)
            devices.append(base.ggml_backend_reg_dev_get(registry, 0))
        return (ctypes.c_void_p * (len(devices) + 1))(*devices, None)

    def encode(self, text: str) -> list[int]:
        data = text.encode()
        out = (llama.llama_token * (len(data) + 8))()
        count = llama.llama_tokenize(self.vocab, data, len(data), out, len(out), True, False)
        return list(out[:count])

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Rows of (token, position, sequence, wanted); returns the greedy token of each wanted row."""
        for index, (token, position, sequence, wanted) in enumerate(rows):
            self.batch.token[index] = token
            self.batch.pos[index] = position
            self.batch.n_seq_id[index] = 1
            self.batch.seq_id[index][0] = sequence
            self.batch.logits[index] = wanted
        self.batch.n_tokens = len(rows)
        if llama.llama_decode(self.context, self.batch):
            raise SystemExit("llama_decode failed")
        picked = []
        for index, row in enumerate(rows):
            if row[3]:
                logits = llama.llama_get_logits_ith(self.context, index)
                picked.append(int(np.argmax(np.ctypeslib.as_array(logits, shape=(self.num_vocab,)))))
        return picked

    def run(self, load: dict[str, Any], output_tokens: int) -> Iterator[UserTimes]:
        """All users in one batch, as llama.cpp's server does it."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        prompts = [cut_prompt(self.text, self.encode, load["prompt_tokens"], user) for user in range(load["num_users"])]
        users = [UserTimes() for _ in prompts]
        last: list[int] = []
        for number, prompt in enumerate(prompts):
            picked: list[int] = []
            for start in range(0, len(prompt), MAX_BATCH):
                part = prompt[start : start + MAX_BATCH]
                rows = [(token, start + i, number, start + i == len(prompt) - 1) for i, token in enumerate(part)]
                picked = self.decode(rows)
            users[number].token(picked[0])
            last.append(picked[0])
        for step in range(1, output_tokens):
            rows = [(last[n], len(prompts[n]) + step - 1, n, True) for n in range(len(prompts))]
            last = self.decode(rows)
            for user, token in zip(users, last):
                user.token(token)
        yield from users


def main() -> None:
    job = read_job()
    if sys.argv[1] == "serve":
        serve(job)
        return
    peer = Peer(job)
    say({"loaded": True})
    measure(job, peer.run)


if __name__ == "__main__":
    main()
