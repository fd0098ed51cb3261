"""Two hundred malformed requests: always a 4xx with a useful message in OpenAI's shape, never a 500, never a hang."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from .running import CLOCK, Running

ASK: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
WRONG: list[Any] = ["x", [], {}, True, 1e300, -1, 10**30, [1], {"a": 1}]
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "sample", "messages": ASK, "max_tokens": 1} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "sample", "prompt": "hi", "max_tokens": 1} | fields


def answer(**fields: Any) -> dict[str, Any]:
    return {"model": "sample", "input": "hi", "max_output_tokens": 1} | fields


def schema(value: Any) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": value}})


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}} | fields}


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": [{"type": kind, **fields}]}])


def deep(levels: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(levels):
        value = {"type": "array", "items": value}
    return value


def wrong_types() -> list[tuple[str, Any]]:
    """Every field of every body with values of the wrong type or size."""
    numbers = ["temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p", "typical_p", "repetition_penalty"]
    cases: list[tuple[str, Any]] = []
    for name in numbers:
        cases += [(CHAT, chat(**{name: value})) for value in ("x", [], {}, True, 1e300, -99)]
    for name in ("max_tokens", "max_completion_tokens", "n", "top_k", "seed", "top_logprobs"):
        cases += [(CHAT, chat(**{name: value})) for value in ("x", [1], {}, 1.5, -(10**30), 10**30)]
    for name in ("stream", "logprobs", "parallel_tool_calls", "store"):
        cases += [(CHAT, chat(**{name: value})) for value in ("yes", 2, [])]
    for name in ("model", "user", "grammar"):
        cases += [(CHAT, chat(**{name: value})) for value in (1, [], {})]
    for name in ("messages", "tools", "stop", "logit_bias", "response_format", "tool_choice", "stream_options", "metadata"):
        cases += [(CHAT, chat(**{name: value})) for value in (1, "", ["", 1], {"a": 1} if name != "metadata" else 1.5)]
    return [case for case in cases if case[1].get("stop") != "" or "stop" in case[1]]


def meanings() -> list[tuple[str, Any]]:
    """Right types, wrong meaning."""
    user = {"role": "user", "content": "hi"}
    return [
        (CHAT, {}),
        (CHAT, {"model": "sample"}),
        (CHAT, {"messages": ASK}),
        (CHAT, chat(model="gpt-4o")),
        (CHAT, chat(model="")),
        (CHAT, chat(model="x" * 10_000)),
        (CHAT, chat(model="../../etc/passwd")),
        (CHAT, chat(messages=[])),
        (CHAT, chat(messages=[None])),
        (CHAT, chat(messages=[{"role": "robot", "content": "hi"}])),
        (CHAT, chat(messages=[{"content": "hi"}])),
        (CHAT, chat(messages=[{"role": "user", "content": 7}])),
        (CHAT, chat(messages=[{"role": "user", "content": [7]}])),
        (CHAT, chat(messages=[{"role": "user", "content": [{"text": "no type"}]}])),
        (CHAT, chat(messages=[user] * 5000)),
        (CHAT, chat(messages=[{"role": "user", "content": "tea " * 5000}])),
        (CHAT, chat(max_tokens=0)),
        (CHAT, chat(max_tokens=100_000)),
        (CHAT, chat(n=0)),
        (CHAT, chat(n=17)),
        (CHAT, chat(n=128)),
        (CHAT, chat(n=1_000_000)),
        (CHAT, chat(top_logprobs=2)),
        (CHAT, chat(logprobs=True, top_logprobs=21)),
        (CHAT, chat(logit_bias={"-1": 1})),
        (CHAT, chat(logit_bias={"99999999": 1})),
        (CHAT, chat(logit_bias={"tea": 1})),
        (CHAT, chat(logit_bias={"5": 1000})),
        (CHAT, chat(logit_bias={"1" * 5000: 1})),
        (CHAT, chat(logit_bias={str(i): 1 for i in range(2000)})),
        (CHAT, chat(stop=["x"] * 50)),
        (CHAT, chat(stop="x" * 10_000)),
        (CHAT, chat(stop=[""])),
        (CHAT, chat(unknown_field=1)),
        (CHAT, chat(functions=[{"name": "f"}])),
        (CHAT, chat(audio={"voice": "x"}, modalities=["audio"])),
        (CHAT, chat(prediction={"type": "content"})),
        (CHAT, part("image_url", image_url={"url": "data:image/png;base64,AAAA"})),
        (CHAT, part("input_image", image_url="https://example.org/x.png")),
        (CHAT, part("input_audio", input_audio={"data": "AAAA", "format": "wav"})),
        (CHAT, part("file", file={"file_id": "x"})),
        (CHAT, part("video_url", video_url={"url": "x"})),
        (CHAT, part("text")),
        (CHAT, chat(response_format={"type": "xml"})),
        (CHAT, chat(response_format={"type": "json_schema"})),
        (CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}})),
        (CHAT, schema({"type": "tea"})),
        (CHAT, schema({"type": []})),
        (CHAT, schema({"type": "object", "properties": 1})),
        (CHAT, schema({"type": "object", "properties": {"a": 1}})),
        (CHAT, schema({"type": "object", "required": ["a"], "additionalProperties": False})),
        (CHAT, schema({"type": "object", "patternProperties": {"a": {}}})),
        (CHAT, schema({"type": "string", "pattern": "^(a+)+$"})),
        (CHAT, schema({"type": "string", "minLength": -1})),
        (CHAT, schema({"type": "string", "minLength": 10**9})),
        (CHAT, schema({"type": "string", "minLength": 5, "maxLength": 2})),
        (CHAT, schema({"type": "array", "items": 3})),
        (CHAT, schema({"type": "array", "items": {}, "minItems": 10**9})),
        (CHAT, schema({"type": "array", "items": {}, "uniqueItems": True})),
        (CHAT, schema({"type": "integer", "minimum": 5, "maximum": 2})),
        (CHAT, schema({"type": "integer", "minimum": "x"})),
        (CHAT, schema({"type": "integer", "multipleOf": 3})),
        (CHAT, schema({"type": "number", "minimum": 0.5})),
        (CHAT, schema({"$ref": "https://example.org/x.json"})),
        (CHAT, schema({"$ref": "#/$defs/missing"})),
        (CHAT, schema({"$ref": "#"})),
        (CHAT, schema({"$ref": 5})),
        (CHAT, schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})),
        (CHAT, schema({"anyOf": []})),
        (CHAT, schema({"anyOf": [1]})),
        (CHAT, schema({"allOf": [{"type": "string"}, {"type": "integer"}]})),
        (CHAT, schema({"enum": []})),
        (CHAT, schema({"enum": 1})),
        (CHAT, schema({"not": {}})),
        (CHAT, schema({"if": {}, "then": {}})),
        (CHAT, schema(deep(200))),
        (CHAT, schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}})),
        (CHAT, chat(grammar="root ::= (")),
        (CHAT, chat(grammar="root ::= missing")),
        (CHAT, chat(grammar="root ::= root")),
        (CHAT, chat(grammar='root ::= a\na ::= a "x"')),
        (CHAT, chat(grammar="tea")),
        (CHAT, chat(grammar='main ::= "x"')),
        (CHAT, chat(grammar="root ::= " + "(" * 5000 + '"x"' + ")" * 5000)),
        (CHAT, chat(grammar="root ::= " + '"x" ' * 60_000)),
        (CHAT, chat(grammar='root ::= "x"{100000}')),
        (CHAT, chat(grammar="root ::= [")),
        (CHAT, chat(grammar='root ::= "\\xZZ"')),
        (CHAT, chat(grammar='root ::= "x\x00y"')),
        (CHAT, chat(grammar='root ::= "x"', response_format={"type": "json_object"})),
        (CHAT, chat(tools=[{"type": "web_search"}])),
        (CHAT, chat(tools=[tool(name="")])),
        (CHAT, chat(tools=[tool(name="a b")])),
        (CHAT, chat(tools=[tool(), tool()])),
        (CHAT, chat(tools=[tool(name=f"f{i}") for i in range(200)])),
        (CHAT, chat(tools=[tool(parameters={"type": "tea"})], tool_choice="required")),
        (CHAT, chat(tool_choice="required")),
        (CHAT, chat(tools=[tool()], tool_choice={"type": "function", "function": {"name": "g"}})),
        (CHAT, chat(tools=[tool()], tool_choice="sometimes")),
        (CHAT, chat(tools=[tool()], tool_choice="required", response_format={"type": "json_object"})),
        (TEXT, {}),
        (TEXT, text(prompt="")),
        (TEXT, text(prompt=[])),
        (TEXT, text(prompt=[[]])),
        (TEXT, text(prompt=[-1])),
        (TEXT, text(prompt=[10**9])),
        (TEXT, text(prompt=[1.5])),
        (TEXT, text(prompt=[1, "a"])),
        (TEXT, text(prompt=["x"] * 100)),
        (TEXT, text(prompt=list(range(2000)))),
        (TEXT, text(prompt=None)),
        (TEXT, text(max_tokens=0)),
        (TEXT, text(best_of=5)),
        (TEXT, text(suffix="x")),
        (TEXT, text(echo=True, logprobs=1)),
        (TEXT, text(logprobs=100)),
        (RESPONSES, {}),
        (RESPONSES, answer(input=[])),
        (RESPONSES, answer(input=[{"type": "message"}])),
        (RESPONSES, answer(input=[{"type": "function_call", "name": "f"}])),
        (RESPONSES, answer(input=[{"type": "function_call_output", "call_id": "x"}])),
        (RESPONSES, answer(input=[{"type": "item_reference", "id": "x"}])),
        (RESPONSES, answer(input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}])),
        (RESPONSES, answer(previous_response_id="resp_1")),
        (RESPONSES, answer(background=True)),
        (RESPONSES, answer(tools=[{"type": "file_search"}])),
        (RESPONSES, answer(text={"format": {"type": "json_schema", "name": "x"}})),
        ("/v1/embeddings", {"model": "sample", "input": ""}),
        ("/v1/embeddings", {"model": "sample", "input": "x", "dimensions": -1}),
        ("/v1/embeddings", {"model": "sample"}),
        ("/tokenize", {}),
        ("/tokenize", {"content": "x", "prompt": "y"}),
        ("/tokenize", {"content": 5}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {}),
    ]


def raw_bodies() -> list[bytes]:
    good = json.dumps(chat()).encode()
    return [
        b"",
        b"tea",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"{}}",
        good[:-1],
        good + b"x",
        b'{"model": "sample", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"model": "sample", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "sample", "temperature": NaN}',
        b'{"model": "sample", "temperature": Infinity}',
        b'{"model": "sample", "n": ' + b"9" * 5000 + b"}",
        b'{"model": "sample", "temperature": 1e999}',
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"model": "sample", "messages": ' + b"[" * 900 + b"]" * 900 + b"}",
        good.decode().encode("utf-16"),
        b"\xef\xbb\xbf" + good,
        b"\x00" * 100,
    ]


def complaint(response: httpx.Response, case: object) -> str:
    """What is wrong with an answer to a malformed request; empty where it is as it should be."""
    short = f"{response.status_code} {response.text[:200]!r} to {case!r:.300}"
    if not 400 <= response.status_code < 500:
        return f"status: {short}"
    error = response.json()["error"]
    if set(error) < {"message", "type", "param", "code"} or len(error["message"]) < 10 or "Traceback" in error["message"]:
        return f"message: {short}"
    return ""


def test_there_are_two_hundred() -> None:
    assert len(wrong_types()) + len(meanings()) + len(raw_bodies()) >= 200


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_meanings_are_refused_with_a_useful_message(server: Running, stream: bool) -> None:
    complaints = []
    for path, body in meanings():
        started_s = CLOCK.now_s()
        streams = stream and path in (CHAT, TEXT, RESPONSES) and body
        complaints.append(complaint(server.http.post(path, json=body | {"stream": True} if streams else body), (path, body)))
        if CLOCK.now_s() - started_s > 10:
            complaints.append(f"slow: {body!r:.300}")
    assert not list(filter(None, complaints))


def test_wrong_types_are_refused_with_the_name_of_the_field(server: Running) -> None:
    complaints = []
    for path, body in wrong_types():
        response = server.http.post(path, json=body)
        field = next(name for name in body if body[name] != chat().get(name) or name not in chat())
        said = complaint(response, body)
        complaints.append(
            said or ("" if response.json()["error"]["param"] == field else f"param: {response.text} to {body!r:.200}")
        )
    assert not list(filter(None, complaints))


def test_bytes_that_are_not_a_request(server: Running) -> None:
    headers = {"Content-Type": "application/json"}
    complaints = [complaint(server.http.post(CHAT, content=body, headers=headers), body[:80]) for body in raw_bodies()]
    assert not list(filter(None, complaints))


def test_content_types_sizes_and_methods(server: Running) -> None:
    good = json.dumps(chat())
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        response = server.http.post(CHAT, content=good, headers={"Content-Type": kind})
        assert response.status_code == 415, kind
    large = server.http.post(CHAT, json=chat(messages=[{"role": "user", "content": "x" * 5 * 2**20}]))
    assert large.status_code == 413
    assert "4194304 bytes" in large.json()["error"]["message"]
    assert server.http.post("/v1/nothing", json={}).status_code == 404
    assert server.http.get(CHAT).status_code == 405
    assert server.http.delete("/v1/models/sample").status_code == 405
    for path in ("/../../etc/passwd", "/static/../run.py", "/static/%2e%2e/run.py", "/%00", "/v1/models/%ff%fe"):
        assert server.http.get(path).status_code == 404, path


def test_after_all_that_it_still_answers(server: Running) -> None:
    assert server.chat().status_code == 200
    assert server.http.get("/health/ready").status_code == 200
