"""Signals that ask a run to end: noted, so that the step can be finished and its state saved."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):  # noqa: N818  (no error: it was asked for)
    """A signal ended the run after a whole step. `number` is the signal's."""

    quiet = False  # whether another process of the same run says it already

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class Signals:
    """Which signal asked the run to end, or 0."""

    caught = 0


@contextmanager
def noted_signals(*, after_failure: bool = False) -> Iterator[Signals]:
    """SIGTERM and SIGINT are noted and the step is finished; a second SIGINT interrupts at once.

    after_failure: they are still noted when a failure leaves this scope, which then ends the process. One of several ranks needs
    it: a launcher that sees another rank die asks this one to end, which has yet to say who it was.
    """
    seen = Signals()

    def note(number: int, _: Any) -> None:
        if seen.caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.caught = number

    try:
        before = {number: signal.signal(number, note) for number in ENDING}
    except ValueError:  # not the main thread: whoever runs us there handles signals
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
