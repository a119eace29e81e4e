"""The command line: one Typer app of all commands.

Each command imports what it needs when it runs, so that `sinkdlm --help` stays light.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sinkdlm.cli import data, recipe
from sinkdlm.cli.analyze import analyze
from sinkdlm.cli.convert import convert
from sinkdlm.cli.demo import demo
from sinkdlm.cli.evaluate import evaluate, score, score_requests
from sinkdlm.cli.options import option
from sinkdlm.cli.plan import plan
from sinkdlm.cli.reproduce import reproduce
from sinkdlm.cli.sample import sample
from sinkdlm.cli.serve import serve
from sinkdlm.cli.train import train

# In the order in which a newcomer meets them; a docstring's first line would be cut at the edge of the terminal.
COMMANDS: dict[str, tuple[Any, str]] = {
    "demo": (demo, "Twins with and without a sink, trained in minutes; a report."),
    "data": (data.app, "Prepare training data, and look at it."),
    "recipe": (recipe.app, "Look at recipes."),
    "presets": (recipe.presets, "List model presets with their parameter counts."),
    "plan": (plan, "Memory, hours and cost of a run, before it is started."),
    "train": (train, "Pretrain, adapt an AR parent or fine-tune, by a recipe."),
    "sample": (sample, "Write text: after a prompt, into gaps, or as an answer."),
    "eval": (evaluate, "Evaluate a model on benchmarks, with lm-eval's tasks."),
    "score": (score, "Bits per byte and perplexity of documents."),
    "score-requests": (score_requests, "Answer requests of eval without the harness."),
    "analyze": (analyze, "Where attention sinks are, and what they do: a report."),
    "reproduce": (reproduce, "Repeat the paper's tables, with a verdict on each claim."),
    "inspect": (serve, "Open a page that shows one or two models writing."),
    "serve": (serve, "Serve one or two models over HTTP, as OpenAI's API."),
    "convert": (convert, "Read any supported model, and write it in another form."),
}


class _InOrder(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)


app = typer.Typer(
    name="sinkdlm",
    cls=_InOrder,
    help="Masked diffusion language models with a stable sink token.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    add_completion=False,
)
for _name, (_command, _summary) in COMMANDS.items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name, short_help=_summary)
    else:
        _help = "Serve one or two models and open the page that shows them writing." if _name == "inspect" else None
        app.command(_name, short_help=_summary, help=_help)(_command)


def _version(asked: bool) -> None:
    if asked:
        from sinkdlm import __version__

        typer.echo(f"sinkdlm {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, option("Print the version.", "--version", callback=_version, is_eager=True)] = False) -> None:
    pass
