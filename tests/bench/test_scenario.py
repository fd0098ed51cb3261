"""Scenario files, order, resuming, and the loop, with a runner that measures by rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwise.bench.result import Case, TrialResult, read_result
from shardwise.bench.runner import OnTrial, run_scenario
from shardwise.bench.scenario import Scenario, load_scenario, ordered_groups, parse_scenario, scenario_names
from shardwise.bench.store import TrialStore, load_result
from shardwise.clock import ManualClock
from shardwise.errors import StageCrashed, UsageError
from tests.bench.builders import make_trial

TEXT = """
name = "small"
title = "Small"
seed = 3
repetitions = 2
target = { inter_token_p95 = "150 ms" }
[[network]]
name = "cable"
hosts = [{ name = "desktop", link = "ethernet_1g" }, { name = "nas", link = "wifi_busy", speed = 0.5, memory = "1 GiB" }]
links = [{ from = "desktop", to = "nas", delay = "3 ms" }]
[[load]]
name = "short"
prompt_tokens = 8
output_tokens = 4
[[load]]
name = "two"
prompt_tokens = 8
output_tokens = 4
num_users = 2
[[split]]
name = "alone"
hosts = ["desktop"]
[[split]]
hosts = ["desktop", "nas"]
layers = [20, 10]
[[fault]]
name = "nap"
steps = [{ kind = "stop", target = "nas", at_token = 2, duration = "500 ms" }]
[[measure]]
networks = ["cable"]
splits = ["alone", "desktop+nas"]
loads = ["short", "two"]
[[measure]]
networks = ["cable"]
splits = ["desktop+nas"]
loads = ["short"]
faults = ["nap"]
"""


def test_a_scenario_unfolds() -> None:
    scenario = parse_scenario(TEXT)
    assert scenario.target_inter_token_p95_s == 0.15
    assert scenario.networks[0].hosts[1].memory_bytes == 2**30
    assert scenario.networks[0].links[0].shape.delay_s == 0.003
    cases = scenario.cases()
    assert len(cases) == 5
    assert {case.num_users for case in cases} == {1, 2}
    assert [case.faults for case in cases if case.faults] == [("nap",)]
    assert {case.asking_host for case in cases} == {"desktop"}
    assert parse_scenario(TEXT.replace("layers = [20, 10]", 'asked_from = "nas"')).cases()[-1].asking_host == "nas"
    assert scenario.fault_schedule("nap")[0].duration_s == 0.5


def test_every_scenario_that_comes_along_is_sound() -> None:
    assert {"home", "smoke"} <= set(scenario_names())
    for name in scenario_names():
        assert load_scenario(name).cases()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('link = "ethernet_1g"', 'link = "ethernet_1gb"', "ethernet_1g"),
        ('delay = "3 ms"', 'delay = "3"', "unit"),
        ('delay = "3 ms"', 'dealy = "3 ms"', "dealy"),
        ('loads = ["short"]', 'loads = ["shirt"]', "shirt"),
        ("prompt_tokens = 8", "prompt_tokens = '8'", "prompt_tokens"),
        ('hosts = ["desktop", "nas"]', 'hosts = ["desktop", "fridge"]', "fridge"),
        ("layers = [20, 10]", 'layers = [20, 10]\nasked_from = "fridge"', "fridge"),
        ("repetitions = 2", "repetitions = 0", "repetitions"),
        ("seed = 3", "sede = 3", "sede"),
        ("at_token = 2", "at_token = 0", "at_token"),
        ("[[load]]", "[[load]", "TOML"),
    ],
)
def test_bad_scenarios_name_what_is_wrong(old: str, new: str, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        parse_scenario(TEXT.replace(old, new), where="my.toml")


def test_unknown_scenarios_are_suggested_or_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean home"):
        load_scenario("hoem")
    with pytest.raises(UsageError, match="cannot read"):
        load_scenario(str(tmp_path / "none.toml"))


def test_the_order_is_random_by_seed_and_blocked_by_repetition() -> None:
    cases = load_scenario("home").cases()
    order = ordered_groups(cases, 3, 1)
    assert order == ordered_groups(cases, 3, 1)
    assert order != ordered_groups(cases, 3, 2)
    assert [repetition for repetition, _ in order] == sorted(repetition for repetition, _ in order)
    assert sum(len(group) for _, group in order) == 3 * len(cases)
    assert all(len({(case.network, case.split) for case in group}) == 1 for _, group in order)


class RuleRunner:
    """Measures by rule; can break down or be interrupted after so many trials."""

    def __init__(self, *, interrupt_after: int = 10**9, crash_in: str = "") -> None:
        self.measured: list[tuple[str, int]] = []
        self._interrupt_after, self._crash_in = interrupt_after, crash_in

    def run_group(self, scenario: Scenario, cases: Sequence[Case], repetition: int, on_trial: OnTrial) -> None:
        for case in cases:
            if len(self.measured) >= self._interrupt_after:
                raise KeyboardInterrupt
            if case.split == self._crash_in:
                raise StageCrashed("the worker of stage 1 ended", where="stage 1")
            self.measured.append((case.key, repetition))
            on_trial(make_trial(case, repetition))


class Watcher:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.begun: tuple[int, int] = (0, 0)
        self.left: list[float] = []

    def begin(self, num_trials: int, num_done: int) -> None:
        self.begun = (num_trials, num_done)

    def next_group(self, case: Case, repetition: int) -> None:
        pass

    def finished(self, trial: TrialResult, num_done: int, left_s: float) -> None:
        self.left.append(left_s)


def test_an_interrupted_run_goes_on_and_repeats_nothing(tmp_path: Path) -> None:
    scenario = parse_scenario(TEXT)
    first = RuleRunner(interrupt_after=4)
    with pytest.raises(KeyboardInterrupt):
        run_scenario(scenario, TrialStore(tmp_path, scenario), {"shardwise": first}, Watcher())
    assert not load_result(tmp_path).complete
    with (tmp_path / "trials.jsonl").open("ab") as file:
        file.write(b'{"case": {"torn')  # what a crash leaves
    second, watcher = RuleRunner(), Watcher()
    result = run_scenario(scenario, TrialStore(tmp_path, scenario), {"shardwise": second}, watcher)
    assert watcher.begun == (10, 4)
    assert not set(first.measured) & set(second.measured)
    assert len(first.measured) + len(second.measured) == len(result.trials) == 10
    assert result.complete
    third = RuleRunner()
    run_scenario(scenario, TrialStore(tmp_path, scenario), {"shardwise": third}, Watcher())
    assert third.measured == []


def test_a_failed_group_is_kept_with_its_error_and_tried_again(tmp_path: Path) -> None:
    scenario = parse_scenario(TEXT)
    result = run_scenario(scenario, TrialStore(tmp_path, scenario), {"shardwise": RuleRunner(crash_in="alone")}, Watcher())
    failed = [trial for trial in result.trials if trial.error is not None]
    assert {trial.error.type for trial in failed if trial.error} == {"StageCrashed"}
    assert len(failed) == 4
    again = RuleRunner()
    result = run_scenario(scenario, TrialStore(tmp_path, scenario), {"shardwise": again}, Watcher())
    assert len(again.measured) == 4
    assert not [trial for trial in result.trials if trial.error is not None]
    assert len(result.trials) == 10


def test_time_left_comes_down(tmp_path: Path) -> None:
    scenario, watcher, clock = parse_scenario(TEXT), Watcher(), ManualClock()

    class Slow(RuleRunner):
        def run_group(self, scenario: Scenario, cases: Sequence[Case], repetition: int, on_trial: OnTrial) -> None:
            clock.sleep(2.0 * len(cases))
            super().run_group(scenario, cases, repetition, on_trial)

    run_scenario(scenario, TrialStore(tmp_path, scenario), {"shardwise": Slow()}, watcher, clock=clock)
    assert watcher.left[-1] == 0.0
    assert 5.0 < watcher.left[3] < 30.0


def test_a_folder_of_another_scenario_is_refused(tmp_path: Path) -> None:
    TrialStore(tmp_path, parse_scenario(TEXT))
    with pytest.raises(UsageError, match="another scenario"):
        TrialStore(tmp_path, parse_scenario(TEXT.replace("seed = 3", "seed = 4")))


@pytest.mark.parametrize("data", [b"", b"{}", b'{"version": 99}', b"\xff\xfe", b'{"version": 1, "name": 3}'])
def test_files_that_are_no_results_are_refused(data: bytes) -> None:
    with pytest.raises(UsageError):
        read_result(data, where="x.json")
