"""Prometheus figures and the Grafana dashboard that reads them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

import shardwise.server
from shardwise.deploy.deployment import Deployment
from shardwise.errors import ReplyTimeout
from shardwise.transport.messages import Stats

from .running import CLOCK, Running, running_server, wait_until
from .scripted import CountingEngine

GRAFANA = Path(shardwise.server.__file__).parent / "grafana" / "shardwise.json"


def values(server: Running) -> dict[str, list[tuple[dict[str, str], float]]]:
    out: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            out.setdefault(sample.name, []).append((sample.labels, sample.value))
    return out


def test_a_stage_that_does_not_answer_holds_nobody_up(deployment: Deployment) -> None:
    """Many scrapes at once while stages are silent: health is told at once, and then every scrape has what is known."""
    silent = threading.Event()
    asked: list[int] = []

    class Silent(CountingEngine):
        def stats(self) -> Sequence[Stats]:
            asked.append(1)
            silent.wait(20)
            raise ReplyTimeout("no stage answers")

    with running_server(Silent(deployment)) as server:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(httpx.get(f"{server.url}/metrics", timeout=30))) for _ in range(40)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(asked) > 1, 10, "the first scrape and the live view to ask")
        started_s = CLOCK.now_s()
        assert server.http.get("/health/ready").status_code == 200
        assert server.http.post("/tokenize", json={"content": "x"}).status_code == 200
        assert server.chat().status_code == 200
        assert CLOCK.now_s() - started_s < 5.0
        silent.set()
        for thread in threads:
            thread.join(30)
    assert [answer.status_code for answer in answers] == [200] * 40
    assert all("shardwise_ready 1.0" in answer.text for answer in answers)


def test_figures_count_what_happened(server: Running, deployment: Deployment) -> None:
    before = values(server)
    server.chat(max_tokens=8)
    server.chat(max_tokens=8, stream=True)
    after = values(server)

    def grown(name: str) -> float:
        return after[name][0][1] - before[name][0][1]

    assert grown("shardwise_generated_tokens_total") == 16
    assert grown("shardwise_time_to_first_token_seconds_count") == 2
    assert grown("shardwise_inter_token_latency_seconds_count") == 14
    assert grown("shardwise_server_token_overhead_seconds_count") >= 8
    assert after["shardwise_ready"][0][1] == 1
    assert {labels["stage"] for labels, _ in after["shardwise_stage_up"]} == {"0", "1"}
    assert {labels["part"] for labels, _ in after["shardwise_boundary_seconds"]} == {"transfer", "copy", "wait"}
    assert any(value > 0 for labels, value in after["shardwise_boundary_seconds"] if labels["part"] == "transfer")
    assert any(value >= 1 for _, value in after["shardwise_stage_batch_rows"])


def test_the_grafana_dashboard_asks_only_for_figures_that_exist(server: Running) -> None:
    board = json.loads(GRAFANA.read_text())
    text = server.http.get("/metrics").text
    known = set(re.findall(r"^# TYPE (\w+)", text, re.M)) | {line.split("{")[0].split(" ")[0] for line in text.splitlines()}
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"shardwise_\w+", expression)}
    optional = {"shardwise_recoveries_total"} | {name for name in asked if "predicted" in name}
    assert len(asked) >= 12
    assert asked - optional <= known
