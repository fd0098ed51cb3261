"""`python -m shardwise.probe.layer_process`: times layers through the real backend, in a process of its own.

A `LayerTask` comes on standard input, a `LayerResult` goes to standard output. A process each, because whether BLAS is
on is a matter of the whole process, and so that it is exactly what a stage worker would be. Each sample is the
difference of a longer and a shorter slice, timed one after the other: what is not a layer cancels out.
"""

from __future__ import annotations

import sys

import numpy as np

from shardwise.clock import SystemClock
from shardwise.errors import ShardwiseError
from shardwise.probe.layer_task import LayerResult, LayerTask, RowSamples
from shardwise.records import from_json, to_json
from shardwise.shards.stage_paths import StageFiles
from shardwise.stage.backend import BatchSegment
from shardwise.stage.llama.backend import LlamaCppBackend
from shardwise.stage.settings import BackendSettings

_LEAST_SAMPLES = 5
_MOST_SAMPLES = 200
_LEAST_PREFILL_SAMPLES = 2


class LayerTimer:
    """Two backends and one clock."""

    def __init__(self, task: LayerTask) -> None:
        self._task, self._clock = task, SystemClock()
        self._sessions = max(task.decode_rows, default=1)
        self._backends = [self._backend(files) for files in (task.short, task.long)]
        hidden = self._backends[0].hidden_size
        most = max(*task.decode_rows, *task.prefill_rows, 1)
        self._x_TH = np.random.default_rng(0).standard_normal((most, hidden), dtype=np.float32) * np.float32(0.5)

    def run(self) -> LayerResult:
        """Decode rows first (they matter most), then prefill from short to long while the budget lasts."""
        task = self._task
        count = len(task.decode_rows) + len(task.prefill_rows)
        end_s = self._clock.now_s() + task.budget_s
        found = []
        for rows in task.decode_rows:
            segments = [BatchSegment(slot=i, position=0, num_tokens=1, sample=False) for i in range(rows)]
            found.append(self._sample(segments, _LEAST_SAMPLES, task.budget_s / count))
        for index, rows in enumerate(task.prefill_rows):
            if index and self._clock.now_s() + _cost_s(found[-1]) * rows / found[-1].rows > end_s:
                break
            segment = BatchSegment(slot=0, position=0, num_tokens=rows, sample=False)
            found.append(self._sample([segment], _LEAST_PREFILL_SAMPLES, task.budget_s / count))
        library, blas = self._backends[1].library, self._backends[1].blas
        far, far_prefill = self._far()
        head = self._head()
        return LayerResult(
            library=library, blas=blas, rows=tuple(found), far_layer_s=far, far_prefill_layer_s=far_prefill, head=head
        )

    def _head(self) -> tuple[RowSamples, ...]:
        """The head for as many rows as decode has: equal layers with it and without."""
        if self._task.head is None:
            return ()
        self.close()
        self._backends = [self._backend(files) for files in self._task.head]
        share_s = self._task.budget_s / 2 / max(1, len(self._task.decode_rows))
        found = []
        for rows in self._task.decode_rows:
            segments = [BatchSegment(slot=i, position=0, num_tokens=1, sample=True) for i in range(rows)]
            found.append(self._sample(segments, _LEAST_SAMPLES, share_s, per=1))
        return tuple(found)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()

    def _backend(self, files: StageFiles) -> LlamaCppBackend:
        task = self._task
        most = max(*task.prefill_rows, 64) if task.prefill_rows else 64
        settings = BackendSettings(
            context_tokens=max(most, task.context_tokens + max(8, task.far_prefill_rows)),
            max_sessions=self._sessions,
            chunk_tokens=max(most, self._sessions),
            kv_type=task.kv_type,
            threads=task.threads,
            gpu_layers=task.gpu_layers,
        )
        return LlamaCppBackend(files, settings, main_quantization=task.quantization)

    def _sample(self, segments: list[BatchSegment], least: int, share_s: float, *, per: int = 0) -> RowSamples:
        """Differences per layer (or by `per`), at least `least`, then until `share_s` is over."""
        rows = sum(segment.num_tokens for segment in segments)
        self._pair(segments)
        samples: list[float] = []
        end_s = self._clock.now_s() + share_s
        while len(samples) < least or (self._clock.now_s() < end_s and len(samples) < _MOST_SAMPLES):
            short_s, long_s = self._pair(segments)
            samples.append(max(1e-9, (long_s - short_s) / (per or self._task.extra_layers)))
        return RowSamples(rows=rows, layer_s=tuple(samples))

    def _pair(self, segments: list[BatchSegment]) -> tuple[float, float]:
        short_s, long_s = (self._forward(backend, segments) for backend in self._backends)
        return short_s, long_s

    def _forward(self, backend: LlamaCppBackend, segments: list[BatchSegment]) -> float:
        rows = sum(segment.num_tokens for segment in segments)
        started_s = self._clock.now_s()
        backend.forward(segments, self._x_TH[:rows])
        took_s = self._clock.now_s() - started_s
        for segment in segments:
            backend.rollback(segment.slot, segment.position)
        return took_s

    def _far(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """One row, and a chunk, after many positions."""
        context = self._task.context_tokens
        if not context:
            return (), ()
        step = min(context, len(self._x_TH))
        for position in range(0, context, step):
            segment = BatchSegment(slot=0, position=position, num_tokens=min(step, context - position), sample=False)
            for backend in self._backends:
                backend.forward([segment], self._x_TH[: segment.num_tokens])
        far = [BatchSegment(slot=0, position=context, num_tokens=1, sample=False)]
        one = self._sample(far, _LEAST_SAMPLES, self._task.budget_s / 4).layer_s
        rows = self._task.far_prefill_rows
        if not rows:
            return one, ()
        chunk = [BatchSegment(slot=0, position=context, num_tokens=rows, sample=False)]
        return one, self._sample(chunk, _LEAST_PREFILL_SAMPLES, self._task.budget_s / 4).layer_s


def _cost_s(samples: RowSamples) -> float:
    """Rough seconds of one pair of steps with its least number of repetitions."""
    return min(samples.layer_s) * 5 * (_LEAST_PREFILL_SAMPLES + 1)


def main() -> int:
    """Answer one task."""
    try:
        task = from_json(sys.stdin.buffer.read(), LayerTask, where="standard input")
        timer = LayerTimer(task)
        result = timer.run()
        timer.close()
    except ShardwiseError as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        return error.exit_code
    sys.stdout.buffer.write(to_json(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
