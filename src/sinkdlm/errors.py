"""The one exception that means "the user can fix this": the command line prints it as one line and exits with status 2."""

from collections.abc import Sequence
from typing import Any

# What overflows in float16 is most often an activation of a model that was trained in bfloat16.
NO_NUMBERS = "the model's outputs are no numbers (NaN): its values overflow, or its weights are broken; use float32 or bfloat16"


def first_line(failure: BaseException) -> str:
    """Why something of another library failed, in one line."""
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0].rstrip(".")


class UserError(Exception):
    """A mistake in what the user gave. The message names the thing and the cure, in one line."""

    quiet = False  # whether another process of the same run says it already


class ModelError(UserError):
    """A model whose outputs are no numbers: no request is to blame. rows: the states that they were for, where that is known."""

    def __init__(self, rows: Sequence[Any] = ()) -> None:
        super().__init__(NO_NUMBERS)
        self.rows = rows


class BusyError(UserError):
    """A folder that another process works in."""


class ConfigError(UserError):
    """Keys or values of a configuration that are not allowed. `place` is the dotted path to the table they stand in."""

    def __init__(self, *problems: str, place: str = "") -> None:
        self.problems = problems
        self.place = place
        super().__init__("; ".join(f"{place}.{problem}" if place else problem for problem in problems))

    def within(self, table: str) -> "ConfigError":
        """The same mistake, seen from the table that holds this one."""
        return ConfigError(*self.problems, place=f"{table}.{self.place}" if self.place else table)


class CheckpointError(UserError):
    """A checkpoint directory that cannot be read or written, with the file and the reason."""


class ConvertError(UserError):
    """Weights from elsewhere that cannot be read as what they seem to be, or written in the form asked for."""


class DataError(UserError):
    """Token shards or texts that are missing, damaged, or not what a run needs."""


class TrainError(UserError):
    """A run that cannot start, or cannot go on."""


class SamplingError(UserError):
    """A request that cannot be sampled: a policy that does not exist, a canvas without room, a cache the model cannot have."""


class LikelihoodError(UserError):
    """A row that cannot be scored, or a way of scoring that does not exist."""


class EvalError(UserError):
    """An evaluation that cannot be made: a task without data, requests or responses that are not what they should be."""


class AnalysisError(UserError):
    """An analysis that cannot be made: a policy that cannot be watched, captures that are not what they should be."""


class ReproduceError(UserError):
    """A reproduction that cannot be made or read: an input that is missing, a record that is not what it should be."""
