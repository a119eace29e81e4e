"""How far long work over counted items has come: a bar on a terminal, a plain line now and then elsewhere; always on stderr."""

import sys
import time
from typing import Any, Self

_EVERY = 10.0  # seconds between plain lines


class Display:
    """done: items that were there already; the rate is of what this run did."""

    def __init__(self, what: str, total: int, done: int = 0, *, shown: bool = True) -> None:
        self.what, self.total, self._start, self._shown = what, total, done, shown
        self._began = self._told = time.monotonic()
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(what, total=total, completed=done, rate="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int) -> None:
        rate = (done - self._start) / max(1e-9, time.monotonic() - self._began)
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rate=f"{rate:.1f}/s")
        elif self._shown and time.monotonic() - self._told >= _EVERY:
            self._told = time.monotonic()
            left = (self.total - done) / max(1e-9, rate)
            sys.stderr.write(f"{done:,} of {self.total:,} {self.what}  {rate:.1f}/s  {left:.0f} s left\n")
            sys.stderr.flush()
