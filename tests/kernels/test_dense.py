"""The kernels for training against what operators.py says they compute, and the operators against autograd."""

import math

import pytest
import torch

from sinkdlm import diffusion
from sinkdlm.config.recipe import TrainSection
from sinkdlm.diffusion import corrupt, denoising_loss
from sinkdlm.fast import functions as fused_layers
from sinkdlm.fast.shadow_weights import rounded
from sinkdlm.kernels import ops as operators
from sinkdlm.model import layers
from sinkdlm.model import model as modelling
from sinkdlm.model.attention import attend, attend_naive
from sinkdlm.training import optimizer
from small_models import VARIANTS, small_model, small_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def plain(operator):
    """What an operator computes where it has no kernel."""
    return operator.plain


def parts(batch, heads, n_kv, tokens, width, n_sinks, dtype=torch.float32, by_row=False):
    """Queries and content as the model lays them out: token by token, heads side by side."""
    q, content, grad, grad_q = (random(batch, tokens, heads, width, seed=i, dtype=dtype).transpose(1, 2) for i in range(4))
    lse = random(batch, heads, tokens, seed=4) + 3
    sink_k, sink_v = (2 * random(batch if by_row else 1, n_sinks, n_kv, width, seed=i, dtype=dtype).transpose(1, 2) for i in (5, 6))
    return q, content, lse, sink_k, sink_v, grad, grad_q


SHAPES = [(2, 4, 4, 70, 16, 1, False), (1, 6, 2, 64, 24, 3, False), (2, 3, 1, 5, 8, 2, True), (1, 2, 1, 600, 16, 1, False)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_kernels(shape, dtype):
    pytest.importorskip("triton", reason="needs Triton")
    from sinkdlm.kernels import sink_attention as attention_kernels

    *sizes, by_row = shape
    q, content, lse, sink_k, sink_v, grad, grad_q = parts(*sizes, dtype=dtype, by_row=by_row)
    scale = 1 / math.sqrt(q.shape[3])
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    out, merged = plain(operators.merge_sinks)(q, content, lse, sink_k, sink_v, scale)
    found = attention_kernels.merge_sinks(q, content, lse, sink_k, sink_v, scale)
    torch.testing.assert_close(found, (out, merged), **close)
    assert found[0].stride() == content.stride()
    scores = (q.float() @ sink_k.float().repeat_interleave(q.shape[1] // sink_k.shape[1], 1).mT) * scale
    behind = random(16, *q.shape[1::2], seed=11, dtype=dtype)
    given = (scores.transpose(1, 2), content, lse, sink_v, behind)
    rows = plain(operators.merge_rows)(*given)
    torch.testing.assert_close(rows[0][:-16].view_as(out.transpose(1, 2)), out.transpose(1, 2))
    torch.testing.assert_close(attention_kernels.merge_rows(*given), rows, **close)
    given = (grad, q, out, merged, sink_k, sink_v, scale)
    wanted = plain(operators.merge_sinks_backward)(*given)
    torch.testing.assert_close(attention_kernels.merge_sinks_backward(*given), wanted, **close)
    grad_k, grad_v = (
        random(q.shape[0], q.shape[2], sink_k.shape[1], q.shape[3], seed=i, dtype=dtype).transpose(1, 2) for i in (7, 8)
    )
    cos, sin = (random(q.shape[0] if by_row else 1, q.shape[2], 1, q.shape[3] // 2, seed=i) for i in (9, 10))
    given = (grad_q, grad_k, grad_v, cos, sin)
    torch.testing.assert_close(attention_kernels.join_heads(*given), plain(operators.join_heads)(*given), **close)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turning_kernel(shape, dtype):
    pytest.importorskip("triton", reason="needs Triton")
    from sinkdlm.kernels import sink_attention as attention_kernels

    batch, n_heads, n_kv, tokens, width, n_sinks, by_row = shape
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    heads = random(batch * tokens + 16, n_heads + 2 * n_kv, width, dtype=dtype)
    cos, sin = (random(batch if by_row else 1, tokens, 1, width // 2, seed=i) for i in (1, 2))
    sink_k = random(batch if by_row else 1, n_sinks, n_kv, width, seed=3, dtype=dtype).transpose(1, 2)
    for sinks in (None, sink_k):
        given = (heads, cos, sin, sinks, batch, n_heads, 0.3)
        torch.testing.assert_close(attention_kernels.turn_heads(*given), plain(operators.turn_heads)(*given), **close)


@pytest.mark.parametrize("zero_value", [False, True])
@pytest.mark.parametrize(("heads", "n_kv", "width", "n_sinks"), [(4, 4, 16, 1), (6, 2, 24, 3), (3, 1, 8, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_rows_behind_the_tokens(heads, n_kv, width, n_sinks, zero_value, dtype, monkeypatch):
    pytest.importorskip("triton", reason="needs Triton")
    from sinkdlm.kernels import sink_attention as attention_kernels

    monkeypatch.setattr(attention_kernels, "_SPAN", 1)  # many parts to add up
    monkeypatch.setattr(attention_kernels, "_RETURNED_TILE", 32)
    batch, tokens = 2, 150
    n_tokens, scale = batch * tokens, 1 / math.sqrt(width)
    whole, cos, sin = (
        random(n_tokens + 16, heads + 2 * n_kv, width, dtype=dtype),
        *(random(1, n_sinks, 1, width // 2, seed=i) for i in (1, 2)),
    )
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    given = (whole, cos, sin, n_tokens, heads, zero_value)
    sink_k, sink_v, own = plain(operators.place_sinks)(*given)
    torch.testing.assert_close(attention_kernels.place_sinks(*given), (sink_k, sink_v, own), **close)
    q, content, grad_q = (random(batch, tokens, heads, width, seed=i, dtype=dtype).transpose(1, 2) for i in (3, 4, 7))
    grad_k, grad_v = (random(batch, tokens, n_kv, width, seed=i, dtype=dtype).transpose(1, 2) for i in (8, 9))
    turned = [random(1, tokens, 1, width // 2, seed=i) for i in (10, 11)]
    scores = ((q.float() @ sink_k.float().repeat_interleave(heads // n_kv, 1).mT) * scale).transpose(1, 2).contiguous()
    rows, lse = plain(operators.merge_rows)(scores, content, random(batch, heads, tokens, seed=5) + 3, sink_v, own)
    grad = random(n_tokens + 16, heads, width, seed=6, dtype=dtype)
    had = [q, rows, lse, scores]
    given = (grad, [grad_q, grad_k, grad_v], had, [sink_k, sink_v], [*turned, cos, sin], zero_value, scale)
    found = plain(operators.merge_rows_backward)(*given)
    torch.testing.assert_close(attention_kernels.merge_rows_backward(*given), found, **close)
    # In parts, as the other way of merging has them.
    parted = (operators.by_row(grad, batch, tokens), q, operators.by_row(rows, batch, tokens), lse, sink_k, sink_v, scale)
    through = plain(operators.merge_sinks_backward)(*parted)
    whole = plain(operators.add_turns)(grad_q.float(), through[0], sink_k)
    joined = plain(operators.join_heads)(whole, grad_k, grad_v, *turned)
    torch.testing.assert_close(found[:n_tokens], joined, **close)
    sinks = found[n_tokens : n_tokens + n_sinks].float()
    to_key, to_value = (x[0].transpose(0, 1).float() for x in through[1:])
    first, second = to_key.chunk(2, dim=-1)
    to_key = torch.cat([first * cos[0] + second * sin[0], second * cos[0] - first * sin[0]], dim=-1)
    to_value = to_value + grad[n_tokens : n_tokens + n_sinks].float().unflatten(1, (n_kv, -1)).sum(2)
    wanted = torch.cat([torch.zeros_like(sinks[:, :heads]), to_key, to_value * (not zero_value)], dim=1)
    assert (sinks - wanted).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * wanted.norm()
    assert not found[n_tokens + n_sinks :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_backward_kernel(dtype):
    pytest.importorskip("triton", reason="needs Triton")
    from sinkdlm.kernels import dense as training_kernels

    gate_up, grad = 3 * random(3, 5, 2 * 1100, dtype=dtype), random(3, 5, 1100, seed=1, dtype=dtype)
    found = training_kernels.swiglu_backward(gate_up, grad)
    torch.testing.assert_close(found, plain(operators.swiglu_backward)(gate_up, grad))


NORMED = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added", [False, True])
def test_norm_kernel(added, dtype):
    pytest.importorskip("triton", reason="needs Triton")
    from sinkdlm.kernels import dense as training_kernels

    x, update = random(3, 5, 70, dtype=dtype), random(3, 5, 70, seed=1, dtype=torch.bfloat16) if added else None
    given = (x, update, random(70, seed=2), 1e-5)
    results = [[norm(*given, into) for norm in (training_kernels.add_norm, plain(operators.add_norm))] for into in NORMED]
    torch.testing.assert_close(*results[0])
    if not added:  # the interpreter cuts sums off
        torch.testing.assert_close(*results[1], rtol=1e-5, atol=1e-6)  # gains are not rounded to what they are multiplied with


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", [None, torch.bfloat16])
def test_norm_backward_kernel(update, dtype, monkeypatch):
    pytest.importorskip("triton", reason="needs Triton")
    from sinkdlm.kernels import dense as training_kernels

    monkeypatch.setattr(training_kernels, "_SUM_ROWS", 8)  # fewer than programs
    x, grad_sum, grad_normed = (random(2, 45, 70, seed=i, dtype=dtype) for i in range(3))  # more rows than programs
    for through in (grad_sum, None):
        given = (through, grad_normed.bfloat16(), x, random(70, seed=3), 1e-5, update)
        torch.testing.assert_close(training_kernels.add_norm_backward(*given), plain(operators.add_norm_backward)(*given))


@pytest.mark.parametrize("added", [None, torch.float32, torch.bfloat16])
def test_adding_and_norming_has_autograds_gradients(added):
    """added: what is added to a sum in float32. In the sum's own precision its gradient is the sum's."""
    x, update, weight = (random(2, 3, 7), random(2, 3, 7, seed=1, dtype=added or torch.float32), random(7, seed=2))
    grads = [random(2, 3, 7, seed=i) for i in (3, 4)]
    results = []
    for fused in (False, True):
        leaves = [one.clone().requires_grad_() for one in ((x, weight, update) if added else (x, weight))]
        given = leaves[2] if added else None
        if fused:
            outs = fused_layers.add_norm(leaves[0], given, leaves[1], 1e-5, torch.float32)
        else:
            total = leaves[0] + given if added else leaves[0] * 1
            outs = (total, torch.nn.functional.rms_norm(total, (7,), leaves[1], 1e-5))
        results.append([*outs, *torch.autograd.grad(outs, leaves, grads)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_the_last_norm_has_autograds_gradients():
    given, grad = (random(2, 3, 7), random(2, 3, 7, seed=1), random(7, seed=2)), random(2, 3, 7, seed=3)
    wanted, mine = ([x.clone().requires_grad_() for x in given] for _ in range(2))
    outs = (
        torch.nn.functional.rms_norm(wanted[0] + wanted[1], (7,), wanted[2], 1e-5),
        fused_layers.add_last_norm(*mine, 1e-5, torch.float32),
    )
    torch.testing.assert_close(*outs)
    grads = (torch.autograd.grad(out, leaves, grad) for out, leaves in zip(outs, (wanted, mine), strict=True))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_a_rounded_copy_stands_for_its_weight_until_somebody_writes_there(monkeypatch):
    """Written by an update, by one that is withheld, and after others have changed the weight."""
    pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setattr(optimizer, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(optimizer, "_divides", lambda _: True)
    weights = {name: torch.nn.Parameter(random(*shape)) for name, shape in (("blocks.0.out", (20, 60)), ("embed", (30, 60)))}
    weight, embed = weights.values()
    adamw = optimizer.Optimizer(weights, TrainSection(steps=3, batch=1), rounds=torch.bfloat16)
    assert rounded(weight, torch.bfloat16) is not rounded(weight, torch.bfloat16)
    for step, withheld in enumerate((1.0, 0.0, 0.0, 1.0)):
        before = weight.detach().clone()
        weight.grad, embed.grad = random(20, 60, seed=step), random(30, 60, seed=step)
        adamw.step(1e-2, torch.tensor(1.0, device=DEVICE), torch.tensor(withheld, device=DEVICE))
        copy = rounded(weight, torch.bfloat16)
        assert torch.equal(weight, before) == bool(withheld)
        nearest = 0.0 if DEVICE == "cuda" else 2**-7  # Triton's interpreter cuts off
        torch.testing.assert_close(copy, weight.detach().bfloat16(), rtol=nearest, atol=0.0)
        assert copy is rounded(weight, torch.bfloat16)
        assert torch.equal(rounded(weight, torch.float16), weight.half())
        if step:
            with torch.no_grad():
                weight.mul_(1.5)
            assert torch.equal(rounded(weight, torch.bfloat16), weight.bfloat16())
            assert (copy - weight).abs().mean() > 0.1
    assert rounded(embed, torch.bfloat16) is not rounded(embed, torch.bfloat16)
    x = random(16, 60, dtype=torch.bfloat16)
    plain = fused_layers.project(x, weight.detach().clone().requires_grad_())
    adamw.step(0.0, torch.tensor(1.0, device=DEVICE), torch.tensor(0.0, device=DEVICE))
    assert (fused_layers.project(x, weight) - plain).norm() <= nearest * plain.norm()


@pytest.mark.parametrize("withheld", [None, 0.0, 1.0])
@pytest.mark.parametrize("norm", [None, 0.2, 3.0])
def test_updates_by_the_kernel_are_those_of_torch(withheld, norm, monkeypatch):
    """Weights, moments and how many updates they have seen, of parameters that the kernel takes and of one that it does not."""
    pytest.importorskip("triton", reason="needs Triton")
    train = TrainSection(steps=3, batch=1, clip=0.5, weight_decay=0.3)
    found = []
    for by_kernel in (False, True):
        monkeypatch.setattr(optimizer, "_has_kernel", lambda p, _, on=by_kernel: on and p.numel() > 10)
        monkeypatch.setattr(optimizer, "_divides", lambda _: True)
        weights = {name: random(*shape, seed=i) for i, (name, shape) in enumerate((("a", (30, 70)), ("b", (5,)), ("c", (1100,))))}
        adamw = optimizer.Optimizer(weights, train)
        adamw.set_updates(2)
        versions = {name: weight._version for name, weight in weights.items()}
        for step in range(3):
            for i, weight in enumerate(weights.values()):
                weight.grad = random(*weight.shape, seed=10 * step + i) if (step, i) != (1, 2) else None
            kept = {name: None if weight.grad is None else weight.grad.clone() for name, weight in weights.items()}
            given = (None if value is None else torch.tensor(value, device=DEVICE) for value in (norm, withheld if step else None))
            adamw.step(1e-2, *given)
            if by_kernel and step == 0:
                assert torch.equal(weights["a"].grad, kept["a"])
        assert not by_kernel or all(weights[name]._version > versions[name] for name in ("a", "c"))
        found.append([*weights.values(), *(part for moment in optimizer.MOMENTS for part in adamw.moments[moment].values())])
        found[-1].append(torch.stack(list(adamw._updates.values())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert found[0][-1].tolist() == ([3, 3, 3] if withheld else [5, 5, 4])


@pytest.mark.parametrize("exclude", [None, 0, 4500])
@pytest.mark.parametrize("sharp", [1, 40])
def test_nll_kernel(exclude, sharp):
    pytest.importorskip("triton", reason="needs Triton")
    from sinkdlm.kernels import dense as training_kernels

    logits, targets = sharp * random(7, 5000), torch.tensor([1, 2, 3, 4999, 4501, 70, 4095], device=DEVICE)
    logits[0, 1] = 60 * sharp  # a confident model: p - 1 is far below the precision of p
    nll, grad = training_kernels.nll_of_logits(logits, targets, exclude, torch.bfloat16)
    bare, none = training_kernels.nll_of_logits(logits, targets, exclude, None)
    wanted, wanted_grad = diffusion._nll(logits.double(), targets, exclude, torch.float64)
    torch.testing.assert_close(nll.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-2, atol=1e-7)
    assert none is None
    assert torch.equal(bare, nll)


@pytest.mark.parametrize("shape", SHAPES)
def test_operators_of_merging_are_the_softmax_and_its_gradients(shape):
    """float64 autograd through the naive form, against content attention whose backward is given the merged output."""
    *sizes, by_row = shape
    q, _, _, sink_k, sink_v, grad, _ = parts(*sizes, by_row=by_row)
    k, v = (random(*sink_k.shape[1:2], 9, q.shape[3], seed=i)[None].expand(q.shape[0], -1, -1, -1) for i in (7, 8))
    scale = 1 / math.sqrt(q.shape[3])
    leaves = [x.double().requires_grad_() for x in (q, k, v, sink_k, sink_v)]
    out, _ = attend_naive(*leaves)
    wanted = torch.autograd.grad(out, leaves, grad.double())
    wide = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
    scores = (q @ wide[0].mT) * scale
    content, lse = scores.softmax(-1) @ wide[1], scores.logsumexp(-1)
    found, merged = operators.merge_sinks(q, content, lse, sink_k, sink_v, scale)
    torch.testing.assert_close(found, out.float(), rtol=1e-5, atol=1e-5)
    weights = (scores - merged[..., None]).exp()
    turns = weights * (grad @ wide[1].mT - (grad * found).sum(-1, keepdim=True)) * scale
    through, *grads = operators.merge_sinks_backward(grad, q, found, merged, sink_k, sink_v, scale)
    grad_q = turns @ wide[0] + through @ sink_k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    for mine, true in zip((grad_q, *grads), (wanted[0], *wanted[3:]), strict=True):
        torch.testing.assert_close(mine, true.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_merging_by_operators_is_attention_with_sinks(shape):
    *sizes, by_row = shape
    q, _, _, sink_k, sink_v, grad, _ = parts(*sizes, by_row=by_row)
    k, v = (random(q.shape[0], sink_k.shape[1], 9, q.shape[3], seed=i) for i in (7, 8))
    results = []
    for form in ("naive", "merge:fused"):
        leaves = [x.cpu().requires_grad_() for x in (q.clone(), k.clone(), v.clone(), sink_k.clone(), sink_v.clone())]
        out = attend(*leaves, form=form)  # on a GPU in half precision: tests/fast/test_gpu.py
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad.cpu())])
    for naive, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, naive, rtol=1e-4, atol=1e-5)


STEPS = ["sink", "sinks-2-end-zero-gate", "logit", "vanilla"]
_COMPILED = [pytest.param(name, True, marks=[] if name == "sink" else pytest.mark.slow) for name in STEPS]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in STEPS), *_COMPILED])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_step_by_operators_is_the_plain_step(name, compiled, early, monkeypatch):
    """Loss and gradients, all operators on; the compiler's front half too, which must take them as they are. early: the last layer
    ends where the loss looks, but for one that does not go as rows: compiled, it would have a new shape in every step."""
    tokens = small_tokens(2, 20)
    results, ended = [], []
    for fused in (False, True):
        monkeypatch.setattr(modelling, "trains_fused", lambda *_, fused=fused: fused)
        monkeypatch.setattr(layers, "_FUSED_SIZE", 0)
        monkeypatch.setattr(modelling, "merges_fast", lambda *_: True)
        model = small_model(dtype=torch.float32, **VARIANTS[name])
        model.picks_early = early and fused
        noisy = corrupt(tokens, torch.arange(2), seed=0, mask_id=model.config.mask_id)
        if not compiled:
            model.blocks[-1].mlp.register_forward_pre_hook(lambda module, given: ended.append(given[0].shape[:-1].numel()))
        if compiled and fused:
            for block in model.blocks:
                block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
        loss = denoising_loss(model, tokens, noisy, denominator=10.0).total
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()
    if not compiled:
        whole = 40 if name in ("logit", "vanilla") else 48  # sinks, and what fills up, lie behind the tokens
        assert ended[-1] == (int(noisy.masked.sum()) if early and name != "logit" else whole)


def test_gains_are_not_rounded_to_what_they_scale():
    """Where layers add in bf16: in validation, and in a training step's operators."""
    x, norm = random(40, 64, dtype=torch.bfloat16).cpu(), layers.Norm(64, 1e-5)
    torch.nn.init.constant_(norm.weight, 1.0035)  # 1 in bf16
    wanted = (torch.nn.functional.rms_norm(x.double(), (64,), eps=1e-5) * 1.0035).bfloat16()
    for found in (norm(x), operators.add_norm(x, None, norm.weight, 1e-5, torch.bfloat16)[1]):
        assert found.dtype == torch.bfloat16
        assert (found == wanted).float().mean() > 0.99


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units says so
def test_layers_that_add_in_bf16_are_as_exact_by_operators_as_without(name, early, monkeypatch):
    """On average: of one step of a small model, rounding makes the one or the other better."""
    monkeypatch.setattr(layers, "_FUSED_SIZE", 0)
    monkeypatch.setattr(modelling, "merges_fast", lambda *_: True)
    tokens, errors = small_tokens(4, 20), {"plain": 0.0, "fused": 0.0}
    for seed in range(12):
        found = {}
        for form in ("float32", *errors):
            monkeypatch.setattr(modelling, "trains_fused", lambda *_, form=form: form == "fused")
            model = small_model(dtype=torch.float32, **VARIANTS[name])
            model.picks_early, model.residual = early, torch.bfloat16
            noisy = corrupt(tokens, torch.arange(4), seed=seed, mask_id=model.config.mask_id)
            with torch.autocast("cpu", torch.bfloat16, enabled=form != "float32"):
                loss = denoising_loss(model, tokens, noisy, denominator=10.0).total
            loss.backward()
            found[form] = torch.cat([weight.grad.flatten() for weight in model.parameters()])
        for form in errors:
            errors[form] += float((found[form] - found["float32"]).norm() / found["float32"].norm()) / 12
    assert errors["fused"] <= 1.25 * errors["plain"]
    assert max(errors.values()) < 0.1


def test_an_adapter_is_not_passed_by(monkeypatch):
    """A layer that is more than its weight computes for itself."""

    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    monkeypatch.setattr(layers, "_FUSED_SIZE", 0)
    mlp = layers.FeedForward(small_model().config)
    x = random(2, 3, mlp.gate_up.in_features).cpu()
    torch.testing.assert_close(mlp(x, fused=True), mlp(x))
    for layer in (mlp.down, mlp.gate_up):
        layer.__class__ = Adapted
        torch.testing.assert_close(mlp(x, fused=True), mlp(x))


def test_swiglu_and_its_product_have_autograds_gradients():
    gate_up, weight, grad = random(2, 3, 20), random(6, 10, seed=1), random(2, 3, 6, seed=2)
    leaves = [x.double().requires_grad_() for x in (gate_up, weight)]
    gate, up = leaves[0].chunk(2, -1)
    out = (torch.nn.functional.silu(gate) * up) @ leaves[1].mT
    wanted = torch.autograd.grad(out, leaves, grad.double())
    mine = [x.clone().requires_grad_() for x in (gate_up, weight)]
    found = fused_layers.swiglu_product(*mine)
    torch.testing.assert_close(found, out.float())
    for one, true in zip(torch.autograd.grad(found, mine, grad), wanted, strict=True):
        torch.testing.assert_close(one, true.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_has_autograds_gradients(biased):
    leaves = [random(2, 3, 10), random(6, 10, seed=1), *([random(6, seed=2)] if biased else [])]
    wanted_leaves, mine = ([x.to(dtype).requires_grad_() for x in leaves] for dtype in (torch.float64, torch.float32))
    grad, wanted = random(2, 3, 6, seed=3), torch.nn.functional.linear(*wanted_leaves)
    found = fused_layers.project(*mine)
    torch.testing.assert_close(found, wanted.float())
    wanted_grads = torch.autograd.grad(wanted, wanted_leaves, grad.double())
    for one, true in zip(torch.autograd.grad(found, mine, grad), wanted_grads, strict=True):
        torch.testing.assert_close(one, true.float(), rtol=1e-5, atol=1e-5)


def test_a_weights_gradient_is_not_rounded_to_its_factors():
    grad, x = random(64, 8, dtype=torch.bfloat16), random(64, 16, seed=1, dtype=torch.bfloat16)
    found = operators.weight_gradient(grad, x, torch.float32)
    torch.testing.assert_close(found, (grad.double().mT @ x.double()).float(), rtol=1e-5, atol=1e-5)
    weight = random(8, 16, seed=2).requires_grad_()
    fused_layers.project(x, weight).backward(grad)
    assert torch.equal(weight.grad, found)


@pytest.mark.parametrize(
    "name",
    [
        "weight_gradient",
        "swiglu",
        "swiglu_backward",
        "merge_sinks",
        "turn_heads",
        "merge_rows",
        "merge_sinks_backward",
        "add_norm",
        "add_norm_backward",
        "add_turns",
        "join_heads",
        "place_sinks",
        "merge_rows_backward",
    ],
)
def test_operators_keep_the_rules_of_torch(name):
    """Shapes, strides and types that the compiler is told are those that come."""
    q, content, lse, sink_k, sink_v, grad, grad_q = parts(2, 4, 2, 9, 8, 2)
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # as a CPU's attention lays it out
    grad_k, cos = random(2, 2, 9, 8), random(1, 9, 1, 4)
    given = {
        "weight_gradient": (random(16, 8, dtype=torch.bfloat16), random(16, 24, dtype=torch.bfloat16), torch.float32),
        "swiglu": (random(2, 3, 8),),
        "swiglu_backward": (random(2, 3, 8), random(2, 3, 4)),
        "merge_sinks": (q, content, lse, sink_k, sink_v, 0.3),
        "turn_heads": (random(2 * 9 + 3, 8, 8), cos, cos, sink_k, 2, 4, 0.3),
        "merge_rows": (random(2, 9, 4, 2), content, lse, sink_v, random(3, 4, 8)),
        "merge_sinks_backward": (grad, q, content, lse, sink_k, sink_v, 0.3),
        "add_norm": (random(2, 3, 7), random(2, 3, 7, dtype=torch.bfloat16), random(7), 1e-5, torch.bfloat16),
        "add_norm_backward": (random(2, 3, 7), random(2, 3, 7), random(2, 3, 7), random(7), 1e-5, torch.bfloat16),
        "add_turns": (grad_q, random(2, 4, 9, 2), sink_k),
        "join_heads": (grad_q, grad_k, grad_k, cos, cos),
        "place_sinks": (random(9 + 3, 8, 8), cos[:, :2], cos[:, :2], 9, 4, False),
        "merge_rows_backward": (
            *(random(2 * 9 + 3, 4, 8), [grad_q, grad_k, grad_k], [q, random(2 * 9 + 3, 4, 8, seed=1), lse, random(2, 9, 4, 2)]),
            *([sink_k, sink_v], [cos, cos, cos[:, :2], cos[:, :2]], False, 0.3),
        ),
    }[name]
    torch.library.opcheck(getattr(operators, name).op, given, test_utils=("test_schema", "test_faketensor"))
