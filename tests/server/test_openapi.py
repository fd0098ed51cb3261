"""The OpenAPI description held against the server by schemathesis: generated requests, never a 500, always as described."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from .running import Running

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
    ("GET", "/api/status"),
    ("POST", "/api/replan/preview"),
]
LIMITS = {"/v1/chat/completions": "max_completion_tokens", "/v1/completions": "max_tokens", "/v1/responses": "max_output_tokens"}


@pytest.fixture(scope="module")
def described(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_described(described: Any, method: str, path: str) -> None:
    operation = described[path][method]

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(case=operation.as_strategy())
    def check(case: schemathesis.Case) -> None:
        if path in LIMITS and isinstance(case.body, dict):
            case.body["model"] = "sample"  # a random name would end every request at 404
            case.body[LIMITS[path]] = 1
        case.call_and_validate(checks=CHECKS, timeout=30)

    check()


def test_nothing_is_left_out(described: Any) -> None:
    found = {(operation.ok().method.upper(), operation.ok().path) for operation in described.get_all_operations()}
    operating = {("POST", f"/api/{name}") for name in ("drain", "resume", "stop", "start", "restart", "leave", "replan/apply")}
    assert found == set(OPERATIONS) | operating | {("GET", "/api/events")}
