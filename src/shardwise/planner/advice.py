"""Should the model be split at all? Verdict first, in plain words, then the numbers behind it.

In: what the planner found (`Situation`). Out: `Advice`. Every piece of advice is a case: a predicate with a message and
numbers (`advice_cases`); the verdict is that of the first case, in the order of `VERDICTS`, that decides. Nothing here
fails; a model that fits nowhere is a verdict, not an error.
"""

from __future__ import annotations

from shardwise.planner.advice_cases import CASES, Case
from shardwise.planner.advice_machines import slower_tokens
from shardwise.planner.advice_numbers import Situation
from shardwise.planner.types import Advice, Reason
from shardwise.units import format_duration

# (case, verdict): the first case that applies decides.
VERDICTS = (
    ("smaller_quantization_only", "smaller_quantization"),
    ("memory_short", "add_memory"),
    ("nothing_fits", "infeasible"),
    ("wifi_tail", "fix_link"),
    ("limits_broken", "infeasible"),
    ("one_machine_is_best", "single_node"),
    ("copies_are_best", "single_node"),
    ("one_machine_is_as_good", "single_node"),
    ("smaller_quantization_fits_one", "smaller_quantization"),
    ("communication_dominates", "fix_link"),
    ("coarser_is_as_fast", "coarser_split"),
    ("stronger_machine", "stronger_node"),
)


def advice_for(situation: Situation, known: tuple[Reason, ...] = (), cases: tuple[Case, ...] = CASES) -> Advice:
    """All cases that apply beside the reasons that are `known`, and the verdict."""
    reasons = [*known, *(reason for case in cases if (reason := case(situation)) is not None)]
    names = [reason.case for reason in reasons]
    for case, verdict in VERDICTS:
        if case in names:
            deciding = reasons[names.index(case)]
            rest = [reason for reason in reasons if reason is not deciding]
            return Advice(verdict=verdict, headline=deciding.message, reasons=(deciding, *rest))
    return Advice(verdict="shard", headline=_shard_headline(situation), reasons=tuple(reasons))


def _shard_headline(situation: Situation) -> str:
    plan, predicted = situation.plan, situation.predicted
    names = " -> ".join(plan.nodes)
    copies = f"{plan.replicas} copies, " if plan.replicas > 1 else ""
    slower = slower_tokens(situation)
    return (
        f"Split it: {copies}{names} gives {predicted.decode_tokens_per_s:.1f} tokens/s to each user, first token after "
        f"{format_duration(predicted.time_to_first_token_s)}" + (f"; {slower}" if slower else "")
    )
