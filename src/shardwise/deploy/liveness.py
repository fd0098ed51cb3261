"""Whether a silent stage is lost, stopped, or only waits for a processor. Data in, a verdict out; no clock, no process here.

    silence on our clock + what the operating system says of the process + whether a step is overdue -> `Verdict` or None

- *stopped* (its own system says so): nothing will come. At once where a hot replica takes over; else after `SILENT_AFTER_S`,
  because a short stop costs less than a restart.
- *overdue and silent*: a step has passed its deadline (`session.step_history`) and beats are missing. Enough to switch to a hot
  replica, which costs little and is safe: a step counts once an epoch. Not enough to call the stage lost.
- *starved*: it is silent, but it was ready to run and got no processor for most of the last moments, or it waits for a disk that
  cannot be interrupted. It is waited for, up to `STARVED_CAP_S`.
- *silent*: everything else, after `SILENT_AFTER_S`.
- *cut off*: every stage fell silent, on more than one machine: it is the driver that nothing reaches. Restarts would reach nobody
  either, while the stages go on among themselves; it is waited for, up to `CUT_OFF_CAP_S`.

**Called by** the supervisor, for each stage that has missed a beat.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from shardwise.cluster.scheduling import Scheduling
from shardwise.records import Record
from shardwise.session.recovery import Cause

BEAT_MISSED_S = 0.35  # a beat comes every quarter of a second
OVERDUE_SILENT_S = 0.7  # at least two beats are missing, on a link that loses one in fifty
SILENT_AFTER_S = 1.5
CUT_OFF_CAP_S = 15.0  # TCP tries again 6.2 and 12.6 s after a cut began
STARVED_CAP_S = 12.0  # nobody is waited for longer, however starved
STARVED_SHARE = 0.5  # of the last moments, ready to run without a processor
_HARDLY_RAN = 0.02  # of the window
_WINDOW_S = 1.0
_LEAST_WINDOW_S = 0.4


class Verdict(Record):
    """Why a stage is to be replaced."""

    cause: Cause
    what: str


class Starvation:
    """Remembers how the waiting time of one process has grown, over about the last second."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Scheduling]] = deque()

    def take(self, now_s: float, seen: Scheduling) -> None:
        """One look; looks without news (the observation is cached) are left out."""
        if self._looks and (self._looks[-1][1] == seen or seen.delay_s < self._looks[-1][1].delay_s):
            if seen.delay_s < self._looks[-1][1].delay_s:  # another process
                self._looks.clear()
                self._looks.append((now_s, seen))
            return
        self._looks.append((now_s, seen))
        while len(self._looks) > 2 and now_s - self._looks[1][0] >= _WINDOW_S:
            self._looks.popleft()

    def share(self, now_s: float) -> float:
        """Of the time since the window began: how much of it the process waited for a processor (several threads add up).
        1 where threads are ready and none has run: their waiting is only counted once they get a processor."""
        if not self._looks:
            return 0.0
        (begun_s, before), (_, last) = self._looks[0], self._looks[-1]
        window_s = max(_LEAST_WINDOW_S, now_s - begun_s)
        if last.num_ready and last.compute_s - before.compute_s < _HARDLY_RAN * window_s:
            return 1.0
        return (last.delay_s - before.delay_s) / window_s


def judge(
    silent_s: float,
    patience_s: float,
    seen: Scheduling,
    starved_share: float,
    *,
    overdue_s: float = 0.0,
    hot: bool = False,
) -> Verdict | None:
    """`patience_s`: beyond `SILENT_AFTER_S`, because the watcher itself gets no processor; `overdue_s`: of a step, past its
    deadline; `hot`: a replica with the stage's KV stands by. None: it may still come."""
    if seen.state == "stopped" and silent_s > (BEAT_MISSED_S if hot else SILENT_AFTER_S):
        return Verdict(cause=Cause.STOPPED, what=f"the process is stopped, no heartbeat for {silent_s:.1f} s")
    if silent_s > STARVED_CAP_S:
        return Verdict(cause=Cause.SILENT, what=f"no heartbeat for {silent_s:.1f} s")
    if seen.state == "blocked" or starved_share >= STARVED_SHARE:
        return None
    if hot and overdue_s > 0 and silent_s > OVERDUE_SILENT_S + patience_s:
        what = f"no heartbeat for {silent_s:.1f} s, and a step is {overdue_s:.1f} s past its deadline"
        return Verdict(cause=Cause.SILENT, what=what)
    if silent_s > SILENT_AFTER_S + patience_s:
        return Verdict(cause=Cause.SILENT, what=f"no heartbeat for {silent_s:.1f} s")
    return None


def is_cut_off(silent_s: Mapping[int, float], nodes: Collection[str], causes: Collection[Cause]) -> bool:
    """Whether it is this side that hears nothing. `silent_s` of every stage, `nodes` they are on, `causes` of the verdicts."""
    everywhere = len(set(nodes)) > 1 and min(silent_s.values()) >= BEAT_MISSED_S
    return everywhere and max(silent_s.values()) <= CUT_OFF_CAP_S and set(causes) == {Cause.SILENT}
