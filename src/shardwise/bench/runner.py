"""Runs a scenario: every case, several times, in random order, resumable, with progress and time left.

The loop knows nothing about deployments: a `GroupRunner` measures the cases that share one deployment and hands each
finished trial back. A failed trial is kept with its error and does not end the run; Ctrl-C keeps what is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from shardwise.bench.environment import capture_environment, iso_now, load_1min
from shardwise.bench.result import Case, ResultFile, TrialError, TrialResult
from shardwise.bench.scenario import Scenario, ordered_groups
from shardwise.bench.store import TrialStore
from shardwise.clock import Clock, SystemClock
from shardwise.errors import ShardwiseError

OnTrial = Callable[[TrialResult], None]


class GroupRunner(Protocol):
    """Measures cases that share engine, network and split.

    Promises: calls `on_trial` once for each case it measured; leaves nothing running. Fails when the group cannot be
    set up: raises a `ShardwiseError`, and the loop notes it for the cases that are still missing.
    Called by: `run_scenario`.
    """

    def run_group(self, scenario: Scenario, cases: Sequence[Case], repetition: int, on_trial: OnTrial) -> None: ...


class Progress(Protocol):
    """Who watches a run."""

    def begin(self, num_trials: int, num_done: int) -> None: ...

    def next_group(self, case: Case, repetition: int) -> None: ...

    def finished(self, trial: TrialResult, num_done: int, left_s: float) -> None: ...


class TimeLeft:
    """How long the rest takes, from what the finished trials took (setting up included)."""

    def __init__(self, clock: Clock, num_left: int) -> None:
        self._clock, self._left, self._done = clock, num_left, 0
        self._start_s = clock.now_s()

    def after_one(self) -> float:
        """Seconds left, after one more trial."""
        self._done += 1
        self._left = max(0, self._left - 1)
        return (self._clock.now_s() - self._start_s) / self._done * self._left


def run_scenario(
    scenario: Scenario,
    store: TrialStore,
    runners: dict[str, GroupRunner],
    progress: Progress,
    *,
    clock: Clock | None = None,
) -> ResultFile:
    """Measure everything that `store` lacks; returns (and writes) the result. `runners` by engine name."""
    clock = clock or SystemClock()
    environment = capture_environment()
    cases = [case for case in scenario.cases() if case.engine in runners]
    wanted = [(case.key, repetition) for repetition in range(scenario.repetitions) for case in cases]
    num_done = sum(store.finished(key, repetition) for key, repetition in wanted)
    progress.begin(len(wanted), num_done)
    left = TimeLeft(clock, len(wanted) - num_done)

    def keep(trial: TrialResult) -> None:
        nonlocal num_done
        store.add(trial)
        num_done += 1
        progress.finished(trial, num_done, left.after_one())

    try:
        for repetition, group in ordered_groups(cases, scenario.repetitions, scenario.seed):
            missing = [case for case in group if not store.finished(case.key, repetition)]
            if missing:
                progress.next_group(missing[0], repetition)
                _run_group(scenario, runners[missing[0].engine], missing, repetition, keep)
    except KeyboardInterrupt:
        store.write(store.result(environment, complete=False))
        raise
    result = store.result(environment, complete=num_done == len(wanted))
    store.write(result)
    return result


def _run_group(scenario: Scenario, runner: GroupRunner, cases: list[Case], repetition: int, keep: OnTrial) -> None:
    seen: set[str] = set()

    def on_trial(trial: TrialResult) -> None:
        seen.add(trial.case.key)
        keep(trial)

    try:
        runner.run_group(scenario, cases, repetition, on_trial)
    except ShardwiseError as error:
        failed = TrialError(type=type(error).__name__, message=error.one_line())
        for case in cases:
            if case.key not in seen:
                keep(
                    TrialResult(
                        case=case, repetition=repetition, started=iso_now(), duration_s=0.0, error=failed, load_1min=load_1min()
                    )
                )
