"""One interface to every denoiser, and the shapes in which a CPU gives a row the same bits whatever rows are beside it.

Takes any callable that maps tokens to logits; knows no model, state or batch.

B rows of a batch, T tokens, n positions predicted in a row, V vocabulary.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sinkdlm.sampling.prefill import PrefixStore

Denoise = Callable[..., Tensor]

# Least width of a row, and least number of its predicted positions, where shapes are fixed. Widths are multiples of what torch's
# vector loops take at once: the rest is computed one by one, where SiLU rounds otherwise. Matmuls of fewer rows than 16 do too.
_FIXED_WIDTH, _FIXED_COUNT = 32, 16


def fixed_width(length: int) -> int:
    """The tokens of a row in a forward of fixed shapes: few widths, of which the row's own length decides."""
    unit = max(_FIXED_WIDTH, 1 << max(0, (length - 1).bit_length() - 3))
    return -(-length // unit) * unit


def fixed_count(count: int, width: int) -> int:
    """The positions of a row that are predicted in a forward of fixed shapes, at least `count`."""
    return min(width, -(-max(count, 1) // _FIXED_COUNT) * _FIXED_COUNT)


class DenoiserAdapter:
    """Give every denoiser one interface. Only ours take lengths=, where= (positions (B, n) -> logits (B, n, V)) and cache=.

    Remembers what is tried and measured: where steps follow each other, make it once and give it to all of them."""

    def __init__(self, denoiser: Denoise) -> None:
        names: Any = ()
        with contextlib.suppress(TypeError, ValueError):
            names = inspect.signature(denoiser).parameters
        self.call = denoiser
        self.takes_lengths, self.takes_where, self.takes_cache = (name in names for name in ("lengths", "where", "cache"))
        self.takes_cache &= getattr(denoiser, "cacheable", True)
        self.block_size: int | None = getattr(denoiser, "block_size", None)  # of block diffusion
        self.reach = int(getattr(denoiser, "reach", 0))  # tokens to the left of a span that its forward also needs
        self.capturable = bool(getattr(denoiser, "capturable", False))
        self.prefixes: PrefixStore | None = None  # shared between rows that come one after the other
        self.barred: Sequence[int] = getattr(denoiser, "barred", ())  # ids that are never written
        self.speculator: Any = None  # speculation.Speculator
        self._kept_bits: dict[tuple[int, int, int], bool] = {}

    @classmethod
    def of(cls, denoiser: "Denoise | DenoiserAdapter") -> "DenoiserAdapter":
        return denoiser if isinstance(denoiser, DenoiserAdapter) else cls(denoiser)

    def logits(self, tokens: Tensor, positions: Tensor, lengths: Tensor | None, cache: Any) -> Tensor:
        """Logits (B, n, V) in a tensor that the caller may overwrite."""
        given = {name: value for name, value in (("lengths", lengths), ("cache", cache)) if value is not None}
        if self.takes_where:
            return self.call(tokens, where=positions, **given)
        logits = self.call(tokens, **given)
        return logits.gather(1, positions[..., None].expand(-1, -1, logits.shape[-1]))

    def keeps_bits(self, device: torch.device, length: int = 1, counts: Sequence[int] = ()) -> bool:
        """Whether rows of this length that share a forward of fixed shapes get the bits that each gets alone.

        counts: how many positions of each row are predicted. Without several rows: whether they ever may."""
        # Threads must cut tensors at rows' vectors: so their number is a power of two.
        if not self.takes_lengths or device.type != "cpu" or torch.get_num_threads().bit_count() != 1:
            return False
        if len(counts) < 2:
            return True
        width = fixed_width(length)
        each = {fixed_count(count, width) for count in counts}
        return all(self._try(*shape, width) for shape in [(len(counts), max(each)), *((1, count) for count in each)])

    def _try(self, n_rows: int, count: int, width: int) -> bool:
        """Matmuls add up in an order that depends on the machine, its threads and their own shape: so each is tried once."""
        if (key := (n_rows, count, width)) not in self._kept_bits:
            tokens, where = torch.arange(width).expand(n_rows, -1) % 2, torch.arange(count).expand(n_rows, -1)
            lengths = torch.full((n_rows,), width - 1)
            found = self.logits(tokens, where, lengths, None)[:, :_FIXED_COUNT]
            alone = self.logits(tokens[:1], where[:1, :_FIXED_COUNT], lengths[:1], None)
            self._kept_bits[key] = torch.equal(found, alone.expand_as(found))
        return self._kept_bits[key]
