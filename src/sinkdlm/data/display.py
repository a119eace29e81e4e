"""Show the progress of long work: a bar on a terminal, a plain line now and then elsewhere; on stderr, never on stdout."""

import sys
import time
from typing import Any, Self

_EVERY = 10.0  # seconds between plain lines


def counted(n: int, what: str) -> str:
    """A count with its noun, in the plural unless it is one."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


class Bar:
    """A progress bar. total: of whatever is counted, 0 where unknown. done: finished before, and not part of the rates."""

    counts = False  # show how many of how many, not per cent

    def __init__(self, what: str, total: int, done: int = 0, *, shown: bool = True) -> None:
        self.what, self.total, self._start, self._shown = what, total, done, shown
        self._began = self._told = time.monotonic()
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            so_far = MofNCompleteColumn() if self.counts else TaskProgressColumn()
            columns = (TextColumn("{task.description}"), BarColumn(), so_far, TextColumn("{task.fields[rates]}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(what, total=total or None, completed=done, rates="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        return max(1e-9, time.monotonic() - self._began)

    def show(self, done: float, rates: str, line: str) -> None:
        """line: what a plain line says before the time that is left."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rates=rates)
        elif self._shown and time.monotonic() - self._told >= _EVERY:
            self._told = time.monotonic()
            left = self.seconds * (self.total - done) / (done - self._start) if done > self._start else None
            sys.stderr.write(f"{line}{f'  {left:.0f} s left' if self.total and left is not None else ''}\n")
            sys.stderr.flush()


class ByteBar(Bar):
    """Progress in bytes."""

    def update(self, done: int, n_bytes: int, n_tokens: int | None = None) -> None:
        """done: bytes of `total`; n_bytes and n_tokens: what this run has gone through, for the rates."""
        rates = f"{n_bytes / self.seconds / 1e6:.1f} MB/s"
        if n_tokens is not None:
            rates += f"  {n_tokens / self.seconds / 1e6:.2f}M tokens/s"
        share = f"{100 * done / self.total:.0f} %  " if self.total else ""
        self.show(done, rates, f"{self.what}  {share}{rates}")


class ItemBar(Bar):
    """Progress in items."""

    counts = True

    def update(self, done: int, share: float = 0.0, under_way: int = 0) -> None:
        """share: finished part of the items under way."""
        so_far = done + share * under_way
        per_second = (so_far - self._start) / self.seconds
        # Long documents on a CPU take minutes each, and 0.0/s says nothing.
        rate = f"{1 / per_second:.0f} s each" if 0 < per_second < 0.1 else f"{per_second:.1f}/s"
        more = f", {share:.0%} of the next{f' {under_way:,}' if under_way > 1 else ''}" if under_way else ""
        self.show(so_far, rate, f"{done:,} of {self.total:,} {self.what}{more}  {rate}")
