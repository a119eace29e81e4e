"""Which target tokens a Monte Carlo draw masks, and what the draw weighs: pure functions of a key.

Owns the estimators' randomness. Knows no tokens and no denoiser: a target is its number of tokens. Always computed on the host, so
that a draw is the same bits wherever the forwards run.

With l_i the log-probability of target token i given what is not masked, the any-order bound of a target of L tokens is the mean
over all orders of the sum of l_i, each token given the prefix and those before it in the order. Both estimators have this mean:

exact_k: exactly k of L are masked and their sum weighs L/k, with k even over 1..L. k = 1 + floor(L frac(u + i/b)) for draw i of a
    set of b, so that a set covers 1..L evenly. (LLaDA, Nie et al. 2025, rounds a linspace, which makes k slightly uneven.)
official: each is masked with probability t and the sum weighs 1/t, with t = frac(u + i/b). Its variance is unbounded near t = 0:
    one masked token there weighs 1/t.

In block diffusion, each block of a row draws as a target of its own: its bound is given the clean blocks before it, and the row's
bound is their sum.

R rows, S draw sets, b draws in a set, L target tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sinkdlm.noise import Stream, fold, hash_words, unit_interval

MONTE_CARLO = ("exact_k", "official")
_TIME = 0  # key of a set's time; its draws are numbered from 1
_LEAST_TIME = 2.0**-53


def noise_keys(seed: int, groups: Sequence[int]) -> Tensor:
    """(R,): the root key of all draws of each group."""
    return torch.as_tensor(hash_words(seed, int(Stream.LIKELIHOOD), torch.tensor(list(groups), dtype=torch.int64)))


def block_keys(keys: Tensor, blocks: Tensor) -> Tensor:
    """(R,): the keys of blocks of rows, which are numbered among those with targets; the first has its row's own key."""
    return torch.where(blocks == 0, keys, torch.as_tensor(fold(keys, -blocks)))  # a negative number is that of no set


def content_key(tokens: np.ndarray) -> int:
    """A number that tells rows of tokens apart: the sum of hashes of (place, token)."""
    return int(torch.as_tensor(hash_words(torch.arange(len(tokens)), torch.from_numpy(tokens))).sum())


def draw_masks(estimator: str, keys: Tensor, n_targets: int, sets: range, size: int) -> tuple[np.ndarray, np.ndarray]:
    """masked (R, S * b, L) bool and weight (R, S * b) float64 of some sets: functions of (key, set, draw, target token) alone.

    Target tokens are numbered within the target: two options of a question share a key, so the same places are masked in both.
    """
    begun = fold(keys[:, None, None, None], torch.arange(sets.start, sets.stop)[:, None, None])  # (R, S, 1, 1)
    words = torch.as_tensor(fold(begun, torch.arange(1, size + 1)[:, None], torch.arange(n_targets)))  # (R, S, b, L)
    steps = torch.arange(size, dtype=torch.float64)[:, None] / size
    times = (unit_interval(fold(begun, _TIME)) + steps).remainder(1.0).clamp_min(_LEAST_TIME)  # (R, S, b, 1)
    if estimator == "official":
        masked, whole, part = unit_interval(words) < times, 1, times
    else:
        whole, part = n_targets, 1 + (n_targets * times).floor().clamp_max(n_targets - 1)  # L and k
        first = (torch.arange(n_targets) < part).expand(words.shape)
        masked = torch.zeros_like(first).scatter(-1, words.argsort(dim=-1, stable=True), first)
    return masked.flatten(1, 2).numpy(), whole / part.flatten(1).numpy()
