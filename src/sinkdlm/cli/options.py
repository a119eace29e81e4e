"""Options that several commands share, and how a command prints its result."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from sinkdlm.errors import AnalysisError


def find_recipe(given: str) -> Path:
    from sinkdlm.config import shipped

    return shipped.find_recipe(given)


def parse_override(text: str) -> tuple[str, Any]:
    from sinkdlm.config import toml

    return toml.parse_override(text)


_RECIPE = Argument(metavar="RECIPE", parser=find_recipe, help="A recipe's file, or a name of `sinkdlm recipe list`.")
RecipeFile = Annotated[Path, _RECIPE]
RecipeFiles = Annotated[list[Path] | None, _RECIPE]
Checkpoint = Annotated[str, Argument(metavar="CKPT", help="A checkpoint, or anything that `convert` reads.")]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Device = Annotated[str | None, Option(help="cuda or cpu; by default cuda where there is one.")]
Compile = Annotated[bool, Option("--compile", help="Compile the blocks: pays on a CPU, for long work.")]
Bos = Annotated[bool | None, Option("--bos/--no-bos", help="BOS before what is given; by default what the tokenizer does.")]
Seed = Annotated[int, Option(min=0, max=2**63 - 1)]
Overrides = Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override a key, as in train.lr=1e-4.")]
Sampler = Annotated[str, Option("--config", "--policy", help="smdm-origin, smdm-greedy, llada, dream or fast.")]
# Pairs of a key and its value.
PolicyOverrides = Annotated[
    list[Any] | None,
    Option("--set", metavar="KEY=VALUE", parser=parse_override, help="A field of the sampler, as in order=entropy."),
]
Documents = Annotated[Literal["file", "line", "paragraph"], Option(help="What one document is in a .txt or .md file.")]
Precision = Annotated[
    Literal["float64", "float32", "bfloat16", "float16"] | None,
    Option(help="Of the weights; by default bfloat16 on a GPU, float32 elsewhere."),
]
Computing = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "float8"],
    Option(help="auto: bfloat16 on a GPU, float32 elsewhere; float8 (GPU) is faster and less precise."),
]


def say(found: Any, text: str, as_json: bool) -> None:
    """Print what a command found: as JSON, or as text."""
    typer.echo(json.dumps(found, indent=2) if as_json else text)


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
