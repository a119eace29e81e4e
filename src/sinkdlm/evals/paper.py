"""The rows of the paper's tables that an evaluation can be compared with."""

import tomllib
from pathlib import Path

from sinkdlm.errors import EvalError

_TABLES = tomllib.loads((Path(__file__).parent / "paper.toml").read_text(encoding="utf-8"))["table"]
_ROWS = {name: dict(zip(table["tasks"], row, strict=True)) for table in _TABLES for name, row in table["rows"].items()}
PAPER_ROWS = tuple(_ROWS)


def paper_row(name: str) -> dict[str, float]:
    """Task -> the paper's value, as a share, in the order of the paper's columns."""
    if name not in _ROWS:
        raise EvalError(f"--paper {name}: no such row; there are {', '.join(_ROWS)}")
    return {task: round(value / 100, 6) for task, value in _ROWS[name].items()}
