"""The runner of other programs, with a peer made for the test; and what it says when an environment is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardwise.bench.peer_runner import PEERS, Peer, PeerRunner
from shardwise.bench.result import TrialResult
from shardwise.bench.scenario import Scenario, parse_scenario
from shardwise.errors import MissingExtraError, StageCrashed

SCENARIO = """
name = "x"
title = "x"
[[network]]
name = "machine"
kind = "loopback"
hosts = [{ name = "one" }, { name = "two" }]
[[load]]
name = "short"
prompt_tokens = 8
output_tokens = 4
[[split]]
name = "both"
hosts = ["one", "two"]
[[measure]]
engines = ["fake"]
networks = ["machine"]
splits = ["both"]
loads = ["short"]
"""

GOOD = """
import json, sys
job = json.loads(sys.stdin.readline())
if sys.argv[1] == "serve":
    print("ready", flush=True)
    sys.stdin.read()
else:
    assert len(job["servers"]) == 2 and job["loads"][0]["output_tokens"] == 4 and job["text"]
    print(json.dumps({"loaded": True}), flush=True)
    users = [{"first_s": 0.5, "gaps_s": [0.1, 0.2, 0.3], "num_tokens": 4, "digest": "d"}]
    print(json.dumps({"load": "short", "users": users, "peak_memory_bytes": 5}), flush=True)
"""


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """An environment for the peer: this interpreter."""
    folder = tmp_path / "peers" / "env" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path))
    return parse_scenario(SCENARIO)


def _measure(scenario: Scenario, tmp_path: Path, script: str) -> list[TrialResult]:
    (tmp_path / "fake.py").write_text(script)
    found: list[TrialResult] = []
    runner = PeerRunner(Peer(script="fake.py", environment="env", servers=True), tmp_path)
    runner.run_group(scenario, scenario.cases(), 0, found.append)
    return found


def test_a_peer_is_measured(scenario: Scenario, tmp_path: Path) -> None:
    trial = _measure(scenario, tmp_path, GOOD)[0]
    assert trial.case.engine == "fake"
    assert trial.metrics["inter_token_p50_s"] == pytest.approx(0.2)
    assert trial.metrics["time_to_first_token_s"] == 0.5


@pytest.mark.parametrize(
    "script",
    [
        "raise SystemExit('no such model')",
        GOOD.replace('print(json.dumps({"load"', 'raise SystemExit("no such model"); print(json.dumps({"load"'),
    ],
)
def test_a_peer_that_ends_early_is_named_with_its_last_words(scenario: Scenario, tmp_path: Path, script: str) -> None:
    with pytest.raises(StageCrashed, match="no such model"):
        _measure(scenario, tmp_path, script)


def test_a_missing_environment_names_the_command(scenario: Scenario, tmp_path: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"envs\.py llama-rpc"):
        PeerRunner(PEERS["llama.cpp"], tmp_path).run_group(scenario, scenario.cases(), 0, lambda _: None)
