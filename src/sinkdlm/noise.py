"""Random numbers as pure functions of integer keys: no state, no generator, no order.

The arithmetic is wrapping 64-bit integer arithmetic in plain torch, so a number is the same on a CPU and on a GPU, alone and in
any batch. Knows nothing of models, data or schedules.

The mixer is the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"). A key of
several words is folded in word by word, `state = mix(state + mix(word))`. Words broadcast: hashing (B, 1) samples against (T,)
positions costs one mix per element of the result.
"""

import functools
import math
import operator
from enum import IntEnum

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_ROUNDS = 8

Key = int | Tensor


class Stream(IntEnum):
    """The purpose of a random number. Two streams never share numbers, whatever the other keys."""

    MASK = 1  # which positions of a training sample are masked
    TIME = 2  # the diffusion time of a training sample
    ORDER = 3  # which row of the data a sample reads
    WEIGHTS = 4  # initial weights
    SAMPLING = 5  # denoising
    LIKELIHOOD = 6  # Monte Carlo masks
    LENGTH = 7  # random lengths of rows
    ANNEALING = 8  # which later tokens are visible during attention annealing
    ANALYSIS = 9  # resampled trajectories; samples of values for figures
    DROPOUT = 10  # of adapters, by step


def _signed(word: int) -> int:
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _mix_int(word: int) -> int:
    word = (word + _GOLDEN) & _WORD
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        word = ((word ^ (word >> shift)) * multiplier) & _WORD
    return word ^ (word >> _SHIFTS[2])


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """Shift logically: torch's shift of signed words is arithmetic."""
    return (word >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_owned(word: Tensor) -> Tensor:
    """Mix an int64 tensor in place; nobody else may hold it."""
    word += _signed(_GOLDEN)
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        word ^= _shift_right(word, shift)
        word *= _signed(multiplier)
    word ^= _shift_right(word, _SHIFTS[2])
    return word


def _mix(word: Key) -> Key:
    return _mix_owned(word.clone()) if isinstance(word, Tensor) else _mix_int(word)


def _plain(key: Key) -> Key:
    if isinstance(key, Tensor):
        if key.dtype == torch.bool or key.is_floating_point():
            raise TypeError(f"noise keys are integers, not {key.dtype}")
        return key.to(torch.int64)
    return operator.index(key)


def hash_words(*keys: Key) -> Key:
    """Hash broadcast keys to 64 random bits each: an int, or an int64 tensor if any key is a tensor."""
    return fold(0, *keys)


def fold(state: Key, *keys: Key) -> Key:
    """Continue an earlier hash: hash_words(a, b, c) == fold(hash_words(a), b, c)."""
    for key in keys:
        word = _mix(_plain(key))
        if isinstance(word, Tensor):
            state = _mix_owned(word + (state if isinstance(state, Tensor) else _signed(state)))
        elif isinstance(state, Tensor):
            state = _mix_owned(state + _signed(word))
        else:
            state = _mix_int((state + word) & _WORD)
    return state


def random_bits(bits: int, *keys: Key) -> Tensor:
    """Return the top `bits` (at most 63) of hash_words(*keys), as non-negative int64."""
    return top_bits(bits, hash_words(*keys))


def top_bits(bits: int, words: Key) -> Tensor:
    return _shift_right(words, 64 - bits) if isinstance(words, Tensor) else torch.tensor(words >> (64 - bits))


def uniform(seed: Key, stream: Stream, *keys: Key, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw uniform numbers in the open interval (0, 1), keyed by (seed, stream, sample, position, ...).

    Values are midpoints of equal cells, exact in `dtype` (float64 or float32), so neither 0 nor 1 occurs.
    """
    return unit_interval(hash_words(seed, int(stream), *keys), dtype)


def unit_interval(words: Key, dtype: torch.dtype = torch.float64) -> Tensor:
    """Map hashed words to numbers in (0, 1)."""
    bits = {torch.float64: 52, torch.float32: 23}[dtype]
    return top_bits(bits, words).to(dtype).add_(0.5).mul_(2.0**-bits)


def golden_times(seed: int, samples: Tensor) -> Tensor:
    """Return t of each sample index n: frac(u(seed) + n / golden ratio) in (0, 1), float64.

    A low-discrepancy sequence: any run of consecutive samples is spread evenly, on whatever ranks they are. The fraction is a
    64-bit word that wraps around, so sample 10**15 is as exact as sample 0.
    """
    return unit_interval(golden_words(hash_words(seed, int(Stream.TIME)), samples))


def golden_words(start: Key, samples: Tensor) -> Tensor:
    """Return start + n / golden ratio, modulo 1, as 64-bit fractions."""
    return samples.to(torch.int64) * _signed(_GOLDEN) + (start if isinstance(start, Tensor) else _signed(start))


@functools.lru_cache(maxsize=64)
def stream_state(seed: int, stream: Stream, device: torch.device) -> Tensor:
    """Return hash_words(seed, stream) as a cached device tensor: to compiled code it is data, so a new seed does not recompile."""
    return torch.tensor(_signed(int(hash_words(seed, int(stream)))), device=device)


@functools.lru_cache(maxsize=64)
def counter(n: int, device: torch.device) -> Tensor:
    """Return 0..n-1 on a device, cached. Do not write to it."""
    return torch.arange(n, device=device)


@functools.lru_cache(maxsize=8)
def mixed_counter(n: int, device: torch.device) -> Tensor:
    """Return the mixed words that `fold(key, counter(n))` adds to any key, cached. Do not write to it."""
    return _mix_owned(torch.arange(n, device=device))


def pair_words(key: int, stream: Stream, n: int, device: torch.device) -> Tensor:
    """Hash a word per row and per column of an n by n table, (2, n) int32; `visibility.pair_bits` combines them."""
    words = hash_words(key, int(stream), torch.arange(2, device=device)[:, None], torch.arange(n, device=device))
    assert isinstance(words, Tensor)
    return (words >> 32).to(torch.int32)


def permute(index: Tensor, n: int, seed: int, *keys: Key) -> Tensor:
    """Map `index` by a keyed random permutation of 0..n-1: random access, no table. A key may be a tensor like index.

    A Feistel network on pairs (left in 0..a-1, right in 0..b-1) with a*b just above n, whose rounds add a keyed hash of one half
    to the other (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). A result beyond n-1 is encrypted again (cycle
    walking), which keeps the map one-to-one; fewer than a in a*b need it.
    """
    if n < 1:
        raise ValueError(f"a permutation needs at least one element, not {n}")
    if index.numel() and not bool(((index >= 0) & (index < n)).all()):
        raise IndexError(f"permutation index outside 0..{n - 1}")
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    key = hash_words(seed, int(Stream.ORDER), *keys, n)

    def encrypt(value: Tensor) -> Tensor:
        left, right = value // b, value % b
        for number in range(0, _ROUNDS, 2):
            left = (left + random_bits(62, key, number, right)) % a
            right = (right + random_bits(62, key, number + 1, left)) % b
        return left * b + right

    out = encrypt(index.to(torch.int64))
    while True:
        outside = out >= n
        if not bool(outside.any()):
            return out
        out = torch.where(outside, encrypt(out), out)
