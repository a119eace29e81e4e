"""Kill a training run again and again and resume it; its end must be bit-equal to that of an undisturbed run.

    python -m benchmarks.kills --kills 50
    python -m benchmarks.kills --kills 20 --ranks 4

Each process of the run is ended by SIGKILL at a random moment: while it starts, after a few steps, or while it writes a state.
Processes to be killed in training are forked from one that has done all imports, which saves seconds. The others, the first and
the last are started as a user starts them.
With --ranks, torchrun starts that many ranks; one is killed each time, and torchrun restarts all. Kills in training again hit
forks, in a first launch; a second launch, started as a user starts it, gets the other kills and ends the run.
Compared at the end: exported weights, the whole last state (moments included), and every line of metrics.jsonl but its timings.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.measuring import result, write

STEPS_PER_KILL = 8
_PATIENCE = 120.0  # seconds to wait for the moment of a kill


def write_set(folder: Path, *, tokens: int = 20_000, seed: int = 0) -> Path:
    """Write a small prepared set that can be learned: each token is the one before plus 0, 1 or 2."""
    import hashlib

    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    splits = {}
    for split, size in (("train", tokens), ("validation", tokens // 8)):
        stream = (np.cumsum(rng.integers(0, 3, size)) % 60).astype("<u2")
        stream[96::97] = 63
        stream[-1] = 63
        (folder / f"{split}-00000.bin").write_bytes(stream.tobytes())
        shard = {
            "file": f"{split}-00000.bin",
            "tokens": size,
            "documents": int((stream == 63).sum()),
            "sha256": hashlib.sha256(stream.tobytes()).hexdigest(),
        }
        splits[split] = {"tokens": size, "documents": shard["documents"], "highest_id": 63, "shards": [shard]}
    mark = {"sha256": f"made-{seed}", "vocabulary_sha256": "made", "rows": 64, "source": "made"}
    index = {"format": "sinkdlm-tokens", "version": 1, "kind": "text", "dtype": "uint16", "eos_id": 63, "tokenizer": mark}
    (folder / "index.json").write_text(json.dumps({**index, "settings": {}, "splits": splits}))
    return folder


def write_recipe(path: Path, data: Path, *, steps: int, background: bool = False, block_size: int | None = None) -> Path:
    path.write_text(
        f"""
[model]
preset = "nano"
n_layers = 2
d_model = 32
d_ff = 64
n_sinks = 1
{"" if block_size is None else f"block_size = {block_size}"}
[data]
length = 32
sets = {{"{data}" = 1}}
random_lengths = 0.1
[train]
steps = {steps}
batch = 4
micro_batch = 3
lr = 1e-3
min_lr = 1e-4
ema = 0.9
precision = "float32"
[eval]
every = 10
draws = 8
[log]
probe_every = 10
[save]
every = 3
background = {str(background).lower()}
"""
    )
    return path


def start(recipe: Path, out: Path, ranks: int = 1, restarts: int = 0) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    command = [*launcher, "-m", "sinkdlm", "train", str(recipe), "--out", str(out)]
    with out.with_suffix(".said").open("wb") as said:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=environment)


# Sharding imports the last two, and so does a state.
_PRELOADED = ["sinkdlm.cli.app", "sinkdlm.training.loop", "torch._dynamo", "torch.distributed.checkpoint"]


class Fork:
    """`sinkdlm train`, forked from a process that has done the imports; used here like subprocess.Popen."""

    def __init__(self, recipe: Path, out: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process = context.Process(target=_train, args=(["train", str(recipe), "--out", str(out)], out.with_suffix(".said")))
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("sinkdlm train", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _train(words: list[str], said: Path) -> None:
    """The command line in a forked process; its stderr goes to the file."""
    import torch

    from sinkdlm.cli.entry import main

    torch.set_num_threads(1)
    with said.open("wb") as file, open(os.devnull, "wb") as nothing:
        os.dup2(file.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
    sys.argv = ["sinkdlm", *words]
    main()


def start_forks(recipe: Path, out: Path, ranks: int, restarts: int) -> subprocess.Popen[bytes]:
    """Launch ranks as torchrun does, forked from a process that has done the imports."""
    words = ["train", str(recipe), "--out", str(out)]
    program = f"from benchmarks.kills import launch_forks; launch_forks({words!r}, {ranks}, {restarts})"
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with out.with_suffix(".said").open("wb") as said:
        return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=said, env=environment)


def launch_forks(words: list[str], ranks: int, restarts: int) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="kills",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # as --standalone
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    elastic_launch(config, _train_rank)(words)


def _train_rank(words: list[str]) -> None:
    from sinkdlm.cli.entry import main

    sys.argv = ["sinkdlm", *words]
    try:
        main()
    except SystemExit as left:
        if left.code:
            raise


Life = subprocess.Popen[bytes] | Fork


def finish(recipe: Path, out: Path, ranks: int = 1) -> None:
    check_end(start(recipe, out, ranks), out)


def check_end(process: Life, out: Path) -> None:
    if process.wait():
        raise RuntimeError(out.with_suffix(".said").read_text()[-4000:])


def kill_once(recipe: Path, out: Path, rng: random.Random) -> str:
    """Start the run and kill it. Returns the moment: "start", "step", "save", or "end" if the run was over before."""
    moment = choose_moment(rng)
    process = start(recipe, out) if moment == "start" else Fork(recipe, out)
    wait_for_moment(moment, process, out, rng)
    if process.poll() is not None:
        check_end(process, out)
        return "end"
    process.send_signal(signal.SIGKILL)
    process.wait()
    return moment


def choose_moment(rng: random.Random) -> str:
    return rng.choice(["start", "step", "step", "save", "save"])


def wait_for_moment(moment: str, process: Life, out: Path, rng: random.Random, starting: float = 4.0) -> None:
    deadline = time.monotonic() + _PATIENCE
    metrics, states = out / "metrics.jsonl", out / "checkpoints"
    size = metrics.stat().st_size if metrics.exists() else 0
    if moment == "start":
        changed, until = _changed(metrics), time.monotonic() + rng.uniform(0, starting)
        while process.poll() is None and time.monotonic() < until and _changed(metrics) == changed:
            time.sleep(0.005)  # only while it starts: on a fast machine the run would be over before the kill
    elif moment == "step":
        lines = rng.randint(1, STEPS_PER_KILL)
        while process.poll() is None and time.monotonic() < deadline and _lines_after(metrics, size) < lines:
            time.sleep(0.001)
        _wait(process, rng.uniform(0, 0.02))
    else:
        skip = rng.randint(0, 1)
        seen: set[str] = set()
        changed = _changed(metrics)
        while process.poll() is None and time.monotonic() < deadline and _changed(metrics) == changed:
            time.sleep(0.001)  # it starts; the next loop polls without sleeping
        while process.poll() is None and time.monotonic() < deadline and len(seen) <= skip:
            seen |= {path.name for path in states.glob(".step-*.partial")}
        _wait(process, rng.uniform(0, 0.004))


def workers(launcher: int) -> list[int]:
    """Process ids of the ranks that a launcher has started; needs /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == launcher and b"sinkdlm" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, IndexError, ValueError):
            continue
    return sorted(found)


def kill_ranks(recipe: Path, out: Path, ranks: int, kills: int, rng: random.Random) -> tuple[dict[str, int], int]:
    """Kill ranks one at a time; torchrun restarts all of them. Returns the moments, and how many kills tore a state."""
    chosen = [choose_moment(rng) for _ in range(kills)]
    training = [moment for moment in chosen if moment != "start"]
    plain = [*training[-1:], *(moment for moment in chosen if moment == "start")]
    moments: dict[str, int] = {}
    torn = 0
    for forks, lives in ((True, training[:-1]), (False, plain)):
        if forks and not lives:
            continue
        restarts = len(lives) - forks  # the last kill of forks ends their launch
        process = start_forks(recipe, out, ranks, restarts) if forks else start(recipe, out, ranks, restarts)
        before: set[int] = set()
        for moment in lives:
            alive = _wait_for_ranks(process, ranks, forks, before)
            wait_for_moment(moment, process, out, rng, starting=8.0)
            if process.poll() is not None:
                check_end(process, out)
                return {**moments, "end": 1}, torn
            os.kill(rng.choice(alive), signal.SIGKILL)
            torn += bool(list((out / "checkpoints").glob(".step-*")))
            moments[moment] = moments.get(moment, 0) + 1
            before |= set(alive)
        if forks and not process.wait(_PATIENCE):
            raise RuntimeError("a launch without a restart left went on")
    check_end(process, out)
    return moments, torn


def _wait_for_ranks(process: subprocess.Popen[bytes], ranks: int, forks: bool, before: set[int]) -> list[int]:
    """The processes of a launch's next life."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        parents = workers(process.pid) if forks else [process.pid]
        alive = [pid for parent in parents for pid in workers(parent) if pid not in before]
        if len(alive) == ranks:
            return alive
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{len(alive)} of {ranks} ranks")
        time.sleep(0.1)  # looking through /proc takes as long as a step


def _wait(process: Life, seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _lines_after(path: Path, size: int) -> int:
    """Lines after `size` bytes, or after the file's end if it is shorter now: a resumed run first cuts the file."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    return content[min(size, len(content)) :].count(b"\n")


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def read_metrics(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "timing"} for line in lines]


def read_tensors(folder: Path) -> dict[str, Any]:
    """Tensors of weights by name; each is in one file."""
    return {name: value for (_, name), value in _read_by_file(folder).items()}


def _read_by_file(folder: Path) -> dict[tuple[str, str], Any]:
    """Tensors by file and name: in a state, each rank's file has its own rows under the same names."""
    return {(file.name, name): value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def differences(first: Path, second: Path) -> list[str]:
    """What differs between the ends of two runs; empty if they are bit-equal."""
    found = []
    ours, theirs = read_metrics(first), read_metrics(second)
    if ours != theirs:
        at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs)))
        found.append(f"metrics.jsonl from line {at + 1} ({len(ours)} and {len(theirs)} lines)")
    newest = [max((out / "checkpoints").glob("step-*")) for out in (first, second)]
    for name, pair in {
        "weights": (first / "model", second / "model"),
        "average": (first / "ema", second / "ema"),
        "state": (newest[0], newest[1]),
    }.items():
        tensors = [_read_by_file(folder) for folder in pair]
        same = tensors[0].keys() == tensors[1].keys() and len(tensors[0]) > 0
        if not same or not all(tensors[0][key].tobytes() == tensors[1][key].tobytes() for key in tensors[0]):
            found.append(name)
    return found


def run(
    kills: int, seed: int, folder: Path, *, background: bool = False, ranks: int = 1, block_size: int | None = None
) -> dict[str, Any]:
    rng = random.Random(seed)
    data = write_set(folder / "data")
    steps = STEPS_PER_KILL * max(kills, 4)
    recipe = write_recipe(folder / "recipe.toml", data, steps=steps, background=background, block_size=block_size)
    finish(recipe, folder / "alone", ranks)
    moments: dict[str, int] = {}
    torn = 0
    if ranks > 1:
        moments, torn = kill_ranks(recipe, folder / "killed", ranks, kills, rng)
    else:
        while sum(moments.values()) < kills:
            moment = kill_once(recipe, folder / "killed", rng)
            moments[moment] = moments.get(moment, 0) + 1
            if moment == "end":
                break
            torn += bool(list((folder / "killed" / "checkpoints").glob(".step-*")))
        finish(recipe, folder / "killed")
    done = sum(count for moment, count in moments.items() if moment != "end")
    lines = len(read_metrics(folder / "alone"))
    odd = differences(folder / "alone", folder / "killed")
    return {"kills": done, "moments": moments, "torn_states": torn, "lines": lines, "differences": odd}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--background", action="store_true", help="write states in the background")
    parser.add_argument("--ranks", type=int, default=1, help="ranks under torchrun, with restarts")
    parser.add_argument("--block-size", type=int, default=None, help="block diffusion, in blocks of so many tokens")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        how = {"background": given.background, "ranks": given.ranks, "block_size": given.block_size}
        found = run(given.kills, given.seed, Path(folder), **how)
    settings = {"kills": given.kills, "seed": given.seed, **how}
    write(result("kills", found, device="cpu", settings=settings), given.out)
    if found["differences"]:
        raise SystemExit(f"not bit-equal: {', '.join(found['differences'])}")


if __name__ == "__main__":
    main()
