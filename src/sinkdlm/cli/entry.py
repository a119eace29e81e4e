"""Start and end a command: handle Ctrl-C before the command line is loaded, and print a user's mistake as one line.

Imports almost nothing at its top: Ctrl-C before the handler is set would end with Python's own traceback.
"""

import os
import signal
import sys

TYPE_CHECKING = False  # in place of typing's: typing takes longer to load than all else here
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, NoReturn


def _interrupt(number: int, frame: "FrameType | None") -> None:
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


def _leave(status: int) -> "NoReturn":
    """End the process. A rank of several exits at once: a process group could wait for ever for its lost member."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


def _is_of_memory(failure: Exception) -> bool:
    """torch raises a RuntimeError where a CPU's memory is not enough, or where a size has no number."""
    words = ("allocate memory", "out of memory", "Storage size calculation overflowed")
    return isinstance(failure, MemoryError) or (isinstance(failure, RuntimeError) and any(each in str(failure) for each in words))


def main() -> None:
    """Run the command line; a user's mistake becomes one line on stderr and exit status 2.

    Ctrl-C during an import ends the process at once: torch and others would catch it and go on with half a package."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: threads that spin collapse beside a busy core
    takes = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if takes:
            signal.signal(signal.SIGINT, _interrupt)
        _run()
    finally:
        if takes:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _run() -> None:
    import typer

    from sinkdlm.cli.app import app
    from sinkdlm.distributed.signals import Stopped
    from sinkdlm.errors import UserError

    # typer has its own copy of click and exports only the leaves of its exception tree.
    usage_error: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        status = app(standalone_mode=False)
        if status == 130:  # typer turns Ctrl-C into a silent exit
            raise KeyboardInterrupt
        raise SystemExit(status)
    except (UserError, Stopped) as ended:
        if not ended.quiet:
            print(f"sinkdlm: {ended}", file=sys.stderr)
        _leave(128 + ended.number if isinstance(ended, Stopped) else 2)
    except usage_error as failure:
        message = failure.format_message()
        if "Usage:" not in message:  # a command without arguments shows its help
            context = getattr(failure, "ctx", None)
            message = f"sinkdlm: {message.rstrip('.')}; see {context.command_path if context else 'sinkdlm'} --help"
        print(message, file=sys.stderr)
        raise SystemExit(2) from None
    except typer.Abort:
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("sinkdlm: interrupted", file=sys.stderr)
        _leave(130)
    except OSError as failure:  # of a file that somebody named: its name too long, a loop of links, a folder that may not be read
        if failure.filename is None:
            raise
        print(f"sinkdlm: {failure.filename}: {failure.strerror}", file=sys.stderr)
        _leave(2)
    except Exception as failure:
        if _is_of_memory(failure):
            said = str(failure).strip().partition("\n")[0] or type(failure).__name__
            print(
                f"sinkdlm: no memory holds this; ask for a smaller model, batch or number: {said}",
                file=sys.stderr,
            )
            _leave(2)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        import traceback

        traceback.print_exc()
        _leave(1)
