"""Short runs of one and of two stages on this machine: what the runtime costs beside the layers, before any prediction.

    launch_local x 2 -> requests in turns -> Stats of the stages, gaps of the user, processor time -> `Runs`

Prompts have 256 and 1,664 tokens: whole chunks, so that no odd one is taken for attention, and around those of the matrix, which
has neither. **Fails with** the errors of deployments, `ReplyTimeout` where a run does not end. **Called by**
`prediction_calibration`.
"""

from __future__ import annotations

import statistics
from typing import Any

import psutil

from shardwise.bench.agent import UserRun
from shardwise.bench.prompts import prompt_ids
from shardwise.bench.scenario import Scenario
from shardwise.bench.stats import quantile
from shardwise.deploy import Deployment, launch_local
from shardwise.errors import ReplyTimeout
from shardwise.model.description import ModelDescription
from shardwise.records import Record
from shardwise.session.request import GenerationRequest
from shardwise.transport.messages import Stats

PROMPT_TOKENS, LONG_PROMPT_TOKENS, OUTPUT_TOKENS = 256, 1664, 48
REPETITIONS = 7
_P95_NORMAL = 1.645
_TIMEOUT_S = 300.0


class RunFigures(Record):
    """One short run, repeated: medians."""

    gap_s: float  # between tokens
    jitter: float  # of a stage's step: standard deviation / median
    first_token_s: float
    decode_s: tuple[float, ...]  # per stage, median step
    prefill_s: tuple[float, ...]  # per stage, one prompt
    memory_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    beside_cpu_s: tuple[float, ...]  # per stage: processor time a token, beyond computing
    driver_cpu_s: float  # of this process, a token
    around_s: tuple[float, ...]  # per stage: from a token's arrival to its departure, beyond computing
    prompt_tokens: int = PROMPT_TOKENS


class Runs(Record):
    """What `fit` looks at."""

    one: RunFigures
    far: RunFigures  # one stage, long prompt
    two: RunFigures
    pair: RunFigures  # two stages, two users
    inside_s: tuple[float, ...]  # per repetition: how much longer two stages compute than the one measured just before


def short_runs(model: ModelDescription, scenario: Scenario) -> Runs:
    """Both deployments on loopback with the matrix's settings, taking turns: a machine's speed drifts by some percent."""
    options: dict[str, Any] = {
        "context_tokens": scenario.context_tokens,
        "max_sessions": 4,
        "threads": scenario.num_threads,
        "probe_interval_s": 0.0,
    }
    with launch_local(model, num_stages=1, **options) as single, launch_local(model, num_stages=2, **options) as double:
        one, two = _ShortRun(single, PROMPT_TOKENS, 1), _ShortRun(double, PROMPT_TOKENS, 1)
        far, pair = _ShortRun(single, LONG_PROMPT_TOKENS, 1), _ShortRun(double, PROMPT_TOKENS, 2)
        for _ in range(REPETITIONS):
            for load in (one, two, far, pair):
                load.repeat()
        return Runs(
            one=one.figures(),
            far=far.figures(),
            two=two.figures(),
            pair=pair.figures(),
            inside_s=tuple(b - a for a, b in zip(one.computing_s, two.computing_s)),
        )


class _ShortRun:
    """One load on one deployment, warmed up."""

    def __init__(self, deployment: Deployment, prompt_tokens: int, users: int) -> None:
        self._deployment, self._prompt_tokens, self._users = deployment, prompt_tokens, users
        self._workers = [psutil.Process(status.pid) for status in deployment.stages]
        self._gaps_s: list[float] = []
        self._first_s: list[float] = []
        self._driver_s: list[float] = []
        self._stats: list[list[Stats]] = []
        self._beside_s: list[list[float]] = []
        self._around_s: list[list[float]] = []
        self.computing_s: list[float] = []  # per repetition: of a token, in all stages
        _ask(deployment, prompt_tokens, users, 4)

    def repeat(self) -> None:
        """Measure once more."""
        self._deployment.stats(reset=True)
        driver = psutil.Process()
        before_s, driver_s = [_cpu_s(worker) for worker in self._workers], _cpu_s(driver)
        done = _ask(self._deployment, self._prompt_tokens, self._users, OUTPUT_TOKENS)
        self._driver_s.append(_cpu_s(driver) - driver_s)
        used_s = [_cpu_s(worker) - then_s for worker, then_s in zip(self._workers, before_s)]
        stats = self._deployment.stats()
        self._beside_s.append([spent_s - s.prefill.total - s.decode.total for spent_s, s in zip(used_s, stats)])
        self._stats.append(stats)
        visits = zip(*(token.visits for run in done for token in run.tokens[1:]))  # per stage
        stays_s = [quantile([visit.sent_s - visit.received_s for visit in mine], 0.5) for mine in visits]
        self._around_s.append([stay_s - s.decode.p50 for stay_s, s in zip(stays_s, stats)])
        self.computing_s.append(sum(s.decode.p50 for s in stats))
        self._gaps_s += [b - a for run in done for a, b in zip(run.arrived_s[1:], run.arrived_s[2:])]
        self._first_s.append(min(run.arrived_s[0] - run.started_s for run in done))

    def figures(self) -> RunFigures:
        """Medians over the repetitions, processor time as means (its clock is coarse)."""
        stages = list(zip(*self._stats))  # [stage][repetition]
        statuses = self._deployment.stages
        tokens = self._users * OUTPUT_TOKENS
        return RunFigures(
            gap_s=quantile(self._gaps_s, 0.5),
            jitter=max(
                0.01, statistics.median((s.decode.p95 / s.decode.p50 - 1.0) / _P95_NORMAL for mine in stages for s in mine)
            ),
            first_token_s=quantile(self._first_s, 0.5),
            decode_s=tuple(statistics.median(s.decode.p50 for s in mine) for mine in stages),
            prefill_s=tuple(statistics.median(s.prefill.total / self._users for s in mine) for mine in stages),
            memory_bytes=tuple(mine[-1].peak_memory_bytes for mine in stages),
            weight_bytes=tuple(s.weight_bytes for s in statuses),
            kv_bytes=tuple(s.kv_bytes for s in statuses),
            layers=tuple(s.layers for s in statuses),
            beside_cpu_s=tuple(max(0.0, statistics.mean(mine) / tokens) for mine in zip(*self._beside_s)),
            driver_cpu_s=statistics.mean(self._driver_s) / tokens,
            around_s=tuple(statistics.median(mine) for mine in zip(*self._around_s)),
            prompt_tokens=self._prompt_tokens,
        )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _ask(deployment: Deployment, prompt_tokens: int, users: int, max_tokens: int) -> list[UserRun]:
    runs = []
    for number in range(users):
        ids = prompt_ids(deployment.tokenizer, prompt_tokens, number)
        run = UserRun(number)
        runs.append(run)
        deployment.submit(GenerationRequest(prompt=ids, max_tokens=max_tokens, ignore_eos=True, traced=True), run.on_event)
    for run in runs:
        if not run.ended.wait(_TIMEOUT_S):
            raise ReplyTimeout(f"a calibration run did not end within {_TIMEOUT_S:.0f} s", where="bench")
        if run.error is not None:
            raise run.error
    return runs
