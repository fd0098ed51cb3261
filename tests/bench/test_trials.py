"""Real trials: the agent, the lab, faults, and the parts of a token, on the sample model."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from shardwise.bench.deployment_runner import DeploymentRunner
from shardwise.bench.parts import account
from shardwise.bench.progress import ConsoleProgress
from shardwise.bench.result import ResultFile
from shardwise.bench.run_command import write_reports
from shardwise.bench.runner import run_scenario
from shardwise.bench.scenario import load_scenario, parse_scenario
from shardwise.bench.store import TrialStore
from shardwise.bench.truth import measure_truth
from shardwise.records import replace
from tests.needs import needs_lab

HOME = """
name = "two hosts"
title = "Two hosts"
repetitions = 1
context_tokens = 256
[[network]]
name = "cable"
hosts = [{ name = "desktop", link = "ethernet_1g" }, { name = "nas", link = "wifi_good" }]
[[load]]
name = "short"
prompt_tokens = 8
output_tokens = 24
[[load]]
name = "two users"
prompt_tokens = 8
output_tokens = 12
num_users = 2
[[split]]
name = "two"
hosts = ["desktop", "nas"]
layers = [20, 10]
[[fault]]
name = "nap"
steps = [{ kind = "stop", target = "nas", at_token = 6, duration = "400 ms" }]
[[fault]]
name = "cut"
steps = [{ kind = "cut", target = "nas", at_token = 6, duration = "300 ms" }]
[[measure]]
networks = ["cable"]
splits = ["two"]
loads = ["short", "two users"]
[[measure]]
networks = ["cable"]
splits = ["two"]
loads = ["short"]
faults = ["nap", "cut"]
"""


def _run(text_or_name: str, folder: Path) -> ResultFile:
    scenario = parse_scenario(text_or_name) if "\n" in text_or_name else load_scenario(text_or_name)
    scenario = replace(scenario, repetitions=1)
    with ConsoleProgress(quiet=True) as progress:
        return run_scenario(scenario, TrialStore(folder, scenario), {"shardwise": DeploymentRunner()}, progress)


def test_this_machine_alone(tmp_path: Path) -> None:
    """No root needed: the same tokens from one stage and from two, and parts that add up."""
    result = _run("smoke", tmp_path)
    assert [trial.error for trial in result.trials] == [None, None]
    digests = {request.token_digest for trial in result.trials for request in trial.requests}
    assert len(digests) == 1
    for trial in result.trials:
        assert account(trial).gap < 0.05
        assert trial.requests[0].num_tokens == 24
        assert all(stage.peak_memory_bytes > 5e7 for stage in trial.stages)
    split = next(trial for trial in result.trials if len(trial.case.hosts) == 2)
    assert {(b.source, b.target, b.dtype) for b in split.boundaries} == {("one", "two", "f32"), ("two", "one", "i32")}
    assert split.boundaries[0].bytes_per_token > 576 * 4
    assert split.tokens
    for before, after in itertools.pairwise(split.tokens[0].visits):
        assert after.received_s >= before.sent_s


@pytest.mark.netns
@needs_lab
def test_two_hosts_with_faults(tmp_path: Path) -> None:
    """Real workers in namespaces; a stopped and a cut-off worker; offsets of clocks that are in truth one."""
    result = _run(HOME, tmp_path)
    by_name = {(trial.case.workload, trial.case.faults): trial for trial in result.trials}
    assert len(by_name) == 4
    plain = by_name["short", ()]
    assert plain.error is None
    assert [stage.layers for stage in plain.stages] == [(0, 20), (20, 30)]
    link = next(part for part in plain.parts if part.where == "desktop>nas")
    assert link.p50_s > 0.8e-3  # the Wi-Fi's constant part
    for offset in plain.clock_offsets:
        assert abs(offset.offset_s) <= offset.error_s + 1e-3
    assert len(by_name["two users", ()].requests) == 2
    for fault in ("nap", "cut"):
        trial = by_name["short", (fault,)]
        assert trial.events[0].what.startswith({"nap": "stop nas", "cut": "cut nas"}[fault])
        if trial.error is None:
            assert trial.requests[0].token_digest == plain.requests[0].token_digest
            assert max(trial.gaps_s) > 0.2
    paths = write_reports(result, tmp_path)
    assert "When something breaks" in paths[0].read_text()


@pytest.mark.netns
@needs_lab
@pytest.mark.bench
def test_injected_faults_are_found_with_their_size(tmp_path: Path) -> None:
    """The right culprit, and its size within 15 %."""
    with ConsoleProgress(quiet=True) as progress:
        _, found = measure_truth(tmp_path, progress)
    assert all(truth.ok for truth in found), [(truth.injected, truth.sentence, truth.error) for truth in found]
