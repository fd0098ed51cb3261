"""Request bodies: bounded in size, time and depth, strict JSON, read once.

Bytes come in from the ASGI server; out goes a body that later layers may parse without surprises. Refusals: 408 too
slow, 413 too large, 415 not JSON by its own words, 400 not JSON.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import MutableMapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from shardwise.server.problems import Problem, invalid

MAX_DEPTH = 64
MAX_FIELDS = 2048  # each unknown one would be complained about
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")


async def read_body(scope: Scope, receive: Receive, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body, or a `Problem`."""
    too_large = Problem(413, f"the request body is larger than {max_bytes} bytes", code="request_too_large")
    declared = _header(scope, b"content-length")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes):
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Problem(400, "the client closed the connection before the body was complete")
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > max_bytes:
                    raise too_large
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise Problem(408, f"the request body did not arrive within {timeout_s:g} s", code="timeout") from None


def check_json(scope: Scope, body: bytes) -> None:
    """Refuse what says that it is not JSON, is not JSON, or nests deeper than any honest request."""
    media_type = _header(scope, b"content-type").split(b";")[0].strip().lower()
    if media_type != b"application/json" and not (media_type.startswith(b"application/") and media_type.endswith(b"+json")):
        raise Problem(415, "send the body as Content-Type: application/json", code="unsupported_media_type")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _depth(body) > MAX_DEPTH:
        raise invalid(f"the JSON nests deeper than {MAX_DEPTH} levels", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the request body is not valid JSON (UTF-8): {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid("the request body must be a JSON object", code="invalid_json")
    largest = max((len(one) for one in [value, *value.values()] if isinstance(one, dict)), default=0)
    if largest > MAX_FIELDS:
        raise invalid(f"an object with {largest} fields; at most {MAX_FIELDS} are read", code="invalid_json")


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body again, then what really comes (the client's disconnect)."""
    given = False

    async def receive_again() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _depth(body: bytes) -> int:
    depth = deepest = 0
    for bracket in _BRACKET.findall(_STRING.sub(b"", body)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")
