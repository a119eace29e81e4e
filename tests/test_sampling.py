import pytest
import torch

from conftest import small_model, small_tokens
from sinkdlm.errors import SamplingError
from sinkdlm.sampling import generate


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("steps", [None, 1, 4, 100])
def test_sampling_fills_the_canvas_and_never_edits_the_prompt(steps, temperature):
    model = small_model(n_sinks=1)
    prompt, mask_id = small_tokens(3, 5), model.config.mask_id
    with model.inference():
        out = generate(model.denoiser(), prompt=prompt, length=16, mask_id=mask_id, steps=steps, temperature=temperature, seed=1)
    assert out.steps == {None: 11, 1: 1, 4: 4, 100: 11}[steps]
    assert torch.equal(out.tokens[:, :5], prompt)
    assert out.tokens.shape == (3, 16)
    assert not bool((out.tokens == mask_id).any())


def test_a_first_request_is_the_same_alone_and_in_a_batch():
    model = small_model(n_sinks=1)
    prompt = small_tokens(4, 3)
    together, alone = (
        generate(model.denoiser(), prompt=rows, length=12, mask_id=model.config.mask_id, temperature=0.8, seed=5).tokens
        for rows in (prompt, prompt[:1])
    )
    assert torch.equal(together[:1], alone)
    other = generate(model.denoiser(), prompt=prompt, length=12, mask_id=model.config.mask_id, temperature=0.8, seed=6).tokens
    assert not torch.equal(other, together)


def test_the_surest_positions_come_first():
    """A denoiser that is sure of the last position: greedy steps commit it first, and see it from then on."""
    seen = []

    def denoise(tokens):
        seen.append(tokens.clone())
        logits = torch.zeros(*tokens.shape, 4, dtype=torch.float64)
        logits[:, :, 1] = torch.arange(tokens.shape[1], dtype=torch.float64)
        return logits

    out = generate(denoise, prompt=torch.zeros(1, 1, dtype=torch.int64), length=4, mask_id=4)
    assert [row[0].tolist() for row in seen] == [[0, 4, 4, 4], [0, 4, 4, 1], [0, 4, 1, 1]]
    assert out.tokens.tolist() == [[0, 1, 1, 1]]


def test_temperature_one_draws_from_the_softmax():
    probabilities = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    n = 4000
    out = generate(
        lambda tokens: probabilities.log().expand(*tokens.shape, 3).clone(),
        prompt=torch.zeros(n, 0, dtype=torch.int64),
        length=1,
        mask_id=3,
        temperature=1.0,
    )
    counts = torch.bincount(out.tokens.flatten(), minlength=3).double()
    chi_square = float(((counts - n * probabilities) ** 2 / (n * probabilities)).sum())
    assert chi_square < 13.8  # 0.999 quantile at 2 degrees of freedom


def test_a_mask_inside_the_vocabulary_is_never_written():
    out = generate(
        lambda tokens: torch.tensor([0.0, 9.0, 1.0]).expand(*tokens.shape, 3).clone(),
        prompt=torch.zeros(1, 1, dtype=torch.int64),
        length=3,
        mask_id=1,
    )
    assert out.tokens.tolist() == [[0, 2, 2]]


@pytest.mark.parametrize(("more", "words"), [({"length": 2}, "whole canvas"), ({"length": 5, "temperature": -1.0}, "0 or more")])
def test_bad_arguments_are_named(more, words):
    with pytest.raises(SamplingError, match=words):
        generate(lambda tokens: tokens, prompt=torch.zeros(1, 2, dtype=torch.int64), mask_id=4, **more)
