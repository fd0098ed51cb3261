"""What is said after an answer: that it was cut off, that a worker was lost; how a chat and a pipe end. Real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from shardwise.cli.ending import recovery_line
from shardwise.session.request import Recovery
from tests.cluster.waiting import wait_until

PROGRAM = [sys.executable, "-m", "shardwise"]


def shardwise(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], input=given, capture_output=True, text=True, timeout=100, check=False)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return shardwise("run", "sample", "-p", "Tell a long story.", "--no-predict", *arguments)


def test_an_answer_that_n_or_the_context_cut_off_says_so() -> None:
    lines = run("-n", "8").stderr.splitlines()
    assert "stopped at 8 tokens (-n)" in lines
    assert "stopped: the context of 50 tokens is full (--ctx)" in run("-n", "300", "--ctx", "50").stderr.splitlines()


def test_an_answer_that_came_to_its_end_says_nothing() -> None:
    done = shardwise("run", "sample", "-p", "What is the capital of France?", "--no-predict")
    assert done.returncode == 0
    assert "stopped" not in done.stderr


def test_a_document_that_n_cut_off_is_told_to_be_incomplete(tmp_path: Path) -> None:
    schema = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
    (tmp_path / "schema.json").write_text(schema)
    for given in (schema, f"@{tmp_path / 'schema.json'}"):  # both mean the same
        done = run("-n", "3", "--json-schema", given)
        assert done.stdout.startswith("{")
        assert "stopped at 3 tokens (-n); what the grammar or schema asks for is not complete" in done.stderr


def test_a_schema_file_that_is_not_there_is_one_line() -> None:
    done = run("--json-schema", "@/nothing/schema.json")
    assert done.returncode == 2
    assert done.stderr == "error: cannot read the JSON schema: No such file or directory (/nothing/schema.json)\n"


@pytest.mark.parametrize("command", [["run", "-p", "hi"], ["chat"], ["serve", "--port", "0"]])
def test_weights_from_a_folder_that_is_not_there_is_one_line(command: list[str]) -> None:
    done = shardwise(command[0], "sample", *command[1:], "--weights-from", "/nothing/here")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no such folder (--weights-from /nothing/here)")
    assert len(done.stderr.splitlines()) == 1


def test_a_chat_says_it_too() -> None:
    done = shardwise("chat", "sample", "-n", "4", "--temp", "0", given="Tell a story.\nAnd another.\n")
    assert done.returncode == 0
    assert done.stderr.splitlines().count("stopped at 4 tokens (-n)") == 2
    assert "Ctrl-D" not in done.stderr  # nobody sits there
    assert len(done.stdout.splitlines()) == 2


def test_a_chat_as_json_is_one_document() -> None:
    done = shardwise("chat", "sample", "--json", "-n", "4", "--temp", "0", "--system", "Be brief.", given="Hello\nWho are you?\n")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert [m["role"] for m in document["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert [a["text"] for a in document["answers"]] == [m["content"] for m in document["messages"] if m["role"] == "assistant"]
    assert [a["finish_reason"] for a in document["answers"]] == ["length", "length"]
    assert document["answers"][1]["generated_tokens"] == 4
    assert document["recoveries"] == []


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Stage workers, in the order of their start."""
    found = [p for p in psutil.Process(process.pid).children(recursive=True) if "shardwise" in " ".join(p.cmdline())]
    return sorted(found, key=lambda p: p.create_time())


def test_a_worker_that_was_lost_is_told_in_the_summary() -> None:
    """Killed in the middle of a run of its own process."""
    command = ["run", "sample", "--stages", "2", "-p", "Tell a long story.", "-n", "400", "--ignore-eos", "--no-predict"]
    process = subprocess.Popen([*PROGRAM, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        seen = process.stdout.read(80)
        workers(process)[-1].kill()
        rest, errors = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert seen + rest == run("-n", "400", "--ignore-eos", "--stages", "2").stdout
    told = [line for line in " ".join(errors.split()).split("stage ") if line[2:10] == "was lost"]
    assert len(told) == 1, errors
    assert "and back after" in told[0]
    assert "the same tokens (crashed; restart of" in told[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {},
            "stage 1 was lost at token 88 and back after 450 ms, the same tokens (crashed; restart of stage 1)",
        ),
        ({"action": "replan"}, "a stage was lost at token 88 and back after 450 ms, the same tokens (crashed; replan)"),
        (
            {"grade": "fast"},
            "stage 1 was lost at token 88 and back after 450 ms, read again in large chunks, so tokens may differ",
        ),
        (
            {"cause": "new split 10+20", "action": "new split 10+20"},
            "new split 10+20 at token 88: nothing came for 450 ms, the same tokens",
        ),
    ],
)
def test_the_words_for_a_recovery(changes: dict[str, str], words: str) -> None:
    known = {"cause": "crashed: worker ended with signal 9", "action": "restart of stage 1", "grade": "exact"}
    assert recovery_line(Recovery(at_token=88, stall_s=0.45, **(known | changes))).startswith(words)


# -- a terminal ------------------------------------------------------------------------------------------------------


class Terminal:
    """The program at a terminal: what it shows, and keys."""

    def __init__(self, *arguments: str) -> None:
        import pty

        self.own, other = pty.openpty()
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=own_terminal,
        )
        os.close(other)
        self.seen = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self.own, 65536)
            except OSError:  # nobody has the other end any more
                return
            self.seen += data.decode(errors="replace")

    def press(self, keys: str) -> None:
        os.write(self.own, keys.encode())

    def wait_for(self, text: str, after: int = 0) -> None:
        wait_until(lambda: text in self.seen[after:], 60, f"{text!r} on the terminal")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self.own)


def own_terminal() -> None:
    """Ctrl-C there goes to this process and its workers, as at a real one."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def at_a_terminal(*arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(*arguments)
    try:
        yield terminal
    finally:
        terminal.end()


LONG = ["chat", "sample", "--stages", "2", "--ctx", "8192", "-n", "8000", "--temp", "0", "--logit-bias", "2-100"]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
def test_ctrl_c_ends_an_answer_and_at_the_prompt_the_chat() -> None:
    with at_a_terminal(*LONG) as terminal:
        terminal.wait_for("Ctrl-D or an empty line ends the conversation, Ctrl-C an answer")
        terminal.wait_for("> ")
        for question in ("Count to a million: 1, 2, 3,\n", "Tell a story.\n"):
            asked = len(terminal.seen)
            terminal.press(question)
            wait_until(lambda asked=asked: len(terminal.seen) > asked + 120, 60, "an answer that goes on")
            before = len(terminal.seen)
            terminal.press("\x03")
            terminal.wait_for("\r\n> ", before)
        terminal.press("\x03")
        assert terminal.process.wait(30) == 130
        wait_until(lambda: "interrupted" in terminal.seen, 10, "the word")
        assert "Traceback" not in terminal.seen


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
def test_ctrl_d_ends_a_chat_after_an_answer_that_was_interrupted() -> None:
    with at_a_terminal(*LONG) as terminal:
        terminal.wait_for("> ")
        asked = len(terminal.seen)
        terminal.press("Count to a million: 1, 2, 3,\n")
        wait_until(lambda: len(terminal.seen) > asked + 120, 60, "an answer that goes on")
        terminal.press("\x03")
        terminal.wait_for("\r\n> ", asked)
        terminal.press("\x04")
        assert terminal.process.wait(30) == 0


# -- pipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "command",
    [
        ["run", "sample", "-p", "hi", "-n", "8", "--no-predict"],
        ["describe", "sample"],
        ["describe", "sample", "--json"],
        ["--help"],
    ],
)
def test_a_disk_that_is_full_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PROGRAM, *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 5
    assert done.stderr == "error: cannot write: No space left on device (standard output); make room, or write elsewhere\n"


@pytest.mark.parametrize(
    "command",
    [["run", "sample", "-p", "hi", "-n", "60", "--ignore-eos", "--no-predict"], ["describe", "sample", "--tensors"], ["--help"]],
)
def test_a_reader_that_goes_away_is_no_error(command: list[str]) -> None:
    process = subprocess.Popen([*PROGRAM, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0, errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
