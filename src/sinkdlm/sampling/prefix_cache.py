"""Keys and values that rows keep between forwards, in buffers that attention reads where they are.

`BlockCache` keeps whole rows from a block's first step on: approximate. `PrefixCache` keeps the finished blocks of block diffusion,
which no later token changes: exact. Rows may stand at different blocks. Knows no model, which calls `join`, `ends` and `shift`.

B rows, K key/value heads, D head width, S sinks, W tokens of a span (as many in each row), L keys of tokens that attention reads.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from sinkdlm.kernels.sampling import keep_eager


class RowCache:
    """Keys and values of rows, (B, K, S + width + 1, D) in each layer: sinks first; the last column takes what is not kept.

    start: index of the span's first token in its row: an int or a () tensor for all rows, else (B, 1). Where it is (B, 1), tokens
    from `first` up to `stop` are kept, (B, 1) each. length: L. row_end: where rows end, an int or (B, 1).
    """

    block_size: int | None = None  # of block diffusion

    def __init__(self, width: int, n_rows: int | None = None) -> None:
        self.width, self.n_rows, self.n_sinks = width, n_rows, 0
        self.start: int | Tensor = 0
        self.first: Tensor | None = None
        self.stop: Tensor | None = None
        self.length = width
        self.row_end: int | Tensor = width
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        keep_eager(RowCache, "join")  # in a compiled block it would be recompiled for every start

    @property
    def n_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for parts in self._layers.values() for part in parts)

    def place(self, start: int | Tensor, first: Tensor | None = None, stop: Tensor | None = None) -> None:
        self.start, self.first, self.stop = start, first, stop

    def rows(self, layer: int, k: Tensor, n_sinks: int) -> tuple[Tensor, Tensor]:
        """The layer's buffers, for keys like k (B, K, any, D). They stay in place as long as the cache: captured steps use them."""
        if layer not in self._layers:
            self.n_rows, self.n_sinks = self.n_rows or k.shape[0], n_sinks
            shape = (self.n_rows, k.shape[1], n_sinks + self.width + 1, k.shape[3])
            self._layers[layer] = (k.new_zeros(shape), k.new_zeros(shape))
        return self._layers[layer]

    def join(self, layer: int, k: Tensor, v: Tensor, sink_k: Tensor | None, sink_v: Tensor | None) -> tuple[Tensor, Tensor]:
        """Store the span's rotated keys and values (B, K, W, D); return those of the rows, the sinks' in front."""
        n_sinks = 0 if sink_k is None else sink_k.shape[2]
        is_new, span = layer not in self._layers, k.shape[2]
        whole = self.rows(layer, k, n_sinks)
        for mine, new, sink in zip(whole, (k, v), (sink_k, sink_v), strict=True):
            if sink is not None and (is_new or self.block_size is None):  # sinks at the end move with it
                mine[:, :, :n_sinks] = sink
            if isinstance(self.start, int):
                mine[:, :, n_sinks + self.start : n_sinks + self.start + span] = new
                continue
            places = torch.arange(span, device=k.device) + self.start
            if self.first is None or self.stop is None:
                mine.index_copy_(2, places + n_sinks, new)
            else:
                places = places.where((places >= self.first) & (places < self.stop), self.width) + n_sinks
                mine.scatter_(2, places[:, None, :, None].expand(new.shape), new)
        return self.read(layer)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that attention reads, (B, K, S + L, D): views of the buffers."""
        keys, values = self._layers[layer]
        end = self.n_sinks + self.length
        return keys[:, :, :end], values[:, :, :end]

    def ends(self, n_tokens: int, device: torch.device) -> Tensor | None:
        """How many of its row's tokens each of the span's sees, (B or 1, 1, W or 1, 1); None where all see L."""
        return None if isinstance(self.row_end, int) else self.row_end[:, :, None, None]

    @classmethod
    def collect(cls, members: "Sequence[tuple[Self, int] | None]", width: int, *kind: Any) -> Self:
        """Build one cache from single rows of others; None is a row of which nothing is kept yet."""
        found = cls(width, len(members), *kind)
        for cache in {id(row[0]): row[0] for row in members if row is not None}.values():
            pairs = [(new, row[1]) for new, row in enumerate(members) if row is not None and row[0] is cache]
            found.take([new for new, _ in pairs], cache, [old for _, old in pairs])
        return found

    def take(self, rows: Sequence[int], other: Self, sources: Sequence[int]) -> None:
        """Copy what another cache keeps of its rows `sources` into these rows."""
        pairs = torch.tensor([list(rows), list(sources)])
        for layer, parts in other._layers.items():
            here, there = pairs.to(parts[0].device)
            is_new, span = layer not in self._layers, other.n_sinks + min(self.width, other.width)
            for mine, theirs in zip(self.rows(layer, parts[0], other.n_sinks), parts, strict=True):
                if is_new:
                    mine[:, :, : other.n_sinks] = theirs[:1, :, : other.n_sinks]
                mine[here, :, :span] = theirs[there, :, :span]


class BlockCache(RowCache):
    """Keys and values of whole rows, kept from a block's first step for its later ones: approximate, as in Fast-dLLM.

    A forward of whole rows fills it; later ones replace a span, and the rest stays as it was when the block began. The sinks lie
    here too, but never become old.
    """


class PrefixCache(RowCache):
    """Keys, values and last states of the finished blocks of rows: exact.

    A row's current block is computed anew at each step. The first forward of a block also covers the block before, whose tokens are
    then final, and keeps it. A span ends where the row's block ends; its start is negative where a row is shorter.
    """

    def __init__(self, width: int, n_rows: int, block_size: int) -> None:
        super().__init__(width, n_rows)
        self.block_size: int = block_size
        self.kept = [0] * n_rows  # tokens of each row, from its first one on, whose keys and values are final
        self.joins = True  # whether a row's span begins in the block before
        self._opened = self.kept  # `kept`, once the forward is done
        self._begins: Tensor | int = 0  # index of each row's current block
        self._before: Tensor | None = None  # (B, 1, d): the state of the token before each row's current block

    def open(self, spans: Sequence[tuple[int, int]], n_tokens: int, *, steady: bool = False) -> None:
        """Announce a forward of n_tokens of each row. spans: (begin, stop) of each row's current block. `place` gives what the
        device must know, unless all rows are alike. steady: make the same shapes in every block, for capturing."""
        starts = [stop - n_tokens for _, stop in spans]
        self._opened = [begin for begin, _ in spans]
        self.length = self.width if steady else max(stop for _, stop in spans)
        self.joins = n_tokens > self.block_size
        # One span behind what is kept, the same for all rows: no row needs places or a mask of its own.
        self.alike = not steady and len(set(spans)) == 1 and set(self.kept) == {starts[0]}
        if self.alike:
            self.place(starts[0])
            self._begins = self._opened[0]

    def place(
        self, start: int | Tensor, first: Tensor | None = None, stop: Tensor | None = None, begins: Tensor | None = None
    ) -> None:
        super().place(start, first, stop)
        if begins is not None:
            self._begins = begins

    @property
    def needs_state(self) -> bool:
        """Whether the model is a shifted one."""
        return self._before is not None

    def keep(self) -> None:
        """Note that the forward is done: one that failed leaves nothing to rely on."""
        self.kept = self._opened

    def ends(self, n_tokens: int, device: torch.device) -> Tensor | None:
        """As `RowCache.ends`: a token sees its own block and those before it, up to the span's end."""
        start, size = self.start, self.block_size
        if isinstance(start, int) and (start + n_tokens - 1) // size == start // size:
            return None
        if isinstance(start, Tensor) and not self.joins:  # what lies before a row's block is not computed for use
            return (start + n_tokens)[:, :, None, None]
        queries = (start + torch.arange(n_tokens, device=device)).clamp_min(0)  # (W,), or (B, W)
        ends = ((queries // size + 1) * size).minimum(queries[..., -1:] + 1)
        return ends.view(-1, 1, n_tokens, 1)

    def shift(self, x: Tensor) -> Tensor:
        """Align a next-token model's states (B, W, d) with the tokens that they predict: each comes from the token before."""
        if self._before is None:
            self._before = torch.zeros_like(x[:, :1])
        place = self._begins - 1 - self.start  # of the token before the block
        place = torch.full((1, 1), place, device=x.device) if isinstance(place, int) else place
        is_new = place >= 0 if self.first is None else (place >= 0) & (self._begins > self.first)
        place, is_new = place[..., None], is_new[..., None]
        found = x.take_along_dim(place.clamp_min(0), dim=1)
        self._before.copy_(torch.where(is_new, found, self._before))
        index = (self.start + torch.arange(x.shape[1], device=x.device))[..., None]
        shifted = torch.where(index == self._column(self._begins), self._before, x.roll(1, dims=1))
        return torch.where(index == 0, x, shifted)  # nothing is before a row's first token

    @staticmethod
    def _column(value: Tensor | int) -> Tensor | int:
        return value if isinstance(value, int) else value[..., None]

    def take(self, rows: Sequence[int], other: Self, sources: Sequence[int]) -> None:
        super().take(rows, other, sources)
        if other._before is not None:
            if self._before is None:
                self._before = other._before.new_zeros(self.n_rows or 0, *other._before.shape[1:])
            self._before[list(rows)] = other._before[list(sources)]
        for row, source in zip(rows, sources, strict=True):
            self.kept[row] = other.kept[source]
