"""The prediction matrix: its scenario, its verdicts, and that the fit finds the costs a made-up machine has."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shardwise.bench.prediction_calibration import MACHINE, Calibration, fit
from shardwise.bench.prediction_matrix import Cell, chosen, compare_all, judge, predict_cell, predicted_figures
from shardwise.bench.prediction_runs import LONG_PROMPT_TOKENS, OUTPUT_TOKENS, PROMPT_TOKENS, RunFigures, Runs
from shardwise.bench.result import RequestResult, TrialError, TrialResult
from shardwise.bench.scenario import load_scenario
from shardwise.machines.profile import HEAD_TABLE, LayerTiming, LinkProfile, Measurement, NodeProfile, RateTable
from shardwise.model.description import ModelDescription
from shardwise.model.presets import describe_preset
from shardwise.records import replace

LAYER_S = 2e-4
STEP_S, SAMPLE_S, HOP_S = 1e-4, 3e-4, 1e-4  # beside a stage's step
INSIDE_S, HEAD_S = 2e-4, 1e-3  # within it
KV_BYTES_PER_S = 4e9
MESSAGE_CPU_S, DRIVER_CPU_S = 2e-4, 4e-4


@pytest.fixture(name="model")
def _model() -> ModelDescription:
    return describe_preset("smollm2-135m", "Q4_1")


def _node(model: ModelDescription) -> NodeProfile:
    rate = Measurement(value=1e10)
    timings = tuple(LayerTiming(rows=rows, layer_s=Measurement(value=LAYER_S * scale)) for rows, scale in ((1, 1), (128, 30)))
    table = RateTable(
        quantization="Q4_1",
        library="test",
        compute_flops_per_s=Measurement(value=1e12),
        weight_bytes_per_s=rate,
        timings=timings,
        timing_layer_bytes=model.layers[0].weight_bytes,
        attention_flops_per_s=Measurement(value=1e15),
    )
    kv_rate = Measurement(value=KV_BYTES_PER_S)
    kv = RateTable(quantization="KV_F16", library="test", compute_flops_per_s=rate, weight_bytes_per_s=kv_rate)
    head = RateTable(
        quantization=HEAD_TABLE,
        library="test",
        compute_flops_per_s=rate,
        weight_bytes_per_s=rate,
        timings=tuple(LayerTiming(rows=n, layer_s=Measurement(value=HEAD_S * k)) for n, k in ((1, 1), (2, 5), (4, 8))),
        timing_layer_bytes=model.head_bytes,
    )
    return NodeProfile(
        name=MACHINE,
        memory_bytes=2**34,
        memory_bytes_per_s=rate,
        compute_flops_per_s=rate,
        num_cores=2,
        machine=MACHINE,
        rates=(table, kv, head),
    )


def _run(model: ModelDescription, stages: int, prompt_tokens: int = PROMPT_TOKENS) -> RunFigures:
    """What a machine would show whose layers are twice as slow inside a stage, and read the cache as fast as alone."""
    per_stage = model.num_layers // stages
    blocks = -(-(prompt_tokens + OUTPUT_TOKENS // 2) // 256) - 1  # beyond the first one, which each timing has in it
    kv_s = blocks * 256 * model.layers[0].kv.bytes_per_token("f16") / KV_BYTES_PER_S
    decode = [INSIDE_S + (2 * LAYER_S + kv_s) * per_stage for _ in range(stages)]
    decode[-1] += HEAD_S
    hops = HOP_S * stages if stages > 1 else 0.0
    return RunFigures(
        gap_s=sum(decode) + STEP_S * stages + SAMPLE_S + hops,
        jitter=0.02,
        first_token_s=1.0,
        decode_s=tuple(decode),
        prefill_s=tuple(0.5 for _ in range(stages)),
        memory_bytes=(200_000_000,) * stages,
        weight_bytes=(50_000_000,) * stages,
        kv_bytes=(30_000_000,) * stages,
        layers=tuple((i * per_stage, (i + 1) * per_stage) for i in range(stages)),
        beside_cpu_s=(STEP_S + SAMPLE_S / stages + MESSAGE_CPU_S,) * stages,
        driver_cpu_s=DRIVER_CPU_S,
        around_s=(*(STEP_S,) * (stages - 1), STEP_S + SAMPLE_S),
        prompt_tokens=prompt_tokens,
    )


def _runs(model: ModelDescription) -> Runs:
    one, two = _run(model, 1), _run(model, 2)
    drifts = (0.9, 1.0, 1.3)  # the machine is faster and slower in turns
    return Runs(
        one=one,
        far=_run(model, 1, LONG_PROMPT_TOKENS),
        two=two,
        pair=two,
        inside_s=tuple(drift * (sum(two.decode_s) - one.decode_s[0]) for drift in drifts),
    )


@pytest.fixture(name="known")
def _known(model: ModelDescription) -> Calibration:
    scenario = load_scenario("predictions")
    ping = Measurement(value=3 * HOP_S, n=9)  # an idle core wakes up late
    link = LinkProfile(source="", target="", bytes_per_s=Measurement(value=1e9), latency_s=ping)
    return fit(model, scenario, _node(model), {network.name: link for network in scenario.networks}, _runs(model))


def test_the_fit_finds_the_costs_of_a_made_up_machine(model: ModelDescription, known: Calibration) -> None:
    assert known.costs.step_overhead_s == pytest.approx(INSIDE_S + STEP_S, rel=0.05)
    assert known.costs.sample_row_s == pytest.approx(SAMPLE_S, rel=0.05)
    assert known.costs.message_cpu_s == pytest.approx(MESSAGE_CPU_S, rel=0.05)
    assert known.costs.driver_cpu_s == DRIVER_CPU_S
    assert known.node.rates[0].timings[0].layer_s.value == pytest.approx(2 * LAYER_S, rel=0.01)
    assert known.node.rates[1].weight_bytes_per_s.value == pytest.approx(KV_BYTES_PER_S, rel=0.01)
    assert known.costs.shared_speed == 1.0
    assert known.links["gigabit"].latency_s.value == pytest.approx(HOP_S, rel=0.05)
    scenario = load_scenario("predictions")
    case = next(c for c in scenario.cases() if len(c.hosts) == 2 and c.network == "gigabit" and c.workload == "100 x1")
    figures = predicted_figures(predict_cell(case, scenario, model, known))
    assert figures["time_per_output_token_s"] == pytest.approx(_run(model, 2, 100).gap_s, rel=0.05)


def test_two_rows_pay_what_the_head_takes_for_two(model: ModelDescription, known: Calibration) -> None:
    scenario = load_scenario("predictions")
    cases = {c.num_users: c for c in scenario.cases() if len(c.hosts) == 1 and c.network == "loopback" and "100 x" in c.workload}
    one, two = (predict_cell(cases[users], scenario, model, known).stages[0].compute_s.decode_p50 for users in (1, 2))
    assert two - one > 3.9 * HEAD_S


def test_the_matrix_is_the_issues() -> None:
    scenario = load_scenario("predictions")
    cases = scenario.cases()
    assert len(cases) == 5 * 4 * 3 * 2
    assert {len(c.hosts) for c in cases} == {1, 2, 3, 4, 5}
    assert {c.num_users for c in cases} == {1, 2, 4}
    assert PROMPT_TOKENS not in {c.prompt_tokens for c in cases}
    assert len(chosen(scenario, "gigabit", "2,3", "100 x1").cases()) == 2


def test_verdicts_name_the_worst_cell() -> None:
    cells = [
        Cell(case=f"c{i}", metric="time_to_first_token_s", predicted=1.0 + error, measured=1.0)
        for i, error in enumerate((0.05, -0.08, 0.3))
    ]
    found = judge(cells)[0]
    assert (found.worst_case, found.ok) == ("c2", False)
    assert found.median == pytest.approx(0.08)
    assert judge(cells[:2])[0].ok


def test_one_hiccup_of_three_repetitions_is_not_what_a_case_takes(model: ModelDescription, known: Calibration) -> None:
    scenario = load_scenario("predictions")
    case = next(c for c in scenario.cases() if len(c.hosts) == 1 and c.network == "loopback" and c.workload == "100 x1")

    def trial(repetition: int, gap_s: float) -> TrialResult:
        request = RequestResult(
            prompt_tokens=100,
            num_tokens=3,
            time_to_first_token_s=10 * gap_s,
            inter_token_s=(gap_s, gap_s),
            finish_reason="length",
            token_digest="",
        )
        return TrialResult(case=case, repetition=repetition, started="", duration_s=1.0, requests=(request,))

    broken = TrialResult(
        case=case, repetition=3, started="", duration_s=0.0, error=TrialError(type="StageCrashed", message="gone")
    )
    found = predict_cell(case, scenario, model, known)
    trials = [trial(0, 0.01), trial(1, 0.05), trial(2, 0.011), broken]
    cells = compare_all(trials, [{case.key: replace(found, stages=())}] * 3)
    measured = {cell.metric: cell.measured for cell in cells}
    assert measured["time_per_output_token_s"] == pytest.approx(0.011)
    assert measured["time_to_first_token_s"] == pytest.approx(0.11)
    assert measured["inter_token_p95_s"] == pytest.approx(0.05)


def test_run_tells_what_was_predicted_beside_what_was_measured() -> None:
    """End to end: on the first run of a model a probe of seconds, then the prediction under the names of the measured run."""
    command = [sys.executable, "-m", "shardwise.cli", "run", "sample", "--stages", "2", "--prompt", "Ships and the sea", "--json"]
    done = subprocess.run([*command, "--max-tokens", "24", "--ignore-eos"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    predicted = measured["predicted"]
    if predicted is None:  # allowed only where this machine is too busy to be measured in time, and then it is said
        verbose = subprocess.run([*command, "-v"], capture_output=True, text=True, timeout=120)
        assert "no prediction: the layer probe took more than" in verbose.stderr
        return
    for name in ("time_to_first_token_s", "inter_token_s", "decode_tokens_per_s", "prefill_tokens_per_s", "stages", "boundaries"):
        assert name in predicted
        assert name in measured
    assert [s["layers"] for s in predicted["stages"]] == [s["layers"] for s in measured["stages"]]
    for ahead, stage in zip(predicted["stages"], measured["stages"]):
        assert ahead["peak_memory_bytes"] == pytest.approx(stage["peak_memory_bytes"], rel=0.3)
    assert 0.2 < measured["decode_tokens_per_s"] / predicted["decode_tokens_per_s"] < 2.0  # the machine may be busy, not faster
