"""Kill replicas of launch/ray_serve.py under load: every request must be answered, and as it is answered alone.

    python -m benchmarks.replica_kills --seconds 60

--clients ask two replicas on this machine's CPU, half of them for streams. Every --period seconds one replica is ended by SIGKILL,
and Ray starts another. After --seconds no more requests and kills begin. Each answer is compared with that of the same request
before, without load and kills. With --restart nothing is killed: the models are deployed again under load.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.measuring import quantiles, result, write
from benchmarks.serving import mixed_requests, nano_checkpoint

SCRIPT = Path(__file__).parents[1] / "launch" / "ray_serve.py"
_REPLICA = b"ServeReplica:sinkdlm:replica"  # the title that Ray gives to their processes
PATIENCE = 300.0  # seconds for replicas to come up and for an answer
_MARK = "SINKDLM_REPLICA_KILLS"  # an environment variable by which the processes of this run are known


@contextmanager
def cluster(checkpoint: Path, said: Path, *options: str) -> Iterator[tuple[str, str, list[str]]]:
    """Replicas behind a free port: their URL, the mark of their processes, and the command that replaces them."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    mark = uuid.uuid4().hex
    environment = {**os.environ, _MARK: mark, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(SCRIPT), str(checkpoint), "--cpu", "--deterministic", "--port", str(port), *options]
    with said.open("w") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as popen:
        try:
            begun = time.monotonic()
            while not (told := re.search(r"^serving .* cluster (\S+)$", said.read_text(), re.MULTILINE)):
                if popen.poll() is not None or time.monotonic() - begun > PATIENCE:
                    raise RuntimeError(f"no replicas came up: {said.read_text()[-2000:]}")
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}", mark, [*command, "--address", told[1]]
        finally:
            popen.send_signal(signal.SIGTERM)
            try:
                popen.wait(60)
            except subprocess.TimeoutExpired:
                popen.kill()
            for pid in _marked(mark):  # what Ray has left
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _marked(mark: str, title: bytes = b"") -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            is_titled = folder.name.isdigit() and title in (folder / "cmdline").read_bytes()
            if is_titled and f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[Any, str]:
    """Text and reason of the answer, or what went wrong."""
    if not body.get("stream"):
        answer = await http.post("/v1/completions", json=body)
        if answer.status_code != 200:
            return f"{answer.status_code}: {answer.text[:300]}", ""
        (choice,) = answer.json()["choices"]
        return choice["text"], choice["finish_reason"]
    text, reason = "", ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return f"error: {event}", ""
            for choice in event["choices"]:
                text, reason = text + choice["text"], reason + (choice["finish_reason"] or "")
    return text, reason


async def storm(
    url: str,
    mark: str,
    again: list[str],
    bodies: list[dict[str, Any]],
    *,
    clients: int,
    seconds: float,
    period: float,
    restart: bool,
) -> dict[str, Any]:
    draw, order = random.Random(0), itertools.count()
    waits: list[float] = []
    wrong: list[Any] = []
    n_killed = n_failed = 0
    replaced, statuses = asyncio.Event(), list[int]()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as http:
        alone = [await ask(http, body) for body in bodies]
        begun = time.monotonic()

        async def client() -> None:
            nonlocal n_failed
            while time.monotonic() < begun + seconds or not replaced.is_set():
                number, since = next(order) % len(bodies), time.monotonic()
                try:
                    found = await ask(http, bodies[number])
                except httpx.HTTPError as failure:
                    found, n_failed = (repr(failure), ""), n_failed + 1
                waits.append(time.monotonic() - since)
                if found != alone[number]:
                    wrong.append({"request": number, "alone": alone[number], "found": found})

        async def replace() -> None:
            environment = {**os.environ, _MARK: mark, "RAY_AUTH_MODE": "disabled"}
            child = await asyncio.create_subprocess_exec(
                *again, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            statuses.append(await child.wait())
            replaced.set()

        async def kill() -> None:
            nonlocal n_killed
            replaced.set()
            while time.monotonic() < begun + seconds - period:
                await asyncio.sleep(period)
                # One that starts is left alone: where a start takes longer than --period, none would ever serve.
                if ready := set(_marked(mark, _REPLICA)) - set(_marked(mark, _REPLICA + b".initialize")):
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(sorted(ready)), signal.SIGKILL)
                        n_killed += 1

        await asyncio.gather(replace() if restart else kill(), *(client() for _ in range(clients)))
        took = time.monotonic() - begun
    return {
        "requests": len(waits), "replicas_killed": n_killed, "not_answered": n_failed, "differ": len(wrong), "wrong": wrong[:3],
        "replaced": statuses == [0], "seconds": round(took, 1), "latency_seconds": quantiles(waits),
    }  # fmt: skip


def run(
    folder: Path, *, clients: int = 32, seconds: float = 60.0, period: float = 5.0, n_bodies: int = 24, restart: bool = False
) -> dict[str, Any]:
    checkpoint = nano_checkpoint(folder)
    bodies = [body | {"stream": number % 2 == 1} for number, body in enumerate(mixed_requests("nano", n_bodies))]
    since = time.monotonic()
    with cluster(checkpoint, folder / "said", "--replicas", "2") as (url, mark, again):
        started = time.monotonic() - since
        how: dict[str, Any] = {"clients": clients, "seconds": seconds, "period": period, "restart": restart}
        found = asyncio.run(storm(url, mark, again, bodies, **how))
    return {"clients": clients, "seconds_to_start": round(started, 1), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--period", type=float, default=5.0, help="seconds from one kill to the next")
    parser.add_argument("--restart", action="store_true", help="deploy again under load, and kill nothing")
    parser.add_argument("--out", type=Path, help="folder for the record")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), clients=given.clients, seconds=given.seconds, period=given.period, restart=given.restart)
    settings = {"replicas": 2, "seconds_between_kills": given.period, "seconds_of_load": given.seconds}
    write(result("replica_kills", found, device="cpu", settings=settings), given.out)
    if found["not_answered"] or found["differ"]:
        sys.exit("not every request was answered as it is alone")


if __name__ == "__main__":
    main()
