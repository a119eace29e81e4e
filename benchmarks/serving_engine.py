"""Load the server's engine without HTTP: caches, numbers of clients, what it adds to the bare sampler, and --deterministic.

    python -m benchmarks.serving_engine --model smdm-472m --parts none dual exact uncached deterministic \\
        --records runs/serving --out benchmarks/results

Random weights, bf16 on a GPU. Each of --clients sends its next request as soon as it has its answer; each writes --new tokens after
a prompt of --prompt in --steps steps and blocks of --block. Parts: none and dual; exact and uncached, of a block-diffusion model of
the same shape, with its cache and without; deterministic, beside the ordinary engine on the same requests, with the answers that
differ between two loads in different orders, and from those alone. First frame: the first tokens that are final.

A part takes --seconds for each number of clients and is written to --records when it is done. The same command goes on where the
last one ended, so parts may be made in commands of a few minutes. The result is written once --records holds all parts.
"""

import argparse
import json
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import quantiles, result, write
from sinkdlm import DiffusionLM, ModelConfig
from sinkdlm.fast.runner import accelerate
from sinkdlm.sampling import Request, policy_of, start, step
from sinkdlm.serving.engine import Capacity, Engine, Event, Over, Ticket, Written

PARTS = ("none", "dual", "exact", "uncached", "deterministic")
_CACHES = {"uncached": "none", "deterministic": "none"}  # of the other parts, by their names


def make_model(name: str, device: str, block: int | None, length: int) -> DiffusionLM:
    """The shape with random weights, drawn where they lie."""
    config = ModelConfig.preset(name, n_sinks=1, block_size=block)
    config = config.replace(context_length=max(config.context_length, length))
    with torch.device("meta"):
        model = DiffusionLM(config)
    model = model.to(torch.bfloat16 if device == "cuda" else torch.float32).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(std=0.02, generator=generator)
    return accelerate(model.requires_grad_(False).eval())


def make_requests(model: DiffusionLM, args: argparse.Namespace, cache: str, n: int) -> list[Request]:
    policy = policy_of("llada", block=args.block, steps=args.steps, cache=cache, temperature=1.0)
    mask_id = model.config.mask_id
    drawn = torch.randint(0, model.config.vocab_size - 1, (n, args.prompt), generator=torch.Generator().manual_seed(1))
    drawn += drawn >= mask_id
    return [
        Request([*prompt, *[mask_id] * args.new], policy, mask_id, seed=number, block_size=model.config.block_size)
        for number, prompt in enumerate(drawn.tolist())
    ]


@dataclass
class Outcome:
    """answers: (request index, tokens, seconds to the first final ones, seconds to all)."""

    seconds: float = 0.0
    processor: float = 0.0  # seconds of all threads: on a busy CPU the fairer clock
    answers: list[tuple[int, list[int], float, float]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        taken = torch.tensor([1000 * answer[3] for answer in self.answers], dtype=torch.float64)
        return {
            "requests_per_second": len(self.answers) / self.seconds,
            "tokens_per_second": sum(len(answer[1]) for answer in self.answers) / self.seconds,
            "ms_latency": quantiles(taken.tolist()),
            "ms_latency_p95": torch.quantile(taken, 0.95).item(),
            "ms_first_frame": quantiles([1000 * answer[2] for answer in self.answers]),
        }


def load(
    engine: Engine, requests: Sequence[Request], clients: int, *, seconds: float = 0.0, order: Sequence[int] | None = None
) -> Outcome:
    """Run clients until the time is up, or until each request of `order` is answered once."""
    events: queue.SimpleQueue[tuple[int, float, list[Event]]] = queue.SimpleQueue()
    began, used = time.perf_counter(), time.process_time()
    numbers = iter(order if order is not None else range(10**9))
    found, tokens = Outcome(), dict[int, list[int]]()
    begun, firsts = dict[int, float](), dict[int, float]()

    def send() -> None:
        ticket = next(numbers, None)
        if ticket is None or (order is None and time.perf_counter() - began > seconds):
            return
        begun[ticket] = time.perf_counter()
        tell = lambda told, ticket=ticket: events.put((ticket, time.perf_counter(), told))  # noqa: E731
        engine.submit(Ticket([requests[ticket % len(requests)]], tell, progress=True))

    for _ in range(clients):
        send()
    while begun:
        ticket, now, told = events.get()
        for event in told:
            if isinstance(event, Written):
                firsts.setdefault(ticket, now)
                tokens[ticket] = event.tokens
            elif isinstance(event, Over):
                if event.failure is not None:
                    raise event.failure
                sent = begun.pop(ticket)
                found.answers.append((ticket % len(requests), tokens[ticket], firsts[ticket] - sent, now - sent))
                send()
    found.seconds, found.processor = time.perf_counter() - began, time.process_time() - used
    return found


def bare_rate(model: DiffusionLM, requests: Sequence[Request], rows: int) -> float:
    """Tokens a second of the sampler alone, on the second of two runs of so many rows in step."""
    denoiser = model.denoiser()
    with model.inference():
        for _ in range(2):
            states = start([requests[number % len(requests)] for number in range(rows)])
            began = time.perf_counter()
            while step(states, denoiser, device=denoiser.device, together=True):
                pass
            _ = states[0].tokens.tolist()  # waits for a GPU
    return sum(row.request.canvas.count(row.request.mask_id) for row in states) / (time.perf_counter() - began)


def measure_part(part: str, args: argparse.Namespace) -> dict[str, Any]:
    blocks = args.block if part in ("exact", "uncached") else None
    model = make_model(args.model, args.device, blocks, args.prompt + args.new)
    requests = make_requests(model, args, _CACHES.get(part, part), args.requests)
    capacity = Capacity(rows=max(args.clients), seconds=600)
    engine = Engine(model, capacity)
    try:
        if part == "deterministic":
            return compare(model, engine, requests, args)
        found: dict[str, Any] = {}
        for clients in args.clients:
            load(engine, requests, clients, seconds=args.warmup)
            found[f"{clients} clients"] = load(engine, requests, clients, seconds=args.seconds).figures()
    finally:
        engine.close(600)
    found["bare_tokens_per_second"] = bare_rate(model, requests, max(args.clients))
    found["engine_to_bare"] = found[f"{max(args.clients)} clients"]["tokens_per_second"] / found["bare_tokens_per_second"]
    return found


def compare(model: DiffusionLM, engine: Engine, requests: list[Request], args: argparse.Namespace) -> dict[str, Any]:
    """Rates by turns, then answers: two loads in different orders, and some alone."""
    exact, clients = Engine(model, engine.capacity, deterministic=True), max(args.clients)
    try:
        rates: dict[str, list[Outcome]] = {"ordinary": [], "deterministic": []}
        for _ in range(3):
            for name, one in (("ordinary", engine), ("deterministic", exact)):
                rates[name].append(load(one, requests, clients, seconds=args.seconds / 3))
        texts = make_requests(model, args, "none", args.answers)
        shuffled = torch.randperm(args.answers, generator=torch.Generator().manual_seed(2)).tolist()
        loads = [
            {number: tokens for number, tokens, *_ in load(exact, texts, n, order=order).answers}
            for n, order in ((clients, range(args.answers)), (max(1, clients * 3 // 4), shuffled))
        ]
        few = range(0, args.answers, max(1, args.answers // args.alone))[: args.alone]
        alone = {number: tokens for number, tokens, *_ in load(exact, texts, 1, order=few).answers}
    finally:
        exact.close(600)
    figures: dict[str, Any] = {
        name: {
            "requests_per_second": quantiles([len(one.answers) / one.seconds for one in found]),
            "requests_per_processor_second": quantiles([len(one.answers) / one.processor for one in found]),
        }
        for name, found in rates.items()
    }
    for clock in ("second", "processor_second"):
        slow, fast = (figures[name][f"requests_per_{clock}"]["p50"] for name in ("deterministic", "ordinary"))
        figures[f"deterministic_to_ordinary_per_{clock}"] = slow / fast
    figures["differing_between_loads"] = sum(loads[0][number] != loads[1][number] for number in range(args.answers))
    figures["differing_from_alone"] = sum(loads[0][number] != tokens for number, tokens in alone.items())
    return figures | {"answers": args.answers, "alone": len(alone)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="nano", help="a preset: its shape with a sink")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--requests", type=int, default=256, help="number of different requests")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each number of clients")
    parser.add_argument("--warmup", type=float, default=5.0)
    parser.add_argument("--answers", type=int, default=2000, help="compared between two deterministic loads")
    parser.add_argument("--alone", type=int, default=500, help="of them, also answered alone")
    parser.add_argument("--time-limit", type=float, default=None, help="begin no part after so many seconds")
    parser.add_argument("--records", type=Path, required=True, help="folder for finished parts")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    args = parser.parse_args()
    began, figures = time.monotonic(), {}
    for part in args.parts:
        record = args.records / f"{args.model}-{part}.json"
        if not record.exists():
            if args.time_limit is not None and time.monotonic() - began > args.time_limit:
                return
            args.records.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(measure_part(part, args), indent=2) + "\n")
        figures[part] = json.loads(record.read_text())
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "records", "device", "time_limit")}
    write(result("serving_engine", figures, device=args.device, settings=settings), args.out, subject=args.model)


if __name__ == "__main__":
    main()
