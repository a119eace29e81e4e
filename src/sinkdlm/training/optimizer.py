"""AdamW, its learning rate, and the average of the weights. State is plain tensors by parameter name, ready for a checkpoint."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

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

    def __init__(self, model: nn.Module, train: TrainSection) -> None:
        self.named = dict(model.named_parameters())
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

    def clear(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.named.items():
            for moment in MOMENTS:
                yield f"{moment}.{name}", self.adamw.state[p][moment]


class Average:
    """An exponential moving average of the weights. Early on it forgets faster, so that it does not remember the initial ones."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int) -> None:
        """After update number `updates` (from 1)."""
        decay = min(self.decay, updates / (updates + 10))
        live = dict(model.named_parameters())
        torch._foreach_lerp_(list(self.weights.values()), [live[name].detach() for name in self.weights], 1 - decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """The model with the average in place of its weights."""
        live = dict(model.named_parameters())
        kept = {name: live[name].detach().clone() for name in self.weights}
        self._put(live, self.weights)
        try:
            yield
        finally:
            self._put(live, kept)

    @staticmethod
    @torch.no_grad()
    def _put(live: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            live[name].copy_(value)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            yield f"ema.{name}", weight
