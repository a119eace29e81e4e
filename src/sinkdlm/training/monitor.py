"""Report a run: metrics.jsonl always, trackers by name, a progress bar on a terminal and plain lines elsewhere.

Owns the metrics file, whose lines are never doubled: a state records the file's length, and resuming cuts it back to that.
Computes nothing about the run itself.
"""

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from sinkdlm.config.recipe import LogSection
from sinkdlm.errors import CheckpointError, TrainError, first_line

_PLAIN_SECONDS = 10.0  # between progress lines without a terminal
_FIRST_SECONDS = 1.0  # before the first of them, which needs a timed step
_SPAN = 50  # steps that a shown loss or rate covers, about
_LONGEST_LINE = 1 << 26  # bytes
_LONGEST = 10**12  # seconds that are left; no clock shows more


class Metrics:
    """An append-only JSONL file. A line that cannot be written (a full disk) is kept and tried again with the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._length = os.fstat(self._file).st_size
        self._waiting = b""

    def cut(self, length: int) -> bool:
        """Cut the file back to the length that a state recorded: the steps after it are made again. A partial last line goes too,
        or it would spoil the next one. Returns False if the file is already shorter; the run goes on all the same."""
        whole, end = self._length >= length, min(length, self._length)
        begin = max(0, end - _LONGEST_LINE)
        self._length = begin + os.pread(self._file, end - begin, begin).rfind(b"\n") + 1
        os.ftruncate(self._file, self._length)
        return whole

    def write(self, line: Mapping[str, Any]) -> None:
        self._waiting += json.dumps(line).encode() + b"\n"
        with contextlib.suppress(CheckpointError):
            self.flush()

    def flush(self) -> int:
        """Write what is waiting and return the file's length. Raises CheckpointError if the disk fails; the file still ends with a
        whole line."""
        done = 0
        try:
            while done < len(self._waiting):
                done += os.pwrite(self._file, self._waiting[done:], self._length + done)
        except OSError as failure:
            os.ftruncate(self._file, self._length)
            raise CheckpointError(f"{self.path}: {failure.strerror}") from None
        self._length += done
        self._waiting = b""
        return self._length

    def sync(self) -> None:
        """Wait until everything that was flushed is on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        with contextlib.suppress(CheckpointError):
            self.flush()
        os.close(self._file)


def flat_numbers(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (`a/b`, value) for every number of a line, nested tables and lists included."""
    for key, value in line.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{name}/")
        elif isinstance(value, list):
            yield from flat_numbers({str(i): item for i, item in enumerate(value)}, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


Settings = Mapping[str, Any]
Tracker = tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]  # (write a step's numbers, close)


def _tensorboard(folder: Path, log: LogSection, settings: Settings, step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides what a killed run logged after the state that is resumed.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(folder: Path, log: LogSection, settings: Settings, step: int) -> Tracker:
    import wandb

    identity = _identity(folder, "wandb", lambda: secrets.token_hex(4))
    run = wandb.init(project=log.project, name=folder.name, id=identity, resume="allow", dir=str(folder), config=dict(settings))
    return lambda step, numbers: run.log(dict(numbers), step=step), run.finish


def _mlflow(folder: Path, log: LogSection, settings: Settings, step: int) -> Tracker:
    import mlflow

    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name(log.project)
    experiment = found.experiment_id if found else client.create_experiment(log.project)
    fresh = not (folder / "mlflow.id").exists()
    run = _identity(folder, "mlflow", lambda: client.create_run(experiment, run_name=folder.name).info.run_id)
    if fresh:
        for key, value in settings.items():
            client.log_param(run, key, value)
    logged: dict[str, int] = {}

    def write(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if name not in logged:  # repeated steps are in its history already
                logged[name] = max((point.step for point in client.get_metric_history(run, name)), default=-1)
            if step > logged[name]:
                client.log_metric(run, name, value, step=step)

    return write, lambda: client.set_terminated(run)


def _identity(folder: Path, tracker: str, make: Callable[[], str]) -> str:
    """The tracker's id of this run, kept in the run folder so that a resumed run continues it."""
    path = folder / f"{tracker}.id"
    if not path.exists():
        path.write_text(make())
    return path.read_text().strip()


TRACKERS: dict[str, Any] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}


def fitted(seen: str, room: int) -> str:
    """Keep the first parts, as many as fit. A number cut in two would mislead."""
    while len(seen) > room and "  " in seen:
        seen = seen.rpartition("  ")[0]
    return seen


class Smoothed:
    """An exponential mean. Called with a value, it returns the mean so far."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def __call__(self, value: float) -> float:
        kept = 1 - 1 / _SPAN
        self._sum, self._weight = self._sum * kept + value, self._weight * kept + 1
        return self._sum / self._weight


class Pace:
    """Describes a step for the progress line, its loss and rate smoothed."""

    def __init__(self, tokens: int) -> None:
        """tokens: of a step."""
        self._tokens, self._loss, self._seconds, self._warm = tokens, Smoothed(), Smoothed(), False

    def text(self, loss: float, seconds: float) -> str:
        """A loss that is not finite is shown as it is, and leaves no trace in the next."""
        mean = self._seconds(seconds)
        if not self._warm:  # the first step also warms up or compiles
            self._seconds, self._warm = Smoothed(), True
        return f"loss {self._loss(loss) if math.isfinite(loss) else loss:.3f}  {self._tokens / mean:,.0f} tokens/s"


class Monitor:
    """Reports one run: metrics file, trackers, console."""

    def __init__(self, folder: Path, log: LogSection, console: Console) -> None:
        self.folder, self.console, self._log = folder, console, log
        self.metrics = Metrics(folder / "metrics.jsonl")
        self._trackers: dict[str, Tracker] = {}
        self._bar: Progress | None = None
        self._bar_width = max(4, min(40, console.width // 8))
        self._due = 0.0
        self._set_out = (0.0, 0)  # time and step from which steps are timed
        self._warm = False

    def meet(self, model: Any, tokenizer: Callable[[], Any]) -> None:
        """Called before the run begins, for monitors that need the model. tokenizer(): loads it on the first call."""

    def begin(self, step: int, steps: int, settings: Settings) -> None:
        for name in self._log.trackers:
            try:
                self._trackers[name] = TRACKERS[name](self.folder, self._log, settings, step)
            except ImportError:
                raise TrainError(f"log.trackers: {name} needs: pip install 'sinkdlm[track]'") from None
            except Exception as failure:  # whatever the tracker's package raises
                raise TrainError(f"log.trackers: {name} cannot start: {first_line(failure)}") from None
        now = time.monotonic()
        self._set_out, self._due, self._warm = (now, step), now + _FIRST_SECONDS, False
        if self.console.is_terminal:
            texts = (TextColumn("{task.description}", markup=False), TextColumn("{task.fields[seen]}", markup=False))
            self._bar = Progress(texts[0], BarColumn(self._bar_width), texts[1], console=self.console)
            self._bar.add_task(self._name(), total=steps, completed=step, seen="")
            self._bar.start()

    def say(self, text: str) -> None:
        self.console.print(text)

    def line(self, line: dict[str, Any]) -> None:
        """One line of metrics, to the file and the trackers."""
        self.metrics.write(line)
        numbers = {f"{line['kind']}/{name}": value for name, value in flat_numbers(line) if name != "step"}
        for name, (write, _) in list(self._trackers.items()):
            self._guarded(name, partial(write, line["step"], numbers))

    def progress(self, step: int, steps: int, seen: str) -> None:
        """seen: what the step found, two spaces between its parts, the most important first."""
        now, (began, first) = time.monotonic(), self._set_out
        left = timedelta(seconds=min(_LONGEST, int((now - began) * (steps - step) / max(1, step - first))))
        loss, *rest = seen.split("  ")
        text = "  ".join([f"{step}/{steps}", loss, f"{left} left", *rest])
        if self._bar is not None:
            room = self.console.width - len(self._name()) - self._bar_width - 2  # a space between columns
            self._bar.update(self._bar.task_ids[0], completed=step, seen=fitted(text, room))
        elif now >= self._due or step == steps:
            self._due = now + _PLAIN_SECONDS
            self.say(f"step {text}")
        if not self._warm:  # the first step also warms up or compiles, so it is not timed
            self._set_out, self._warm = (now, step), True

    def _name(self) -> str:
        most = max(1, self.console.width // 6)
        name = self.folder.name
        return name if len(name) <= most else f"{name[: most - 1]}\N{HORIZONTAL ELLIPSIS}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        for name, (_, close) in list(self._trackers.items()):
            self._guarded(name, close)
        self._trackers = {}
        self.metrics.close()

    def _guarded(self, name: str, use: Callable[[], None]) -> None:
        """Drop a tracker that fails: a run does not end because a server did."""
        try:
            use()
        except Exception as failure:
            del self._trackers[name]
            self.say(f"{name}: dropped: {first_line(failure)}; metrics.jsonl is still written")


MakeMonitor = Callable[[Path, LogSection, Console], Monitor]


class Silent:
    """Monitor and metrics of the ranks that do not report: takes every call and does nothing."""

    path = Path()

    def __getattr__(self, name: str) -> "Silent":
        return self

    def __call__(self, *_: Any) -> None: ...
