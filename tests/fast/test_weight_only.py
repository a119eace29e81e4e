"""Weights held in 8 or 4 bits: their levels and errors, and layers that compute with what they hold."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from sinkdlm.fast.weight_only import WeightOnlyLinear, _levels, quantize_blocks
from small_models import small_model, small_tokens

KINDS = ("int8", "nf4", "int4")
# The table of QLoRA, appendix E, from the paper.
NF4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)


def layer_of(kind: str, n_out=24, n_in=20, bias=False, dtype=torch.float32) -> tuple[nn.Linear, WeightOnlyLinear]:
    weight = torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = nn.Linear(n_in, n_out, bias=bias, dtype=dtype)
    plain.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    return plain, WeightOnlyLinear(plain, kind)


def test_nf4_has_the_levels_of_its_paper():
    torch.testing.assert_close(_levels("nf4"), torch.tensor(NF4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["nf4", "int4"])
def test_every_element_takes_the_nearest_level_of_its_group(kind):
    """Also where the last group is not full."""
    plain, layer = layer_of(kind)
    weight, found = plain.weight.flatten(), layer.dequantize(torch.float32).flatten()
    assert weight.numel() % 64
    for group, rounded in zip(weight.split(64), found.split(64), strict=True):
        scale = group.abs().max()
        choices = _levels(kind) * scale
        nearest = choices[(group[:, None] - choices).abs().argmin(1)]
        torch.testing.assert_close(rounded, nearest, rtol=1e-6, atol=0)


def test_int8_rounds_by_half_a_step_of_its_row():
    plain, layer = layer_of("int8")
    step = plain.weight.abs().amax(1, keepdim=True) / 127
    assert ((layer.dequantize(torch.float32) - plain.weight).abs() <= step / 2 * 1.0001).all()


def test_sizes_are_those_that_are_promised():
    for kind, bits in (("int8", 8 + 32 / 512), ("nf4", 4.5), ("int4", 4.5)):
        _, layer = layer_of(kind, 1024, 512)
        held = sum(tensor.numel() * tensor.element_size() for tensor in (layer.codes, layer.scale))
        assert 8 * held == bits * 1024 * 512


def test_a_row_of_zeros_stays_zero():
    for kind in KINDS:
        plain, _ = layer_of(kind)
        plain.weight.data[3:] = 0  # whole groups of them
        assert not WeightOnlyLinear(plain, kind).dequantize(torch.float32)[8:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_layer_computes_with_the_dequantised_weight(kind, dtype):
    """Output and the gradient of its input; nothing else gets one."""
    plain, layer = layer_of(kind, bias=True, dtype=dtype)
    plain.weight.data, plain.bias.requires_grad = layer.dequantize(dtype), False
    x = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for one in (plain, layer):
        given = x.clone().requires_grad_()
        out = one(given)
        out.square().sum().backward()
        results.append((out, given.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_computes_in_its_own_dtype(kind):
    _, layer = layer_of(kind)
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert torch.equal(out, functional.linear(x.bfloat16(), layer.dequantize(torch.bfloat16)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiler_takes_a_layer_whole(kind):
    _, layer = layer_of(kind)
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(1), requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_blocks_linear_layers_are_quantised(kind):
    """And the model computes what one with these weights computes."""
    model, same = (small_model(dtype=torch.float32, n_sinks=2, gate="elementwise", qkv_bias=True) for _ in range(2))
    held = quantize_blocks(model, kind)
    names = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    assert list(held) == [f"blocks.{number}.{name}" for number in range(3) for name in names]
    kept = dict(model.named_parameters())
    assert kept.keys() == {name for name, _ in same.named_parameters()} - {f"{name}.weight" for name in held}
    assert all(torch.equal(weight, kept[name]) for name, weight in same.named_parameters() if name in kept)
    with torch.no_grad():
        for name, layer in held.items():
            same.get_submodule(name).weight.copy_(layer.dequantize(torch.float32))
        torch.testing.assert_close(model(small_tokens(2, 9)), same(small_tokens(2, 9)), rtol=1e-6, atol=1e-6)
        with model.inference(), same.inference():
            for length in (9, 5):
                tokens = small_tokens(2, length)
                torch.testing.assert_close(model(tokens), same(tokens), rtol=1e-6, atol=1e-6)
