"""Result files made by rule, for tests of what reads them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from shardwise.bench.environment import capture_environment
from shardwise.bench.parts import token_parts
from shardwise.bench.result import (
    RESULT_VERSION,
    BoundaryFigures,
    Case,
    ClockOffset,
    RequestResult,
    ResultFile,
    StageFigures,
    StageVisit,
    TokenTrace,
    TrialResult,
)


def make_case(
    *, network: str = "cable", hosts: Sequence[str] = ("desktop", "nas"), num_users: int = 1, load: str = "short"
) -> Case:
    kind = {"cable": "wired", "wifi": "wireless", "machine": "loopback"}[network]
    return Case(
        network=network,
        network_kind=kind,  # type: ignore[arg-type]
        split=" + ".join(hosts),
        hosts=tuple(hosts),
        workload=load,
        prompt_tokens=16,
        output_tokens=40,
        num_users=num_users,
    )


def make_trial(
    case: Case,
    repetition: int = 0,
    *,
    compute_s: Sequence[float] = (3e-3, 4e-3),
    link_s: float = 0.4e-3,
    copy_s: float = 0.05e-3,
    factor: float = 1.0,
    noise: float = 0.05,
    num_tokens: int = 40,
    seed: int = 0,
) -> TrialResult:
    """A ring that runs by rule: each part varies by `noise` (a share, normal), everything is `factor` times as slow."""
    rng = random.Random(f"{seed}/{repetition}/{case.key}")
    drift = factor * max(0.5, rng.gauss(1.0, noise))

    def about(seconds: float) -> float:
        return seconds * drift * max(0.2, rng.gauss(1.0, noise))

    now_s, traces, arrivals = 0.0, [], []
    for number in range(num_tokens):
        visits = []
        for stage, seconds in enumerate(compute_s[: len(case.hosts)]):
            received_s = now_s
            started_s = received_s + 2e-5
            computed_s = started_s + about(seconds)
            sent_s = computed_s + about(copy_s)
            visits.append(
                StageVisit(stage=stage, received_s=received_s, started_s=started_s, computed_s=computed_s, sent_s=sent_s)
            )
            now_s = sent_s + about(link_s)
        arrivals.append(now_s)
        traces.append(TokenTrace(number=number, visits=tuple(visits), arrived_s=now_s))
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    request = RequestResult(
        prompt_tokens=case.prompt_tokens, num_tokens=num_tokens, time_to_first_token_s=arrivals[0], inter_token_s=tuple(gaps)
    )
    return TrialResult(
        case=case,
        repetition=repetition,
        started="2026-01-01T00:00:00+00:00",
        duration_s=now_s,
        requests=(request,) * case.num_users,
        stages=tuple(
            StageFigures(node=host, layers=(0, 1), peak_memory_bytes=10**8 * (i + 1), memory_limit_bytes=10**9)
            for i, host in enumerate(case.hosts)
        ),
        boundaries=(BoundaryFigures(source=case.hosts[0], target=case.hosts[-1], bytes_per_token=2421.0),),
        tokens=tuple(traces[2:10]),
        parts=token_parts(traces, case.hosts),
        parts_measured_s=(arrivals[-1] - arrivals[0]) / (num_tokens - 1),
        clock_offsets=tuple(ClockOffset(node=host, offset_s=1e-5, error_s=4e-5) for host in case.hosts),
    )


def make_result(trials: Sequence[TrialResult], *, name: str = "built") -> ResultFile:
    return ResultFile(
        version=RESULT_VERSION,
        name=name,
        title="A built result",
        scenario_digest="0" * 64,
        seed=1,
        environment=capture_environment(),
        trials=tuple(trials),
    )
