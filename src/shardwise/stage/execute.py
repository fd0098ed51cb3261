"""One step of a stage: gather the rows of a batch, compute, and send what comes out.

Shapes: T rows of the batch, H hidden size, S sampled rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.errors import ShardwiseError, UsageError
from shardwise.stage.backend import BatchSegment, Floats
from shardwise.stage.batcher import Item
from shardwise.stage.sessions import StageSession
from shardwise.transport.messages import Sampled, Segment, Step, Visit

if TYPE_CHECKING:
    from shardwise.stage.worker import StageWorker

WIRE_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}


class Executor:
    """Runs batches for one worker."""

    def __init__(self, worker: StageWorker) -> None:
        self._worker = worker
        self._wire = WIRE_DTYPES[worker.config.wire_dtype]

    def unpack(self, step: Step, payload: memoryview | None) -> Floats:
        """Activations [T, H] of a received step; `UsageError` where it contradicts itself or this stage."""
        rows = sum(segment.num_tokens for segment in step.segments)
        hidden = self._worker.backend.hidden_size
        dtype = WIRE_DTYPES.get(step.dtype)
        if dtype != self._wire or step.hidden != hidden or rows > self._worker.backend.max_rows:
            raise UsageError(
                f"a step of {rows} x {step.hidden} {step.dtype}", where="wire", hint=f"expected x {hidden} {self._wire}"
            )
        if payload is None or len(payload) != rows * hidden * self._wire.itemsize:
            raise UsageError(f"a step of {rows} rows with {len(payload or b'')} bytes", where="wire")
        return np.frombuffer(payload, dtype=self._wire).reshape(rows, hidden)

    def run(self, items: list[Item]) -> None:
        """Compute a batch and pass it on. Errors leave the sessions' positions as they were."""
        worker = self._worker
        paired = [(item, session) for item in items if (session := worker.sessions.get(item.segment.session)) is not None]
        if not paired:
            return
        paired.sort(key=lambda pair: pair[1].slot)
        started_s = worker.clock.now_s()
        x_TH = self._gather([item for item, _ in paired])
        gathered_s = worker.clock.now_s()
        segments = [BatchSegment(s.slot, i.segment.position, i.segment.num_tokens, i.segment.sample) for i, s in paired]
        output = worker.backend.forward(segments, x_TH)
        computed_s = worker.clock.now_s()
        for item, session in paired:
            session.next_position = item.segment.position + item.segment.num_tokens
        if output.logits_SV is not None:
            self._sample(paired, output.logits_SV, (started_s, computed_s))
        elif output.activations_TH is not None:
            self._pass_on([item for item, _ in paired], output.activations_TH, (started_s, gathered_s, computed_s))
        self._count(paired, started_s, gathered_s, computed_s)

    def _gather(self, items: list[Item]) -> Floats:
        if items[0].x_TH is None:
            tokens_T = np.array([t for item in items for t in item.tokens], dtype=np.int32)
            return self._worker.backend.embed(tokens_T)
        parts = [item.x_TH for item in items if item.x_TH is not None]
        x_TH = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return x_TH.astype(np.float32, copy=False)

    def _pass_on(self, items: list[Item], out_TH: Floats, times_s: tuple[float, float, float]) -> None:
        worker = self._worker
        copy_started_s = worker.clock.now_s()
        payload = np.ascontiguousarray(out_TH, dtype=self._wire).data.cast("B")
        sent_s = worker.clock.now_s()
        prefill = items[0].segment.num_tokens > 1
        copy_s = sent_s - copy_started_s + times_s[1] - times_s[0]
        step = Step(
            segments=tuple(item.segment for item in items),
            dtype=worker.config.wire_dtype,
            hidden=out_TH.shape[1],
            sent_s=sent_s,
            visits=self._visits(items, times_s[0], times_s[2], sent_s, copy_s),
        )
        size = worker.links.to_next(step, payload, prefill=prefill)
        self._keep(items, payload)
        worker.figures.copy.add(copy_s)
        if not prefill:
            worker.figures.decode_sent_bytes += size
            worker.figures.decode_steps_sent += len(items)

    def _keep(self, items: list[Item], payload: memoryview) -> None:
        """Log what was sent, segment by segment."""
        row_bytes = len(payload) // sum(item.segment.num_tokens for item in items)
        start = 0
        for item in items:
            end = start + item.segment.num_tokens * row_bytes
            self._worker.sent_log.append(item.segment, payload[start:end])
            start = end

    def _visits(
        self, items: list[Item], started_s: float, computed_s: float, sent_s: float, copy_s: float
    ) -> tuple[tuple[Visit, ...], ...]:
        """Each item's own trace so far and this stage's part of it, where its session asked for it."""
        if not any(item.segment.traced for item in items):
            return ()
        rows = sum(item.segment.num_tokens for item in items)

        def here(received_s: float) -> Visit:
            return Visit(
                stage=self._worker.config.stage,
                received_s=received_s,
                started_s=started_s,
                computed_s=computed_s,
                sent_s=sent_s,
                rows=rows,
                copy_s=copy_s,
            )

        return tuple((*item.visits, here(item.received_s)) if item.segment.traced else () for item in items)

    def _sample(self, paired: list[tuple[Item, StageSession]], logits_SV: Floats, times_s: tuple[float, float]) -> None:
        worker = self._worker
        wanted = [(item, session) for item, session in paired if item.segment.sample]
        out: list[Sampled] = []
        for (item, session), logits_V in zip(wanted, logits_SV, strict=True):
            assert session.sampler is not None
            position = item.segment.position + item.segment.num_tokens
            if position < len(session.history):
                continue  # a row of a refill: its token is known
            try:
                choice = session.sampler.choose(logits_V, session.history, position)
            except ShardwiseError as error:  # this session's own: the others of the batch go on
                worker.give_up(error, item.segment)
                continue
            session.history.append(choice.token)
            sent_s = worker.clock.now_s()
            out.append(
                Sampled(
                    session=item.segment.session,
                    epoch=item.segment.epoch,
                    position=position,
                    token=choice.token,
                    finish=self._finish(session, choice.token, position),
                    logprob=choice.logprob,
                    top=choice.top,
                    sent_s=sent_s,
                    visits=next(iter(self._visits([item], times_s[0], times_s[1], sent_s, 0.0)), ()),
                )
            )
        for sampled in out:
            if not sampled.finish:
                self._around_the_ring(sampled)
        if not worker.links.muted:
            for sampled in out:
                worker.links.to_driver(sampled)

    def _around_the_ring(self, sampled: Sampled) -> None:
        worker = self._worker
        if not worker.is_first:
            worker.figures.decode_sent_bytes += worker.links.to_first(
                Sampled(
                    session=sampled.session,
                    epoch=sampled.epoch,
                    position=sampled.position,
                    token=sampled.token,
                    sent_s=sampled.sent_s,
                )
            )
            worker.figures.decode_steps_sent += 1
            return
        segment = Segment(
            session=sampled.session,
            epoch=sampled.epoch,
            position=sampled.position,
            num_tokens=1,
            sample=True,
            traced=bool(sampled.visits),
        )
        worker.enqueue(Item(segment, None, (sampled.token,), worker.clock.now_s()))

    def _finish(self, session: StageSession, token: int, position: int) -> str:
        if token in session.opened.stop_ids:
            return "stop"
        full = position + 1 >= self._worker.config.settings.context_tokens
        return "length" if full or session.num_generated >= session.opened.max_tokens else ""

    def _count(self, paired: list[tuple[Item, StageSession]], started_s: float, gathered_s: float, computed_s: float) -> None:
        figures = self._worker.figures
        for item, _ in paired:
            figures.queue.add(started_s - item.received_s)
        if paired[0][0].segment.num_tokens > 1:
            figures.prefill.add(computed_s - gathered_s)
            figures.prefill_tokens += sum(item.segment.num_tokens for item, _ in paired)
        else:
            figures.decode.add(computed_s - gathered_s)
            self._worker.batcher.row_times.add(len(paired), computed_s - gathered_s)
            figures.decode_rows += len(paired)
