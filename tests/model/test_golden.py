"""Losses that refactors must keep: same weights, same noise, same arithmetic. A change here needs a reason in its commit."""

import json
from pathlib import Path

import pytest
import torch

from sinkdlm import DiffusionLM
from sinkdlm.diffusion import corrupt, denoising_loss
from sinkdlm.noise import Stream, uniform
from small_models import VARIANTS, small_config, small_tokens

TESTS = Path(__file__).parents[1]
FILES = {"golden.json": [name for name in VARIANTS if name != "backbone"], "golden_backbones.json": ["backbone"]}


def exact_model(name: str) -> DiffusionLM:
    """A model whose weights are bit-equal on every machine. torch's normal draws are not: they differ by rounding between
    processors."""
    model = DiffusionLM(small_config(**VARIANTS[name])).double()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            drawn = uniform(11, Stream.WEIGHTS, *key.encode(), torch.arange(weight.numel())).view_as(weight) - 0.5
            weight.copy_(1 + drawn if key.endswith("norm.weight") else drawn)
    return model


def losses(name: str, steps: int = 3) -> list[float]:
    """Run a few steps of plain gradient descent in float64."""
    model = exact_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    for step in range(steps):
        tokens = small_tokens(8, 17, seed=step)
        noisy = corrupt(tokens, torch.arange(8) + 8 * step, seed=3407, mask_id=model.config.mask_id)
        loss = denoising_loss(model, tokens, noisy, denominator=tokens.numel()).total
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def golden() -> dict[str, list[float]]:
    return {name: found for file in FILES for name, found in json.loads((TESTS / file).read_text()).items()}


def test_golden_files_are_whole():
    assert set(golden()) == set(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_are_the_golden_ones(name):
    # Another machine's BLAS may add in another order; nothing else may differ.
    assert losses(name) == pytest.approx(golden()[name], rel=1e-12, abs=0)


if __name__ == "__main__":  # python tests/model/test_golden.py writes the files anew
    for file, names in FILES.items():
        (TESTS / file).write_text(json.dumps({name: losses(name) for name in names}, indent=1) + "\n")
