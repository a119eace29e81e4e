"""How long a training step takes, by a small physical model. Knows nothing of torch or of what is installed.

A step is the sum of matmuls at a share of peak FLOP/s, attention at another share, other traffic at the memory's bandwidth, small
kernels, and the host. `python -m benchmarks.calibrate` fits the constants to records of an H200 and writes calibration.json beside
this file, with the names of the records. Other devices are scaled by their data sheets. Several devices have not been measured:
communication is counted at the links' rates, and overlaps with arithmetic.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sinkdlm.config.recipe import Recipe
from sinkdlm.planning.formulas import Chip, Layout, copies_of, kept_by_block, keys_of

CALIBRATION = Path(__file__).parent / "calibration.json"
HOST_RANKS = 8  # devices of a host, joined by the chip's own link
NETWORK = 50e9  # bytes a second and device between hosts, one way: 400 Gb/s for each, as such hosts are sold
_SCORED = 0.5  # share of positions that reach the head, with t uniform
# Memory traffic per parameter, in bytes. An update reads and writes weight and moments, and reads the gradient twice
# (norm, update); a forward and its backward round weights to bf16 and gradients back.
_UPDATE_BYTES = 32
_ROUNDING_BYTES = 12


class Constants(NamedTuple):
    """The fitted constants."""

    matmuls: float  # share of the peak
    attention: float  # share of the peak, by the FLOPs of formulas.py
    passes: float  # over the bytes that a block keeps for its backward, forward and backward together
    logit: float  # bytes of traffic for each logit
    lane: float  # bytes of traffic for each token and query channel, to merge a sink into attention
    block: float  # seconds that a block's small kernels add to a forward and its backward
    launch: float  # seconds that the host takes to launch a block, forward and backward: a lower bound unless captured
    step: float  # seconds of a step outside of its blocks and head


class Seconds(NamedTuple):
    """Seconds of one step on one rank, by part."""

    matmuls: float
    attention: float
    elementwise: float
    head: float
    update: float
    small: float  # small kernels and gaps
    exchange: float  # between ranks, at the links' rates
    launch: float  # the host's lower bound

    @property
    def total(self) -> float:
        return max(sum(self[:6]), self.exchange, self.launch)


@cache
def calibration() -> dict[str, Any]:
    """Read the constants, and the records that they come from."""
    return json.loads(CALIBRATION.read_text())


def fitted() -> Constants:
    return Constants(**calibration()["constants"])


def step_seconds(
    recipe: Recipe, rows: int, forwards: int, chip: Chip, layout: Layout | None = None, constants: Constants | None = None
) -> Seconds:
    """Estimate one rank's step: its rows cut into so many forwards, in bf16 with compiled blocks, and one update."""
    fit, config, layout = constants or fitted(), recipe.model, layout or Layout()
    count, length = config.count_parameters(), recipe.data.length
    halves = 1 + recipe.blocks.complementary
    tokens, forwards = rows * length * halves, forwards * halves
    computed = tokens * copies_of(config, length)
    # A forward is a third of the work. Full recomputation repeats all of it, selective all but matmuls and attention.
    again, rewritten = {"full": (4 / 3, 4 / 3), "selective": (1, 4 / 3), "none": (1, 1)}[recipe.train.recompute]
    channels = computed * config.n_layers * config.d_model
    kept = kept_by_block(config, 2, compiled=True, residual=recipe.train.residual)["none"]
    traffic = fit.passes * computed * config.n_layers * kept * rewritten + fit.lane * channels * config.n_lane
    captured = layout == Layout() and recipe.train.graphs != "off"  # where the host would be the limit
    return Seconds(
        matmuls=6 * computed * count.non_embedding * again / (fit.matmuls * chip.flops),
        attention=12
        * tokens
        * config.n_layers
        * config.attention_width
        * keys_of(config, length)
        * again
        / (fit.attention * chip.flops),
        elementwise=(traffic + _ROUNDING_BYTES * forwards * count.non_embedding) / chip.bandwidth,
        head=head_seconds(_SCORED * tokens, config.d_model, config.vocab_size, chip, fit),
        update=_UPDATE_BYTES * count.total / layout.shards / chip.bandwidth,
        small=fit.block * config.n_layers * forwards + fit.step,
        exchange=exchange_seconds(recipe, forwards, chip, layout),
        launch=0.0 if captured else fit.launch * config.n_layers * forwards + fit.step,
    )


def head_seconds(scored: float, width: int, vocab: int, chip: Chip, constants: Constants) -> float:
    """Estimate the head on `scored` positions, forward and backward."""
    return scored * vocab * (6 * width / (constants.matmuls * chip.flops) + constants.logit / chip.bandwidth)


def exchange_seconds(recipe: Recipe, forwards: int, chip: Chip, layout: Layout) -> float:
    """Estimate a rank's communication in a step: blocks gathered (bf16; again for the backward if resharded), the root once, and
    gradients reduced (float32): after every backward if sharded, once a step between copies."""
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
