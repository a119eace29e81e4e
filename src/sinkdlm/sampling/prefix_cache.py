"""The exact cache of block diffusion: keys and values of finished blocks, which no later token changes.

A row's current block is computed anew at each step, beside what is kept of the blocks before it. The first forward of a block also
covers the block before, whose tokens are then final, and keeps it. Knows no model: the model calls `join` and `shift`.

B rows, K key/value heads, D head width, L block size, W tokens of a span (the same for all rows; it ends where a row's block ends).
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class PrefixCache:
    """Keys, values and last states of rows that may stand at different blocks.

    start: index of the span's first token in its row: an int where it is the same for all rows, else (B, 1). It is negative where
    a row is shorter than the span. length: keys that attention sees.
    """

    def __init__(self, block_size: int, n_rows: int, width: int) -> None:
        self.block_size, self.n_rows, self.width = block_size, n_rows, width
        self.start: int | Tensor = 0
        self.length = width
        self.kept = [0] * n_rows  # tokens of each row, from its first one on, whose keys and values are final
        self._opened = self.kept  # `kept`, once the forward is done
        self._begins = torch.zeros(n_rows, 1, dtype=torch.int64)  # index of each row's current block
        self._final = self._begins  # `kept`, on the device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # (B, K, width + 1, D): the last column takes what is not to be kept
        self._before: Tensor | None = None  # (B, 1, d): the state of the token before each row's current block

    def open(self, spans: Sequence[tuple[int, int]], n_tokens: int, device: torch.device) -> None:
        """Announce a forward of n_tokens of each row. spans: (begin, stop) of each row's current block."""
        starts = [stop - n_tokens for _, stop in spans]
        begins = [begin for begin, _ in spans]
        table = torch.tensor([starts, begins, self.kept])[:, :, None].to(device)
        self._begins, self._final = table[1], table[2]
        self.length = max(stop for _, stop in spans)
        # One span behind what is kept, the same for all rows: no row needs places or a mask of its own.
        alike = len(set(spans)) == 1 and set(self.kept) == {starts[0]}
        self.start = starts[0] if alike else table[0]
        self._opened = begins

    def keep(self) -> None:
        """Note that the forward is done: one that failed leaves nothing to rely on."""
        self.kept = self._opened

    def join(self, layer: int, k: Tensor, v: Tensor, n_sinks: int) -> tuple[Tensor, Tensor]:
        """Store the span's rotated keys and values (B, K, W, D); return those of the whole rows. Final ones are not changed."""
        keys, values = self._buffers(layer, k, v)
        if isinstance(self.start, int):
            span = slice(self.start, self.start + k.shape[2])
            keys[:, :, span], values[:, :, span] = k, v
        else:
            places = self.start + torch.arange(k.shape[2], device=k.device)
            places = places.where(places >= self._final, self.width)[:, None, :, None]
            for mine, new in ((keys, k), (values, v)):
                mine.scatter_(2, places.expand(new.shape), new)
        return keys[:, :, : self.length], values[:, :, : self.length]

    def shift(self, x: Tensor) -> Tensor:
        """Align a next-token model's states (B, W, d) with the tokens that they predict: each comes from the token before."""
        start = self.start if isinstance(self.start, Tensor) else torch.full_like(self._begins, self.start)
        before = self._before if self._before is not None else torch.zeros_like(x[:, :1])
        place = (self._begins - 1 - start)[..., None]  # of the token before the block
        found = x.take_along_dim(place.clamp_min(0), dim=1)
        self._before = before = torch.where(place >= 0, found, before)
        shifted = torch.cat([before, x[:, :-1]], dim=1)
        index = start + torch.arange(x.shape[1], device=x.device)
        return torch.where((index == 0)[..., None], x, shifted)  # nothing is before a row's first token

    @classmethod
    def collect(cls, rows: "Sequence[tuple[PrefixCache, int] | None]", block_size: int, width: int) -> "PrefixCache":
        """Build one cache from single rows of others; None is a row of which nothing is kept yet."""
        found = cls(block_size, len(rows), width)
        for cache in {id(row[0]): row[0] for row in rows if row is not None}.values():
            pairs = [(new, row[1]) for new, row in enumerate(rows) if row is not None and row[0] is cache]
            found.take([new for new, _ in pairs], cache, [old for _, old in pairs])
        return found

    def take(self, rows: Sequence[int], other: "PrefixCache", sources: Sequence[int]) -> None:
        """Copy what another cache keeps of its rows `sources` into these rows."""
        span = min(self.width, other.width)
        pairs = torch.tensor([list(rows), list(sources)])
        for layer, parts in other._layers.items():
            here, there = pairs.to(parts[0].device)
            for mine, theirs in zip(self._buffers(layer, *parts), parts, strict=True):
                mine[here, :, :span] = theirs[there, :, :span]
        if other._before is not None:
            here, there = pairs.to(other._before.device)
            if self._before is None:
                self._before = other._before.new_zeros(self.n_rows, *other._before.shape[1:])
            self._before[here] = other._before[there]
        for row, source in zip(rows, sources, strict=True):
            self.kept[row] = other.kept[source]

    def _buffers(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            shape = (self.n_rows, k.shape[1], self.width + 1, k.shape[3])
            self._layers[layer] = (k.new_zeros(shape), v.new_zeros(shape))
        return self._layers[layer]
