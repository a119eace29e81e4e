"""Track attention on the sink from step 0 and tell when layers lose it.

An adapted sink is a place that the parent's weights make. Steps that are too large destroy it within a few of them, and it does not
come back (docs/log.md).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sinkdlm.training.gradient_spikes import read_lines

RESTS = 0.1  # of a layer's attention: as much on its sink, and it rests there
LOST = 0.1  # of the most that a layer had on its sink: with less it has lost it
MANY, FEW = 0.25, 2  # of a model's layers, and layers at least: where more have lost their sink, the run is told to have
# Of the most that all layers had on it together: with more, some have left it while others came, as from scratch they do.
HELD = 0.75


class SinkLoss(NamedTuple):
    """Of the first look that found many layers without what they had on their sink."""

    step: int
    before: int  # the look before it
    layers: int
    of: int  # layers of the model

    @property
    def text(self) -> str:
        return (
            f"{self.layers} of {self.of} layers have lost the sink that they rested on, since step {self.before}. Too large steps "
            "do that, and it may not come back: a new run with a longer train.warmup or a smaller train.lr is the cure"
        )


class SinkHealth:
    """Told look after look. loss: stays as it was found first."""

    def __init__(self) -> None:
        self.loss: SinkLoss | None = None
        self._most: list[float] = []  # by layer
        self._most_of_all = 0.0  # at one look
        self._before = 0

    @classmethod
    def read(cls, folder: Path) -> "SinkHealth":
        """As the looks that a run folder has kept tell it."""
        found = cls()
        for line in read_lines(folder, "probe"):
            found.look(line["step"], [layer.get("sink_share") for layer in line["layers"]])
        return found

    def look(self, step: int, shares: Sequence[float | None]) -> SinkLoss | None:
        """shares: of attention on sinks, by layer. The loss, where this look is the one that finds it."""
        known = [share for share in shares if share is not None]
        self._most = [max(pair) for pair in zip(self._most or known, known, strict=True)]
        self._most_of_all = max(self._most_of_all, sum(known))
        lost = sum(now < LOST * most for now, most in zip(known, self._most, strict=True) if most >= RESTS)
        before, self._before = self._before, step
        if self.loss is not None or lost <= max(FEW, MANY * len(known)) or sum(known) > HELD * self._most_of_all:
            return None
        self.loss = SinkLoss(step, before, lost, len(known))
        return self.loss


def read_sink_loss(folder: Path) -> Mapping[str, Any]:
    """For `train --json`; empty where nothing was lost."""
    loss = SinkHealth.read(folder).loss
    return {} if loss is None else {"step": loss.step, "layers": loss.layers, "of": loss.of}
