"""Load servers over HTTP: requests denoised together, one by one, and with --deterministic, in one run.

Servers of the same weights take turns; each of --clients sends its next request as soon as it has its answer. Requests differ in
prompt, length, policy and steps. Also measured: the share of answers that differ from those of the same requests sent alone.
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.measuring import quantiles, result, write
from sinkdlm import DiffusionLM, ModelConfig, save
from sinkdlm.data.synthetic import character_tokenizer, corpus

WAIT = 120.0  # seconds for a server to come up, an answer to come, a server to end


def nano_checkpoint(folder: Path) -> Path:
    """A nano checkpoint with a sink and random weights, which is as fast as a trained one."""
    model = DiffusionLM(ModelConfig.preset("nano", n_sinks=1), seed=0)
    return save(folder / "nano", model, character_tokenizer())


@dataclass
class Process:
    url: str
    popen: "subprocess.Popen[str]"


@contextmanager
def server(
    checkpoint: Path, *options: str, threads: int = 1, program: Sequence[str] = ("-m", "sinkdlm"), **variables: str
) -> Iterator[Process]:
    """`sinkdlm serve` on a free port, ended by SIGTERM."""
    command = [sys.executable, *program, "serve", str(checkpoint), "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as popen:
        assert popen.stdout is not None
        try:
            found = re.search(r"http://\S+", popen.stdout.readline())
            if found is None:
                raise RuntimeError("the server did not come up")
            yield Process(found[0], popen)
        finally:
            popen.send_signal(signal.SIGTERM)
            popen.wait(WAIT)


def mixed_requests(model: str, n: int, *, longest: int = 32) -> list[dict[str, Any]]:
    """Requests with different prompts, lengths, policies, steps and temperatures, each with its own seed."""
    policies: list[dict[str, Any]] = [
        {"policy": "llada"},
        {"policy": "llada", "block": 8},
        {"policy": "smdm-greedy", "steps": 12},
        {"policy": "dream", "steps": 10},
        {"policy": "smdm-origin", "steps": 12},
        {"policy": "llada", "threshold": 0.8},
    ]
    found = []
    for number, text in enumerate(corpus(n, seed=1)):
        body = {"model": model, "prompt": text[: 4 + number % 17], "max_tokens": 8 + (number * 7) % (longest - 7), "seed": number}
        body |= {"temperature": (0.0, 0.7, 1.0)[number % 3], "sinkdlm": policies[number % len(policies)]}
        found.append(body)
    return found


@dataclass
class Outcome:
    """What clients got: answers as (request index, text, seconds), and counts of other statuses."""

    seconds: float = 0.0
    answers: list[tuple[int, str, float]] = field(default_factory=list)
    tokens: int = 0
    refused: dict[int, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.answers) / self.seconds


async def load(url: str, bodies: list[dict[str, Any]], clients: int, seconds: float) -> Outcome:
    """Run clients that each send one request after the other until the time is up."""
    found, end, turn = Outcome(), time.monotonic() + seconds, iter(range(10**9))
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)

    async def work(http: httpx.AsyncClient) -> None:
        while time.monotonic() < end:
            number = next(turn) % len(bodies)
            began = time.monotonic()
            try:
                answer = await http.post("/v1/completions", json=bodies[number])
            except httpx.HTTPError as failure:
                found.broken.append(f"{type(failure).__name__}: {failure}")
                return
            if answer.status_code == 200:
                body = answer.json()
                found.answers.append((number, body["choices"][0]["text"], time.monotonic() - began))
                found.tokens += body["usage"]["completion_tokens"]
            else:
                found.refused[answer.status_code] = found.refused.get(answer.status_code, 0) + 1
                await asyncio.sleep(float(answer.headers.get("retry-after", 1)))

    began = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=WAIT, limits=limits) as http:
        await asyncio.gather(*(work(http) for _ in range(clients)))
    found.seconds = time.monotonic() - began
    return found


def answers_alone(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    """The answer to each request when it is sent alone."""
    with httpx.Client(base_url=url, timeout=WAIT) as http:
        return [http.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"] for body in bodies]


def n_differing(outcome: Outcome, alone: list[str]) -> int:
    return sum(text != alone[number] for number, text, _ in outcome.answers)


def _sums(outcomes: list[Outcome]) -> dict[str, Any]:
    seconds = [1000 * taken for outcome in outcomes for *_, taken in outcome.answers]
    return {
        "requests_per_second": quantiles([outcome.rate for outcome in outcomes]),
        "tokens_per_second": quantiles([outcome.tokens / outcome.seconds for outcome in outcomes]),
        "ms_latency": quantiles(seconds),
        "requests": len(seconds),
        "refused": {str(status): n for outcome in outcomes for status, n in outcome.refused.items()},
        "broken": sum(len(outcome.broken) for outcome in outcomes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=None, help="default: the nano shape with random weights")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48, help="number of different requests")
    parser.add_argument("--longest", type=int, default=32, help="most tokens to write")
    parser.add_argument("--threads", type=int, default=1, help="threads of a server on a CPU")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint or nano_checkpoint(Path(folder))
        given = ("--device", args.device)
        with (
            server(checkpoint, *given, threads=args.threads) as together,
            server(checkpoint, *given, "--max-batch", "1", threads=args.threads) as singly,
            server(checkpoint, *given, "--deterministic", threads=args.threads) as exact,
        ):
            name = httpx.get(f"{together.url}/v1/models").json()["data"][0]["id"]
            bodies = mixed_requests(name, args.requests, longest=args.longest)
            alone, alone_exact = answers_alone(singly.url, bodies), answers_alone(exact.url, bodies)
            forms = {"together": together, "one_by_one": singly, "deterministic": exact}
            outcomes: dict[str, list[Outcome]] = {form: [] for form in forms}
            for _ in range(args.rounds):
                for form, process in forms.items():
                    outcomes[form].append(asyncio.run(load(process.url, bodies, args.clients, args.seconds)))
    figures: dict[str, Any] = {form: _sums(found) for form, found in outcomes.items()}
    for form, expected in (("together", alone), ("one_by_one", alone), ("deterministic", alone_exact)):
        differing = sum(n_differing(outcome, expected) for outcome in outcomes[form])
        figures[form] |= {"differing": differing, "differing_share": differing / figures[form]["requests"]}
    rates = {form: figures[form]["requests_per_second"]["p50"] for form in forms}
    figures["together_to_one_by_one"] = rates["together"] / rates["one_by_one"]
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "checkpoint", "device")}
    settings["model"] = "nano shape with a sink, random weights" if args.checkpoint is None else str(args.checkpoint.name)
    write(result("serving", figures, device=args.device, settings=settings), args.out)


if __name__ == "__main__":
    main()
