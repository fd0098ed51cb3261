"""The plan that the advice recommends, where it is not the best one by the objective.

One machine, or fewer stages, within a few per cent of the best plan: then that plan is shown, written and reasoned about,
and the best one is its first alternative. In: the situation of the best plan and its advice. Out: a plan with the advice
about it. Nothing here fails.
"""

from __future__ import annotations

from shardwise.planner.advice import advice_for
from shardwise.planner.advice_cases import CASES
from shardwise.planner.advice_numbers import Option, Situation
from shardwise.planner.runnable import plan_note, plan_obstacles
from shardwise.planner.types import Advice, Alternative, Plan, Reason
from shardwise.records import replace

_WEIGHED = ("one_machine_is_as_good", "coarser_is_as_fast", "copies_are_best")  # weigh the best plan against a simpler one


def recommended(situation: Situation, best: Plan) -> Plan:
    """`best` itself, or the simpler plan that its advice names."""
    assert best.advice is not None
    by_case = {reason.case: reason for reason in best.advice.reasons}
    options = (("one_machine_is_as_good", situation.single), ("coarser_is_as_fast", situation.coarser))
    for case, option in options:
        if case in by_case and option is not None and situation.keeps_limits(option):
            return _instead(situation, best, option, by_case[case])
    return best


def _instead(situation: Situation, best: Plan, option: Option, why: Reason) -> Plan:
    bound = best.objective_value * (1.0 - best.gap) if best.gap is not None else None
    same = (option.plan.strategy, option.plan.nodes, tuple(stage.layers for stage in option.plan.stages))
    others = tuple(a for a in best.alternatives if (a.strategy, a.nodes, a.layers) != same)
    plan = replace(
        best,
        strategy=option.plan.strategy,
        stages=option.plan.stages,
        replicas=1,
        replica_stages=(),
        prefill_stages=(),
        predicted=option.predicted,
        objective_value=option.value,
        optimal=False,
        gap=max(0.0, (option.value - bound) / option.value) if bound is not None and option.value > 0 else None,
        method=f"simpler than the best: {best.method}",
        alternatives=(_finer(best), *others),
        advice=None,
    )
    plan = replace(plan, runnable=not plan_obstacles(plan), note=plan_note(plan))
    return replace(plan, advice=_advice(Situation(situation.cost, plan, situation.smaller), why))


def _finer(best: Plan) -> Alternative:
    """The best plan by the objective."""
    assert best.predicted is not None
    return Alternative(
        strategy=best.strategy,
        nodes=best.nodes,
        layers=tuple(stage.layers for stage in best.stages),
        wire_dtype=best.wire_dtype,
        objective_value=best.objective_value,
        decode_tokens_per_s=best.predicted.decode_tokens_per_s,
        aggregate_tokens_per_s=best.predicted.aggregate_tokens_per_s,
        time_to_first_token_s=best.predicted.time_to_first_token_s,
        runnable=best.runnable,
        note="--best",
    )


def _advice(situation: Situation, why: Reason) -> Advice:
    """All that is said is about the plan that is shown; `why` stands where the best plan was weighed against it."""
    left_out = {*_WEIGHED, "one_machine_is_best"} if why.case == "one_machine_is_as_good" else set(_WEIGHED)
    return advice_for(situation, (why,), tuple(case for case in CASES if case.__name__ not in left_out))
