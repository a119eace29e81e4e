"""AdamW, its learning rate, and the average of the weights. State is plain tensors by parameter name, ready for a checkpoint."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from sinkdlm.config.recipe import TrainSection
from sinkdlm.fast.shadow_weights import copy_to_update, mark_updated
from sinkdlm.kernels.available import has_kernels

MOMENTS = ("exp_avg", "exp_avg_sq")
_LARGE = 1 << 20  # elements from which a tensor's update is a kernel of its own
_MULTIPLIED = "blocks."  # how names of matrices begin that products in half precision read
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
    function rather than its class, which would load the compiler (1.5 s) to be made; on a GPU, large tensors by a kernel that
    leaves gradients as they are and goes over memory once (training_kernels.adamw).
    """

    def __init__(self, weights: Mapping[str, Tensor], train: TrainSection, *, rounds: torch.dtype | None = None) -> None:
        """weights: by name, as this process holds them: parameters, or its rows of them with their gradients beside them.

        rounds: of products, which find large matrices of blocks rounded to it by the update (rounded.py).
        """
        self.named, self._train, self._rounds = dict(weights), train, rounds
        self._moments = {
            moment: {name: torch.zeros_like(p, memory_format=torch.preserve_format) for name, p in self.named.items()}
            for moment in MOMENTS
        }
        self.set_updates(0)

    def set_updates(self, count: int) -> None:
        """How many updates the moments have seen, which corrects their bias."""
        device = next(iter(self.named.values())).device
        self._counts = torch.full((len(self.named),), float(count), dtype=torch.float32, device=device)
        self._updates = dict(zip(self.named, self._counts.unbind(), strict=True))

    @torch.no_grad()
    def step(self, lr: float, norm: Tensor | None = None, withheld: Tensor | None = None) -> None:
        """norm (): of the whole gradient, which is clipped by it. Gradients are used up.

        withheld (): 1 where nothing is to change after all, which the device finds out: nobody need wait for it to be known.
        """
        moving = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        divisor = None if norm is None else self._clip(norm, list(moving.values()))
        own = [name for name, gradient in moving.items() if _has_kernel(self.named[name], gradient)]
        others = [name for name in moving if name not in own]
        if own:
            self._step_large(own, moving, lr, divisor, withheld)
        if not others:
            return
        mean, square = ([self._moments[moment][name] for name in others] for moment in MOMENTS)
        adamw(
            [self.named[name] for name in others],
            [moving[name] for name in others],
            mean,
            square,
            [],  # of AMSGrad
            [self._updates[name] for name in others],
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

    def _step_large(
        self, names: list[str], gradients: Mapping[str, Tensor], lr: float, divisor: Tensor | None, withheld: Tensor | None
    ) -> None:
        from sinkdlm.kernels import dense as training_kernels

        weights, updates = ([held[name] for name in names] for held in (self.named, self._updates))
        made = self._counts.double() + 1
        bias = torch.stack([1 - beta**made for beta in self._train.betas]).float()  # of each moment and parameter
        number = {name: place for place, name in enumerate(self.named)}
        for name, weight in zip(names, weights, strict=True):
            mean, square = (self._moments[moment][name] for moment in MOMENTS)
            multiplies = self._rounds is not None and weight.dim() == 2 and name.startswith(_MULTIPLIED)
            copy = copy_to_update(weight, self._rounds) if multiplies and self._rounds is not None else None
            training_kernels.adamw(
                weight,
                gradients[name],
                mean,
                square,
                bias,
                number[name],
                copy=copy,
                lr=lr,
                betas=self._train.betas,
                eps=self._train.adam_eps,
                weight_decay=self._train.weight_decay,
                divisor=divisor,
                withheld=withheld,
            )
            torch.autograd.graph.increment_version(weight)  # which no kernel of Triton's does: a lane that is kept looks at it
            if copy is not None:
                mark_updated(weight, copy)
        torch._foreach_add_(updates, 1)
        if withheld is not None:
            torch._foreach_sub_(updates, [withheld] * len(updates))

    def _clip(self, norm: Tensor, gradients: list[Tensor]) -> Tensor | None:
        """What the update is to divide gradients by; nothing where they have been clipped."""
        if not _divides(gradients):
            torch.nn.utils.clip_grads_with_norm_(list(self.named.values()), self._train.clip, norm.to(gradients[0].dtype))
            return None
        return ((norm + _CLIP_EPS) / self._train.clip).clamp(min=1.0).float()

    def moments(self, moment: str) -> dict[str, Tensor]:
        return self._moments[moment]


def _divides(gradients: list[Tensor]) -> bool:
    """Whether the update itself clips, which on a GPU spares a pass over them. It divides by a float32, too coarse for float64."""
    return all(gradient.is_cuda and gradient.dtype == torch.float32 for gradient in gradients)


def _has_kernel(weight: Tensor, gradient: Tensor) -> bool:
    whole = weight.is_contiguous() and gradient.is_contiguous() and weight.dtype == gradient.dtype == torch.float32
    return weight.is_cuda and weight.numel() >= _LARGE and whole and has_kernels()


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
