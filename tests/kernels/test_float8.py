"""The kernels of training in float8 against their plain forms: on a GPU, or by Triton's interpreter."""

import pytest
import torch

from comparing import DEVICE, assert_rounded_alike, random
from sinkdlm.kernels import float8 as kernels
from sinkdlm.kernels import float8_ops as ops
from sinkdlm.kernels.float8_format import GRADIENTS, SLOTS, VALUES, new_predictions, scale_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning"),  # by Triton's interpreter
]


@pytest.mark.parametrize(("rows", "multiple", "dtype", "given"), [
    (True, 128, GRADIENTS, torch.bfloat16), (True, 0, VALUES, torch.float32), (False, 16, VALUES, torch.bfloat16),
])  # fmt: skip
def test_rounding(given, dtype, rows, multiple):
    x = random(131, 210, dtype=given)[:, ::3]  # several tiles in both directions
    given = (x, scale_of(x.abs().amax(), dtype), dtype, rows, multiple)
    for found, wanted in zip(kernels.round_float8(*given), ops.round_float8.plain(*given), strict=True):
        assert_rounded_alike(found, wanted)


@pytest.mark.parametrize("place", [(-1, -1), (0, 69), (130, 0)])
def test_the_largest_magnitude_is_found_wherever_it_lies(place):
    x = random(131, 70).clamp(-4, 4)
    x[place] = -7000
    *_, scale, inverse = kernels.quantize(x, None, VALUES, 0)
    assert float(scale) == float(scale_of(x.abs().amax(), VALUES)) == 1 / float(inverse)


def test_swiglu():
    gate_up, grad = random(35, 540, dtype=torch.bfloat16), random(35, 270, seed=1, dtype=torch.bfloat16)  # several tiles
    hidden, scale, inverse = ops.swiglu_float8.plain(gate_up, None)
    found, *scales = kernels.swiglu_float8(gate_up, None)
    torch.testing.assert_close(scales, [scale, inverse])
    assert_rounded_alike(found, hidden)
    wanted = ops.swiglu_float8_backward.plain(gate_up, grad, scale, None)
    found = kernels.swiglu_float8_backward(gate_up, grad, scale, None)
    torch.testing.assert_close(found[2], wanted[2])
    for index in (0, 1, 3):
        assert_rounded_alike(found[index], wanted[index])


def predictions(right):
    """Predictions without a scale, with a wrong one, and with the right one."""
    for value in (0.0, 3.0, float(right)):
        predicted = new_predictions(1, torch.device(DEVICE))[0]
        predicted[0] = value
        yield predicted, float(value != right)


def same_bits(ones, others):
    return all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("form", ["plain", "kernel"])
@pytest.mark.parametrize("scaled", [1.0, 0.0, float("inf")])
def test_a_prediction_changes_no_bit(form, scaled, monkeypatch):
    """Right or wrong; on a miss, each program of a kernel rewrites several tiles."""
    monkeypatch.setattr(kernels, "_AGAIN", 2)
    given = {
        name: getattr(kernels if form == "kernel" else ops, name)
        for name in ("quantize", "swiglu_float8", "swiglu_float8_backward")
    }
    quantize, swiglu, swiglu_backward = given.values() if form == "kernel" else (one.plain for one in given.values())
    x = random(131, 80, dtype=torch.bfloat16)
    x[3, 5] *= scaled
    x *= scaled != 0
    for dtype in (VALUES, GRADIENTS) if scaled == 1 else (GRADIENTS,):
        *wanted, scale, inverse = quantize(x, None, dtype, 16)
        for predicted, wrong in predictions(scale):
            *found, found_scale, found_inverse = quantize(x, predicted, dtype, 16)
            assert same_bits(found, wanted)
            assert (float(found_scale), float(found_inverse)) == (float(scale), float(inverse))
            assert predicted.tolist() == [float(scale), wrong, *[0.0] * SLOTS]  # ready for the next step
    if scaled != 1:
        return
    gate_up, grad = random(35, 260, dtype=torch.bfloat16), random(35, 130, seed=1, dtype=torch.bfloat16)
    hidden, scale, inverse = swiglu(gate_up, None)
    for predicted, _ in predictions(scale):
        found = swiglu(gate_up, predicted)
        assert same_bits(found[:1], [hidden])
        assert float(predicted[0]) == float(found[1]) == float(scale)
    wanted = swiglu_backward(gate_up, grad, scale, None)
    for predicted, _ in predictions(wanted[2].reciprocal()):
        found = swiglu_backward(gate_up, grad, scale, predicted)
        assert same_bits([found[i] for i in (0, 1, 3)], [wanted[i] for i in (0, 1, 3)])
        assert float(predicted[0]) == 1 / float(wanted[2])


@pytest.mark.parametrize("name", ["quantize", "round_float8", "swiglu_float8", "swiglu_float8_backward"])
def test_operators_keep_the_rules_of_torch(name):
    given = {
        "quantize": (random(9, 16), None, VALUES, 16),
        "round_float8": (random(9, 16), random() + 3, VALUES, True, 32),
        "swiglu_float8": (random(9, 32), None),
        "swiglu_float8_backward": (random(9, 32), random(9, 16), random() + 3, None),
    }[name]
    torch.library.opcheck(getattr(ops, name).op, given, test_utils=("test_schema", "test_faketensor"))
