"""`shardwise bench` as people use it: exit statuses, one JSON document, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.bench.scenario import load_scenario
from shardwise.bench.store import TrialStore
from shardwise.cli.main import run
from shardwise.records import replace, to_json
from tests.bench.builders import make_case, make_result, make_trial


def _result(folder: Path, name: str, *, factor: float = 1.0) -> Path:
    trials = [make_trial(make_case(), repetition, factor=factor, noise=0.02) for repetition in range(4)]
    path = folder / f"{name}.json"
    path.write_bytes(to_json(make_result(trials, name=name)))
    return path


def test_list_names_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "list", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["scenarios"]]
    assert {"home", "smoke", "truth", "faults", "users", "peers"} <= set(names)


def test_compare_finds_a_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, slow = _result(tmp_path, "base"), _result(tmp_path, "slow", factor=2.0)
    assert run(["bench", "compare", str(base), str(slow), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["regressions"] > 0
    assert run(["bench", "compare", str(base), str(base)]) == 0
    assert "0 regressions" in capsys.readouterr().out


def test_report_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "report", str(_result(tmp_path, "base")), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert "report.html" in capsys.readouterr().out


def test_gate_ends_with_1_outside_its_limits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = make_case().key
    rule = f'[[rule]]\nname = "r"\nmetric = "inter_token_p50_s"\ncase = "{key}"\nover = "{key}"\nat_most = LIMIT\n'
    result = _result(tmp_path, "base")
    for limit, status in (("1.5", 0), ("0.5", 1)):
        gate = tmp_path / "gate.toml"
        gate.write_text(rule.replace("LIMIT", limit))
        assert run(["bench", "gate", str(result), str(gate)]) == status
    assert "FAIL r" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bench", "hoem"], "did you mean home"),
        (["bench", "home", "--repetitions", "-1"], "repetitions"),
        (["bench", "report", "nowhere.json"], "nowhere.json"),
        (["bench", "compare", "nowhere.json", "nowhere.json"], "cannot read"),
        (["bench", "gate", "nowhere.json", "nowhere.toml"], "cannot read"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    assert named in error


def test_another_scenarios_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TrialStore(tmp_path, replace(load_scenario("smoke"), seed=99))
    assert run(["bench", "smoke", "--out", str(tmp_path)]) == 2
    assert "another scenario" in capsys.readouterr().err


def test_the_lab_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "lab", "profiles", "--json"]) == 0
    assert "wifi_busy" in json.loads(capsys.readouterr().out)
    assert run(["bench", "lab", "clean"]) == 0
