"""Approximate caches of sampling: keys and values of whole rows, kept from a block's first step while its others run.

Outside the span that a step computes they stay as they were when the block began, though tokens written since would change them
(Fast-dLLM). The sink lane is no part of it: it is exact, with or without a cache. Takes what attention hands over; knows no model.

B rows, K key/value heads, T tokens, D head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sinkdlm.kernels.sampling import keep_eager


class BlockCache:
    """The first forward covers whole rows of `length` and fills it; later ones a span from `start`, which they replace."""

    def __init__(self, length: int) -> None:
        self.start: int | Tensor = 0
        self.length = length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values (B, K, S + T, D)
        keep_eager(self, "join")  # compiled into a block, it would be compiled again for every start

    def rows(self, layer: int, k: Tensor, n_sinks: int) -> tuple[Tensor, Tensor]:
        """Buffers of a layer's keys and values, shaped for keys like k (B, K, any, D), with room for the sinks' in front.

        They stay in place as long as the cache lives: captured steps write to them.
        """
        if layer not in self._layers:
            shape = (*k.shape[:2], n_sinks + self.length, k.shape[3])
            self._layers[layer] = (k.new_empty(shape), k.new_empty(shape))
        return self._layers[layer]

    def join(self, layer: int, k: Tensor, v: Tensor, n_sinks: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(n_sinks, n_sinks + k.shape[2], device=k.device) + self.start
        whole = self.rows(layer, k, n_sinks)
        for mine, span in zip(whole, (k, v), strict=True):
            mine.index_copy_(2, positions, span)
        return whole[0][:, :, n_sinks:], whole[1][:, :, n_sinks:]

    @classmethod
    def collect(cls, rows: "Sequence[tuple[BlockCache, int]]") -> "BlockCache":
        """One cache of single rows of others, all of one length."""
        found = cls(rows[0][0].length)
        for layer in rows[0][0]._layers:
            k, v = (torch.stack([cache._layers[layer][part][row] for cache, row in rows]) for part in (0, 1))
            found._layers[layer] = (k, v)
        return found
