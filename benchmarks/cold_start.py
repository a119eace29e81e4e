"""Two starts of the same recipe: seconds from the command to the first step, with an empty compile cache and with a full one.

    python -m benchmarks.cold_start --model smdm-472m --rows 16 --out benchmarks/results

Each start is `sinkdlm train` in a process of its own. Starts alternate: cold ones with a cache folder of their own, warm ones with
one that a start before them has filled. Beside the first step: when the run's folder is there (packages are loaded, and the device
is), and when the weights are; what comes after that is all that caches spare. --profile makes one warm start more, under cProfile,
and writes where its time went.
"""

import argparse
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.kills import write_set
from benchmarks.measuring import quantiles, record, write
from benchmarks.train import lines_of

_LINES = 150  # of a profile, in each order
_FOLDER, _WEIGHTS, _STEP = "folder", "weights", "first_step"


def seconds_of_start(recipe: Path, out: Path, cache: Path, overrides: list[str], profile: Path | None = None) -> dict[str, float]:
    """Until the first step's line is in metrics.jsonl, and until files that a run writes before; the run then goes to its end."""
    watched = [] if profile is None else ["-m", "cProfile", "-o", str(profile)]
    command = [sys.executable, *watched, "-m", "sinkdlm", "train", str(recipe), "--out", str(out)]
    command += [word for override in overrides for word in ("--set", override)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    signs: dict[str, Callable[[], bool]] = {
        _FOLDER: (out / "recipe.toml").exists,
        _WEIGHTS: (out / "environment.json").exists,
        _STEP: lambda: any(line["kind"] == "train" for line in lines_of(out / "metrics.jsonl")),
    }
    found: dict[str, float] = {}
    began = time.monotonic()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and len(found) < len(signs):
            time.sleep(0.02)
            found |= {name: time.monotonic() - began for name, seen in signs.items() if name not in found and seen()}
        _, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"the run failed with status {process.returncode}: {said[-2000:]}")
    return {name: found.get(name, time.monotonic() - began) for name in signs}


def write_profile(profile: Path, text: Path) -> None:
    """The functions that took longest with all they called, and then by themselves."""
    with text.open("w") as stream:
        for order in ("cumulative", "tottime"):
            pstats.Stats(str(profile), stream=stream).sort_stats(order).print_stats(_LINES)


def recipe_text(model: str, n_sinks: int, length: int, rows: int, data: Path) -> str:
    return f"""
[model]
preset = "{model}"
n_sinks = {n_sinks}
[data]
length = {length}
[data.sets]
"{data}" = 1
[train]
steps = 3
batch = {rows}
lr = 1e-4
[eval]
every = 0
[log]
probe_every = 0
[save]
every = 1000
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smdm-472m", help="a preset")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--starts", type=int, default=2, help="of each kind")
    parser.add_argument("--profile", type=Path, help="a text file for where a warm start's time goes")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--out", type=Path, default=None, help="folder for the record, for example benchmarks/results")
    args = parser.parse_args()
    times: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = folder / "recipe.toml"
        recipe.write_text(recipe_text(args.model, 1, args.length, args.rows, write_set(folder / "data", tokens=400_000)))
        for number in range(args.starts):
            for kind in ("cold", "warm"):
                out = folder / f"{kind}-{number}"
                times[kind].append(seconds_of_start(recipe, out, folder / f"cache-{number}", args.overrides))
                print(kind, times[kind][-1], flush=True)
        if args.profile is not None:
            seconds_of_start(recipe, folder / "profiled", folder / "cache-0", args.overrides, folder / "profile")
            write_profile(folder / "profile", args.profile)
    figures = {
        f"seconds_to_{name}": {kind: quantiles([one[name] for one in taken]) for kind, taken in times.items()}
        for name in (_FOLDER, _WEIGHTS, _STEP)
    }
    figures["seconds_of_first_step"] = {
        kind: quantiles([one[_STEP] - one[_WEIGHTS] for one in taken]) for kind, taken in times.items()
    }
    ratios = {
        name: figures[of]["warm"]["p50"] / figures[of]["cold"]["p50"]
        for name, of in (("warm_to_cold", f"seconds_to_{_STEP}"), ("warm_to_cold_of_first_step", "seconds_of_first_step"))
    }
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "profile")}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(
        record("cold_start", {**figures, **ratios}, device=device, settings=settings),
        args.out,
        subject=args.model,
    )


if __name__ == "__main__":
    main()
