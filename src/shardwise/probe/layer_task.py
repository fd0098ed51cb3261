"""What the layer probe's process is asked and answers: plain records over its standard input and output."""

from __future__ import annotations

from shardwise.records import Record
from shardwise.shards.stage_paths import StageFiles

DECODE_ROWS = (1, 2, 4, 8)
PREFILL_ROWS = (32, 64, 128, 256, 512)


class LayerTask(Record):
    """Time `long` and `short` with the same settings; their difference is `extra_layers` layers."""

    short: StageFiles
    long: StageFiles
    quantization: str
    threads: int
    decode_rows: tuple[int, ...] = DECODE_ROWS
    prefill_rows: tuple[int, ...] = PREFILL_ROWS
    budget_s: float = 6.0
    gpu_layers: int = 0
    kv_type: str = "f16"
    context_tokens: int = 0  # > 0: also time decode of one row after so many positions
    far_prefill_rows: int = 0  # > 0: also time a chunk of so many rows after `context_tokens` positions
    head: tuple[StageFiles, StageFiles] | None = None  # as many layers without and with the head: time it for `decode_rows`

    @property
    def extra_layers(self) -> int:
        return (self.long.end - self.long.start) - (self.short.end - self.short.start)


class RowSamples(Record):
    """Seconds of one layer for a step of `rows` rows."""

    rows: int
    layer_s: tuple[float, ...]


class LayerResult(Record):
    """All that was measured."""

    library: str
    blas: bool
    rows: tuple[RowSamples, ...]
    far_layer_s: tuple[float, ...] = ()  # of one row after `context_tokens` positions
    far_prefill_layer_s: tuple[float, ...] = ()  # of a chunk of `far_prefill_rows` rows there
    head: tuple[RowSamples, ...] = ()  # of the final norm and the output matrix, logits handed out
