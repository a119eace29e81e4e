"""Turn logits into candidates: apply guidance and penalties, draw at a temperature, score how sure the prediction is.

`score_candidates` is what batch.py calls. Works row by row: no number depends on another row. Half-precision logits are read as
float32; nothing is computed in float64 unless the logits are.

N rows of logits, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sinkdlm.kernels.sampling import draw_candidates
from sinkdlm.noise import counter, fold
from sinkdlm.sampling.requests import ORDER
from sinkdlm.sampling.unmasking import Policy

_CHUNK = 1 << 25  # elements of noise held at once
_WORD_BITS = 63


def precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def guide(conditional: Tensor, unconditional: Tensor, guidance: float) -> Tensor:
    """un + (w + 1)(cond - un), before we forbid tokens: -inf - -inf is NaN. What the denoiser forbids stays forbidden."""
    conditional = precise(conditional)
    away = (conditional - precise(unconditional)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return away.mul_(guidance).add_(conditional)


def penalise(logits: Tensor, tokens: Tensor, penalty: float, exempt: Sequence[int]) -> Tensor:
    """(R, n, V), tokens (R, T) -> (R, n, V): make the tokens that stand in a row less likely, as CTRL's repetition penalty does.

    Of tokens (the canvas) ids without a logit and exempt ones are left out."""
    vocab = logits.shape[-1]
    ids = tokens.clamp_max(vocab)
    for token in exempt:
        ids = ids.masked_fill(ids == token, vocab)
    there = torch.zeros(len(ids), vocab + 1, dtype=torch.bool, device=ids.device).scatter_(1, ids, True)[:, None, :vocab]
    logits = precise(logits)
    return torch.where(there, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def cut(logits: Tensor, top_k: int | None, top_p: float | None, min_p: float = 0.0) -> Tensor:
    """Dream's cuts, in its order: keep the fewest tokens whose probabilities pass p, and of those all as likely as the k-th. Then
    min_p: keep those at least that share as likely as the likeliest.

    Of equally likely tokens p keeps the lower ids."""
    if top_p is not None and top_p < 1:
        ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
        beyond = ordered.softmax(-1).cumsum(-1).roll(1, -1) > top_p  # the sum of all before
        beyond[..., 0] = False
        logits = logits.masked_fill(torch.empty_like(beyond).scatter_(-1, ids, beyond), -math.inf)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], -math.inf)
    if min_p:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -math.inf)
    return logits


def temper(policy: Policy, logits: Tensor) -> Tensor:
    """The logits that tokens are drawn from: at the policy's temperature, and -inf where it cuts."""
    drawn = logits / policy.temperature if policy.temperature > 0 else logits
    return cut(drawn, policy.top_k, policy.top_p, policy.min_p) if _cuts(policy) else drawn


def _cuts(policy: Policy) -> bool:
    return (policy.temperature > 0 or policy.tempered) and policy.cuts


def gumbel(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise -log(-log u) from 64-bit words.

    A float32 uniform has steps of 2^-24, so its noise ends at 16.6 and rare tokens are never drawn. Here 1 - u is a 63-bit integer,
    of which float32 keeps 24 significant bits however small it is: the tail reaches 43, further than a float64 uniform's (36).
    """
    tail = ((words >> 1) & ((1 << _WORD_BITS) - 1)).to(dtype).mul_(2.0**-_WORD_BITS)
    tail = tail.clamp_(2.0 ** -(_WORD_BITS + 1), 1 - torch.finfo(dtype).eps)
    return torch.log1p(tail.neg_()).neg_().log_().neg_()


def add_noise(logits: Tensor, keys: Tensor, words: Tensor) -> Tensor:
    """(N, V), keys (N,), words (V,) -> (N, V): logits with Gumbel noise, whose argmax is a draw from their softmax."""
    return logits + gumbel(torch.as_tensor(fold(keys[:, None], words)), logits.dtype)


def draw(logits: Tensor, keys: Tensor) -> Tensor:
    """Draw a token for each row of (N, V) from the softmax of its logits; keys (N,): 64 random bits per row."""
    words = counter(logits.shape[-1], logits.device)
    size = max(1, _CHUNK // logits.shape[-1])
    return torch.cat(
        [add_noise(rows, own, words).argmax(-1) for rows, own in zip(logits.split(size), keys.split(size), strict=True)]
    )


def log_odds_(logits: Tensor, tokens: Tensor) -> Tensor:
    """log p / (1 - p) of a token in each row's softmax: ordered like p, and exact where p rounds to 1. Works in the logits' memory
    and leaves them as they were."""
    own = logits.gather(-1, tokens[..., None])
    others = logits.scatter_(-1, tokens[..., None], -math.inf).logsumexp(-1)
    logits.scatter_(-1, tokens[..., None], own)
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
    """Draw a token for each row of (rows, n, V) logits: (tokens, score, probability), (rows, n) each.

    keys (rows, n): random bits, where tokens or positions are drawn at a temperature above 0."""
    tokens, score, sure = _draw_scored(policy, logits, keys if policy.temperature > 0 else None)
    if policy.order_temperature and keys is not None:
        # The k best of these are k positions drawn one after the other, without replacement, by softmax(confidence / temperature).
        noise = gumbel(torch.as_tensor(fold(keys, ORDER)), score.dtype)
        score = (sure if policy.order == "confidence" else score) + noise * policy.order_temperature
    for token in policy.last_ids:
        score = score.masked_fill(tokens == token, -math.inf)
    return tokens, score, sure


def _draw_scored(policy: Policy, logits: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    by_odds = policy.order not in ("margin", "entropy")
    if not _cuts(policy) and by_odds and (fused := draw_candidates(logits, keys, policy.temperature, policy.tempered)):
        return *fused, fused[1].sigmoid()
    logits = precise(logits)
    drawn = temper(policy, logits)
    tokens = drawn.argmax(-1) if keys is None else draw(drawn.flatten(0, 1), keys.flatten()).view(keys.shape)
    scored = drawn if policy.tempered else logits
    score = {"margin": margin, "entropy": negative_entropy}[policy.order](scored) if not by_odds else None
    odds = log_odds_(scored, tokens)
    return tokens, odds if score is None else score, 1 / (1 + odds.neg().exp())  # sigmoid rounds by its place in a tensor
