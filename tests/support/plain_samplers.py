"""Samplers of the official code, of LLaDA and of Dream, plainly from their descriptions: one row, one position at a time.

Independent of the package: they take a function from one row of tokens to its logits (T, V), and return the filled row.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Predict = Callable[[Tensor], Tensor]


def best_guess(logits: Tensor, mask_id: int) -> tuple[float, int]:
    """The most likely token at temperature 0 and its probability, [MASK] left out."""
    probabilities = [float(p) for p in torch.softmax(without_mask(logits, mask_id).double(), dim=0)]
    token = max(range(len(probabilities)), key=lambda word: probabilities[word])
    return probabilities[token], token


def without_mask(logits: Tensor, mask_id: int) -> Tensor:
    logits = logits.clone()
    logits[mask_id : mask_id + 1] = -torch.inf  # nothing, where [MASK] is no outcome anyway
    return logits


def reveal(row: Tensor, logits: Tensor, positions: list[int], count: int, mask_id: int) -> None:
    """Commits the `count` most confident of the masked positions."""
    guesses = {p: best_guess(logits[p], mask_id) for p in positions if int(row[p]) == mask_id}
    for position in sorted(guesses, key=lambda p: guesses[p][0], reverse=True)[:count]:
        row[position] = guesses[position][1]


def smdm_greedy(predict: Predict, row: Tensor, steps: int, mask_id: int, eps: float = 1e-5) -> Tensor:
    row, times = row.clone(), torch.linspace(1, eps, steps + 1)
    for i in range(steps):
        n_masked = int((row == mask_id).sum())
        count = n_masked if i == steps - 1 else int(n_masked * (1 - times[i + 1] / times[i]))
        reveal(row, predict(row), list(range(len(row))), count, mask_id)
    return row


def llada(predict: Predict, row: Tensor, given: int, steps: int, block: int, mask_id: int, guidance: float = 0.0) -> Tensor:
    """Low-confidence remasking: `block` and `steps` divide what there is to write, as LLaDA demands."""
    row, fixed = row.clone(), row != mask_id
    n_blocks = (len(row) - given) // block
    per_block = steps // n_blocks
    for number in range(n_blocks):
        inside = list(range(given + number * block, given + (number + 1) * block))
        n_masked = sum(int(row[p]) == mask_id for p in inside)
        counts = [n_masked // per_block] * per_block
        for i in range(n_masked % per_block):
            counts[i] += 1
        for count in counts:
            logits = predict(row)
            if guidance:
                unconditional = predict(torch.where(fixed, mask_id, row))
                logits = unconditional + (guidance + 1) * (logits - unconditional)
            reveal(row, logits, inside, count, mask_id)
    return row


def kept(logits: Tensor, top_p: float, top_k: int) -> set[int]:
    """Ids that Dream may draw: the likeliest until their sum passes p, then all of those as likely as the k-th."""
    ids, found, total = sorted(range(len(logits)), key=lambda token: -float(logits[token])), [], 0.0
    chances = torch.softmax(logits, dim=0)
    for token in ids:
        if total <= top_p:
            found.append(token)
        total += float(chances[token])
    least = float(logits[found[min(top_k, len(found)) - 1]])
    return {token for token in found if float(logits[token]) >= least}


def dream(
    predict: Predict, row: Tensor, steps: int, mask_id: int, eps: float = 1e-3, cuts: tuple[float, int] | None = None
) -> Tensor:
    """By entropy, least first. Row i of `predict` is for token i + 1; token 0 has its own. cuts: top_p and top_k."""
    row, times = row.clone(), torch.linspace(1, eps, steps + 1)
    for i in range(steps):
        logits = predict(row)
        guesses = {}
        for position in range(len(row)):
            if int(row[position]) == mask_id:
                own = without_mask(logits[max(0, position - 1)], mask_id).double()
                if cuts is not None:
                    own[list(set(range(len(own))) - kept(own, *cuts))] = -torch.inf
                terms = [float(p) for p in torch.softmax(own, dim=0)]
                guesses[position] = (-sum(p * math.log(p) for p in terms if p > 0), terms.index(max(terms)))
        count = len(guesses) if i == steps - 1 else int(len(guesses) * (1 - times[i + 1] / times[i]))
        for position in sorted(guesses, key=lambda p: guesses[p][0])[:count]:
            row[position] = guesses[position][1]
    return row
