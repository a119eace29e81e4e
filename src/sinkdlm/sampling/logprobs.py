"""Log-probabilities of committed tokens and of the likeliest tokens at their positions, for batches in which a row asks for them.

They are the model's own: after guidance and without ids that are never written, before penalties, temperature and cuts. Each is of
the step that committed the token. Knows no policy; a batch in which no row asks has no such object.

B rows of a batch, R rows of a group, n positions predicted in a row, T canvas, k likeliest tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LogProbs(NamedTuple):
    """tokens (T,): of each token, NaN where none was written. values, ids (T, k): of the likeliest, in falling order."""

    tokens: Tensor
    values: Tensor
    ids: Tensor

    def cut(self, start: int, stop: int) -> "LogProbs":
        """A copy on the CPU, which the batch does not change."""
        return LogProbs(*(part[start:stop].to("cpu", copy=True) for part in self))


class LogProbTable:
    """The log-probabilities of a batch's rows."""

    def __init__(self, n_rows: int, width: int, k: int, device: torch.device) -> None:
        self._k = k
        self._tokens = torch.full((n_rows, width), torch.nan, device=device)
        self._values = torch.full((n_rows, width, k), -torch.inf, device=device)
        self._ids = torch.zeros((n_rows, width, k), dtype=torch.int64, device=device)
        self._read: list[tuple[Any, Tensor]] = []  # of this step: a group's rows and the log-probabilities (R, n, V)

    def row(self, row: int, length: int, k: int) -> LogProbs:
        return LogProbs(self._tokens[row, :length], self._values[row, :length, :k], self._ids[row, :length, :k])

    def copy(self, rows: Tensor, other: "LogProbTable", theirs: Tensor) -> None:
        """Take over rows of another batch."""
        span, k = min(self._tokens.shape[1], other._tokens.shape[1]), min(self._k, other._k)
        self._tokens[rows, :span] = other._tokens[theirs, :span]
        for mine, given in ((self._values, other._values), (self._ids, other._ids)):
            mine[rows, :span, :k] = given[theirs, :span, :k]

    def inherit(self, rows: Tensor, parents: Tensor, own: Tensor) -> None:
        """Take over from other rows what is not their own (R, T)."""
        for mine in (self._tokens, self._values, self._ids):
            mine[rows] = mine[rows].where(own if mine.dim() == 2 else own[..., None], mine[parents])

    def read(self, rows: Any, logits: Tensor) -> None:
        """Before tokens are drawn, which overwrites the logits (R, n, V)."""
        self._read.append((rows, logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))))

    def write(self, positions: Tensor, taken: Tensor, tokens: Tensor) -> None:
        """After it: positions, tokens and whether they are committed, (B, n) each."""
        for rows, table in self._read:
            own = table.gather(-1, tokens[rows][..., None])[..., 0]
            values, ids = table.topk(min(self._k, table.shape[-1]), dim=-1)
            self._scatter(self._tokens, rows, positions[rows], taken[rows], own)
            for mine, found in ((self._values, values), (self._ids, ids)):
                self._scatter(mine[..., : found.shape[-1]], rows, positions[rows], taken[rows], found)
        self._read.clear()

    @staticmethod
    def _scatter(mine: Tensor, rows: Any, positions: Tensor, taken: Tensor, found: Tensor) -> None:
        if found.dim() == 3:
            positions, taken = (part[..., None].expand(found.shape) for part in (positions, taken))
        old = mine[rows]
        mine[rows] = old.scatter(1, positions, torch.where(taken, found.to(mine.dtype), old.gather(1, positions)))


def table_for(asked: Sequence[int | None], width: int, device: torch.device) -> LogProbTable | None:
    """asked: for each row the likeliest tokens to keep; None: the row does not ask."""
    most = max((k for k in asked if k is not None), default=None)
    return None if most is None else LogProbTable(len(asked), width, most, device)
