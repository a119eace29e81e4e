"""What only a GPU can show. Skipped elsewhere; benchmarks/results/ holds records of the same measurements."""

import pytest
import torch
from benchmarks.attention import FORMS, make_inputs, relative_errors
from benchmarks.noise import digest

from conftest import VARIANTS, small_model, small_tokens
from sinkdlm.diffusion import corrupt, denoising_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
]


@pytest.mark.parametrize("shape", [(2, 2048, 10, 10, 128), (2, 1000, 14, 2, 64)])
def test_fused_forms_are_as_exact_as_the_plain_kernel(shape):
    inputs = make_inputs(shape, "cuda", torch.bfloat16)
    grad = torch.randn(inputs[0].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").bfloat16()
    plain = relative_errors("plain", inputs, grad)
    worst = max(plain.values())
    for form in FORMS["cuda"]:
        for name, error in relative_errors(form, inputs, grad).items():
            assert error <= 1.5 * plain.get(name, worst), (form, name, error, plain)


def test_noise_is_the_same_on_every_device():
    assert digest("cuda") == digest("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_lane_is_bit_equal(variant, dtype):
    model, tokens = small_model(dtype=dtype, **variant).cuda(), small_tokens(4, 33).cuda()
    lengths = torch.tensor([33, 4, 1, 20]).cuda()
    with torch.no_grad():
        plain, padded = model(tokens), model(tokens, lengths=lengths)
    with model.inference():
        for _ in range(2):
            assert torch.equal(model(tokens), plain)
            assert torch.equal(model(tokens, lengths=lengths), padded)


@pytest.mark.parametrize("form", ["auto", "naive", "merge"])
def test_a_gpu_computes_what_a_cpu_computes(variant, form):
    """float32, with padding, loss and gradients."""
    model = small_model(dtype=torch.float32, attention=form, **variant)
    tokens, lengths = small_tokens(4, 33), torch.tensor([33, 4, 1, 20])
    inside = torch.arange(33) < lengths[:, None]
    results = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        noisy = corrupt(tokens.to(device), torch.arange(4), seed=0, mask_id=model.config.mask_id, maskable=inside.to(device))
        loss = denoising_loss(model, tokens.to(device), noisy, denominator=10.0, lengths=lengths.to(device)).total
        loss.backward()
        results.append([loss.detach().cpu(), *(weight.grad.cpu().clone() for weight in model.parameters())])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert (on_cpu - on_gpu).norm() <= 2e-3 * on_cpu.norm() + 1e-6


@pytest.mark.parametrize("name", ["vanilla", "sink", "sinks-2-end-zero-gate", "logit"])
@pytest.mark.filterwarnings("ignore")
def test_inductor_gives_the_eager_loss_in_bf16(name):
    model = small_model(dtype=torch.bfloat16, d_model=96, n_heads=6, **VARIANTS[name]).cuda()
    tokens = small_tokens(4, 64).cuda()
    noisy = corrupt(tokens, torch.arange(4), seed=0, mask_id=model.config.mask_id)
    eager = denoising_loss(model, tokens, noisy, denominator=tokens.numel()).total
    for block in model.blocks:
        block.compile(fullgraph=True)
    compiled = denoising_loss(model, tokens, noisy, denominator=tokens.numel()).total
    compiled.backward()
    assert abs(compiled.item() / eager.item() - 1) < 0.02
    assert all(torch.isfinite(weight.grad).all() for weight in model.parameters())
