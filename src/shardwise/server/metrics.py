"""Figures for Prometheus: what the server itself saw, counted as it happens, and what the deployment says, asked at each scrape.

Buckets cover a fast card and a slow Wi-Fi. Names follow Prometheus' habits: base units, `_total` for counters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shardwise.errors import ShardwiseError
from shardwise.planner.types import Prediction
from shardwise.server.activity import Activity
from shardwise.server.engine import Engine, EngineSlot
from shardwise.server.figures import Boundary, boundaries
from shardwise.transport.messages import Quantiles, Stats

_TTFT_BUCKETS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
_ITL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)
_OVERHEAD_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1)


class Metrics:
    """Counters and histograms of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._scrape: asyncio.Future[bytes] | None = None
        self.requests = Counter(
            "shardwise_requests", "HTTP requests by endpoint and status", ["endpoint", "status"], registry=self.registry
        )
        self.time_to_first_token = Histogram(
            "shardwise_time_to_first_token_seconds",
            "From submission to the first token",
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        )
        self.inter_token = Histogram(
            "shardwise_inter_token_latency_seconds", "Between tokens of one stream", buckets=_ITL_BUCKETS, registry=self.registry
        )
        self.overhead = Histogram(
            "shardwise_server_token_overhead_seconds",
            "From the driver's event to the bytes passed to the kernel",
            buckets=_OVERHEAD_BUCKETS,
            registry=self.registry,
        )
        self.generated_tokens = Counter("shardwise_generated_tokens", "Tokens generated", registry=self.registry)
        self.prompt_tokens = Counter("shardwise_prompt_tokens", "Prompt tokens accepted", registry=self.registry)
        self.disconnects = Counter("shardwise_client_disconnects", "Clients that left before the end", registry=self.registry)

    def watch(self, slot: EngineSlot, activity: Activity) -> None:
        """Report the deployment and the requests in flight at each scrape."""
        self.registry.register(DeploymentCollector(slot, activity))

    def text(self) -> bytes:
        """The exposition. Asks the stages: call it outside the event loop."""
        return generate_latest(self.registry)

    async def scrape(self) -> bytes:
        """The exposition; whoever asks at the same time gets the same one, so that many cannot use up all threads."""
        if self._scrape is None or self._scrape.done():
            self._scrape = asyncio.ensure_future(asyncio.to_thread(self.text))
        return await asyncio.shield(self._scrape)


class DeploymentCollector(Collector):
    """Figures of the moment."""

    def __init__(self, slot: EngineSlot, activity: Activity) -> None:
        self._slot = slot
        self._activity = activity

    def describe(self) -> list[Metric]:
        """Nothing is asked at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        said = self._slot.availability()
        yield _gauge("shardwise_ready", "1 where a token went through every stage lately", float(said.ready))
        if said.last_token_age_s is not None:
            yield _gauge("shardwise_last_token_age_seconds", "Since a token went through every stage", said.last_token_age_s)
        rows = list(self._activity.rows())
        states = GaugeMetricFamily("shardwise_requests_in_flight", "Requests by state", labels=["state"])
        for state in ("waiting", "generating", "paused"):
            states.add_metric([state], sum(row["state"] == state for row in rows))
        yield states
        engine = self._slot.engine
        if engine is not None:
            yield from _deployment(engine, self._slot.expectation.prediction, asks=said.ready)


def _deployment(engine: Engine, predicted: Prediction | None, *, asks: bool) -> Iterator[Metric]:
    """`asks` the stages for their figures: only where they can answer, for the rest is wanted most where they cannot."""
    recoveries = CounterMetricFamily("shardwise_recoveries", "Recoveries of sessions", labels=["action"])
    counts: dict[str, int] = {}
    for recovery in engine.recoveries:
        counts[recovery.action] = counts.get(recovery.action, 0) + 1
    for action, count in counts.items():
        recoveries.add_metric([action], count)
    yield recoveries
    up = GaugeMetricFamily("shardwise_stage_up", "1 where the stage runs", labels=["stage", "node", "state"])
    for stage in engine.stages:
        up.add_metric([str(stage.index), stage.node, stage.state], float(stage.state in ("ready", "running", "serving")))
    yield up
    nodes = {stage.index: stage.node for stage in engine.stages}
    with suppress(ShardwiseError):
        stats = engine.stats() if asks else ()
        yield from _stages(stats, nodes)
        yield from _boundaries(boundaries(engine, stats, predicted))
    if predicted is not None:
        yield _gauge("shardwise_predicted_time_to_first_token_seconds", "Predicted", predicted.time_to_first_token_s)
        yield _gauge("shardwise_predicted_inter_token_latency_seconds", "Predicted p50", predicted.inter_token_s.p50)
        yield _gauge("shardwise_predicted_aggregate_tokens_per_second", "Predicted", predicted.aggregate_tokens_per_s)


def _stages(stats: Sequence[Stats], nodes: dict[int, str]) -> Iterator[Metric]:
    labels = ["stage", "node"]
    gauges = {
        "sessions": GaugeMetricFamily("shardwise_stage_sessions", "Sessions with KV on the stage", labels=labels),
        "kv_tokens": GaugeMetricFamily("shardwise_stage_kv_tokens", "KV positions in use", labels=labels),
        "memory_bytes": GaugeMetricFamily("shardwise_stage_memory_bytes", "Resident memory of the worker", labels=labels),
    }
    rows = GaugeMetricFamily("shardwise_stage_batch_rows", "Rows in a decode step, mean", labels=labels)
    seconds = GaugeMetricFamily("shardwise_stage_seconds", "Parts of a decode step", labels=[*labels, "part", "quantile"])
    sent = CounterMetricFamily("shardwise_stage_sent_bytes", "Bytes sent to the next stage", labels=labels)
    for one in stats:
        where = [str(one.stage), nodes.get(one.stage, "")]
        for name, gauge in gauges.items():
            gauge.add_metric(where, getattr(one, name))
        rows.add_metric(where, one.decode_rows / one.decode.n if one.decode.n else 0.0)
        sent.add_metric(where, one.sent_bytes)
        for part in ("prefill", "decode", "wait", "queue", "copy"):
            _add_quantiles(seconds, [*where, part], getattr(one, part))
    yield from gauges.values()
    yield rows
    yield seconds
    yield sent


def _boundaries(found: Sequence[Boundary]) -> Iterator[Metric]:
    labels = ["boundary", "from", "to", "part", "quantile"]
    measured = GaugeMetricFamily("shardwise_boundary_seconds", "Measured, of decode messages", labels=labels)
    predicted = GaugeMetricFamily("shardwise_boundary_predicted_seconds", "Predicted, of decode messages", labels=labels)
    for index, one in enumerate(found):
        where = [str(index), one.source, one.target]
        for part, quantiles in (("transfer", one.transfer), ("copy", one.copy), ("wait", one.wait)):
            _add_quantiles(measured, [*where, part], quantiles)
        if one.predicted is not None:
            for part, guess in (
                ("transfer", one.predicted.transfer_s),
                ("copy", one.predicted.copy_s),
                ("wait", one.predicted.sync_wait_s),
            ):
                predicted.add_metric([*where, part, "0.5"], guess.p50)
                predicted.add_metric([*where, part, "0.95"], guess.p95)
    yield measured
    yield predicted


def _add_quantiles(family: GaugeMetricFamily, labels: list[str], quantiles: Quantiles) -> None:
    for name, value in (("0.5", quantiles.p50), ("0.95", quantiles.p95), ("0.99", quantiles.p99)):
        family.add_metric([*labels, name], value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
