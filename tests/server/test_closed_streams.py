"""Started with a standard stream closed (`>&-`), as daemons are: it goes on, and nothing else gets the stream's number."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="closes streams as a shell does")


def without(streams: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run it with these numbers closed."""
    closed = " ".join(f"{number}>&-" for number in streams)
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    return subprocess.run(shell, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)


CASES = [("1", []), ("1", ["--json"]), ("012", [])]
MORE = [(streams, flags) for streams in ("0", "1", "2", "12", "012") for flags in ([], ["--json"])]


@pytest.mark.parametrize(
    ("streams", "flags"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in MORE if case not in CASES)]
)
def test_a_run_goes_on(streams: str, flags: list[str]) -> None:
    done = without(streams, sys.executable, "-m", "shardwise", "run", "sample", "-p", "hi", "--max-tokens", "3", *flags)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if "1" not in streams:
        assert len(json.loads(done.stdout)["token_ids"]) == 3 if flags else done.stdout.strip()


def test_an_error_keeps_its_status_and_its_line() -> None:
    done = without("1", sys.executable, "-m", "shardwise", "run", "no-such-model.gguf", "-p", "hi", "--json")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert without("12", sys.executable, "-m", "shardwise", "run", "no-such-model.gguf", "-p", "hi").returncode == 2


@pytest.mark.parametrize("streams", ["0", "1", "2", "02", "12", "012"])
def test_the_numbers_are_taken_by_the_null_device(streams: str) -> None:
    """Else what a library prints would go into the next socket or file that is opened, here or in a worker."""
    script = (
        "import os, sys, shardwise.cli.common\n"
        "null = os.stat(os.devnull).st_rdev\n"
        f"good = [os.fstat(n).st_rdev == null and os.get_inheritable(n) for n in {[int(s) for s in streams]}]\n"
        "good += [None not in (sys.stdin, sys.stdout, sys.stderr), sys.stdin.read() == '']\n"
        "print('lost', flush=True); print('lost', file=sys.stderr, flush=True)\n"
        "sys.exit(0 if all(good) else 3)\n"
    )
    done = without(streams, sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
