"""What the studies share: their options, how they end, and where their numbers lie, beside the results of runs. Knows no study."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sinkdlm.errors import ReproduceError, UserError
from sinkdlm.reproduce.command import Asked
from sinkdlm.reproduce.inputs import Given
from sinkdlm.reproduce.matrix import SCALES
from sinkdlm.reproduce.results import provenance, write_text


def run_study(
    doc: str, study: Callable[[Asked], dict[str, Any]], tell: Callable[[dict[str, Any]], Iterable[str]], words: Sequence[str] | None
) -> None:
    """Parse the options, make the study, print what it found. A user's mistake is one line and exit status 2."""
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
    options = parser.parse_args(words)
    given = Given(options.parent, options.corpus, None, options.data, options.requests)
    asked = Asked("", options.scale, options.out, records=options.records or options.out / "records", given=given)
    try:
        found = study(asked._replace(overrides=options.overrides, device=options.device))
    except UserError as failure:
        parser.exit(2, f"{parser.prog}: {failure}\n")
    print(json.dumps(found, indent=1) if options.json else "\n".join(tell(found)))


def say(text: str) -> None:
    print(text, file=sys.stderr)


def write_beside(records: Path, name: str, scale: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What was written: with how it came to be, unless that is said."""
    told = {**provenance(torch.device("cpu")), **found}
    write_text(_beside(records, name, scale), json.dumps(told, indent=1) + "\n")
    return told


def read_beside(records: Path, name: str, scale: str) -> dict[str, Any] | None:
    path = _beside(records, name, scale)
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as failure:
        raise ReproduceError(f"{path}: cannot be read ({failure}); make it anew with: python -m studies.{name}") from None


def _beside(records: Path, name: str, scale: str) -> Path:
    return records / name / f"{scale}.json"
