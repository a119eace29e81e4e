"""Compare the speed of this checkout with another one on the same machine, by turns.

    python -m benchmarks.trees ../old --out benchmarks/results          a GPU: training steps, sampling and starts

For each subject there is one warm process a tree; the two run by turns. `to_old` is the old tree's median time divided by this
one's, above 1 if this tree is faster; `pairs` has this ratio for each turn. A start is a new process of `sinkdlm train`, timed from
the command to the first step's line, with kernels and bytecode cached.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SUBJECTS = (
    "sink:smdm-472m:2048:16",  # training steps: form of benchmarks.train_step, preset, tokens, rows
    "sink:smollm2-135m:512:256",
    "sampling:64",  # smdm-472m, 256 tokens: rows
    "sampling:1",
    "start:smdm-472m",
)
_HERE = Path(__file__).parents[1]
_READY = "ready"


def training_step(form: str, preset: str, length: int, rows: int) -> Callable[[], Any]:
    from benchmarks.train_step import Step, recipe_of, split_form

    step = Step(recipe_of(preset, length, **split_form(form)[0]), form, rows, torch.device("cuda"))
    for _ in range(3):
        step()
    return step.several


def sampling(rows: int) -> Callable[[], Any]:
    from sinkdlm import DiffusionLM, ModelConfig
    from sinkdlm.sampling import generate

    config = ModelConfig.preset("smdm-472m", n_sinks=1)
    model = DiffusionLM(config, seed=0).to("cuda", torch.bfloat16)
    try:
        from sinkdlm.fast import accelerate
    except ImportError:  # an older tree, which accelerates models by itself
        pass
    else:
        accelerate(model)
    prompt = torch.randint(0, config.vocab_size, (rows, 4), generator=torch.Generator().manual_seed(0)).cuda()
    given: dict[str, Any] = {"length": 256, "config": "smdm-greedy", "steps": 256 if rows == 1 else 64, "mask_id": config.mask_id}

    def run() -> None:
        with model.inference():
            generate(model.denoiser(), prompt=prompt, **given)

    run()
    return run


def work(subject: str) -> None:
    """Warm up, print that it is ready, and answer each line with the milliseconds of one run."""
    from benchmarks.measuring import measure

    kind, *words = subject.split(":")
    run = sampling(int(words[0])) if kind == "sampling" else training_step(kind, words[0], *map(int, words[1:]))
    print(_READY, flush=True)
    for _ in sys.stdin:
        print(measure(run, "cuda", warmup=0, repeats=1)["p50"], flush=True)


class Worker:
    def __init__(self, tree: Path, subject: str) -> None:
        paths = os.pathsep.join([str(tree / "src"), str(tree), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--work", subject]
        environment = {**os.environ, "PYTHONPATH": paths}
        self.process = subprocess.Popen(
            command, cwd=tree, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def read(self) -> str:
        """The worker's next answer; other lines, as torch prints them, are skipped."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == _READY or line[0].isdigit():
                return line
        raise SystemExit(f"a worker ended with status {self.process.wait()}")

    def run(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.read())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def by_turns(trees: dict[str, Path], subject: str, pairs: int) -> dict[str, list[float]]:
    workers = {name: Worker(tree, subject) for name, tree in trees.items()}
    for worker in workers.values():
        worker.read()
    taken: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(pairs):
        for name, worker in workers.items():
            taken[name].append(worker.run())
    for worker in workers.values():
        worker.close()
    return taken


def starts(trees: dict[str, Path], preset: str, pairs: int) -> dict[str, list[float]]:
    from benchmarks.cold_start import recipe_text, seconds_of_start
    from benchmarks.kills import write_set

    taken: dict[str, list[float]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as name:
        folder, before = Path(name), os.environ.get("PYTHONPATH", "")
        recipe = folder / "recipe.toml"
        recipe.write_text(recipe_text(preset, 1, 2048, 16, write_set(folder / "data", tokens=400_000)))
        for number in range(pairs + 1):
            for tree, path in trees.items():
                os.environ["PYTHONPATH"] = os.pathsep.join([str(path / "src"), before])
                cached = (folder / f"bytecode-{tree}", folder / f"kernels-{tree}")
                seconds = seconds_of_start(recipe, folder / f"{tree}-{number}", *cached, [])
                if number:  # the first fills the caches
                    taken[tree].append(1000 * seconds["first_step"])
        os.environ["PYTHONPATH"] = before
    return taken


def compare(taken: dict[str, list[float]]) -> dict[str, Any]:
    from benchmarks.measuring import quantiles

    old, new = taken["old"], taken["new"]
    ratios = sorted(before / after for before, after in zip(old, new, strict=True))
    return {
        "to_old": statistics.median(old) / statistics.median(new),
        "pairs": [round(one, 4) for one in ratios],
        "ms_old": {**quantiles(old), "all": old},
        "ms_new": {**quantiles(new), "all": new},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?", help="a checkout of another commit")
    parser.add_argument("--subjects", default=",".join(SUBJECTS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    from benchmarks.measuring import result, write  # here, as a worker imports those of its own tree

    trees = {"old": args.old.resolve(), "new": _HERE}
    figures: dict[str, Any] = {}
    settings = {"subjects": args.subjects, "pairs": args.pairs, "old": args.old.name}
    for subject in args.subjects.split(","):
        kind, *words = subject.split(":")
        taken = starts(trees, words[0], args.pairs) if kind == "start" else by_turns(trees, subject, args.pairs)
        figures[subject] = compare(taken)
        print(subject, round(figures[subject]["to_old"], 4), figures[subject]["pairs"], file=sys.stderr, flush=True)
        write(result("trees", figures, device="cuda", settings=settings), args.out)  # in case the next subject fails


if __name__ == "__main__":
    main()
