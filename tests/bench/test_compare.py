"""Differences, noise, culprits, and the gate."""

from __future__ import annotations

import pytest

from shardwise.bench.compare import compare
from shardwise.bench.gate import check_gate, read_gate
from shardwise.bench.parts import account, culprits, refine_offsets, to_common_clock
from shardwise.bench.result import ClockOffset, StageVisit, TokenTrace, TrialError, TrialResult
from shardwise.bench.stats import Interval, bootstrap_ratio, quantile
from shardwise.errors import UsageError
from shardwise.records import replace
from tests.bench.builders import make_case, make_result, make_trial

CASE = make_case()


def _run(seed: int, *, factor: float = 1.0, noise: float = 0.05, **parts: object) -> object:
    trials = [make_trial(CASE, repetition, seed=seed, factor=factor, noise=noise, **parts) for repetition in range(3)]  # type: ignore[arg-type]
    return make_result(trials, name=f"run {seed}")


def test_a_slower_run_is_worse_and_a_faster_one_better() -> None:
    slower = compare(_run(1), _run(2, factor=1.6))  # type: ignore[arg-type]
    assert {d.outcome for d in slower.differences} == {"worse"}
    faster = compare(_run(1), _run(2, factor=0.5))  # type: ignore[arg-type]
    assert {d.outcome for d in faster.differences} == {"better"}


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_noise_is_never_called_a_regression(noise: float) -> None:
    """Thirty pairs of runs of the same thing, quiet and busy."""
    wrong = 0
    for seed in range(30):
        found = compare(_run(2 * seed, noise=noise), _run(2 * seed + 1, noise=noise))  # type: ignore[arg-type]
        wrong += len(found.regressions)
    assert wrong == 0


def test_a_busier_machine_is_not_a_regression() -> None:
    """The same thing, three times as slow because three times as many processes want a core."""
    quiet = [replace(make_trial(CASE, r), machine_s=2e-3, load_1min=1.0) for r in range(3)]
    busy = [replace(make_trial(CASE, r, factor=3.0), machine_s=3e-3, load_1min=12.0) for r in range(3)]
    assert compare(make_result(quiet), make_result(busy)).regressions == []
    slower = [replace(trial, machine_s=2e-3, load_1min=1.0) for trial in busy]
    assert compare(make_result(quiet), make_result(slower)).regressions


def test_few_repetitions_are_said_to_be_too_few() -> None:
    one = make_result([make_trial(CASE)])
    other = make_result([make_trial(CASE, factor=2.0)])
    assert {d.outcome for d in compare(one, other).differences} == {"unknown"}


def test_cases_of_one_side_only_are_named_and_failed_trials_have_no_figures() -> None:
    wifi = make_case(network="wifi")
    failed = TrialResult(
        case=wifi, repetition=0, started="", duration_s=0.0, error=TrialError(type="StageCrashed", message="it ended")
    )
    found = compare(make_result([make_trial(CASE)]), make_result([failed]))
    assert found.only_base == (CASE.key,)
    assert found.only_new == (wifi.key,)
    assert failed.metrics == {}


@pytest.mark.parametrize(
    ("change", "kind", "where", "size_s"),
    [
        ({"link_s": 3.4e-3}, "transfer", "desktop>nas", 3e-3),
        ({"compute_s": (3e-3, 8e-3)}, "compute", "nas", 4e-3),
        ({"copy_s": 0.35e-3}, "copy", "desktop", 0.3e-3),
    ],
)
def test_the_culprit_is_named_with_its_size(change: dict[str, object], kind: str, where: str, size_s: float) -> None:
    base = [make_trial(CASE, repetition, noise=0.03, num_tokens=80) for repetition in range(3)]
    new = [make_trial(CASE, repetition, noise=0.03, num_tokens=80, seed=5, **change) for repetition in range(3)]  # type: ignore[arg-type]
    found = culprits(base, new)
    blamed = next(culprit for culprit in found if culprit.kind == kind and culprit.where == where)
    assert blamed.extra_s == pytest.approx(size_s, rel=0.15)
    assert found[0].kind == kind
    assert where.split(">")[0] in blamed.sentence()


def test_the_parts_of_a_token_add_up() -> None:
    assert account(make_trial(CASE)).gap < 0.05


def test_clock_offsets_are_taken_out_and_causality_narrows_them() -> None:
    true = make_trial(CASE).tokens
    ahead_s = 5.0
    skewed = tuple(
        TokenTrace(
            number=t.number,
            arrived_s=t.arrived_s,
            visits=(t.visits[0], *(StageVisit(
                stage=v.stage, received_s=v.received_s + ahead_s, started_s=v.started_s + ahead_s,
                computed_s=v.computed_s + ahead_s, sent_s=v.sent_s + ahead_s,
            ) for v in t.visits[1:])),
        )
        for t in true
    )  # fmt: skip
    rough = [ClockOffset(node="desktop", offset_s=0.0, error_s=0.0), ClockOffset(node="nas", offset_s=5.002, error_s=0.003)]
    offsets = refine_offsets(skewed, rough, CASE.hosts)
    assert offsets[1].offset_s == pytest.approx(5.0, abs=0.001)
    for trace in to_common_clock(skewed, offsets, CASE.hosts):
        assert trace.visits[1].received_s >= trace.visits[0].sent_s - 1e-9


def test_bootstrap_and_quantiles() -> None:
    found = bootstrap_ratio([1.0, 1.1, 0.9, 1.0], [2.0, 2.1, 1.9, 2.0])
    assert isinstance(found, Interval)
    assert found.low <= 2.0 <= found.high
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0


GATE = """
[[rule]]
name = "the split costs at most twice"
metric = "inter_token_p50_s"
case = "shardwise / cable / desktop + nas / short"
over = "shardwise / cable / desktop / short"
at_most = 3.0
"""


def test_the_gate_counts_ratios() -> None:
    alone = make_case(hosts=("desktop",))
    rules = read_gate(GATE, where="gate.toml")
    good = make_result([make_trial(CASE), make_trial(alone, compute_s=(4e-3,))])
    finding = check_gate(good, rules)[0]
    assert finding.ok, finding
    bad = make_result([make_trial(CASE, factor=3.0), make_trial(alone, compute_s=(4e-3,))])
    assert not check_gate(bad, rules)[0].ok
    assert check_gate(make_result([make_trial(CASE)]), rules)[0].ratio is None


@pytest.mark.parametrize("text", ["nonsense", "[[rule]]\nname = 1", GATE.replace("inter_token_p50_s", "speed")])
def test_bad_gates_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        read_gate(text, where="gate.toml")
