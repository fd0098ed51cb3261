"""What all commands share: where output goes, and how an error ends.

Results go to stdout (with `--json` one document and nothing else), progress and logs to stderr. `--json`, `--quiet` and
`-v` are global and may stand anywhere on the command line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_STREAMS = ("stdin", "stdout", "stderr")


class StderrHandler(logging.Handler):
    """Writes to whatever standard error is at that moment; one that is broken harms nobody."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr)
        except OSError:
            self.handleError(record)


def fill_streams() -> None:
    """A standard stream that was closed before the start (`>&-`) is the null device: the program goes on, as a daemon does.

    Under its own number: else the next socket would get it, and whatever a library prints would go there.
    """
    missing = [number for number, name in enumerate(_STREAMS) if getattr(sys, name) is None]
    for number in missing:
        null = os.open(os.devnull, os.O_RDWR)
        try:
            os.fstat(number)
        except OSError:
            os.dup2(null, number)
        if null == number:
            os.set_inheritable(null, True)
        else:
            os.close(null)
    for number in missing:
        setattr(sys, _STREAMS[number], open(os.devnull, "w" if number else "r"))  # noqa: SIM115  for as long as it runs


@dataclass
class Output:
    """The global flags and the two streams."""

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        fill_streams()
        self.stdout = Console(file=sys.stdout, highlight=False, emoji=False, soft_wrap=not sys.stdout.isatty())
        self.stderr = Console(file=sys.stderr, highlight=False, emoji=False, stderr=True)

    def document(self, value: Any) -> None:
        """Print the JSON document."""
        text = msgspec.json.format(msgspec.json.encode(value, enc_hook=_encode), indent=2).decode()
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def show(self, renderable: Any = "") -> None:
        """Something for people in Rich's markup, on stdout; nothing with `--json`. What is data in it must be escaped."""
        if not self.json:
            self.stdout.print(renderable)

    def plain(self, renderable: Any) -> None:
        """The same without markup: names, errors and data come out as they are, `[ray]` too."""
        if not self.json:
            self.stdout.print(renderable, markup=False)

    def note(self, renderable: Any) -> None:
        """What is going on, on stderr, without markup."""
        if not self.quiet:
            self.stderr.print(renderable, markup=False)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str, float], None]]:
        """A progress bar on stderr, one for all steps: call with (what is done now, share done)."""
        if self.quiet or not self.stderr.is_terminal:
            yield lambda what, share: None
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.stderr, transient=True) as bar:
            task, before = bar.add_task("starting", total=1.0), 0.0

            def update(what: str, share: float) -> None:
                nonlocal before
                if share < before:  # another step begins, and the time of the last one says nothing about it
                    bar.reset(task, total=1.0)
                before = share
                bar.update(task, description=what, completed=share)

            yield update


def _encode(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


_current = Output()


def output() -> Output:
    """The output of this invocation."""
    return _current


def set_output(value: Output) -> None:
    """Start a new invocation."""
    global _current
    _current = value


GLOBAL_FLAGS = {"--json": "json", "--quiet": "quiet", "-q": "quiet", "-v": "verbose", "--verbose": "verbose"}


def take_global_flags(arguments: list[str]) -> tuple[list[str], Output]:
    """Remove the global flags from anywhere before `--`; a flag that is an option's value stays."""
    rest: list[str] = []
    found: dict[str, bool] = {}
    for index, argument in enumerate(arguments):
        if argument == "--":
            rest += arguments[index:]
            break
        takes_it = rest and rest[-1] in ("--prompt", "-p", "--system", "--grammar", "--stop")
        if argument in GLOBAL_FLAGS and not takes_it:
            found[GLOBAL_FLAGS[argument]] = True
        else:
            rest.append(argument)
    return rest, Output(**found)
