"""The program: registers the commands, and turns every error into one line and the right exit status.

Exit: 0 done; 2 wrong usage or bad input; 3 no feasible plan; 4 incompatible peers or failed verification; 5 lost during the
run; 130 interrupted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from typing import Any

import typer

import shardwise
from shardwise.cli.common import Output, StderrHandler, output, set_output, take_global_flags
from shardwise.cli.registry import register
from shardwise.errors import ShardwiseError, UsageError

INTERRUPTED = 130
app = typer.Typer(
    name="shardwise",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=(
        "Splits one AI model over the machines you own, and says when that is a bad idea.\n\n"
        "Everywhere: --json (one JSON document on stdout), --quiet, -v, --version."
    ),
)


@app.callback(invoke_without_command=True)
def _root(context: typer.Context, version: bool = typer.Option(False, "--version", help="Show the version.")) -> None:
    if version:
        if output().json:
            output().document({"version": shardwise.__version__})
        else:
            print(shardwise.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


register(app)

# Typer brings its own copy of click (from 0.2x on) or uses the installed one; its public exception knows which. The
# ancestors of `BadParameter` are `UsageError` and `ClickException`.
_PARSER_ERROR: Any = typer.BadParameter.__mro__[2]


def _report(error: ShardwiseError) -> int:
    out = output()
    if out.json:
        out.document({"error": error.as_dict()})
    if out.verbose:
        traceback.print_exc()
    print(f"error: {error.one_line()}", file=sys.stderr)
    return error.exit_code


def _interrupted(out: Output) -> int:
    if out.json:
        out.document({"error": {"type": "Interrupted", "message": "interrupted", "hint": ""}})
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def _give_up_stdout() -> None:
    """Nothing more can be written there; what waits in its buffer must not be tried again when Python ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stdout_is_lost(error: OSError) -> bool:
    """Whether standard output is what the error is about: then nothing else can be written there either."""
    if error.filename is not None:
        return False
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as again:
        return again.errno == error.errno
    return False


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit status."""
    try:
        status = _run(arguments)
        sys.stdout.flush()  # here and not when Python ends, where nobody could say it properly
    except BrokenPipeError:  # the reader of stdout has gone: nothing is left to say
        _give_up_stdout()
        return 0
    except OSError as error:
        if not _stdout_is_lost(error):
            raise
        _give_up_stdout()
        reason = error.strerror or str(error)
        return _report(ShardwiseError(f"cannot write: {reason}", where="standard output", hint="make room, or write elsewhere"))
    return status


def _run(arguments: list[str]) -> int:
    rest, out = take_global_flags(arguments)
    set_output(out)
    level = logging.DEBUG if out.verbose else logging.WARNING
    logging.basicConfig(level=level, handlers=[StderrHandler()], format="%(name)s: %(message)s")
    try:
        status = app(rest, standalone_mode=False, prog_name="shardwise")
    except ShardwiseError as error:
        return _report(error)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(out)
    except _PARSER_ERROR as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else ""
        return _report(UsageError(error.format_message(), where=where, hint="see --help"))
    except SystemExit as ended:  # Typer makes it of a pipe whose reader has gone
        if isinstance(ended.__context__, BrokenPipeError):
            raise ended.__context__ from None
        raise
    if status == INTERRUPTED:  # Typer makes it of KeyboardInterrupt
        return _interrupted(out)
    return status if isinstance(status, int) else 0


def main() -> Any:
    """Entry point of the `shardwise` program."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))


__all__ = ["Output", "app", "main", "run"]
