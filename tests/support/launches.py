"""Launches under test: start them through the scripts of launch/, read and signal them, and end every process."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks import kills

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "torchrun.sh"
PATIENCE = 300.0  # seconds: ranks that share few cores with others take long to import what they need
_MARK = "SINKDLM_LAUNCH"  # marks every process of a launch in its environment, even orphans
# Starts ranks and nothing else.
_STARTER = """
import os, subprocess, sys
numbers = [str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))]
ranks = [subprocess.Popen(sys.argv[1:], env={**os.environ, "RANK": rank, "LOCAL_RANK": rank}) for rank in numbers]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


class Launch:
    """A running command and all processes that it has started."""

    def __init__(self, command: list[str], said: Path, environment: dict[str, str]) -> None:
        self._mark = f"{_MARK}={secrets.token_hex(8)}"
        name, value = self._mark.split("=")
        self.said = said
        full = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environment, name: value}
        with said.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=full, cwd=ROOT)

    def environments(self) -> dict[int, dict[str, str]]:
        """Return the environment of every living process of this launch, by process id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                dead = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
            except OSError:
                continue
            if self._mark in words and not dead:
                found[int(entry.name)] = dict(word.split("=", 1) for word in words if "=" in word)
        return found

    def ranks(self) -> dict[int, int]:
        """Return the process id of each rank."""
        return {int(words["RANK"]): pid for pid, words in self.environments().items() if "RANK" in words}

    def wait(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def text(self) -> str:
        return self.said.read_text()

    def kill(self) -> None:
        """Kill every process at once, as if the host lost power."""
        while alive := self.environments():
            for pid in alive:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
        self.process.wait()


@contextmanager
def launched(command: list[str], said: Path, **environment: str) -> Iterator[Launch]:
    launch = Launch(command, said, environment)
    try:
        yield launch
    finally:
        launch.kill()


def free_port() -> int:
    """Return a port that stays free until a rank takes it: below the range that systems give to outgoing connections."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as place, suppress(OSError):
            place.bind(("", port))
            return port


@contextmanager
def plain_ranks(size: int, arguments: list[str], said: Path, **environment: str) -> Iterator[Launch]:
    """Run Python with these arguments as ranks without a launcher, whose imports would delay the start."""
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with launched([sys.executable, "-c", _STARTER, sys.executable, *arguments], said, **world, **environment) as launch:
        yield launch


def train_arguments(recipe: Path, out: Path) -> list[str]:
    return [str(recipe), "--out", str(out), "--device", "cpu"]


def script(recipe: Path, out: Path) -> list[str]:
    return [str(SCRIPT), *train_arguments(recipe, out)]


def make_undisturbed(folder: Path, n_ranks: int, steps: int) -> None:
    """Make data and recipe.toml, and in `alone` the run of undisturbed ranks on one host."""
    recipe = kills.write_recipe(folder / "recipe.toml", kills.write_set(folder / "data"), steps=steps)
    with launched(script(recipe, folder / "alone"), folder / "alone.said", NPROC=str(n_ranks)) as launch:
        assert launch.wait() == 0, launch.text()[-4000:]


def wait_until(what: Callable[[], object], launch: Launch, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while True:
        over = launch.process.poll() is not None or time.monotonic() > end  # before `what`, so that the last change is seen
        if what():
            return
        assert not over, launch.text()[-4000:]
        time.sleep(0.005)


def starts(out: Path) -> list[dict]:
    """Return what a run recorded at each of its starts."""
    return json.loads((out / "environment.json").read_text())["starts"]


def steps_made(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.read_bytes().count(b'"train"') if metrics.exists() else 0
