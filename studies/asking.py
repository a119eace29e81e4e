"""What the studies share: options, exit, and files beside the results of runs. Knows no study."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sinkdlm.cli.loading import load_parent
from sinkdlm.errors import ReproduceError, UserError
from sinkdlm.evals.requests import Sheet
from sinkdlm.reproduce.command import open_work
from sinkdlm.reproduce.inputs import NO_PARENT, Asked, read_questions
from sinkdlm.reproduce.markdown import to_markdown
from sinkdlm.reproduce.matrix import SCALES
from sinkdlm.reproduce.results import provenance, write_text
from sinkdlm.reproduce.running import Bench


def run_study(
    doc: str,
    study: Callable[[Asked], dict[str, Any]],
    blocks: Callable[[Asked, dict[str, Any]], Iterable[str]],
    words: Sequence[str] | None,
) -> None:
    """Parse the options, make the study, print its tables. A user's mistake is one line and exit status 2."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--scale", choices=list(SCALES), default="nano")
    parser.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="the folder of the reproduction")
    parser.add_argument("--records", type=Path, help="where results are kept; by default records/ in OUT")
    parser.add_argument("--parent", help="the autoregressive model, as `sinkdlm convert` reads it")
    parser.add_argument("--corpus", action="append", default=[], help="a prepared set, or texts; may be given several times")
    parser.add_argument("--data", type=Path, help="a folder of the benchmarks' files; needs the harness")
    parser.add_argument("--requests", type=Path, help="instead, what `sinkdlm eval --write-requests` wrote")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="as in `sinkdlm train`")
    parser.add_argument("--device")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = vars(parser.parse_args(words))
    as_json, asked = options.pop("json"), Asked("", **options)
    try:
        found = study(asked)
    except UserError as failure:
        parser.exit(2, f"{parser.prog}: {failure}\n")
    print(json.dumps(found, indent=1) if as_json else to_markdown(blocks(asked, found)))


def on_bench(measure: Callable[[Bench], dict[str, Any]]) -> Callable[[Asked], dict[str, Any]]:
    """A study of a parent and its data."""

    def study(asked: Asked) -> dict[str, Any]:
        with open_work(asked, [], load_parent) as work:
            if work.bench.inputs.parent is None:
                raise ReproduceError(NO_PARENT)
            return measure(work.bench)

    return study


def questions(asked: Asked) -> Sheet:
    sheet = read_questions(asked)
    if sheet is None:
        cure = "give the benchmarks' files, or what eval --write-requests wrote"
        raise ReproduceError(f"--data or --requests: which questions? {cure}")
    return sheet


def say(text: str) -> None:
    print(text, file=sys.stderr)


def write_beside(asked: Asked, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Write and return the numbers, with their provenance unless they have it."""
    told = {**provenance(torch.device("cpu")), **found}
    write_text(asked.folder / name / f"{asked.scale}.json", json.dumps(told, indent=1) + "\n")
    return told


def read_beside(folder: Path, name: str, scale: str) -> dict[str, Any] | None:
    """folder: of results."""
    path = folder / name / f"{scale}.json"
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as failure:
        raise ReproduceError(f"{path}: cannot be read ({failure}); make it anew with: python -m studies.{name}") from None
