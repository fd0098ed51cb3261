"""One span per stage visit, under the caller's trace, exported to a collector on loopback."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from shardwise.deploy.deployment import Deployment
from shardwise.deploy.launcher import launch_local
from shardwise.server.tracing import visit_times
from shardwise.session.request import Token
from shardwise.transport.messages import Visit

from .running import running_server

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted."""

    received: list[bytes]

    def do_POST(self) -> None:
        self.received.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    received: list[bytes] = []
    handler = type("Keeping", (Collector,), {"received": received})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", received
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_traced_request_gives_a_span_per_stage_visit(deployment: Deployment, collector: tuple[str, list[bytes]]) -> None:
    endpoint, received = collector
    with running_server(deployment, trace_endpoint=endpoint) as server:
        body = {"model": "sample", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        assert server.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        assert server.chat().status_code == 200  # not sampled: no spans
    spans = []
    for data in received:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    roots = [span for span in spans if span.name == "generate"]
    assert [span.parent_span_id.hex() for span in roots] == ["b7ad6b7169203331"]
    visits = [span for span in spans if span.name.startswith("stage ")]
    assert sorted(span.name for span in visits) == ["stage 0"] * 3 + ["stage 1"] * 3
    assert all(span.parent_span_id == roots[0].span_id for span in visits)
    assert all(span.end_time_unix_nano > span.start_time_unix_nano for span in visits)
    assert all(span.start_time_unix_nano < roots[0].end_time_unix_nano for span in visits)


def test_each_session_of_a_mixed_batch_keeps_its_own_trace() -> None:
    """Traced and untraced sessions that share steps: no visit is lost on the way, and none is another session's."""
    with launch_local("sample", num_stages=3, max_sessions=6, context_tokens=160, probe_interval_s=0.0) as deployment:
        prompts = [deployment.prompt_ids(f"Count from {number} on:") for number in range(6)]
        runs: list[list[Token]] = [[] for _ in prompts]

        def ask(index: int) -> None:
            traced = index % 2 == 1
            tokens = deployment.generate(prompts[index], max_tokens=12 + 3 * index, ignore_eos=True, traced=traced)
            runs[index].extend(tokens)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    shared = 0
    for index, run in enumerate(runs):
        assert len(run) == 12 + 3 * index
        if index % 2 == 0:
            assert not any(token.visits for token in run)
            continue
        for before, token in zip([None, *run], run):
            assert [visit.stage for visit in token.visits] == [0, 1, 2]
            assert all(left.sent_s <= right.received_s for left, right in zip(token.visits, token.visits[1:]))
            assert before is None or before.visits[-1].sent_s <= token.visits[0].received_s  # its own turn of the ring
            shared += any(visit.rows > 1 for visit in token.visits[1:])
    assert shared > 0


def test_visits_with_foreign_clocks_are_laid_back_to_back() -> None:
    def visit(stage: int, origin_s: float) -> Visit:
        return Visit(
            stage=stage, received_s=origin_s, started_s=origin_s + 1, computed_s=origin_s + 3, sent_s=origin_s + 4, rows=1
        )

    assert visit_times((visit(0, 10.0), visit(1, 14.5)), 100.0) == [(91.5, 95.5), (96.0, 100.0)]
    assert visit_times((visit(0, 9000.0), visit(1, 14.5)), 100.0) == [(92.0, 96.0), (96.0, 100.0)]
