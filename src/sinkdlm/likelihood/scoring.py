"""Log-probabilities of target tokens from a denoiser, in batches that are filled across requests.

Owns what happens between a denoiser and a number for each look at a row: which looks share a forward, which positions reach the
head, guidance, what is no outcome. A look gets the same number in any batch, up to rounding in the denoiser's own arithmetic; sums
are taken in float64 in an order that is the look's own. Takes a denoiser; knows no model, tokenizer or file.

B looks in a forward, T width, n positions read of a look, L target tokens of a row, V vocabulary.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sinkdlm.errors import LikelihoodError, ModelError
from sinkdlm.kernels.cuda_graph import many_shapes
from sinkdlm.sampling.batch import DenoiserAdapter
from sinkdlm.sampling.drawing import guide, precise

_HEAD_SHARE = 4  # of the tokens in a forward, one in so many may reach the head: logits take most of the memory
_SPARE = 256  # positions read in vain that are too few to part a batch for
_SLACK = 8  # a row joins longer ones if it lacks less than this part of their length

Rows = Tensor | Sequence[Sequence[int] | Tensor]


class Row(NamedTuple):
    """tokens (T,) and the positions (L,) of the target among them; all else is given."""

    tokens: np.ndarray
    targets: np.ndarray


class Look(NamedTuple):
    """One forward of one row: the target positions that are masked, and those that are read (n,)."""

    row: Row
    masked: np.ndarray
    read: np.ndarray

    @property
    def length(self) -> int:
        return len(self.row.tokens)

    @property
    def n_read(self) -> int:
        return len(self.read)


def read_rows(tokens: Rows, scored: Rows, mask_id: int) -> list[Row]:
    """Rows of a call, checked: every row has a target, and no target token is [MASK]."""
    # A tensor is fetched whole: its rows one by one would each wait for the device.
    lists = [[_on_host(row) for row in (given.cpu() if isinstance(given, Tensor) else given)] for given in (tokens, scored)]
    if len(lists[0]) != len(lists[1]):
        raise LikelihoodError(f"{len(lists[0])} rows of tokens, {len(lists[1])} of scored: one for each")
    rows = []
    for number, (own, flags) in enumerate(zip(*lists, strict=True)):
        if own.shape != flags.shape or own.ndim != 1:
            raise LikelihoodError(f"row {number}: {own.size} tokens, {flags.size} of scored: one for each token")
        targets = np.flatnonzero(flags)
        if not len(targets):
            raise LikelihoodError(f"row {number}: no token is scored; an empty target has no likelihood")
        if own.min() < 0:
            raise LikelihoodError(f"row {number}: token {own.min()}: ids are 0 or more; give rows of different lengths as a list")
        if (own[targets] == mask_id).any():
            raise LikelihoodError(f"row {number}: a scored token is [MASK] ({mask_id}), which is no outcome")
        rows.append(Row(own, targets))
    return rows


def _on_host(row: Any) -> np.ndarray:
    return np.asarray(row.cpu().numpy() if isinstance(row, Tensor) else row).astype(np.int64)


class Scorer:
    """A denoiser and how it is asked. shift: its row i is for token i + 1."""

    def __init__(
        self, access: DenoiserAdapter, *, mask_id: int, guidance: float, budget: int, shift: bool, device: torch.device | str | None
    ) -> None:
        self.access, self.mask_id, self.guidance, self.shift = access, mask_id, guidance, shift
        self.branches = 2 if guidance else 1
        self.room = budget // self.branches
        home: torch.device | str = getattr(access.call, "device", "cpu")
        self.device = torch.device(home if device is None else device)

    def sums(self, looks: Sequence[Look]) -> np.ndarray:
        """(looks,) float64: the sum of the log-probabilities of what each reads."""
        found = self._read(looks, lambda logits, truth: _at(logits, truth) - logits.logsumexp(-1))
        if np.isnan(found).any():  # options would be ranked all the same
            raise ModelError
        return found

    def hits(self, looks: Sequence[Look]) -> np.ndarray:
        """(looks,): how many of the tokens that each reads are the likeliest at their place."""
        return self._read(looks, lambda logits, truth: _at(logits, truth) >= logits.amax(-1))

    def _read(self, looks: Sequence[Look], judge: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
        """(looks,) float64: the sum over what each reads. judge: logits (B, n, V) and the tokens there (B, n) to values (B, n)."""
        found = np.empty(len(looks))
        # Nothing waits for the device until every forward is on its way.
        batches = plan_batches(looks, self.room, self.access.takes_lengths)
        with many_shapes:
            pending = [(batch, judge(*self._forward([looks[i] for i in batch]))) for batch in batches]
        for batch, values in pending:
            host = values.double().cpu().numpy()
            for i, line in zip(batch, host, strict=True):
                found[i] = line[: looks[i].n_read].sum()
        return found

    def _forward(self, looks: list[Look]) -> tuple[Tensor, Tensor]:
        """Logits (B, n, V) where something is read, and the tokens there (B, n); beyond a look's own n, of its first again."""
        tokens, places, truth = (torch.from_numpy(part).to(self.device) for part in self._assemble(looks))
        sizes = [look.length for look in looks]
        lengths = torch.tensor(sizes * self.branches).to(self.device) if len(set(sizes)) > 1 else None
        asked = (places - 1).clamp_min(0) if self.shift else places
        logits = self.access.logits(tokens, asked.repeat(self.branches, 1), lengths, None)
        if self.guidance:
            conditional, unconditional = logits.chunk(2)
            logits = guide(conditional, unconditional, self.guidance)
        logits = precise(logits)
        vocab = logits.shape[-1]
        most = max(int(look.row.tokens[look.row.targets].max()) for look in looks)
        if most >= vocab:
            raise LikelihoodError(f"token {most} is scored: ids are below the vocabulary's {vocab}")
        if self.mask_id < vocab:
            logits[..., self.mask_id] = -math.inf
        return logits, truth

    def _assemble(self, looks: list[Look]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens (branches * B, T), padded with [MASK]; places and the tokens there, (B, n) each.

        The unconditional branch sees nothing but those target tokens that are not masked.
        """
        width, n = max(look.length for look in looks), max(look.n_read for look in looks)
        tokens = np.full((self.branches, len(looks), width), self.mask_id)
        places = np.empty((len(looks), n), dtype=np.int64)
        truth = np.empty_like(places)
        for i, (row, masked, read) in enumerate(looks):
            tokens[0, i, : len(row.tokens)] = row.tokens
            if self.guidance:
                tokens[1, i, row.targets] = row.tokens[row.targets]
            tokens[:, i, masked] = self.mask_id
            places[i, : len(read)], places[i, len(read) :] = read, read[0]
            truth[i] = row.tokens[places[i]]
        return tokens.reshape(-1, width), places, truth


def _at(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens[..., None])[..., 0]


def plan_batches(looks: Sequence[Look], room: int, mix: bool) -> list[list[int]]:
    """Looks, by index, that share a forward of at most `room` tokens, longest first.

    Equal lengths first, which need no padding. mix: what is left over of each length shares forwards with lengths close by.
    """
    order = sorted(range(len(looks)), key=lambda i: (-looks[i].length, -looks[i].n_read))
    whole, left = [], []
    for _, same in itertools.groupby(order, key=lambda i: looks[i].length):
        *full, last = _cut(same, looks, room)
        whole += full
        left.append(last)
    return whole + (list(_cut(itertools.chain(*left), looks, room)) if mix else left)


def _cut(order: Iterable[int], looks: Sequence[Look], room: int) -> Iterator[list[int]]:
    batch: list[int] = []
    width = reads = total = 0  # reads: the most of a look; total: of them all
    for i in order:
        length, n_read, count = looks[i].length, looks[i].n_read, len(batch) + 1
        asked = count * max(reads, n_read)
        spare = asked - total - n_read  # positions that reach the head a second time, because looks read unequally many
        full = count * width > room or asked * _HEAD_SHARE > room
        if batch and (full or (width - length) * _SLACK > width or (spare > _SPARE and spare * _HEAD_SHARE > asked)):
            yield batch
            batch, width, reads, total = [], 0, 0, 0
        width, reads, total = max(width, length), max(reads, n_read), total + n_read
        batch.append(i)
    if batch:
        yield batch
