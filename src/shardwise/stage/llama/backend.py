"""LlamaCppBackend: a slice (a GGUF with fewer layers) computed by llama.cpp.

Data: activations [T, H] in through `llama_batch.embd`; activations of the last layer out through a `LayerTap`, or logits
[S, V] on the last stage. One llama.cpp sequence per slot, each with a KV stream of its own (`kv_unified` off), so that
where a session's keys lie in memory, and with that every bit of its result, does not depend on other sessions.

Fails with `StageLoadFailed` (slice unreadable), `StageOutOfMemory` (does not fit, said before loading), `ContextFull`,
and `RemoteFailure` where llama.cpp reports a computation error.
"""

from __future__ import annotations

import ctypes
import functools
import gc
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.errors import ContextFull, RemoteFailure, StageLoadFailed, StageOutOfMemory
from shardwise.memory import available_bytes
from shardwise.processors import default_threads
from shardwise.shards.stage_paths import StageFiles
from shardwise.stage.backend import BatchSegment, Floats, MemoryFigures, StageOutput, Tokens
from shardwise.stage.llama import library
from shardwise.stage.llama.row_order import graph_order
from shardwise.stage.llama.sampling import Sampler
from shardwise.stage.llama.tap import LayerTap
from shardwise.stage.llama.vocabulary import OpenFile, Vocabulary, leave_out_vocabulary
from shardwise.stage.settings import BackendSettings
from shardwise.transport.messages import SamplingSettings

if TYPE_CHECKING:
    from shardwise.stage.llama.embedding import TokenEmbedding

KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q4_0": 2, "bf16": 30}


class LlamaCppBackend:
    """One stage; see `StageBackend` for the contract."""

    def __init__(self, files: StageFiles, settings: BackendSettings, *, main_quantization: str = "") -> None:
        self._api = library.load()
        self.blas = library.choose_blas(settings.blas, main_quantization)
        self.files, self.settings = files, settings
        self.is_last = files.end == files.num_layers
        self._check_memory(files)
        library.take_log()
        library.take_buffers()
        self._embedding = self._load_embedding(files.embedding) if files.embedding else None
        self._weights_file = OpenFile(files.weights)
        self._model = self._load_model()
        self._tap = self._make_tap(files)
        self._context = self._make_context()
        library.take_log()  # warnings of loading belong to no later error
        self._memory = self._api.llama_get_memory(self._context)
        self._hidden = int(self._api.llama_model_n_embd(self._model))
        own_vocab = self._api.llama_model_get_vocab(self._model)  # of a size only, where `files` told it
        self.vocab_size = int(self._api.llama_vocab_n_tokens(own_vocab)) if self.is_last else 0
        self._rows = settings.chunk_tokens if settings.chunk_tokens >= settings.max_sessions else settings.max_sessions
        self._batch, self._input_TH = self._make_batch()
        self._figures = self._memory_figures()

    # -- loading ------------------------------------------------------------------------------------------------

    def _check_memory(self, files: StageFiles) -> None:
        available = available_bytes()
        if files.weight_bytes > available and self.settings.gpu_layers == 0:
            raise StageOutOfMemory(
                f"layers {files.start}..{files.end - 1} need {files.weight_bytes} bytes, {available} are free",
                where=files.weights,
                hint="give this machine fewer layers or use a smaller quantization",
                needed_bytes=files.weight_bytes,
                available_bytes=available,
            )

    def _load_embedding(self, path: str) -> TokenEmbedding:
        from shardwise.stage.llama.embedding import TokenEmbedding  # only the first stage reads GGUF headers by itself

        return TokenEmbedding(path)

    def _load_model(self) -> Any:
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = self.settings.gpu_layers
        params.load_mode = self._api.LLAMA_LOAD_MODE_MMAP if self.settings.use_mmap else self._api.LLAMA_LOAD_MODE_NONE
        size = self.files.vocab_size
        overrides = leave_out_vocabulary(params, self.files.architecture, size) if self.is_last and size else None
        model = self._api.llama_model_load_from_file(self.files.weights.encode(), params)
        del overrides
        if not model:
            raise StageLoadFailed(f"llama.cpp refused the slice: {library.take_log()}", where=self.files.weights)
        return model

    def _make_context(self) -> Any:
        settings, params = self.settings, self._api.llama_context_default_params()
        params.n_ctx = settings.context_tokens * settings.max_sessions
        params.n_seq_max = settings.max_sessions
        params.n_batch = params.n_ubatch = max(settings.chunk_tokens, settings.max_sessions)
        params.n_threads = params.n_threads_batch = settings.threads or default_threads(settings.stages_here)
        params.type_k = params.type_v = KV_TYPES[settings.kv_type]
        params.kv_unified = False
        params.no_perf = True
        params.op_offload = False
        params.swa_full = True  # otherwise positions could not be rolled back in models with sliding windows
        if self._tap is not None:
            params.cb_eval, params.cb_eval_user_data = self._tap.callback, self._tap.user_data
        if self.is_last:
            params.n_outputs_max = settings.max_sessions
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise StageOutOfMemory(f"llama.cpp could not make a context: {library.take_log()}", where=self.files.weights)
        return context

    def _memory_figures(self) -> MemoryFigures:
        buffers = library.take_buffers()
        embedding = self._embedding.num_bytes if self._embedding else 0
        return MemoryFigures(
            weight_bytes=int(self._api.llama_model_size(self._model))
            + (embedding if self.files.embedding != self.files.weights else 0),
            kv_bytes=buffers.get("KV", 0) + buffers.get("RS", 0),
            workspace_bytes=buffers.get("compute", 0) + buffers.get("output", 0),
        )

    def _make_tap(self, files: StageFiles) -> LayerTap | None:
        output = "" if self.is_last else files.output_node
        return LayerTap(self._api, output, files.input_node or "") if output or files.input_node else None

    def _make_batch(self) -> tuple[Any, Floats]:
        """A batch and the place of its input [T, H]; for `input_batch` "tokens" every row is token 0, to be overwritten."""
        if self.files.input_batch == "embeddings":
            batch = self._api.llama_batch_init(self._rows, self._hidden, 1)
            return batch, np.ctypeslib.as_array(batch.embd, shape=(self._rows, self._hidden))
        batch = self._api.llama_batch_init(self._rows, 0, 1)
        np.ctypeslib.as_array(batch.token, shape=(self._rows,))[:] = 0
        return batch, np.empty((self._rows, self._hidden), dtype=np.float32)

    # -- StageBackend -------------------------------------------------------------------------------------------

    @property
    def hidden_size(self) -> int:
        return self._hidden

    @property
    def memory(self) -> MemoryFigures:
        return self._figures

    @property
    def library(self) -> str:
        return library.describe()

    @property
    def max_rows(self) -> int:
        """Most rows of one batch."""
        return self._rows

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """With all texts; last stage only. Read when it is first asked for; `StageLoadFailed` where it is not the weights'."""
        found = Vocabulary(self._weights_file.name)
        if found.num_tokens != self.vocab_size:
            raise StageLoadFailed(
                f"the tokenizer has {found.num_tokens} tokens, the head {self.vocab_size} rows", where=self.files.weights
            )
        return found

    @property
    def known_vocab_size(self) -> int:
        """Token ids that this stage can take or give; 0 in the middle, where there is no vocabulary."""
        return self.vocab_size or (self._embedding.vocab_size if self._embedding is not None else 0)

    def embed(self, tokens_T: Tokens) -> Floats:
        if self._embedding is None:
            raise StageLoadFailed("only the first stage has the token embedding", where=self.files.weights)
        return self._embedding.lookup(tokens_T)

    def forward(self, segments: list[BatchSegment], x_TH: Floats) -> StageOutput:
        rows = self._fill(segments, x_TH)
        order = graph_order([s.num_tokens for s in segments], [s.slot for s in segments]) if len(segments) > 1 else None
        if self._tap is not None:
            self._tap.begin(self._input_TH[:rows] if order is None else self._input_TH[order])
        code = self._api.llama_decode(self._context, self._batch)
        if code == 1:
            raise ContextFull("no room in the KV cache", where=f"slots {[s.slot for s in segments]}")
        if code != 0:
            for segment in segments:
                self.rollback(segment.slot, segment.position)
            raise RemoteFailure(f"llama_decode failed with {code}: {library.take_log()}", where=self.files.weights)
        if self._tap is None or self.is_last:
            return StageOutput(logits_SV=self._logits(segments))
        out_TH = self._tap.take()
        if out_TH.shape != (rows, self._hidden):
            raise RemoteFailure(f"the graph gave {out_TH.shape} activations for {rows} rows", where=self.files.weights)
        if order is not None:
            out_TH = out_TH[np.argsort(order)]
        return StageOutput(activations_TH=out_TH)

    def _fill(self, segments: list[BatchSegment], x_TH: Floats) -> int:
        """Lay rows out as llama.cpp wants them: a row a token, sequences in ascending order."""
        batch, row = self._batch, 0
        scale = self.files.input_scale
        for segment in segments:
            last = row + segment.num_tokens - 1
            for offset in range(segment.num_tokens):
                batch.pos[row] = segment.position + offset
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = segment.slot
                batch.logits[row] = not self.is_last or (segment.sample and row == last)
                row += 1
        np.copyto(self._input_TH[:row], x_TH if scale == 1.0 else x_TH * np.float32(scale))
        batch.n_tokens = row
        return row

    def _logits(self, segments: list[BatchSegment]) -> Floats:
        wanted, row = [], 0
        for segment in segments:
            row += segment.num_tokens
            if segment.sample:
                pointer = self._api.llama_get_logits_ith(self._context, row - 1)
                wanted.append(np.ctypeslib.as_array(pointer, shape=(self.vocab_size,)))
        if not wanted:
            self._api.llama_synchronize(self._context)
            return np.empty((0, self.vocab_size), dtype=np.float32)
        return np.stack(wanted)

    def sampler(self, settings: SamplingSettings, generated: tuple[int, ...] = ()) -> Sampler:
        return Sampler(settings, lambda: self.vocabulary.handle, self.vocab_size, generated)

    def rollback(self, slot: int, position: int) -> None:
        if not self._api.llama_memory_seq_rm(self._memory, slot, position, -1):
            self._api.llama_memory_seq_rm(self._memory, slot, -1, -1)
            if position > 0:
                raise RemoteFailure("this architecture cannot forget single positions", where=self.files.architecture)

    def export_kv(self, slot: int) -> bytes:
        size = self._api.llama_state_seq_get_size(self._context, slot)
        buffer = (ctypes.c_uint8 * size)()
        written = self._api.llama_state_seq_get_data(self._context, buffer, size, slot)
        if written != size:
            raise RemoteFailure(f"llama.cpp wrote {written} of {size} bytes of KV state", where=f"slot {slot}")
        return bytes(buffer)

    def import_kv(self, slot: int, state: bytes) -> int:
        self.rollback(slot, 0)
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if self._api.llama_state_seq_set_data(self._context, buffer, len(state), slot) == 0:
            self.rollback(slot, 0)
            raise RemoteFailure(f"the KV state does not fit this context: {library.take_log()}", where=f"slot {slot}")
        return int(self._api.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def close(self) -> None:
        if self._context:
            self._input_TH = np.empty((0, 0), dtype=np.float32)
            self._api.llama_batch_free(self._batch)
            self._api.llama_free(self._context)
            self._api.llama_model_free(self._model)
            self._context = self._model = None
            self._weights_file.close()
            gc.collect()
