"""How far long work over bytes has come: a bar on a terminal, a plain line now and then elsewhere; on stderr, never on stdout."""

import sys
import time
from typing import Any, Self

_EVERY = 10.0  # seconds between plain lines


class Display:
    """total: bytes to go through, 0 where unknown. Rates are of what this run did, not of what it found done."""

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self.what, self.total = what, total
        self._began, self._told, self._start = time.monotonic(), time.monotonic(), done
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rates]}"))
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

    def update(self, done: int, n_bytes: int, n_tokens: int | None = None) -> None:
        """done: bytes of `total`; n_bytes and n_tokens: what this run has gone through, for the rates."""
        rates = f"{n_bytes / self.seconds / 1e6:.1f} MB/s"
        if n_tokens is not None:
            rates += f"  {n_tokens / self.seconds / 1e6:.2f}M tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rates=rates)
        elif time.monotonic() - self._told >= _EVERY:
            self._told = time.monotonic()
            share = f"{100 * done / self.total:.0f} %  " if self.total else ""
            left = self.seconds * (self.total - done) / max(1, done - self._start)
            sys.stderr.write(f"{self.what}  {share}{rates}{f'  {left:.0f} s left' if self.total else ''}\n")
            sys.stderr.flush()
