"""The seam between the stage worker and whatever computes layers.

The worker hands over a batch of rows (several sessions, consecutive positions each) with the stage's input, and gets
activations or, on the last stage, logits. Every implementation passes `tests/stage/backend_contract.py`.

Shapes: T rows of the batch, H hidden size, S rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardwise.records import Record
from shardwise.transport.messages import SamplingSettings, TokenLogprob

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchSegment:
    """Consecutive rows of one sequence; `slot` is the backend's number of the session, 0 <= slot < max_sessions."""

    slot: int
    position: int
    num_tokens: int
    sample: bool


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Exactly one of both: activations [T, H] in the order of the segments, or logits [S, V], and hidden [S, H] if asked."""

    activations_TH: Floats | None = None
    logits_SV: Floats | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen token with what was asked about it."""

    token: int
    logprob: float | None
    top: tuple[TokenLogprob, ...]


class MemoryFigures(Record):
    """Bytes."""

    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int


class TokenSampler(Protocol):
    """Chooses one session's tokens. The choice depends on the session's settings, the position and the tokens before it only."""

    def choose(self, logits_V: Floats, history: list[int], position: int) -> Choice:
        """The token at `position` from the logits [V] of the row before it; `history` is all tokens before it."""
        ...

    def close(self) -> None: ...


class StageBackend(Protocol):
    """Computes a run of layers for many sessions.

    Promises: rows are independent of other sessions' *content*; equal batches give equal bits; `rollback` forgets
    positions; a failed `forward` leaves the sessions as they were.
    Fails when: out of memory (`StageOutOfMemory`), a corrupt slice (`StageLoadFailed`), no room (`ContextFull`).
    """

    @property
    def hidden_size(self) -> int: ...

    @property
    def memory(self) -> MemoryFigures: ...

    @property
    def library(self) -> str:
        """Name, version and build, e.g. `llama.cpp 0.3.36 openblas`."""
        ...

    @property
    def max_rows(self) -> int:
        """Most rows of one `forward`."""
        ...

    @property
    def known_vocab_size(self) -> int:
        """Token ids that this stage takes or gives; 0 in the middle, where there are none."""
        ...

    def embed(self, tokens_T: Tokens) -> Floats:
        """Token embeddings [T, H] as layer 0 wants them; first stage only."""
        ...

    def forward(self, segments: list[BatchSegment], x_TH: Floats) -> StageOutput:
        """Run the layers over one batch."""
        ...

    def sampler(self, settings: SamplingSettings, generated: tuple[int, ...] = ()) -> TokenSampler:
        """For a session that has generated these tokens already; last stage only. `UsageError` for settings it cannot serve."""
        ...

    def rollback(self, slot: int, position: int) -> None:
        """Forget everything from `position` on; 0 frees the slot."""
        ...

    def export_kv(self, slot: int) -> bytes:
        """The slot's KV state."""
        ...

    def import_kv(self, slot: int, state: bytes) -> int:
        """Restore a KV state; returns the number of positions it holds."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...
