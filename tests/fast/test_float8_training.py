"""Training in float8: what is rounded and how, the products' gradients, and that a model learns by them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from sinkdlm import DiffusionLM, ModelConfig
from sinkdlm.diffusion import corrupt, denoising_loss
from sinkdlm.fast.float8_training import fits, guesses_of, product, swiglu_mlp
from sinkdlm.kernels import float8_ops as operators
from sinkdlm.kernels.float8_ops import GRADIENTS, VALUES
from sinkdlm.model import layers
from sinkdlm.model import model as modelling
from small_models import small_model, small_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = {"vocab_size": 16, "n_layers": 2, "n_heads": 2, "d_model": 32, "d_ff": 48, "context_length": 32, "n_sinks": 1}


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def coarse(*shape, peak, seed):
    """Of sizes from peak / 8 to peak, which is among them: rounded to float8, their products add up in float32 without rounding."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.empty(shape).uniform_(peak / 8, peak, generator=generator)
    sizes.view(-1)[0] = peak
    return sizes * (torch.rand(shape, generator=generator) < 0.5).float().mul(2).sub(1)


def rounded(x, digits):
    """To so many binary digits, the nearest even at a tie: what float8 does to numbers far from its smallest."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp((mantissa * 2**digits).round() / 2**digits, exponent)


def relative(found, wanted):
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


# -- kernels --------------------------------------------------------------------------------------------------------------------


def assert_rounded_alike(found, wanted):
    assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    found, wanted = found.float(), wanted.float()
    assert (found == wanted).float().mean() > (0.9 if DEVICE == "cpu" else 0.99)
    step = wanted.abs() / 4 + 2**-8  # to which a last bit before rounding may decide
    near = (found - wanted).abs() <= step
    if DEVICE == "cpu":  # Triton's interpreter does not carry: what rounds up to a power of two becomes half of it
        near |= 2 * found == wanted
    assert near.all()


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [VALUES, GRADIENTS])
@pytest.mark.parametrize(("rows", "turned"), [(True, 128), (True, 0), (False, 16)])
def test_rounding_kernel(given, dtype, rows, turned):
    pytest.importorskip("triton", reason="needs Triton")
    from sinkdlm.kernels import float8 as float8_kernels

    x = random(131, 624, dtype=given)[:, ::3]  # several tiles either way
    given = (x, operators.gain_of(x.abs().amax(), dtype), dtype, rows, turned)
    for found, wanted in zip(float8_kernels.round_float8(*given), operators.round_float8.plain(*given), strict=True):
        if wanted.numel():
            assert_rounded_alike(found, wanted)
        assert found.shape == wanted.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_that_finds_the_largest(dtype):
    pytest.importorskip("triton", reason="needs Triton")
    from sinkdlm.kernels import float8 as float8_kernels

    for x in (
        random(3, 7, dtype=dtype),
        random(160, 311, dtype=dtype),
        random(40, 96, dtype=dtype).T[::2],
        random(5, dtype=dtype) * 0,
    ):
        assert torch.equal(float8_kernels.peak(x), operators.peak.plain(x))
        lowest = x.clone()
        lowest[(-1,) * x.dim()] = -7
        assert float(float8_kernels.peak(lowest)) == 7


def test_swiglu_kernels():
    pytest.importorskip("triton", reason="needs Triton")
    from sinkdlm.kernels import float8 as float8_kernels

    gate_up, grad = random(67, 800, dtype=torch.bfloat16), random(67, 400, seed=1, dtype=torch.bfloat16)  # several tiles
    hidden, gain = operators.swiglu_float8.plain(gate_up)
    found, found_gain, scale = float8_kernels.swiglu_float8(gate_up)
    torch.testing.assert_close((found_gain, scale), (gain, gain.reciprocal()))
    assert_rounded_alike(found, hidden)
    wanted = operators.swiglu_float8_backward.plain(gate_up, grad, gain)
    found = float8_kernels.swiglu_float8_backward(gate_up, grad, gain)
    torch.testing.assert_close(found[2], wanted[2])
    for index in (0, 1, 3):
        assert_rounded_alike(found[index], wanted[index])


def guesses(right):
    """None yet, another gain, and the right one."""
    for value in (0.0, 3.0, float(right)):
        guess = operators.new_guesses(1, torch.device(DEVICE))[0]
        guess[0] = value
        yield guess, float(value != right)


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")  # by Triton's interpreter
@pytest.mark.parametrize("kind", ["plain", "kernel"])
@pytest.mark.parametrize("scaled", [1.0, 0.0, float("inf")])
def test_a_guess_changes_nothing(kind, scaled, monkeypatch):
    """Bit for bit, right or wrong, by the same kernels, whose programs write several tiles again. (Off a GPU nothing is guessed,
    but for Triton's interpreter.)"""
    if kind == "kernel":
        pytest.importorskip("triton", reason="needs Triton")
        from sinkdlm.kernels import float8 as kernels

        monkeypatch.setattr(kernels, "_AGAIN", 3)
    elif DEVICE != "cpu":
        pytest.skip("a GPU has kernels")
    given = kernels if kind == "kernel" else None
    x = random(131, 208, dtype=torch.bfloat16)
    x[3, 5] *= scaled
    x *= scaled != 0
    for dtype in (VALUES, GRADIENTS):
        gain = operators.gain_of(x.abs().amax(), dtype)
        wanted = (given.round_float8 if given else operators.round_float8.plain)(x, gain, dtype, True, 16)
        for guess, wrong in guesses(gain):
            *found, found_gain, scale = (given or operators).round_by_guess(x, guess, dtype, 16)
            assert all(
                torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(found, wanted, strict=True)
            )
            assert (float(found_gain), float(scale)) == (float(gain), float(gain.reciprocal()))
            assert guess.tolist() == [float(gain), wrong, *[0.0] * operators.SLOTS]  # ready for the next time
    gate_up, grad = random(67, 800, dtype=torch.bfloat16) * scaled, random(67, 400, seed=1, dtype=torch.bfloat16)
    if scaled > 1:
        return
    hidden, gain = given.swiglu_float8(gate_up)[:2] if given else operators.swiglu_float8.plain(gate_up)
    for guess, _ in guesses(gain):
        found = given.swiglu_float8(gate_up, guess) if given else operators.swiglu_by_guess(gate_up, guess)
        assert torch.equal(found[0].float(), hidden.float())
        assert float(guess[0]) == float(found[1]) == float(gain)
    back = given.swiglu_float8_backward if given else operators.swiglu_float8_backward.plain
    by_guess = given.swiglu_float8_backward if given else operators.swiglu_backward_by_guess
    wanted = back(gate_up, grad, gain)
    for guess, _ in guesses(wanted[2]):
        found = by_guess(gate_up, grad, gain, guess)
        assert all(torch.equal(one.float(), other.float()) for one, other in zip(found[:4], wanted[:4], strict=True))
        assert float(guess[0]) == float(wanted[2])


@pytest.mark.parametrize("name", ["peak", "round_float8", "swiglu_float8", "swiglu_float8_backward"])
def test_operators_keep_the_rules_of_torch(name):
    given = {
        "peak": (random(9, 16, dtype=torch.bfloat16),),
        "round_float8": (random(9, 16), random() + 3, VALUES, True, 32),
        "swiglu_float8": (random(9, 32),),
        "swiglu_float8_backward": (random(9, 32), random(9, 16), random() + 3),
    }[name]
    torch.library.opcheck(getattr(operators, name).op, given, test_utils=("test_schema", "test_faketensor"))


# -- products -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [32, 33])
def test_a_product_is_exactly_that_of_rounded_factors(tokens):
    """Scales written out: e4m3 ends at 448, which is 512 times 0.875, and between 64 and 128 times 5; e5m2 at 57344, between 2^8
    and 2^16 times 3."""
    x, weight = coarse(tokens, 48, peak=5.0, seed=0), coarse(16, 48, peak=0.875, seed=1)
    grad = coarse(tokens, 16, peak=3.0, seed=2)
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = product(*leaves, torch.float32)
    x8, w8, g8 = rounded(x * 64, 4), rounded(weight * 512, 4), rounded(grad * 2**8, 3)
    assert torch.equal(out.double(), x8 @ w8.T / 64 / 512)
    grad_x, grad_weight = torch.autograd.grad(out, leaves, grad)
    assert torch.equal(grad_x.double(), g8 @ w8 / 2**8 / 512)
    assert torch.equal(grad_weight.double(), g8.T @ x8 / 2**8 / 64)


def test_a_row_is_rounded_alike_whatever_stands_beside_it():
    x, weight = coarse(8, 32, peak=5.0, seed=0), coarse(16, 32, peak=0.5, seed=1)
    x[4:] *= 1.3
    assert torch.equal(product(x, weight, torch.float32)[:4], product(x[:4], weight, torch.float32))


def test_products_are_near_the_exact_ones():
    """Half a step of 3 bits (values) or 2 (gradients) is at most 2^-4 or 2^-3 of a number, and errors do not add up."""
    x, weight, grad = (
        random(3, 11, 32, dtype=torch.bfloat16),
        random(48, 32, seed=1),
        random(3, 11, 48, seed=2, dtype=torch.bfloat16),
    )
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    with torch.autocast(DEVICE, torch.bfloat16):
        found = product(*leaves, torch.bfloat16)
    wanted = functional.linear(*exact)
    assert (found.shape, found.dtype) == (wanted.shape, torch.bfloat16)
    assert 0.005 < relative(found, wanted) < 2**-4
    grads = torch.autograd.grad(found, leaves, grad)
    assert [one.dtype for one in grads] == [torch.bfloat16, torch.float32]
    for one, true in zip(grads, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
        assert 0.01 < relative(one, true) < 2**-3


def test_the_feed_forward_part_is_its_products_and_swiglu():
    x, grad = random(2, 9, 32), random(2, 9, 32, seed=3)
    weights = random(96, 32, seed=1), random(32, 48, seed=2)
    results = []
    for whole in (False, True):
        leaves = [one.clone().requires_grad_() for one in (x, *weights)]
        if whole:
            out = swiglu_mlp(*leaves, torch.float32)
        else:
            gate, up = product(*leaves[:2], torch.float32).chunk(2, -1)
            out = product(gate * torch.sigmoid(gate) * up, leaves[2], torch.float32)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    (out, *parts), (whole_out, *wholes) = results
    assert torch.equal(out, whole_out)
    assert torch.equal(parts[2], wholes[2])  # by the same rounded values
    for part, one in zip(parts[:2], wholes[:2], strict=True):
        assert relative(one, part.double()) < 1e-2  # a tie may round the other way


def test_zeros_and_what_is_not_finite_stay_so():
    weight = random(16, 16, seed=1).requires_grad_()
    assert (product(torch.zeros(3, 16, device=DEVICE), weight, torch.float32) == 0).all()
    for bad in (float("inf"), float("nan")):
        x = random(3, 16)
        x[1, 2] = bad
        assert not torch.isfinite(product(x, weight, torch.float32)[1]).any()


def test_what_layers_remember_changes_no_gradient():
    layer, x, grads = nn.Linear(32, 48, bias=False, device=DEVICE), random(5, 32), []
    for seed in range(3):  # of other sizes each time
        leaves = [(x * 2.0 ** (5 * seed)).requires_grad_(), layer.weight]
        for guesses in (None, guesses_of(layer, layer.weight)):
            out = product(*leaves, torch.float32, guesses)
            grads.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
        assert all(torch.equal(one, other) for one, other in zip(*grads[-2:], strict=True))
    assert guesses_of(layer, layer.weight) is guesses
    assert guesses[:3, 0].all()
    assert not any("guess" in name for name in layer.state_dict())


def test_gains_of_gradients_are_every_eighth_power_of_two():
    peaks = torch.logspace(-20, 20, 4001, dtype=torch.float64).float()
    gains = operators.gain_of(peaks, GRADIENTS)
    largest = torch.finfo(GRADIENTS).max
    assert ((peaks * gains <= largest) & (peaks * gains * 256 > largest)).all()
    assert len(gains.unique()) == 18  # of 40 decades, which are 133 powers of two
    assert ((gains.log2() % 8) == 0).all()
    values = operators.gain_of(peaks, VALUES)
    assert ((peaks * values <= 448) & (peaks * values * 2 > 448)).all()


@pytest.mark.parametrize("peak", [1.0, 3.0, 100.0, 223.9, 224.0, 224.1, 1e-9])
def test_gradients_down_to_a_two_millionth_of_the_largest_are_rounded_alike(peak):
    """To three binary digits, wherever the largest lies between two gains: 224 has one, of which 256 times 224 is the largest
    number, and anything above it another, which leaves it least room below."""
    x = random(64, 64).sign() * torch.logspace(-21, 0, 4096, base=2, device=DEVICE).view(64, 64) * peak
    gain = operators.gain_of(x.abs().amax(), GRADIENTS)
    found = (operators.round_float8.plain if DEVICE == "cpu" else operators.round_float8)(x, gain, GRADIENTS, True, 0)[0]
    assert ((found.double() / float(gain) / x - 1).abs() <= 2**-3).all()


def test_rows_of_turned_matrices_do_not_begin_a_power_of_two_apart():
    assert [operators.padded(count, operators.TOKENS) for count in (1, 128, 4095, 4096, 4097, 131072)] == [
        128,
        128,
        4224,
        4224,
        4224,
        131200,
    ]
    assert operators.padded(4096, 16) == 4096
    assert operators.round_float8.plain(random(4096, 16), random() + 3, VALUES, False, operators.TOKENS)[1].shape == (16, 4224)


def test_layers_whose_sides_the_products_do_not_take_stay_as_they_are():
    assert fits(nn.Linear(32, 48), nn.Linear(16, 16))
    assert not fits(nn.Linear(32, 48), nn.Linear(32, 24))
    assert not fits(nn.Linear(24, 32))
    model, tokens = small_model(dtype=torch.float32, n_sinks=1), small_tokens(2, 9)
    exact = model(tokens)
    model.float8 = True
    assert torch.equal(model(tokens), exact)  # width 24


# -- a model --------------------------------------------------------------------------------------------------------------------


def learn(float8, steps):
    """Losses over the same rows, which count up from anywhere, and the same noise."""
    model = DiffusionLM(ModelConfig(**SHAPE, qkv_bias=True), seed=0)
    model.float8 = float8
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
    with torch.no_grad():
        without = model(tokens)
        model.float8 = False
        assert torch.equal(model(tokens), without)  # float8 is for gradients


@pytest.mark.parametrize(
    ("compiled", "recompute", "float8", "residual"),
    [
        (True, "none", True, None),
        (False, "selective", True, None),
        (True, "none", True, torch.bfloat16),
        (False, "full", True, torch.bfloat16),
        (True, "none", False, torch.bfloat16),
        pytest.param(True, "selective", True, None, marks=pytest.mark.slow),
        pytest.param(True, "selective", False, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units says so
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_and_recomputed_blocks_give_the_eager_gradients(compiled, recompute, float8, residual, monkeypatch):
    """The compiler's front half, beside the other operators of a training step, in autocast."""
    monkeypatch.setattr(modelling, "trains_fused", lambda *_: True)
    monkeypatch.setattr(modelling, "merges_fast", lambda *_: True)
    monkeypatch.setattr(layers, "_FUSED_SIZE", 0)
    tokens, results = torch.arange(34).view(2, 17) % 16, []
    noisy = corrupt(tokens, torch.arange(2), seed=0, mask_id=16)
    for changed in (False, True):
        model = DiffusionLM(ModelConfig(**SHAPE | {"n_layers": 1, "gate": "none" if float8 else "elementwise"}), seed=0)
        model.float8, model.residual = float8, residual
        model.recompute = recompute if changed else "none"
        if changed and compiled:
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = denoising_loss(model, tokens, noisy, denominator=10.0).total
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 2e-3 * one.norm()
