"""Random small instances, and a brute force that shares no code with the search."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from shardwise.machines.profile import ClusterProfile
from shardwise.model.description import ModelDescription
from shardwise.planner import Objective, PlanRequest, Workload
from shardwise.planner.cost_compute import StepShape, head_s, layer_s
from shardwise.planner.cost_rates import RuntimeCosts
from tests.planner.builders import GIB, make_cluster, make_gpu, make_link, make_model, make_node


def random_model(rng: random.Random) -> ModelDescription:
    layers = rng.randint(1, 7)
    widths = [rng.choice((1024, 2048, 4096, 8192)) for _ in range(layers)] if rng.random() < 0.5 else None
    return make_model(
        layers,
        hidden=rng.choice((1024, 4096)),
        vocab=rng.choice((1000, 64000)),
        tied=rng.random() < 0.4,
        quantization=rng.choice(("Q4_0", "F16")),
        ffn_of=widths,
        experts=(8, 2) if rng.random() < 0.2 else None,
    )


def random_cluster(rng: random.Random, model: ModelDescription) -> ClusterProfile:
    names = "abcde"[: rng.randint(1, 4)]
    need = model.weight_bytes / GIB
    nodes = []
    for name in names:
        devices = (make_gpu(memory_gib=rng.uniform(0.2, 1.2) * need + 0.2),) if rng.random() < 0.15 else ()
        nodes.append(
            make_node(
                name,
                memory_gib=rng.uniform(0.05, 1.3) * need + 0.25,
                bandwidth_gb_s=rng.choice((10, 20, 50, 100)),
                tflops=rng.choice((0.1, 0.5, 2.0)),
                devices=devices,
            )
        )
    links = []
    if rng.random() < 0.7:
        for a, b in itertools.permutations(names, 2):
            if rng.random() < 0.8:
                links.append(make_link(a, b, gbit=rng.choice((0.01, 0.1, 1, 10)), latency_ms=rng.choice((0.05, 0.5, 5))))
    return make_cluster(nodes, links, make_link(gbit=rng.choice((0.1, 1)), latency_ms=rng.choice((0.2, 2))))


def random_request(seed: int, kind: str) -> PlanRequest:
    rng = random.Random(seed)
    model = random_model(rng)
    workload = Workload(
        prompt_tokens=rng.choice((1, 64, 300, 2000)),
        output_tokens=rng.choice((1, 16, 200)),
        num_users=rng.choice((1, 1, 2, 5)),
    )
    objective = Objective(kind=kind, weight=rng.random())
    return PlanRequest(model=model, cluster=random_cluster(rng, model), workload=workload, objective=objective)


class BruteForce:
    """Every order of every subset, every cut; formulas written again from the documentation."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.model, self.work = request, request.model, request.workload
        self.costs = RuntimeCosts()
        self.places = []
        for node in request.cluster.nodes:
            for device in node.devices:
                self.places.append((node.name, device))
            bare = type(node)(
                name=node.name,
                memory_bytes=node.memory_bytes,
                memory_bytes_per_s=node.memory_bytes_per_s,
                compute_flops_per_s=node.compute_flops_per_s,
            )
            self.places.append((node.name, bare.all_devices()[0]))
        self.cache: dict[object, float] = {}
        self.sizes: dict[tuple[int, int], float] = {}

    def arrangements(self) -> Iterator[tuple[tuple[int, int, int], ...]]:
        layers = self.model.num_layers
        for count in range(1, min(layers, len(self.places)) + 1):
            for order in itertools.permutations(range(len(self.places)), count):
                for cuts in itertools.combinations(range(1, layers), count - 1):
                    edges = (0, *cuts, layers)
                    yield tuple((u, edges[i], edges[i + 1]) for i, u in enumerate(order))

    def bytes_of(self, unit: int, start: int, end: int) -> float:
        if (start, end) not in self.sizes:
            self.sizes[start, end] = self._bytes_of(start, end)
        return self.sizes[start, end] - self._in_host_memory(unit, start, end)

    def _in_host_memory(self, unit: int, start: int, end: int) -> float:
        """A card does not hold the token embedding, unless it is the head as well."""
        is_head = self.model.tied_embeddings and end == self.model.num_layers
        own_memory = self.places[unit][1].kind in ("cuda", "vulkan")
        return sum(t.num_bytes for t in self.model.embedding) if own_memory and start == 0 and not is_head else 0.0

    def _bytes_of(self, start: int, end: int) -> float:
        work, model = self.work, self.model
        positions = math.ceil(work.reserved_tokens / 256) * 256
        kv = sum(model.layers[i].kv.elements_per_token() * 2 * positions for i in range(start, end)) * work.num_users
        rows = max(work.prefill_chunk_tokens, work.num_users)
        widest = max(max(t.shape) for t in model.layers[0].tensors)
        floats = rows * (4 * model.hidden_size + 2 * widest + model.num_heads * min(positions, model.context_length))
        if end == model.num_layers:
            floats += work.num_users * model.vocab_size
        vocabulary = self.costs.vocab_token_bytes * model.vocab_size if end == model.num_layers else 0
        return model.stage_weight_bytes(start, end) + kv + 4 * floats + self.costs.process_bytes + vocabulary

    def step(self, unit: int, start: int, end: int, shape: StepShape) -> float:
        key = (unit, start, end, shape)
        if key not in self.cache:
            device, c = self.places[unit][1], self.costs
            total = c.step_overhead_s + shape.sessions * c.row_overhead_s
            total += sum(layer_s(self.model.layers[i], device, shape) for i in range(start, end))
            total += shape.rows * c.embed_row_s if start == 0 else 0.0
            if end == self.model.num_layers:
                total += head_s(self.model, device, shape.sampled_rows) + shape.sampled_rows * c.sample_row_s
            self.cache[key] = total
        return self.cache[key]

    def hop(self, u: int, v: int, num_bytes: float, latency: bool) -> float:
        a, b, c = self.places[u][0], self.places[v][0], self.costs
        size = num_bytes + c.header_bytes
        if a == b:
            return (c.local_latency_s if latency else 0.0) + c.message_overhead_s + size / c.local_bytes_per_s
        link = self.request.cluster.link(a, b)
        assert link is not None
        return (link.latency_s.value if latency else 0.0) + c.message_overhead_s + size / link.bytes_per_s.value

    def value(self, stages: tuple[tuple[int, int, int], ...]) -> float:
        if any(round(self.bytes_of(u, s, e)) > self.places[u][1].memory_bytes for u, s, e in stages):
            return math.inf
        work, kind, count = self.work, self.request.objective.kind, len(stages)
        users, output = work.num_users, work.output_tokens
        context = work.prompt_tokens + 0.5 * (output - 1)
        chunk = min(64, work.prompt_tokens)
        chunks = math.ceil(work.prompt_tokens / 64)
        prefill = StepShape.prefill(chunk, (work.prompt_tokens - chunk) / 2)
        width = self.model.hidden_size * 4
        ring = [(stages[i][0], stages[(i + 1) % count][0]) for i in range(count)] if count > 1 else []

        def loop(shape: StepShape) -> float:
            total = sum(self.step(*s, shape) for s in stages) + sum(
                self.hop(u, v, shape.rows * width, True) for u, v in ring[:-1]
            )
            return total + sum(self.hop(u, v, shape.rows * 4, True) for u, v in ring[-1:])

        def through(shape: StepShape) -> float:
            return sum(self.step(*s, shape) for s in stages) + sum(self.hop(u, v, shape.rows * width, True) for u, v in ring[:-1])

        def parts(weights: list[tuple[StepShape, float]]) -> float:
            own = [sum(w * self.step(*s, shape) for shape, w in weights) for s in stages]
            links = [sum(w * self.hop(u, v, shape.rows * width, False) for shape, w in weights) for u, v in ring[:-1]]
            return max(own + links)

        single = StepShape.decode(1, context)
        if kind == "latency":
            return (output - 1) * loop(single) + through(prefill) + (chunks - 1) * parts([(prefill, 1.0)])
        if kind == "bottleneck":
            return parts([(single, 1.0)])
        if kind == "fit":
            return count * 1e4 + loop(single) + through(prefill) * chunks / output
        rows = math.ceil(users / count)
        merged = StepShape.decode(rows, context)
        slowest = parts([(merged, math.ceil(users / rows) / users), (prefill, chunks / output)])
        round_trip = loop(merged) + through(prefill) / output
        if kind == "throughput":
            return max(round_trip / users, slowest)
        weight = self.request.objective.weight
        return weight * round_trip + (1 - weight) * users * slowest

    def best(self) -> float:
        return min(self.value(a) for a in self.arrangements())
