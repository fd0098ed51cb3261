"""One table: other planners' rules and ours on the same random home clusters.

    python benchmarks/planner/compare_baselines.py [INSTANCES]

Every arrangement is judged by our cost model, so this compares rules for placing layers, not runtimes. "fits" is the
share of instances in which the rule found a split that fits where one exists; ratios are to our value (1 = as good).
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys

from shardwise.machines import ClusterProfile, LinkProfile, Measurement, NodeProfile
from shardwise.model import describe_model
from shardwise.planner import Objective, PlanRequest, Workload
from shardwise.planner.baselines import BASELINES
from shardwise.planner.cost_model import CostModel
from shardwise.planner.objective import objective_forms
from shardwise.planner.problem import build_problem
from shardwise.planner.search_dp import Budget
from shardwise.planner.search_pareto import search_forms

MODELS = ("llama-3-8b:q4_k_m", "qwen3-32b:q4_k_m", "llama-3-70b:q4_k_m")
MACHINES = (  # (memory GiB, GB/s, TFLOP/s): mini PC, laptop, desktop, Mac, workstation GPU
    (12, 40, 0.5),
    (14, 60, 0.8),
    (28, 70, 1.2),
    (22, 200, 5.0),
    (23, 900, 60.0),
)
LINKS = ((0.1, 3e-3), (0.3, 3e-3), (1.0, 0.3e-3), (2.5, 0.2e-3), (10.0, 0.1e-3))


def home(rng: random.Random) -> ClusterProfile:
    """Two to seven machines, each on its own kind of cable or radio; a path is as good as its worse end."""
    count = rng.randint(2, 7)
    ends = [rng.choice(LINKS) for _ in range(count)]
    nodes = []
    for index in range(count):
        memory, bandwidth, compute = rng.choice(MACHINES)
        nodes.append(
            NodeProfile(
                name=f"n{index}",
                memory_bytes=int(memory * rng.uniform(0.6, 1.0) * 2**30),
                memory_bytes_per_s=Measurement(value=bandwidth * 1e9),
                compute_flops_per_s=Measurement(value=compute * 1e12),
            )
        )
    links = [
        LinkProfile(
            source=f"n{a}",
            target=f"n{b}",
            bytes_per_s=Measurement(value=min(ends[a][0], ends[b][0]) * 125e6),
            latency_s=Measurement(value=max(ends[a][1], ends[b][1])),
        )
        for a, b in itertools.permutations(range(count), 2)
    ]
    return ClusterProfile(nodes=tuple(nodes), links=tuple(links))


def compare(kind: str, instances: int) -> dict[str, list[float]]:
    """Ratio to ours of every rule; infinite where it found nothing that fits."""
    rng = random.Random(7)
    descriptions = [describe_model(name) for name in MODELS]
    ratios: dict[str, list[float]] = {name: [] for name in BASELINES}
    ratios["best single machine"] = []
    ratios["ours"] = []
    while len(ratios["ours"]) < instances:
        workload = Workload(num_users=4 if kind == "throughput" else 1)
        request = PlanRequest(
            model=rng.choice(descriptions), cluster=home(rng), workload=workload, objective=Objective(kind=kind)
        )
        cost = CostModel(request)
        problems = [build_problem(cost, f) for f in objective_forms(workload, request.objective, len(cost.units))]
        _, ours = search_forms(problems, budget=Budget(math.inf))
        if not ours.stages:
            continue
        ratios["ours"].append(1.0)
        single = (((u, 0, problems[0].num_layers),) for u in range(problems[0].num_units))
        ratios["best single machine"].append(min(problems[0].value_of(s) for s in single) / ours.value)
        for name, rule in BASELINES.items():
            found = rule(problems[0])
            values = [p.value_of(found) for p in problems] if found else [math.inf]
            ratios[name].append(min(values) / ours.value)
    return ratios


def main() -> None:
    """Print the table."""
    instances = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print("| objective | rule | fits | median ratio | p90 ratio | as good as ours |\n|---|---|---|---|---|---|")
    for kind in ("latency", "throughput", "bottleneck"):
        for name, values in compare(kind, instances).items():
            fitting = sorted(v for v in values if math.isfinite(v))
            median = statistics.median(fitting) if fitting else math.nan
            p90 = fitting[int(0.9 * (len(fitting) - 1))] if fitting else math.nan
            equal = sum(v < 1 + 1e-6 for v in values) / len(values)
            print(f"| {kind} | {name} | {len(fitting) / len(values):.0%} | {median:.2f} | {p90:.2f} | {equal:.0%} |", flush=True)


if __name__ == "__main__":
    main()
