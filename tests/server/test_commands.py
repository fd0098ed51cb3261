"""`shardwise serve` and `shardwise top` as processes: loading, ready, drained end, a port that is taken, a key made and used."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from shardwise.clock import ManualClock
from shardwise.errors import AuthenticationFailed, ConnectFailed
from shardwise.server import top
from shardwise.server.command import log_to_stderr

from .process import PROGRAM, serving
from .running import Running, wait_until


def test_serve_answers_while_it_loads_then_generates_then_drains() -> None:
    with serving("--stages", "2", "--ctx", "512", "--drain", "20") as (process, url, lines), httpx.Client(base_url=url) as http:
        assert http.get("/health/live").status_code == 200
        first = http.get("/health/ready")
        assert first.status_code in (200, 503)
        wait_until(lambda: http.get("/health/ready").status_code == 200, 90, "the model")
        body = {"model": "sample", "messages": [{"role": "user", "content": "Tell a story."}], "max_tokens": 60, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body, timeout=60) as response:
            stream = response.iter_lines()
            next(stream)
            process.send_signal(signal.SIGTERM)
            rest = list(stream)
        assert "data: [DONE]" in rest  # a running answer is finished
        assert process.wait(timeout=40) == 0
        assert any("Tell a story" not in line for line in lines)
        assert not any("Tell a story" in line for line in lines)


def test_a_taken_port_is_an_error_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [*PROGRAM, "serve", "sample", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot listen on")
    assert "another --port" in done.stderr


def test_a_public_bind_without_a_key_and_a_missing_model_are_refused(tmp_path: Path) -> None:
    public = subprocess.run([*PROGRAM, "serve", "sample", "--host", "0.0.0.0"], capture_output=True, text=True, timeout=60)
    assert public.returncode == 2
    assert "there is no API key" in public.stderr
    command = [*PROGRAM, "serve", str(tmp_path / "none.gguf"), "--port", "0", "--no-access-log"]
    missing = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert missing.returncode == 2
    assert "none.gguf" in missing.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["nosuch"], "'nosuch'"),
        (["llama-3-8b:q4_k_m"], "without weights"),
        (["{dir}/text.gguf"], "text.gguf"),
        (["sample", "--ctx", "999999"], "at most 8192"),
        (["sample", "--stages", "31"], "1 to 30"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_nothing_listens(flags: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("this is not a model")
    command = [*PROGRAM, "serve", *(flag.replace("{dir}", str(tmp_path)) for flag in flags), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr


def test_a_key_is_made_once(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    command = [*PROGRAM, "--json", "serve", "sample", "--api-key-file", str(file), "--new-api-key", "anna"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    key = json.loads(done.stdout)["key"]
    assert key.startswith("sw-")
    assert key not in file.read_text()


def test_log_lines_go_to_the_standard_error_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not to one that was replaced or closed; once each, however often it was asked for; and a broken one harms nobody."""
    logger = logging.getLogger("shardwise.server")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    level = logger.level
    first, second, broken = io.StringIO(), io.StringIO(), io.StringIO()
    try:
        for stream in (first, second):
            monkeypatch.setattr(sys, "stderr", stream)
            log_to_stderr()
            logging.getLogger("shardwise.server.access").info("a request")
        assert [stream.getvalue().count("a request\n") for stream in (first, second)] == [1, 1]
        broken.close()
        for gone in (broken, None):
            monkeypatch.setattr(sys, "stderr", gone)
            monkeypatch.setattr(logging, "raiseExceptions", False)
            logging.getLogger("shardwise.server.access").info("a request")
    finally:
        logger.setLevel(level)


def test_polling_is_not_in_the_log_and_a_lost_worker_is() -> None:
    """What a dashboard and a probe of a service manager ask every second is left out; an answer and a refusal are not."""
    with serving("--stages", "2", "--ctx", "512") as (process, url, lines), httpx.Client(base_url=url) as http:
        wait_until(lambda: http.get("/health/ready").status_code == 200, 90, "the model")
        assert subprocess.run([*PROGRAM, "top", url, "--once"], capture_output=True, timeout=60).returncode == 0
        assert http.get("/metrics").status_code == 200
        assert http.get("/api/nothing").status_code == 404
        question = {"role": "user", "content": "Tell a story."}
        body = {"model": "sample", "messages": [question], "max_tokens": 300, "temperature": 0, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body, timeout=60) as response:
            stream = response.iter_lines()
            for _ in range(20):
                next(stream)
            stages = http.get("/api/status").json()["stages"]
            os.kill(stages[1]["pid"], signal.SIGKILL)
            assert "data: [DONE]" in list(stream)
        told = "stage 1 was lost at token"
        wait_until(lambda: told in "".join(lines), 20, "the line about the recovery")
        text = "".join(lines)
        assert text.count(told) == 1
        assert "the same tokens (crashed; restart of stage 1)" in text
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=40) == 0
    asked = [line for line in lines if " client=" in line]
    assert [line.split()[5] for line in asked] == ["/api/nothing", "/v1/chat/completions"], asked


def test_top_draws_the_running_deployment(server: Running) -> None:
    server.chat(max_tokens=4)
    console = Console(width=160, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    with console.file:
        console.print(top.draw(top.fetch_picture(server.url)))
    text = console.export_text()
    assert "ready" in text
    assert "0-14" in text
    assert "15-29" in text
    assert "tokens so far" in text


def long_picture(server: Running) -> dict[str, Any]:
    """A real picture with a busy home of long names in it."""
    picture = top.fetch_picture(server.url)
    for number, stage in enumerate(picture["stages"]):
        name = ("living-room-desktop", "nas[attic]:100:")[number % 2]
        stage |= {"node": name, "layers": [100, 127], "kv_tokens": 131_072, "pid": 4_194_304, "rows_per_step": 12.5}
        stage |= {"weight_bytes": 12 * 2**30, "compute_s": {"n": 5, "p50": 0.01234}}
    for one in picture["boundaries"]:
        one |= {"source": "living-room-desktop", "target": "nas[attic]:100:", "bytes_per_token": 65_601}
        one["measured"] = {part: {"p50": 0.01234} for part in ("transfer_s", "copy_s", "wait_s")}
        one["predicted"] = {"transfer_s": {"p50": 0.01234}}
    request = {"id": "req_0123456789abcdef01234567", "client": "local", "endpoint": "/v1/chat/completions", "state": "generating"}
    figures = {"prompt_tokens": 32_768, "generated_tokens": 16_384, "tokens_per_s": 123.4, "age_s": 754.0}
    return picture | {"requests": [request | figures | {"time_to_first_token_s": 12.34}]}


@pytest.mark.parametrize("columns", [80, 100, 120, 160])
def test_top_cuts_nothing(server: Running, columns: int) -> None:
    picture = long_picture(server)
    with open(os.devnull, "w") as nothing:
        console = Console(width=columns, file=nothing, record=True)
        console.print(top.draw(picture))
    text = console.export_text()
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= columns
    for words in (
        "100-126",
        "131,072",
        "4194304",
        "12.5",
        "12.3 ms",
        "64.1 KiB",
        "generating",
        "32768",
        "16384",
        "123.4",
        "12 min 34 s",
    ):
        assert words in text, (words, text)
    together = "".join(text.split())
    for name in ("living-room-desktop", "nas[attic]:100:", "/v1/chat/completions"):
        assert name in together or all(part in text for part in (name[:8], name[-4:])), (name, text)


def test_top_without_a_server_says_what_the_system_says() -> None:
    nobody = subprocess.run([*PROGRAM, "top", "http://127.0.0.1:9", "--once"], capture_output=True, text=True, timeout=60)
    assert nobody.returncode == 5
    assert nobody.stderr.startswith("error: no shardwise server answers: Connection refused (http://127.0.0.1:9)")


def test_top_as_a_command(server: Running) -> None:
    once = subprocess.run([*PROGRAM, "top", server.url, "--once"], capture_output=True, text=True, timeout=60)
    assert once.returncode == 0, once.stderr
    assert "stages" in once.stdout
    document = subprocess.run([*PROGRAM, "--json", "top", server.url], capture_output=True, text=True, timeout=60)
    assert json.loads(document.stdout)["model"]["num_layers"] == 30
    nobody = subprocess.run([*PROGRAM, "top", "http://127.0.0.1:9", "--once"], capture_output=True, text=True, timeout=60)
    assert nobody.returncode == 5
    assert "no shardwise server answers" in nobody.stderr


def test_top_says_when_the_server_goes_away(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = top.fetch_picture(server.url)
    answers = iter([picture, picture, ConnectFailed("gone")])

    def fetch(url: str, key: str = "", *, timeout_s: float = 10.0) -> dict[str, object]:
        answer = next(answers)
        if isinstance(answer, ConnectFailed):
            raise answer
        return answer

    monkeypatch.setattr(top, "fetch_picture", fetch)
    left = [False, False, True]
    with open(os.devnull, "w") as nothing:
        console = Console(width=160, file=nothing, record=True)
        top.watch(server.url, "", ManualClock(), console, interval_s=1.0, until=lambda: left.pop(0))
    assert "connection lost: gone" in console.export_text()


def test_top_needs_the_key(deployment: object, tmp_path: Path) -> None:
    from shardwise.server.access import new_key, read_keys

    from .running import running_server

    key = new_key(tmp_path / "keys.json", "top")
    with running_server(deployment, keys=read_keys(tmp_path / "keys.json")) as guarded:  # type: ignore[arg-type]
        with pytest.raises(AuthenticationFailed):
            top.fetch_picture(guarded.url)
        assert top.fetch_picture(guarded.url, key)["availability"]["status"] == "ready"


@pytest.mark.skipif(sys.platform == "win32", reason="there is no pty")
@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (60, 160)])
def test_top_in_a_real_terminal(server: Running, rows: int, columns: int) -> None:
    """It draws, keeps to the terminal's size, goes with Ctrl-C, and leaves the terminal as it was."""
    import fcntl
    import pty
    import select
    import struct
    import termios

    own, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    before = termios.tcgetattr(other)
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")} | {
        "TERM": "xterm-256color"
    }
    address = server.url.removeprefix("http://")
    process = subprocess.Popen(
        [*PROGRAM, "top", address, "--interval", "0.3"],
        stdin=other,
        stdout=other,
        stderr=other,
        env=env,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored where tests run in the background
    )
    seen = b""

    def shows(text: bytes) -> bool:
        nonlocal seen
        while select.select([own], [], [], 0)[0]:
            seen += os.read(own, 65536)
        return text in seen

    try:
        wait_until(lambda: shows(b"stages"), 20, "the first picture")
        already = len(seen)
        wait_until(lambda: shows(b"stages") and len(seen) > already + 200, 10, "the next picture")
        process.send_signal(signal.SIGINT)
        wait_until(lambda: shows(b"\x1b[?1049l"), 10, "the terminal to be given back")
        assert process.wait(20) == 130
        assert b"\x1b[?25h" in seen
        assert b"Traceback" not in seen
        assert termios.tcgetattr(other) == before
        pictures = seen.split(b"\x1b[?1049l")[0]  # after it comes the word "interrupted"
        drawn = max(pictures.split(b"\x1b[H"), key=len).decode(errors="replace")
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
        assert max(len(line) for line in plain.splitlines()) <= columns
        assert len(plain.splitlines()) <= rows + 1
    finally:
        process.kill()
        process.wait()
        os.close(own)
        os.close(other)
