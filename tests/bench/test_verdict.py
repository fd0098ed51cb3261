"""The verdict on twelve built cases with known answers, and what it must never do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.bench.verdict import Evidence, Option, decide

TARGET_S = 0.2


def option(
    name: str, nodes: int = 1, *, fits: bool = True, p50: float = 0.05, p95: float = 0.08, rate: float = 20.0, **more: object
) -> Option:
    return Option(
        name=name,
        num_nodes=nodes,
        fits=fits,
        inter_token_p50_s=p50,
        contended_p95_s=p95,
        aggregate_tokens_per_s=rate,
        **more,  # type: ignore[arg-type]
    )


GIB = 2**30
NO_FIT = option("desktop", fits=False, short_by_bytes=4 * GIB)

CASES = {
    "fits one node, the split is slower": (
        Evidence(
            target_p95_s=TARGET_S, singles=(option("desktop", p95=0.06),), splits=(option("desktop + nas", 2, p95=0.1, rate=15),)
        ),
        ("single_node", "desktop"),
    ),
    "fits one node, the split is a little faster but for one user": (
        Evidence(
            target_p95_s=TARGET_S, singles=(option("desktop", p95=0.08),), splits=(option("desktop + nas", 2, p95=0.07, rate=26),)
        ),
        ("single_node", "desktop"),
    ),
    "two users: the split keeps two machines busy": (
        Evidence(
            target_p95_s=TARGET_S,
            singles=(option("desktop", rate=20),),
            splits=(option("desktop + nas", 2, p95=0.1, rate=34),),
            num_users=2,
        ),
        ("shard", "desktop + nas"),
    ),
    "two users, but the split gains little": (
        Evidence(target_p95_s=TARGET_S, singles=(option("desktop", rate=20),), splits=(option("both", 2, rate=22),), num_users=2),
        ("single_node", "desktop"),
    ),
    "fits no node, the split runs well": (
        Evidence(target_p95_s=TARGET_S, singles=(NO_FIT,), splits=(option("desktop + nas", 2, p95=0.12),)),
        ("shard", "desktop + nas"),
    ),
    "Wi-Fi tail: good on cable, bad on the air": (
        Evidence(
            target_p95_s=TARGET_S, singles=(NO_FIT,), splits=(option("both", 2, p95=0.6, quiet_p95_s=0.09, link_share=0.7),)
        ),
        ("fix_link", "both"),
    ),
    "weak third node: two are faster than three": (
        Evidence(
            target_p95_s=TARGET_S,
            singles=(NO_FIT,),
            splits=(
                option("all three", 3, p95=0.35, slowest_node="nas", slowest_share=0.7),
                option("desktop + laptop", 2, p95=0.12),
            ),
        ),
        ("coarser_split", "desktop + laptop"),
    ),
    "three are as fast as two": (
        Evidence(target_p95_s=TARGET_S, singles=(NO_FIT,), splits=(option("three", 3, p95=0.100), option("two", 2, p95=0.105))),
        ("coarser_split", "two"),
    ),
    "three are clearly faster than two": (
        Evidence(target_p95_s=TARGET_S, singles=(NO_FIT,), splits=(option("three", 3, p95=0.10), option("two", 2, p95=0.16))),
        ("shard", "three"),
    ),
    "link-bound everywhere, a smaller quantization fits": (
        Evidence(
            target_p95_s=TARGET_S,
            singles=(NO_FIT,),
            splits=(option("both", 2, p95=0.9, quiet_p95_s=0.8, link_share=0.8),),
            smaller=(option("the same model in Q4", p95=0.1),),
        ),
        ("smaller_quantization", "the same model in Q4"),
    ),
    "compute-bound everywhere": (
        Evidence(
            target_p95_s=TARGET_S,
            singles=(NO_FIT,),
            splits=(option("both", 2, p95=0.9, quiet_p95_s=0.9, link_share=0.05, slowest_node="nas", slowest_share=0.8),),
        ),
        ("stronger_node", "both"),
    ),
    "memory-bound: it only runs from disk": (
        Evidence(
            target_p95_s=TARGET_S, singles=(option("desktop", p95=9.0, pages=True),), splits=(option("both", 2, fits=False),)
        ),
        ("add_memory", ""),
    ),
    "nothing fits": (
        Evidence(target_p95_s=TARGET_S, singles=(NO_FIT,), splits=(option("both", 2, fits=False, short_by_bytes=GIB),)),
        ("add_memory", ""),
    ),
    "link-bound everywhere, nothing smaller": (
        Evidence(target_p95_s=TARGET_S, singles=(NO_FIT,), splits=(option("both", 2, p95=0.9, quiet_p95_s=0.8, link_share=0.8),)),
        ("fix_link", "both"),
    ),
    "one node fits but is too slow, the split is quick enough": (
        Evidence(
            target_p95_s=TARGET_S, singles=(option("nas", p50=0.4, p95=0.5, rate=2),), splits=(option("both", 2, p95=0.15),)
        ),
        ("shard", "both"),
    ),
    "one node fits but is too slow, and so is the split": (
        Evidence(target_p95_s=TARGET_S, singles=(option("nas", p50=0.4, p95=0.5, rate=2),), splits=(option("both", 2, p95=0.6),)),
        ("stronger_node", "nas"),
    ),
    "no option at all": (Evidence(target_p95_s=TARGET_S), ("infeasible", "")),
}


@pytest.mark.parametrize("name", CASES)
def test_known_answers(name: str) -> None:
    evidence, (verdict, chosen) = CASES[name]
    found = decide(evidence)
    assert (found.verdict, found.option) == (verdict, chosen)
    assert found.headline
    assert found.reasons


_options = st.builds(
    option,
    name=st.sampled_from(["a", "b", "c"]),
    nodes=st.integers(1, 4),
    fits=st.booleans(),
    p50=st.floats(0.001, 1),
    p95=st.floats(0.001, 2),
    rate=st.floats(0.1, 100),
    pages=st.booleans(),
)


@given(st.lists(_options, max_size=4), st.lists(_options, max_size=4), st.integers(1, 4))
def test_it_never_advises_a_split_that_misses_the_target_or_does_not_run(
    singles: list[Option], splits: list[Option], users: int
) -> None:
    found = decide(Evidence(target_p95_s=TARGET_S, singles=tuple(singles), splits=tuple(splits), num_users=users))
    if found.verdict in ("shard", "coarser_split"):
        assert any(o.name == found.option and o.fits and not o.pages and o.contended_p95_s <= TARGET_S for o in splits)
    if found.verdict == "single_node":
        assert any(o.name == found.option and o.fits and not o.pages for o in singles)
