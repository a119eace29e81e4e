"""The recipes that come with the package, by name and with a description.

A name is a file's stem. Parts are bases, not runs; their names include the folder, as in parts/small.
"""

import difflib
from pathlib import Path

from sinkdlm.errors import ConfigError

RECIPES = Path(__file__).parents[1] / "recipes"
GROUPS = ("laptop", "nano", "small", "paper", "parts")


def shipped_recipes() -> dict[str, Path]:
    """Map each shipped recipe's name to its file, group by group."""
    paths = [path for group in GROUPS for path in sorted((RECIPES / group).glob("*.toml"), key=lambda path: path.stem)]
    return {f"parts/{path.stem}" if path.parent.name == "parts" else path.stem: path for path in paths}


def describe_recipe(path: Path) -> str:
    """Return the first sentence of a recipe file's first comment."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# ").partition(". ")[0].rstrip(".")


def find_recipe(given: str | Path, folder: Path = Path(), whose: str = "") -> Path:
    """Find the file of a recipe: a path from `folder`, or else the shipped recipe of this name. `whose` ends the message."""
    path, shipped = folder / given, shipped_recipes()
    if not path.is_file() and str(given) in shipped:
        return shipped[str(given)]
    if path.exists():
        return path
    close = difflib.get_close_matches(path.name.removesuffix(".toml"), shipped, n=3)
    hint = f"; did you mean {' or '.join(close)}?" if close else ";"
    raise ConfigError(f"{path}: cannot read recipe: No such file{whose}{hint} `sinkdlm recipe list` shows the shipped ones")
