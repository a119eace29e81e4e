"""Where a command begins: Ctrl-C gets its handler before the command line is loaded, which takes a while.

Imports next to nothing: what is loaded before the handler is set ends with Python's own traceback.
"""

import os
import signal
import sys
from types import FrameType


def _interrupt(number: int, frame: FrameType | None) -> None:
    place = frame
    while place is not None:
        if place.f_code.co_filename == "<frozen importlib._bootstrap>":
            try:  # noqa: SIM105  (contextlib may be what is being imported)
                sys.stdout.flush()
            except Exception:
                pass
            os.write(2, b"sinkdlm: interrupted\n")
            os._exit(130)
        place = place.f_back
    signal.default_int_handler(number, frame)


class EndedWhileImporting:
    """Ctrl-C within an import ends the process at once: torch and others try imports, catch it, and go on with half a package."""

    def __enter__(self) -> None:
        self._takes = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._takes:
            try:
                signal.signal(signal.SIGINT, _interrupt)
            except ValueError:  # of the main thread alone
                self._takes = False

    def __exit__(self, *_: object) -> None:
        if self._takes:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    with EndedWhileImporting():
        from sinkdlm.cli.app import main as run

        run()
