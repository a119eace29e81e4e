"""Write only what a language has, in any order of positions.

A token may be committed only if some completion of the canvas is still a text of the language. Which positions are committed is
judged on the model's own predictions; a constraint decides only their tokens, all of a step together. At temperature 0 it takes the
likeliest ones (Viterbi); above, it draws from the model's probabilities conditioned on the rest being possible: it sums what may
follow from right to left, and draws from left to right with the noise of each (position, token).

`Gap.log_weight` adds up log(p / q) over the steps: p is the probability of a step's tokens under the model, q under this rule.
Unless a cut intervenes (MOST_SETS), log(p / q) is the log of the mass of all tokens that fit. So the rule's law times the weight is
the model's, conditioned on the language. At temperature 0 it adds what the tokens lack to the likeliest ones, in nats.

Automata are numpy on the host; constrained_drawing.py reads logits.

C classes of tokens, S states, N cells, V vocabulary.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkdlm.errors import SamplingError

OPEN = -1  # the symbol of a position whose token is not decided
MOST_SETS = 256  # ways to go on that are kept apart; if there are more, tokens to the left count only whether one exists
_MEMO = 1 << 23  # bytes of what a language remembers
_ENTRY = 256  # bytes of one thing that it remembers, without what it holds

States = bytes  # a set: a byte for each state, 1 where it is in


@dataclass(frozen=True, eq=False)
class Automaton:
    """Texts over tokens. It begins in state 0."""

    table: np.ndarray  # (S, C): the next state, -1 for none
    classes: np.ndarray  # (V,): the class of each token
    accepting: np.ndarray  # (S,)


class Language:
    """What a request may write: a text of the automaton, EOS, and anything after it. Without an EOS, a text that fills the gap."""

    def __init__(self, automaton: Automaton, eos_id: int | None, forbidden: Sequence[int]) -> None:
        n_states, n_classes = automaton.table.shape
        self.classes = automaton.classes.copy()
        given = [token for token in forbidden if token < len(self.classes)]
        if eos_id is not None:
            self.classes[eos_id] = n_classes
        self.classes[given] = n_classes + 1
        self.n_classes, self.end = n_classes + 2, n_states
        table = np.full((n_states + 1, self.n_classes), -1)
        table[:-1, :n_classes] = automaton.table
        goal = np.append(automaton.accepting, False)
        if eos_id is not None:
            table[:-1, n_classes][automaton.accepting] = self.end
            table[-1, :-1] = self.end
            goal = np.append(np.zeros(n_states, dtype=bool), True)
        used = np.bincount(self.classes, minlength=self.n_classes) > 0
        used[-1] = False
        self.table = np.where(used, table, -1)
        self.near = np.zeros((n_states + 1, n_states + 2), dtype=bool)  # from a state to the next by any token
        self.near[np.arange(n_states + 1)[:, None], self.table] = True
        self.near = self.near[:, :-1]
        self.start, self.goal = b"\1" + bytes(n_states), _pack(goal)
        self._memo: dict[Any, Any] = {}
        self._held = 0

    def _remember(self, key: Any, value: Any, size: int) -> Any:
        self._held += size + 4 * len(self.start) + _ENTRY
        if self._held > _MEMO:
            self._memo.clear()
            self._held = 0
        self._memo[key] = value
        return value

    def after(self, states: States, symbol: int) -> States:
        """Where a token of this class leads from these states."""
        key = (0, states, symbol)
        if (found := self._memo.get(key)) is not None:
            return found
        inside = np.flatnonzero(_flags(states))
        reached = np.zeros(len(states) + 1, dtype=bool)
        if symbol == OPEN:
            reached[:-1] = self.near[inside].any(0)
        else:
            reached[self.table[inside, symbol]] = True
        return self._remember(key, _pack(reached[:-1]), 0)

    def before(self, states: States, symbol: int) -> States:
        """From where a token of this class leads into these states."""
        key = (1, states, symbol)
        if (found := self._memo.get(key)) is not None:
            return found
        if symbol == OPEN:
            return self._remember(key, _pack(np.asarray(self.near[:, _flags(states)].any(1))), 0)
        return self._remember(key, _pack(_flags(states + b"\0")[self.table[:, symbol]]), 0)

    def fitting(self, states: States, goal: States) -> np.ndarray:
        """(C,): whether a token of each class leads from one of these states into one of the goal."""
        key = (2, states, goal)
        if (found := self._memo.get(key)) is not None:
            return found
        found = _flags(goal + b"\0")[self.table[np.flatnonzero(_flags(states))]].any(0)
        return self._remember(key, found, found.nbytes)

    def origins(self, goal: States) -> tuple[list[States], np.ndarray]:
        """The sets of states from which a class leads into the goal, and which of them is each class's, (C,)."""
        key = (3, goal)
        if (found := self._memo.get(key)) is not None:
            return found
        columns = np.ascontiguousarray(_flags(goal + b"\0")[self.table].T)
        _, firsts, groups = np.unique(
            columns.view(np.dtype((np.void, columns.shape[1]))).ravel(), return_index=True, return_inverse=True
        )
        return self._remember(key, ([_pack(columns[first]) for first in firsts], groups.ravel()), len(firsts) * columns.shape[1])

    def least(self) -> int | None:
        """The fewest tokens of a text, EOS included; None if there is no text."""
        states = self.start
        for n in range(len(states) + 1):
            if _meet(states, self.goal):
                return n
            states = self.after(states, OPEN)
        return None

    def check_room(self, n_open: int) -> None:
        """Refuse a gap that no text fits."""
        states = self.start
        for _ in range(n_open):
            states = self.after(states, OPEN)
        if _meet(states, self.goal):
            return
        least = self.least()
        if least is None:
            raise SamplingError("schema or regex: no text of it can be written in this tokenizer's tokens; change it")
        if least > n_open:
            raise SamplingError(
                f"schema or regex: its shortest text takes {least} tokens, and {n_open} may be written; give {least}"
            )
        raise SamplingError(
            f"schema or regex: no text of it has {n_open} tokens, and without EOS it must fill them; change the length"
        )


@functools.lru_cache(maxsize=32)
def language_of(automaton: Automaton, eos_id: int | None, forbidden: tuple[int, ...]) -> Language:
    for name, token in (("eos_id", eos_id), *(("suppressed", token) for token in forbidden[:-1])):
        if token is not None and not 0 <= token < len(automaton.classes):
            raise SamplingError(f"{name} = {token}: the constraint was made for {len(automaton.classes)} tokens")
    return Language(automaton, eos_id, forbidden)


def _pack(flags: np.ndarray) -> States:
    return flags.astype(np.uint8).tobytes()


def _flags(states: States) -> np.ndarray:
    return np.frombuffer(states, dtype=bool)


def _both(one: States, other: States) -> States:
    return (np.frombuffer(one, dtype=np.uint8) & np.frombuffer(other, dtype=np.uint8)).tobytes()


def _meet(one: States, other: States) -> bool:
    return bool(int.from_bytes(one) & int.from_bytes(other))


def _add_up(values: np.ndarray) -> float:
    """Log of the sum of exponentials."""
    most = values.max()
    return float(most if most == -np.inf else most + np.log(np.exp(values - most).sum()))


class Gap:
    """How much of a row's gap is written, as classes of tokens."""

    def __init__(self, language: Language, first: int, n_open: int) -> None:
        self.language, self.first = language, first
        self.symbols = [OPEN] * n_open
        self.log_weight = 0.0

    def reopen(self, positions: Sequence[int]) -> None:
        """Positions of the canvas are masked again."""
        for position in positions:
            self.symbols[position - self.first] = OPEN

    def keep(self, positions: Sequence[int], tokens: Sequence[int]) -> bool:
        """Commit these tokens, if some completion is then still a text of the language. Positions in order."""
        places, language = [position - self.first for position in positions], self.language
        states, ahead = self._states(places[0])[-1], self._ways(places[-1] + 1)[-1]
        symbols = self.symbols[places[0] : places[-1] + 1]
        for place, token in zip(places, tokens, strict=True):
            symbols[place - places[0]] = int(language.classes[token])
        for symbol in symbols:
            states = language.after(states, symbol)
        if not _meet(states, ahead):
            return False
        self.symbols[places[0] : places[-1] + 1] = symbols
        return True

    def likeliest(self, positions: Sequence[int], peak: np.ndarray) -> list[int]:
        """Commit the classes whose best tokens, peak (N, C), are together the likeliest that fit."""
        places, table = [position - self.first for position in positions], self.language.table
        values = [np.append(np.where(_flags(self._ways(places[-1] + 1)[-1]), 0.0, -np.inf), -np.inf)]
        for level in range(len(places) - 1, 0, -1):
            value = (peak[level] + values[0][table]).max(1)
            for place in range(places[level] - 1, places[level - 1], -1):
                symbol = self.symbols[place]
                if symbol == OPEN:
                    value = np.where(self.language.near, value, -np.inf).max(1)
                else:
                    value = np.append(value, -np.inf)[table[:, symbol]]
            values.insert(0, np.append(value, -np.inf))
        states, chosen = self._states(places[0])[-1], []
        for level in range(len(places)):
            score = peak[level] + values[level][table[np.flatnonzero(_flags(states))]].max(0)
            chosen.append(int(score.argmax()))
            self.log_weight += float(peak[level, chosen[-1]] - peak[level].max())
            states = self._commit(states, places, level, chosen[-1])
        return chosen

    def draw(self, positions: Sequence[int], peak: np.ndarray, mass: np.ndarray) -> list[int]:
        """Commit classes drawn jointly. peak, mass (N, C): the best noisy logit and the log-probability of each class."""
        places = [position - self.first for position in positions]
        levels = self._follow(places, mass)
        states, chosen = self._states(places[0])[-1], []
        for level, ahead in enumerate(levels):
            rest = np.full(self.language.n_classes, -np.inf)
            for goal, value in ahead:
                fits = self.language.fitting(states, goal)
                rest[fits] = np.logaddexp(rest[fits], value)
            chosen.append(int((peak[level] + rest).argmax()))
            self.log_weight += _add_up(mass[level] + rest) - float(rest[chosen[-1]])
            states = self._commit(states, places, level, chosen[-1])
        return chosen

    def _follow(self, places: list[int], mass: np.ndarray) -> list[list[tuple[States, float]]]:
        """What may follow each place: sets of states, each with the log-mass of the later tokens that lead on from just them.

        Sets are kept apart because open positions make states many: a sum over states would count a token once for each."""
        language, reached, ways = self.language, self._states(places[-1]), self._ways(places[0] + 1)
        ways.reverse()  # of the places after the first on
        found = [[(ways[places[-1] - places[0]], 0.0)]]
        for level in range(len(places) - 1, 0, -1):
            sums: dict[States, float] = {}
            for goal, value in found[0]:
                sets, groups = language.origins(goal)
                for number, states in enumerate(sets):
                    states = _both(states, reached[places[level]])
                    if any(states):
                        own = value + _add_up(mass[level][groups == number])
                        sums[states] = float(np.logaddexp(sums.get(states, -np.inf), own))
            for place in range(places[level] - 1, places[level - 1], -1):
                pulled: dict[States, float] = {}
                for states, value in sums.items():
                    states = _both(language.before(states, self.symbols[place]), reached[place])
                    if any(states):
                        pulled[states] = float(np.logaddexp(pulled.get(states, -np.inf), value))
                sums = pulled
            cut = [(ways[places[level - 1] - places[0]], 0.0)]
            found.insert(0, [*sums.items()] if len(sums) <= MOST_SETS else cut)
        return found

    def _states(self, place: int) -> list[States]:
        """The states that may be reached before each place, up to this one."""
        found = [self.language.start]
        for symbol in self.symbols[:place]:
            found.append(self.language.after(found[-1], symbol))
        return found

    def _ways(self, place: int) -> list[States]:
        """The states from which a text can be completed, at each place from the end down to this one."""
        found = [self.language.goal]
        for symbol in reversed(self.symbols[place:]):
            found.append(self.language.before(found[-1], symbol))
        return found

    def _commit(self, states: States, places: list[int], level: int, chosen: int) -> States:
        """Write a class at a place; return the states reached before the next one."""
        self.symbols[places[level]] = chosen
        stop = places[level + 1] if level + 1 < len(places) else places[level] + 1
        for symbol in self.symbols[places[level] : stop]:
            states = self.language.after(states, symbol)
        return states
