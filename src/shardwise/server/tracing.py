"""What a traced token went through: one span per stage visit for OpenTelemetry, and the newest path for the live view.

Visits carry each stage's own clock. Where consecutive visits agree within a second (one machine, or clocks that happen to share
an origin) their gaps are kept; otherwise the visits are laid back to back before the moment the driver saw the token, so the
durations are true and only the gaps are not known. Without the extra `telemetry` or an endpoint nothing is exported.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from shardwise.clock import Clock
from shardwise.errors import MissingExtraError
from shardwise.session.request import Token
from shardwise.transport.messages import Visit

_MAX_OPEN = 1024
_SAME_CLOCK_S = 1.0
_PREFER_COMPLETE_S = 3.0


def visit_times(visits: tuple[Visit, ...], end_s: float) -> list[tuple[float, float]]:
    """(received, sent) of each visit on the driver's clock, the last one ending at `end_s`."""
    out: list[tuple[float, float]] = []
    right_s = end_s
    later: Visit | None = None
    for visit in reversed(visits):
        if later is not None:
            gap_s = later.received_s - visit.sent_s
            right_s -= gap_s if 0 <= gap_s < _SAME_CLOCK_S else 0.0
        left_s = right_s - max(0.0, visit.sent_s - visit.received_s)
        out.append((left_s, right_s))
        right_s, later = left_s, visit
    return out[::-1]


class Traces:
    """Spans of requests that asked for them."""

    def __init__(self, clock: Clock, endpoint: str = "", *, exporter: Any = None) -> None:
        self._clock = clock
        self._tracer: Any = None
        self._provider: Any = None
        if endpoint or exporter is not None:
            self._tracer, self._provider = _make_tracer(endpoint, exporter)
        self._roots: OrderedDict[str, Any] = OrderedDict()
        self._complete_s = -_PREFER_COMPLETE_S
        self.newest_path: dict[str, Any] | None = None
        self.watchers = 0  # live views that want to see a token's path

    def wants(self, traceparent: str) -> bool:
        """Trace this request: its caller sampled it, or somebody looks at the live view."""
        return self.watchers > 0 or (self._tracer is not None and _is_sampled(traceparent))

    def begin(self, request_id: str, traceparent: str, attributes: dict[str, str | int]) -> None:
        """Open the request's span, under the caller's."""
        if self._tracer is None or not _is_sampled(traceparent):
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        self._roots[request_id] = self._tracer.start_span("generate", context=context, attributes=attributes)
        while len(self._roots) > _MAX_OPEN:
            self._roots.popitem(last=False)[1].end()

    def token(self, request_id: str, choice: int, token: Token) -> None:
        """One token's way through the stages."""
        now_s = self._clock.now_s()
        times = visit_times(token.visits, now_s)
        start_s = times[0][0]
        complete = token.visits[0].stage == 0  # in a mixed batch the first stages may have had no reason to trace
        if complete or now_s - self._complete_s > _PREFER_COMPLETE_S:
            self._complete_s = now_s if complete else self._complete_s
            self.newest_path = {
                "request": request_id,
                "complete": complete,
                "position": token.position,
                "total_s": now_s - start_s,
                "visits": [_visit(visit, left_s - start_s) for visit, (left_s, _) in zip(token.visits, times)],
            }
        root = self._roots.get(request_id)
        if root is not None:
            self._export(root, choice, token, times, now_s)

    def end(self, request_id: str) -> None:
        """Close the request's span."""
        root = self._roots.pop(request_id, None)
        if root is not None:
            root.end()

    def close(self) -> None:
        """Send what is left."""
        for request_id in list(self._roots):
            self.end(request_id)
        if self._provider is not None:
            self._provider.shutdown()

    def _export(self, root: Any, choice: int, token: Token, times: list[tuple[float, float]], now_s: float) -> None:
        from opentelemetry.trace import set_span_in_context

        offset_s = self._clock.wall_s() - now_s
        parent = set_span_in_context(root)
        for visit, (left_s, right_s) in zip(token.visits, times):
            span = self._tracer.start_span(
                f"stage {visit.stage}",
                context=parent,
                start_time=round((left_s + offset_s) * 1e9),
                attributes={
                    "shardwise.stage": visit.stage,
                    "shardwise.position": token.position,
                    "shardwise.choice": choice,
                    "shardwise.rows": visit.rows,
                    "shardwise.wait_s": visit.started_s - visit.received_s,
                    "shardwise.compute_s": visit.computed_s - visit.started_s,
                    "shardwise.send_s": visit.sent_s - visit.computed_s,
                },
            )
            span.end(round((right_s + offset_s) * 1e9))


def _visit(visit: Visit, start_s: float) -> dict[str, float | int]:
    return {
        "stage": visit.stage,
        "start_s": start_s,
        "wait_s": visit.started_s - visit.received_s,
        "compute_s": visit.computed_s - visit.started_s,
        "send_s": visit.sent_s - visit.computed_s,
        "rows": visit.rows,
    }


def _is_sampled(traceparent: str) -> bool:
    parts = traceparent.split("-")
    return len(parts) == 4 and len(parts[3]) == 2 and parts[3].isalnum() and parts[3][-1] in "13579bdf"


def _make_tracer(endpoint: str, exporter: Any) -> tuple[Any, Any]:
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint)
    except ImportError as error:
        raise MissingExtraError.for_extra("telemetry", "--trace-endpoint") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "shardwise"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider.get_tracer("shardwise"), provider
