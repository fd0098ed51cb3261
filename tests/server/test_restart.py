"""A server that ends in the middle of answers, and the one that is started after it.

Whoever was being answered must know that the answer is not whole: a broken connection or an error, never a clean end with text
missing.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from .process import serving
from .running import wait_until

BODY = {
    "model": "sample",
    "messages": [{"role": "user", "content": "Tell a long story."}],
    "max_tokens": 400,
    "temperature": 0,
    "seed": 5,
}


@dataclass
class Seen:
    """What one client saw."""

    texts: list[str] = field(default_factory=list)
    error: dict[str, object] | None = None
    done: bool = False
    broken: bool = False
    status: int = 0


def streamed(url: str, seen: Seen) -> None:
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY | {"stream": True}, timeout=60) as response:
        seen.status = response.status_code
        try:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    seen.done = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    seen.error = chunk.get("error", seen.error)
                    seen.texts += [choice["delta"].get("content") or "" for choice in chunk.get("choices", ())]
        except httpx.TransportError:
            seen.broken = True


def by_openai(url: str, seen: Seen) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)
    try:
        for chunk in client.chat.completions.create(**BODY, stream=True):  # type: ignore[call-overload]
            seen.texts.append(chunk.choices[0].delta.content or "")
            seen.done = seen.done or chunk.choices[0].finish_reason is not None
    except openai.APIError as error:
        seen.error = {"message": str(error)}
    except httpx.TransportError:
        seen.broken = True


def not_streamed(url: str, seen: Seen) -> None:
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=BODY, timeout=60)
    except httpx.TransportError:
        seen.broken = True
        return
    seen.status, seen.done = answer.status_code, answer.status_code == 200
    seen.error = answer.json().get("error")


@contextmanager
def being_answered(url: str, http: httpx.Client, *clients: Callable[[str, Seen], None]) -> Iterator[list[Seen]]:
    """The clients, all in the middle of their answers; joined at the end of the block."""
    wait_until(lambda: http.get("/health/ready").status_code == 200, 90, "the model")
    seen = [Seen() for _ in clients]
    threads = [threading.Thread(target=client, args=(url, one)) for client, one in zip(clients, seen, strict=True)]
    for thread in threads:
        thread.start()
    readers = [one for client, one in zip(clients, seen, strict=True) if client is not not_streamed]
    wait_until(lambda: all(len(one.texts) > 5 for one in readers), 60, "all to be answered")
    yield seen
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ask_again(http: httpx.Client) -> str:
    answer = http.post("/v1/chat/completions", json=BODY | {"max_tokens": 60}, timeout=60)
    assert answer.status_code == 200
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_killed_server_breaks_its_streams_and_the_next_one_answers(tmp_path: Path) -> None:
    flags = ("--stages", "2", "--ctx", "512", "--journal", str(tmp_path), "--port", str(free_port()))
    with serving(*flags) as (process, url, _), httpx.Client(base_url=url) as http:
        with being_answered(url, http, streamed, by_openai, not_streamed) as seen:
            workers = psutil.Process(process.pid).children(recursive=True)
            process.kill()
        for one in seen:
            assert not one.done
            assert one.broken or one.error
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    with serving(*flags) as (_, same_url, lines), httpx.Client(base_url=same_url) as http:
        assert same_url == url
        assert http.post("/v1/chat/completions", json=BODY).status_code == 503  # it does not claim to be ready
        wait_until(lambda: http.get("/health/ready").status_code == 200, 90, "the model")
        undisturbed = ask_again(http)
        assert "3 answers of an earlier server were not finished" in " ".join("".join(lines).split())
    assert undisturbed.startswith("".join(seen[0].texts)[:40])


@pytest.mark.parametrize("how", ["the drain is too short", "a second signal"])
def test_what_a_drain_does_not_finish_ends_with_an_error(how: str) -> None:
    drain_s = "1" if how == "the drain is too short" else "60"
    with (
        serving("--stages", "2", "--ctx", "512", "--drain", drain_s) as (process, url, lines),
        httpx.Client(base_url=url) as http,
    ):
        with being_answered(url, http, streamed, by_openai, not_streamed) as seen:
            process.send_signal(signal.SIGTERM)
            if how == "a second signal":
                wait_until(lambda: refuses(url), 10, "the drain to begin")
                process.send_signal(signal.SIGTERM)
        ended(process)
        for one in seen:
            assert not one.done
            assert one.error
            assert "ended" in str(one.error["message"])
        assert seen[2].status == 503
        assert "Traceback" not in "".join(lines), "".join(lines)


def refuses(url: str) -> bool:
    """Nothing new is accepted."""
    try:
        return httpx.get(f"{url}/health/ready", timeout=5).status_code == 503
    except httpx.TransportError:
        return True


def ended(process: subprocess.Popen[str]) -> None:
    assert process.wait(timeout=30) == 0
