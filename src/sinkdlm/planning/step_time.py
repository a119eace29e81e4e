"""How long a training step takes, by a small physical model. Knows nothing of torch or of what is installed.

A step is matmuls at a share of the device's peak, attention's at another, the traffic of everything else at the speed of
its memory, and what small kernels and the host cost. The constants are fitted to records of an H200 by `python -m
benchmarks.calibrate`, which writes calibration.json beside this file and names the records there. Other devices are scaled by their
data sheets. Of several devices nothing has been measured: what ranks exchange is counted at the links' own rates, and hidden behind
arithmetic where it takes less.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sinkdlm.config.recipe import Recipe
from sinkdlm.planning.formulas import Chip, Layout, kept_by_block

CALIBRATION = Path(__file__).parent / "calibration.json"
HOST_RANKS = 8  # devices of a host that are joined by the chip's own link
NETWORK = 50e9  # bytes a second and device between hosts, one way: 400 Gb/s for each, as such hosts are sold
_SCORED = 0.5  # share of positions that reach the head, with t uniform
# Bytes that pass through memory for every parameter. An update reads and writes weight and moments, and reads the gradient twice
# (norm, update); a forward and its backward round weights to bf16 and gradients back.
_UPDATE_BYTES = 32
_ROUNDING_BYTES = 12


class Constants(NamedTuple):
    """What is fitted."""

    matmuls: float  # share of the peak
    attention: float  # share of the peak, by the FLOPs of planning.py
    passes: float  # over what a block keeps for its backward, forward and backward together
    logit: float  # bytes of traffic for each logit
    lane: float  # bytes of traffic for each token and query channel, to join a sink to attention
    block: float  # seconds that a block's small kernels add to a forward and its backward
    launch: float  # seconds in which the host can start a block, forward and backward: no step is faster, unless it is captured
    step: float  # seconds of a step outside of its blocks and head


class Seconds(NamedTuple):
    """Of one step on one rank."""

    matmuls: float
    attention: float
    elementwise: float
    head: float
    update: float
    small: float  # small kernels and gaps
    exchange: float  # between ranks, at the links' rates
    launch: float  # what the host needs at the least

    @property
    def total(self) -> float:
        return max(sum(self[:6]), self.exchange, self.launch)


@cache
def calibration() -> dict[str, Any]:
    """Constants, and the records that they come from."""
    return json.loads(CALIBRATION.read_text())


def fitted() -> Constants:
    return Constants(**calibration()["constants"])


def step_seconds(
    recipe: Recipe, rows: int, forwards: int, chip: Chip, layout: Layout | None = None, constants: Constants | None = None
) -> Seconds:
    """Of a rank that cuts so many rows into so many forwards, in bf16 with compiled blocks, and makes one update."""
    fit, config, layout = constants or fitted(), recipe.model, layout or Layout()
    count, length = config.count_parameters(), recipe.data.length
    tokens = rows * length
    # A forward is a third of both. Recomputation makes it again: full all of it, selective what is neither product nor attention.
    again, rewritten = {"full": (4 / 3, 4 / 3), "selective": (1, 4 / 3), "none": (1, 1)}[recipe.train.recompute]
    channels = tokens * config.n_layers * config.d_model
    kept = kept_by_block(config, 2, compiled=True, residual=recipe.train.residual)["none"]
    traffic = fit.passes * tokens * config.n_layers * kept * rewritten + fit.lane * channels * config.n_lane
    captured = layout == Layout() and recipe.train.graphs != "off"  # where the host would be the slow one
    return Seconds(
        matmuls=6 * tokens * count.non_embedding * again / (fit.matmuls * chip.flops),
        attention=12 * channels * length * again / (fit.attention * chip.flops),
        elementwise=(traffic + _ROUNDING_BYTES * forwards * count.non_embedding) / chip.bandwidth,
        head=head_seconds(_SCORED * tokens, config.d_model, config.vocab_size, chip, fit),
        update=_UPDATE_BYTES * count.total / layout.shards / chip.bandwidth,
        small=fit.block * config.n_layers * forwards + fit.step,
        exchange=exchange_seconds(recipe, forwards, chip, layout),
        launch=0.0 if captured else fit.launch * config.n_layers * forwards + fit.step,
    )


def head_seconds(scored: float, width: int, vocab: int, chip: Chip, constants: Constants) -> float:
    """Of so many positions, forward and backward."""
    return scored * vocab * (6 * width / (constants.matmuls * chip.flops) + constants.logit / chip.bandwidth)


def exchange_seconds(recipe: Recipe, forwards: int, chip: Chip, layout: Layout) -> float:
    """What a rank sends in a step: gathered blocks (bf16, again for the backward where they were dropped), the root once, sums of
    gradients (float32) after every backward where they are sharded and once a step between copies."""
    count, seconds = recipe.model.count_parameters(), 0.0
    if layout.shards > 1:
        gathered = 2 * count.non_embedding * (2 if recipe.parallel.reshard else 1) + 4 * (count.embedding + count.head)
        share = (layout.shards - 1) / layout.shards
        seconds += forwards * share * (gathered + 4 * count.total) / _link(chip, layout.shards)
    if layout.copies > 1:
        part = 4 * count.total / layout.shards
        seconds += 2 * (layout.copies - 1) / layout.copies * part / _link(chip, layout.ranks)
    return seconds


def _link(chip: Chip, ranks: int) -> float:
    return chip.link if ranks <= HOST_RANKS else NETWORK
