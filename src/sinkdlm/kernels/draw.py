"""A Triton kernel that reads logits once: it draws a token for each row and computes the token's log-odds.

sampling/drawing.py computes the same from the same keys in several passes on any device; the tests compare the two. sampling.py
imports this module only where the kernel runs: importing Triton is slow.

N rows of logits, V vocabulary.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from sinkdlm.noise import mixed_counter

_BLOCK = 1024
# noise.py's mixer, SplitMix64.
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_NONE = tl.constexpr(-1e38)  # below every logit, and unlike -inf it can be subtracted from itself


@triton.jit
def _mix(word):
    word += _GOLDEN
    word = (word ^ (word >> 30)) * _FIRST
    word = (word ^ (word >> 27)) * _SECOND
    return word ^ (word >> 31)


@triton.jit
def _gumbel(word):
    """Compute -log(-log(1 - x)), x from the upper 63 bits. Below 1/8 the inner logarithm is a series: 1 - x would lose x."""
    x = (word >> 1).to(tl.int64).to(tl.float32) * 1.0842021724855044e-19  # 2^-63
    x = tl.minimum(tl.maximum(x, 5.421010862427522e-20), 0.99999988079071045)
    series = 1 / 8 + x / 9
    for n in tl.static_range(7, 0, -1):
        series = 1 / n + x * series
    return -tl.log(tl.where(x < 0.125, x * series, -tl.log(1 - x)))


@triton.jit
def _choose(
    logits, keys, words, tokens, odds, stride, vocab, temperature,
    is_drawn: tl.constexpr, is_tempered: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Each element of a tile keeps the best of its columns and the log-sum-exp of the rest; at the end they are reduced alike."""
    row = tl.program_id(0).to(tl.int64)
    if is_drawn:
        key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    best = tl.full([block], -float("inf"), tl.float32)
    own = best  # the logit of each element's best column
    chosen = tl.arange(0, block)
    most = tl.full([block], _NONE, tl.float32)
    total = tl.zeros([block], tl.float32)
    for begin in range(0, vocab, block):
        column = begin + tl.arange(0, block)
        scored = tl.load(logits + row * stride + column, column < vocab, -float("inf")).to(tl.float32)
        value = scored
        if is_drawn:
            value = scored / temperature
            if is_tempered:
                scored = value
            word = tl.load(words + column, column < vocab).to(tl.uint64, bitcast=True)
            value += _gumbel(_mix(key + word))
        better = value > best
        other = tl.where(better, own, scored)
        own, chosen, best = tl.where(better, scored, own), tl.where(better, column, chosen), tl.where(better, value, best)
        now = tl.maximum(most, other)
        total = total * tl.exp(most - now) + tl.exp(other - now)
        most = now
    token = tl.min(tl.where(best == tl.max(best), chosen, vocab))
    wins = chosen == token
    other = tl.where(wins, -float("inf"), own)
    top = tl.maximum(tl.max(most), tl.max(other))
    rest = tl.sum(total * tl.exp(most - top)) + tl.sum(tl.exp(other - top))
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(odds + row, tl.max(tl.where(wins, own, -float("inf"))) - (top + tl.log(rest)))


def choose(logits: Tensor, keys: Tensor | None, temperature: float, tempered: bool) -> tuple[Tensor, Tensor]:
    """Choose a token for each row of logits (..., V); also return its log-odds under the softmax, tempered or not.

    keys (...): 64 random bits per row, to draw; None takes the likeliest token.
    """
    shape, vocab = logits.shape[:-1], logits.shape[-1]
    flat = logits.reshape(-1, vocab)
    assert flat.stride(1) == 1
    tokens = torch.empty(shape, dtype=torch.int64, device=logits.device)
    odds = torch.empty(shape, dtype=torch.float32, device=logits.device)
    drawn = keys is not None
    own, words = (tokens, tokens) if keys is None else (keys.contiguous(), mixed_counter(vocab, logits.device))
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    _choose[(flat.shape[0],)](
        flat, own, words, tokens, odds, flat.stride(0), vocab, temperature if drawn else 1.0, drawn, tempered, block=block
    )
    return tokens, odds
