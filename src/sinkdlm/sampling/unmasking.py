"""Unmasking policies: which positions are committed first, how many in a step, and which are masked again.

Owns the policies' names and their arithmetic on plain numbers. Knows no denoiser, batch or token; drawing.py scores logits.

A share is the part of a block that is still masked: 1 before its first step, 0 after its last.
"""

import functools
import itertools
import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from sinkdlm.errors import SamplingError
from sinkdlm.sampling.aliases import translate

ORDERS = ("confidence", "margin", "entropy", "random", "ancestral")
PLANNED_ORDERS = ("random", "ancestral")  # decided by noise alone, before the forward
SCHEDULES = ("linear", "cosine", "timesteps")
REMASKS = ("none", "cap", "rescale", "conf", "loop")
CACHES = ("auto", "none", "prefix", "dual", "exact")
APPROXIMATE = ("prefix", "dual")
MOST_CANVASES = 64  # that one forward checks
DRAFTS = ("linear", "tree")
_CHOICES = {"order": ORDERS, "schedule": SCHEDULES, "remask": REMASKS, "cache": CACHES, "draft": DRAFTS}
_WHOLE = ("steps", "block", "top_k", "eos_id")
_LEAST = {"steps": 1, "block": 1, "top_k": 1, "temperature": 0, "order_temperature": 0, "guidance": -1, "min_p": 0}
_IDS = ("suppressed", "last_ids")
_SHARES = ("threshold", "top_p", "remask_rate", "last_time")
_ABOVE_0 = (*_SHARES, "repetition_penalty")

# ReMDM's loop: tokens are revealed up to a share, kept there and exchanged, and then the rest is revealed.
_LOOP_FROM, _LOOP_TO, _LOOP_REVEALED = 0.55, 0.05, 0.9
# The authors' eta, from their scripts for text. "conf" takes all of the largest rate: about one token a step.
_RATES = {"cap": 0.008, "rescale": 0.015, "conf": 1.0, "loop": 0.02}


@dataclass(frozen=True)
class Policy:
    """How a canvas is filled. Fields that mean nothing together are refused together."""

    order: str = "confidence"  # which positions first: most probable draw, margin to the second, lowest entropy, by chance
    order_temperature: float = 0.0  # draw positions by softmax(confidence / order_temperature); 0: the surest
    last_ids: tuple[int, ...] = ()  # positions that would get one of these come after all others, leftmost first
    schedule: str = "linear"  # how many in a step: equal shares, cosine, or SMDM's times
    steps: int | None = None  # over all blocks; None: one per position
    block: int | None = None  # positions in a block, filled left to right; None: the canvas is one block
    threshold: float | None = None  # commit every draw of at least this probability, and at least one
    last_time: float = 1e-5  # where the times of schedule "timesteps" end
    remask: str = "none"  # ReMDM: committed tokens may be masked again
    remask_rate: float | None = None  # ReMDM's eta: the most a step masks (cap, loop), or a factor (rescale, conf); None: theirs
    # prefix, dual: reuse keys and values outside the block from its first step (approximate); exact: of finished blocks, in block
    # diffusion; auto: exact there, else none
    cache: str = "auto"
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float = 0.0  # draw only tokens at least this probable, as a share of the likeliest
    repetition_penalty: float = 1.0  # divides positive logits of tokens on the canvas and multiplies negative ones; EOS has none
    tempered: bool = False  # score by the tempered distribution, as Dream, not by the model's own
    guidance: float = 0.0
    shift: bool = False  # the denoiser's row i is for token i + 1 (a foreign one; our models align their rows)
    suppressed: tuple[int, ...] = ()
    eos_id: int | None = None  # a row ends once everything up to its first EOS is committed
    # Canvases that a forward may check, to take several steps at once; "auto": as many as are fastest. Changes no token.
    speculate: int | str | None = None
    draft: str = "linear"  # the next steps' likeliest commits in a line, or a tree with second choices

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _check_value(name, value)
        if self.remask != "none" and self.order != "ancestral":
            raise SamplingError(f"remask = {self.remask!r}: goes with order = 'ancestral', not {self.order!r}")
        for name in ("threshold", "order_temperature", "last_ids"):
            if getattr(self, name) and self.order in PLANNED_ORDERS:
                raise SamplingError(f"{name}: goes with an order that reads predictions, not {self.order!r}; leave one out")
        if self.order_temperature and self.threshold is not None:
            why = "draws among the positions, and a threshold takes all that pass"
            raise SamplingError(f"order_temperature = {self.order_temperature}: {why}; leave one out")
        if self.remask_rate is not None and self.remask == "none":
            raise SamplingError(f"remask_rate = {self.remask_rate}: goes with remask, as in remask='cap'; give both or neither")
        cuts = {"top_k": self.top_k, "top_p": None if self.top_p == 1 else self.top_p, "min_p": self.min_p or None}
        for name, value in cuts.items():
            if value is not None and self.temperature == 0 and not self.tempered:
                why = "has no effect at temperature 0, which takes the likeliest token"
                raise SamplingError(f"{name} = {value}: {why}; give a temperature above 0, or leave it out")
        for name in ("threshold", "remask"):
            if self.speculate not in (None, 1) and getattr(self, name) not in (None, "none"):
                why = f"the next commits cannot be guessed with {name} = {getattr(self, name)!r}"
                raise SamplingError(f"speculate = {self.speculate!r}: {why}; leave one out")
        if self.cache in APPROXIMATE and self.block is None:
            raise SamplingError(f"cache = {self.cache!r}: needs a block length, as in block=32")

    @property
    def cuts(self) -> bool:
        """Whether tokens may be cut before the draw."""
        return self.top_k is not None or (self.top_p or 1) < 1 or self.min_p > 0

    @property
    def is_drawn(self) -> bool:
        """Whether noise decides anything; if not, texts of the same prompt are copies. Remasking implies a planned order."""
        return self.temperature > 0 or self.order_temperature > 0 or self.order in PLANNED_ORDERS

    @property
    def draws_order(self) -> bool:
        """Whether the draws of tokens decide which positions are committed."""
        return self.temperature > 0 and (self.order == "confidence" or self.threshold is not None or bool(self.last_ids))

    @property
    def eta(self) -> float:
        return _RATES.get(self.remask, 0.0) if self.remask_rate is None else self.remask_rate


def _check_value(name: str, value: Any) -> None:
    """Refuse a field whose value is wrong by itself."""
    if name in _CHOICES and value not in _CHOICES[name]:
        raise SamplingError(f"{name} = {value!r}: allowed: {', '.join(_CHOICES[name])}")
    if name == "speculate" and value not in (None, "auto") and (type(value) is not int or not 1 <= value <= MOST_CANVASES):
        raise SamplingError(f"speculate = {value!r}: allowed: auto, or 1 to {MOST_CANVASES}")
    if name in _IDS and not all(isinstance(token, int) for token in value):
        raise SamplingError(f"{name} = {list(value)}: expected token ids, as in [3, 5]")
    if value is None or name not in (*_WHOLE, *_LEAST, *_ABOVE_0):
        return
    if isinstance(value, bool) or not isinstance(value, int if name in _WHOLE else int | float):
        raise SamplingError(f"{name} = {value!r}: expected a {'whole ' if name in _WHOLE else ''}number")
    if name in _LEAST and not (math.isfinite(value) and value >= _LEAST[name]):
        raise SamplingError(f"{name} = {value}: allowed is {_LEAST[name]} or more")
    if (name in _SHARES and not 0 < value <= 1) or (name == "min_p" and value > 1):
        raise SamplingError(f"{name} = {value}: allowed is above 0 and at most 1")
    if name == "repetition_penalty" and not 0 < value < math.inf:
        raise SamplingError(f"{name} = {value}: allowed is above 0; 1 changes nothing")


FIELDS = tuple(field.name for field in fields(Policy))

NAMED = {
    "smdm-origin": Policy(order="ancestral", schedule="timesteps", temperature=1.0),
    "smdm-greedy": Policy(order="confidence", schedule="timesteps"),
    "llada": Policy(order="confidence", schedule="linear"),
    "dream": Policy(order="entropy", schedule="timesteps", last_time=1e-3, tempered=True),
    "fast": Policy(order="confidence", block=32, threshold=0.9, cache="dual"),
}


def policy_of(config: "str | Policy" = "llada", **options: Any) -> Policy:
    """A named policy, with some of its fields replaced by options, under our names or those of aliases.py."""
    if isinstance(config, str) and config not in NAMED:
        raise SamplingError(f"policy {config!r}: unknown; there are {', '.join(NAMED)}")
    options = translate(options, FIELDS)
    for name in options.keys() & set(_IDS):
        ids = options[name]
        options[name] = tuple(ids) if isinstance(ids, list | tuple | set) else (ids,)
    return replace(NAMED[config] if isinstance(config, str) else config, **options)


def quotas(n: int, steps: int, schedule: str, last_time: float = 1e-5) -> list[int]:
    """Positions that each step commits: they add up to n. A step may commit none."""
    if schedule == "linear":
        return [n // steps + (step < n % steps) for step in range(steps)]
    if schedule == "cosine":
        left = [math.floor(n * share) for share in masked_shares(steps, schedule)]
        return [before - after for before, after in itertools.pairwise(left)]
    found = []
    for step, fraction in enumerate(_fractions(steps, last_time)):
        found.append(n if step == steps - 1 else int(n * fraction))
        n -= found[-1]
    return found


@functools.lru_cache(maxsize=64)
def _fractions(steps: int, last_time: float) -> Any:
    """1 - s/t of each step, in float32 as the original code: n times it is truncated, so its rounding matters."""
    times = torch.linspace(1, last_time, steps + 1, dtype=torch.float32, device="cpu")
    return (1 - times[1:] / times[:-1]).numpy()


@functools.lru_cache(maxsize=64)
def masked_shares(steps: int, schedule: str, last_time: float = 1e-5) -> tuple[float, ...]:
    """Masked share before each step and after the last; where that is not zero, the last step reveals the rest."""
    if schedule == "cosine":
        return (*(math.cos(math.pi / 2 * step / steps) for step in range(steps)), 0.0)
    last = last_time if schedule == "timesteps" else 0.0
    return (*(1 + (last - 1) * step / steps for step in range(steps)), last)


def split_steps(sizes: list[int], steps: int | None, *, spare: bool = True) -> list[int]:
    """Steps of each block, of `sizes` open positions: equal, the remainder first.

    spare: no block gets more steps than it has positions; the others take them."""
    if steps is None:
        return list(sizes)
    if steps < len(sizes):
        raise SamplingError(f"steps = {steps}: fewer than the {len(sizes)} blocks; give at least one per block, or longer blocks")
    if not spare:
        return quotas(steps, len(sizes), "linear")
    found, left = [0] * len(sizes), steps
    while left and found != sizes:
        room = [block for block, size in enumerate(sizes) if found[block] < size]
        for block, more in zip(room, quotas(left, len(room), "linear"), strict=True):
            given = min(more, sizes[block] - found[block])
            found[block], left = found[block] + given, left - given
    return found


def cut_blocks(first: int, length: int, block: int | None) -> list[tuple[int, int]]:
    """(start, stop) of the blocks that tile the canvas from its first open position on; the last may be shorter."""
    width = block or max(1, length - first)
    return [(start, min(start + width, length)) for start in range(first, length, width)]


@functools.lru_cache(maxsize=64)
def exchanges(policy: Policy, steps: int) -> tuple[tuple[float, float], ...]:
    """For each step, the probabilities that a masked position is revealed and that a committed one is masked again.

    ReMDM's posterior (Wang et al. 2025): with a(t) the share revealed and sigma the chance to be masked again, a masked position
    is revealed with (a(s) - (1 - sigma) a(t)) / (1 - a(t)), which keeps a(s) revealed on average. The last step reveals all."""
    loop = policy.remask == "loop"
    revealed = [1 - share for share in masked_shares(steps, policy.schedule, policy.last_time)]
    if loop:
        revealed = [_loop_revealed(1 - step / steps) for step in range(steps + 1)]
    found = []
    for now, then in itertools.pairwise(revealed):
        most = min(1.0, (1 - then) / now) if now > 0 else 1.0
        sigma = min(policy.eta, most) if policy.remask in ("cap", "loop") else policy.eta * most
        if loop and now != then:
            sigma = 0.0
        drained = 0.0 if policy.remask == "conf" else sigma  # "conf" shares sigma among committed positions only
        found.append((min(1.0, max(0.0, (then - (1 - drained) * now) / (1 - now))) if now < 1 else 1.0, sigma))
    return (*found[:-1], (1.0, 0.0))


def _loop_revealed(t: float) -> float:
    if t > _LOOP_FROM:
        return (1 - t) * _LOOP_REVEALED / (1 - _LOOP_FROM)
    return _LOOP_REVEALED if t > _LOOP_TO else 1 - t * (1 - _LOOP_REVEALED) / _LOOP_TO
