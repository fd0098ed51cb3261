"""The dashboard and the chat page in Debian's Chromium: a running plan, a killed worker within 2 s, a chat; keyboard and axe."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Route, expect

from shardwise.deploy.deployment import Deployment
from shardwise.server.operations import Operator

from .browser import chromium
from .running import CLOCK, Running, running_server, wait_until


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


def is_problem(message: ConsoleMessage) -> bool:
    """A refused request is reported by the browser as well; that is no defect of the page."""
    return message.type == "error" and "Failed to load resource" not in message.text


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if is_problem(message) else None)
    page.on("request", lambda request: problems.append(request.url) if "127.0.0.1" not in request.url else None)
    yield page
    context.close()
    assert not problems


@pytest.fixture
def operable(server: Running, deployment: Deployment) -> Iterator[Running]:
    server.state.operator = Operator(server.slot, lambda layers, on_progress: deployment, drain_s=5, note=server.state.live.note)
    server.state.live.operations = server.state.operator.allowed
    yield server
    server.state.operator = None
    server.state.live.operations = dict


def test_it_shows_the_running_plan_and_live_figures(page: Page, operable: Running) -> None:
    page.goto(operable.url)
    expect(page.locator("#status")).to_have_text("Ready", timeout=10_000)
    expect(page.locator(".stage")).to_have_count(2)
    expect(page.locator(".stage").first).to_contain_text("layers 0–14")
    expect(page.locator("#model")).to_contain_text("Q4_1")
    operable.chat("Tell a story.", max_tokens=24)
    expect(page.locator(".lane")).to_have_count(2, timeout=10_000)
    expect(page.locator(".boundary .total").first).to_contain_text("s", timeout=10_000)
    expect(page.locator(".hop strong").first).to_contain_text("s")
    expect(page.locator("#requests")).to_contain_text("tokens so far")


def test_a_new_split_is_previewed_before_anything_moves(page: Page, operable: Running) -> None:
    page.goto(operable.url)
    page.get_by_label("Layers of each stage").fill("10,20")
    page.get_by_role("button", name="Preview the move").click()
    expect(page.locator("#operate table tbody tr")).to_have_count(1)
    expect(page.locator("#operate")).to_contain_text("10–14")
    page.get_by_role("button", name="Leave it").click()
    page.get_by_label("Layers of each stage").fill("10,10")
    page.get_by_role("button", name="Preview the move").click()
    expect(page.locator("#operate [role=alert]")).to_contain_text("add up to 20")


def test_a_new_split_is_applied_under_load_and_no_request_is_lost(page: Page, operable: Running) -> None:
    page.goto(operable.url)
    expected = operable.chat("Tell a story.", max_tokens=40).json()["choices"][0]["message"]["content"]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(operable.chat, "Tell a story.", max_tokens=40)
        page.get_by_label("Layers of each stage").fill("8,12,10")
        page.get_by_role("button", name="Preview the move").click()
        page.get_by_role("button", name="Apply").click()
        expect(page.locator(".stage.ready")).to_have_count(3, timeout=60_000)
        expect(page.locator("#events")).to_contain_text("new split 8+12+10: done", timeout=30_000)
        assert running.result(timeout=60).json()["choices"][0]["message"]["content"] == expected
    page.get_by_label("Layers of each stage").fill("15,15")
    page.get_by_role("button", name="Preview the move").click()
    page.get_by_role("button", name="Apply").click()
    expect(page.locator(".stage.ready")).to_have_count(2, timeout=60_000)
    expect(page.locator("#events")).to_contain_text("new split 15+15: done", timeout=30_000)
    assert operable.chat().status_code == 200


def test_drain_refuses_new_requests_and_ends(page: Page, operable: Running) -> None:
    page.goto(operable.url)
    page.get_by_role("button", name="Drain").click()
    expect(page.locator("#status")).to_have_text("Draining", timeout=5000)
    refused = operable.chat()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    page.get_by_role("button", name="Accept requests again").click()
    expect(page.locator("#status")).to_have_text("Ready", timeout=5000)
    assert operable.chat().status_code == 200


def test_a_chat(page: Page, server: Running) -> None:
    page.goto(f"{server.url}/chat")
    expect(page.locator("#model")).to_contain_text("Q4_1", timeout=10_000)
    page.get_by_text("Settings").click()
    page.get_by_label("Longest answer, tokens").fill("16")
    page.get_by_label("Message", exact=True).fill("Name three colours.")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .meta")).to_contain_text("tokens/s", timeout=30_000)
    first = page.locator(".turn.assistant .text").inner_text()
    assert len(first) > 10
    page.get_by_label("Message", exact=True).fill("And three animals.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".turn.assistant .meta")).to_have_count(2, timeout=30_000)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)


@pytest.mark.parametrize("how", ["cut", "refused"])
def test_an_answer_that_breaks_off_says_so(page: Page, server: Running, how: str) -> None:
    """A server that is gone, or a proxy that makes a clean end of a broken stream: never shown as a whole answer."""
    page.goto(f"{server.url}/chat")
    expect(page.locator("#model")).to_contain_text("Q4_1", timeout=10_000)
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": "Once upon"}, "finish_reason": None}]})

    def answer(route: Route) -> None:
        if how == "refused":
            route.abort("connectionrefused")
        else:
            route.fulfill(status=200, content_type="text/event-stream", body=f"data: {chunk}\n\n")

    page.route("**/v1/chat/completions", answer)
    page.get_by_label("Message", exact=True).fill("Tell a story.")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant.failed .meta")).to_contain_text("not whole", timeout=10_000)
    expect(page.locator(".turn.assistant .text")).to_have_text("Once upon" if how == "cut" else "")


def test_a_running_answer_can_be_stopped_and_its_kv_is_freed(page: Page, server: Running, deployment: Deployment) -> None:
    page.goto(f"{server.url}/chat")
    expect(page.locator("#model")).to_contain_text("Q4_1", timeout=10_000)
    page.get_by_label("Message", exact=True).fill("Tell a very long story.")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .text")).not_to_be_empty(timeout=30_000)
    page.get_by_role("button", name="Stop").click()
    assert wait_until(lambda: not any(s.sessions for s in deployment.stats()), 3, "the sessions to end") < 1.5


def test_everything_is_reached_by_the_keyboard(page: Page, server: Running) -> None:
    page.goto(server.url)
    expect(page.locator(".stage").first).to_be_visible(timeout=10_000)
    names, focused = [], "document.activeElement"
    for _ in range(7):
        page.keyboard.press("Tab")
        names.append(page.evaluate(f"{focused}.getAttribute('aria-label') || {focused}.textContent.trim()"))
    assert names[0] == "Skip to content"
    assert {"Home", "Chat"} <= set(names)
    assert any(name.startswith("Colour theme") for name in names)
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


@pytest.mark.parametrize("path", ["/", "/chat"])
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_axe_finds_nothing(browser: Browser, server: Running, path: str, scheme: str, width: int) -> None:
    """Contrast, names, roles, landmarks: axe-core's rules on both pages, both themes, and phone width."""
    context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme, bypass_csp=True)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(server.url + path)
    expect(page.locator("#status.ready")).to_be_visible(timeout=10_000)
    expect(page.locator("#model")).to_contain_text("Q4_1", timeout=10_000)
    results = Axe().run(page)
    assert results.violations_count == 0, results.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    context.close()


def test_the_theme_is_chosen_and_kept(page: Page, server: Running) -> None:
    page.goto(server.url)
    page.get_by_role("button", name="Colour theme").click()
    page.get_by_role("button", name="Colour theme: light").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.reload()
    assert page.locator("html").get_attribute("data-theme") == "dark"


def test_a_killed_worker_shows_within_two_seconds_and_its_recovery_too(
    page: Page, server: Running, deployment: Deployment
) -> None:
    page.goto(server.url)
    expect(page.locator(".stage.ready")).to_have_count(2, timeout=10_000)
    killed_s = CLOCK.now_s()
    os.kill(deployment.stages[1].pid, signal.SIGKILL)
    page.locator("#status.bad").wait_for(timeout=2000)
    page.locator(".stage:not(.ready)").first.wait_for(timeout=2000)
    assert CLOCK.now_s() - killed_s < 2.0
    expect(page.locator("#status.ready")).to_be_visible(timeout=30_000)
    expect(page.locator(".stage.ready")).to_have_count(2, timeout=10_000)
    expect(page.locator("#events")).to_contain_text("is gone")


def test_a_key_is_asked_for_where_one_is_needed(browser: Browser, deployment: Deployment, tmp_path: object) -> None:
    from pathlib import Path

    from shardwise.server.access import new_key, read_keys

    file = Path(str(tmp_path)) / "keys.json"
    key = new_key(file, "browser")
    with running_server(deployment, keys=read_keys(file)) as guarded:
        page = browser.new_page()
        page.goto(guarded.url)
        page.get_by_label("This server asks for a key").fill(key)
        page.get_by_role("button", name="Continue").click()
        expect(page.locator("#status.ready")).to_be_visible(timeout=10_000)
        page.close()
