"""The cost model's parts, each against arithmetic done by hand or a figure from its source."""

from __future__ import annotations

import math

import pytest

from shardwise.errors import UsageError
from shardwise.machines.profile import LayerTiming, Measurement, RateTable
from shardwise.planner import Plan, PlanRequest, RuntimeCosts, Speculation, Workload, predict
from shardwise.planner.cost_compute import StepShape, layer_s
from shardwise.planner.cost_links import all_reduce_s, link_between, syncs_per_token, transfer_s
from shardwise.planner.cost_memory import paging_s, rank_memory
from shardwise.planner.cost_model import CostModel
from shardwise.planner.cost_pipeline import (
    batch_rows,
    pipelined_throughput,
    prefill_s,
    replicated_availability,
    ring_token_s,
    speculation_tokens,
    uniform_prefill_s,
)
from shardwise.planner.cost_rates import rates_for
from shardwise.planner.cost_tails import HopTiming, RingTiming, quantile, simulate_ring
from tests.planner.builders import GIB, llama_8b, make_cluster, make_gpu, make_link, make_model, make_node

NO_COSTS = RuntimeCosts(message_overhead_s=0.0, header_bytes=0)


def two_stage_plan(model: CostModel, cut: int, nodes: tuple[str, str] = ("a", "b")) -> Plan:
    first, second = (model.unit(n, "cpu") for n in nodes)
    total = model.model.num_layers
    return Plan(strategy="layer_wise", stages=(model.whole_stage(first, 0, cut), model.whole_stage(second, cut, total)))


def test_the_articles_example_8_mb_over_1_gbit_is_64_ms() -> None:
    assert transfer_s(make_link(gbit=1.0, latency_ms=0.0), 8e6, NO_COSTS) == pytest.approx(0.064)


def test_a_tensor_parallel_token_of_32_layers_syncs_64_times() -> None:
    assert syncs_per_token(32) == 64
    link = make_link(gbit=1.0, latency_ms=0.5)
    small = all_reduce_s([link, link], 4096 * 4, NO_COSTS)
    assert small == pytest.approx(0.0005 + 4096 * 4 / 125e6)  # one exchange, latency first
    assert 64 * small > 0.032


def test_layer_is_a_roofline_of_weights_and_flops() -> None:
    model = make_model(1)
    node = make_node("a", bandwidth_gb_s=50, tflops=1)
    device = node.all_devices()[0]
    layer = model.layers[0]
    one = layer_s(layer, device, StepShape.decode(1, 0))
    assert one == pytest.approx(12e-6 + layer.weight_bytes / (50e9 * 0.7), rel=1e-6)
    many = layer_s(layer, device, StepShape.prefill(512, 0))
    flops = 512 * layer.flops_per_token + 512 * 513 / 2 * layer.attention_flops_per_position
    assert many == pytest.approx(12e-6 + flops / 0.5e12, rel=1e-6)


def test_context_growth_reads_the_cache() -> None:
    layer, device = make_model(1).layers[0], make_node("a").all_devices()[0]
    near, far = (layer_s(layer, device, StepShape.decode(1, n)) for n in (100, 4100))
    assert far - near == pytest.approx(4000 * layer.kv.bytes_per_token() / (50e9 * 0.7), rel=1e-6)


def test_sparse_layers_touch_more_experts_with_more_rows() -> None:
    layer = make_model(1, experts=(8, 2)).layers[0]
    assert layer.active_weight_bytes(1) < 0.5 * layer.weight_bytes
    touched = 8 * (1 - (1 - 2 / 8) ** 4)
    assert layer.experts is not None
    dense = layer.weight_bytes - 8 * layer.experts.expert_bytes
    assert layer.active_weight_bytes(4) == pytest.approx(dense + touched * layer.experts.expert_bytes)


def test_measured_layer_timings_win_over_rates() -> None:
    layer = make_model(1).layers[0]
    table = RateTable(
        quantization="Q4_0",
        library="test",
        compute_flops_per_s=Measurement(value=1e12),
        weight_bytes_per_s=Measurement(value=10e9),
        timings=tuple(LayerTiming(rows=r, layer_s=Measurement(value=s)) for r, s in ((1, 1e-3), (8, 2e-3), (64, 4e-3))),
        timing_layer_bytes=layer.weight_bytes,
    )
    device = make_node("a").all_devices()[0]
    device = type(device)(**{f: getattr(device, f) for f in device.__struct_fields__ if f != "rates"}, rates=(table,))
    assert layer_s(layer, device, StepShape.decode(1, 0)) == pytest.approx(1e-3)
    assert layer_s(layer, device, StepShape(36, 1, 0, 0, 0)) == pytest.approx(3e-3)
    assert layer_s(layer, device, StepShape(128, 1, 0, 0, 0)) == pytest.approx(4e-3 + 64 * 2e-3 / 56)
    assert rates_for(device, "Q8_0").weight_bytes_per_s == 10e9  # another kind of weight: as measured here


def test_memory_is_weights_cache_buffers_and_a_constant() -> None:
    model, costs = llama_8b(), RuntimeCosts()
    one = rank_memory(model, 0, 32, Workload(prompt_tokens=512, output_tokens=512), costs)
    two = rank_memory(model, 0, 32, Workload(prompt_tokens=512, output_tokens=512, num_users=2), costs)
    assert one.weight_bytes == model.weight_bytes
    assert one.kv_bytes == 1024 * 32 * 2 * 1024 * 2
    assert two.kv_bytes == 2 * one.kv_bytes
    quantized = rank_memory(model, 0, 32, Workload(prompt_tokens=512, output_tokens=512, kv_type="q8_0"), costs)
    assert quantized.kv_bytes == pytest.approx(one.kv_bytes * 17 / 32)


def test_tied_embeddings_count_once_in_one_stage_and_twice_in_two() -> None:
    model = make_model(4, tied=True)
    table = model.embedding[0].num_bytes
    assert model.stage_weight_bytes(0, 4) == model.weight_bytes
    assert model.stage_weight_bytes(0, 2) + model.stage_weight_bytes(2, 4) == model.weight_bytes + table


def test_paging_is_a_cliff() -> None:
    node = make_node("a", memory_gib=4, disk_gb_s=0.5)
    device = node.all_devices()[0]
    assert paging_s(4 * GIB, node, device, 4 * GIB) == 0.0
    assert paging_s(4 * GIB, node, device, 4 * GIB + 1) == pytest.approx(4 * GIB / 0.5e9)


def test_prefill_recurrence_equals_the_closed_form_for_equal_chunks() -> None:
    stages, hops = [0.3, 0.5, 0.2], [0.05, 0.07]
    assert prefill_s([[t] * 6 for t in stages], hops) == pytest.approx(uniform_prefill_s(stages, 6, hops))


def test_throughput_formulas() -> None:
    assert pipelined_throughput(1, 0.2, 0.1) == 5.0
    assert pipelined_throughput(8, 0.2, 0.1) == 10.0
    assert batch_rows(5, 2) == 3
    assert ring_token_s(4, 2, 0.2, 0.15) == pytest.approx(0.3)
    assert speculation_tokens(0.8, 4) == pytest.approx(sum(0.8**i for i in range(5)))
    assert speculation_tokens(1.0, 4) == 5.0
    assert replicated_availability([0.9, 0.9]) == pytest.approx(0.99)


def test_simulation_without_jitter_equals_the_ring_formula() -> None:
    hop = HopTiming(1e-3, 0.0, 2e-3, 4e-3, 0.0)
    timing = RingTiming([[0.02], [0.03]], [[0.1] * 3, [0.2] * 3], [hop, hop], 1, 0.0)
    alone = simulate_ring(timing, 1, 20)
    assert alone.gaps_s == pytest.approx([0.05 + 2 * 5e-3] * 19)
    assert alone.first_token_s == pytest.approx([prefill_s(timing.chunk_s, [6e-3])])
    many = simulate_ring(RingTiming([[0.02] * 2, [0.03] * 2], timing.chunk_s, [hop, hop], 2, 0.0), 4, 200)
    steady = many.gaps_s[len(many.gaps_s) // 2 :]
    assert sum(steady) / len(steady) == pytest.approx(ring_token_s(4, 2, 0.06, 0.03), rel=0.02)


def test_simulation_is_seeded_and_jitter_makes_tails() -> None:
    calm = HopTiming(1e-4, 0.0, 1e-3, 2e-3, 0.0)
    wild = HopTiming(1e-4, 0.0, 1e-3, 2e-3, 20e-3)
    make = lambda hop: RingTiming([[0.01], [0.01]], [[0.1], [0.1]], [hop, hop], 1, 0.03)  # noqa: E731
    first, again = simulate_ring(make(wild), 1, 300, 7), simulate_ring(make(wild), 1, 300, 7)
    assert first.gaps_s == again.gaps_s
    assert quantile(first.gaps_s, 0.95) > quantile(simulate_ring(make(calm), 1, 300, 7).gaps_s, 0.95) + 0.02


def test_prediction_has_the_names_of_run_and_adds_up() -> None:
    model = llama_8b()
    request = PlanRequest(model=model, cluster=make_cluster([make_node("a"), make_node("b")]))
    costs = CostModel(request)
    out = predict(request, two_stage_plan(costs, 16))
    shape = StepShape.decode(1, request.workload.mean_context_tokens)
    alone = sum(costs.unit_stage_s(costs.unit(n, "cpu"), *r, shape) for n, r in (("a", (0, 16)), ("b", (16, 32))))
    assert out.inter_token_s.p50 == pytest.approx(alone + 2 * 0.00043, rel=0.05)
    assert [(b.source, b.target) for b in out.boundaries] == [("a", "b"), ("b", "a")]
    assert out.boundaries[0].bytes_per_token == 4096 * 4
    assert out.boundaries[1].bytes_per_token == 4
    assert 0 < out.communication_share < 0.05
    assert out.bottleneck.startswith("stage")
    assert out.request_s == pytest.approx(out.time_to_first_token_s + 127 * out.time_per_output_token_s)


def test_two_users_keep_two_stages_busy() -> None:
    model = llama_8b()
    figures = []
    for users in (1, 2):
        request = PlanRequest(
            model=model,
            cluster=make_cluster([make_node("a"), make_node("b")]),
            workload=Workload(prompt_tokens=16, output_tokens=200, num_users=users),
        )
        figures.append(predict(request, two_stage_plan(CostModel(request), 16)).aggregate_tokens_per_s)
    assert figures[1] > 1.7 * figures[0]


def test_wire_dtype_and_slow_links_show() -> None:
    model = llama_8b()
    cluster = make_cluster([make_node("a"), make_node("b")], default=make_link(gbit=0.01, latency_ms=20))
    request = PlanRequest(model=model, cluster=cluster)
    plan = two_stage_plan(CostModel(request), 16)
    full = predict(request, plan)
    half = predict(request, Plan(strategy="layer_wise", stages=plan.stages, wire_dtype="f16"))
    saved = full.boundaries[0].transfer_s.p50 - half.boundaries[0].transfer_s.p50
    assert saved == pytest.approx(4096 * 2 / 1.25e6, rel=0.01)


def test_speculation_divides_the_time_of_a_token() -> None:
    model = llama_8b()
    request = PlanRequest(model=model, cluster=make_cluster([make_node("a"), make_node("b")], default=make_link(latency_ms=50)))
    plan = two_stage_plan(CostModel(request), 16)
    draft = Speculation(draft_tokens=4, acceptance=0.8, draft_token_s=1e-3)
    quick = predict(request, Plan(strategy="layer_wise", stages=plan.stages, speculation=draft))
    assert quick.decode_tokens_per_s > 1.8 * predict(request, plan).decode_tokens_per_s


def test_disaggregated_prompts_are_read_elsewhere_and_the_cache_is_sent() -> None:
    model = llama_8b()
    cluster = make_cluster([make_node("a", bandwidth_gb_s=100), make_node("b", tflops=40)], default=make_link(gbit=10))
    workload = Workload(prompt_tokens=4096, output_tokens=64)
    request = PlanRequest(model=model, cluster=cluster, workload=workload)
    costs = CostModel(request)
    alone = Plan(strategy="single_node", stages=(costs.whole_stage(costs.unit("a", "cpu"), 0, 32),))
    apart = Plan(
        strategy="disaggregated", stages=alone.stages, prefill_stages=(costs.whole_stage(costs.unit("b", "cpu"), 0, 32),)
    )
    one, two = predict(request, alone), predict(request, apart)
    assert two.time_to_first_token_s < 0.2 * one.time_to_first_token_s
    assert two.time_per_output_token_s == pytest.approx(one.time_per_output_token_s, rel=0.05)
    kv_s = 4096 * model.kv_bytes_per_token() / 1.25e9
    assert two.time_to_first_token_s > kv_s


def test_gpu_and_cpu_of_one_machine_are_two_units() -> None:
    cluster = make_cluster([make_node("a", devices=(make_gpu(),)), make_node("m", devices=(make_gpu(kind="metal"),))])
    model = CostModel(PlanRequest(model=make_model(), cluster=cluster))
    assert [u.key for u in model.units] == [("a", "cuda"), ("a", "cpu"), ("m", "metal")]
    with pytest.raises(UsageError, match="no device 'vulkan'"):
        model.unit("a", "vulkan")


def test_a_pair_without_link_is_a_usage_error() -> None:
    cluster = make_cluster([make_node("a"), make_node("b")])
    bare = type(cluster)(nodes=cluster.nodes)
    with pytest.raises(UsageError, match="no link from 'a' to 'b'"):
        link_between(bare, "a", "b", RuntimeCosts())
    assert link_between(bare, "a", "a", RuntimeCosts()).kind == "loopback"


def test_over_memory_is_flagged_and_slow() -> None:
    model = llama_8b()
    request = PlanRequest(model=model, cluster=make_cluster([make_node("a", memory_gib=3, disk_gb_s=0.5)]))
    costs = CostModel(request)
    out = predict(request, Plan(strategy="single_node", stages=(costs.whole_stage(costs.unit("a", "cpu"), 0, 32),)))
    assert out.stages[0].paging
    assert out.decode_tokens_per_s < 1 / (model.weight_bytes / 0.5e9)
    assert math.isfinite(out.time_to_first_token_s)
