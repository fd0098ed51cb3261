"""`plan` and `advise` as people and scripts call them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.model.presets import describe_preset, find_preset

CLUSTER = """\
[[node]]
name = "desktop"
memory = "32 GiB"
memory_bandwidth = "60 GB/s"
compute = "1.2 TFLOP/s"
[[node.device]]
kind = "cuda"
memory = "24 GiB"
memory_bandwidth = "936 GB/s"
compute = "142 TFLOP/s"
[[node]]
name = "mac"
memory = "24 GiB"
memory_bandwidth = "200 GB/s"
compute = "5 TFLOP/s"
[defaults.link]
bandwidth = "1 Gbit/s"
latency = "0.5 ms"
"""


def shardwise(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "shardwise.cli", *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return str(path)


def test_plan_for_people_and_as_json(cluster: str, tmp_path: Path) -> None:
    shown = shardwise("plan", "llama-3-70b:q4_k_m", "--cluster", cluster)
    assert shown.returncode == 0, shown.stderr
    for text in ("SHARD", "[desktop cuda", "--> back", "####", "first token", "not on mac"):
        assert text in shown.stdout
    out = tmp_path / "plan.json"
    scripted = shardwise("plan", "llama-3-70b:q4_k_m", "--cluster", cluster, "--json", "--out", str(out))
    document = json.loads(scripted.stdout)
    assert document["stages"][0]["layers"][0] == 0
    assert document["optimal"] is True
    assert json.loads(out.read_text())["stages"] == document["stages"]


def test_advise_says_the_verdict_first(cluster: str) -> None:
    shown = shardwise("advise", "llama-3-8b:q4_k_m", "--cluster", cluster)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("SINGLE NODE")
    nothing = shardwise("advise", "llama-3.1-405b:q8_0", "--cluster", cluster, "--json")
    assert nothing.returncode == 3
    document = json.loads(nothing.stdout)
    assert document["strategy"] is None
    assert document["advice"]["verdict"] in ("infeasible", "add_memory")


def test_nothing_fits_is_exit_3_with_bytes_per_machine(cluster: str) -> None:
    found = shardwise("plan", "llama-3.1-405b:q8_0", "--cluster", cluster, "--json")
    assert found.returncode == 3
    error = json.loads(found.stdout)["error"]
    assert error["type"] == "NoFeasiblePlanError"
    assert set(error["short_by_bytes_per_node"]) == {"desktop", "mac"}


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["llama-3-70b:q4_k_m"], "no cluster file"),
        (["llama-3-70bb:q4_k_m", "--cluster", "C"], "llama-3-70b"),
        (["llama-3-8b", "--cluster", "C", "--prompt-tokens", "100000"], "beyond"),
        (["llama-3-8b", "--cluster", "C", "--objective", "latencey"], "did you mean 'latency'"),
        (["llama-3-8b", "--cluster", "C", "--draft", "4"], "--draft"),
        (["llama-3-8b", "--cluster", "C", "--max-p95", "5"], "has no unit"),
        (["llama-3-8b", "--cluster", "C", "--time-limit", "-1"], "time_limit"),
        (["llama-3-8b", "--cluster", "nowhere.toml"], "cannot read the cluster file"),
    ],
)
def test_bad_input_is_exit_2_and_one_line(cluster: str, arguments: list[str], what: str) -> None:
    found = shardwise("plan", *(cluster if a == "C" else a for a in arguments))
    assert found.returncode == 2
    assert what in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "title", "label"),
    [
        ("gpt-oss:20b", "gpt-oss-20b", None),
        ("llama3:8b", "llama-3-8b", None),
        ("qwen2.5:32b-instruct-q4_K_M", "qwen2.5-32b", "Q4_K_M"),
        ("qwen3:30b-a3b", "qwen3-30b-a3b", None),
        ("llama-3-8b:q8_0", "llama-3-8b", "Q8_0"),
    ],
)
def test_names_as_other_programs_write_them(name: str, title: str, label: str | None) -> None:
    assert find_preset(name).name == title
    assert label is None or describe_preset(name).quantization == label
