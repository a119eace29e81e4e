"""AdamW, its learning rate, and the moving average of the weights. State is plain tensors by parameter name, for checkpoints."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from sinkdlm.config.recipe import TrainSection

MOMENTS = ("exp_avg", "exp_avg_sq")
_CLIP_EPS = 1e-6  # added to the norm, as torch's clipping does


def learning_rate(step: int, steps: int, train: TrainSection) -> float:
    """Learning rate of step 0..steps-1: linear warm-up, then a cosine down to min_lr."""
    warmup = min(steps, max(round(train.warmup * steps), train.min_warmup))
    if step < warmup:
        return train.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return train.min_lr + (train.lr - train.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


class Optimizer:
    """AdamW in one fused operation, with weight decay on every parameter, as in the official code.

    Its state exists from the start, so that it can be saved or loaded at any step. It calls torch's function: torch's class would
    load the compiler (1.5 s).
    """

    def __init__(self, weights: Mapping[str, Tensor], train: TrainSection) -> None:
        """weights: by name, as this process holds them: parameters, or its shards of them with their gradients."""
        self.named, self._train = dict(weights), train
        self.moments = {
            moment: {name: torch.zeros_like(p, memory_format=torch.preserve_format) for name, p in self.named.items()}
            for moment in MOMENTS
        }
        self.set_updates(0)

    def set_updates(self, count: int) -> None:
        """Set how many updates the moments have seen, for their bias correction."""
        device = next(iter(self.named.values())).device
        counts = torch.full((len(self.named),), float(count), dtype=torch.float32, device=device)
        self._updates = dict(zip(self.named, counts.unbind(), strict=True))

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor | None = None, withheld: Tensor | None = None) -> None:
        """Make one update; gradients are used up. norm (): of the whole gradient, for clipping.

        withheld (): 1 skips the update on the device, without a host sync.
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
        """Return what the update divides gradients by; None where they are clipped here."""
        if not _divides(gradients):
            torch.nn.utils.clip_grads_with_norm_(list(self.named.values()), self._train.clip, norm.to(gradients[0].dtype))
            return None
        return ((norm + _CLIP_EPS) / self._train.clip).clamp(min=1.0).float()


def _divides(gradients: list[Tensor]) -> bool:
    """Whether the update itself clips, which saves a pass on a GPU. Its divisor is float32: too coarse for float64."""
    return all(gradient.device.type == "cuda" and gradient.dtype == torch.float32 for gradient in gradients)


class Average:
    """Exponential moving average of the weights. It forgets faster at first, so that the initial weights soon drop out."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """weights: by name, as this process holds them; the average follows them."""
        self.decay, self._live = decay, {name: weight.detach() for name, weight in weights.items()}
        self.weights = {name: weight.clone() for name, weight in self._live.items()}

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Call it after update number `updates` (from 1)."""
        decay = min(self.decay, updates / (updates + 10))
        torch._foreach_lerp_(list(self.weights.values()), list(self._live.values()), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in place of the weights for this scope."""
        live = list(self._live.values())
        kept = [weight.clone() for weight in live]
        torch._foreach_copy_(live, list(self.weights.values()))
        try:
            yield
        finally:
            torch._foreach_copy_(live, kept)
