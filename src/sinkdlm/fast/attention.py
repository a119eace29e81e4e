"""Attention by fused kernels: grouped heads without copies, FlexAttention with visibility rules, and attention over content with
its log-sum-exp, into which sinks are merged.

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
from sinkdlm.model.visibility import PADDING, SHARED, Visibility, follows, is_annealed, sees

_BLOCK = 128  # queries and keys of one block of FlexAttention, its own default
_HALF = (torch.bfloat16, torch.float16)
_FLEX_KINDS = 64  # forms of FlexAttention that a process may compile


def attend_grouped(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None = None, sink_v: Tensor | None = None, *, causal: bool = False, **how: Any
) -> Tensor:
    """Compute `model.attention.attend` without repeating key/value heads, where the kernel takes groups."""
    if any(part is not None for part in how.values()) or q.dtype not in _HALF or k.shape[1] == q.shape[1]:
        return attend(q, k, v, sink_k, sink_v, causal=causal, **how)
    check_causal(causal, sink_k)
    k, v, _ = append_sinks(k, v, sink_k, sink_v, None)
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def attend_kept(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor | None, sink_logit: Tensor | None = None, **how: Any) -> Tensor:
    """Compute `model.attention.attend` over a cache's keys without copying them. Grouped heads: a group's queries are queries of
    one head."""
    group = q.shape[1] // k.shape[1]
    if group == 1 or sink_logit is not None:
        return attend(q, k, v, *sinks, sink_logit=sink_logit, **how)
    if (visible := how.pop("visible", None)) is not None and visible.shape[2] > 1:
        visible = visible.repeat(1, 1, group, 1)
    folded = q.unflatten(1, (-1, group)).flatten(2, 3)  # (B, K, group W, D)
    return attend(folded, k, v, *sinks, visible=visible, **how).unflatten(2, (group, -1)).flatten(1, 2)


def attend_span(
    q: Tensor, k: Tensor, v: Tensor, *sinks: None, visible: Tensor, sink_logit: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Attend from a span to a cache's keys, sinks in front, by a kernel. visible: how many of the keys each query sees, as
    `RowCache.ends` has them, sinks included."""
    from sinkdlm.kernels.span_attention import attend_to_ends

    return attend_to_ends(q, k, v, visible, sink_logit)


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor | None = None, sink_v: Tensor | None = None, *, visible: BlockMask, **how: Any
) -> Tensor:
    """Attend by FlexAttention. visible: from `block_mask`, which has the sinks behind the content keys. how: as in `attend`."""
    sink_logit: Tensor | None = how.get("sink_logit")
    with torch.autocast(q.device.type, enabled=False):
        if sink_k is not None and sink_v is not None:
            filling = visible.seq_lengths[1] - k.shape[2] - sink_k.shape[2]
            k, v = (
                torch.cat([mine, pad(theirs, (0, 0, 0, filling)).expand(mine.shape[0], -1, -1, -1)], dim=2)
                for mine, theirs in ((k, sink_k), (v, sink_v))
            )
        # The eager form holds all scores: on a GPU it must be compiled, here or with the block around it.
        as_is = q.device.type == "cpu" or torch.compiler.is_compiling()
        kernel = cast(Callable[..., Any], flex_attention) if as_is else _compiled_flex()
        grouped = k.shape[1] != q.shape[1]
        if sink_logit is None:
            return cast(Tensor, kernel(q, k, v, block_mask=visible, enable_gqa=grouped))
        out, extra = kernel(q, k, v, block_mask=visible, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
        # exp(lse) / (exp(lse) + exp(logit)): the content's share of the softmax.
        left = torch.sigmoid(extra.lse - sink_logit.to(extra.lse.dtype)[:, None])
        return (out.to(left.dtype) * left[..., None]).to(q.dtype)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    # One function for all models of a process: each kind of heads, mask and dtype compiles it anew.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _FLEX_KINDS)
    return torch.compile(flex_attention, fullgraph=True)


def block_mask(rule: Visibility, batch: int, n_sinks: int) -> BlockMask:
    """Build FlexAttention's mask over T content keys, then the sinks, from tables of their blocks: no (T, T) tensor.

    Sinks come last so that blocks of keys and queries begin at the same tokens. Filling behind them makes the last block of keys
    whole: with a cut one, the kernel checks the bounds of every block. A block is skipped, whole or partial; the kernel applies
    the rule in partial blocks, which may hold hidden and visible pairs.
    """
    queries = rule.documents.expand(batch, -1).contiguous()
    n_filling = -(queries.shape[1] + n_sinks) % _BLOCK if n_sinks else 0
    n_behind = n_sinks + n_filling
    keys = pad(pad(queries, (0, n_sinks), value=SHARED), (0, n_filling), value=PADDING)
    (first_query, last_query), (first_key, last_key) = _block_ranges(queries), _block_ranges(keys)
    first_query, last_query = first_query[:, :, None], last_query[:, :, None]  # (B, blocks of queries, 1)
    first_key, last_key = first_key[:, None], last_key[:, None]
    shared = (first_query == SHARED) | (first_key == SHARED)
    touched = (first_query <= last_key) & (first_key <= last_query)
    whole = (first_query == last_query) & (first_key == last_key) & (first_query == first_key)
    row = torch.arange(touched.shape[1], device=queries.device)[:, None]
    column = torch.arange(touched.shape[2], device=queries.device)
    # A block cut at the end is partial.
    n_uncut = queries.shape[1] // _BLOCK
    whole = whole & (row < n_uncut) & (column < n_uncut)
    if rule.blocks is not None:
        codes = rule.blocks.expand(batch, -1).contiguous()
        key_codes = pad(codes, (0, n_behind))
        touched, whole = _join_blocks(codes, key_codes, touched, whole)

        def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return sees(queries[b, i], keys[b, j], follows(codes[b, i], key_codes[b, j]))

    elif rule.annealing is None:

        def is_seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return sees(queries[b, i], keys[b, j])

    else:
        rows, columns = rule.annealing.words
        columns, threshold = pad(columns, (0, n_behind)), rule.annealing.threshold
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


def _join_blocks(codes: Tensor, key_codes: Tensor, touched: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Narrow tables of documents by codes of block diffusion: which of FlexAttention's blocks hold a visible pair, and no other."""
    first, last = (edge[:, :, None] for edge in _block_ranges(codes))
    first_key, last_key = (edge[:, None] for edge in _block_ranges(key_codes))
    odd = (edge[:, :, None] for edge in _block_ranges(codes % 2))
    odd_key = (edge[:, None] for edge in _block_ranges(key_codes % 2))
    (all_noised, noised), (all_noised_key, noised_key) = odd, odd_key  # 1: all tokens are noised, some are
    alike = ((noised & noised_key) == 1) | ((all_noised | all_noised_key) == 0)
    equal = alike & (first <= last_key) & (first_key <= last)
    before = (all_noised_key == 0) & (first_key < last - last % 2)
    same = (first == last) & (first_key == last_key) & (first == first_key)
    return touched & (equal | before), whole & (same | ((noised_key == 0) & (last_key < first - first % 2)))


def _block_ranges(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return each block's least and greatest document number, (B, blocks). A cut last block repeats its last token."""
    n_tokens = numbers.shape[1]
    index = torch.arange(-(-n_tokens // _BLOCK) * _BLOCK, device=numbers.device).clamp_max(n_tokens - 1)
    return torch.aminmax(numbers[:, index].unflatten(1, (-1, _BLOCK)), dim=2)


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """List chosen blocks (B, rows, columns) for FlexAttention: how many in each row, and column indices, chosen ones first."""
    columns = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], columns.to(torch.int32)[:, None]


def content_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Attend over content by cuDNN, or on a CPU: output, log-sum-exp (B, H, T), and what else the backward needs."""
    scale = 1 / math.sqrt(q.shape[3])
    if q.device.type == "cpu":
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        return *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale), ()
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
    return out, lse.view(q.shape[:3]), (seed, offset)


def content_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v. From the merged output and log-sum-exp, the kernel rebuilds the joint softmax."""
    scale, aten = 1 / math.sqrt(q.shape[3]), torch.ops.aten
    if q.device.type != "cpu":
        stats = lse.contiguous()[..., None]
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, stats, *rest, None, None, None, q.shape[2], k.shape[2], 0.0, False, scale=scale
        )
    wide = (repeat_heads(x, q.shape[1]) for x in (k, v))  # this kernel takes no grouped heads
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, *wide, out, lse, 0.0, False, scale=scale)
    grad_k, grad_v = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in found[1:])
    return found[0], grad_k, grad_v
