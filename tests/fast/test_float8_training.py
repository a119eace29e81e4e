"""Training in float8: rounding and scales, gradients of the matmuls, and that a model learns with them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from comparing import DEVICE, random
from sinkdlm import DiffusionLM, ModelConfig, fast
from sinkdlm.diffusion import corrupt, denoising_loss
from sinkdlm.fast import blocks
from sinkdlm.fast.float8_training import fits, matmul, predictions_of, swiglu_mlp
from sinkdlm.fast.runner import FastRunner
from sinkdlm.kernels import float8_ops as ops
from sinkdlm.kernels.float8_format import GRADIENTS, TOKENS, VALUES, padded, scale_of
from small_models import small_model, small_tokens

SHAPE = {"vocab_size": 16, "n_layers": 2, "n_heads": 2, "d_model": 32, "d_ff": 48, "context_length": 32, "n_sinks": 1}


def coarse(*shape, amax, seed):
    """Magnitudes from amax / 8 to amax, amax included: after rounding to float8, their matmuls are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.empty(shape).uniform_(amax / 8, amax, generator=generator)
    sizes.view(-1)[0] = amax
    return sizes * (torch.rand(shape, generator=generator) < 0.5).float().mul(2).sub(1)


def rounded(x, digits):
    """Round to a number of binary digits, ties to even, as float8 rounds its normal numbers."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp((mantissa * 2**digits).round() / 2**digits, exponent)


def relative(found, wanted):
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


# -- matmuls --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [32, 33])
def test_a_matmul_is_exactly_that_of_rounded_factors(tokens):
    """Scales by hand: the largest e4m3 is 448 = 512 * 0.875, between 64 * 5 and 128 * 5; the largest e5m2 is 57344, between
    2^8 * 3 and 2^16 * 3."""
    x, weight = coarse(tokens, 48, amax=5.0, seed=0), coarse(16, 48, amax=0.875, seed=1)
    grad = coarse(tokens, 16, amax=3.0, seed=2)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = matmul(*leaves, torch.float32)
    x8, w8, g8 = rounded(x * 64, 4), rounded(weight * 512, 4), rounded(grad * 2**8, 3)
    assert torch.equal(out.double(), x8 @ w8.T / 64 / 512)
    grad_x, grad_weight = torch.autograd.grad(out, leaves, grad)
    assert torch.equal(grad_x.double(), g8 @ w8 / 2**8 / 512)
    assert torch.equal(grad_weight.double(), g8.T @ x8 / 2**8 / 64)


def test_a_row_is_rounded_alike_whatever_stands_beside_it():
    x, weight = coarse(8, 32, amax=5.0, seed=0), coarse(16, 32, amax=0.5, seed=1)
    x[4:] *= 1.3
    assert torch.equal(matmul(x, weight, torch.float32)[:4], matmul(x[:4], weight, torch.float32))


def test_matmuls_are_near_the_exact_ones():
    """Rounding to 3 bits (values) or 2 (gradients) errs by at most 2^-4 or 2^-3 of a number, and errors do not add up."""
    x, weight, grad = (
        random(3, 11, 32, dtype=torch.bfloat16),
        random(48, 32, seed=1),
        random(3, 11, 48, seed=2, dtype=torch.bfloat16),
    )
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    with torch.autocast(DEVICE, torch.bfloat16):
        found = matmul(*leaves, torch.bfloat16)
    wanted = functional.linear(*exact)
    assert (found.shape, found.dtype) == (wanted.shape, torch.bfloat16)
    assert 0.005 < relative(found, wanted) < 2**-4
    grads = torch.autograd.grad(found, leaves, grad)
    assert [one.dtype for one in grads] == [torch.bfloat16, torch.float32]
    for one, true in zip(grads, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
        assert 0.01 < relative(one, true) < 2**-3


def test_the_feed_forward_part_is_its_matmuls_and_swiglu():
    x, grad = random(2, 9, 32), random(2, 9, 32, seed=3)
    weights = random(96, 32, seed=1), random(32, 48, seed=2)
    results = []
    for whole in (False, True):
        leaves = [one.clone().requires_grad_() for one in (x, *weights)]
        if whole:
            out = swiglu_mlp(*leaves, torch.float32)
        else:
            gate, up = matmul(*leaves[:2], torch.float32).chunk(2, -1)
            out = matmul(gate * torch.sigmoid(gate) * up, leaves[2], torch.float32)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    (out, *parts), (whole_out, *wholes) = results
    assert torch.equal(out, whole_out)
    assert torch.equal(parts[2], wholes[2])  # from the same rounded values
    for part, one in zip(parts[:2], wholes[:2], strict=True):
        assert relative(one, part.double()) < 1e-2  # a tie may round the other way


def test_zeros_and_what_is_not_finite_stay_so():
    weight = random(16, 16, seed=1).requires_grad_()
    assert (matmul(torch.zeros(3, 16, device=DEVICE), weight, torch.float32) == 0).all()
    for bad in (float("inf"), float("nan")):
        x = random(3, 16)
        x[1, 2] = bad
        assert not torch.isfinite(matmul(x, weight, torch.float32)[1]).any()


def test_predictions_change_no_gradient():
    layer, x, grads = nn.Linear(32, 48, bias=False, device=DEVICE), random(5, 32), []
    for seed in range(3):  # another magnitude each time
        leaves = [(x * 2.0 ** (5 * seed)).requires_grad_(), layer.weight]
        for predictions in (None, predictions_of(layer, layer.weight)):
            out = matmul(*leaves, torch.float32, predictions)
            grads.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
        assert all(torch.equal(one, other) for one, other in zip(*grads[-2:], strict=True))
    assert predictions_of(layer, layer.weight) is predictions
    assert predictions[:3, 0].all()
    assert not any("predict" in name for name in layer.state_dict())


def test_scales_of_gradients_are_every_eighth_power_of_two():
    amax = torch.logspace(-20, 20, 4001, dtype=torch.float64).float()
    scales = scale_of(amax, GRADIENTS)
    largest = torch.finfo(GRADIENTS).max
    assert ((amax * scales <= largest) & (amax * scales * 256 > largest)).all()
    assert len(scales.unique()) == 18  # 40 decades are 133 powers of two
    assert ((scales.log2() % 8) == 0).all()
    values = scale_of(amax, VALUES)
    assert ((amax * values <= 448) & (amax * values * 2 > 448)).all()


@pytest.mark.parametrize("amax", [1.0, 3.0, 100.0, 223.9, 224.0, 224.1, 1e-9])
def test_gradients_down_to_a_two_millionth_of_the_largest_are_rounded_alike(amax):
    """Three binary digits survive wherever amax lies between two scales. 224 has scale 256, which makes it the largest number;
    anything above it has the next scale, which leaves the least room below."""
    x = random(64, 64).sign() * torch.logspace(-21, 0, 4096, base=2, device=DEVICE).view(64, 64) * amax
    scale = scale_of(x.abs().amax(), GRADIENTS)
    found = (ops.round_float8.plain if DEVICE == "cpu" else ops.round_float8)(x, scale, GRADIENTS, True, 0)[0]
    assert ((found.double() / float(scale) / x - 1).abs() <= 2**-3).all()


def test_rows_of_transposed_matrices_do_not_begin_a_power_of_two_apart():
    assert [padded(count, TOKENS) for count in (1, 128, 4095, 4096, 4097, 131072)] == [
        128,
        128,
        4224,
        4224,
        4224,
        131200,
    ]
    assert padded(4096, 16) == 4096
    assert ops.round_float8.plain(random(4096, 16), random() + 3, VALUES, False, TOKENS)[1].shape == (16, 4224)


def test_layers_whose_sides_the_matmuls_do_not_take_stay_as_they_are():
    assert fits(nn.Linear(32, 48), nn.Linear(16, 16))
    assert not fits(nn.Linear(32, 48), nn.Linear(32, 24))
    assert not fits(nn.Linear(24, 32))
    tokens = small_tokens(2, 9)
    exact, model = (small_model(dtype=torch.float32, plan=fast.Plan(float8=float8), n_sinks=1) for float8 in (False, True))
    assert torch.equal(model(tokens), exact(tokens))  # width 24


# -- a model --------------------------------------------------------------------------------------------------------------------


def learn(float8, steps):
    """Train on rows that count up, with the same noise at every step; return losses and model."""
    model = DiffusionLM(ModelConfig(**SHAPE, qkv_bias=True), seed=0)
    fast.prepare(model, fast.Plan(float8=float8))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    samples, losses = torch.arange(16), []
    tokens = (samples[:, None] + torch.arange(17)) % 16
    noisy = corrupt(tokens, samples, seed=0, mask_id=16)
    for _ in range(steps):
        loss = denoising_loss(model, tokens, noisy, denominator=float(tokens.numel())).total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def test_a_model_learns_in_float8_as_it_does_exactly():
    (exact, _), (found, model) = learn(False, 20), learn(True, 20)
    assert found[0] != exact[0]
    assert found[0] == pytest.approx(exact[0], rel=0.01)
    assert exact[-1] < 0.8 * exact[0]  # something was learned
    assert found[-1] == pytest.approx(exact[-1], rel=0.03)
    tokens = torch.arange(17)[None] % 16
    plain = DiffusionLM(model.config)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), plain(tokens))  # without gradients nothing is float8


@pytest.mark.parametrize("path", ["flat", None])
@pytest.mark.parametrize(
    ("compiled", "recompute", "float8", "residual"),
    [
        (True, "none", True, None),
        (False, "selective", True, None),
        (False, "full", True, torch.bfloat16),
        (True, "none", False, torch.bfloat16),
        pytest.param(True, "none", True, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(True, "selective", True, None, marks=pytest.mark.slow),
        pytest.param(True, "selective", False, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units says so
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_and_recomputed_blocks_give_the_eager_gradients(compiled, recompute, float8, residual, path, monkeypatch):
    """By the compiler's front end (aot_eager), with the other operators of a training step, under autocast."""
    monkeypatch.setattr(blocks, "_FUSED_SIZE", 0)
    tokens, results = torch.arange(34).view(2, 17) % 16, []
    noisy = corrupt(tokens, torch.arange(2), seed=0, mask_id=16)
    for changed in (False, True):
        model = DiffusionLM(ModelConfig(**SHAPE | {"n_layers": 1, "gate": "none" if float8 else "elementwise"}), seed=0)
        compile = "blocks" if changed and compiled else "none"
        plan = fast.Plan(float8=float8, residual=residual, recompute=recompute if changed else "none", compile=compile)
        fast.prepare(model, plan)
        model.runner = FastRunner(plan, force=path)
        if compile == "blocks":
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = denoising_loss(model, tokens, noisy, denominator=10.0).total
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 2e-3 * one.norm()
