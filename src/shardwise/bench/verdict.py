"""Should this home split this model? A pure function from figures to a verdict in plain words.

Use the split only if it makes the wanted model run *and* keeps an acceptable tail under contention; else a smaller
quantization, a coarser split, or one stronger node. The figures may be measured or predicted; the verdict's names are
those of `advise`.
"""

from __future__ import annotations

from typing import Literal

from shardwise.records import Record

VerdictKind = Literal[
    "single_node", "shard", "smaller_quantization", "coarser_split", "stronger_node", "fix_link", "add_memory", "infeasible"
]
SAME = 1.1  # options within 10 % of each other count as equal; the simpler one wins
WORTH_IT = 1.2  # how much faster a split must be for several users to be worth its trouble


class Option(Record):
    """One way to run a model, with its figures. `contended_p95_s`: time between tokens, p95, on the busy network."""

    name: str
    num_nodes: int
    fits: bool
    inter_token_p50_s: float = 0.0
    contended_p95_s: float = 0.0
    aggregate_tokens_per_s: float = 0.0
    link_share: float = 0.0  # of a token's time, spent on links
    slowest_node: str = ""
    slowest_share: float = 0.0  # of a token's compute time, spent on the slowest node
    pages: bool = False  # runs, but reads weights from disk
    short_by_bytes: int = 0
    quiet_p95_s: float = 0.0  # the same on the quiet or wired network; 0 = not known


class Evidence(Record):
    """Everything the verdict looks at. `splits`: the wanted model over several nodes, the wanted split first."""

    target_p95_s: float
    singles: tuple[Option, ...] = ()
    splits: tuple[Option, ...] = ()
    smaller: tuple[Option, ...] = ()  # smaller quantizations or models on one node
    num_users: int = 1


class Verdict(Record):
    """What to do, in one line, and why."""

    verdict: VerdictKind
    headline: str
    option: str = ""
    reasons: tuple[str, ...] = ()


def _runs(options: tuple[Option, ...]) -> list[Option]:
    return [option for option in options if option.fits and not option.pages]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def decide(evidence: Evidence) -> Verdict:
    """The verdict. Ties go to fewer nodes."""
    good = [option for option in _runs(evidence.splits) if option.contended_p95_s <= evidence.target_p95_s]
    single = min(_runs(evidence.singles), key=lambda option: option.contended_p95_s, default=None)
    if single is not None:
        return _when_one_node_fits(evidence, single, good)
    if good:
        return _choose_split(evidence, good)
    return _when_nothing_is_good(evidence)


def _when_one_node_fits(evidence: Evidence, single: Option, good: list[Option]) -> Verdict:
    best = max(good, key=lambda option: (option.aggregate_tokens_per_s, -option.num_nodes), default=None)
    gain = best.aggregate_tokens_per_s / single.aggregate_tokens_per_s if best and single.aggregate_tokens_per_s else 0.0
    if best is not None and evidence.num_users > 1 and gain >= WORTH_IT:
        return Verdict(
            verdict="shard",
            option=best.name,
            headline=f"Split it over {best.name}: for {evidence.num_users} users that gives {gain:.1f} times the tokens.",
            reasons=(
                f"The model fits {single.name} alone ({single.aggregate_tokens_per_s:.1f} tokens/s for all users together).",
                f"The split keeps p95 at {_ms(best.contended_p95_s)}, within {_ms(evidence.target_p95_s)}.",
            ),
        )
    too_slow = single.contended_p95_s > evidence.target_p95_s
    if too_slow and good:
        return _choose_split(evidence, good)
    reasons = [f"The model fits {single.name} alone, with {_ms(single.inter_token_p50_s)} between tokens."]
    if best is not None or evidence.splits:
        other = best or evidence.splits[0]
        ratio = other.inter_token_p50_s / single.inter_token_p50_s if single.inter_token_p50_s and other.fits else 0.0
        reasons.append(f"Over {other.name} a token takes {ratio:.1f} times as long." if ratio else f"{other.name} does not run.")
    if too_slow:
        strong = f"Even so p95 is {_ms(single.contended_p95_s)}, above {_ms(evidence.target_p95_s)}, and no split is better."
        return Verdict(
            verdict="stronger_node", option=single.name, headline="A stronger node is needed for this speed.", reasons=(strong,)
        )
    return Verdict(
        verdict="single_node", option=single.name, headline=f"Do not split: run it on {single.name}.", reasons=tuple(reasons)
    )


def _choose_split(evidence: Evidence, good: list[Option]) -> Verdict:
    fastest = min(good, key=lambda option: option.contended_p95_s)
    enough = [option for option in good if option.contended_p95_s <= fastest.contended_p95_s * SAME]
    chosen = min(enough, key=lambda option: (option.num_nodes, option.contended_p95_s))
    wanted = evidence.splits[0]
    tail = f"p95 between tokens is {_ms(chosen.contended_p95_s)} on the worst network, within {_ms(evidence.target_p95_s)}."
    if chosen.num_nodes < wanted.num_nodes:
        reasons = [f"{chosen.name}: {tail}"]
        if wanted in good:
            reasons.append(f"{wanted.name} is not faster ({_ms(wanted.contended_p95_s)}) and needs more machines.")
        elif wanted.fits:
            weak = f"; {wanted.slowest_node} takes {wanted.slowest_share:.0%} of the compute time" if wanted.slowest_node else ""
            reasons.append(f"{wanted.name} has {_ms(wanted.contended_p95_s)}{weak}.")
        return Verdict(
            verdict="coarser_split",
            option=chosen.name,
            headline=f"Split it, but over {chosen.num_nodes} machines only: {chosen.name}.",
            reasons=tuple(reasons),
        )
    why = "One machine alone is too slow." if _runs(evidence.singles) else "No single machine holds the model."
    if not evidence.singles:
        why = "The machines alone were not measured here."
    return Verdict(verdict="shard", option=chosen.name, headline=f"Split it over {chosen.name}.", reasons=(why, tail))


def _when_nothing_is_good(evidence: Evidence) -> Verdict:
    """No option runs the wanted model with an acceptable tail: what would help, the cheapest help first."""
    limit = f"the target of {_ms(evidence.target_p95_s)}"
    running = _runs(evidence.splits)
    best = min(running, key=lambda option: option.contended_p95_s, default=None)
    on_cable = [option for option in running if 0 < option.quiet_p95_s <= evidence.target_p95_s]
    if on_cable:
        option = min(on_cable, key=lambda found: found.quiet_p95_s)
        return Verdict(
            verdict="fix_link",
            option=option.name,
            headline="The network is what is wrong: use a cable (or a quieter channel), then split.",
            reasons=(
                f"{option.name} has p95 {_ms(option.contended_p95_s)} on the worst network, above {limit}.",
                f"On the calmest network it has {_ms(option.quiet_p95_s)}.",
            ),
        )
    smaller = [option for option in _runs(evidence.smaller) if option.contended_p95_s <= evidence.target_p95_s]
    if smaller:
        option = min(smaller, key=lambda found: found.contended_p95_s)
        reason = (
            f"The best split of the wanted model has {_ms(best.contended_p95_s)}." if best else "The wanted model does not fit."
        )
        return Verdict(
            verdict="smaller_quantization",
            option=option.name,
            headline=f"Take {option.name} on one machine instead of a split.",
            reasons=(f"It keeps p95 at {_ms(option.contended_p95_s)}, within {limit}.", reason),
        )
    if best is not None:
        return _what_slows(best, limit)
    pages = [option for option in (*evidence.singles, *evidence.splits) if option.fits and option.pages]
    short = min((o.short_by_bytes for o in (*evidence.singles, *evidence.splits) if o.short_by_bytes), default=0)
    if pages or short:
        missing = (
            f"{short / 2**30:.1f} GiB are missing." if short else f"{pages[0].name} reads weights from disk for every token."
        )
        return Verdict(verdict="add_memory", headline="More memory is needed; nothing here holds the model.", reasons=(missing,))
    return Verdict(verdict="infeasible", headline="Nothing here can run this model.", reasons=("No option fits.",))


def _what_slows(best: Option, limit: str) -> Verdict:
    reason = f"The best split ({best.name}) has p95 {_ms(best.contended_p95_s)}, above {limit}."
    if best.link_share >= 0.5:
        headline = "The links are too slow for this split, on a quiet network too."
        return Verdict(
            verdict="fix_link",
            option=best.name,
            headline=headline,
            reasons=(reason, f"Links take {best.link_share:.0%} of a token."),
        )
    who = (
        f"{best.slowest_node} takes {best.slowest_share:.0%} of the compute time." if best.slowest_node else "Compute takes most."
    )
    return Verdict(
        verdict="stronger_node",
        option=best.name,
        headline="One stronger machine would do more than this split.",
        reasons=(reason, who),
    )
