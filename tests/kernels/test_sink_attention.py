"""The kernels of attention in training against their plain forms: on a GPU, or by Triton's interpreter."""

import math

import pytest
import torch

from comparing import assert_like, random
from sinkdlm.kernels import ops
from sinkdlm.kernels import sink_attention as kernels

pytestmark = pytest.mark.gpu

# batch, query heads, key/value heads, tokens, head width, sinks: odd sizes, none a multiple of a tile.
SMALL, LONG, WIDE = (2, 4, 2, 11, 8, 3), (1, 6, 2, 70, 24, 1), (1, 3, 1, 5, 16, 4)
SLOW = [(LONG, torch.float32), (SMALL, torch.bfloat16)]
CASES = [(SMALL, torch.float32), (WIDE, torch.float32), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
ZEROS = [(SMALL, torch.float32, False), (WIDE, torch.float32, True),
         *(pytest.param(*case, False, marks=pytest.mark.slow) for case in (*SLOW, (WIDE, torch.float32)))]  # fmt: skip
SPARE = 2  # rows behind the tokens that hold no sink


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small tiles, so that even these shapes take several."""
    for name, size in {"_MERGED_TILE": 64, "_BACK_TILE": 32, "_SPAN": 8, "_LEAST_SPAN": 8, "_RETURNED_TILE": 16}.items():
        monkeypatch.setattr(kernels, name, size)


def given_heads(shape, dtype):
    """Make heads of tokens and of the rows behind them, and angles of tokens and sinks."""
    batch, n_heads, n_kv, tokens, width, n_sinks = shape
    heads = random(batch * tokens + n_sinks + SPARE, n_heads + 2 * n_kv, width, dtype=dtype)
    return heads, [random(1, n, 1, width // 2, seed=i) for i, n in enumerate((tokens, tokens, n_sinks, n_sinks), 1)]


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_heads_are_rotated(shape, dtype):
    """With and without scores on sinks, and with angles per row, as packed documents have them."""
    batch, n_heads, n_kv, tokens, width, n_sinks = shape
    heads, (cos, sin, *_) = given_heads(shape, dtype)
    sink_k = random(1, n_kv, n_sinks, width, seed=5, dtype=dtype)
    by_row = [random(batch, tokens, 1, width // 2, seed=i) for i in (6, 7)]
    for angles, sinks in (((cos, sin), sink_k), (by_row, None)):
        given = (heads, *angles, sinks, batch, n_heads, 0.3)
        # Scores are float32 products of bf16 values, which Triton's interpreter truncates instead of rounding.
        near = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {}
        assert_like(kernels.rotate_heads(*given), ops.rotate_heads.plain(*given), **near)


@pytest.mark.parametrize(("shape", "dtype", "zero_value"), ZEROS)
def test_sinks_are_rotated(shape, dtype, zero_value):
    heads, angles = given_heads(shape, dtype)
    given = (heads, *angles[2:], shape[0] * shape[3], shape[1], zero_value)
    assert_like(kernels.rotate_sinks(*given), ops.rotate_sinks.plain(*given))


def attended(shape, dtype):
    """Make content attention's inputs and outputs in the model's layout, and the sinks'."""
    batch, n_heads, n_kv, tokens, width, n_sinks = shape
    q, content = (random(batch, tokens, n_heads, width, seed=i, dtype=dtype).transpose(1, 2) for i in (1, 2))
    lse = random(batch, n_heads, tokens, seed=3) + 3
    sink_k, sink_v = (random(1, n_kv, n_sinks, width, seed=i, dtype=dtype) for i in (4, 5))
    wide = sink_k.float().repeat_interleave(n_heads // n_kv, 1)
    scores = ((q.float() @ wide.mT) / math.sqrt(width)).transpose(1, 2).contiguous()
    return q, content, lse, sink_k, sink_v, scores, random(n_sinks + SPARE, n_heads, width, seed=6, dtype=dtype)


@pytest.mark.parametrize(("shape", "dtype"), CASES)
def test_sinks_are_merged(shape, dtype):
    _, content, lse, _, sink_v, scores, behind = attended(shape, dtype)
    given = (scores, content, lse, sink_v, behind)
    assert_like(kernels.merge_flat(*given), ops.merge_flat.plain(*given))


@pytest.mark.parametrize(("shape", "dtype", "zero_value"), ZEROS)
def test_the_backward_of_merging(shape, dtype, zero_value):
    batch, n_heads, n_kv, tokens, width, _ = shape
    q, content, lse, sink_k, sink_v, scores, behind = attended(shape, dtype)
    rows, lse = ops.merge_flat.plain(scores, content, lse, sink_v, behind)
    _, angles = given_heads(shape, dtype)
    grads = [random(batch, tokens, n, width, seed=7 + i, dtype=dtype).transpose(1, 2) for i, n in enumerate((n_heads, n_kv, n_kv))]
    grad = random(*rows.shape, seed=10, dtype=dtype)
    given = (grad, grads, [q, rows, lse, scores], [sink_k, sink_v], angles, zero_value, 1 / math.sqrt(width))
    wanted = ops.merge_flat_backward.plain(*given)
    assert not wanted[batch * tokens + shape[5] :].any()
    assert_like(kernels.merge_flat_backward(*given), wanted)
    assert_like(kernels.join_heads(*grads, *angles[:2]), ops.join_heads.plain(*grads, *angles[:2]))
