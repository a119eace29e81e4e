"""Text that fits a JSON schema or a regular expression: the language, and the automaton over a tokenizer's tokens.

A schema gives compact JSON in the order of its properties, with at most one blank after a comma or colon. A keyword that cannot be
kept is refused, never ignored. Takes a tokenizer by its methods; knows no model.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sinkdlm.errors import SamplingError, check_regular, first_line
from sinkdlm.sampling.constraint import Automaton
from sinkdlm.text.prompts import piece_of
from sinkdlm.text.regular import OPTIONAL_BLANK, Chars, Either, Listed, Node, Repeat, Seq, compile_bytes, read_regex, spans

DEPTH = 3  # levels of objects and lists where a schema leaves a value open: {"a": [{}]} has three
_RECURSION = 3  # times that definitions may stand inside themselves
_MOST_PARTS = 1 << 14  # of a schema, with what it refers to
_MOST_STEPS = 1 << 27  # states times tokens
_CHUNK = 1 << 22  # of them at once
_MOST_LIST = 256  # bounds of lists and strings
_ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly"}
_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": set(),
    "boolean": set(),
    "null": set(),
}
_KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_PLAIN = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))  # characters of a JSON string that need no escape
_ESCAPED = {'"': b'\\"', "\\": b"\\\\", "\n": b"\\n", "\t": b"\\t", "\r": b"\\r", "\b": b"\\b", "\f": b"\\f"}
_CHARACTER = Either((Chars(_PLAIN), Seq((b"\\", Chars(tuple((ord(c), ord(c)) for c in '"\\/bfnrt'))))))
_DIGIT, _SIGN = Chars(((48, 57),)), Repeat(b"-", 0, 1)
_WHOLE = Either((b"0", Seq((Chars(((49, 57),)), Repeat(_DIGIT)))))
_EXPONENT = Seq((Chars(((69, 69), (101, 101))), Repeat(Chars(((43, 43), (45, 45))), 0, 1), Repeat(_DIGIT, 1, 2)))
_NUMBER = Seq((_SIGN, _WHOLE, Repeat(Seq((b".", Repeat(_DIGIT, 1))), 0, 1), Repeat(_EXPONENT, 0, 1)))
_STRING = Seq((b'"', Repeat(_CHARACTER), b'"'))
_COMMA, _COLON = Seq((b",", OPTIONAL_BLANK)), Seq((b":", OPTIONAL_BLANK))
_DATE = (
    r"(1[0-9]|20)[0-9]{2}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[a-z0-9]+([._+-][a-z0-9]+)*@[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9]+(-[a-z0-9]+)*)+",
}


def _anything(depth: int) -> Node:
    scalars = (_STRING, _NUMBER, b"true", b"false", b"null")
    if not depth:
        return Either(scalars)
    return Either((*scalars, _object_of(_anything(depth - 1)), _list_of(_anything(depth - 1))))


def _listed(part: Node) -> Node:
    return Repeat(Listed(part, _COMMA), 0, 1)


def _object_of(value: Node) -> Node:
    return Seq((b"{", _listed(Seq((_STRING, _COLON, value))), b"}"))


def _list_of(value: Node) -> Node:
    return Seq((b"[", _listed(value), b"]"))


class _Schema:
    """Reads a schema. place: where in it a keyword stands, for errors."""

    def __init__(self, root: Any) -> None:
        self.root, self.n_parts = root, 0

    def value(self, schema: Any, place: str, inside: tuple[str, ...] = (), depth: int = 0) -> Node:
        self.n_parts += 1
        if self.n_parts > _MOST_PARTS:
            raise self._error(place, "too large: it has too many parts; ask for less at a time")
        if schema is True or schema == {}:
            return _anything(max(0, DEPTH - depth))
        if not isinstance(schema, Mapping):
            raise self._error(place, f"{str(schema)[:40]!r} is no schema; give an object")
        if "$ref" in schema:
            return self._reference(schema, place, inside, depth)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                return self._combined(word, schema, place, inside, depth)
        if "enum" in schema or "const" in schema:
            return self._fixed(schema, place)
        kinds = schema.get("type")
        if kinds is None:
            kinds = [kind for kind, words in _KEYWORDS.items() if words & schema.keys()]
            if len(kinds) != 1:
                rest = schema.keys() - _ANNOTATIONS
                if not rest:
                    return _anything(max(0, DEPTH - depth))
                raise self._error(place, f"{', '.join(sorted(rest))}: not supported without a type; add one")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) and kind in _KEYWORDS for kind in kinds):
            raise self._error(place, f"type = {str(kinds)[:60]}: allowed: {', '.join(_KEYWORDS)}")
        self._check(schema, place, {"type"}.union(*(_KEYWORDS[kind] for kind in kinds)), kinds[0])
        return Either(tuple(self._kind(kind, schema, place, inside, depth) for kind in kinds))

    def _error(self, place: str, what: str) -> SamplingError:
        return SamplingError(f"schema: {place}: {what}")

    def _check(self, schema: Mapping[str, Any], place: str, known: set[str], what: str) -> None:
        if unknown := sorted(str(word)[:40] for word in schema.keys() - known - _ANNOTATIONS - {"$defs", "definitions"}):
            allowed = ", ".join(sorted(known - {"type"})) or "no keyword"
            raise self._error(place, f"{unknown[0]}: not supported with {what}; allowed: {allowed}")

    def _reference(self, schema: Mapping[str, Any], place: str, inside: tuple[str, ...], depth: int) -> Node:
        self._check(schema, place, {"$ref"}, "$ref")
        name = schema["$ref"]
        if len(inside) - len({*inside}) >= _RECURSION:
            return Either(())
        return self.value(self._resolve(schema, place), place, (*inside, name), depth)

    def _resolve(self, schema: Any, place: str) -> Any:
        """Follow one $ref."""
        name, found = schema["$ref"], self.root
        if not isinstance(name, str) or not name.startswith("#"):
            raise self._error(place, f"$ref = {str(name)[:60]!r}: only within the schema, as in #/$defs/name")
        for part in name.lstrip("#/").split("/") if name != "#" else []:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or part not in found:
                raise self._error(place, f"$ref = {name[:60]!r}: nothing is there")
            found = found[part]
        return found

    def _combined(self, word: str, schema: Mapping[str, Any], place: str, inside: tuple[str, ...], depth: int) -> Node:
        self._check(schema, place, {word, "discriminator"}, word)
        options = schema[word]
        if not isinstance(options, list) or not options:
            raise self._error(place, f"{word}: expected a list of schemas")
        if word == "allOf" and len(options) > 1:
            raise self._error(place, "allOf: only of one schema; write them as one")
        if word == "oneOf" and not all(self._apart(a, b, place) for i, a in enumerate(options) for b in options[:i]):
            raise self._error(place, "oneOf: its schemas may overlap; use anyOf, or a required property with its own const in each")
        return Either(tuple(self.value(option, f"{place}.{word}[{i}]", inside, depth) for i, option in enumerate(options)))

    def _apart(self, one: Any, other: Any, place: str) -> bool:
        """Whether no value fits both, by their types or by the constants of a required property."""
        while isinstance(one, Mapping) and "$ref" in one:
            one = self._resolve(one, place)
        while isinstance(other, Mapping) and "$ref" in other:
            other = self._resolve(other, place)
        if not isinstance(one, Mapping) or not isinstance(other, Mapping):
            return False
        values = [schema.get("enum", [schema["const"]] if "const" in schema else None) for schema in (one, other)]
        if None not in values:
            return not any(a == b for a in values[0] for b in values[1])
        kinds = [
            {schema["type"]} if isinstance(schema.get("type"), str) else set(schema.get("type", _KINDS)) for schema in (one, other)
        ]
        kinds = [kind | ({"integer"} if "number" in kind else set()) for kind in kinds]
        if not kinds[0] & kinds[1]:
            return True
        names = set(one.get("required", ())) & set(other.get("required", ()))
        return kinds[0] & kinds[1] == {"object"} and any(
            {"const", "enum"} & one.get("properties", {}).get(name, {}).keys()
            and {"const", "enum"} & other.get("properties", {}).get(name, {}).keys()
            and self._apart(one["properties"][name], other["properties"][name], place)
            for name in names
        )

    def _fixed(self, schema: Mapping[str, Any], place: str) -> Node:
        self._check(schema, place, {"const", "enum", "type"}, "enum")
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list) or not values:
            raise self._error(place, "enum: expected a list of values")
        if "const" in schema:
            values = [value for value in values if value == schema["const"]]
        kinds = schema.get("type", [*_KINDS])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        fit = [value for value in values if any(_is(value, kind) for kind in kinds)]
        if not fit:
            raise self._error(place, "enum: none of its values has the type")
        try:
            compact = [json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() for value in fit]
            return Either(tuple(dict.fromkeys([*compact, *(json.dumps(value, ensure_ascii=False).encode() for value in fit)])))
        except (UnicodeEncodeError, ValueError, TypeError):
            raise self._error(place, "enum: holds a value that is no JSON, or a lone surrogate") from None

    def _kind(self, kind: str, schema: Mapping[str, Any], place: str, inside: tuple[str, ...], depth: int) -> Node:
        if kind == "object":
            return self._object(schema, place, inside, depth)
        if kind == "array":
            return self._array(schema, place, inside, depth)
        if kind == "string":
            return self._string(schema, place)
        if kind == "integer":
            return self._integer(schema, place)
        plain: dict[str, Node] = {"number": _NUMBER, "boolean": Either((b"true", b"false")), "null": b"null"}
        return plain[kind]

    def _object(self, schema: Mapping[str, Any], place: str, inside: tuple[str, ...], depth: int) -> Node:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise self._error(place, "properties, required: expected an object and a list of names")
        extra = schema.get("additionalProperties", True)
        rest = [name for name in required if name not in properties]
        if rest and extra is False:
            raise self._error(place, f"required: {rest[0]!r} is no property, and no other is allowed")
        if not properties and not rest:
            if extra is False:
                return b"{}"
            return _object_of(self.value(extra, f"{place}.additionalProperties", inside, depth + 1)) if depth < DEPTH else b"{}"
        pairs = {**properties, **dict.fromkeys(rest, extra)}
        members = []
        for name, given in pairs.items():
            value = self.value(given, f"{place}.{name}", inside, depth + 1)
            try:
                key = json.dumps(name, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise self._error(place, f"property {name!r}: holds a lone surrogate") from None
            members.append((Seq((key, _COLON, value)), name in required))
        return Seq((b"{", _members(members), b"}"))

    def _array(self, schema: Mapping[str, Any], place: str, inside: tuple[str, ...], depth: int) -> Node:
        least, most = self._bounds(schema, "minItems", "maxItems", place)
        given, items = schema.get("prefixItems"), schema.get("items", True)
        if given is not None:
            if least > len(given) or (most is not None and most < len(given)):
                raise self._error(place, f"prefixItems: {len(given)} are written, no more and no less, and the bounds forbid it")
            parts = [self.value(part, f"{place}.prefixItems[{i}]", inside, depth + 1) for i, part in enumerate(given)]
            between = [piece for part in parts for piece in (_COMMA, part)][1:]
            return Seq((b"[", *between, b"]"))
        if most == 0 or items is False or (items in (True, {}) and depth >= DEPTH):
            if least:
                raise self._error(place, f"minItems = {least}: deeper than {DEPTH} levels, or more than are allowed")
            return b"[]"
        value = self.value(items, f"{place}.items", inside, depth + 1)
        if most is None and least <= 1:
            return _list_of(value) if not least else Seq((b"[", Listed(value, _COMMA), b"]"))
        more = Repeat(Seq((_COMMA, value)), max(0, least - 1), None if most is None else most - 1)
        some = Seq((value, more))
        return Seq((b"[", some if least else Repeat(some, 0, 1), b"]"))

    def _string(self, schema: Mapping[str, Any], place: str) -> Node:
        least, most = self._bounds(schema, "minLength", "maxLength", place)
        bounded = {"minLength", "maxLength"} & schema.keys()
        if len([word for word in ("pattern", "format") if word in schema]) + bool(bounded) > 1:
            raise self._error(place, "pattern, format and lengths: give one of them")
        if "pattern" in schema:
            return Seq((b'"', _quoted(read_regex(str(schema["pattern"]), search=True)), b'"'))
        if "format" in schema:
            if schema["format"] not in _FORMATS:
                raise self._error(
                    place, f"format = {str(schema['format'])[:40]!r}: allowed: {', '.join(_FORMATS)}; or give a pattern"
                )
            return Seq((b'"', read_regex(_FORMATS[schema["format"]]), b'"'))
        return Seq((b'"', Repeat(_CHARACTER, least, most), b'"')) if bounded else _STRING

    def _bounds(self, schema: Mapping[str, Any], lowest: str, highest: str, place: str) -> tuple[int, int | None]:
        least, most = schema.get(lowest, 0), schema.get(highest)
        for name, value in ((lowest, least), (highest, most)):
            if value is not None and (type(value) is not int or not 0 <= value <= _MOST_LIST):
                raise self._error(place, f"{name} = {str(value)[:40]}: expected a whole number, at most {_MOST_LIST}")
        if most is not None and most < least:
            raise self._error(place, f"{lowest} = {least} and {highest} = {most}: nothing fits both")
        return least, most

    def _integer(self, schema: Mapping[str, Any], place: str) -> Node:
        ends: list[int | None] = []
        for name, exclusive, step in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
            values = [(schema[word], off) for word, off in ((name, 0), (exclusive, step)) if word in schema]
            for value, _ in values:
                if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or abs(value) > 10**18:
                    raise self._error(place, f"{name} = {str(value)[:40]}: expected a whole number")
            found = [int(value) + off for value, off in values]
            ends.append((max(found) if step == 1 else min(found)) if found else None)
        low, high = ends
        if low is None and high is None:
            return Seq((_SIGN, _WHOLE))
        if low is not None and high is not None and low > high:
            raise self._error(place, f"minimum, maximum: no number from {low} to {high}")
        parts: list[Node] = []
        if high is None or high >= 0:
            parts.append(_from_to(max(0, low or 0), high))
        if low is None or low < 0:
            parts.append(Seq((b"-", _from_to(max(1, -(high if high is not None else -1)), None if low is None else -low))))
        return Either(tuple(parts))


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return isinstance(value, _KINDS.get(kind, ())) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _from_to(low: int, high: int | None) -> Node:
    """Whole numbers, 0 <= low <= high, without zeros in front."""
    found: list[Node] = []
    longest = len(str(high)) if high is not None else len(str(low))
    for size in range(len(str(low)), longest + 1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        last = 10**size - 1 if high is None else min(high, 10**size - 1)
        steps = spans(str(first).encode(), str(last).encode(), 48, 57)
        found += [Seq(tuple(Chars((step,)) for step in digits)) for digits in steps]
    if high is None:
        found.append(Seq((Chars(((49, 57),)), Repeat(_DIGIT, longest))))
    return Either(tuple(found))


def _members(members: Sequence[tuple[Node, bool]]) -> Node:
    """Members of an object in their order, those not required left out or not, with commas between."""
    optional = [Repeat(Seq((_COMMA, member)), 0 if left_out else 1, 1) for member, needed in members for left_out in (not needed,)]
    first = next((index for index, (_, needed) in enumerate(members) if needed), None)
    if first is not None:
        before = [Repeat(Seq((member, _COMMA)), 0, 1) for member, _ in members[:first]]
        return Seq((*before, members[first][0], *optional[first + 1 :]))
    starts = [Seq((member, *optional[index + 1 :])) for index, (member, _) in enumerate(members)]
    return Either((b"", *starts))


def _quoted(node: Node) -> Node:
    """The language's texts as they stand in a JSON string."""
    if isinstance(node, Chars):
        escaped = [_ESCAPED[char] for char in _ESCAPED if node.within(((ord(char), ord(char)),)).ranges]
        return Either((node.within(_PLAIN), *escaped))
    if isinstance(node, bytes):
        return node
    if isinstance(node, Repeat):
        return Repeat(_quoted(node.part), node.least, node.most)
    if isinstance(node, Listed):
        return Listed(_quoted(node.part), _quoted(node.between))
    return type(node)(tuple(_quoted(part) for part in node.parts))


@functools.lru_cache(maxsize=4)
def pieces_of(tokenizer: Any, vocab_size: int) -> tuple[bytes | None, ...]:
    """The bytes of each token within a text; None for special ids and those without a token."""
    backend, names = getattr(tokenizer, "backend_tokenizer", None), tokenizer.get_vocab()
    special, added = set(tokenizer.all_special_ids), set(getattr(tokenizer, "added_tokens_decoder", ()))
    kind = repr(getattr(backend, "decoder", ""))
    found: list[bytes | None] = [None] * vocab_size
    letters = _byte_letters() if "ByteLevel" in kind else {}
    rest = []
    for name, token in names.items():
        if token >= vocab_size or token in special:
            continue
        if letters and token not in added and all(char in letters for char in name):
            found[token] = bytes(letters[char] for char in name)
        elif "ByteFallback" in kind and len(name) == 6 and name.startswith("<0x"):
            found[token] = bytes([int(name[3:5], 16)])
        else:
            rest.append(token)
    for token in rest:
        piece = piece_of(tokenizer, token)
        found[token] = None if "\ufffd" in piece else piece.encode("utf-8", "replace") or None
    return tuple(found)


def _byte_letters() -> dict[str, int]:
    """The letter that byte-level tokenizers have for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


def token_automaton(table: np.ndarray, accepting: np.ndarray, pieces: Sequence[bytes | None]) -> Automaton:
    """Run every token through an automaton over bytes. Tokens that lead alike from all states share a class; 0 leads nowhere."""
    n_states, sizes = len(table), np.array([len(piece or b"") for piece in pieces])
    if n_states * len(pieces) > _MOST_STEPS:
        raise SamplingError(f"the schema or regex is too large: {n_states} states for {len(pieces)} tokens; ask for less at a time")
    after = np.vstack([table, np.full((1, 256), -1)]).astype(np.int16)
    factors = np.random.default_rng(0).integers(1, 2**63, n_states, dtype=np.uint64)  # columns are told apart by 64-bit hashes
    classes, columns = np.zeros(len(pieces), dtype=np.int64), [np.full(n_states, -1)]
    known: dict[int, int] = {}
    ids = np.argsort(sizes, kind="stable")[np.count_nonzero(sizes == 0) :]
    for some in np.array_split(ids, max(1, n_states * len(ids) // _CHUNK)):
        letters = np.array([np.frombuffer((pieces[i] or b"").ljust(sizes[some[-1]], b"\0"), np.uint8) for i in some])
        state = np.repeat(np.arange(n_states, dtype=np.int16)[None], len(some), 0)  # (tokens, S)
        for place in range(letters.shape[1]):
            begin = int(np.searchsorted(sizes[some], place, side="right"))
            state[begin:] = after[state[begin:], letters[begin:, place, None]]
        keys = np.where((state >= 0).any(1), (state.astype(np.uint64) * factors).sum(1), 0)
        for key, first in zip(*np.unique(keys, return_index=True), strict=True):
            if key and int(key) not in known:
                known[int(key)] = len(columns)
                columns.append(state[first].astype(np.int64))
        classes[some] = [known.get(key, 0) for key in keys.tolist()]
    return Automaton(np.array(columns).T, classes, accepting)


@functools.lru_cache(maxsize=64)
def _automaton(tokenizer: Any, vocab_size: int, kind: str, text: str) -> Automaton:
    node = read_regex(text) if kind == "regex" else Seq((OPTIONAL_BLANK, _read_schema(json.loads(text))))
    table, accepting = compile_bytes(node)
    if not len(table):
        raise SamplingError(f"{kind}: no text fits it")
    return token_automaton(table, accepting, pieces_of(tokenizer, vocab_size))


def _read_schema(schema: Any) -> Node:
    try:
        return _Schema(schema).value(schema, "$")
    except RecursionError:
        raise SamplingError("schema: nests too deeply; give a flatter one") from None


def read_schema(path: Path) -> Any:
    """Read a schema from a file."""
    check_regular(path, SamplingError)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as failure:
        raise SamplingError(f"{path}: no JSON schema: {getattr(failure, 'strerror', None) or first_line(failure)}") from None


def constraint_of(tokenizer: Any, vocab_size: int, *, schema: Any = None, regex: str | None = None) -> Automaton | None:
    """The automaton of texts that fit a JSON schema (a dictionary), or a regular expression; None without either.

    {"type": "object"} is any JSON object of at most DEPTH levels."""
    if schema is None and regex is None:
        return None
    if schema is not None and regex is not None:
        raise SamplingError("schema and regex: give one of them")
    if regex is not None:
        return _automaton(tokenizer, vocab_size, "regex", regex)
    return _automaton(tokenizer, vocab_size, "schema", json.dumps(schema))
