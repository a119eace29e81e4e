"""Choose again the tokens that a step commits, so that rows with a constraint stay in their languages.

What fits is known to constraint.py, on the host; what reads the vocabulary is here and stays on the device.

B rows of a batch, R rows of a policy, n positions predicted in a row, N tokens that are chosen, V vocabulary, C classes of tokens.
"""

import math
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from sinkdlm.errors import SamplingError
from sinkdlm.noise import counter, fold
from sinkdlm.sampling.constraint import Gap
from sinkdlm.sampling.drawing import add_noise, precise, temper
from sinkdlm.sampling.requests import TOKEN
from sinkdlm.sampling.unmasking import Policy

_BEYOND_CUT = 1e4  # nats by which top_k and top_p push tokens back: one is taken only where nothing else fits
_UNLIKELY = -1e30  # instead of -inf, so that a class of impossible tokens stays a choice
_MOST_LOGITS = 1 << 26  # logits that are read at once

_Cells = list[tuple[int, int]]  # of a row: place in the canvas and column among the predicted positions, in order


class ConstrainedRow(NamedTuple):
    own: int  # its number among its policy's rows
    row: int  # in the batch
    gap: Gap


def fit_tokens(
    policy: Policy,
    logits: Tensor,
    constrained: list[ConstrainedRow],
    *,
    keys: Tensor,
    positions: Tensor,
    taken: Tensor,
    tokens: Tensor,
    sure: Tensor,
) -> None:
    """Replace the tokens to be committed by those that keep a policy's rows in their languages. Waits for the device.

    logits (R, n, V); the rest (B, n). tokens, and sure, their probabilities, are overwritten."""
    places, picked, proposed = torch.stack([positions, taken, tokens]).tolist()
    waiting: list[tuple[ConstrainedRow, _Cells]] = []
    for one in constrained:
        cells = sorted((place, column) for column, place in enumerate(places[one.row]) if picked[one.row][column])
        given = [place for place, _ in cells], [proposed[one.row][column] for _, column in cells]
        if cells and (policy.temperature > 0 or not one.gap.keep(*given)):
            waiting.append((one, cells))
    n_rows = max(1, _MOST_LOGITS // (logits.shape[1] * logits.shape[2]))
    for begin in range(0, len(waiting), n_rows):
        _choose(policy, logits, waiting[begin : begin + n_rows], keys, tokens, sure)


def _choose(
    policy: Policy, logits: Tensor, waiting: list[tuple[ConstrainedRow, _Cells]], keys: Tensor, tokens: Tensor, sure: Tensor
) -> None:
    cells = [(one.own, one.row, column) for one, own_cells in waiting for _, column in own_cells]
    owns, rows, columns = torch.tensor(cells).T.to(logits.device)
    scored = precise(logits[owns, columns])  # (N, V)
    drawn = noisy = scored
    if policy.temperature > 0:
        kept = temper(policy, scored)
        drawn = torch.where(kept == -math.inf, scored / policy.temperature - _BEYOND_CUT, kept)
        own_keys = cast(Tensor, fold(keys[rows, columns], *([TOKEN] if policy.draws_order else [])))
        noisy = add_noise(drawn, own_keys, counter(drawn.shape[1], drawn.device))
    classes = _classes(waiting, scored)
    peak, mass = _by_class(drawn, noisy, classes, max(one.gap.language.n_classes for one, _ in waiting))
    chosen: list[int] = []
    for (_, _, gap), own_cells in waiting:
        span, n_classes = slice(len(chosen), len(chosen) + len(own_cells)), gap.language.n_classes
        own, places = peak[span, :n_classes], [place for place, _ in own_cells]
        chosen += gap.draw(places, own, mass[span, :n_classes]) if policy.temperature > 0 else gap.likeliest(places, own)
    fits = classes == torch.tensor(chosen)[:, None].to(classes.device)
    found = noisy.clamp_min(torch.finfo(noisy.dtype).min).masked_fill(~fits, -math.inf).argmax(1)
    certain = (drawn if policy.tempered else scored).softmax(-1).gather(1, found[:, None])[:, 0].to(sure.dtype)
    sure[rows, columns] = torch.where(found == tokens[rows, columns], sure[rows, columns], certain)
    tokens[rows, columns] = found


def _classes(waiting: list[tuple[ConstrainedRow, _Cells]], scored: Tensor) -> Tensor:
    """(N, V): the class of each token in the language of its row."""
    languages = {id(one.gap.language): one.gap.language for one, _ in waiting}
    if any(len(language.classes) != scored.shape[1] for language in languages.values()):
        raise SamplingError(f"constraint: made for another vocabulary; this denoiser's has {scored.shape[1]} tokens")
    table = torch.stack([torch.from_numpy(language.classes) for language in languages.values()]).to(scored.device)
    which = [[*languages].index(id(one.gap.language)) for one, cells in waiting for _ in cells]
    return table[torch.tensor(which).to(scored.device)]


def _by_class(logits: Tensor, noisy: Tensor, classes: Tensor, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits (N, V) and classes (N, V) -> the best noisy logit and the log-probability of each class, (N, C), on the host."""
    peak = noisy.new_full((len(noisy), n_classes), -torch.inf).scatter_reduce_(1, classes, noisy.clamp_min(_UNLIKELY), "amax")
    exact = logits.double()
    top = exact.new_full(peak.shape, -torch.inf).scatter_reduce_(1, classes, exact.clamp_min(_UNLIKELY), "amax")
    sums = torch.zeros_like(top).scatter_add_(1, classes, (exact - top.gather(1, classes)).exp())
    mass = (sums.log() + top - exact.logsumexp(1, keepdim=True)).nan_to_num_(nan=_UNLIKELY).clamp_min_(_UNLIKELY)
    both = torch.stack([peak.double(), mass]).cpu().numpy()
    return both[0], both[1]
