"""The one exception that means "the user can fix this": the command line prints it as one line and exits with status 2."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The usual cause: float16 activations overflow in a model that was trained in bfloat16.
NO_NUMBERS = "the model's outputs are no numbers (NaN): activations overflow, or the weights are broken; use float32 or bfloat16"


def first_line(failure: BaseException) -> str:
    """Return the reason of another library's failure, in one line."""
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0].rstrip(".")


@contextmanager
def panics_raised() -> Iterator[None]:
    """Raise a panic of the tokenizers library as a ValueError: its own exception is no Exception, so no handler would catch it."""
    try:
        yield
    except BaseException as failure:
        if type(failure).__module__ != "pyo3_runtime":
            raise
        raise ValueError(first_line(failure)) from None


class UserError(Exception):
    """A mistake in what the user gave. The message names the thing and the cure, in one line."""

    quiet = False  # whether another process of the run reports it already


def check_regular(path: Path, error: type[UserError]) -> None:
    """Refuse a pipe or a device, also in a folder: reading one may wait for ever, and most files are read more than once."""
    for place in (path, *(path.iterdir() if path.is_dir() else ())):
        if place.exists() and not place.is_file() and not place.is_dir():
            raise error(f"{place}: a pipe or a device, not a file; save what comes out of it, and give that file")


class ModelError(UserError):
    """A model whose outputs are NaN; no request is to blame. rows: the affected states of the sampler, if known."""

    def __init__(self, rows: Sequence[Any] = ()) -> None:
        super().__init__(NO_NUMBERS)
        self.rows = rows


class BusyError(UserError):
    """A folder that another process has locked."""


class ConfigError(UserError):
    """Keys or values of a configuration that are not allowed. `place` is the dotted path of their table."""

    def __init__(self, *problems: str, place: str = "") -> None:
        self.problems = problems
        self.place = place
        super().__init__("; ".join(f"{place}.{problem}" if place else problem for problem in problems))

    def within(self, table: str) -> "ConfigError":
        """Return the same error with `table` in front of its place."""
        return ConfigError(*self.problems, place=f"{table}.{self.place}" if self.place else table)


class CheckpointError(UserError):
    """A checkpoint directory that cannot be read or written; the message has the file and the reason."""


class ConvertError(UserError):
    """Weights of another format that cannot be read, or that cannot be written in the requested format."""


class DataError(UserError):
    """Token shards or texts that are missing, damaged, or not what a run needs."""


class TrainError(UserError):
    """A training run that cannot start or continue."""


class SamplingError(UserError):
    """A request that cannot be sampled: a policy that does not exist, a canvas without room, a cache the model cannot have."""


class LikelihoodError(UserError):
    """A row that cannot be scored, or an unknown scoring method."""


class EvalError(UserError):
    """An evaluation that cannot run: a task without data, or malformed requests or responses."""


class AnalysisError(UserError):
    """An analysis that cannot run: a policy that cannot be observed, or malformed captures."""


class ReproduceError(UserError):
    """A reproduction that cannot run or be read: a missing input or a malformed record."""
