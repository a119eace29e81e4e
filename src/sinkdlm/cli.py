"""The command line. Each subcommand imports what it needs when it runs, so that `sinkdlm --help` stays light."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="sinkdlm",
    help="Masked diffusion language models with a stable sink token.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
)
recipe_app = typer.Typer(help="Look at recipes.", rich_markup_mode=None, no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in train.lr=1e-4.")]


def _version(wanted: bool) -> None:
    if wanted:
        from sinkdlm import __version__

        typer.echo(f"sinkdlm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command()
def presets(as_json: Json = False) -> None:
    """List model presets with their parameter counts."""
    from sinkdlm.config import ModelConfig, preset_names

    configs = {name: ModelConfig.preset(name) for name in preset_names()}
    if as_json:
        rows = {
            name: {**config.count_parameters()._asdict(), "total": config.count_parameters().total, "config": config.to_dict()}
            for name, config in configs.items()
        }
        typer.echo(json.dumps(rows, indent=2))
        return
    head = ("preset", "layers", "heads", "kv", "width", "ffn", "vocab", "non-embedding M", "total M")
    table: list[tuple[str, ...]] = [head]
    for name, config in configs.items():
        count = config.count_parameters()
        shape = (config.n_layers, config.n_heads, config.n_kv_heads, config.d_model, config.d_ff, config.vocab_size)
        table.append((name, *map(str, shape), f"{count.non_embedding / 1e6:.6f}", f"{count.total / 1e6:.6f}"))
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        typer.echo("  ".join(cells))


@recipe_app.command("show")
def recipe_show(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml")], overrides: Overrides = None, as_json: Json = False
) -> None:
    """Resolve a recipe (base, preset, overrides, defaults) and print it whole, as TOML."""
    from sinkdlm.config import Recipe

    resolved = Recipe.load(recipe, overrides or [])
    typer.echo(json.dumps(resolved.to_dict(), indent=2) if as_json else resolved.to_toml(), nl=as_json)


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipes, for editors that complete and check TOML."""
    from sinkdlm.config import Recipe

    typer.echo(json.dumps(Recipe.json_schema(), indent=2))


class To(StrEnum):
    SINKDLM, OFFICIAL, HF = "sinkdlm", "official", "hf"


class SinkInit(StrEnum):
    MEAN, NORMAL = "mean", "normal"


class GateInit(StrEnum):
    NORMAL, KEEP = "normal", "keep"


class Dtype(StrEnum):
    FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Official .pth or .safetensors, a model folder, or a GGUF file.")],
    destination: Annotated[Path, typer.Argument(metavar="DST")],
    to: Annotated[To, typer.Option(help="The form to write.")] = To.SINKDLM,
    overrides: Overrides = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer to put with the model: a folder or a file.")] = None,
    sink_init: Annotated[SinkInit, typer.Option(help="New sinks: mean of the embeddings plus noise, or normal.")] = SinkInit.MEAN,
    gate_init: Annotated[GateInit, typer.Option(help="A new gate: normal, or keep the parent's function.")] = GateInit.NORMAL,
    dtype: Annotated[Dtype | None, typer.Option(help="Convert the weights; by default they stay as they are.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of new rows and gates.")] = 0,
    standalone: Annotated[bool, typer.Option("--standalone", help="With --to hf: add a modelling file of its own.")] = False,
    as_json: Json = False,
) -> None:
    """Read any supported model (its kind is detected) and write it as a checkpoint, in the official form or for transformers."""
    from sinkdlm.config import parse_override

    changes = dict(parse_override(override) for override in overrides or [])
    import torch

    from sinkdlm import interop

    report = interop.convert(
        source,
        destination,
        to.value,
        standalone=standalone,
        changes=changes,
        tokenizer=tokenizer,
        sink_init=sink_init.value,
        gate_init=gate_init.value,
        seed=seed,
        dtype=getattr(torch, dtype.value) if dtype is not None else None,
    )
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    typer.echo(f"found  {report['found']}")
    for note in report["notes"]:
        typer.echo(f"       {note}")
    if report["tokenizer"] is None:
        typer.echo("       no tokenizer; --tokenizer adds one")
    typer.echo(f"wrote  {report['wrote']} in {report['path']}, {report['dtype']}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the twins and what was measured go.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each twin.")] = 600,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Train nano twins, with and without a sink, for about a minute on a CPU, and say what was seen."""
    from sinkdlm.demo import run_demo

    run_demo(out, steps=steps, seed=seed, as_json=as_json)


def _fail(message: str) -> NoReturn:
    print(f"sinkdlm: {message}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Runs the command line; a user's mistake becomes one line on stderr and exit status 2."""
    from sinkdlm.errors import UserError

    # typer carries click inside it, and exports only the ends of its exception tree.
    usage_error: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        raise SystemExit(app(standalone_mode=False))
    except UserError as failure:
        _fail(str(failure))
    except usage_error as failure:
        message = failure.format_message()
        if "Usage:" in message:  # a command without arguments shows its help
            print(message, file=sys.stderr)
            raise SystemExit(2) from None
        context = getattr(failure, "ctx", None)
        _fail(f"{message.rstrip('.')}; see {context.command_path if context else 'sinkdlm'} --help")
    except typer.Abort:
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("sinkdlm: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
