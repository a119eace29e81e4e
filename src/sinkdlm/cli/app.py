"""The command line: one Typer app of all commands, and how a command ends.

Each command imports what it needs when it runs, so that `sinkdlm --help` stays light.
"""

import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from sinkdlm.cli import data, recipe
from sinkdlm.cli.analyze import analyze
from sinkdlm.cli.convert import convert
from sinkdlm.cli.demo import demo
from sinkdlm.cli.entry import EndedWhileImporting
from sinkdlm.cli.evaluate import evaluate, score, score_requests
from sinkdlm.cli.options import option
from sinkdlm.cli.plan import plan
from sinkdlm.cli.reproduce import reproduce
from sinkdlm.cli.sample import sample
from sinkdlm.cli.serve import serve
from sinkdlm.cli.train import train
from sinkdlm.errors import UserError

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
def _root(
    version: Annotated[bool, option("Print the version.", "--version", callback=_version, is_eager=True)] = False,
) -> None:
    pass


def _leave(status: int) -> NoReturn:
    """End the process; one of several ranks at once, since a process group that lost a member may wait for it for ever."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)


def main() -> None:
    """Run the command line; a user's mistake becomes one line on stderr and exit status 2."""
    from sinkdlm.distributed.signals import Stopped

    # typer carries click inside it, and exports only the ends of its exception tree.
    usage_error: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        with EndedWhileImporting():
            status = app(standalone_mode=False)
        if status == 130:  # typer makes an exit of Ctrl-C, and says nothing
            raise KeyboardInterrupt
        raise SystemExit(status)
    except (UserError, Stopped) as ended:
        if not ended.quiet:
            print(f"sinkdlm: {ended}", file=sys.stderr)
        _leave(128 + ended.number if isinstance(ended, Stopped) else 2)
    except usage_error as failure:
        message = failure.format_message()
        if "Usage:" not in message:  # a command without arguments shows its help
            context = getattr(failure, "ctx", None)
            message = f"sinkdlm: {message.rstrip('.')}; see {context.command_path if context else 'sinkdlm'} --help"
        print(message, file=sys.stderr)
        raise SystemExit(2) from None
    except typer.Abort:
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("sinkdlm: interrupted", file=sys.stderr)
        _leave(130)
    except Exception:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        import traceback

        traceback.print_exc()
        _leave(1)
