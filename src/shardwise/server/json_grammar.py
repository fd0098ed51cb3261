"""JSON schema -> GBNF, so that constrained output is valid by construction.

The grammar accepts a subset of what the schema accepts, never more: declared properties in their order, bounded white space.
A keyword that cannot be honoured is refused by name (`UsageError`) instead of ignored. Annotations (title, description, default,
examples, unknown `format`) have no effect. `oneOf` is taken as `anyOf`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shardwise.errors import UsageError
from shardwise.server.gbnf import MAX_REPEAT, PRIMITIVES, literal, repeat
from shardwise.server.integer_range import integer_rule

Schema = dict[str, Any]

_ANNOTATIONS = {
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "deprecated",
    "readOnly", "writeOnly", "format", "strict", "nullable", "contentEncoding", "contentMediaType", "additionalItems",
}  # fmt: skip
_BY_TYPE: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum"},
    "boolean": set(),
    "null": set(),
}
_FORMATS = {"date": "date", "time": "time", "date-time": "date-time", "uuid": "uuid"}
_MAX_ITEMS = 200
_MAX_RULES = 2000


def refuse(message: str) -> UsageError:
    """The error for a schema that cannot be turned into a grammar."""
    return UsageError(f"the JSON schema cannot be used: {message}", where="json-schema")


class SchemaGrammar:
    """Collects the rules of one or more schemas; `text(root)` is the whole grammar."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._references: dict[tuple[int, str], str] = {}
        self._root: Schema = {}

    def add_rule(self, hint: str, body: str) -> str:
        """Store a rule under a fresh name and return the name."""
        if len(self._rules) >= _MAX_RULES:
            raise refuse(f"it needs more than {_MAX_RULES} rules")
        name = f"{hint}-{len(self._rules)}"
        self._rules[name] = body
        return name

    def add_schema(self, schema: Any) -> str:
        """The rule for a schema with its own `$defs`."""
        if not isinstance(schema, dict):
            raise refuse("it must be an object")
        self._root = schema
        return self._visit(schema)

    def text(self, root: str) -> str:
        """GBNF with everything that is reachable."""
        rules = {"root": root} | self._rules | PRIMITIVES
        return "\n".join(f"{name} ::= {body}" for name, body in rules.items()) + "\n"

    def _visit(self, schema: Any) -> str:
        if schema is True or schema == {}:
            return "value"
        if not isinstance(schema, dict):
            raise refuse(f"{schema!r:.60} stands where a schema is expected")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "const" in schema:
            return literal(_dump(schema["const"]))
        if "enum" in schema:
            return self._enum(schema)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self._check_keywords(schema, {keyword, "type"})
                options = schema[keyword]
                if not isinstance(options, list) or not options:
                    raise refuse(f"{keyword} must be a non-empty list")
                return self.add_rule("any", " | ".join(self._visit(option) for option in options))
        if "allOf" in schema:
            return self._visit(self._merge(schema))
        return self._typed(schema)

    def _typed(self, schema: Schema) -> str:
        kind = schema.get("type", _guess_type(schema))
        if isinstance(kind, list):
            if not kind:
                raise refuse("type must not be an empty list")
            return self.add_rule("any", " | ".join(self._typed(_only(schema, one)) for one in kind))
        if kind is None:
            self._check_keywords(schema, set())
            return "value"
        if kind not in _BY_TYPE:
            raise refuse(f"type {kind!r:.60} is unknown")
        self._check_keywords(schema, _BY_TYPE[kind] | {"type"})
        makers: dict[str, Callable[[Schema], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._integer,
            "number": self._number,
        }
        return makers[kind](schema) if kind in makers else kind

    def _object(self, schema: Schema) -> str:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        extra = schema.get("additionalProperties", True)
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise refuse("properties must be an object and required a list")
        undeclared = [name for name in required if isinstance(name, str) and name not in properties]
        if undeclared and extra is False:
            raise refuse(f"required property {undeclared[0]!r} is not among the properties, and no others are allowed")
        properties = properties | dict.fromkeys(undeclared, extra)
        if not properties:
            return "object" if extra in (True, {}) else self._map(extra)
        pairs = [
            (self.add_rule("pair", f'{literal(_dump(name))} ws ":" ws {self._visit(part)}'), name in required)
            for name, part in properties.items()
        ]
        return self.add_rule("object", f'"{{" ws {self._sequence(pairs)} ws "}}"')

    def _sequence(self, pairs: list[tuple[str, bool]]) -> str:
        """Pairs in order, optional ones left out at will, commas only between what is there."""
        following = '""'
        first = '""'
        for pair, is_required in reversed(pairs):
            tail = following
            once = f'ws "," ws {pair}'
            following = self.add_rule("more", f"{once} {tail}" if is_required else f"({once})? {tail}")
            first = f"{pair} {tail}" if is_required else self.add_rule("first", f"{pair} {tail} | {first}")
        return first

    def _map(self, value_schema: Any) -> str:
        if value_schema is False:
            return literal("{}")
        pair = self.add_rule("pair", f'string ws ":" ws {self._visit(value_schema)}')
        return self.add_rule("map", f'"{{" ws ({pair} (ws "," ws {pair})*)? ws "}}"')

    def _array(self, schema: Schema) -> str:
        prefix = schema.get("prefixItems", [])
        low, high = _bounds(schema, "minItems", "maxItems", _MAX_ITEMS)
        if prefix:
            if not isinstance(prefix, list) or low > len(prefix) or (high is not None and high < len(prefix)):
                raise refuse("prefixItems must be a list that fits minItems and maxItems")
            inner = ' ws "," ws '.join(self._visit(item) for item in prefix)
            return self.add_rule("tuple", f'"[" ws {inner} ws "]"')
        item = self._visit(schema.get("items", True))
        if high == 0:
            return literal("[]")
        more = repeat(f'(ws "," ws {item})', max(0, low - 1), None if high is None else high - 1)
        inner = f"{item} {more}" if low > 0 else f"({item} {more})?"
        return self.add_rule("array", f'"[" ws {inner} ws "]"')

    def _string(self, schema: Schema) -> str:
        if schema.get("format") in _FORMATS and not {"minLength", "maxLength"} & schema.keys():
            return self.add_rule("string", f'"\\"" {_FORMATS[schema["format"]]} "\\""')
        low, high = _bounds(schema, "minLength", "maxLength", MAX_REPEAT)
        if low == 0 and high is None:
            return "string"
        return self.add_rule("string", f'"\\"" {repeat("char", low, high)} "\\""')

    def _integer(self, schema: Schema) -> str:
        limits = {name: schema.get(name) for name in _BY_TYPE["integer"]}
        for name, value in limits.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value != int(value)):
                raise refuse(f"{name} of an integer must be a whole number")
        low = max((int(v) for v in (limits["minimum"], _plus(limits["exclusiveMinimum"], 1)) if v is not None), default=None)
        high = min((int(v) for v in (limits["maximum"], _plus(limits["exclusiveMaximum"], -1)) if v is not None), default=None)
        if low is not None and high is not None and low > high:
            raise refuse(f"no integer lies between {low} and {high}")
        if max(abs(low or 0), abs(high or 0)) >= 10**18:
            raise refuse("integer bounds must have at most 18 digits")
        return "integer" if low is None and high is None else self.add_rule("integer", integer_rule(low, high))

    def _number(self, schema: Schema) -> str:
        minimum = schema.get("minimum")
        if minimum is None:
            return "number"
        if minimum != 0:
            raise refuse("of the bounds of a number only 'minimum: 0' can be honoured")
        return "unsigned"

    def _enum(self, schema: Schema) -> str:
        values = schema["enum"]
        if not isinstance(values, list) or not values:
            raise refuse("enum must be a non-empty list")
        return self.add_rule("enum", " | ".join(literal(_dump(value)) for value in values))

    def _merge(self, schema: Schema) -> Schema:
        parts = schema["allOf"]
        self._check_keywords(schema, {"allOf", "type", "properties", "required", "additionalProperties"})
        if not isinstance(parts, list) or not parts:
            raise refuse("allOf must be a non-empty list")
        rest = {key: value for key, value in schema.items() if key != "allOf"}
        resolved = [self._target(p["$ref"]) if isinstance(p, dict) and "$ref" in p else p for p in parts]
        if len(resolved) == 1 and not rest.keys() - _ANNOTATIONS:
            return {"anyOf": resolved}
        merged: Schema = {"type": "object", "properties": {}, "required": []}
        for part in [*resolved, rest]:
            if not isinstance(part, dict) or part.get("type", "object") != "object":
                raise refuse("allOf can join objects only")
            self._check_keywords(part, {"type", "properties", "required", "additionalProperties"})
            merged["properties"] |= part.get("properties", {})
            merged["required"] += part.get("required", [])
        return merged

    def _reference(self, reference: Any) -> str:
        target = self._target(reference)
        key = (id(self._root), str(reference))
        if key not in self._references:
            self._references[key] = name = self.add_rule("ref", "")
            self._rules[name] = self._visit(target)
            if self._rules[name] == name:
                raise refuse(f"$ref {reference!r} refers to itself only")
        return self._references[key]

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise refuse(f"$ref {reference!r:.80} must point into the schema itself ('#/...')")
        target: Any = self._root
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                raise refuse(f"$ref {reference!r:.80} points to nothing")
            target = target[name]
        return target

    def _check_keywords(self, schema: Schema, allowed: set[str]) -> None:
        unknown = sorted(schema.keys() - allowed - _ANNOTATIONS)
        if unknown:
            kind = schema.get("type", "this place")
            raise refuse(f"keyword {unknown[0]!r:.60} cannot be honoured for {kind!r:.60}")


def schema_to_gbnf(schema: Any) -> str:
    """The grammar of one schema; raises `UsageError` that names what is wrong."""
    grammar = SchemaGrammar()
    try:
        return grammar.text(grammar.add_schema(schema))
    except RecursionError:
        raise refuse("it nests too deeply") from None


def any_object_gbnf() -> str:
    """The grammar of `response_format: json_object`."""
    return SchemaGrammar().text("object")


def _only(schema: Schema, kind: str) -> Schema:
    others = set().union(*(words for name, words in _BY_TYPE.items() if name != kind)) - _BY_TYPE.get(kind, set())
    return {key: value for key, value in schema.items() if key not in others} | {"type": kind}


def _guess_type(schema: Schema) -> str | None:
    for kind in ("object", "array", "string"):
        if _BY_TYPE[kind] & schema.keys():
            return kind
    return None


def _bounds(schema: Schema, low_name: str, high_name: str, largest: int) -> tuple[int, int | None]:
    low, high = schema.get(low_name, 0), schema.get(high_name)
    for name, value in ((low_name, low), (high_name, high)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise refuse(f"{name} must be a whole number of at least 0")
    if low > largest:
        raise refuse(f"{low_name} may be at most {largest}")
    if high is not None and high < low:
        raise refuse(f"{high_name} is smaller than {low_name}")
    return low, None if high is None else min(high, largest)


def _plus(value: Any, step: int) -> Any:
    return None if value is None else value + step


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
