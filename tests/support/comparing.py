"""Compare kernels with their plain forms: random tensors on the right device, and tolerances."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_like(found, wanted, **tolerance):
    """Compare values, shapes, strides and dtypes: the compiler is told the plain form's."""
    if isinstance(wanted, tuple | list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_like(one, other, **tolerance)
        return
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if wanted.numel():
        assert found.stride() == wanted.stride()
    near = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 2e-2, "atol": 5e-2}}
    torch.testing.assert_close(found, wanted, **(tolerance or near[wanted.dtype]))


def assert_rounded_alike(found, wanted):
    """Compare float8 tensors whose values may differ in the last bit before rounding."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if not wanted.numel():
        return
    assert found.stride() == wanted.stride()
    found, wanted = found.float(), wanted.float()
    assert (found == wanted).float().mean() > (0.9 if DEVICE == "cpu" else 0.99)
    step = wanted.abs() / 4 + 2**-8  # one step of float8
    near = (found - wanted).abs() <= step
    if DEVICE == "cpu":  # Triton's interpreter drops the carry: a value that rounds up to a power of two is halved
        near |= 2 * found == wanted
    assert near.all()
