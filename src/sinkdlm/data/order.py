"""Which row of which set sample index n reads: a pure function of n, so that resuming needs no loader state.

Sets are dealt out by their shares without a remainder anywhere: among any n samples a set has its share to within one. Within a
set, each pass over its rows follows a keyed permutation of its own.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sinkdlm.noise import permute

Array = np.ndarray[Any, Any]
_BLOCK = 4096  # turns whose rows are computed together
_GRAIN = 1 << 31  # shares are kept in parts of this; int64 then counts 2**32 rows


def deal(samples: Array, shares: Sequence[float]) -> tuple[Array, Array]:
    """(set of each sample, its turn within that set), for sample indices (B,).

    The first set takes sample n where floor((n + 1) w) steps up from floor(n w); what is left is renumbered without gaps and dealt
    to the next set with its share of the rest.
    """
    chosen = np.full(samples.shape, len(shares) - 1, np.int64)
    turns = samples.astype(np.int64).copy()
    open_ = np.ones(samples.shape, bool)
    left = float(sum(shares))
    for number, share in enumerate(shares[:-1]):
        part = max(1, round(_GRAIN * share / left))
        before = turns * part // _GRAIN
        taken = open_ & ((turns + 1) * part // _GRAIN > before)
        chosen[taken] = number
        turns = np.where(open_, np.where(taken, before, turns - before), turns)
        open_ &= ~taken
        left -= share
    return chosen, turns


def rows_of(turns: Array, n_rows: int, seed: int, number: int) -> Array:
    """The row that each turn of set `number` reads: pass after pass, each in an order of its own."""
    blocks, places = turns // _BLOCK, turns % _BLOCK
    rows = np.empty_like(turns)
    for block in np.unique(blocks):
        here = blocks == block
        rows[here] = _block(int(block), n_rows, seed, number)[places[here]]
    return rows


@functools.lru_cache(maxsize=1024)  # 32 MB at most: several blocks of every set of a mixture
def _block(block: int, n_rows: int, seed: int, number: int) -> Array:
    """The rows of many turns at once: a permutation of a hundred numbers takes as long as one of thousands."""
    turns = np.arange(block * _BLOCK, (block + 1) * _BLOCK)
    passes, places = torch.from_numpy(turns // n_rows), torch.from_numpy(turns % n_rows)
    return permute(places, n_rows, seed, number, passes).numpy()
