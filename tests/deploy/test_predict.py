"""`predicted` of a local run: the names of `run --json`, more stages than cores, and a probe that is too slow."""

from __future__ import annotations

import pytest

from shardwise.bench import run_prediction
from shardwise.deploy.options import RunOptions
from shardwise.deploy.predict import as_document, predict_run
from shardwise.errors import ReplyTimeout
from shardwise.machines.profile import Measurement, NodeProfile, RateTable
from shardwise.model.description import ModelDescription
from shardwise.model.presets import describe_preset


@pytest.fixture(name="model")
def _model() -> ModelDescription:
    return describe_preset("smollm2-135m", "Q4_1")


@pytest.fixture(name="node")
def _node() -> NodeProfile:
    rate, compute = Measurement(value=15e9), Measurement(value=200e9)
    table = RateTable(quantization="Q4_1", library="test", compute_flops_per_s=compute, weight_bytes_per_s=rate)
    return NodeProfile(
        name="local",
        memory_bytes=2**34,
        memory_bytes_per_s=rate,
        compute_flops_per_s=compute,
        num_cores=2,
        machine="local",
        rates=(table,),
    )


def test_the_document_has_the_names_of_a_measured_run(model: ModelDescription, node: NodeProfile) -> None:
    found = as_document(predict_run(model, RunOptions(num_stages=3), node, prompt_tokens=100, output_tokens=16))
    assert {"time_to_first_token_s", "inter_token_s", "decode_tokens_per_s", "stages", "boundaries"} <= set(found)
    assert found["stages"][0]["layers"][0] == 0
    assert found["stages"][-1]["layers"][1] == model.num_layers
    assert len(found["boundaries"]) == 3
    assert {"from", "to", "transfer_s", "bytes_per_token"} <= set(found["boundaries"][0])
    assert found["decode_tokens_per_s"] > 0


def test_stages_beyond_the_cores_do_not_read_prompts_faster(model: ModelDescription, node: NodeProfile) -> None:
    first = [
        predict_run(model, RunOptions(num_stages=n), node, prompt_tokens=1500, output_tokens=2).time_to_first_token_s
        for n in (1, 2, 5)
    ]
    assert first[1] < 0.8 * first[0]
    assert first[2] > 0.85 * first[1]


def test_more_sessions_hold_more_memory(model: ModelDescription, node: NodeProfile) -> None:
    few, many = (
        predict_run(model, RunOptions(max_sessions=n), node, prompt_tokens=10, output_tokens=2).stages[0] for n in (1, 4)
    )
    assert many.kv_bytes == 4 * few.kv_bytes


def test_a_probe_that_does_not_answer_leaves_no_prediction(model: ModelDescription, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object) -> NodeProfile:
        raise ReplyTimeout("the layer probe took more than 4 s")

    monkeypatch.setattr(run_prediction, "own_node", late)
    found, why = run_prediction.predict_local(model, RunOptions(), prompt_tokens=1, output_tokens=1)
    assert found is None
    assert "more than 4 s" in why


def test_stages_on_a_gpu_are_not_predicted(model: ModelDescription) -> None:
    assert run_prediction.predict_local(model, RunOptions(gpu_layers=9), prompt_tokens=1, output_tokens=1)[0] is None
