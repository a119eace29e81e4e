"""Show a twin while it trains: a live picture on a terminal that is large enough, else short plain lines.

A monitor that now and then lets the model fill in a held-out sum and a story, and keeps every step. It uses no global randomness
and changes no weight, so training is bit-equal without it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from sinkdlm.config.recipe import LogSection
from sinkdlm.demo.language import ANSWER, EOS, Problem
from sinkdlm.sampling import requests_of, start, stream
from sinkdlm.training.monitor import Monitor

WIDE, TALL = 60, 10  # least columns and lines for the picture
OPEN, END = "\N{MEDIUM SHADE}", "|"  # a masked token, and the end of a text
_LOOK_SECONDS, _LINE_SECONDS, _FRAME_SECONDS = 3.0, 10.0, 0.5
_BARS = "▁▂▃▄▅▆▇█"
_STORY_STEPS = 8


class Look(NamedTuple):
    """A sum and a story while they are filled in: a text for each step."""

    sums: list[str]
    stories: list[str]


def has_room(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and console.width >= WIDE and console.height >= TALL


class Screen(Monitor):
    """The display of one twin, named like its folder: the `number`th of `of`. problem: a held-out sum; opening: a story's first
    sentence; length: tokens of the story."""

    def __init__(
        self, folder: Path, log: LogSection, console: Console, number: int, of: int, problem: Problem, opening: str, length: int
    ) -> None:
        super().__init__(folder, log, console)
        self.name, self._number, self._of = folder.name, number, of
        self._problem, self._opening, self._length = problem, opening, length
        self.losses: list[float] = []
        self.layers: Sequence[Mapping[str, float]] = ()
        self.look: Look | None = None
        self.step = self._first = self.steps = 0
        self._looked = self._spoke = self._began = time.monotonic()
        self._live: Live | None = None

    def meet(self, model: Any, tokenizer: Callable[[], Any]) -> None:
        self._model, self._tokenizer = model, tokenizer()

    def begin(self, step: int, steps: int, settings: Mapping[str, Any]) -> None:
        self.step = self._first = step
        self.steps = steps
        self._began = self._spoke = time.monotonic()
        if step:
            self.console.print(f"{self.name}: resuming after step {step} of {steps}")
        if has_room(self.console):
            self._live = Live(self, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def say(self, text: str) -> None:
        """Print nothing: the picture already shows it, or an error tells it."""

    def line(self, line: dict[str, Any]) -> None:
        self.metrics.write(line)
        if line["kind"] == "train" and line["loss"] is not None:
            self.losses.append(line["loss"])
        if line["kind"] == "probe":
            self.layers = line["layers"]

    def progress(self, step: int, steps: int, seen: str) -> None:
        self.step = step
        now = time.monotonic()
        wait = _LOOK_SECONDS if self._live is not None else _LINE_SECONDS
        if now - self._looked >= wait or step == steps:
            self.look = self._take_look()
            self._looked = time.monotonic()
        if self._live is None and (now - self._spoke >= _LINE_SECONDS or step == steps):
            self._spoke = now
            for text in self.plain():
                self.console.print(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        super().close()

    @torch.no_grad()
    def _take_look(self) -> Look:
        sums = self._denoise(self._problem.question, ANSWER, steps=ANSWER)
        room = self._length - len(self._tokenizer.encode(self._opening))
        return Look(sums, self._denoise(self._opening, room, steps=_STORY_STEPS))

    def _denoise(self, prompt: str, length: int, steps: int) -> list[str]:
        config, ids = self._model.config, self._tokenizer.encode(prompt)
        mask_id, size = config.mask_id, config.block_size
        requests = requests_of([ids], length=len(ids) + length, mask_id=mask_id, steps=steps, block_size=size)
        frames = [[*ids, *[mask_id] * length]]
        frames += [step.tokens[0].tolist() for step in stream(self._model.denoiser(), start(requests))]
        decode = self._tokenizer.decode
        texts = ("".join(OPEN if token == mask_id else decode([token]) for token in frame) for frame in frames)
        return [text.replace(EOS, END) for text in texts]

    @property
    def loss(self) -> float:
        """The mean loss of the last fifty steps, as a single step's is noisy."""
        recent = self.losses[-50:]
        return sum(recent) / max(1, len(recent))

    @property
    def rate(self) -> float:
        return (self.step - self._first) / max(1e-9, time.monotonic() - self._began)

    @property
    def seconds_left(self) -> float:
        """Time left for this twin and those after it."""
        steps = self.steps - self.step + (self._of - self._number) * self.steps
        return steps / self.rate if self.rate else 0.0

    def plain(self) -> list[str]:
        """Two lines of at most 50 columns."""
        lines = [f"{self.name} {self.step}/{self.steps} loss {self.loss:.2f} {self._pace()}"]
        if self.look is not None:
            seen = " ".join(text.removeprefix(self._problem.question).replace(OPEN, "_") for text in self.look.sums)
            lines.append(f"  {self._problem.question} {seen}  {self._attention(short=True)}")
        return lines

    def _pace(self) -> str:
        minutes, seconds = divmod(int(self.seconds_left), 60)
        return f"{self.rate:.1f} steps/s {minutes}:{seconds:02d} left" if self.rate else "starting"

    def _attention(self, *, short: bool = False) -> str:
        shares = [layer["sink_share"] for layer in self.layers if "sink_share" in layer]
        if shares and short:
            return f"sink {sum(shares) / len(shares):.0%}"
        if shares:
            return "on the sink, by layer: " + "  ".join(f"{_bar(share)} {share:.0%}" for share in shares)
        top = max((layer["top_content_share"] for layer in self.layers), default=0.0)
        return f"top {top:.0%}" if short else f"no sink; the most attended token of a row gets {top:.0%}"

    def __rich__(self) -> Text:
        """The picture, drawn by a thread of its own, which plays the last look's steps."""
        twin = f"twin {self._number} of {self._of}: {self.name}"
        lines = [f"{twin}  {_bar(self.step / self.steps)} {self.step}/{self.steps}  {self._pace()}"]
        if self.losses:
            lines.append(f"loss       {self.loss:.3f}  {spark(self.losses)}")
        if self.look is not None:
            frame = int((time.monotonic() - self._looked) / _FRAME_SECONDS)
            sums, stories = (texts[min(frame, len(texts) - 1)] for texts in (self.look.sums, self.look.stories))
            verdict = "" if OPEN in sums else "  right" if sums == "".join(self._problem) else "  wrong"
            lines += [f"a sum      {sums}{verdict}", f"a story    {stories}"]
        if self.layers:
            lines.append(f"attention  {self._attention()}")
        return Text("\n".join(lines))


def _bar(share: float) -> str:
    return _BARS[min(len(_BARS) - 1, int(share * len(_BARS)))]


def spark(values: Sequence[float], width: int = 24) -> str:
    """A curve of at most `width` characters: means of equal stretches, relative to the highest."""
    size = max(1, -(-len(values) // width))
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size)]
    top = max(means, default=0.0)
    return "".join(_bar(mean / top * 0.999) if top > 0 else _BARS[0] for mean in means)
