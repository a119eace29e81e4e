import math

import pytest
import torch

from attention_inputs import RATIOS, LargestTensor, random_inputs
from sinkdlm.model.attention import attend, attend_naive, choose_form

FUSED = ("append", "merge")


def masked_form(q, k, v, sink_k, sink_v, visible=None):
    """Eq. 5 and 6 for the content rows: sinks are prepended, and a dense bias hides what is not visible."""
    batch, heads, tokens, width = q.shape
    repeat = heads // k.shape[1]
    keys = torch.cat([sink_k.expand(batch, -1, -1, -1), k], dim=2).repeat_interleave(repeat, dim=1)
    values = torch.cat([sink_v.expand(batch, -1, -1, -1), v], dim=2).repeat_interleave(repeat, dim=1)
    bias = torch.zeros(batch, 1, tokens, keys.shape[2], dtype=q.dtype)
    if visible is not None:
        bias[..., sink_k.shape[2] :].masked_fill_(~visible, -math.inf)
    return torch.softmax(q @ keys.mT / math.sqrt(width) + bias, dim=-1) @ values


def with_gradients(function, inputs, seed=1, **kwargs):
    out = function(*inputs, **kwargs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def max_difference(left, right):
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("form", ["naive", *FUSED])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sink_rows", [1, 3])
@pytest.mark.parametrize("n_sinks", [1, 2, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
def test_lane_equals_masked_form(heads, kv_heads, n_sinks, sink_rows, padded, form):
    inputs = random_inputs(heads, kv_heads, n_sinks, sink_rows=sink_rows)
    visible = (torch.arange(33) < torch.tensor([33, 20, 1])[:, None])[:, None, None] if padded else None
    expected = with_gradients(masked_form, inputs, visible=visible)
    assert max_difference(with_gradients(attend, inputs, visible=visible, form=form), expected) <= 1e-10
    single = [x.detach().float().requires_grad_() for x in inputs]
    assert max_difference(with_gradients(attend, single, visible=visible, form=form), expected) <= 1e-4


@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
def test_sink_logit_equals_a_column_that_is_dropped(heads, kv_heads):
    q, k, v, _, _ = random_inputs(heads, kv_heads, 1)
    logit = torch.linspace(-2, 3, heads, dtype=torch.float64).requires_grad_()
    results = []
    for form in ("naive", "merge", "auto"):
        results.append(with_gradients(lambda *x, f=form: attend(*x[:3], sink_logit=x[3], form=f), [q, k, v, logit]))
    # gpt-oss: out = o * sigmoid(lse - logit)
    repeat = heads // kv_heads
    scores = q @ k.repeat_interleave(repeat, 1).mT / math.sqrt(8)
    plain = torch.softmax(scores, -1) @ v.repeat_interleave(repeat, 1)
    scaled = plain * torch.sigmoid(torch.logsumexp(scores, -1) - logit.view(1, -1, 1))[..., None]
    for result in results:
        assert max_difference(result, results[0]) <= 1e-12
        assert max_difference(result[:1], [scaled]) <= 1e-12


def test_naive_weights_are_a_distribution_with_sinks_first():
    q, k, v, sink_k, sink_v = random_inputs(6, 2, 2)
    out, weights = attend_naive(q, k, v, sink_k, sink_v)
    assert weights.shape == (3, 6, 33, 35)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 6, 33, dtype=torch.float64))
    strong = attend_naive(q, k, v, 100 * q[:1, :2, :1].detach().expand(1, 2, 2, 8), sink_v)[1]
    assert strong[0, 0, 0, :2].sum() > 0.99
    torch.testing.assert_close(out, attend(q, k, v, sink_k, sink_v))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("form", ["naive", *FUSED])
def test_fused_forms_hold_no_tokens_by_tokens_tensor(form, padded):
    tokens = 512
    inputs = random_inputs(6, 2, 1, tokens=tokens, batch=1, width=4)
    visible = torch.ones(1, 1, 1, tokens, dtype=torch.bool) if padded else None
    with LargestTensor() as largest:
        with_gradients(attend, inputs, visible=visible, form=form)
    assert (largest.numel >= tokens * tokens) == (form == "naive")


def test_choice_is_named_and_can_be_overridden():
    assert choose_form("cpu", torch.float32).form == "plain"
    assert choose_form("cpu", torch.float32, n_sinks=1)[:2] == ("append", "sdpa")
    assert choose_form("cpu", torch.float32, n_sinks=1, form="merge")[:2] == ("merge", "cpu")
    assert choose_form("cuda", torch.bfloat16, n_sinks=1, form="merge")[:2] == ("merge", "flash")
    assert choose_form("cuda", torch.bfloat16, n_sinks=1, form="merge:cudnn")[:2] == ("merge", "cudnn")
    assert choose_form("cuda", torch.bfloat16, n_sinks=1, masked_keys=True, form="merge")[:2] == ("merge", "efficient")
    assert choose_form("cuda", torch.float64, n_sinks=1).form == "naive"
    assert choose_form("cuda", torch.float32, has_logit=True).form == "merge"
    assert "append" in str(choose_form("cpu", torch.float32, n_sinks=1))
    with pytest.raises(ValueError, match="allowed: auto, naive, append, merge"):
        choose_form("cpu", torch.float32, form="fast")
    with pytest.raises(ValueError, match="no key to append"):
        choose_form("cpu", torch.float32, has_logit=True, form="append")


@pytest.mark.parametrize("form", ["naive", "merge"])
def test_autocast_does_not_lower_the_precision_of_scores(form):
    """Inputs are in bf16 already; what follows is not rounded on the way."""
    inputs = [x.detach().bfloat16().requires_grad_() for x in random_inputs(6, 2, 2)]
    plain = with_gradients(attend, inputs, form=form)

    def under_autocast(*inputs, form):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attend_naive(*inputs)[1].dtype == torch.float32
            return attend(*inputs, form=form)

    cast = with_gradients(under_autocast, inputs, form=form)
    assert max_difference(plain, cast) == 0


def test_causal_attention_takes_no_sinks():
    q, k, v, sink_k, sink_v = random_inputs(6, 2, 1)
    torch.testing.assert_close(attend(q, k, v, causal=True), attend(q, k, v, causal=True, form="naive"))
    with pytest.raises(ValueError, match="without sinks"):
        attend(q, k, v, sink_k, sink_v, causal=True)
