"""A rate that was measured with another quantization is told, in words and numbers; a measured or a stated one is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli.main import run
from shardwise.machines.profile import HEAD_TABLE, LayerTiming, Measurement, NodeProfile, RateTable
from shardwise.planner import PlanRequest, Reason, find_plan
from shardwise.records import replace
from tests.planner.builders import make_cluster, make_gpu, make_model, make_node


def rate(quantization: str, timed: bool = False) -> RateTable:
    timings = (LayerTiming(rows=1, layer_s=Measurement(value=1e-4)),) if timed else ()
    return RateTable(
        quantization=quantization,
        library="llama.cpp",
        compute_flops_per_s=Measurement(value=1e11, n=5),
        weight_bytes_per_s=Measurement(value=2e10, n=5),
        timings=timings,
        timing_layer_bytes=10**6 if timed else 0,
    )


def told(node: NodeProfile, quantization: str) -> Reason | None:
    model = make_model(quantization=quantization)
    plan = find_plan(PlanRequest(model=model, cluster=make_cluster([node])))
    assert plan.advice is not None
    return next((reason for reason in plan.advice.reasons if reason.case == "rates_are_borrowed"), None)


def test_a_quick_probe_is_told_for_another_quantization() -> None:
    node = replace(make_node("desk"), rates=(rate("Q4_K"), rate("KV_F16")))
    found = told(node, "Q4_1")
    assert found is not None
    assert found.message.startswith("The rate of Q4_K was used for Q4_1 on desk: ")
    assert "probe --model" in found.message
    assert "\n" not in found.message
    assert found.numbers["rates"] == [{"node": "desk", "device": "cpu", "quantization": "Q4_1", "taken": ["Q4_K"]}]


def test_what_was_measured_or_stated_is_not_told() -> None:
    node = make_node("desk")
    assert told(node, "Q4_1") is None
    assert told(replace(node, rates=(rate("Q4_K"), rate("Q4_1"))), "Q4_1") is None
    assert told(replace(node, rates=(rate("Q4_1", timed=True), rate(HEAD_TABLE, timed=True))), "Q4_1") is None


def test_the_device_that_computes_counts() -> None:
    gpu = make_gpu()
    node = replace(make_node("desk", devices=(replace(gpu, rates=(rate("Q8_0"), rate("Q4_K"))),)), rates=(rate("Q4_1"),))
    found = told(node, "Q4_1")
    assert found is not None
    assert "The rate of Q8_0 and Q4_K was used for Q4_1 on desk's cuda" in found.message


def test_plan_and_advise_tell_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "quick.toml"
    file.write_text(
        '[[node]]\nname = "desk"\nmemory = "8 GiB"\nmemory_bandwidth = "40 GB/s"\ncompute = "1 TFLOP/s"\n'
        '[[node.rate]]\nquantization = "Q4_K"\nlibrary = "llama.cpp"\ncompute = "0.5 TFLOP/s"\nweight_bandwidth = "20 GB/s"\n'
    )
    for command in ("plan", "advise"):
        arguments = [command, "llama-3.2-1b:q8_0", "--cluster", str(file)]
        assert run(arguments) == 0
        assert "The rate of Q4_K was used for Q8_0 on desk" in capsys.readouterr().out
        assert run(["--json", *arguments]) == 0
        reasons = json.loads(capsys.readouterr().out)["advice"]["reasons"]
        assert any(reason["case"] == "rates_are_borrowed" for reason in reasons)
