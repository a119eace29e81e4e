"""The dense kernels of a training step against their plain forms: on a GPU, or by Triton's interpreter."""

import pytest
import torch

from comparing import DEVICE, assert_like, random
from sinkdlm.fast import objective
from sinkdlm.kernels import dense, ops

pytestmark = pytest.mark.gpu
BOTH = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", BOTH)
def test_swiglu_backward(dtype):
    gate_up, grad = 3 * random(2, 3, 2 * 1030, dtype=dtype), random(2, 3, 1030, seed=1, dtype=dtype)  # two tiles of columns
    assert_like(dense.swiglu_backward(gate_up, grad), ops.swiglu_backward.plain(gate_up, grad))


@pytest.mark.parametrize("into", BOTH)
@pytest.mark.parametrize(
    ("dtype", "update"), [(torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
)
def test_adding_and_norming(dtype, update, into):
    x, added = random(3, 5, 70, dtype=dtype), None if update is None else random(3, 5, 70, seed=1, dtype=update)
    given = (x, added, random(70, seed=2), 1e-5, into)
    found, wanted = dense.add_norm(*given), ops.add_norm.plain(*given)
    # The interpreter truncates to bf16 instead of rounding.
    cut_off = DEVICE == "cpu" and added is not None and dtype == torch.bfloat16
    assert_like(
        found, wanted, **({"rtol": 2e-2, "atol": 5e-2} if cut_off or into == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6})
    )


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("update", [None, torch.bfloat16])
def test_adding_and_norming_backward(update, dtype, monkeypatch):
    monkeypatch.setattr(dense, "_SUM_ROWS", 8)  # fewer rows than programs
    x, grad_sum, grad_normed = (random(2, 17, 70, seed=i, dtype=dtype) for i in range(3))  # more rows than programs
    given = (grad_sum, grad_normed.bfloat16(), x, random(70, seed=3), 1e-5, update)
    assert_like(dense.add_norm_backward(*given), ops.add_norm_backward.plain(*given))


@pytest.mark.parametrize(("exclude", "sharp"), [(None, 1), (0, 40), (4500, 1)])
def test_nll(exclude, sharp):
    logits, targets = sharp * random(7, 5000), torch.tensor([1, 2, 3, 4999, 4501, 70, 4095], device=DEVICE)
    logits[0, 1] = 60 * sharp  # a confident model: p - 1 is far below the precision of p
    nll, grad = dense.nll_of_logits(logits, targets, exclude, torch.bfloat16)
    bare, none = dense.nll_of_logits(logits, targets, exclude, None)
    wanted, wanted_grad = objective._nll(logits.double(), targets, exclude, torch.float64)
    torch.testing.assert_close(nll.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-2, atol=1e-7)
    assert none is None
    assert torch.equal(bare, nll)


def test_a_weights_gradient_is_not_rounded_to_its_factors():
    grad, x = random(64, 8, dtype=torch.bfloat16), random(64, 16, seed=1, dtype=torch.bfloat16)
    with torch.no_grad():
        found = ops.weight_gradient(grad, x, torch.float32)
    torch.testing.assert_close(found, (grad.double().mT @ x.double()).float(), rtol=1e-5, atol=1e-5)
