"""Attention with a sink lane: every token sees every visible token, and the sinks.

Owns the arithmetic of joining sinks to attention, in a naive form (the oracle, which also returns the weights) and in fused forms
that never hold a tokens-by-tokens tensor. Knows nothing of layers, positions or configs: keys come rotated; who sees whom is the
callers' (visibility.py).

B batch, T tokens, S sinks, H query heads, K key/value heads (H a multiple of K), D head width.
q (B, H, T, D); k, v (B, K, L, D), L = T unless keys are cached; sink_k, sink_v (1 or B, K, S, D); sink_logit (H,);
visible: boolean, broadcastable to (B, H, T, L), over content keys only: sinks are visible to everyone; or a Visibility's blocks.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from sinkdlm.kernels import ops as operators

_ALIGNMENT = 8  # elements; the GPU kernels read heads in 16-byte pieces
_HALF = (torch.bfloat16, torch.float16)
_FLEX_WIDTH = 16  # the narrowest head its GPU kernel takes
_CUDNN_WIDTH = 128  # the widest head of its backward
_MERGED_TOKENS = 512  # of rows for which `merge` pays
FORMS = ("auto", "naive", "append", "merge", "merge:cpu", "merge:flash", "merge:cudnn", "merge:efficient", "merge:fused", "flex")


class Choice(NamedTuple):
    """The form that attention takes, the kernel under `merge`, and why."""

    form: str
    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.form} on {self.kernel} ({self.reason})"


def choose_form(
    device: str,
    dtype: torch.dtype,
    *,
    n_sinks: int = 0,
    has_logit: bool = False,
    masked_keys: bool = False,
    pairwise: bool = False,
    width: int = 64,
    trained_tokens: int = 0,
    form: str = "auto",
) -> Choice:
    """The one place that decides how attention is computed. `form` overrides it by name.

    No sinks: the plain kernel. A sink with a key: `append`, S more keys for the same kernel; or `merge`, which folds sinks into
    the kernel's log-sum-exp afterwards, where rows of trained_tokens are long and operators.py does that in one pass
    (merge:fused). A sink that is only a logit has no key to append: `merge`. pairwise: who sees whom is a rule for pairs of
    tokens (a Visibility): on a GPU `flex`, which computes the rule in its kernel; elsewhere the others take it as a dense mask.
    """
    if form not in FORMS:
        raise ValueError(f"attention form {form!r}: allowed: {', '.join(FORMS)}")
    wanted, _, kernel = form.partition(":")
    masked_keys = masked_keys or pairwise
    if wanted == "flex" and not pairwise:
        wanted = "auto"  # nothing for it to hide: the plain kernels are exact and faster
    flex_runs = device == "cuda" and dtype != torch.float64 and width >= _FLEX_WIDTH and width & (width - 1) == 0
    if wanted == "flex" and device != "cpu" and not flex_runs:
        raise ValueError(
            f"attention form 'flex': on a GPU it takes float32 or half precision and heads of a power of two from {_FLEX_WIDTH}, "
            f"not {dtype}, heads of {width}, on {device}; use 'auto'"
        )
    if wanted == "flex" or (wanted == "auto" and pairwise and flex_runs):
        return Choice("flex", "flex_attention", "asked for" if wanted == "flex" else "the rule of who sees whom, without a mask")
    fused = device == "cpu" or (device == "cuda" and dtype != torch.float64)
    if has_logit and device == "cuda" and width % _ALIGNMENT:
        fused = False  # torch pads heads for its plain kernels, not for those that return the log-sum-exp
    if wanted == "naive" or (wanted == "auto" and not fused):
        reason = "asked for" if wanted == "naive" else f"no fused kernel for {dtype}, heads of {width}, on {device}"
        return Choice("naive", "matmul", reason)
    if has_logit and wanted == "append":
        raise ValueError("attention form 'append': a sink logit has no key to append; use 'merge' or 'naive'")
    if wanted == "merge" or has_logit:
        if n_sinks == 0 and not has_logit:
            return Choice("plain", "sdpa", "no sinks to merge")
        reason = "asked for" if wanted == "merge" else "a sink logit has no key"
        if has_logit and kernel == "fused":
            kernel = ""
        return Choice("merge", kernel or _merge_kernel(device, dtype, masked_keys), reason)
    if n_sinks == 0:
        return Choice("plain", "sdpa", "no sinks")
    if wanted == "auto" and not masked_keys and merges_fast(device, dtype, width, trained_tokens):
        return Choice("merge", "fused", "the plain kernel's tiles stay whole, and the sinks cost one pass")
    return Choice("append", "sdpa", "asked for" if wanted == "append" else "one kernel call, exact gradients from autograd")


def merges_fast(device: str, dtype: torch.dtype, width: int, tokens: int) -> bool:
    """Where torch itself takes cuDNN's kernels, which are slower for T + 1 keys than for T."""
    if device != "cuda" or dtype not in _HALF or width > _CUDNN_WIDTH or width % _ALIGNMENT or tokens < _MERGED_TOKENS:
        return False
    return torch.backends.cuda.cudnn_sdp_enabled() and torch.cuda.get_device_capability()[0] >= 9


def _merge_kernel(device: str, dtype: torch.dtype, masked_keys: bool) -> str:
    if device == "cpu":
        return "cpu"
    return "efficient" if masked_keys or dtype not in _HALF else "flash"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor | None = None,
    sink_v: Tensor | None = None,
    *,
    sink_logit: Tensor | None = None,
    visible: Tensor | BlockMask | None = None,
    causal: bool = False,
    form: str = "auto",
) -> Tensor:
    """softmax over content keys and sinks, times values: (B, H, T, D)."""
    n_sinks = 0 if sink_k is None else sink_k.shape[2]
    if n_sinks == 0:
        sink_k = sink_v = None
    if causal and (sink_k is not None or sink_logit is not None or visible is not None):
        raise ValueError("causal attention is the AR parent's: without sinks and without a visible mask")
    if isinstance(visible, BlockMask):
        with torch.autocast(q.device.type, enabled=False):
            return _attend_flex(q, k, v, sink_k, sink_v, sink_logit, visible)
    choice = choose_form(
        q.device.type,
        q.dtype,
        n_sinks=n_sinks,
        has_logit=sink_logit is not None,
        masked_keys=visible is not None,
        width=q.shape[3],
        form=form,
    )
    if choice.form == "naive":
        return attend_naive(q, k, v, sink_k, sink_v, sink_logit=sink_logit, visible=visible, causal=causal)[0]
    if choice.form == "append":
        assert sink_k is not None
        assert sink_v is not None
        batch = k.shape[0]
        k = torch.cat([sink_k.expand(batch, -1, -1, -1), k], dim=2)
        v = torch.cat([sink_v.expand(batch, -1, -1, -1), v], dim=2)
        if visible is not None:
            visible = pad(visible, (n_sinks, 0), value=True)
    if choice.form in ("append", "plain"):
        return _plain(q, k, v, visible, causal)
    with torch.autocast(q.device.type, enabled=False):
        return _Merge.apply(q, k, v, sink_k, sink_v, sink_logit, visible, choice.kernel)


def attend_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor | None = None,
    sink_v: Tensor | None = None,
    *,
    sink_logit: Tensor | None = None,
    visible: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output and weights (B, H, T, S + L), sinks first. Weights in float32 or better; a sink logit's column is dropped."""
    with torch.autocast(q.device.type, enabled=False):  # which would take the products back to half precision
        batch, heads, tokens, width = q.shape
        n_sinks = 0 if sink_k is None else sink_k.shape[2]
        if sink_k is not None and sink_v is not None:
            k = torch.cat([sink_k.expand(batch, -1, -1, -1), k], dim=2)
            v = torch.cat([sink_v.expand(batch, -1, -1, -1), v], dim=2)
        k, v = _repeat_heads(k, heads), _repeat_heads(v, heads)
        precise = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(precise) @ k.to(precise).mT) / math.sqrt(width)
        if causal:
            visible = torch.ones(tokens, k.shape[2], dtype=torch.bool, device=q.device).tril()
        if visible is not None:
            scores = scores.masked_fill(~pad(visible, (n_sinks, 0), value=True), -math.inf)
        if sink_logit is not None:
            column = sink_logit.to(precise).view(1, heads, 1, 1).expand(batch, heads, tokens, 1)
            weights = torch.softmax(torch.cat([column, scores], dim=-1), dim=-1)[..., 1:]
        else:
            weights = torch.softmax(scores, dim=-1)
        return (weights @ v.to(precise)).to(q.dtype), weights


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _plain(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
    grouped = k.shape[1] != q.shape[1]
    if grouped and (visible is not None or q.device.type != "cuda" or q.dtype not in _HALF):
        # Only the half-precision kernels without a mask read grouped heads; elsewhere torch would fall back to full weights.
        k, v, grouped = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1]), False
    return scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal, enable_gqa=grouped)


def _attend_flex(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None, sink_v: Tensor | None, sink_logit: Tensor | None, blocks: BlockMask
) -> Tensor:
    """FlexAttention, with the sinks behind the content keys, as the blocks have them."""
    if sink_k is not None and sink_v is not None:
        k = torch.cat([k, sink_k.expand(k.shape[0], -1, -1, -1)], dim=2)
        v = torch.cat([v, sink_v.expand(v.shape[0], -1, -1, -1)], dim=2)
    # Its eager form holds all scores: on a GPU it must be compiled, here or with the block around it.
    as_is = q.device.type == "cpu" or torch.compiler.is_compiling()
    kernel = cast(Callable[..., Any], flex_attention) if as_is else _compiled_flex()
    grouped = k.shape[1] != q.shape[1]
    if sink_logit is None:
        return cast(Tensor, kernel(q, k, v, block_mask=blocks, enable_gqa=grouped))
    out, extra = kernel(q, k, v, block_mask=blocks, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
    # exp(lse) / (exp(lse) + exp(logit)): what the logit's column leaves to the content.
    left = torch.sigmoid(extra.lse - sink_logit.to(extra.lse.dtype)[:, None])
    return (out.to(left.dtype) * left[..., None]).to(q.dtype)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, fullgraph=True)


class _Merge(torch.autograd.Function):
    """Attention over content by a fused kernel, with the sinks folded in through its log-sum-exp.

    Forward, with s the sinks' scores: lse' = logaddexp(lse, s), o' = exp(lse - lse') o + exp(s - lse') v_sink.
    Backward: the kernel's own backward, given (o', lse') for (o, lse), rebuilds the weights of the full softmax, so its
    dq, dk, dv are exact for the content part; the sinks' part is a few products per token.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_k: Tensor | None,
        sink_v: Tensor | None,
        sink_logit: Tensor | None,
        visible: Tensor | None,
        kernel: str,
    ) -> Tensor:
        content, lse, rest = content_forward(kernel, q, k, v, visible)
        ctx.kernel = kernel
        if kernel == "fused":
            assert sink_k is not None
            assert sink_v is not None
            out, merged_lse = operators.merge_sinks(q, content, lse, sink_k, sink_v, 1 / math.sqrt(q.shape[3]))
            ctx.save_for_backward(q, k, v, sink_k, sink_v, sink_logit, visible, out, merged_lse, *rest)
            return out
        scores = _sink_scores(q, sink_k, sink_logit)  # (B, H, T, S)
        merged_lse = torch.logaddexp(lse, torch.logsumexp(scores, dim=-1))
        out = content.to(lse.dtype) * torch.exp(lse - merged_lse)[..., None]
        if sink_v is not None:
            weights = torch.exp(scores - merged_lse[..., None])
            out = out + weights @ _repeat_heads(sink_v, q.shape[1]).to(lse.dtype)
        # Neither in place nor a conversion to what it is: torch 2.11 compiles a forward that returns a tensor under two names into
        # one without gradients (pytorch issue 180642).
        if out.dtype != content.dtype:
            out = out.to(content.dtype)
        if out.stride() != content.stride():  # the layout that the kernels' backward wants
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(q, k, v, sink_k, sink_v, sink_logit, visible, out, merged_lse, *rest)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):
            q, k, v, sink_k, sink_v, sink_logit, visible, out, lse, *rest = ctx.saved_tensors
            grad_q, grad_k, grad_v = content_backward(ctx.kernel, grad, q, k, v, visible, out, lse, rest)
            if ctx.kernel == "fused":
                scale = 1 / math.sqrt(q.shape[3])
                turns, *grad_sinks = operators.merge_sinks_backward(grad, q, out, lse, sink_k, sink_v, scale)
                return operators.add_turns(grad_q, turns, sink_k), grad_k, grad_v, *grad_sinks, None, None, None
            wide_grad = grad.to(lse.dtype)
            weights = torch.exp(_sink_scores(q, sink_k, sink_logit) - lse[..., None])  # (B, H, T, S)
            mean = (wide_grad * out.to(lse.dtype)).sum(-1, keepdim=True)
            if sink_k is None or sink_v is None:
                grad_logit = -(weights * mean).sum((0, 2, 3))
                return grad_q, grad_k, grad_v, None, None, grad_logit.to(sink_logit.dtype), None, None
            heads, scale = q.shape[1], 1 / math.sqrt(q.shape[3])
            grad_scores = weights * (wide_grad @ _repeat_heads(sink_v, heads).to(lse.dtype).mT - mean) * scale
            from_sinks = grad_scores @ _repeat_heads(sink_k, heads).to(lse.dtype)
            grad_q = (grad_q.to(lse.dtype) + from_sinks).to(q.dtype)
            grad_sink_k = _sum_groups(grad_scores.mT @ q.to(lse.dtype), sink_k)
            grad_sink_v = _sum_groups(weights.mT @ wide_grad, sink_v)
            return grad_q, grad_k, grad_v, grad_sink_k, grad_sink_v, None, None, None


def _sink_scores(q: Tensor, sink_k: Tensor | None, sink_logit: Tensor | None) -> Tensor:
    """(B, H, T, S), in float32 or better: in bf16 their rounding would show in the weights."""
    precise = torch.promote_types(q.dtype, torch.float32)
    if sink_k is None:
        assert sink_logit is not None
        batch, heads, tokens, _ = q.shape
        return sink_logit.to(precise).view(1, heads, 1, 1).expand(batch, heads, tokens, 1)
    keys = _repeat_heads(sink_k, q.shape[1]).to(precise)
    return q.to(precise) @ (keys.mT / math.sqrt(q.shape[3]))


def _sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    """A gradient per query head, (B, H, N, D), as one per key/value head and per row that has its own (like's shape)."""
    batch, _, keys, width = grad.shape
    grad = grad.reshape(batch, like.shape[1], -1, keys, width).sum(2)
    return (grad if like.shape[0] == batch else grad.sum(0, keepdim=True)).to(like.dtype)


def _additive(visible: Tensor | None, q: Tensor) -> Tensor | None:
    if visible is None:
        return None
    return torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, -math.inf)


def _content_kernel(kernel: str, q: Tensor) -> str:
    """`fused` says how sinks are joined; the content's attention under it is this."""
    return kernel if kernel != "fused" else "cudnn" if q.is_cuda else "cpu"


def content_forward(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Content attention as (output, log-sum-exp (B, H, T), what the backward needs besides)."""
    scale = 1 / math.sqrt(q.shape[3])
    aten = torch.ops.aten
    kernel = _content_kernel(kernel, q)
    if kernel == "cpu":
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        bias = _additive(visible, q)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        return out, lse, ()
    if kernel == "efficient":
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        bias = _aligned_bias(visible, q, k.shape[2])
        out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
        return out, lse[..., : q.shape[2]], (seed, offset)
    if visible is not None:
        raise ValueError(f"attention form 'merge:{kernel}': this kernel takes no visible mask; use 'merge:efficient' or 'append'")
    if kernel == "flash":
        out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
        return out, lse, (seed, offset)
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
    return out, lse.view(q.shape[:3]), (seed, offset)


def content_backward(
    kernel: str,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rest: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    scale = 1 / math.sqrt(q.shape[3])
    aten = torch.ops.aten
    kernel = _content_kernel(kernel, q)
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, False, *rest, scale=scale
        )
    if kernel == "cudnn":
        stats = lse.contiguous()[..., None]
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, stats, *rest, None, None, None, q.shape[2], k.shape[2], 0.0, False, scale=scale
        )
    wide_k, wide_v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])  # by those that know no groups
    if kernel == "cpu":
        bias = _additive(visible, q)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, wide_k, wide_v, out, lse, 0.0, False, attn_mask=bias, scale=scale
        )
    else:
        bias = _aligned_bias(visible, q, k.shape[2])
        padded = pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)  # the kernel's own padding of rows
        grads = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, wide_k, wide_v, bias, out, padded, *rest, 0.0, [True, True, True, False], scale=scale
        )[:3]
    grad_q, grad_k, grad_v = grads
    return grad_q, _sum_groups(grad_k, k), _sum_groups(grad_v, v)


def _aligned_bias(visible: Tensor | None, q: Tensor, n_keys: int) -> Tensor | None:
    """The efficient kernel reads its bias in rows aligned to 16 elements and wants the full (B, H, T, L) view (no copy)."""
    bias = _additive(visible, q)
    if bias is None:
        return None
    room = -n_keys % 16
    bias = pad(bias, (0, room))[..., :n_keys] if room else bias
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], n_keys)
