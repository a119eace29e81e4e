"""The command line. Each subcommand imports what it needs when it runs, so that `sinkdlm --help` stays light."""

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from sinkdlm.cli import analyze as cli_analysis
from sinkdlm.cli import data as cli_data
from sinkdlm.cli import evaluate as cli_evals
from sinkdlm.cli import plan as cli_planning
from sinkdlm.cli import reproduce as cli_reproduce
from sinkdlm.cli import serve as cli_serving
from sinkdlm.cli import warm_up as early
from sinkdlm.cli.entry import EndedWhileImporting
from sinkdlm.cli.loading import load_recipe
from sinkdlm.cli.options import (
    Arithmetic,
    Bos,
    Compile,
    Computing,
    Device,
    Json,
    ModelOverrides,
    Overrides,
    PolicyOverrides,
    Seed,
)

# In the order in which a newcomer meets them; a docstring's first line would be cut at the edge of the terminal.
SUMMARIES = {
    "demo": "Twins with and without a sink, trained in minutes; a report.",
    "data": "Prepare training data, and look at it.",
    "recipe": "Look at recipes.",
    "presets": "List model presets with their parameter counts.",
    "plan": "Memory, hours and cost of a run, before it is started.",
    "train": "Pretrain, adapt an AR parent or fine-tune, by a recipe.",
    "sample": "Write text: after a prompt, into gaps, or as an answer.",
    "eval": "Evaluate a model on benchmarks, with lm-eval's tasks.",
    "score": "Bits per byte and perplexity of documents.",
    "score-requests": "Answer requests of eval without the harness.",
    "analyze": "Where attention sinks are, and what they do: a report.",
    "reproduce": "Repeat the paper's tables, with a verdict on each claim.",
    "inspect": "Open a page that shows one or two models writing.",
    "serve": "Serve one or two models over HTTP, as OpenAI's API.",
    "convert": "Read any supported model, and write it in another form.",
}


class _InOrder(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=list(SUMMARIES).index)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            found.short_help = SUMMARIES[cmd_name]
        return found


app = typer.Typer(
    name="sinkdlm",
    cls=_InOrder,
    help="Masked diffusion language models with a stable sink token.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
)
recipe_app = typer.Typer(help="Look at recipes.", rich_markup_mode=None, no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")


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
    from sinkdlm.config.model import ModelConfig, preset_names

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
    resolved = load_recipe(recipe, overrides)
    typer.echo(json.dumps(resolved.to_dict(), indent=2) if as_json else resolved.to_toml(), nl=as_json)


@recipe_app.command("schema")
def recipe_schema() -> None:
    """Print the JSON schema of recipes, for editors that complete and check TOML."""
    from sinkdlm.config.recipe import Recipe

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
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Official .pth or .safetensors, a model or run folder, or a GGUF.")],
    destination: Annotated[Path, typer.Argument(metavar="DST")],
    to: Annotated[To, typer.Option(help="The form to write.")] = To.SINKDLM,
    overrides: ModelOverrides = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer to put with the model: a folder or a file.")] = None,
    sink_init: Annotated[SinkInit, typer.Option(help="New sinks: mean of the embeddings plus noise, or normal.")] = SinkInit.MEAN,
    gate_init: Annotated[GateInit, typer.Option(help="A new gate: normal, or keep the parent's function.")] = GateInit.NORMAL,
    dtype: Annotated[Dtype | None, typer.Option(help="Convert the weights; by default they stay as they are.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of new rows and gates.")] = 0,
    standalone: Annotated[bool, typer.Option("--standalone", help="With --to hf: add a modelling file of its own.")] = False,
    as_json: Json = False,
) -> None:
    """Read any supported model (its kind is detected) and write it as a checkpoint, in the official form or for transformers."""
    from sinkdlm.config.toml import parse_override

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
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The run folder; by default runs/ and the recipe's name.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Pretrain, adapt from an AR parent, or fine-tune: what the recipe says. The same command goes on where a run stopped."""
    folder = out or Path("runs") / recipe.stem
    resolved = load_recipe(recipe, overrides, folder)
    opened = early.open_device(device)
    import torch  # noqa: F401  (before the next line)

    early.load_kernels(opened, device)
    from sinkdlm.distributed.signals import Stopped
    from sinkdlm.training.gradient_spikes import read_peaks
    from sinkdlm.training.loop import train as run
    from sinkdlm.training.sink_health import read_kept

    try:
        found = run(resolved, folder, load_parent=load_parent, device=device)
    except Stopped as stopped:
        if not stopped.quiet:
            print(f"sinkdlm: {stopped}", file=sys.stderr)
        leave(128 + stopped.number)
    if found["rank"]:
        return
    found |= {"gradient_peaks": read_peaks(folder), "sink_lost": read_kept(folder)}
    typer.echo(json.dumps(found, indent=2) if as_json else f"{found['model']}: {found['tokens']:,} tokens, {found['steps']} steps")


def load_parent(recipe: Any, dtype: Any, source: Any = None, tokenizer: Any = None) -> Any:
    """init.from of a recipe: whatever `convert` reads, with the variant that [model] asks for. source, tokenizer: where they were
    read before."""
    from sinkdlm import interop
    from sinkdlm.errors import ConvertError
    from sinkdlm.training.parent_check import check_shape

    source = source or interop.open_source(recipe.init.from_)
    check_shape(recipe, source.config, interop.fixed_keys(source))
    wanted = recipe.model.to_dict()
    try:
        return interop.load_any(
            source,
            {key: wanted[key] for key in interop.FREE_KEYS},
            sink_init=recipe.init.sink_init,
            gate_init=recipe.init.gate_init,
            seed=recipe.train.seed,
            dtype=dtype,
            tokenizer=tokenizer,
        )
    except ConvertError as failure:  # by the name that the field has here
        option, told = "--set ", str(failure)
        raise ConvertError(f"model.{told.removeprefix(option)}" if told.startswith(option) else told) from None


@app.command()
def sample(
    checkpoint: Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint, or anything that `convert` reads.")],
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "",
    prompts: Annotated[Path | None, typer.Option(help="A file of prompts: a line each, or .jsonl with prompt or messages.")] = None,
    infill: Annotated[str | None, typer.Option(help="Text with gaps, as in 'The [____] sat' or 'The [_:12] sat'.")] = None,
    gap: Annotated[int | None, typer.Option(min=1, help="With --infill: tokens of every gap.")] = None,
    suffix: Annotated[str, typer.Option(help="What the text ends with.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user's turn in the tokenizer's chat template.")] = False,
    bos: Bos = None,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens to write; by default 64, or what fits.")] = None,
    until_eos: Annotated[bool, typer.Option("--until-eos", help="Append blocks until EOS; --length is the limit.")] = False,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Texts for each prompt.")] = 1,
    seed: Seed = 0,
    config: Annotated[str, typer.Option("--config", "--policy", help="smdm-origin, smdm-greedy, llada, dream or fast.")] = "llada",
    steps: Annotated[int | None, typer.Option(help="Denoising steps; by default one a token.")] = None,
    block: Annotated[int | None, typer.Option(help="Tokens of a block, filled left to right; by default all at once.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: the most likely token.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw among so many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the tokens that hold this much probability.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Classifier-free guidance; 0: none.")] = None,
    threshold: Annotated[float | None, typer.Option(help="Commit every token this sure, and at least one a step.")] = None,
    cache: Annotated[str | None, typer.Option(help="none, or approximate: prefix, dual (with --block).")] = None,
    overrides: PolicyOverrides = None,
    stop: Annotated[bool, typer.Option("--stop/--no-stop", help="Whether EOS ends a text.")] = True,
    batch: Annotated[int, typer.Option(min=1, help="Texts that are written at the same time.")] = 64,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Bit-equal alone and in any batch; slower.")] = False,
    compile_: Compile = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the text as it appears, and where attention goes.")] = False,
    device: Device = None,
    dtype: Computing = Arithmetic.AUTO,
    as_json: Json = False,
) -> None:
    """Write text with a model: after a prompt, into gaps, or as an answer."""
    from sinkdlm.config.toml import parse_override
    from sinkdlm.sampling.unmasking import policy_of

    named: dict[str, Any] = {
        "steps": steps,
        "block": block,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
    }
    named |= {"guidance": guidance, "threshold": threshold, "cache": cache}
    options = {name: value for name, value in named.items() if value is not None}
    policy = policy_of(config, **options | dict(parse_override(override) for override in overrides or []))
    from sinkdlm.text.generate import Job, check, write
    from sinkdlm.text.prompts import policy_for

    job = Job(prompt, prompts, infill, suffix, chat, length, gap, n, seed, until_eos, batch, deterministic, bos)
    check(job)  # a wrong file or gap is said before the model is read
    from sinkdlm.distributed.world import joined

    with joined(device) as world:  # under torchrun each rank writes its share
        lm = load_for_sampling(checkpoint, world.device, dtype)
        if compile_:
            for part in lm.model.blocks:
                part.compile()
        policy = policy_of(policy, **policy_for(lm.tokenizer, policy, stop=stop, until_eos=until_eos))
        found = write(lm, job, policy, watch=watch, world=world)
    if not world.first:
        return
    if n > 1 and not policy.is_drawn:
        typer.echo("note  at temperature 0 the texts of a prompt are copies; --temperature 0.7 makes them differ", err=True)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for row in found["samples"]:
        typer.echo(row["text"])


def load_for_sampling(checkpoint: str, device: Any, dtype: Arithmetic) -> Any:
    import torch

    if dtype is Arithmetic.FLOAT8:
        from sinkdlm.errors import UserError
        from sinkdlm.fast.float8_training import why_not

        if (missing := why_not(device)) is not None:
            raise UserError(f"--dtype float8: {missing}; leave it out")
    auto = "bfloat16" if device.type == "cuda" else "float32"
    named = {Arithmetic.AUTO: auto, Arithmetic.FLOAT8: "bfloat16"}.get(dtype, dtype.value)
    lm = load_with_tokenizer(checkpoint, device, getattr(torch, named))
    if dtype is Arithmetic.FLOAT8:
        from sinkdlm.fast.quantized import to_float8

        to_float8(lm.model)
    return lm


def load_with_tokenizer(checkpoint: str, device: Any, dtype: Any = None) -> Any:
    from sinkdlm import interop
    from sinkdlm.errors import UserError

    lm = interop.load_any(checkpoint, device=device, dtype=dtype)
    if lm.tokenizer is None:
        raise UserError(f"{checkpoint}: has no tokenizer; add one with: sinkdlm convert {checkpoint} DST --tokenizer T")
    return lm


cli_evals.register(app)
cli_analysis.register(app)
cli_serving.register(app)
cli_data.register(app)
cli_planning.register(app)
cli_reproduce.register(app)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="A folder for the twins, the report and what was measured.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each twin.")] = 1000,
    trajectories: Annotated[int, typer.Option(min=1, help="Stories of each twin that are watched as they are written.")] = 32,
    seed: Seed = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, whatever an earlier demo left.")] = False,
    as_json: Json = False,
) -> None:
    """Train twins with and without a sink on a small language, score and watch them, and write a report: minutes on a CPU."""
    from sinkdlm.demo.run import run_demo
    from sinkdlm.distributed.signals import Stopped

    try:
        found = run_demo(out, steps=steps, seed=seed, trajectories=trajectories, fresh=fresh, as_json=as_json)
    except Stopped as stopped:
        print(f"sinkdlm: {stopped}", file=sys.stderr)
        leave(128 + stopped.number)
    if as_json:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))


def leave(status: int) -> NoReturn:
    """One of several ranks ends at once: what is left of a process group that lost a member may wait for it for ever."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


def _fail(message: str) -> NoReturn:
    print(f"sinkdlm: {message}", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Runs the command line; a user's mistake becomes one line on stderr and exit status 2."""
    from sinkdlm.errors import UserError

    # typer carries click inside it, and exports only the ends of its exception tree.
    usage_error: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        with EndedWhileImporting():
            status = app(standalone_mode=False)
        if status == 130:  # typer makes an exit of Ctrl-C, and says nothing
            raise KeyboardInterrupt
        raise SystemExit(status)
    except UserError as failure:
        if not failure.quiet:
            print(f"sinkdlm: {failure}", file=sys.stderr)
        leave(2)
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
        leave(130)
    except Exception:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        import traceback

        traceback.print_exc()
        leave(1)


if __name__ == "__main__":
    main()
