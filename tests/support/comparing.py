"""Kernels beside their plain forms: random tensors where they run, and what alike means."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_like(found, wanted, **tolerance):
    """Shapes, strides and types too: the compiler is told those of the plain form. Empty tensors hold nothing to compare."""
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
    """To float8, up to a last bit before rounding."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    if not wanted.numel():
        return
    assert found.stride() == wanted.stride()
    found, wanted = found.float(), wanted.float()
    assert (found == wanted).float().mean() > (0.9 if DEVICE == "cpu" else 0.99)
    step = wanted.abs() / 4 + 2**-8  # to which a last bit before rounding may decide
    near = (found - wanted).abs() <= step
    if DEVICE == "cpu":  # Triton's interpreter does not carry: what rounds up to a power of two becomes half of it
        near |= 2 * found == wanted
    assert near.all()
