"""Regular languages: build them, read them from regular expressions, compile them to a table over bytes.

A language is a node: bytes (that text), Chars, Seq, Either, Repeat or Listed. Knows no token, JSON or model.
"""

import re._constants as ops  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkdlm.errors import SamplingError

_LAST = 0x10FFFF
_MOST_NODES, _MOST_STATES = 1 << 16, 1 << 11  # of the net and of the table
_MOST_WORK = 1 << 19  # nodes laid out, and states of the net in those of the table: a client's schema must not cost minutes
_MOST_REPEATS = 4096
_SIZES = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, _LAST))  # one to four bytes, no surrogates
_CLASSES = {
    ops.CATEGORY_DIGIT: ((48, 57),),
    ops.CATEGORY_SPACE: ((9, 13), (32, 32)),
    ops.CATEGORY_WORD: ((48, 57), (65, 90), (95, 95), (97, 122)),
}
_NEGATED = {
    ops.CATEGORY_NOT_DIGIT: ops.CATEGORY_DIGIT,
    ops.CATEGORY_NOT_SPACE: ops.CATEGORY_SPACE,
    ops.CATEGORY_NOT_WORD: ops.CATEGORY_WORD,
}
_STARTS, _ENDS = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING), (ops.AT_END, ops.AT_END_STRING)

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Chars:
    """One character of these code points."""

    ranges: tuple[tuple[int, int], ...]

    def within(self, allowed: Ranges) -> "Chars":
        both = ((max(a, c), min(b, d)) for a, b in self.ranges for c, d in allowed)
        return Chars(tuple((low, high) for low, high in both if low <= high))

    def without(self) -> "Chars":
        """All other characters."""
        found, low = [], 0
        for first, last in sorted(self.ranges):
            found.append((low, first - 1))
            low = max(low, last + 1)
        return Chars(tuple((a, b) for a, b in (*found, (low, _LAST)) if a <= b))


@dataclass(frozen=True)
class Seq:
    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Either:
    parts: tuple["Node", ...]  # none: the empty language


@dataclass(frozen=True)
class Repeat:
    part: "Node"
    least: int = 0
    most: int | None = None


@dataclass(frozen=True)
class Listed:
    """One or more, with something between two of them. Its part is laid out once."""

    part: "Node"
    between: "Node"


Node = bytes | Chars | Seq | Either | Repeat | Listed
ANY = Chars(((0, _LAST),))
OPTIONAL_BLANK = Repeat(b" ", 0, 1)


def spans(low: bytes, high: bytes, least: int, most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Cut all texts between two of the same length, in digits from least to most, into sequences of ranges of digits."""
    if len(low) == 1:
        yield ((low[0], high[0]),)
        return
    n = len(low) - 1
    first, last = low[0], high[0]
    if first == last:
        yield from (((first, first), *rest) for rest in spans(low[1:], high[1:], least, most))
        return
    if low[1:] != bytes([least]) * n:
        yield from (((first, first), *rest) for rest in spans(low[1:], bytes([most]) * n, least, most))
        first += 1
    if high[1:] != bytes([most]) * n:
        yield from (((last, last), *rest) for rest in spans(bytes([least]) * n, high[1:], least, most))
        last -= 1
    if first <= last:
        yield ((first, last), *[(least, most)] * n)


def _utf8(ranges: Ranges) -> Iterator[tuple[tuple[int, int], ...]]:
    for low, high in ranges:
        for least, most in _SIZES:
            a, b = max(low, least), min(high, most)
            if a <= b:
                yield from spans(chr(a).encode(), chr(b).encode(), 0x80, 0xBF)


class _Net:
    """A nondeterministic automaton. No node that is put ever leads back to the state where it begins."""

    def __init__(self) -> None:
        self.edges: list[list[tuple[int, int, int]]] = []  # (first byte, last byte, target)
        self.free: list[list[int]] = []  # targets without a byte
        self.work = 0

    def spend(self, work: int) -> None:
        self.work += work
        if self.work > _MOST_WORK:
            raise SamplingError(_too_large("it takes too long to compile"))

    def state(self) -> int:
        if len(self.edges) >= _MOST_NODES:
            raise SamplingError(_too_large(f"more than {_MOST_NODES:,} parts"))
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def put(self, node: Node, start: int) -> int:
        """Lay out a node from a state; return the state where it ends."""
        self.spend(1)
        if isinstance(node, bytes):
            for byte in node:
                start = self._edge(start, (byte, byte), self.state())
            return start
        if isinstance(node, Seq):
            for part in node.parts:
                start = self.put(part, start)
            return start
        if isinstance(node, Repeat):
            return self._repeat(node, start)
        if isinstance(node, Listed):
            begin, out = self.state(), self.state()
            self.free[start].append(begin)
            end = self.put(node.part, begin)
            self.free[self.put(node.between, end)].append(begin)
            self.free[end].append(out)
            return out
        out = self.state()
        if isinstance(node, Either):
            for part in node.parts:
                self.free[self.put(part, start)].append(out)
            return out
        for steps in _utf8(node.ranges):
            at = start
            for number, step in enumerate(steps, start=1):
                at = self._edge(at, step, out if number == len(steps) else self.state())
        return out

    def _repeat(self, node: Repeat, start: int) -> int:
        for _ in range(node.least):
            start = self.put(node.part, start)
        out = self.state()
        if node.most is None:
            self.free[start].append(out)
            self.free[self.put(node.part, out)].append(out)
            end = self.state()  # so that what follows does not begin where the loop does
            self.free[out].append(end)
            return end
        for _ in range(node.most - node.least):
            self.free[start].append(out)
            start = self.put(node.part, start)
        self.free[start].append(out)
        return out

    def _edge(self, start: int, step: tuple[int, int], target: int) -> int:
        self.edges[start].append((*step, target))
        return target

    def closure(self, states: Sequence[int]) -> frozenset[int]:
        found, waiting = set(states), list(states)
        while waiting:
            for target in self.free[waiting.pop()]:
                if target not in found:
                    found.add(target)
                    waiting.append(target)
        return frozenset(found)


def compile_bytes(node: Node) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest automaton: the next state (S, 256), -1 where no text goes on, and which states accept (S,).

    It begins in state 0. An empty language has no state."""
    net = _Net()
    start = net.state()
    end = net.put(node, start)
    cuts = sorted({0, *(cut for edges in net.edges for low, high, _ in edges for cut in (low, high + 1) if cut < 256)})
    number = {cut: index for index, cut in enumerate([*cuts, 256])}  # bytes between two cuts are alike
    numbers = {net.closure([start]): 0}
    rows, waiting = [], [*numbers]
    for states in waiting:  # which grows
        net.spend(len(states))
        targets: list[set[int]] = [set() for _ in cuts]
        for state in states:
            for low, high, target in net.edges[state]:
                for column in range(number[low], number[high + 1]):
                    targets[column].add(target)
        row = []
        for reached in targets:
            closed = net.closure([*reached])
            if reached and closed not in numbers:
                if len(numbers) >= _MOST_STATES:
                    raise SamplingError(_too_large(f"more than {_MOST_STATES:,} states"))
                numbers[closed] = len(numbers)
                waiting.append(closed)
            row.append(numbers[closed] if reached else -1)
        rows.append(row)
    accepting = np.array([end in states for states in waiting])
    table, accepting = _merge_equal(np.array(rows), accepting)
    widths = np.diff([*cuts, 256])
    return table.repeat(widths, axis=1), accepting


def _merge_equal(table: np.ndarray, accepting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge states that accept the same rests; those that accept none become -1."""
    table = np.vstack([table, np.full_like(table[:1], -1)])  # the last state accepts nothing; index -1 finds it
    labels = np.append(accepting, False).astype(np.int64)
    count = 0
    while len(np.unique(labels)) > count:
        count = len(np.unique(labels))
        labels = np.unique(np.column_stack([labels, labels[table]]), axis=0, return_inverse=True)[1].ravel()
    kept = [label for label in dict.fromkeys(labels.tolist()) if label != labels[-1]]  # in order: 0 stays the start
    if not kept or kept[0] != labels[0]:
        return table[:0], accepting[:0]
    new = np.full(labels.max() + 1, -1)
    new[kept] = np.arange(len(kept))
    firsts = [int(np.flatnonzero(labels == label)[0]) for label in kept]
    return new[labels[table]][firsts], accepting[firsts]


def _too_large(what: str) -> str:
    return f"the schema or regex is too large: {what}; shorten its bounds, or ask for less at a time"


def read_regex(pattern: str, *, search: bool = False) -> Node:
    """Read a regular expression in Python's syntax, for whole texts. No lookaround, backreference or flag.

    \\d, \\w and \\s, and what is not one of them, are of ASCII. search: the text may go on before and after, as in JSON Schema."""
    try:
        parsed = parser.parse(pattern)
    except (re_error, OverflowError, RecursionError) as failure:
        raise SamplingError(f"regex {_short(pattern)}: {failure}") from None
    if parsed.state.flags & ~32:  # 32: a text's own flag, re.UNICODE
        raise SamplingError(f"regex {_short(pattern)}: has flags; write what they mean into the expression")
    around: Node = Repeat(ANY) if search else b""
    return _Reading(pattern).whole(list(parsed), around, around)


re_error = parser.error if hasattr(parser, "error") else ValueError


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 60 else pattern[:60] + "...")


class _Reading:
    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def whole(self, items: list[Any], before: Node, after: Node) -> Node:
        """A whole expression. before, after: what may stand around it where no anchor does."""
        while items and items[0][0] is ops.AT and items[0][1] in _STARTS:
            items, before = items[1:], b""
        while items and items[-1][0] is ops.AT and items[-1][1] in _ENDS:
            items, after = items[:-1], b""
        for index in {0, len(items) - 1} if items else ():
            op, given = items[index]
            if op in (ops.BRANCH, ops.SUBPATTERN) and "AT_" in str(given):  # anchors in it are the whole expression's
                branches = given[1] if op is ops.BRANCH else [given[3]]
                return Either(tuple(self.whole([*items[:index], *some, *items[index + 1 :]], before, after) for some in branches))
        return Seq((before, self.sequence(items), after))

    def sequence(self, items: Any) -> Node:
        return Seq(tuple(self.item(op, given) for op, given in items))

    def item(self, op: Any, given: Any) -> Node:
        if op is ops.LITERAL:
            return Chars(((given, given),))
        if op is ops.NOT_LITERAL:
            return Chars(((given, given),)).without()
        if op is ops.ANY:
            return Chars(((10, 10),)).without()
        if op is ops.IN:
            return self._class(given)
        if op is ops.BRANCH:
            return Either(tuple(self.sequence(branch) for branch in given[1]))
        if op is ops.SUBPATTERN and not given[1] and not given[2]:
            return self.sequence(given[3])
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, part = given
            if max(least, 0 if most is ops.MAXREPEAT else most) > _MOST_REPEATS:
                raise SamplingError(f"regex {_short(self.pattern)}: repeats more than {_MOST_REPEATS} times; give a lower bound")
            return Repeat(self.sequence(part), int(least), None if most is ops.MAXREPEAT else int(most))
        what = "^ or $ inside" if op is ops.AT else f"{str(op).lower().replace('_', ' ')}, which no automaton has"
        raise SamplingError(f"regex {_short(self.pattern)}: has {what}; write it without")

    def _class(self, given: Any) -> Chars:
        ranges: list[tuple[int, int]] = []
        for op, value in given:
            if op is ops.LITERAL:
                ranges.append((value, value))
            elif op is ops.RANGE:
                ranges.append(value)
            elif op is ops.CATEGORY and value in _CLASSES:
                ranges += _CLASSES[value]
            elif op is ops.CATEGORY:
                ranges += Chars(_CLASSES[_NEGATED[value]]).without().within(((0, 127),)).ranges
        found = Chars(tuple(ranges))
        return found.without() if given[0][0] is ops.NEGATE else found
