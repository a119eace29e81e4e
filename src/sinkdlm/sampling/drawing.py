"""From logits to candidates: guidance, a draw at a temperature, and a score that says how sure the prediction is.

`score_candidates` is what batch.py calls. Works row by row: no number depends on another row. Half-precision logits are read as
float32; nothing is computed in float64 unless the logits are.

N rows of logits, V vocabulary.
"""

import math

import torch
from torch import Tensor

from sinkdlm.kernels.sampling import draw_candidates
from sinkdlm.noise import counter, fold
from sinkdlm.sampling.unmasking import Policy

_CHUNK = 1 << 25  # elements of noise held at once
_WORD_BITS = 63


def precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def guide(conditional: Tensor, unconditional: Tensor, guidance: float) -> Tensor:
    """un + (w + 1)(cond - un), before anything is forbidden: -inf - -inf is no number. What the denoiser forbids stays so."""
    conditional = precise(conditional)
    away = (conditional - precise(unconditional)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return away.mul_(guidance).add_(conditional)


def cut(logits: Tensor, top_k: int | None, top_p: float | None) -> Tensor:
    """Keeps the k most likely tokens of a row, and of those the fewest whose probabilities reach p. Ties go to lower ids."""
    if top_k is None and top_p is None:
        return logits
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None and top_k < logits.shape[-1]:
        ordered = ordered.index_fill(-1, counter(logits.shape[-1], logits.device)[top_k:], -math.inf)
    if top_p is not None:
        chances = ordered.softmax(-1)
        beyond = chances.cumsum(-1) - chances >= top_p
        beyond[..., 0] = False
        ordered = ordered.masked_fill(beyond, -math.inf)
    return torch.empty_like(logits).scatter_(-1, ids, ordered)


def gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise -log(-log u) from 64-bit words.

    A float32 uniform has 2^-24 steps, so it can give no noise above 16.6 and cuts off what decides rare draws. Here 1 - u is an
    integer of 63 bits, which float32 holds to 24 significant ones however small it is: the tail reaches 43, further than a float64
    uniform's (36).
    """
    tail = ((words >> 1) & ((1 << _WORD_BITS) - 1)).to(dtype).mul_(2.0**-_WORD_BITS)
    tail = tail.clamp_(2.0 ** -(_WORD_BITS + 1), 1 - torch.finfo(dtype).eps)
    return torch.log1p(tail.neg_()).neg_().log_().neg_()


def _pick(logits: Tensor, keys: Tensor, words: Tensor) -> Tensor:
    """(N, V), keys (N,), words (V,) -> (N,): the argmax of logits + Gumbel noise is a draw from their softmax."""
    return (logits + gumbel(torch.as_tensor(fold(keys[:, None], words)), logits.dtype)).argmax(-1)


def draw(logits: Tensor, keys: Tensor) -> Tensor:
    """A token for each row of (N, V), from the softmax of its logits; keys (N,): 64 random bits that are the row's own."""
    words = counter(logits.shape[-1], logits.device)
    size = max(1, _CHUNK // logits.shape[-1])
    return torch.cat([_pick(rows, own, words) for rows, own in zip(logits.split(size), keys.split(size), strict=True)])


def log_odds_(logits: Tensor, tokens: Tensor) -> Tensor:
    """log p / (1 - p) of a token in each row's softmax: ordered like p, and exact where p rounds to 1. Uses logits up."""
    own = logits.gather(-1, tokens[..., None])
    others = logits.scatter_(-1, tokens[..., None], -math.inf).logsumexp(-1)
    return own[..., 0] - others


def margin(logits: Tensor) -> Tensor:
    """Probability of the best token less that of the second."""
    if logits.shape[-1] == 1:
        return torch.ones_like(logits[..., 0])
    best = logits.softmax(-1).topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


def negative_entropy(logits: Tensor) -> Tensor:
    return -torch.special.entr(logits.softmax(-1)).sum(-1)


def score_candidates(policy: Policy, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token for each row of (rows, n, V) logits, which are used up: (tokens, score, probability), (rows, n) each.

    keys (rows, n): random bits, where the temperature is above 0."""
    cuts = (keys is not None or policy.tempered) and (policy.top_k is not None or policy.top_p is not None)
    by_odds = policy.order not in ("margin", "entropy")
    if not cuts and by_odds and (fused := draw_candidates(logits, keys, policy.temperature, policy.tempered)):
        return *fused, fused[1].sigmoid()
    logits = precise(logits)
    drawn = logits if keys is None else logits / policy.temperature
    if cuts:
        drawn = cut(drawn, policy.top_k, policy.top_p)
    tokens = drawn.argmax(-1) if keys is None else draw(drawn.flatten(0, 1), keys.flatten()).view(keys.shape)
    scored = drawn if policy.tempered else logits
    score = {"margin": margin, "entropy": negative_entropy}[policy.order](scored) if not by_odds else None
    odds = log_odds_(scored, tokens)  # the last to read the logits
    return tokens, odds if score is None else score, odds.sigmoid()
