"""Note signals that ask a run to end, so that it can finish the step and save its state."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):  # noqa: N818  (no error: it was asked for)
    """A signal ended the run after a whole step. `number` is the signal's."""

    quiet = False  # whether another process of the same run reports it already

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class Signals:
    """Which signal asked the run to end, or 0."""

    caught = 0


@contextmanager
def noted_signals(*, after_failure: bool = False) -> Iterator[Signals]:
    """Note SIGTERM and SIGINT, so that the step can be finished; a second SIGINT interrupts at once.

    after_failure: keep noting them after a failure has left this scope, until the process ends. Several ranks need it: a launcher
    that sees one rank die signals the others, which still have to name it.
    """
    seen = Signals()

    def note(number: int, _: Any) -> None:
        if seen.caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.caught = number

    try:
        before = {number: signal.signal(number, note) for number in ENDING}
    except ValueError:  # not the main thread: the caller handles signals
        before = {}
    try:
        yield seen
    except BaseException as failure:
        if after_failure and not isinstance(failure, Stopped):
            before = {}
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
