"""Log-probabilities of target tokens: queries to a denoiser, in forwards that are filled across rows.

A `Query` is one row with some target tokens masked. Owns which queries share a forward, which positions reach the head, guidance,
and the exclusion of [MASK] as an outcome. A query gets the same number in any batch, up to rounding in the denoiser: sums are in
float64, in the query's own order. Takes a denoiser; knows no model, tokenizer or file.

A block-diffusion denoiser (its `block_size` is set) predicts each block after the clean blocks before it. A query may mask tokens
of many blocks: the row then goes in twice, noised and clean, and no block sees what is masked in another.

B queries in a forward, T width, n positions that a query reads, L target tokens of a row, V vocabulary.
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
from sinkdlm.sampling.denoiser import Denoise, DenoiserAdapter
from sinkdlm.sampling.drawing import guide, precise
from sinkdlm.sampling.loop import Rows

_HEAD_SHARE = 4  # at most one in 4 tokens of a forward reaches the head: logits take most of the memory
_SPARE = 256  # so many padded positions at the head do not split a batch
_SLACK = 8  # a row joins longer ones if it is shorter by at most an eighth

Device = torch.device | str | None


class Row(NamedTuple):
    """tokens (T,) and the positions (L,) of the target among them; all else is given."""

    tokens: np.ndarray
    targets: np.ndarray


class Query(NamedTuple):
    """One row in one forward: the target positions that are masked, and those that are read (n,)."""

    row: Row
    masked: np.ndarray
    read: np.ndarray

    @property
    def length(self) -> int:
        return len(self.row.tokens)

    @property
    def n_read(self) -> int:
        return len(self.read)


def split_targets(row: Row, block_size: int | None) -> list[np.ndarray]:
    """Positions of the targets in each block that has any; blocks count from the row's first token. None: one block."""
    if block_size is None:
        return [row.targets]
    return np.split(row.targets, np.flatnonzero(np.diff(row.targets // block_size)) + 1)


def read_rows(tokens: Rows, scored: Rows, mask_id: int) -> list[Row]:
    """Check a call's rows: every row has a target, and no target token is [MASK]."""
    # A tensor is fetched whole: its rows one by one would each wait for the device.
    lists = [[_on_host(row) for row in (given.cpu() if isinstance(given, Tensor) else given)] for given in (tokens, scored)]
    if len(lists[0]) != len(lists[1]):
        raise LikelihoodError(f"{len(lists[0])} rows of tokens, {len(lists[1])} of scored: give one of each per row")
    rows = []
    for number, (own, flags) in enumerate(zip(*lists, strict=True)):
        if own.shape != flags.shape or own.ndim != 1:
            raise LikelihoodError(f"row {number}: {own.size} tokens, {flags.size} of scored: give one per token")
        targets = np.flatnonzero(flags)
        if not len(targets):
            raise LikelihoodError(f"row {number}: no token is scored; an empty target has no likelihood")
        if own.min() < 0:
            raise LikelihoodError(f"row {number}: token {own.min()}: ids are 0 or more; give rows of different lengths as a list")
        if (own[targets] == mask_id).any():
            raise LikelihoodError(f"row {number}: a scored token is [MASK] ({mask_id}), which a model never predicts")
        rows.append(Row(own, targets))
    return rows


def _on_host(row: Any) -> np.ndarray:
    return np.asarray(row.cpu().numpy() if isinstance(row, Tensor) else row).astype(np.int64)


class Scorer:
    """Query a denoiser. shift: its row i is for token i + 1. device: None for the denoiser's own."""

    def __init__(self, denoiser: Denoise, mask_id: int, guidance: float, budget: int, shift: bool, device: Device) -> None:
        if not (math.isfinite(guidance) and guidance >= -1):
            raise LikelihoodError(f"guidance = {guidance}: allowed is -1 or more")
        if budget < 1:
            raise LikelihoodError(f"budget = {budget}: expected tokens per forward, at least 1")
        self.adapter, self.mask_id, self.guidance, self.shift = DenoiserAdapter.of(denoiser), mask_id, guidance, shift
        self.block_size = self.adapter.block_size
        self.branches = 2 if guidance else 1
        self.room = budget // self.branches
        home: Any = device or getattr(self.adapter.call, "device", "cpu")
        self.device = torch.device(home)

    def sums(self, queries: Sequence[Query]) -> np.ndarray:
        """(queries,) float64: the sum of the log-probabilities of the tokens that each reads."""
        found = np.empty(len(queries))
        for i, values in self.values(queries):
            found[i] = values.sum()
        return found

    def values(self, queries: Sequence[Query]) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the query, log-probabilities (n,) of the tokens that it reads), in no order of queries."""
        for i, values in self._run(queries, lambda logits, truth: _at(logits, truth) - logits.logsumexp(-1)):
            if np.isnan(values).any():  # else options would be ranked by NaN
                raise ModelError
            yield i, values

    def hits(self, queries: Sequence[Query]) -> np.ndarray:
        """(queries,): how many of the tokens that each reads are the likeliest at their position."""
        found = np.empty(len(queries))
        for i, values in self._run(queries, lambda logits, truth: _at(logits, truth) >= logits.amax(-1)):
            found[i] = values.sum()
        return found

    def _run(self, queries: Sequence[Query], score: Callable[[Tensor, Tensor], Tensor]) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the query, its scores (n,) in float64). score: logits (B, n, V) and the tokens there (B, n) to (B, n)."""
        copies = [self._copies(query) for query in queries]
        pending = []
        with many_shapes:  # nothing waits for the device until every forward is queued
            for n_copies in sorted(set(copies)):
                own = [i for i, count in enumerate(copies) if count == n_copies]
                room, mix = self.room // n_copies, self.adapter.takes_lengths
                for batch in plan_batches([queries[i] for i in own], room, mix):
                    numbers = [own[i] for i in batch]
                    pending.append((numbers, score(*self._forward([queries[i] for i in numbers], n_copies))))
        for numbers, values in pending:
            for i, line in zip(numbers, values.double().cpu().numpy(), strict=True):
                yield i, line[: queries[i].n_read]

    def _copies(self, query: Query) -> int:
        """2: the noised row and the clean one. 1: the noised row, whose other blocks are clean where one alone is masked."""
        if self.block_size is None or not len(query.masked):
            return 1
        blocks = query.masked // self.block_size
        return 1 + int((blocks != blocks[0]).any())

    def _forward(self, queries: list[Query], n_copies: int) -> tuple[Tensor, Tensor]:
        """Logits (B, n, V) at the positions read, and the tokens there (B, n); a query with fewer repeats its first position."""
        tokens, clean, positions, truth = (torch.from_numpy(part).to(self.device) for part in self._assemble(queries))
        sizes = [query.length for query in queries]
        lengths = torch.tensor(sizes * self.branches).to(self.device) if len(set(sizes)) > 1 else None
        sources = ((positions - 1).clamp_min(0) if self.shift else positions).repeat(self.branches, 1)
        if n_copies == 1:
            logits = self.adapter.logits(tokens, sources, lengths, None)
        else:
            logits = self.adapter.call(tokens, where=sources, lengths=lengths, clean=clean)
        if self.guidance:
            conditional, unconditional = logits.chunk(2)
            logits = guide(conditional, unconditional, self.guidance)
        logits = precise(logits)
        vocab, most = logits.shape[-1], max(int(query.row.tokens[query.row.targets].max()) for query in queries)
        if most >= vocab:
            raise LikelihoodError(f"token {most} is scored: ids must be below the vocabulary size {vocab}")
        if self.mask_id < vocab:
            logits[..., self.mask_id] = -math.inf
        return logits, truth

    def _assemble(self, queries: list[Query]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Noised and clean tokens (branches * B, T), padded with [MASK]; positions and the tokens there, (B, n) each.

        The unconditional branch has [MASK] for every given token, in the clean tokens as well.
        """
        width, n = max(query.length for query in queries), max(query.n_read for query in queries)
        clean = np.full((self.branches, len(queries), width), self.mask_id)
        positions = np.empty((len(queries), n), dtype=np.int64)
        truth = np.empty_like(positions)
        for i, (row, _, read) in enumerate(queries):
            clean[0, i, : len(row.tokens)] = row.tokens
            if self.guidance:
                clean[1, i, row.targets] = row.tokens[row.targets]
            positions[i, : len(read)], positions[i, len(read) :] = read, read[0]
            truth[i] = row.tokens[positions[i]]
        tokens = clean.copy()
        for i, query in enumerate(queries):
            tokens[:, i, query.masked] = self.mask_id
        return tokens.reshape(-1, width), clean.reshape(-1, width), positions, truth


def _at(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.gather(-1, tokens[..., None])[..., 0]


def plan_batches(queries: Sequence[Query], room: int, mix: bool) -> list[list[int]]:
    """Queries, by index, that share a forward of at most `room` tokens, longest first.

    Equal lengths go together first, without padding. mix: the leftovers share forwards with similar lengths.
    """
    order = sorted(range(len(queries)), key=lambda i: (-queries[i].length, -queries[i].n_read))
    whole, left = [], []
    for _, same in itertools.groupby(order, key=lambda i: queries[i].length):
        *full, last = _cut(same, queries, room)
        whole += full
        left.append(last)
    return whole + (list(_cut(itertools.chain(*left), queries, room)) if mix else left)


def _cut(order: Iterable[int], queries: Sequence[Query], room: int) -> Iterator[list[int]]:
    batch: list[int] = []
    width = reads = total = 0  # reads: the most of a query; total: of them all
    for i in order:
        length, n_read, count = queries[i].length, queries[i].n_read, len(batch) + 1
        slots = count * max(reads, n_read)
        spare = slots - total - n_read  # repeated positions at the head, because queries read unequally many
        full = count * width > room or slots * _HEAD_SHARE > room
        if batch and (full or (width - length) * _SLACK > width or (spare > _SPARE and spare * _HEAD_SHARE > slots)):
            yield batch
            batch, width, reads, total = [], 0, 0, 0
        width, reads, total = max(width, length), max(reads, n_read), total + n_read
        batch.append(i)
    if batch:
        yield batch
