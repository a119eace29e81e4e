"""Who sees whom in attention, as a rule over pairs of tokens, and as a dense mask.

Documents of packed rows, padding, and attention on its way from causal to full. Knows nothing of queries, keys or values.

B batch, T tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_WORD_VALUES = 1 << 32

# Numbers of tokens that are of no document.
SHARED = -1  # a sink or register: seen by all; a register sees all but padding
PADDING = (1 << 31) - 1  # sees and is seen by padding alone


class Annealing(NamedTuple):
    """Attention of an AR parent on its way from causal to full, as DiffuLLaMA anneals it.

    A token sees those before it and itself always, and each later one with probability `share`, drawn for (key, i, j) alone: one
    draw for all rows, heads and layers. Give each step its own key. From a share of 1 on, attention is plain and full.
    """

    share: float
    key: int


class DrawnAnnealing(NamedTuple):
    """An annealing as tensors: words (2, T) int32 of queries and of keys, and a threshold ()."""

    words: Tensor
    threshold: Tensor
    closed: bool  # share 0: no token sees a later one

    @classmethod
    def draw(cls, share: float, words: Tensor) -> "DrawnAnnealing":
        middle = _WORD_VALUES // 2
        threshold = max(-middle, min(round(share * _WORD_VALUES) - middle, middle - 1))
        return cls(words, torch.full((), threshold, dtype=torch.int32, device=words.device), threshold == -middle)


def pair_bits(rows: Tensor, columns: Tensor) -> Tensor:
    """32 random bits for each pair of hashed words, as int32: wrapping arithmetic, the same in torch and inside a kernel.

    The mixer is Wellons's lowbias32 ("Prospecting for hash functions", 2018).
    """
    word = rows ^ columns
    word = (word ^ ((word >> 16) & 0xFFFF)) * 0x7FEB352D  # the masks make torch's arithmetic shifts logical
    word = (word ^ ((word >> 15) & 0x1FFFF)) * (0x846CA68B - _WORD_VALUES)
    return word ^ ((word >> 16) & 0xFFFF)


def sees(mine: Tensor, theirs: Tensor, annealed: Tensor | None = None) -> Tensor:
    """The rule, for a query's and a key's document numbers."""
    seen = mine == theirs
    if annealed is not None:
        seen = seen & annealed
    return seen | (theirs == SHARED) | ((mine == SHARED) & (theirs != PADDING))


def is_annealed(i: Tensor, j: Tensor, rows: Tensor, columns: Tensor, threshold: Tensor) -> Tensor:
    return (j <= i) | (pair_bits(rows, columns) < threshold)


class Visibility(NamedTuple):
    """Who sees whom, as a rule. Every token sees itself, so that no softmax is empty.

    documents (B or 1, T) int32: numbers that grow along the row; a token sees those of its own number. SHARED registers lie in
    front, PADDING lies at the end.
    """

    documents: Tensor
    annealing: DrawnAnnealing | None = None

    def dense(self) -> Tensor:
        """(B or 1, 1, T, T) boolean: the oracle, and what kernels without rules take."""
        annealed = None
        if self.annealing is not None:
            index = torch.arange(self.documents.shape[1], device=self.documents.device)
            rows, columns = self.annealing.words
            annealed = is_annealed(index[:, None], index, rows[:, None], columns, self.annealing.threshold)
        return sees(self.documents[:, :, None], self.documents[:, None], annealed)[:, None]
