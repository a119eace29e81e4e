"""Time starts of a training run: seconds from the command to the first step, with empty and with full caches.

    python -m benchmarks.cold_start --model smdm-472m --rows 16 --out benchmarks/results

Each start is `sinkdlm train` in a new process, killed after its first step. Starts take turns:

- cold: neither kernels nor the Python bytecode of torch and other packages are cached, as in the first start of an
  environment that uv installed, or of an image without bytecode;
- installed: the bytecode is cached, as after an installation by pip, and no kernel is;
- warm: an earlier start has filled both caches.

Bytecode goes to a separate folder (PYTHONPYCACHEPREFIX). Also timed: until the run's folder is there (packages and device are
loaded), and until the weights are. --profile makes one more warm start under cProfile and writes where its time went.
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
from benchmarks.measuring import quantiles, result, write
from benchmarks.train import lines_of

_LINES = 150  # of a profile, in each order
_FOLDER, _WEIGHTS, _STEP = "folder", "weights", "first_step"
_KINDS = ("cold", "installed", "warm")


def seconds_of_start(
    recipe: Path, out: Path, bytecode: Path, kernels: Path, overrides: list[str], profile: Path | None = None
) -> dict[str, float]:
    """Seconds until the first step's line is in metrics.jsonl, and until earlier files of the run are there. The run is then
    killed; a profiled one runs to its end, which writes the profile."""
    watched = [] if profile is None else ["-m", "cProfile", "-o", str(profile)]
    command = [sys.executable, *watched, "-m", "sinkdlm", "train", str(recipe), "--out", str(out)]
    command += [word for override in overrides for word in ("--set", override)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(bytecode)}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(kernels / "inductor"), "TRITON_CACHE_DIR": str(kernels / "triton")}
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
        ended = process.poll() is None and profile is None
        if ended:
            process.kill()
        _, said = process.communicate()
    if process.returncode and not ended:
        raise SystemExit(f"the run failed with status {process.returncode}: {said[-2000:]}")
    return {name: found.get(name, time.monotonic() - began) for name in signs}


def write_profile(profile: Path, text: Path) -> None:
    """Write the slowest functions, by cumulative time and then by own time."""
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
    parser.add_argument("--profile", type=Path, help="write a profile of a warm start to this text file")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    args = parser.parse_args()
    times: dict[str, list[dict[str, float]]] = {kind: [] for kind in _KINDS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = folder / "recipe.toml"
        recipe.write_text(recipe_text(args.model, 1, args.length, args.rows, write_set(folder / "data", tokens=400_000)))
        for number in range(args.starts):
            bytecode = folder / f"bytecode-{number}"
            for kind in _KINDS:
                kernels = folder / f"kernels-{number}-{'cold' if kind == 'cold' else 'installed'}"
                times[kind].append(seconds_of_start(recipe, folder / f"{kind}-{number}", bytecode, kernels, args.overrides))
                print(kind, times[kind][-1], file=sys.stderr, flush=True)
        if args.profile is not None:
            seconds_of_start(recipe, folder / "profiled", bytecode, kernels, args.overrides, folder / "profile")
            write_profile(folder / "profile", args.profile)
    figures = {
        f"seconds_to_{name}": {kind: quantiles([one[name] for one in taken]) for kind, taken in times.items()}
        for name in (_FOLDER, _WEIGHTS, _STEP)
    }
    figures["seconds_of_first_step"] = {
        kind: quantiles([one[_STEP] - one[_WEIGHTS] for one in taken]) for kind, taken in times.items()
    }
    middle = {kind: figures[f"seconds_to_{_STEP}"][kind]["p50"] for kind in _KINDS}
    ratios = {f"warm_to_{kind}": middle["warm"] / middle[kind] for kind in _KINDS[:2]}
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "profile")}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(
        result("cold_start", {**figures, **ratios}, device=device, settings=settings),
        args.out,
        subject=args.model,
    )


if __name__ == "__main__":
    main()
