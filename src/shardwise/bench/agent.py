"""The measuring process inside a host: deploys, sends requests, writes down every token. `python -m shardwise.bench.agent`.

One `AgentJob` on standard input, `AgentWord` lines on standard output. It stands where the user's own program would
stand, on the first stage's host, so that the way of the tokens to the user is measured too.

**Promises** one word a case, even when the case fails; workers end with this process. **Fails when** the deployment
does not come up: one `error` word. **Called by** `deployment_runner`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import threading
from collections.abc import Sequence

from shardwise.bench.agent_records import AgentJob, AgentWord, Way, WayWanted
from shardwise.bench.environment import iso_now, load_1min, machine_s
from shardwise.bench.parts import refine_offsets, stage_label, to_common_clock, token_parts
from shardwise.bench.prompts import prompt_ids
from shardwise.bench.result import (
    BoundaryFigures,
    Case,
    ClockOffset,
    Recovery,
    RequestResult,
    StageFigures,
    StageVisit,
    TokenTrace,
    TrialError,
    TrialEvent,
    TrialResult,
)
from shardwise.clock import SystemClock
from shardwise.deploy import Deployment, Placement, RunOptions, launch
from shardwise.errors import ReplyTimeout, ShardwiseError
from shardwise.records import from_json, to_json
from shardwise.session.request import GenerationRequest, Token
from shardwise.transport.faults import Fault, FaultClock, FaultPlan
from shardwise.transport.messages import Quantiles, Stats

_CLOCK = SystemClock()
_REQUEST_TIMEOUT_S = 300.0
_TICK_S = 0.02


def say(word: AgentWord) -> None:
    """One line to the bench."""
    sys.stdout.buffer.write(to_json(word) + b"\n")
    sys.stdout.buffer.flush()


class Ways:
    """A `session.peers.Route` through the lab's relays, which the bench has. Asked by two threads, one at a time."""

    def __init__(self, job: AgentJob) -> None:
        self._nodes = [place.node for place in job.places]
        self._asking_host = job.cases[0].asking_host
        self._lock = threading.Lock()

    def __call__(self, source: int, target: int, address: str) -> str:
        scheme, _, port = address.rpartition(":")
        asked = WayWanted(source=self._host(source), target=self._host(target), port=int(port))
        if asked.source == asked.target:
            return address
        with self._lock:
            say(AgentWord(way=asked))
            way = from_json(sys.stdin.buffer.readline(), Way, where="standard input")
        return f"{scheme.rpartition('/')[0]}/{way.host}:{way.port}"

    def _host(self, stage: int) -> str:
        return self._nodes[stage] if 0 <= stage < len(self._nodes) else self._asking_host


class UserRun:
    """One user's request: collects arrival times in the driver's thread."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.started_s = _CLOCK.now_s()
        self.arrived_s: list[float] = []
        self.tokens: list[Token] = []
        self.error: ShardwiseError | None = None
        self.ended = threading.Event()

    def on_event(self, event: Token | ShardwiseError) -> None:
        if isinstance(event, ShardwiseError):
            self.error = event
            self.ended.set()
            return
        self.arrived_s.append(_CLOCK.now_s())
        self.tokens.append(event)
        if event.finish_reason:
            self.ended.set()

    def result(self, prompt_tokens: int) -> RequestResult:
        """What the user saw."""
        gaps = [later - earlier for earlier, later in zip(self.arrived_s, self.arrived_s[1:])]
        ids = b",".join(str(token.id).encode() for token in self.tokens)
        return RequestResult(
            prompt_tokens=prompt_tokens,
            num_tokens=len(self.tokens),
            time_to_first_token_s=round(self.arrived_s[0] - self.started_s, 7) if self.arrived_s else 0.0,
            inter_token_s=tuple(round(gap, 7) for gap in gaps),
            finish_reason=self.tokens[-1].finish_reason if self.tokens else "none",
            token_digest=hashlib.sha256(ids).hexdigest(),
        )


class Agent:
    """One deployment and its cases."""

    def __init__(self, job: AgentJob, deployment: Deployment) -> None:
        self._job, self._deployment = job, deployment
        self._nodes = [place.node for place in job.places]

    def measure(self, case: Case) -> TrialResult:
        """Warm up, then one repetition of a case."""
        for _ in range(self._job.warm_up):
            self._users(case, min(8, case.output_tokens), ())
        self._deployment.stats(reset=True)
        before_s = machine_s()
        started, start_s = iso_now(), _CLOCK.now_s()
        faults = [fault for name in case.faults for fault in self._job.faults[name]]
        num_earlier = len(self._deployment.recoveries)
        users, events = self._users(case, case.output_tokens, tuple(faults))
        duration_s = _CLOCK.now_s() - start_s
        failed = next((user.error for user in users if user.error is not None), None)
        base = TrialResult(
            case=case,
            repetition=self._job.repetition,
            started=started,
            duration_s=round(duration_s, 4),
            requests=tuple(user.result(case.prompt_tokens) for user in users),
            recoveries=tuple(_recovery(found) for found in self._deployment.recoveries[num_earlier:]),
            events=tuple(events),
            load_1min=load_1min(),
            machine_s=round((before_s + machine_s()) / 2, 6),
            error=TrialError(type=type(failed).__name__, message=failed.one_line()) if failed else None,
        )
        return base if failed else self._with_figures(base, users)

    def _users(self, case: Case, max_tokens: int, faults: Sequence[Fault]) -> tuple[list[UserRun], list[TrialEvent]]:
        users = []
        for number in range(case.num_users):
            ids = prompt_ids(self._deployment.tokenizer, case.prompt_tokens, number)
            request = GenerationRequest(prompt=ids, max_tokens=max_tokens, ignore_eos=True, traced=True)
            user = UserRun(number)
            users.append(user)
            self._deployment.submit(request, user.on_event)
        events = FaultActor(self._deployment, faults, users).run()
        for user in users:
            if not user.ended.wait(_REQUEST_TIMEOUT_S):
                raise ReplyTimeout(f"a request of {case.key} did not end within {_REQUEST_TIMEOUT_S:.0f} s", where="bench")
        return users, events

    def _with_figures(self, base: TrialResult, users: list[UserRun]) -> TrialResult:
        stats = self._deployment.stats()
        raw = [trace for user in users for trace in _traces(user)]
        offsets = refine_offsets(raw, self._offsets(), self._nodes)
        # Nobody can tell an unequal way there and back from clocks that differ; where all hosts have one clock, it is used.
        traces = raw if self._job.shared_clock else to_common_clock(raw, offsets, self._nodes)
        kept = [trace for trace in traces if trace.user < 2 and 1 < trace.number <= 1 + self._job.trace_tokens]
        return TrialResult(
            **{name: getattr(base, name) for name in base.__struct_fields__ if name not in _FIGURES},
            stages=self._stages(stats),
            boundaries=self._boundaries(stats),
            tokens=tuple(_from_zero(kept)),
            parts=token_parts([trace for trace in traces if trace.number > 1], self._nodes),
            parts_measured_s=_measured_s(users),
            clock_offsets=offsets,
        )

    def _offsets(self) -> list[ClockOffset]:
        driver = self._deployment.driver
        return [
            ClockOffset(node=stage_label(stage, self._nodes), offset_s=offset, error_s=driver.clock_error_s.get(stage, 0.0))
            for stage, offset in sorted(driver.clock_offset_s.items())
        ]

    def _stages(self, stats: list[Stats]) -> tuple[StageFigures, ...]:
        figures = []
        for status, stat, place in zip(self._deployment.stages, stats, self._job.places):
            figures.append(
                StageFigures(
                    node=place.node,
                    pid=status.pid,
                    layers=status.layers,
                    weight_bytes=status.weight_bytes,
                    kv_bytes=status.kv_bytes,
                    peak_memory_bytes=stat.peak_memory_bytes,
                    memory_limit_bytes=place.memory_limit_bytes,
                    compute_s={
                        "prefill_total": stat.prefill.total,
                        "decode_p50": stat.decode.p50,
                        "decode_p95": stat.decode.p95,
                        "decode_rows": float(stat.decode_rows),
                    },
                    wait_s=_quantiles(stat.wait),
                    queue_s=_quantiles(stat.queue),
                )
            )
        return tuple(figures)

    def _boundaries(self, stats: list[Stats]) -> tuple[BoundaryFigures, ...]:
        labels = [stage_label(number, self._nodes) for number in range(len(self._nodes))]
        last = len(labels) - 1
        hidden = self._deployment.model.hidden_size
        found = []
        for number, stat in enumerate(stats):
            if last == 0:
                continue
            after = (number + 1) % len(labels)
            is_ring = number == last
            found.append(
                BoundaryFigures(
                    source=labels[number],
                    target=labels[after],
                    shape=(1,) if is_ring else (1, hidden),
                    dtype="i32" if is_ring else self._job.wire_dtype,
                    bytes_per_token=stat.decode_sent_bytes / max(1, stat.decode_steps_sent),
                    transfer_s=_quantiles(stats[after].transfer),
                    copy_s={"p50": stat.copy.p50},
                    sync_wait_s=_quantiles(stats[after].wait),
                )
            )
        return tuple(found)


_FIGURES = {"stages", "boundaries", "tokens", "parts", "parts_measured_s", "clock_offsets"}


def _quantiles(values: Quantiles) -> dict[str, float]:
    return {"p50": values.p50, "p95": values.p95, "p99": values.p99}


def _recovery(found: object) -> Recovery:
    names = ("at_token", "cause", "action", "stall_s", "grade")
    return Recovery(**{name: getattr(found, name) for name in names if hasattr(found, name)})


def _measured_s(users: Sequence[UserRun]) -> float:
    """Mean gap between the tokens of `parts`: pass i (from 2) begins when token i-1 is there; the last has no successor."""
    spans = [(user.arrived_s[-2] - user.arrived_s[1], len(user.arrived_s) - 3) for user in users if len(user.arrived_s) > 3]
    num_gaps = sum(count for _, count in spans)
    return sum(span_s for span_s, _ in spans) / num_gaps if num_gaps else 0.0


def _traces(user: UserRun) -> list[TokenTrace]:
    return [
        TokenTrace(
            number=number,
            user=user.number,
            arrived_s=arrived_s,
            visits=tuple(
                StageVisit(
                    stage=visit.stage,
                    received_s=visit.received_s,
                    started_s=visit.started_s,
                    computed_s=visit.computed_s,
                    sent_s=visit.sent_s,
                    copy_s=visit.copy_s,
                )
                for visit in token.visits
            ),
        )
        for number, (token, arrived_s) in enumerate(zip(user.tokens, user.arrived_s))
        if token.visits
    ]


def _from_zero(traces: Sequence[TokenTrace]) -> list[TokenTrace]:
    """The same with the first arrival at a stage as second 0."""
    zero_s = min((visit.received_s for trace in traces for visit in trace.visits), default=0.0)

    def moved(visit: StageVisit) -> StageVisit:
        times = {name: round(getattr(visit, name) - zero_s, 7) for name in ("received_s", "started_s", "computed_s", "sent_s")}
        return StageVisit(stage=visit.stage, copy_s=visit.copy_s, **times)

    return [
        TokenTrace(
            number=t.number, user=t.user, arrived_s=round(t.arrived_s - zero_s, 7), visits=tuple(moved(v) for v in t.visits)
        )
        for t in traces
    ]


_SIGNALS = {"kill": signal.SIGKILL, "version_mismatch": signal.SIGKILL, "restart": signal.SIGTERM}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # recovery may have replaced it by now
        os.kill(pid, number)


class FaultActor:
    """Carries out the faults of a trial: signals here, the network through the bench."""

    def __init__(self, deployment: Deployment, faults: Sequence[Fault], users: Sequence[UserRun]) -> None:
        self._deployment, self._users = deployment, users
        self._clock = FaultClock(FaultPlan(faults=tuple(faults)))
        self._events: list[TrialEvent] = []
        self._resume: list[tuple[float, int]] = []  # when to continue which process

    def run(self) -> list[TrialEvent]:
        """Until no fault is left and every stopped process runs again, or all users are done."""
        start_s = self._users[0].started_s
        while not (self._clock.exhausted and not self._resume) and not all(user.ended.is_set() for user in self._users):
            elapsed_s = _CLOCK.now_s() - start_s
            tokens = len(self._users[0].tokens)
            for fault in self._clock.due(elapsed_s=elapsed_s, num_tokens=tokens, prefilling=tokens == 0):
                self._act(fault, elapsed_s)
            self._continue_due(elapsed_s)
            _CLOCK.sleep(_TICK_S)
        self._continue_due(float("inf"))
        return self._events

    def _continue_due(self, elapsed_s: float) -> None:
        for at_s, pid in [item for item in self._resume if item[0] <= elapsed_s]:
            _signal(pid, signal.SIGCONT)
            self._events.append(TrialEvent(at_s=round(min(at_s, 1e9), 3), what="continued"))
        self._resume = [item for item in self._resume if item[0] > elapsed_s]

    def _act(self, fault: Fault, elapsed_s: float) -> None:
        self._events.append(TrialEvent(at_s=round(elapsed_s, 3), what=fault.describe()))
        pids = [stage.pid for stage in self._deployment.stages if fault.target in (stage.node, f"stage-{stage.index}")]
        if fault.kind in _SIGNALS:
            for pid in pids:
                _signal(pid, _SIGNALS[fault.kind])
        elif fault.kind == "stop":
            for pid in pids:
                _signal(pid, signal.SIGSTOP)
            self._resume += [(elapsed_s + fault.duration_s, pid) for pid in pids]
        else:
            say(AgentWord(fault=fault))


def run_job(job: AgentJob) -> None:
    """Deploy, measure every case, take down."""
    options = RunOptions(
        layers=job.layers,
        num_stages=len(job.places),
        context_tokens=job.context_tokens,
        max_sessions=max(case.num_users for case in job.cases),
        threads=job.num_threads,
        wire_dtype=job.wire_dtype,
        probe_interval_s=0.0,
    )
    places = [Placement(node=place.node, host=place.host, prefix=place.prefix) for place in job.places]
    route = Ways(job) if job.relayed else None
    with launch(job.model, options, placements=places, driver_host=job.driver_host, route=route) as deployment:
        agent = Agent(job, deployment)
        for case in job.cases:
            try:
                say(AgentWord(trial=agent.measure(case)))
            except ShardwiseError as error:
                failed = TrialError(type=type(error).__name__, message=error.one_line())
                trial = TrialResult(case=case, repetition=job.repetition, started=iso_now(), duration_s=0.0, error=failed)
                say(AgentWord(trial=trial))


def main() -> None:
    """Read the job, do it, report."""
    job = from_json(sys.stdin.buffer.readline(), AgentJob, where="standard input")
    try:
        run_job(job)
    except ShardwiseError as error:
        say(AgentWord(error=TrialError(type=type(error).__name__, message=error.one_line())))


if __name__ == "__main__":
    main()
