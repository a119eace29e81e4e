"""The run folder: recipe, environment, metrics, states, and the checkpoints that come out of it.

    recipe.toml       what runs here, resolved
    run.json          facts of the start that a resumed run needs: budget in steps, data, parent
    environment.json  one entry for every time the run was started: command, commit, versions, hardware
    metrics.jsonl     one line a step; validations, probes and samples between them
    tokenizer/        the data's or the parent's
    checkpoints/      states to resume from
    milestones/       checkpoints exported on the way
    model/            the checkpoint at the end (ema/ beside it where an average is kept)

Owns the folder's rules: one run at a time, one recipe, and only rank 0 writes here (except for the parts of states).
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sinkdlm import __version__
from sinkdlm.checkpoint.durable import LOCK, held, write_text
from sinkdlm.config.recipe import Recipe
from sinkdlm.distributed.world import World
from sinkdlm.errors import BusyError, ConfigError, TrainError, check_regular

_LOCK_SECONDS = 120.0  # how long a restarted run waits for the one before it to end
_PACKAGES = ("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors")


def made_a_step(path: Path) -> bool:
    """Whether a run folder holds more than a failed start."""
    metrics, states = path / "metrics.jsonl", path / "checkpoints"
    return (metrics.exists() and metrics.stat().st_size > 0) or (states.is_dir() and any(states.glob("step-*")))


class RunFolder:
    """A folder opened for one run. A lock keeps others out and dies with rank 0."""

    def __init__(self, path: Path, recipe: Recipe, world: World) -> None:
        self.path, self.world = path, world
        self._new, self._lock = not path.exists(), ExitStack()
        if world.first:
            with ExitStack() as lock:
                self._take(lock)
                for left in [*path.glob(".*.partial"), *path.glob("milestones/.*.partial")]:  # of exports that a kill cut off
                    shutil.rmtree(left, ignore_errors=True)
                for left in path.glob(".*.here"):
                    left.unlink(missing_ok=True)
                self._check_recipe(recipe)
                self._lock, self._inode = lock.pop_all(), _inode(path / LOCK)
        self._check_shared()

    def _take(self, lock: ExitStack) -> None:
        """Take the lock. Restarted ranks wait a little: the earlier ones may still be ending on another host."""
        patience = 0.0 if self.world.alone else _LOCK_SECONDS
        while True:
            try:
                return lock.enter_context(held(self.path, "training"))
            except BusyError:
                if patience <= 0:
                    raise
            except OSError as failure:
                cure = "mount it with locks (Lustre: -o flock), or choose another --out"
                raise TrainError(f"{self.path}: cannot be locked: {failure.strerror}; {cure}") from None
            time.sleep(0.5)
            patience -= 0.5

    def _check_shared(self) -> None:
        """Check that every rank sees what rank 0 writes."""
        if self.world.alone:
            return
        word = self.world.from_first(lambda: secrets.token_hex(8))
        sign = self.path / f".{word}.here"
        if self.world.first:
            sign.touch()
        self.world.wait()
        patience = 10.0
        while not (seen := sign.exists()) and patience > 0:
            time.sleep(0.2)
            patience -= 0.2
        blind = [host for host, sees in self.world.gather((socket.gethostname(), seen)) if not sees]
        if self.world.first:
            sign.unlink()
        if blind:
            raise TrainError(f"{self.path}: {blind[0]} does not see it; --out must be on a file system that all hosts share")

    def _check_recipe(self, recipe: Recipe) -> None:
        """Write the recipe at the first start. Later starts must bring the same one, except for keys that may change."""
        file = self.path / "recipe.toml"
        if file.exists():
            try:
                before = Recipe.load(file)
            except ConfigError as failure:
                raise TrainError(f"{file}: cannot be read: {failure}; choose another --out") from None
            odd = recipe.differences(before)
            if odd and not made_a_step(self.path):
                for name in ("run.json", "environment.json", "metrics.jsonl"):  # of a start that failed: nothing is lost
                    (self.path / name).unlink(missing_ok=True)
                shutil.rmtree(self.path / "tokenizer", ignore_errors=True)
            elif odd:
                raise TrainError(f"{self.path}: holds a run of another recipe: {'; '.join(odd)}; {self._cure(odd)}")
        elif any(entry.name not in ("lock", "run.json") and not entry.name.startswith(".") for entry in self.path.iterdir()):
            raise TrainError(f"{self.path}: holds other files and no run; choose another --out")
        self.write("recipe.toml", recipe.to_toml())

    def _cure(self, odd: Sequence[str]) -> str:
        """Say what to do instead. To go on longer or with other data, a new run starts from this one's finished model."""
        model = self.path / "model"
        if not model.is_dir() or any(key.startswith(("model.", "init.")) for key in odd):
            return "choose another --out"
        start = shlex.quote(f"init.from={model}")
        return f"choose another --out; add --set {start} to start from this run's weights, with steps counted anew"

    def write(self, name: str, text: str) -> None:
        """Write a small file whole or not at all; only rank 0 writes."""
        if self.world.first:
            write_text(self.path / name, text, TrainError)

    def check(self) -> None:
        """Is the folder still the one that was opened? Saving would make it anew, without the recipe and the metrics."""
        if self.world.first and self._inode != _inode(self.path / LOCK):
            raise TrainError(f"{self.path}: was removed, or its {LOCK}, while the run wrote there; run the same command again")

    def discard_if_new(self) -> None:
        """Remove the folder of a run that could not start, if this start made it."""
        if self._new and self.world.first and not made_a_step(self.path):
            shutil.rmtree(self.path, ignore_errors=True)

    def facts(self) -> dict[str, Any] | None:
        """Read run.json of an earlier start."""
        check_regular(self.path, TrainError)
        file = self.path / "run.json"
        try:
            return json.loads(file.read_text()) if file.exists() else None
        except (ValueError, RecursionError) as failure:
            raise TrainError(f"{file}: damaged: {failure}; restore it, or choose another --out") from None

    def write_json(self, name: str, facts: dict[str, Any]) -> None:
        self.write(name, json.dumps(facts, indent=2) + "\n")

    def note_start(self, step: int, device: torch.device, layout: str) -> None:
        hosts = self.world.gather(socket.gethostname())
        ranks = {"ranks": self.world.size, "hosts": sorted(set(hosts)), "layout": layout}
        starts = []
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
            starts = json.loads((self.path / "environment.json").read_text())["starts"]
        self.write_json("environment.json", {"starts": [*starts, {"step": step, **environment(device), **ranks}]})

    def close(self) -> None:
        self._lock.close()


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def environment(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": _commit(),
        "sinkdlm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
    }
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return {**facts, "torch": str(torch.__version__), "cuda": torch.version.cuda}


def _commit() -> str | None:
    """Commit of the running source, if it is a git checkout. SINKDLM_COMMIT overrides it, for machines without git."""
    given = os.environ.get("SINKDLM_COMMIT")
    if given:
        return given
    git = ["git", "-C", str(Path(__file__).parent)]
    try:  # a package installed inside somebody's repository is not tracked there
        for command in (["ls-files", "--error-unmatch", Path(__file__).name], ["rev-parse", "HEAD"]):
            said = subprocess.run([*git, *command], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        return said
    except (OSError, subprocess.SubprocessError):
        return None
