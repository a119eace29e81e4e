"""How a command prints its result, and what it calls the models that it is given."""

import json
from pathlib import Path
from typing import Any

import typer

from sinkdlm.errors import AnalysisError


def say(found: Any, text: str, as_json: bool) -> None:
    """Print what a command found: as JSON, or as text."""
    typer.echo(json.dumps(found, indent=2, ensure_ascii=False) if as_json else text)


def name_models(models: list[str], given: str | None = None) -> list[str]:
    """A short and different name for each model: those given, with commas, or their folders' names."""
    if given is not None:
        names = [name.strip() for name in given.split(",")]
    else:
        paths = [Path(model).resolve() for model in models]
        names = [path.parent.name if path.name == "model" else path.stem if path.is_file() else path.name for path in paths]
        names = [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names, start=1)]
    if len(names) != len(models) or len(set(names)) != len(names) or not all(names):
        raise AnalysisError(f"--names {','.join(names)}: give a different name for each of the {len(models)} models")
    for name in names:
        if "/" in name or name.startswith("."):
            raise AnalysisError(f"--names: {name!r} becomes a file's name; leave out slashes and a dot in front")
    return names
