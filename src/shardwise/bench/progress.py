"""Progress on standard error: a bar with time left in a terminal, one line a trial otherwise."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from shardwise.bench.result import Case, TrialResult
from shardwise.units import format_duration


class ConsoleProgress:
    """A `Progress` for people. Use as a context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
            disable=quiet or not self._console.is_terminal,
        )
        self._task: TaskID = self._bar.add_task("starting", total=None, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def begin(self, num_trials: int, num_done: int) -> None:
        self._num_trials = num_trials
        self._bar.update(self._task, total=num_trials, completed=num_done, left="")
        if num_done:
            self._console.print(f"{num_done} of {num_trials} trials are finished already and are not repeated")

    def next_group(self, case: Case, repetition: int) -> None:
        self._bar.update(self._task, description=f"{case.engine}: {case.split} on {case.network}, round {repetition + 1}")

    def finished(self, trial: TrialResult, num_done: int, left_s: float) -> None:
        left = f"about {format_duration(left_s)} left" if left_s else ""
        self._bar.update(self._task, completed=num_done, left=left)
        if not self._console.is_terminal or trial.error:
            figure = trial.metrics.get("inter_token_p50_s")
            outcome = trial.error.message if trial.error else f"{format_duration(figure)} a token" if figure else "done"
            self._console.print(
                f"[{num_done}/{self._num_trials}] {trial.case.key}: {outcome}; {left}".rstrip("; "),
                highlight=False,
                soft_wrap=True,
            )
