"""Schemas and regular expressions of many kinds, for structured output."""

import json
import re

_TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
    "required": ["v", "kids"],
}
_POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x", "y"]}
_CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["kind", "lives"],
}
_DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "good": {"type": "boolean"}}, "required": ["kind"]}


def _object(required=None, **properties):
    return {"type": "object", "properties": properties, "required": [*properties] if required is None else required}


SCHEMAS = [
    {"type": "object"},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "string"},
    {"type": "array"},
    {"type": ["integer", "null"]},
    {"type": "integer", "minimum": -12, "maximum": 345},
    {"type": "integer", "exclusiveMinimum": 99},
    {"type": "integer", "maximum": -7},
    {"enum": ["red", "grün", 'a "quote"', None, 3]},
    {"const": {"a": [1, "ü"]}},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
    {"type": "string", "pattern": "b+"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "email"},
    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 3}], "items": False},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    _object(name={"type": "string"}, age={"type": "integer", "minimum": 0}),
    _object(["b"], a={"type": "integer"}, b={"type": "boolean"}, c={"type": "null"}),
    _object([], a={"type": "integer"}, b={"type": "boolean"}),
    _object(inner=_object(at=_POINT), tags={"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2}),
    _object(**{"größe": {"type": "number"}, 'a "b"': {"type": "boolean"}}),
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}]},
    {"oneOf": [_CAT, _DOG]},
    {"$ref": "#/$defs/tree", "$defs": {"tree": _TREE}},
]
REGEXES = [
    r"yes|no",
    r"[a-z]+( [a-z]+)*",
    r"\d{3}-\d{4}",
    r"(ab|cd){2,3}",
    r"[^x]{5}",
    r"-?(0|[1-9]\d*)(\.\d+)?",
    r"é+|ß",
    r"#[0-9a-f]{6}",
]


def formats():
    """(kind, what) of each: 42 in all."""
    return [*(("schema", schema) for schema in SCHEMAS), *(("regex", regex) for regex in REGEXES)]


def check_text(kind, what, text):
    """Raise where a text does not fit."""
    import jsonschema  # not where a benchmark measures time alone

    if kind == "schema":
        jsonschema.validate(json.loads(text), what, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    elif not re.fullmatch(what, text, re.ASCII):
        raise ValueError(f"{text!r} does not match {what}")
