"""The prediction matrix: its scenario, its verdicts, and that the fit finds the costs a made-up machine has."""

from __future__ import annotations

import pytest

from shardwise.bench.prediction_calibration import MACHINE, PROMPT_TOKENS, RunFigures, fit
from shardwise.bench.prediction_matrix import Cell, chosen, judge, predict_cell, predicted_figures
from shardwise.bench.scenario import load_scenario
from shardwise.machines.profile import LayerTiming, LinkProfile, Measurement, NodeProfile, RateTable
from shardwise.model.description import ModelDescription
from shardwise.model.presets import describe_preset

LAYER_S = 2e-4
STEP_S, SAMPLE_S, HOP_S = 1e-4, 3e-4, 1e-4


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
    kv = RateTable(quantization="KV_F16", library="test", compute_flops_per_s=rate, weight_bytes_per_s=Measurement(value=1e15))
    return NodeProfile(
        name=MACHINE,
        memory_bytes=2**34,
        memory_bytes_per_s=rate,
        compute_flops_per_s=rate,
        num_cores=2,
        machine=MACHINE,
        rates=(table, kv),
    )


def _run(model: ModelDescription, stages: int) -> RunFigures:
    """What a machine would show whose layers are twice as slow inside a stage."""
    per_stage = model.num_layers // stages
    head_s = 1.0 * 2 * LAYER_S * model.head_bytes / model.layers[0].weight_bytes
    decode = [2 * LAYER_S * per_stage for _ in range(stages)]
    decode[-1] += head_s
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
    )


def test_the_fit_finds_the_costs_of_a_made_up_machine(model: ModelDescription) -> None:
    scenario = load_scenario("predictions")
    link = LinkProfile(source="", target="", bytes_per_s=Measurement(value=1e9), latency_s=Measurement(value=HOP_S, n=9))
    links = {network.name: link for network in scenario.networks}
    known = fit(model, scenario, _node(model), links, _run(model, 1), _run(model, 2), _run(model, 2))
    assert known.costs.step_overhead_s == pytest.approx(STEP_S, rel=0.05)
    assert known.costs.sample_row_s == pytest.approx(SAMPLE_S, rel=0.05)
    assert known.node.rates[0].timings[0].layer_s.value == pytest.approx(2 * LAYER_S, rel=0.05)
    assert known.costs.shared_speed == 1.0
    case = next(c for c in scenario.cases() if len(c.hosts) == 2 and c.network == "gigabit" and c.workload == "100 x1")
    figures = predicted_figures(predict_cell(case, scenario, model, known))
    assert figures["time_per_output_token_s"] == pytest.approx(_run(model, 2).gap_s, rel=0.05)


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
