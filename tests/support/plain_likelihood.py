"""Denoisers that know the truth, and likelihoods written plainly: one row, one mask, one token at a time.

A denoiser derived from a joint distribution gives the same log p in every order, so that every estimator has a known mean.
"""

import itertools
import math

import torch
from torch import Tensor


class TableDenoiser:
    """Logits of every canvas of `length` places over 3 words and [MASK] = 3, from a table: (4 ** length, length, 3)."""

    mask_id = 3

    def __init__(self, table: Tensor, length: int) -> None:
        self.table, self.places = table, 4 ** torch.arange(length)

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.table[(tokens * self.places).sum(1)]

    @classmethod
    def at_random(cls, length: int, seed: int = 0) -> "TableDenoiser":
        """A denoiser of no joint distribution: the order matters."""
        return cls(torch.randn(4**length, length, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), length)

    @classmethod
    def of_joint(cls, joint: Tensor) -> "TableDenoiser":
        length = joint.dim()
        table = torch.empty(4**length, length, 3, dtype=torch.float64)
        for canvas in itertools.product(range(4), repeat=length):
            mass = joint
            for place, word in enumerate(canvas):
                if word != cls.mask_id:
                    mass = mass * (torch.arange(3) == word).view([-1 if axis == place else 1 for axis in range(length)])
            code = sum(word * 4**place for place, word in enumerate(canvas))
            for place in range(length):
                table[code, place] = mass.sum([axis for axis in range(length) if axis != place]).log()
        return cls(table, length)


def random_joint(length: int, seed: int = 0) -> Tensor:
    weights = torch.randn([3] * length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(1.5).exp()
    return weights / weights.sum()


class MarkovDenoiser:
    """Exact conditionals of a sticky Markov chain of `words` words: what is masked depends on the nearest tokens on both sides."""

    def __init__(self, words: int = 5, stay: float = 0.85, longest: int = 128) -> None:
        self.mask_id = words
        drift = torch.rand(words, words, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.step = stay * torch.eye(words, dtype=torch.float64) + (1 - stay) * drift / drift.sum(1, keepdim=True)
        powers = [torch.eye(words, dtype=torch.float64)]
        for _ in range(longest):
            powers.append(powers[-1] @ self.step)
        self.first = torch.linalg.matrix_power(self.step, 4096)[0]
        self.powers = torch.stack(powers)

    def __call__(self, tokens: Tensor) -> Tensor:
        width = tokens.shape[1]
        places, known = torch.arange(width), tokens != self.mask_id
        left = torch.where(known, places, -1).cummax(1).values
        left = torch.cat([torch.full_like(left[:, :1], -1), left[:, :-1]], dim=1)  # strictly before
        right = torch.where(known, places, width).flip(1).cummin(1).values.flip(1)
        right = torch.cat([right[:, 1:], torch.full_like(right[:, :1], width)], dim=1)
        before = self.powers[places - left.clamp_min(0), tokens.gather(1, left.clamp_min(0)) % self.mask_id]
        before = torch.where((left < 0)[..., None], self.first, before)
        after = self.powers.transpose(1, 2)[
            right.clamp_max(width - 1) - places, tokens.gather(1, right.clamp_max(width - 1)) % self.mask_id
        ]
        after = torch.where((right == width)[..., None], 1.0, after)
        return before.log() + after.log()

    def sample(self, length: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        row = [int(torch.multinomial(self.first, 1, generator=generator))]
        while len(row) < length:
            row.append(int(torch.multinomial(self.step[row[-1]], 1, generator=generator)))
        return row

    def log_joint(self, row: list[int], given: int = 0) -> float:
        """log P(row[given:] | row[:given])."""
        steps = [self.first[row[0]], *(self.step[a, b] for a, b in itertools.pairwise(row))]
        return float(torch.stack(steps)[given:].log().sum())


def masked_log_probs(
    denoise, row: list[int], targets: list[int], masked: list[int], mask_id: int, guidance: float = 0.0
) -> dict[int, float]:
    """log p of each masked target token, by the paper's formulas: guidance first, then [MASK] is excluded."""
    canvas = [mask_id if place in masked else token for place, token in enumerate(row)]
    logits = denoise(torch.tensor([canvas]))[0].double()
    if guidance:
        blank = [token if place in targets else mask_id for place, token in enumerate(canvas)]
        unconditional = denoise(torch.tensor([blank]))[0].double()
        logits = unconditional + (guidance + 1) * (logits - unconditional)
    found = {}
    for place in masked:
        exponentials = [math.exp(float(value)) for word, value in enumerate(logits[place]) if word != mask_id]
        found[place] = float(logits[place, row[place]]) - math.log(sum(exponentials))
    return found


def chain(denoise, row: list[int], order: list[int], targets: list[int], mask_id: int, guidance: float = 0.0) -> float:
    """log p of the targets one after another in an order, each given the prefix and those before it."""
    return sum(masked_log_probs(denoise, row, targets, order[i:], mask_id, guidance)[place] for i, place in enumerate(order))


def any_order(denoise, row: list[int], targets: list[int], mask_id: int, guidance: float = 0.0) -> float:
    """The mean of `chain` over all orders."""
    orders = list(itertools.permutations(targets))
    return sum(chain(denoise, row, list(order), targets, mask_id, guidance) for order in orders) / len(orders)
