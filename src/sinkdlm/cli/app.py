"""The command line: one Typer app of all commands.

A command's module is imported when the command runs, and imports what it needs then, so that `sinkdlm --help` stays light.
"""

from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sinkdlm.cli.options import option

# Where a command is, and its line in the help, in the order in which a newcomer meets them. A line must fit a terminal.
COMMANDS = {
    "demo": ("demo:demo", "Train twins with and without a sink in minutes; report."),
    "data": ("data:app", "Prepare training data and look at it."),
    "recipe": ("recipe:app", "List recipes, or print one in full."),
    "presets": ("recipe:presets", "List model presets with their parameter counts."),
    "plan": ("plan:plan", "Estimate memory, hours and cost of a run before it starts."),
    "train": ("train:train", "Pretrain, adapt an AR parent or fine-tune, from a recipe."),
    "sample": ("sample:sample", "Write text after a prompt, into gaps, or as a chat answer."),
    "eval": ("evaluate:evaluate", "Evaluate a model on lm-eval's benchmarks."),
    "score": ("evaluate:score", "Measure bits per byte and perplexity of documents."),
    "compare": ("compare:compare", "Compare two models on the same texts."),
    "score-requests": ("evaluate:score_requests", "Answer the requests of an eval where lm-eval is missing."),
    "analyze": ("analyze:analyze", "Report where attention sinks are and what they do."),
    "reproduce": ("reproduce:reproduce", "Repeat the paper's tables and judge each claim."),
    "inspect": ("serve:serve", "Open a page that shows one or two models writing."),
    "serve": ("serve:serve", "Serve one or two models over OpenAI's HTTP API."),
    "push": ("push:push", "Push a model to the Hugging Face hub."),
    "convert": ("convert:convert", "Convert a model from one format to another."),
}


class _Commands(TyperGroup):
    """The commands by name, each built when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        found = resolve_name(f"sinkdlm.cli.{COMMANDS[cmd_name][0]}")
        if not isinstance(found, typer.Typer):
            one = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
            opens = "Serve one or two models and open the page that shows them writing." if cmd_name == "inspect" else None
            one.command(cmd_name, help=opens)(found)
            found = one
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


app = typer.Typer(
    name="sinkdlm",
    cls=_Commands,
    help="Masked diffusion language models with a stable sink token.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
)


def _version(asked: bool) -> None:
    if asked:
        from sinkdlm import __version__

        typer.echo(f"sinkdlm {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, option("Print the version.", "--version", callback=_version, is_eager=True)] = False) -> None:
    pass
