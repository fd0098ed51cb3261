"""The pictures in the README: `python -m tests.server.screenshots OUT`. Three declared machines, under load."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page

from shardwise.bench.run_prediction import predict_local
from shardwise.cluster.local import LocalEngine
from shardwise.deploy.launcher import launch
from shardwise.deploy.options import Placement, RunOptions
from shardwise.server.command import predicted
from shardwise.server.operations import Operator

from .browser import chromium
from .running import CLOCK, Running, running_server, wait_until

MACHINES = ("desktop", "laptop", "nas")


def main(out: Path) -> None:
    """Write home-light, home-dark, home-phone, home-killed, chat-light, chat-phone."""
    out.mkdir(parents=True, exist_ok=True)
    options = RunOptions(layers=(14, 10, 6), max_sessions=6, context_tokens=1024, probe_interval_s=1.0)
    places = [Placement(node=name) for name in MACHINES]
    engine = LocalEngine(dict.fromkeys(MACHINES, ()))
    with launch("sample", options, engine=engine, placements=places) as deployment, running_server(deployment) as server:
        server.state.operator = Operator(
            server.slot, lambda layers, on_progress: deployment, drain_s=5, note=server.state.live.note
        )
        server.state.live.operations = server.state.operator.allowed
        server.state.live.capacities = {"desktop": 2 * 2**30, "laptop": 2**30, "nas": 2**29}
        wait_until(lambda: deployment.readiness().ready, 60, "the first token")
        prediction, *_ = predict_local(deployment.model, deployment.options, prompt_tokens=256, output_tokens=128)
        server.slot.expectation = predicted(prediction)
        stop = threading.Event()
        threads = [threading.Thread(target=keep_asking, args=(server.url, stop), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        with chromium() as browser:
            take(browser, server, out)
            page = open_page(browser, server, "/", 1280, "light")
            os.kill(deployment.stages[1].pid, signal.SIGKILL)
            page.locator(".stage.gone, .stage.loading").first.wait_for(timeout=5000)
            page.screenshot(path=out / "home-killed.png", full_page=True)
            stop.set()
        for thread in threads:
            thread.join(timeout=60)


def take(browser: Browser, server: Running, out: Path) -> None:
    for name, path, width, scheme in (
        ("home-light", "/", 1280, "light"),
        ("home-dark", "/", 1280, "dark"),
        ("home-phone", "/", 390, "light"),
    ):
        page = open_page(browser, server, path, width, scheme)
        page.locator(".lane").first.wait_for(timeout=60000)
        CLOCK.sleep(4)  # let the line of the last minutes grow
        page.screenshot(path=out / f"{name}.png", full_page=True)
        page.close()
    for name, width, scheme in (("chat-light", 1000, "light"), ("chat-phone", 390, "dark")):
        page = open_page(browser, server, "/chat", width, scheme)
        page.evaluate("document.getElementById('max').value = '48'")
        page.fill("#prompt", "Name three colours and say why you like them.")
        page.keyboard.press("Enter")
        page.locator(".turn.assistant .meta").wait_for(timeout=90000)
        page.screenshot(path=out / f"{name}.png")
        page.close()


def open_page(browser: Browser, server: Running, path: str, width: int, scheme: str) -> Page:
    height = 844 if width < 600 else 900
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(server.url + path)
    page.locator(".status.ready").wait_for(timeout=20000)
    return page


def keep_asking(url: str, stop: threading.Event) -> None:
    body = {"model": "sample", "messages": [{"role": "user", "content": "Tell a long story."}], "max_tokens": 90, "stream": True}
    while not stop.is_set():
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
            for _ in response.iter_lines():
                if stop.is_set():
                    return


if __name__ == "__main__":
    main(Path(sys.argv[1]))
