"""Measure how fast this CPU trains a recipe, with a few steps on made-up tokens. Plans need it: no table covers CPUs."""

import time

import torch

from sinkdlm.config.recipe import Recipe
from sinkdlm.diffusion import corrupt, denoising_loss
from sinkdlm.fast import accelerate
from sinkdlm.fast.objective import chunked_nll
from sinkdlm.model.model import DiffusionLM
from sinkdlm.planning.formulas import training_flops
from sinkdlm.training.adapter import add_adapter
from sinkdlm.training.optimizer import Optimizer

_WANTED = 2e10  # FLOPs of a step that is long enough to time
_MOST = 5e11  # FLOPs of a row above which nothing is tried: tens of seconds on one core
_STEPS = 3
_PATIENCE = 2.0  # seconds; a first step longer than this is the only one


def tokens_per_second(recipe: Recipe) -> float | None:
    """Tokens per second in float32 on this machine's CPU; None if a single row would take too long."""
    length = recipe.data.length
    of_row = length * training_flops(recipe.model, length)
    if of_row > _MOST:
        return None
    rows = max(1, min(recipe.train.batch, int(_WANTED / of_row)))
    model = accelerate(DiffusionLM(recipe.model))
    add_adapter(model, recipe)
    optimizer = Optimizer(dict(model.named_parameters()), recipe.train)
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    seconds = []
    for step in range(1 + _STEPS):  # the first warms up
        began = time.perf_counter()
        noisy = corrupt(tokens, torch.arange(step * rows, (step + 1) * rows), seed=0, mask_id=recipe.model.mask_id)
        denoising_loss(model, tokens, noisy, denominator=float(tokens.numel()), nll=chunked_nll).total.backward()
        optimizer.step(recipe.train.lr)
        model.zero_grad()
        seconds.append(time.perf_counter() - began)
        if seconds[0] > _PATIENCE:
            break
    return rows * length / min(seconds) / (1 + recipe.blocks.complementary)  # whose two forwards cost the same
