"""Every case of the advice, each in a situation made for it."""

from __future__ import annotations

import itertools
from typing import Any

from shardwise.model.presets import describe_preset
from shardwise.planner import Advice, Limits, Objective, PlanRequest, Workload, advise, smaller_quantizations
from shardwise.planner.requantize import bits_per_weight, requantized
from tests.planner.builders import GIB, llama_8b, llama_70b, make_cluster, make_gpu, make_link, make_node

VERDICTS = {
    "single_node",
    "shard",
    "smaller_quantization",
    "coarser_split",
    "stronger_node",
    "fix_link",
    "add_memory",
    "infeasible",
}


def advice(model: Any, nodes: list[Any], default: Any = None, smaller: bool = False, **more: Any) -> Advice:
    request = PlanRequest(model=model, cluster=make_cluster(nodes, default=default), **more)
    found = advise(request, (lambda: smaller_quantizations(model)) if smaller else ())
    assert found.verdict in VERDICTS
    assert found.headline
    return found


def cases(found: Advice) -> list[str]:
    return [reason.case for reason in found.reasons]


def test_one_machine_is_faster() -> None:
    found = advice(llama_8b(), [make_node("desk", memory_gib=32, devices=(make_gpu(),)), make_node("nas")])
    assert found.verdict == "single_node"
    assert "desk" in found.headline
    numbers = found.reasons[0].numbers
    assert numbers["decode_tokens_per_s"] > numbers["split_decode_tokens_per_s"]
    assert "better_left_out" in cases(found)


def test_a_split_that_hardly_helps_is_not_worth_it() -> None:
    found = advice(llama_8b(), [make_node("a"), make_node("b", bandwidth_gb_s=30)])
    assert found.verdict == "single_node"
    assert cases(found)[0] == "one_machine_is_as_good"


def test_a_large_model_is_split_and_has_no_spare_copy() -> None:
    found = advice(llama_70b(), [make_node(f"n{i}", memory_gib=16, bandwidth_gb_s=400) for i in range(4)])
    assert found.verdict == "shard"
    spare = next(r for r in found.reasons if r.case == "no_spare_copy")
    assert len(spare.numbers["replica_bytes"]) == 4
    assert all(row["bytes"] > 8 * GIB for row in spare.numbers["replica_bytes"])
    assert "paging_is_a_cliff" in cases(found)


def test_communication_dominates_names_the_link_and_its_share() -> None:
    found = advice(
        llama_70b(),
        [make_node(f"n{i}", memory_gib=24, bandwidth_gb_s=800) for i in range(2)],
        make_link(gbit=0.01, latency_ms=80),
    )
    assert found.verdict == "fix_link"
    reason = found.reasons[0]
    assert reason.case == "communication_dominates"
    assert {reason.numbers["from"], reason.numbers["to"]} == {"n0", "n1"}
    assert 0.1 < reason.numbers["share_of_token"] < 1
    assert reason.numbers["decode_tokens_per_s_over_cable"] > 1.3 * reason.numbers["decode_tokens_per_s"]


def test_a_smaller_quantization_fits_one_machine() -> None:
    nodes = [make_node("a", memory_gib=7), make_node("b", memory_gib=4)]
    found = advice(llama_8b("Q8_0"), nodes, make_link(gbit=0.1, latency_ms=5), smaller=True)
    assert found.verdict == "smaller_quantization"
    assert found.reasons[0].numbers["node"] == "a"


def test_nothing_fits_but_a_smaller_quantization_does() -> None:
    found = advice(llama_8b("F16"), [make_node("a", memory_gib=6)], smaller=True)
    assert found.verdict == "smaller_quantization"
    assert found.reasons[0].case == "smaller_quantization_only"


def test_nothing_fits_by_little_and_by_much() -> None:
    little = advice(llama_70b(), [make_node(f"n{i}", memory_gib=12) for i in range(3)])
    assert little.verdict == "add_memory"
    assert 0 < little.reasons[0].numbers["short_by_bytes"] < 10 * GIB
    much = advice(llama_70b(), [make_node("a", memory_gib=4)])
    assert much.verdict == "infeasible"
    reason = next(r for r in much.reasons if r.case == "nothing_fits")
    assert reason.numbers["short_by_bytes_per_node"]["a"] == reason.numbers["short_by_bytes"] > 30 * GIB


def test_a_model_that_cannot_be_cut_says_so() -> None:
    found = advice(describe_preset("gemma-3-27b", "Q8_0"), [make_node("a", memory_gib=24), make_node("b", memory_gib=16)])
    assert found.verdict == "infeasible"
    assert "62 layers cannot be cut" in found.headline
    assert "0 B" not in found.headline


def test_what_was_asked_for_is_not_compared_with_what_was_not() -> None:
    node = make_node("desk", memory_gib=32, devices=(make_gpu(), make_gpu(kind="vulkan")))
    found = advice(llama_8b(), [node], strategies=("tensor_parallel",))
    assert "It stays on one machine: tensor parallel on desk" in found.headline


def test_a_coarser_split_is_as_fast() -> None:
    nodes = [make_node(f"n{i}", memory_gib=22, tflops=t) for i, t in enumerate((1.0, 1.0, 0.35))]
    workload = Workload(prompt_tokens=64, output_tokens=64)
    found = advice(
        llama_70b(),
        nodes,
        make_link(gbit=10, latency_ms=0.05),
        workload=workload,
        objective=Objective(kind="weighted", weight=0.9),
    )
    assert found.verdict in ("coarser_split", "stronger_node", "shard")
    if "coarser_is_as_fast" in cases(found):
        assert found.verdict == "coarser_split"


def test_one_strong_machine_beats_two_weak_ones() -> None:
    nodes = [
        make_node("strong", memory_gib=16, bandwidth_gb_s=400, tflops=20),
        make_node("w1", memory_gib=4, bandwidth_gb_s=10, tflops=0.1),
        make_node("w2", memory_gib=4, bandwidth_gb_s=10, tflops=0.1),
    ]
    assert advice(llama_8b(), nodes).verdict == "single_node"


def test_split_and_slow_wants_a_stronger_machine() -> None:
    nodes = [
        make_node("a", memory_gib=12, bandwidth_gb_s=100),
        *[make_node(f"w{i}", memory_gib=12, bandwidth_gb_s=10) for i in range(3)],
    ]
    found = advice(llama_70b(), nodes)
    assert found.verdict == "stronger_node"
    assert found.reasons[0].numbers["stronger"] > 1.5 * found.reasons[0].numbers["decode_tokens_per_s"]


def test_wifi_tail_breaks_the_target() -> None:
    nodes = [make_node(f"n{i}", memory_gib=24, bandwidth_gb_s=800, tflops=20) for i in range(2)]
    radio = make_link(gbit=0.3, latency_ms=3, jitter_ms=300, kind="wifi")
    found = advice(llama_70b(), nodes, radio)
    assert found.verdict == "fix_link"
    assert found.reasons[0].case == "wifi_tail"
    assert found.reasons[0].numbers["p95_s"] > 1.8 * found.reasons[0].numbers["p50_s"]
    wanted = advice(llama_70b(), nodes, radio, limits=Limits(max_inter_token_p95_s=0.2))
    assert wanted.verdict == "fix_link"
    assert wanted.reasons[0].numbers["limit_s"] == 0.2
    assert "limits_broken" in cases(wanted)


def test_limits_that_nothing_keeps_are_a_verdict_too() -> None:
    found = advice(llama_8b(), [make_node("a")], limits=Limits(max_time_to_first_token_s=1e-3))
    assert found.verdict == "infeasible"
    assert "limits" in found.headline


def test_smaller_quantizations_are_smaller_and_of_the_same_shape() -> None:
    model = llama_8b("F16")
    steps = smaller_quantizations(model)
    assert [m.quantization for m in steps] == ["Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M"]
    assert all(a.weight_bytes > b.weight_bytes for a, b in itertools.pairwise(steps))
    assert all(m.num_params == model.num_params for m in steps)
    assert abs(bits_per_weight(requantized(model, "Q4_K_M")) - 4.89) < 0.01
    assert smaller_quantizations(requantized(model, "Q3_K_M")) == []
