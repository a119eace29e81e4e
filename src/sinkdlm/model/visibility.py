"""Who sees whom in attention, as a rule: a dense mask, and blocks for a fused kernel.

Documents of packed rows, padding, and attention on its way from causal to full. Knows nothing of queries, keys or values.

B batch, T tokens, S sinks.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

_BLOCK = 128  # queries and keys of one block of FlexAttention, its own default
_WORD_VALUES = 1 << 32

# Numbers of tokens that are of no document.
SHARED = -1  # a sink or register: seen by all; a register sees all but padding
PADDING = (1 << 31) - 1  # sees and is seen by padding alone


class Opening(NamedTuple):
    """Attention on its way from causal to full (annealing of an AR parent, as DiffuLLaMA does it).

    A token sees those before it and itself always, and each later one with probability `share`, drawn for (key, i, j) alone: one
    draw for all rows, heads and layers. Give each step its own key. From a share of 1 on, attention is plain and full.
    """

    share: float
    key: int


class DrawnOpening(NamedTuple):
    """An opening as data, so that a new share or key recompiles nothing: words (2, T) int32 of rows and columns; threshold ()."""

    words: Tensor
    threshold: Tensor
    closed: bool  # share 0: no token sees a later one

    @classmethod
    def draw(cls, share: float, words: Tensor) -> "DrawnOpening":
        middle = _WORD_VALUES // 2
        threshold = max(-middle, min(round(share * _WORD_VALUES) - middle, middle - 1))
        return cls(words, torch.full((), threshold, dtype=torch.int32, device=words.device), threshold == -middle)


def pair_bits(rows: Tensor, columns: Tensor) -> Tensor:
    """32 random bits for each pair of hashed words, as int32: wrapping arithmetic, the same in torch and inside a fused kernel.

    The mixer is Wellons's lowbias32 ("Prospecting for hash functions", 2018).
    """
    word = rows ^ columns
    word = (word ^ ((word >> 16) & 0xFFFF)) * 0x7FEB352D  # the masks make torch's arithmetic shifts logical
    word = (word ^ ((word >> 15) & 0x1FFFF)) * (0x846CA68B - _WORD_VALUES)
    return word ^ ((word >> 16) & 0xFFFF)


def _sees(mine: Tensor, theirs: Tensor, opened: Tensor | None = None) -> Tensor:
    """The rule, for a query's and a key's document numbers."""
    seen = mine == theirs
    if opened is not None:
        seen = seen & opened
    return seen | (theirs == SHARED) | ((mine == SHARED) & (theirs != PADDING))


def _opened(i: Tensor, j: Tensor, rows: Tensor, columns: Tensor, threshold: Tensor) -> Tensor:
    return (j <= i) | (pair_bits(rows, columns) < threshold)


class Visibility(NamedTuple):
    """Who sees whom, as a rule. Every token sees itself, so that no softmax is empty.

    documents (B or 1, T) int32: numbers that grow along the row; a token sees those of its own number. SHARED registers lie in
    front, PADDING lies at the end.
    """

    documents: Tensor
    opening: DrawnOpening | None = None

    def dense(self) -> Tensor:
        """(B or 1, 1, T, T) boolean: the oracle, and what kernels without rules take."""
        opened = None
        if self.opening is not None:
            index = torch.arange(self.documents.shape[1], device=self.documents.device)
            rows, columns = self.opening.words
            opened = _opened(index[:, None], index, rows[:, None], columns, self.opening.threshold)
        return _sees(self.documents[:, :, None], self.documents[:, None], opened)[:, None]

    def blocks(self, batch: int, n_sinks: int) -> BlockMask:
        """The rule for a fused kernel, over T content keys and then the sinks: no (T, T) tensor, only (T / 128, T / 128).

        Sinks come last so that blocks of keys and of queries begin at the same tokens. A block is skipped, whole, or computed by
        the rule; what may hold one hidden and one visible pair is computed by the rule.
        """
        queries = self.documents.expand(batch, -1).contiguous()
        keys = pad(queries, (0, n_sinks), value=SHARED)
        (first_query, last_query), (first_key, last_key) = _block_ranges(queries), _block_ranges(keys)
        first_query, last_query = first_query[:, :, None], last_query[:, :, None]  # (B, blocks of queries, 1)
        first_key, last_key = first_key[:, None], last_key[:, None]
        shared = (first_query == SHARED) | (first_key == SHARED)
        touched = (first_query <= last_key) & (first_key <= last_query)
        whole = (first_query == last_query) & (first_key == last_key) & (first_query == first_key)
        row = torch.arange(touched.shape[1], device=queries.device)[:, None]
        column = torch.arange(touched.shape[2], device=queries.device)
        whole = (
            whole & (row < queries.shape[1] // _BLOCK) & (column < keys.shape[1] // _BLOCK)
        )  # a cut block has pairs beyond the end
        if self.opening is None:

            def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return _sees(queries[b, i], keys[b, j])

        else:
            rows, columns = self.opening.words
            columns, threshold = pad(columns, (0, n_sinks)), self.opening.threshold
            whole = whole & (column < row)
            if self.opening.closed:
                touched = touched & (column <= row)

            def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return _sees(queries[b, i], keys[b, j], _opened(i, j, rows[i], columns[j], threshold))

        return BlockMask.from_kv_blocks(
            *_ordered((touched | shared) & ~whole),
            *_ordered(whole),
            BLOCK_SIZE=_BLOCK,
            mask_mod=sees,
            seq_lengths=(queries.shape[1], keys.shape[1]),
        )


def _block_ranges(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest number of each block, (B, blocks). A last block that is cut is filled up with its last token."""
    n_tokens = numbers.shape[1]
    index = torch.arange(-(-n_tokens // _BLOCK) * _BLOCK, device=numbers.device).clamp_max(n_tokens - 1)
    return torch.aminmax(numbers[:, index].unflatten(1, (-1, _BLOCK)), dim=2)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen blocks (B, rows, columns) as FlexAttention lists them: how many in each row, and their columns, those first."""
    columns = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], columns.to(torch.int32)[:, None]
