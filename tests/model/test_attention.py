import math

import pytest
import torch

from attention_inputs import RATIOS, LargestTensor, random_inputs
from sinkdlm.fast.attention import attend_grouped
from sinkdlm.model.attention import attend, attend_naive

FORMS = {"naive": lambda *x, **how: attend_naive(*x, **how)[0], "append": attend, "grouped": attend_grouped}


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sink_rows", [1, 3])
@pytest.mark.parametrize("n_sinks", [1, 2, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
def test_lane_equals_masked_form(heads, kv_heads, n_sinks, sink_rows, padded, form):
    inputs = random_inputs(heads, kv_heads, n_sinks, sink_rows=sink_rows)
    visible = (torch.arange(33) < torch.tensor([33, 20, 1])[:, None])[:, None, None] if padded else None
    expected = with_gradients(masked_form, inputs, visible=visible)
    assert max_difference(with_gradients(FORMS[form], inputs, visible=visible), expected) <= 1e-10
    single = [x.detach().float().requires_grad_() for x in inputs]
    assert max_difference(with_gradients(FORMS[form], single, visible=visible), expected) <= 1e-4


@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
def test_sink_logit_equals_a_column_that_is_dropped(heads, kv_heads):
    q, k, v, _, _ = random_inputs(heads, kv_heads, 1)
    logit = torch.linspace(-2, 3, heads, dtype=torch.float64).requires_grad_()
    results = []
    for form in FORMS.values():
        results.append(with_gradients(lambda *x, f=form: f(*x[:3], sink_logit=x[3]), [q, k, v, logit]))
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
@pytest.mark.parametrize("form", FORMS)
def test_fused_forms_hold_no_tokens_by_tokens_tensor(form, padded):
    tokens = 512
    inputs = random_inputs(6, 2, 1, tokens=tokens, batch=1, width=4)
    visible = torch.ones(1, 1, 1, tokens, dtype=torch.bool) if padded else None
    with LargestTensor() as largest:
        with_gradients(FORMS[form], inputs, visible=visible)
    assert (largest.numel >= tokens * tokens) == (form == "naive")


def test_a_sink_logit_keeps_its_digits_in_half_precision():
    """bf16 has 8 bits: rounding the logit to it would be wrong by 2 %."""
    q, k, v, _, _ = (x.detach().bfloat16() for x in random_inputs(6, 2, 1))
    logit = torch.linspace(3.001, 4.999, 6)
    exact = attend_naive(*(x.double() for x in (q, k, v)), sink_logit=logit.double())[0]
    rounded = attend_naive(*(x.double() for x in (q, k, v)), sink_logit=logit.bfloat16().double())[0]
    error, lost = ((out.double() - exact).norm() for out in (attend(q, k, v, sink_logit=logit), rounded))
    noise = (attend_naive(q, k, v, sink_logit=logit)[0].double() - exact).norm()
    assert error <= 1.5 * noise
    assert lost > noise


def test_autocast_does_not_lower_the_precision_of_scores():
    """Inputs are bf16; nothing after them is rounded."""
    inputs = [x.detach().bfloat16().requires_grad_() for x in random_inputs(6, 2, 2)]
    plain = with_gradients(FORMS["naive"], inputs)

    def under_autocast(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, weights = attend_naive(*inputs)
            assert weights.dtype == torch.float32
            return out

    assert max_difference(plain, with_gradients(under_autocast, inputs)) == 0


def test_causal_attention_takes_no_sinks():
    q, k, v, sink_k, sink_v = random_inputs(6, 2, 1)
    torch.testing.assert_close(attend(q, k, v, causal=True), attend_naive(q, k, v, causal=True)[0])
    with pytest.raises(ValueError, match="leave out sinks"):
        attend(q, k, v, sink_k, sink_v, causal=True)
