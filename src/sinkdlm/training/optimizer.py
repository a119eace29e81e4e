"""AdamW, its learning rate, and the average of the weights. State is plain tensors by parameter name, ready for a checkpoint."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from sinkdlm.config import TrainSection

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, steps: int, train: TrainSection) -> float:
    """Of step 0..steps-1: linear warmup, then a cosine down to min_lr."""
    warmup = min(steps, max(round(train.warmup * steps), train.min_warmup))
    if step < warmup:
        return train.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return train.min_lr + (train.lr - train.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


class Optimizer:
    """AdamW on every parameter, weight decay on all of them as the official code has it; fused where there is a GPU.

    Its state exists from the start, so that saving before the first step and loading after any are the same operation.
    """

    def __init__(self, weights: Mapping[str, Tensor], train: TrainSection) -> None:
        """weights: by name, as this process holds them: parameters, or its rows of them with their gradients beside them."""
        self.named = dict(weights)
        self._on_gpu = all(p.is_cuda for p in self.named.values())
        self.adamw = torch.optim.AdamW(
            list(self.named.values()),
            lr=train.lr,
            betas=train.betas,
            eps=train.adam_eps,
            weight_decay=train.weight_decay,
            fused=self._on_gpu,
            foreach=not self._on_gpu,
        )
        for p in self.named.values():
            self.adamw.state[p] = {name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in MOMENTS}
        self.set_updates(0)

    def set_updates(self, count: int) -> None:
        """How many updates the moments have seen, which corrects their bias."""
        for p in self.named.values():
            home = p.device if self._on_gpu else torch.device("cpu")
            self.adamw.state[p]["step"] = torch.tensor(float(count), dtype=torch.float32, device=home)

    def step(self, lr: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()

    def moments(self, moment: str) -> dict[str, Tensor]:
        return {name: self.adamw.state[p][moment] for name, p in self.named.items()}


class Average:
    """An exponential moving average of the weights. Early on it forgets faster, so that it does not remember the initial ones."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """weights: by name, as this process holds them; the average follows them."""
        self.decay, self._live = decay, {name: weight.detach() for name, weight in weights.items()}
        self.weights = {name: weight.clone() for name, weight in self._live.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """After update number `updates` (from 1)."""
        decay = min(self.decay, updates / (updates + 10))
        torch._foreach_lerp_(list(self.weights.values()), list(self._live.values()), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The average in place of the weights."""
        kept = {name: weight.clone() for name, weight in self._live.items()}
        self._put(self.weights)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._live[name].copy_(value)
