"""Schemas and regular expressions become automata: what these accept fits, and what they cannot keep is refused."""

import json
import random
import re
import time

import jsonschema
import numpy as np
import pytest

from evaluated import tiny_tokenizer
from formats import check_text, formats
from sinkdlm.errors import SamplingError
from sinkdlm.text.regular import compile_bytes, read_regex
from sinkdlm.text.schema import DEPTH, constraint_of, pieces_of, token_automaton
from sites import bytes_lm

BYTES = [bytes([byte]) for byte in range(256)]


def automaton(kind, what):
    lm = bytes_lm()
    return constraint_of(lm.tokenizer, lm.config.vocab_size, **{kind: what}), pieces_of(lm.tokenizer, lm.config.vocab_size)


def walk(found, pieces, drawn):
    """A text of an automaton, drawn step by step; None if it did not end in time."""
    state, text = 0, b""
    by_class = {group: token for token, group in enumerate(found.classes) if pieces[token] is not None}
    for _ in range(300):
        ways = np.flatnonzero(found.table[state] >= 0)
        if found.accepting[state] and (not len(ways) or drawn.random() < 0.3):
            return text.decode()
        group = int(drawn.choice(ways))
        text, state = text + pieces[by_class[group]], found.table[state, group]
    return None


def accepts(found, pieces, text):
    state = 0
    tokens = {piece: token for token, piece in enumerate(pieces) if piece is not None}
    for byte in text.encode():
        state = found.table[state, found.classes[tokens[bytes([byte])]]]
        if state < 0:
            return False
    return bool(found.accepting[state])


def test_every_text_of_every_format_fits():
    drawn, seen = random.Random(0), 0
    for kind, what in formats():
        found, pieces = automaton(kind, what)
        for _ in range(6):
            text = walk(found, pieces, drawn)
            if text is not None:
                seen += 1
                check_text(kind, what, text)
    assert seen > 200
    assert len(formats()) == 42


@pytest.mark.parametrize("pattern", [r"(ab|c)*d?", r"[^a-c]{2}", r"\w+\s\D", r"x{0,3}é+?|ü", r"^a.c$|^b", r"[\d.,-]+"])
def test_a_regex_means_what_python_means(pattern):
    table, accepting = compile_bytes(read_regex(pattern))
    drawn, agreed = random.Random(1), set()
    for _ in range(2000):
        text = "".join(drawn.choice("abcdx1 .é") for _ in range(drawn.randrange(6)))
        state = 0
        for byte in text.encode():
            state = table[state, byte] if state >= 0 else -1
        expected = re.fullmatch(pattern, text, re.ASCII) is not None and (text.isascii() or r"\D" not in pattern)
        assert bool(state >= 0 and accepting[state]) == expected, text
        agreed.add(expected)
    assert agreed == {True, False}


def test_what_fits_a_schema_is_accepted():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]}
    found, pieces = automaton("schema", schema)
    for text in ('{"a": 1, "b": "x"}', '{"a":-12,"b":"ü\\n"}', ' {"b": ""}'):
        assert accepts(found, pieces, text)
    for text in ('{"b": "x", "a": 1}', '{"a": 1}', '{"b": "x",}', '{"b": "\n"}', '{"b": "x"} ', '{"a": 01, "b": ""}'):
        assert not accepts(found, pieces, text)
    deep = "[" * DEPTH + "]" * DEPTH
    found, pieces = automaton("schema", {"type": "array"})
    assert accepts(found, pieces, deep)
    assert not accepts(found, pieces, f"[{deep}]")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "number", "minimum": 1}, "minimum: not supported with number"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "$.a: uniqueItems: not supported"),
        ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "allOf: only of one schema"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may overlap; use anyOf"),
        ({"type": "string", "format": "iri"}, "allowed: date, time"),
        ({"type": "string", "pattern": "(?=a)"}, "write it without"),
        ({"type": "string", "pattern": "("}, "unterminated"),
        ({"$ref": "#/$defs/x"}, "nothing is there"),
        ({"$ref": "https://example.org/x"}, "only within the schema"),
        ({"type": "text"}, "allowed: object"),
        ({"not": {}}, "not supported without a type"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no number from 3 to 2"),
        ({"type": "string", "maxLength": 100_000}, "at most 256"),
        ({"$ref": "#"}, "no text fits it"),
        ([1], "is no schema"),
    ],
)
def test_what_cannot_be_kept_is_refused(schema, said):
    with pytest.raises(SamplingError, match=re.escape(said)):
        automaton("schema", schema)


@pytest.mark.parametrize("regex", [r"(a|b)*a(a|b){30}", "(((a{4000}){4000}){4000}){4000}", "((((){4000}){4000}){4000}){4000}"])
def test_a_huge_one_is_refused_soon(regex):
    began = time.monotonic()
    with pytest.raises(SamplingError, match="too large"):
        automaton("regex", regex)
    assert time.monotonic() - began < 30


def test_a_schema_that_refers_to_itself_a_lot_is_refused_soon():
    names = [f"n{i}" for i in range(30)]
    every = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    with pytest.raises(SamplingError, match="too large"):
        automaton("schema", {"$ref": "#/$defs/n0", "$defs": {name: {"type": "array", "items": every} for name in names}})


def test_tokens_are_read_as_their_bytes():
    """By-byte tokens, tokens of several letters, and special ones, which write nothing."""
    tokenizer = tiny_tokenizer()
    pieces = pieces_of(tokenizer, len(tokenizer) + 3)
    assert [pieces[token] for token in tokenizer.all_special_ids] == [None] * len(tokenizer.all_special_ids)
    assert pieces[-3:] == (None, None, None)
    assert b"".join(pieces[token] for token in tokenizer.encode("the cat.")) == b"the cat."
    lm = bytes_lm()
    whole = pieces_of(lm.tokenizer, lm.config.vocab_size)
    assert sorted(piece for piece in whole if piece is not None) == BYTES


def test_tokens_that_lead_alike_share_a_class():
    table, accepting = compile_bytes(read_regex("[a-c]{2}x?"))
    pieces = [b"a", b"b", b"ab", b"abx", b"x", b"zz", None, b"cc"]
    found = token_automaton(table, accepting, pieces)
    classes = found.classes.tolist()
    assert classes[0] == classes[1]
    assert classes[2] == classes[7]
    assert classes[5] == classes[6] == 0
    assert len(set(classes)) == 5
    for token, piece in enumerate(pieces):
        for state in range(len(table)):
            end = state
            for byte in piece or b"":
                end = table[end, byte] if end >= 0 else -1
            assert found.table[state, classes[token]] == (end if piece else -1)


def test_a_schema_is_json_of_one_form():
    schema = {"enum": [{"a": 1.5}], "title": "t"}
    found, pieces = automaton("schema", schema)
    assert accepts(found, pieces, json.dumps({"a": 1.5}))
    jsonschema.validate({"a": 1.5}, schema)
