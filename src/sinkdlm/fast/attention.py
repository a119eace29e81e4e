"""Attention as GPU kernels take it: grouped heads as they are, rules of who sees whom inside the kernel, and the content's part
with its log-sum-exp, for sinks to be merged into.

Knows tensors alone; runner.py decides which of these runs. Shapes as in model/attention.py.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from sinkdlm.model.attention import append_sinks, attend, check_causal, repeat_heads
from sinkdlm.model.visibility import SHARED, Visibility, is_annealed, sees

_BLOCK = 128  # queries and keys of one block of FlexAttention, its own default
_HALF = (torch.bfloat16, torch.float16)


def attend_grouped(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor | None = None,
    sink_v: Tensor | None = None,
    *,
    sink_logit: Tensor | None = None,
    visible: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """`model.attention.attend`, without a copy of each key/value head for every query head where the kernel can share them."""
    if visible is not None or sink_logit is not None or q.dtype not in _HALF or k.shape[1] == q.shape[1]:
        return attend(q, k, v, sink_k, sink_v, sink_logit=sink_logit, visible=visible, causal=causal)
    check_causal(causal, sink_k)
    k, v, _ = append_sinks(k, v, sink_k, sink_v, None)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def attend_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink_k: Tensor | None = None,
    sink_v: Tensor | None = None,
    *,
    sink_logit: Tensor | None = None,
    visible: BlockMask,
    causal: bool = False,
) -> Tensor:
    """FlexAttention; visible: from `block_mask`, which has the sinks behind the content keys."""
    with torch.autocast(q.device.type, enabled=False):
        if sink_k is not None and sink_v is not None:
            k = torch.cat([k, sink_k.expand(k.shape[0], -1, -1, -1)], dim=2)
            v = torch.cat([v, sink_v.expand(v.shape[0], -1, -1, -1)], dim=2)
        # Its eager form holds all scores: on a GPU it must be compiled, here or with the block around it.
        as_is = q.device.type == "cpu" or torch.compiler.is_compiling()
        kernel = cast(Callable[..., Any], flex_attention) if as_is else _compiled_flex()
        grouped = k.shape[1] != q.shape[1]
        if sink_logit is None:
            return cast(Tensor, kernel(q, k, v, block_mask=visible, enable_gqa=grouped))
        out, extra = kernel(q, k, v, block_mask=visible, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
        # exp(lse) / (exp(lse) + exp(logit)): what the logit's column leaves to the content.
        left = torch.sigmoid(extra.lse - sink_logit.to(extra.lse.dtype)[:, None])
        return (out.to(left.dtype) * left[..., None]).to(q.dtype)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, fullgraph=True)


def block_mask(rule: Visibility, batch: int, n_sinks: int) -> BlockMask:
    """The rule over T content keys and then the sinks, without a (T, T) tensor: only (T / 128, T / 128).

    Sinks come last so that blocks of keys and of queries begin at the same tokens. A block is skipped, whole, or computed by the
    rule; a block that may hold a hidden and a visible pair is computed by the rule.
    """
    queries = rule.documents.expand(batch, -1).contiguous()
    keys = pad(queries, (0, n_sinks), value=SHARED)
    (first_query, last_query), (first_key, last_key) = _block_ranges(queries), _block_ranges(keys)
    first_query, last_query = first_query[:, :, None], last_query[:, :, None]  # (B, blocks of queries, 1)
    first_key, last_key = first_key[:, None], last_key[:, None]
    shared = (first_query == SHARED) | (first_key == SHARED)
    touched = (first_query <= last_key) & (first_key <= last_query)
    whole = (first_query == last_query) & (first_key == last_key) & (first_query == first_key)
    row = torch.arange(touched.shape[1], device=queries.device)[:, None]
    column = torch.arange(touched.shape[2], device=queries.device)
    whole = whole & (row < queries.shape[1] // _BLOCK) & (column < keys.shape[1] // _BLOCK)  # a cut block has pairs beyond the end
    if rule.annealing is None:

        def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return sees(queries[b, i], keys[b, j])

    else:
        rows, columns = rule.annealing.words
        columns, threshold = pad(columns, (0, n_sinks)), rule.annealing.threshold
        whole = whole & (column < row)
        if rule.annealing.closed:
            touched = touched & (column <= row)

        def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return sees(queries[b, i], keys[b, j], is_annealed(i, j, rows[i], columns[j], threshold))

    return BlockMask.from_kv_blocks(
        *_ordered((touched | shared) & ~whole),
        *_ordered(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=is_seen,
        seq_lengths=(queries.shape[1], keys.shape[1]),
    )


def _block_ranges(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest number of each block, (B, blocks). A last block that is cut is filled up with its last token."""
    n_tokens = numbers.shape[1]
    index = torch.arange(-(-n_tokens // _BLOCK) * _BLOCK, device=numbers.device).clamp_max(n_tokens - 1)
    return torch.aminmax(numbers[:, index].unflatten(1, (-1, _BLOCK)), dim=2)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen blocks (B, rows, columns) as FlexAttention lists them: how many in each row, and their columns, those first."""
    columns = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], columns.to(torch.int32)[:, None]


def content_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Attention over content as (output, log-sum-exp (B, H, T), what the backward needs besides): cuDNN's kernel, or a CPU's."""
    scale = 1 / math.sqrt(q.shape[3])
    if q.device.type == "cpu":
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        return *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale), ()
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
    return out, lse.view(q.shape[:3]), (seed, offset)


def content_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v. Given the merged output and log-sum-exp, the kernel rebuilds the weights of the whole softmax."""
    scale, aten = 1 / math.sqrt(q.shape[3]), torch.ops.aten
    if q.device.type != "cpu":
        stats = lse.contiguous()[..., None]
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, stats, *rest, None, None, None, q.shape[2], k.shape[2], 0.0, False, scale=scale
        )
    wide = (repeat_heads(x, q.shape[1]) for x in (k, v))  # this kernel knows no groups
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, *wide, out, lse, 0.0, False, scale=scale)
    grad_k, grad_v = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in found[1:])
    return found[0], grad_k, grad_v
