"""AdamW, its learning rate, and the average of the weights. State is plain tensors by parameter name, ready for a checkpoint."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from sinkdlm.config.recipe import TrainSection

MOMENTS = ("exp_avg", "exp_avg_sq")
_CLIP_EPS = 1e-6  # beside a norm, as torch clips


def learning_rate(step: int, steps: int, train: TrainSection) -> float:
    """Of step 0..steps-1: linear warmup, then a cosine down to min_lr."""
    warmup = min(steps, max(round(train.warmup * steps), train.min_warmup))
    if step < warmup:
        return train.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return train.min_lr + (train.lr - train.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


class Optimizer:
    """AdamW on every parameter, weight decay on all of them as the official code has it, as one fused operation.

    Its state exists from the start, so that saving before the first step and loading after any are the same operation. By torch's
    function rather than its class, which would load the compiler (1.5 s) to be made.
    """

    def __init__(self, weights: Mapping[str, Tensor], train: TrainSection) -> None:
        """weights: by name, as this process holds them: parameters, or its rows of them with their gradients beside them."""
        self.named, self._train = dict(weights), train
        self.moments = {
            moment: {name: torch.zeros_like(p, memory_format=torch.preserve_format) for name, p in self.named.items()}
            for moment in MOMENTS
        }
        self.set_updates(0)

    def set_updates(self, count: int) -> None:
        """How many updates the moments have seen, which corrects their bias."""
        device = next(iter(self.named.values())).device
        counts = torch.full((len(self.named),), float(count), dtype=torch.float32, device=device)
        self._updates = dict(zip(self.named, counts.unbind(), strict=True))

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor | None = None, withheld: Tensor | None = None) -> None:
        """norm (): of the whole gradient, which is clipped by it. Gradients are used up.

        withheld (): 1 where nothing is to change after all; the device finds out, so that the host need not wait.
        """
        moving = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        if not moving:
            return
        divisor = None if norm is None else self._clip(norm, list(moving.values()))
        mean, square = ([self.moments[moment][name] for name in moving] for moment in MOMENTS)
        adamw(
            [self.named[name] for name in moving],
            list(moving.values()),
            mean,
            square,
            [],  # of AMSGrad
            [self._updates[name] for name in moving],
            fused=True,
            amsgrad=False,
            beta1=self._train.betas[0],
            beta2=self._train.betas[1],
            lr=lr,
            weight_decay=self._train.weight_decay,
            eps=self._train.adam_eps,
            maximize=False,
            grad_scale=divisor,
            found_inf=withheld,
        )

    def _clip(self, norm: Tensor, gradients: list[Tensor]) -> Tensor | None:
        """What the update is to divide gradients by; nothing where they have been clipped."""
        if not _divides(gradients):
            torch.nn.utils.clip_grads_with_norm_(list(self.named.values()), self._train.clip, norm.to(gradients[0].dtype))
            return None
        return ((norm + _CLIP_EPS) / self._train.clip).clamp(min=1.0).float()


def _divides(gradients: list[Tensor]) -> bool:
    """Whether the update itself clips, which on a GPU spares a pass over them. It divides by a float32, too coarse for float64."""
    return all(gradient.device.type == "cuda" and gradient.dtype == torch.float32 for gradient in gradients)


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
        live = list(self._live.values())
        kept = [weight.clone() for weight in live]
        torch._foreach_copy_(live, list(self.weights.values()))
        try:
            yield
        finally:
            torch._foreach_copy_(live, kept)
