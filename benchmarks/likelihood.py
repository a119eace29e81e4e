"""Time log-likelihoods: our estimator beside a plain loop over single requests, with the same weights, in one run.

    sinkdlm eval --tasks hellaswag --data DIR --limit 200 --write-requests hellaswag.jsonl
    python -m benchmarks.likelihood hellaswag.jsonl --tokenizer T --out benchmarks/results      a GPU: smdm-472m shape
    python -m benchmarks.likelihood arc.jsonl --checkpoint runs/x --adaptive                    savings and errors of adaptive draws
    python -m benchmarks.likelihood --made 200 --checkpoint runs/nano-sink/model --adaptive     the same on synthetic questions

The plain loop works as the official code: 16 masked copies of a request at once, both branches of guidance, a dense mask, logits
at every position. It is timed on requests spread evenly over the sheet, and scaled. Random weights suffice for timing.
--adaptive compares rankings and needs a trained model: two full runs with different noise, and adaptive runs at several tolerances
with the first run's noise. A run agrees with the second full run on a question if both prefer the same option under every metric.
A synthetic question (--made) is half a text of the synthetic corpus; its options are the other half and those of three other texts.
"""

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measuring import result, write
from benchmarks.official_loop import MaskedForm
from sinkdlm import DiffusionLM, ModelConfig, load
from sinkdlm.data.synthetic import corpus
from sinkdlm.evals.encoding import TextEncoder
from sinkdlm.evals.requests import Request, Sheet, by_question, number_of
from sinkdlm.evals.settings import Settings
from sinkdlm.fast import accelerate
from sinkdlm.fast.quantized import to_float8
from sinkdlm.interop.tokenizer import read_tokenizer_at
from sinkdlm.likelihood import Adaptive, Estimates, log_likelihood

_MADE_SEED = 1_000_003  # texts that no nano model was trained on
_MADE_LENGTH = 96  # letters: any two halves fit into a nano model
_PLAIN_BATCH = 16
_PLAIN_REQUESTS = 24
_RULES = ((0.05, 0.0), (0.05, 0.005), (0.05, 0.02), (0.05, 0.05), (0.05, 0.1), (0.05, 0.2))  # error, tolerance


class Work(NamedTuple):
    """Requests as rows of tokens, and the settings to score them."""

    requests: list[Request]
    tokens: list[list[int]]
    scored: list[list[bool]]
    draws: int
    guidance: float

    @property
    def groups(self) -> list[int]:
        return [number_of(*request.question) for request in self.requests]


def made_sheet(n: int) -> Sheet:
    texts = [text for text in (whole[:_MADE_LENGTH] for whole in corpus(4 * n, seed=_MADE_SEED)) if " " in text]
    cuts = [text.index(" ", len(text) // 2) if " " in text[len(text) // 2 :] else text.rindex(" ") for text in texts]
    ends = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    requests = [
        Request(
            "loglikelihood", "made", doc, option, texts[doc][: cuts[doc]], end, divisors={"acc": 1.0, "acc_norm": float(len(end))}
        )
        for doc in range(n)
        for option, end in enumerate(ends[(doc + other) % len(ends)] for other in (0, n, 2 * n, 3 * n))
    ]
    return Sheet(requests, {"made": Settings()})


def read_work(given: argparse.Namespace, model: DiffusionLM, tokenizer: Any) -> Work:
    sheet = Sheet.read(given.sheet) if given.sheet is not None else made_sheet(given.made)
    requests = list(sheet.requests)
    rows = TextEncoder(tokenizer).pairs(requests, model.config.context_length)
    settings = sheet.settings[requests[0].task]
    guidance = settings.guidance if given.guidance is None else given.guidance
    return Work(requests, [row.tokens for row in rows], [row.scored for row in rows], given.draws, guidance)


@torch.no_grad()
def score_plainly(form: MaskedForm, tokens: Tensor, scored: Tensor, work: Work, mask_id: int) -> float:
    """One request: every draw masks exactly k of its target tokens, k spread over 1..L."""
    targets = scored.nonzero()[:, 0]
    n, total = len(targets), 0.0
    for first in range(0, work.draws, _PLAIN_BATCH):
        rows = tokens.repeat(_PLAIN_BATCH, 1)
        spread = (
            torch.rand((), device=tokens.device) + torch.arange(first, first + _PLAIN_BATCH, device=tokens.device) / work.draws
        ) % 1
        counts = 1 + (n * spread).floor().long()
        ranks = torch.rand(_PLAIN_BATCH, n, device=tokens.device).argsort(1).argsort(1)
        masked = torch.zeros_like(rows, dtype=torch.bool)
        masked[:, targets] = ranks < counts[:, None]
        noisy = rows.masked_fill(masked, mask_id)
        if work.guidance:
            blank = noisy.masked_fill(~scored, mask_id)
            conditional, unconditional = form(torch.cat([noisy, blank])).chunk(2)
            logits = unconditional + (work.guidance + 1) * (conditional - unconditional)
        else:
            logits = form(noisy)
        losses = functional.cross_entropy(logits[masked].float(), rows[masked], reduction="none")
        weights = (n / counts)[:, None].expand(masked.shape)[masked]
        total += float((losses * weights).sum())
    return -total / work.draws


def seconds_of(run: Any, device: str) -> tuple[float, Any]:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    found = run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, found


def ours(model: DiffusionLM, work: Work, budget: int, **options: Any) -> Estimates:
    with model.inference():
        return log_likelihood(
            model.denoiser(),
            work.tokens,
            work.scored,
            mask_id=model.config.mask_id,
            draws=work.draws,
            guidance=work.guidance,
            groups=work.groups,
            budget=budget,
            **options,
        )


def throughput(model: DiffusionLM, work: Work, given: argparse.Namespace) -> dict[str, Any]:
    chosen = range(0, len(work.tokens), max(1, len(work.tokens) // _PLAIN_REQUESTS))
    form, mask_id = MaskedForm(model), model.config.mask_id
    rows = [(torch.tensor(work.tokens[i]).to(given.device), torch.tensor(work.scored[i]).to(given.device)) for i in chosen]
    values = [score_plainly(form, *rows[0], work, mask_id)]  # warm-up
    plain, values = seconds_of(lambda: [score_plainly(form, *row, work, mask_id) for row in rows], given.device)
    few = work._replace(requests=work.requests[:8], tokens=work.tokens[:8], scored=work.scored[:8])
    figures: dict[str, Any] = {"plain": {"requests_per_second": len(rows) / plain, "timed_requests": len(rows)}}
    forms = {"ours": model}
    if given.device == "cuda":
        forms["ours_float8"] = to_float8(open_model(given))
    for name, subject in forms.items():
        ours(subject, few, given.budget)  # builds kernels and warms up
        seconds, found = seconds_of(lambda subject=subject: ours(subject, work, given.budget), given.device)
        passed = sum(int(n) * len(row) for n, row in zip(found.forwards, work.tokens, strict=True)) * (2 if work.guidance else 1)
        figures[name] = {
            "requests_per_second": len(work.tokens) / seconds,
            "seconds": seconds,
            "tokens_per_second": passed / seconds,
            "tflops": _flops(subject, work, found) / seconds / 1e12,
            "times_as_fast": len(work.tokens) / seconds / figures["plain"]["requests_per_second"],
            "mean_stderr": float(found.stderr.mean()),
        }
        if name == "ours":
            theirs = torch.tensor(values, dtype=torch.float64)
            figures["difference_from_plain"] = _agreement_of_means(found.mean[list(chosen)], theirs, found.stderr[list(chosen)])
    return figures


def _agreement_of_means(mine: Tensor, theirs: Tensor, stderr: Tensor) -> dict[str, float]:
    """Differences in units of our standard error: about sqrt(2) if both are right, as the plain loop has its own noise."""
    ratio = (mine - theirs) / stderr
    return {"root_mean_square_in_stderr": float(ratio.square().mean().sqrt()), "mean_relative": float((mine / theirs - 1).mean())}


def _flops(model: DiffusionLM, work: Work, found: Estimates) -> float:
    """FLOPs of matmuls and attention in the blocks, both branches; without the head, which reads about half of the target."""
    config = model.config
    weights = sum(parameter.numel() for block in model.blocks for parameter in block.parameters())
    branches = 2 if work.guidance else 1
    total = 0.0
    for n, row in zip(found.forwards.tolist(), work.tokens, strict=True):
        each = 2 * weights * len(row) + 4 * config.n_layers * config.d_model * len(row) ** 2
        total += n * branches * each
    return total


def winners(work: Work, values: Tensor) -> list[tuple[int, ...]]:
    """For each question, the option preferred under each metric."""
    place = {request.key: i for i, request in enumerate(work.requests)}
    found = []
    for question in by_question(work.requests):
        own = [float(values[place[request.key]]) for request in question]
        names = sorted(question[0].divisors)
        scaled = [[value / request.divisors[name] for value, request in zip(own, question, strict=True)] for name in names]
        found.append(tuple(options.index(max(options)) for options in scaled))
    return found


def equal_share(first: Sequence[Any], second: Sequence[Any]) -> float:
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(first)


def adaptive_curve(model: DiffusionLM, work: Work, budget: int) -> dict[str, Any]:
    """Adaptive runs with seed 0 against a full run with seed 1; the baseline is a full run with seed 0."""
    names = sorted(work.requests[0].divisors)
    metrics = {name: [request.divisors[name] for request in work.requests] for name in names}
    full = [ours(model, work, budget, seed=seed, sets=32) for seed in (0, 1)]
    judged = winners(work, full[1].mean)
    figures: dict[str, Any] = {
        "questions": len(judged),
        "metrics": names,
        "full_forwards": int(full[0].forwards.sum()),
        "full_agreement": equal_share(winners(work, full[0].mean), judged),
        "curve": {},
    }
    for error, tolerance in _RULES:
        found = ours(model, work, budget, seed=0, sets=32, adaptive=Adaptive(metrics, error, tolerance))
        print(
            f"error {error}, tolerance {tolerance}: {int(found.forwards.sum())} of {figures['full_forwards']} forwards",
            file=sys.stderr,
            flush=True,
        )
        figures["curve"][f"error {error}, tolerance {tolerance}"] = {
            "forwards": int(found.forwards.sum()),
            "times_fewer": figures["full_forwards"] / int(found.forwards.sum()),
            "saved_draws": found.saved,
            "agreement": equal_share(winners(work, found.mean), judged),
            "agreement_with_own_full_run": equal_share(winners(work, found.mean), winners(work, full[0].mean)),
        }
    float8 = ours(to_float8(copy.deepcopy(model)), work, budget, seed=0, sets=32)
    n_scored = torch.tensor([sum(row) for row in work.scored])
    figures["float8"] = {
        "agreement_with_own_full_run": equal_share(winners(work, float8.mean), winners(work, full[0].mean)),
        "mean_difference_in_nats_per_token": float(((float8.mean - full[0].mean) / n_scored).mean()),
    }
    return figures


def open_model(given: argparse.Namespace) -> DiffusionLM:
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    if given.checkpoint is not None:
        return load(given.checkpoint).model.to(given.device, dtype)
    return accelerate(DiffusionLM(ModelConfig.preset(given.preset, n_sinks=1), seed=0).to(given.device, dtype))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sheet", type=Path, nargs="?", help="requests, as `sinkdlm eval --write-requests` writes them")
    parser.add_argument("--made", type=int, default=0, help="number of synthetic questions, instead of a sheet")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="smdm-472m", help="shape of random weights")
    parser.add_argument("--checkpoint", type=Path, default=None, help="a trained model instead")
    parser.add_argument("--tokenizer", type=Path, default=None, help="tokenizer for random weights")
    parser.add_argument("--draws", type=int, default=128)
    parser.add_argument("--guidance", type=float, default=None, help="default: the sheet's")
    parser.add_argument("--budget", type=int, default=1 << 15, help="tokens of a forward")
    parser.add_argument("--adaptive", action="store_true", help="compare adaptive draws with full runs, instead of speed")
    parser.add_argument("--subject", default="")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    given = parser.parse_args()
    if (given.sheet is None) == (given.made == 0):
        parser.error("give a sheet of requests, or --made")
    if (given.tokenizer is None) == (given.checkpoint is None):
        parser.error("give --checkpoint, or --tokenizer for random weights")
    return given


def main() -> None:
    given = arguments()
    model = open_model(given)
    tokenizer = load(given.checkpoint).tokenizer if given.checkpoint is not None else read_tokenizer_at(given.tokenizer)
    work = read_work(given, model, tokenizer)
    figures = adaptive_curve(model, work, given.budget) if given.adaptive else throughput(model, work, given)
    figures = {"requests": len(work.requests), "mean_tokens": sum(map(len, work.tokens)) / len(work.tokens), **figures}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items() if key != "out"}
    settings |= {"guidance": work.guidance, "task": work.requests[0].task}
    write(result("likelihood", figures, device=given.device, settings=settings), given.out, subject=given.subject)


if __name__ == "__main__":
    main()
