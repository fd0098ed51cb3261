"""Reconcile: what is missing starts, nothing that serves moves without consent, and repeating it changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster import FakeEngine, WorkerSpec
from shardwise.cluster.engine import WorkerStatus
from shardwise.cluster.membership import Member, NodeState
from shardwise.cluster.proposing import propose_from_files
from shardwise.cluster.reconcile import (
    AskConsent,
    Desired,
    DesiredWorker,
    MoveWorker,
    NeedPlan,
    Observed,
    Proposal,
    StartWorker,
    StopWorker,
    decide,
    desired_of,
    next_actions,
    propose,
)
from shardwise.errors import UsageError
from shardwise.machines import parse_cluster
from shardwise.model import describe_model
from shardwise.planner import find_plan
from shardwise.planner.plan_file import write_plan
from shardwise.planner.types import Limits, PlanRequest, Workload

HOME = """
[[node]]
name = "desk"
memory = "{desk}"
memory_bandwidth = "20 GB/s"
compute = "0.3 TFLOP/s"
[[node]]
name = "nas"
memory = "12 GiB"
memory_bandwidth = "15 GB/s"
compute = "0.2 TFLOP/s"
{more}
[defaults.link]
bandwidth = "1 Gbit/s"
latency = "0.2 ms"
"""
BIG = '[[node]]\nname = "tower"\nmemory = "64 GiB"\nmemory_bandwidth = "80 GB/s"\ncompute = "2 TFLOP/s"'


def member(name: str, state: NodeState = NodeState.READY) -> Member:
    return Member(identity=f"id-{name}", name=name, incarnation=1, state=state, since_s=0, heard_s=0)


def worker(index: int, node: str) -> DesiredWorker:
    return DesiredWorker(name=f"stage-{index}", node=node, layers=(index * 10, index * 10 + 10), weight_bytes=1000)


def runs(index: int, node: str, *, alive: bool = True, exit_status: int | None = None) -> WorkerStatus:
    return WorkerStatus(name=f"stage-{index}", node=node, pid=1, alive=alive, exit_status=exit_status)


TWO = Desired(workers=(worker(0, "desk"), worker(1, "nas")))
NODES = (member("desk"), member("nas"), member("pi"))


def actions(*workers: WorkerStatus, members: tuple[Member, ...] = NODES, consent: bool = False) -> list[object]:
    return list(next_actions(TWO, Observed(members=members, workers=workers), consent=consent))


def test_all_is_well() -> None:
    assert actions(runs(0, "desk"), runs(1, "nas")) == []


def test_what_is_missing_or_dead_starts_with_the_reason() -> None:
    found = actions(runs(0, "desk", alive=False, exit_status=-9))
    assert [type(a) for a in found] == [StartWorker, StartWorker]
    assert found[0].why == "it ended with status -9"  # type: ignore[attr-defined]
    assert found[1].why == "it does not run"  # type: ignore[attr-defined]


def test_what_runs_elsewhere_moves_only_with_consent() -> None:
    (ask,) = actions(runs(0, "desk"), runs(1, "pi"))
    assert isinstance(ask, AskConsent)
    assert ask.total_bytes == 1000
    (move,) = actions(runs(0, "desk"), runs(1, "pi"), consent=True)
    assert isinstance(move, MoveWorker)
    assert (move.source, move.worker.node) == ("pi", "nas")


def test_leaving_a_node_that_drains_needs_no_consent() -> None:
    (move,) = actions(runs(0, "desk"), runs(1, "pi"), members=(member("desk"), member("nas"), member("pi", NodeState.DRAINING)))
    assert isinstance(move, MoveWorker)


@pytest.mark.parametrize("state", [NodeState.GONE, NodeState.ASLEEP, NodeState.JOINING, NodeState.SUSPECT])
def test_a_worker_without_a_usable_node_needs_a_plan(state: NodeState) -> None:
    found = actions(runs(0, "desk"), members=(member("desk"), member("nas", state)))
    assert isinstance(found[0], NeedPlan)
    assert found[0].workers == ("stage-1",)
    assert str(state) in found[0].why


def test_a_suspect_node_keeps_what_it_runs() -> None:
    assert actions(runs(0, "desk"), runs(1, "nas"), members=(member("desk"), member("nas", NodeState.SUSPECT))) == []


def test_leftovers_of_an_older_plan_stop() -> None:
    (stop,) = actions(runs(0, "desk"), runs(1, "nas"), runs(7, "pi"))
    assert isinstance(stop, StopWorker)
    assert stop.name == "stage-7"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abcd"), st.booleans()), max_size=6),
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from(list(NodeState)), max_size=4),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=5),
)
def test_carrying_it_out_ends_and_changes_nothing_more(
    present: list[tuple[int, str, bool]], states: dict[str, NodeState], wanted: list[str]
) -> None:
    """On a fake engine: with consent one round brings everything that can run to where it belongs."""
    engine = FakeEngine(dict.fromkeys("abcd", 10**6))
    for index, node, alive in present:
        engine.start(WorkerSpec(name=f"stage-{index}", node=node))
        if not alive:
            engine.crash(f"stage-{index}", 1)
    desired = Desired(workers=tuple(worker(i, node) for i, node in enumerate(wanted)))
    members = tuple(member(n, s) for n, s in states.items())

    def look() -> Observed:
        return Observed(members=members, workers=tuple(engine.statuses()))

    before = {s.name: s for s in engine.statuses() if s.alive}
    for action in next_actions(desired, look(), consent=False):
        if isinstance(action, StopWorker):
            assert action.name not in {w.name for w in desired.workers}
        if isinstance(action, MoveWorker):
            assert look().state(before[action.worker.name].node) not in (NodeState.READY, NodeState.SUSPECT)
    for action in next_actions(desired, look(), consent=True):
        if isinstance(action, StartWorker | MoveWorker):
            engine.start(WorkerSpec(name=action.worker.name, node=action.worker.node))
        elif isinstance(action, StopWorker):
            engine.stop(action.name)
    left = next_actions(desired, look(), consent=True)
    assert all(isinstance(a, NeedPlan) for a in left)


def plans(desk: str = "16 GiB") -> tuple[object, ...]:
    model = describe_model("llama-3-8b:q4_k_m")
    workload = Workload(prompt_tokens=256, output_tokens=64)
    found = []
    for more in ("", BIG):
        cluster = parse_cluster(HOME.format(desk=desk, more=more))
        found.append(find_plan(PlanRequest(model=model, cluster=cluster, workload=workload, limits=Limits())))
    return model, *found


def test_a_new_machine_is_proposed_with_gain_and_bytes() -> None:
    model, current, better = plans()
    proposal = propose(model, current, better)  # type: ignore[arg-type]
    assert proposal.worthwhile
    assert proposal.nodes_added == ("tower",)
    assert proposal.decode_tokens_per_s[1] > 2 * proposal.decode_tokens_per_s[0]
    tower = next(t for t in proposal.transfers if t.node == "tower")
    layers = [i for start, end in tower.layers for i in range(start, end)]
    assert tower.num_bytes == sum(model.layers[i].weight_bytes for i in layers)  # type: ignore[attr-defined]
    assert "tower" in proposal.message
    held = propose(model, current, better, held={"tower": set(range(100))})  # type: ignore[arg-type]
    assert held.total_bytes == proposal.total_bytes - tower.num_bytes


def test_the_same_plan_is_not_worth_a_question_and_nothing_moves_without_consent() -> None:
    model, current, better = plans()
    same = propose(model, current, current)  # type: ignore[arg-type]
    good = propose(model, current, better)  # type: ignore[arg-type]
    assert (same.worthwhile, same.total_bytes, same.transfers) == (False, 0, ())
    assert not decide(good, consent=False, auto=False)
    assert decide(good, consent=True, auto=False)
    assert decide(good, consent=False, auto=True)
    assert not decide(same, consent=False, auto=True)
    assert isinstance(good, Proposal)


def test_a_plans_workers_are_named_as_deployments_name_them() -> None:
    _, current, _ = plans()
    desired = desired_of(current)  # type: ignore[arg-type]
    assert [w.name for w in desired.workers] == [f"stage-{i}" for i in range(len(desired.workers))]


def test_a_plan_for_64_nodes_is_placed_by_the_fake_engine() -> None:
    nodes = [f"n{i:02}" for i in range(64)]
    engine = FakeEngine(dict.fromkeys(nodes, 4 * 2**30))
    desired = Desired(workers=tuple(worker(i, node) for i, node in enumerate(nodes)))
    observed = Observed(members=tuple(member(n) for n in nodes), workers=())
    for action in next_actions(desired, observed, consent=False):
        assert isinstance(action, StartWorker)
        engine.start(WorkerSpec(name=action.worker.name, node=action.worker.node, memory_bytes=2**30))
    assert {s.node for s in engine.statuses() if s.alive} == set(nodes)
    again = Observed(members=observed.members, workers=tuple(engine.statuses()))
    assert next_actions(desired, again, consent=False) == ()


def test_a_proposal_from_files(tmp_path: Path) -> None:
    plan, cluster = tmp_path / "plan.json", tmp_path / "cluster.toml"
    _, current, _ = plans()
    write_plan(current, plan)  # type: ignore[arg-type]
    cluster.write_text(HOME.format(desk="16 GiB", more=""))
    assert not propose_from_files("llama-3-8b:q4_k_m", plan, cluster).worthwhile
    cluster.write_text(HOME.format(desk="16 GiB", more=BIG))
    found = propose_from_files("llama-3-8b:q4_k_m", plan, cluster)
    assert found.worthwhile
    assert found.nodes_added == ("tower",)
    gone = HOME.format(desk="16 GiB", more=BIG).replace('"desk"', '"attic"')
    cluster.write_text(gone)
    lost = propose_from_files("llama-3-8b:q4_k_m", plan, cluster)
    assert lost.worthwhile
    assert lost.gain_share == 1.0
    with pytest.raises(UsageError, match="the plan is for 32 layers"):
        propose_from_files("llama-2-13b:q4_k_m", plan, cluster)
