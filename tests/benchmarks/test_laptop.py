"""The measure of the laptop benchmark."""

import math

import numpy as np
import pytest
import torch
from benchmarks.laptop import SHARES, entropy, losses_by_share

from sinkdlm import DiffusionLM, ModelConfig


def test_a_model_that_knows_nothing_but_frequencies_is_at_their_entropy():
    model = DiffusionLM(ModelConfig.preset("laptop", vocab_size=8, n_layers=1))
    tokens = torch.randint(0, 2, (40, 128), generator=torch.Generator().manual_seed(0)) * 3  # ids 0 and 3
    assert entropy(tokens.flatten().numpy()) == pytest.approx(math.log(2), abs=1e-3)
    with torch.no_grad():
        model.norm.weight.zero_()  # every logit is 0
    for found in losses_by_share(model, tokens).values():
        assert found["loss"] == pytest.approx(math.log(8), abs=1e-5)
        assert found["stderr"] < 1e-5
    assert entropy(np.array([5, 5])) == 0


def test_the_error_covers_the_difference_between_texts():
    model = DiffusionLM(ModelConfig.preset("laptop", vocab_size=64, n_layers=1), seed=3)
    draw = torch.Generator().manual_seed(1)
    found = [losses_by_share(model, torch.randint(0, 64, (24, 32), generator=draw)) for _ in range(12)]
    for share in SHARES:
        losses = torch.tensor([one[f"{share:g}"]["loss"] for one in found])
        told = sum(one[f"{share:g}"]["stderr"] for one in found) / len(found)
        assert float(losses.std()) == pytest.approx(told, rel=0.6)
