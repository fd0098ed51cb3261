"""JSON schemas as grammars: what llama.cpp accepts under the grammar is valid under the schema, and the useful part of it."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.deploy.deployment import Deployment
from shardwise.errors import UsageError
from shardwise.server.integer_range import integer_rule
from shardwise.server.json_grammar import any_object_gbnf, schema_to_gbnf
from shardwise.session.request import GenerationRequest
from shardwise.transport.messages import SamplingSettings

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=6)
plain = st.none() | st.booleans() | st.integers(-999, 999) | names | st.sampled_from(['a"b', "c\\d", "é\n", "\x01"])
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "string", "maxLength": 3}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-2000, 2000),
        st.integers(0, 500),
    ),
    st.builds(lambda values: {"enum": values}, st.lists(plain, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, plain),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda properties, wanted: {
            "type": "object",
            "properties": properties,
            "required": sorted(name for name in properties if name in wanted or not wanted),
            "additionalProperties": False,
        },
        st.dictionaries(names, inner, min_size=1, max_size=3),
        st.sets(names, max_size=2),
    )


schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda item, high: {"type": "array", "items": item, "maxItems": high}, inner, st.integers(0, 2)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=4,
)


def generate(deployment: Deployment, grammar: str, seed: int, max_tokens: int = 300) -> str | None:
    """Text under the grammar at a high temperature, which wanders; None where it was cut off."""
    prompt = tuple(deployment.prompt_ids("JSON:"))
    sampling = SamplingSettings(grammar=grammar, temperature=1.5, seed=seed)
    tokens = list(deployment.stream(GenerationRequest(prompt=prompt, max_tokens=max_tokens, sampling=sampling)))
    return "".join(token.text for token in tokens) if tokens[-1].finish_reason == "stop" else None


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(schema=schemas)
def test_generated_text_is_valid_under_the_schema(deployment: Deployment, schema: dict[str, Any]) -> None:
    text = generate(deployment, schema_to_gbnf(schema), seed=len(str(schema)))
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


def test_references_and_recursion(deployment: Deployment) -> None:
    schema = {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"name": {"enum": ["x", "y"]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["name", "next"],
            }
        },
        "$ref": "#/$defs/node",
    }
    texts = [generate(deployment, schema_to_gbnf(schema), seed, max_tokens=90) for seed in (0, 2, 4, 7)]
    whole = [json.loads(text) for text in texts if text is not None]
    for value in whole:
        jsonschema.validate(value, schema)
    assert any(value["next"] for value in whole), "all ended early, or were cut off"


def test_any_object(deployment: Deployment) -> None:
    texts = [generate(deployment, any_object_gbnf(), seed, max_tokens=90) for seed in range(4)]
    whole = [json.loads(text) for text in texts if text is not None]
    assert whole
    assert all(isinstance(value, dict) for value in whole)


@given(low=st.integers(-5000, 5000), span=st.integers(0, 3000), probe=st.integers(-9000, 9000))
def test_integer_ranges_are_exact(low: int, span: int, probe: int) -> None:
    rule = re.compile("(?:" + integer_rule(low, low + span).replace('"', "").replace(" ", "") + ")")
    assert bool(rule.fullmatch(str(probe))) == (low <= probe <= low + span)
    assert rule.fullmatch(str(low))
    assert rule.fullmatch(str(low + span))


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"not": {}}, "not"),
        ({"type": "object", "patternProperties": {}}, "patternProperties"),
        ({"type": "number", "multipleOf": 2}, "multipleOf"),
        ({"$ref": "http://x"}, "must point into"),
        ({"$ref": "#/$defs/x"}, "points to nothing"),
        ({"type": "array", "items": {}, "contains": {}}, "contains"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=re.escape(word)):
        schema_to_gbnf(schema)


def test_what_people_generate_with_pydantic_works() -> None:
    import pydantic

    class Address(pydantic.BaseModel):
        street: str
        number: int | None = None

    class Person(pydantic.BaseModel):
        name: str = pydantic.Field(min_length=1, description="full name")
        tags: list[str] = []
        addresses: dict[str, Address]
        scores: tuple[int, float]
        born: str = pydantic.Field(json_schema_extra={"format": "date"})

    grammar = schema_to_gbnf(Person.model_json_schema())
    assert grammar.startswith("root ::= ")
    assert "addresses" in grammar
