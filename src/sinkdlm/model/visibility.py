"""Who sees whom in attention, as a rule over pairs of tokens, and as a dense mask.

Covers packed documents, padding, annealing from causal to full attention, and block diffusion. Knows nothing of queries, keys or
values.

B batch, T tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_WORD_VALUES = 1 << 32

# Document numbers of tokens outside documents.
SHARED = -1  # a sink or register: seen by all; a register sees all but padding
PADDING = (1 << 31) - 1  # sees and is seen by padding alone


class Annealing(NamedTuple):
    """Attention of an AR parent between causal and full, as in DiffuLLaMA.

    A token always sees itself and earlier tokens. It sees a later one with probability `share`, drawn from (key, i, j): one draw
    for all rows, heads and layers. Give each step its own key. With a share of 1 or more, attention is full.
    """

    share: float
    key: int


class DrawnAnnealing(NamedTuple):
    """An Annealing as tensors: hashed words (2, T) int32 of queries and of keys, and a () threshold."""

    words: Tensor
    threshold: Tensor
    closed: bool  # share 0: no token sees a later one

    @classmethod
    def draw(cls, share: float, words: Tensor) -> "DrawnAnnealing":
        middle = _WORD_VALUES // 2
        threshold = max(-middle, min(round(share * _WORD_VALUES) - middle, middle - 1))
        return cls(words, torch.full((), threshold, dtype=torch.int32, device=words.device), threshold == -middle)


def pair_bits(rows: Tensor, columns: Tensor) -> Tensor:
    """Hash pairs of words to 32 random bits, int32: wrapping arithmetic, the same in torch and inside a kernel.

    The mixer is Wellons's lowbias32 ("Prospecting for hash functions", 2018).
    """
    word = rows ^ columns
    word = (word ^ ((word >> 16) & 0xFFFF)) * 0x7FEB352D  # the masks make torch's arithmetic shifts logical
    word = (word ^ ((word >> 15) & 0x1FFFF)) * (0x846CA68B - _WORD_VALUES)
    return word ^ ((word >> 16) & 0xFFFF)


def sees(mine: Tensor, theirs: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Apply the rule to the document numbers of a query and a key. allowed: what annealing or blocks allow within a document."""
    seen = mine == theirs
    if allowed is not None:
        seen = seen & allowed
    return seen | (theirs == SHARED) | ((mine == SHARED) & (theirs != PADDING))


def is_annealed(i: Tensor, j: Tensor, rows: Tensor, columns: Tensor, threshold: Tensor) -> Tensor:
    return (j <= i) | (pair_bits(rows, columns) < threshold)


def block_codes(blocks: Tensor, *, noised: bool) -> Tensor:
    """Turn numbers of blocks into the codes that `follows` compares: clean tokens have even codes, noised ones odd codes."""
    return (2 * blocks + noised).to(torch.int32)


def follows(mine: Tensor, theirs: Tensor) -> Tensor:
    """Apply the rule of block diffusion: a token sees its own copy of its block, and the clean copies of all blocks before it."""
    return (mine == theirs) | ((theirs % 2 == 0) & (theirs < mine - mine % 2))


class Visibility(NamedTuple):
    """Who sees whom, as a rule. Every token sees itself, so that no softmax is empty.

    documents (B or 1, T) int32: numbers that grow along the row; a token sees those of its own number. SHARED registers lie in
    front, PADDING lies at the end. blocks (B or 1, T): codes of block diffusion. Where a row has a noised and a clean copy, T
    counts both.
    """

    documents: Tensor
    annealing: DrawnAnnealing | None = None
    blocks: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the boolean mask (B or 1, 1, T, T): the reference, and the input of kernels that take no rule."""
        allowed = None
        if self.annealing is not None:
            index = torch.arange(self.documents.shape[1], device=self.documents.device)
            rows, columns = self.annealing.words
            allowed = is_annealed(index[:, None], index, rows[:, None], columns, self.annealing.threshold)
        elif self.blocks is not None:
            allowed = follows(self.blocks[:, :, None], self.blocks[:, None])
        return sees(self.documents[:, :, None], self.documents[:, None], allowed)[:, None]
