"""Float8 inference: what is rounded, how large the errors are, and that a rounded model is not saved as the original."""

import pytest
import torch
from torch import nn

from sinkdlm import DiffusionLM, ModelConfig
from sinkdlm.fast.quantized import DTYPE, Float8Linear, round_rows, to_float8
from sinkdlm.sampling import generate
from small_models import small_model, small_tokens

SHAPE = {"vocab_size": 64, "n_layers": 2, "n_heads": 4, "d_model": 64, "d_ff": 96, "context_length": 64, "n_sinks": 1}


def test_rows_are_rounded_by_scales_of_their_own():
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-6], [1.0], [3e4], [0.0], [1e-30]])
    rows, scale = round_rows(x)
    assert rows.dtype == DTYPE
    error = (rows.float() * scale - x).abs() / x.abs().amax(1, keepdim=True).clamp_min(1e-9)
    assert error.max() < 2**-4  # half a step of 3 bits, at the top of a row
    assert (rows[3].float() == 0).all()


def test_a_product_is_that_of_the_rounded_factors():
    linear = nn.Linear(32, 48).requires_grad_(False)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    (rows, scale), (weight, weight_scale) = round_rows(x.view(-1, 32)), round_rows(linear.weight)
    expected = (rows.double() * scale) @ (weight.double() * weight_scale).T + linear.bias
    torch.testing.assert_close(Float8Linear(linear)(x).double().view(-1, 48), expected, rtol=1e-5, atol=1e-5)


def test_the_model_stays_close_and_only_its_blocks_are_rounded():
    exact, model = (DiffusionLM(ModelConfig(**SHAPE), seed=0) for _ in range(2))
    to_float8(model)
    rounded = [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
    assert len(rounded) == 4 * SHAPE["n_layers"]
    assert not [name for name in rounded if not name.startswith("blocks.")]
    tokens = torch.arange(60).view(2, 30)
    with exact.inference(), model.inference():
        difference = (model(tokens) - exact(tokens)).norm() / exact(tokens).norm()
        assert 1e-4 < difference < 0.1
        before = model(tokens)
        assert torch.equal(model(tokens), before)  # with the lane cached
        out = generate(model.denoiser(), prompt=tokens[:, :4], length=12, mask_id=64)
    assert (out.tokens < 64).all()


def test_shapes_that_the_products_do_not_take_are_left_alone():
    model = to_float8(small_model(dtype=torch.float32))  # width 24
    assert not any(isinstance(module, Float8Linear) for module in model.modules())
    model(small_tokens(1, 5))


def test_it_is_not_saved():
    with pytest.raises(RuntimeError, match="save the model that it was made from"):
        to_float8(DiffusionLM(ModelConfig(**SHAPE))).state_dict()
