"""Watches a deployment's workers and carries out what `session.recovery.next_action` decides.

    engine statuses, heartbeats, progress of stuck sessions -> Incident -> next_action -> promote | reconnect | restart |
    replan | fallback -> sessions go on

**Promises** a killed worker is noticed within `WATCH_INTERVAL_S`, a silent one as `liveness` says; one incident is treated
at a time; what cannot be recovered ends every session with `SessionLost`, within the policy's deadline.
**Called by** `Deployment`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from shardwise.clock import Clock
from shardwise.cluster.engine import ClusterEngine
from shardwise.deploy.liveness import BEAT_MISSED_S, CUT_OFF_CAP_S, Starvation, is_cut_off, judge
from shardwise.errors import CompatibilityError, CorruptWeightsError, ReplyTimeout, SessionLost, ShardwiseError
from shardwise.records import replace
from shardwise.session.broken import failure_of
from shardwise.session.driver import Driver
from shardwise.session.recovery import Available, Cause, Incident, RecoveryAction, RecoveryPolicy, next_action
from shardwise.session.slow import SlowStage, SlowWatch
from shardwise.transport.messages import ProgressRequest, StatsRequest

log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.05
LAST_WORD_S = 0.1  # a dying worker's own message may be on its way
LAG_FACTOR, MOST_LAG_S = 4.0, 3.0  # where this process itself gets no processor, its neighbours on the machine do not either
AFTER_CUT_S = 8.0  # TCP's next try after a cut of some seconds may be as many seconds away
STUCK_AFTER_S = 3.0  # without a token, before the stages are asked where they stand
STUCK_LOOKS = 3  # looks, one a second, without progress anywhere
STATS_EVERY_S = 5.0  # while sessions run: the measured times that predictions come from
REPLICA_LOOK_S = 2.0
LEAST_PATIENCE_S = 5.0  # for an action, and three times what the last start of a worker took


@dataclass(frozen=True, slots=True)
class Fault:
    """What was seen of which stage."""

    stage: int
    cause: Cause
    what: str
    silent_s: float = 0.0  # since its last sign of life


class Restarter(Protocol):
    """What the supervisor can have done to the deployment."""

    changing: threading.RLock  # held while workers change places
    start_s: float  # how long the last start of a worker took

    def restart_stage(self, stage: int, epoch: int, node: str) -> None:
        """Start the stage's worker anew with that epoch."""
        ...

    def recut(self, stage: int) -> None:
        """Cut the stage's slice from the model again."""
        ...

    def rebuild(self, action: RecoveryAction, what: str, timeout_s: float) -> None:
        """A new split over the survivors (`replan`), or the fallback model; returns when it serves."""
        ...

    def replica_promoted(self, stage: int) -> None:
        """The stage's replica takes its place: the names of the two workers change places."""
        ...

    def after_promotion(self, stage: int) -> None:
        """Start a new replica of the stage, where replicas are kept."""
        ...

    def dead_replicas(self) -> list[int]:
        """Stages whose replica should stand by and does not live."""
        ...

    def start_replica(self, stage: int) -> None:
        """Start the stage's replica anew."""
        ...

    def available(self, stage: int) -> Available:
        """What there is to recover with."""
        ...

    def worker_name(self, stage: int) -> str: ...


class Supervisor:
    """One thread."""

    def __init__(self, driver: Driver, engine: ClusterEngine, restarter: Restarter, policy: RecoveryPolicy, clock: Clock) -> None:
        self._driver, self._engine, self._restarter = driver, engine, restarter
        self._policy, self._clock = policy, clock
        self._stop = threading.Event()
        self._faults: list[Fault] = []
        self._faults_lock = threading.Lock()
        self._stuck_looks, self._lag_s = 0, 0.0
        self._cut_off, self._patient_until_s = False, 0.0
        self._last_progress: object = None
        self._next_look_s = self._next_stats_s = self._next_replica_look_s = 0.0
        self.incidents: list[Incident] = []
        self.slow: list[SlowStage] = []  # stages that compute much slower than they used to
        self._slow_watch = SlowWatch()
        self._starvation: dict[int, Starvation] = {}  # of stages that have missed a beat
        self.on_change: Callable[[str], None] = lambda what: None
        self.on_slow: Callable[[SlowStage], None] = lambda slow: None
        driver.on_stage_lost = self._from_driver
        driver.restoring.checkpoints.on_note = lambda what: self.on_change(what)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End watching."""
        self._stop.set()
        self._thread.join(timeout=10)

    def _look_for_slow(self) -> None:
        """From the figures of the last look; named once, when it begins."""
        known = {slow.stage for slow in self.slow}
        self.slow = self._slow_watch.take(dict(self._driver.latest_stats))
        for slow in self.slow:
            if slow.stage not in known:
                self.on_change(slow.sentence())
                self.on_slow(slow)

    def forget_history(self) -> None:
        """The split has changed: earlier times say nothing any more."""
        self._slow_watch, self.slow = SlowWatch(), []

    def _from_driver(self, stage: int, error: ShardwiseError) -> None:
        """A worker reported a failure of the whole stage, or takes no messages."""
        cause = Cause.CORRUPT if isinstance(error, CorruptWeightsError) else Cause.CRASHED
        cause = Cause.REFUSED if isinstance(error, CompatibilityError) else cause
        self.report(Fault(stage, cause, error.one_line()))

    # -- watching -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:  # a silent end would leave a deployment that nobody watches
            log.exception("the supervisor failed")
            self._end(failure_of("supervisor", error))

    def _watch(self) -> None:
        while not self._pause(WATCH_INTERVAL_S) and self._driver.failure is None:
            with self._restarter.changing:
                fault = self._find_fault()
                if fault is not None:
                    self._treat(fault)
                else:
                    self._look_after(self._clock.now_s())

    def _pause(self, seconds: float) -> bool:
        """Wait, and learn how late this process gets the processor back; whether to stop."""
        begun_s = self._clock.now_s()
        stopped = self._stop.wait(seconds)
        late_s = self._clock.now_s() - begun_s - seconds
        self._lag_s = min(MOST_LAG_S, max(late_s, 0.98 * self._lag_s))
        return stopped

    @property
    def patience_s(self) -> float:
        """What is added to every silence because this process itself gets no processor."""
        return min(MOST_LAG_S, LAG_FACTOR * self._lag_s)

    def report(self, fault: Fault) -> None:
        """Something was seen of a stage elsewhere."""
        with self._faults_lock:
            self._faults.append(fault)

    def _look_after(self, now_s: float) -> None:
        """Figures for predictions, and replicas that died."""
        if now_s >= self._next_stats_s and self._driver.open_sessions:
            self._next_stats_s = now_s + STATS_EVERY_S
            self._look_for_slow()
            self._driver.call(lambda: self._driver.peers.send_all(StatsRequest(sequence=0)))
        if now_s >= self._next_replica_look_s:
            self._next_replica_look_s = now_s + REPLICA_LOOK_S
            for stage in self._restarter.dead_replicas():
                self.on_change(f"replica of stage {stage} ended: started again")
                self._restarter.start_replica(stage)

    def _find_fault(self) -> Fault | None:
        stages = range(self._driver.num_stages)
        if (ended := self._find_ended(stages)) is not None:
            return ended
        if (told := self._find_told()) is not None:
            return told
        if not self._driver.connected:
            return None
        silent = self._find_silent(stages)
        return silent if silent is not None or self._cut_off else self._find_stuck(self._clock.now_s())

    def _find_told(self) -> Fault | None:
        """What workers reported; what explains most comes first."""
        with self._faults_lock:
            faults, self._faults = self._faults, []
        return next((fault for fault in faults if fault.cause is Cause.CORRUPT), faults[0] if faults else None)

    def _find_ended(self, stages: Iterable[int]) -> Fault | None:
        for stage in stages:
            status = self._engine.status(self._restarter.worker_name(stage))
            if not status.alive:
                self._stop.wait(LAST_WORD_S)
                with self._faults_lock:
                    words = [f for f in self._faults if f.stage == stage and f.cause in (Cause.CORRUPT, Cause.REFUSED)]
                if words:
                    return words[0]
                code = status.exit_status or 0
                how = f"signal {-code}" if code < 0 else f"status {status.exit_status}"
                tail = (status.log_tail.strip().splitlines() or ["no output"])[-1]
                cause = Cause.REFUSED if code == CompatibilityError.exit_code else Cause.CRASHED
                return Fault(stage, cause, f"worker ended with {how}: {tail}")
        return None

    def _find_silent(self, stages: Iterable[int]) -> Fault | None:
        """Silence counts up to the moment at which the driver last looked: its own pauses are nobody's fault."""
        looked_s = self._driver.looked_s
        silent_s = {stage: looked_s - self._driver.heard_s.get(stage, looked_s) for stage in stages}
        faults = []
        for stage, silence_s in silent_s.items():
            if silence_s < BEAT_MISSED_S:
                self._starvation.pop(stage, None)
            elif (fault := self._judge(stage, silence_s, looked_s)) is not None:
                faults.append(fault)
        self._cut_off = len(faults) > 0 and self._is_cut_off(silent_s, faults)
        if self._cut_off:
            self._patient_until_s = looked_s + AFTER_CUT_S
        elif looked_s < self._patient_until_s:  # connections come back one by one
            faults = [f for f in faults if f.cause is not Cause.SILENT or f.silent_s > CUT_OFF_CAP_S]
        return faults[0] if faults and not self._cut_off else None

    def _is_cut_off(self, silent_s: dict[int, float], faults: list[Fault]) -> bool:
        """Every stage fell silent at once: this side is cut off, and restarts would reach nobody."""
        if len(silent_s) < self._driver.num_stages:
            return False
        nodes = [self._engine.status(self._restarter.worker_name(stage)).node for stage in silent_s]
        cut_off = is_cut_off(silent_s, nodes, [fault.cause for fault in faults])
        if cut_off and not self._cut_off:
            self.on_change(f"nothing is heard of any stage for {max(silent_s.values()):.1f} s: waiting for the network")
        return cut_off

    def _judge(self, stage: int, silent_s: float, now_s: float) -> Fault | None:
        """One stage that has missed a beat: lost, or worth waiting for."""
        seen = self._engine.status(self._restarter.worker_name(stage)).scheduling
        starvation = self._starvation.setdefault(stage, Starvation())
        starvation.take(now_s, seen)
        verdict = judge(
            silent_s,
            self.patience_s,
            seen,
            starvation.share(now_s),
            overdue_s=self._overdue_s(now_s),
            hot=self._driver.peers.mirroring and stage in self._driver.peers.replicas,
        )
        return Fault(stage, verdict.cause, verdict.what, silent_s) if verdict is not None else None

    def _overdue_s(self, now_s: float) -> float:
        """By how much a step of any session has passed its deadline; sessions without a first token are not judged."""
        waiting_s = max((now_s - s.last_event_s for s in list(self._driver.open_sessions.values()) if s.generated), default=0.0)
        return max(0.0, waiting_s - self._driver.step_history.deadline_s)

    def _find_stuck(self, now_s: float) -> Fault | None:
        """Sessions without a token for long: ask every stage where it stands, and compare looks."""
        sessions = list(self._driver.open_sessions.values())
        waiting_s = max((now_s - s.last_event_s for s in sessions), default=0.0)
        if waiting_s < STUCK_AFTER_S or now_s < self._next_look_s:
            if waiting_s < STUCK_AFTER_S:
                self._stuck_looks, self._last_progress = 0, None
            return None
        self._next_look_s = now_s + 1.0
        progress = {stage: p.positions for stage, p in sorted(self._driver.progress.items())}
        tokens = tuple(len(s.generated) for s in sessions)
        seen = (progress, tokens)
        self._driver.call(lambda: self._driver.peers.send_all(ProgressRequest(sequence=0)))
        if seen != self._last_progress or len(progress) < self._driver.num_stages:
            self._stuck_looks, self._last_progress = 0, seen
            return None
        self._stuck_looks += 1
        if self._stuck_looks < STUCK_LOOKS:
            return None
        self._stuck_looks, self._last_progress = 0, None
        return Fault(self._behind(progress), Cause.STUCK, f"no progress for {waiting_s:.1f} s")

    def _behind(self, progress: dict[int, tuple[tuple[int, int], ...]]) -> int:
        """The first stage that lacks rows which its predecessor has computed; 0 where none does."""
        for stage in range(1, self._driver.num_stages):
            before, here = dict(progress[stage - 1]), dict(progress[stage])
            if any(here.get(session, 0) < position for session, position in before.items()):
                return stage
        return 0

    # -- treating -----------------------------------------------------------------------------------------------

    def _treat(self, fault: Fault) -> None:
        """One incident, until the stages stand again or nothing is left to try. Further stages that fail meanwhile join it."""
        started_s = self._clock.now_s()
        lost: dict[int, Incident] = {}
        while not self._stop.is_set() and self._driver.failure is None:
            elapsed_s = self._clock.now_s() - started_s
            incident = lost.get(fault.stage, Incident(cause=fault.cause, stage=fault.stage, silent_s=fault.silent_s))
            cause = Cause.CORRUPT if fault.cause is Cause.CORRUPT else incident.cause
            incident = replace(incident, elapsed_s=elapsed_s, cause=cause)
            action = next_action(incident, self._policy, self._restarter.available(fault.stage))
            self.on_change(f"stage {fault.stage} {fault.cause} ({fault.what}): {action.kind} {action.node}".strip())
            if action.kind == "give_up":
                self._give_up(action, fault.what)
                return
            lost[fault.stage] = replace(incident, tried=(*incident.tried, action.name))
            try:
                again = self.carry_out(action, f"{fault.cause}: {fault.what}", tuple(lost))
            except ShardwiseError as error:
                self.on_change(f"{action.kind} of stage {fault.stage} failed: {error.one_line()}")
                again = Fault(fault.stage, fault.cause, error.one_line())
            if again is None:
                self.incidents += lost.values()
                return
            fault = again

    def _give_up(self, action: RecoveryAction, what: str) -> None:
        error = SessionLost(f"{action.reason}: {what}", where=f"stage {action.stage}", hint="start the deployment again")
        self._end(error)

    def _end(self, error: ShardwiseError) -> None:
        """Nothing watches any more: the deployment is not ready, with this reason."""
        self._driver.call(lambda: self._driver.fail_all(error))
        self._stop.set()

    def carry_out(self, action: RecoveryAction, cause: str, stages: tuple[int, ...]) -> Fault | None:
        """Do it, and wait until every stage is connected again; returns what failed meanwhile. Hold `Restarter.changing`."""
        started_s = self._clock.now_s()
        promote, rebuild = action.kind == "promote", action.kind in ("replan", "fallback")
        lost = (action.stage,) if promote else stages if action.kind != "reconnect" else ()
        with self._faults_lock:
            self._faults.clear()
        what = action.kind if rebuild else f"{action.kind} of stage {action.stage}"
        epoch = self._begin(action, cause, what, lost)
        if rebuild:
            self._restarter.rebuild(action, what, self._policy.deadline_s)
            return None
        if action.kind == "recut":
            self._restarter.recut(action.stage)
        for stage in () if promote else lost:
            self._restarter.restart_stage(stage, epoch, action.node if stage == action.stage else "")
        fault = self._wait_connected(lost, action)
        if fault is None and promote:
            self._restarter.after_promotion(action.stage)
        elif fault is None and lost:
            self._restarter.start_s = self._clock.now_s() - started_s
        return fault

    def _begin(self, action: RecoveryAction, cause: str, what: str, lost: tuple[int, ...]) -> int:
        """Sessions are held and lost stages fenced; returns the new epoch."""
        epochs: list[int] = []
        begun, promote = threading.Event(), action.kind == "promote"

        def begin() -> None:
            if promote:
                self._restarter.replica_promoted(action.stage)
            epochs.append(
                self._driver.begin_recovery(
                    cause, what, lost, action.grade, promote=promote, predicted_stall_s=action.predicted_stall_s
                )
            )
            begun.set()

        self._driver.call(begin)
        if not begun.wait(5.0):
            raise ReplyTimeout("the session driver does not answer", where="recovery")
        return epochs[0]

    def _wait_connected(self, lost: tuple[int, ...], action: RecoveryAction) -> Fault | None:
        """Bounded by what the action should take: where a machine is cut off, something else must be tried in time."""
        others = [stage for stage in range(self._driver.num_stages) if stage not in lost]
        limit_s = min(self._policy.deadline_s, LEAST_PATIENCE_S + 3 * self._restarter.start_s)
        end_s, moved = self._clock.now_s() + limit_s, 0
        while not self._driver.connected:
            if self._pause(0.005) or self._driver.failure is not None:
                return None
            fault = self._find_ended(range(self._driver.num_stages)) or self._find_silent(others)
            if fault is not None:
                return fault
            now_s = self._clock.now_s()
            if (bytes_so_far := sum(p.done_bytes for p in list(self._driver.preparing.values()))) != moved:
                moved, end_s = bytes_so_far, now_s + limit_s  # a slice is on its way
            if now_s > end_s:
                raise ReplyTimeout(f"the stages did not connect again within {limit_s:.0f} s", where=action.name)
        return None
