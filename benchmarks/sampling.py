"""Time sampling: our loop beside a plain re-implementation of the official one, with the same weights, in one run.

    python -m benchmarks.sampling --tokens-per-step 3 --out benchmarks/results      a GPU: smdm-472m, 256 tokens, 256 steps
    python -m benchmarks.sampling --device cpu                                      nano, 128 tokens in 64 steps
    python -m benchmarks.sampling --checkpoint runs/x --subject trained             effects of caches and thresholds on a model

Every form fills the same canvas with the same policy (smdm-greedy) unless its name says otherwise: at temperature 0, at 0.1 (that
of the official evaluation, drawn with float64 noise), and `origin` at 1. Rates are compared at equal policies and temperatures.
Random weights suffice for timing; what depends on predictions (steps of a threshold, agreement of caches) needs --checkpoint.
On a GPU the official loop is timed at evenly spaced steps, each with its number of masked tokens, and scaled to all steps; our
loops run whole, with graph capture, after one run that builds kernels and warms up.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import measure, quantiles, result, write
from benchmarks.official_loop import MaskedForm, official_greedy, official_origin
from sinkdlm import DiffusionLM, ModelConfig, load
from sinkdlm.data.synthetic import corpus
from sinkdlm.fast import accelerate, compile_blocks
from sinkdlm.fast.quantized import to_float8
from sinkdlm.sampling import Sampled, generate

_MADE_SEED = 1_000_003  # texts that no nano model was trained on
_SPREAD = 16  # steps of the official loop that are timed on a GPU
_THRESHOLDS = (0.9, 0.7, 0.5)
_OFFICIAL_TEMPERATURE = 0.1  # of its GSM8K evaluation
_TEMPERED = f"_temperature_{_OFFICIAL_TEMPERATURE}"
_ORIGIN = "_origin"


@dataclass(frozen=True)
class Case:
    """A model and the canvas it fills."""

    model: DiffusionLM
    prompt: Tensor
    length: int
    steps: int
    block: int
    device: str

    @property
    def written(self) -> int:
        return self.prompt.shape[0] * (self.length - self.prompt.shape[1])

    def ours(self, **options: Any) -> Sampled:
        given = {"config": "smdm-greedy", "steps": self.steps, **options}
        denoiser = self.model.denoiser()
        return generate(denoiser, prompt=self.prompt, length=self.length, mask_id=self.model.config.mask_id, **given)


def seconds_of(run: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def time_runs(case: Case, run: Callable[[], Sampled], repeats: int) -> dict[str, Any]:
    """Time whole runs, after one untimed run."""
    out = run()
    taken = [seconds_of(run, case.device) for _ in range(repeats)]
    rate = quantiles([case.written / seconds for seconds in taken])
    steps = out.steps
    return {"ms_per_step": quantiles([1000 * seconds / steps for seconds in taken]), "tokens_per_second": rate, "steps": steps}


def time_official(
    case: Case, repeats: int, temperature: float = 0.0, loop: Callable[..., Tensor] = official_greedy
) -> dict[str, Any]:
    """Time an official loop: whole runs on a CPU; on a GPU evenly spaced steps, each with its number of masked tokens."""
    form, mask_id = MaskedForm(case.model), case.model.config.mask_id
    run = partial(loop, form, mask_id=mask_id, temperature=temperature)
    blank = torch.full((case.prompt.shape[0], case.length), mask_id, device=case.prompt.device)
    blank[:, : case.prompt.shape[1]] = case.prompt
    if case.device == "cpu":
        taken = [seconds_of(lambda: run(blank, steps=case.steps), "cpu") for _ in range(repeats + 1)][1:]
    else:
        taken = [_spread_steps(case, run, blank) for _ in range(repeats + 1)][1:]
    return {
        "ms_per_step": quantiles([1000 * seconds / case.steps for seconds in taken]),
        "tokens_per_second": quantiles([case.written / seconds for seconds in taken]),
        "steps": case.steps,
        "timed_steps": case.steps if case.device == "cpu" else _SPREAD,
    }


def _spread_steps(case: Case, run: Callable[..., Tensor], blank: Tensor) -> float:
    total, given = 0.0, case.prompt.shape[1]
    for i in range(_SPREAD):
        step = (2 * i + 1) * case.steps // (2 * _SPREAD)
        tokens = blank.clone()
        tokens[:, given : given + (case.length - given) * step // case.steps] = 1
        total += seconds_of(partial(run, tokens, steps=case.steps - step, first_steps=1), case.device) / _SPREAD
    return total * case.steps


def speed(case: Case, repeats: int) -> dict[str, Any]:
    """Time all forms. The bound is the forward alone, without head and choice."""
    figures: dict[str, Any] = {"rows": case.prompt.shape[0], "official": time_official(case, repeats)}
    figures[f"official{_TEMPERED}"] = time_official(case, repeats, _OFFICIAL_TEMPERATURE)
    figures[f"official{_ORIGIN}"] = time_official(case, repeats, 1.0, official_origin)
    figures |= speed_exact(case, repeats, "ours")
    with case.model.inference():
        for kind, times in (("none", 1), ("prefix", 1), ("dual", repeats)):
            blocks = partial(case.ours, config="llada", block=case.block, cache=kind)
            figures[f"blocks_cache_{kind}"] = time_runs(case, blocks, times)
        tempered = partial(case.ours, config="llada", block=case.block, cache="dual", temperature=_OFFICIAL_TEMPERATURE)
        figures[f"blocks_cache_dual{_TEMPERED}"] = time_runs(case, tempered, repeats)
    return figures


def speed_exact(case: Case, repeats: int, name: str) -> dict[str, Any]:
    """Time our loop with the official policies: greedy at both temperatures, origin at 1."""
    with case.model.inference():
        canvas = torch.full((case.prompt.shape[0], case.length), case.model.config.mask_id, device=case.prompt.device)
        return {
            f"{name}_forward_ms": measure(lambda: case.model(canvas), case.device, repeats=5),
            name: time_runs(case, case.ours, repeats),
            f"{name}{_TEMPERED}": time_runs(case, partial(case.ours, temperature=_OFFICIAL_TEMPERATURE), repeats),
            f"{name}{_ORIGIN}": time_runs(case, partial(case.ours, config="smdm-origin", temperature=1.0), repeats),
        }


def compare(figures: dict[str, Any]) -> dict[str, float]:
    """Tokens a second relative to the official loop with the same policy and temperature."""
    timed = {name: value for name, value in figures.items() if isinstance(value, dict) and "tokens_per_second" in value}
    found = {}
    for name, value in timed.items():
        base = timed["official" + next((end for end in (_TEMPERED, _ORIGIN) if name.endswith(end)), "")]
        found[name] = value["tokens_per_second"]["p50"] / base["tokens_per_second"]["p50"]
    return found


def threshold_speed(case: Case, tokens_per_step: float, name: str = "") -> dict[str, Any]:
    """Time parallel decoding at a given number of tokens a step, as a schedule with that many steps: it needs no trained model."""
    steps = max(1, round((case.length - case.prompt.shape[1]) / tokens_per_step))
    figures = {}
    with case.model.inference():
        for kind in ("none", "dual"):
            run = partial(case.ours, config="llada", block=case.block, cache=kind, steps=steps)
            figures[f"{name}{tokens_per_step:g}_tokens_a_step_cache_{kind}"] = time_runs(case, run, 1)
    return figures


def agreement(case: Case) -> dict[str, Any]:
    """Compare caches, thresholds and float8 with the exact loop on the same blocks: share of equal tokens, steps, speed."""
    figures: dict[str, Any] = {}
    with case.model.inference():
        exact = case.ours(config="llada", block=case.block)
        given = case.prompt.shape[1]
        for threshold in (None, *_THRESHOLDS):
            for kind in ("none", "prefix", "dual") if threshold is None else ("none", "dual"):
                options: dict[str, Any] = {"config": "llada", "block": case.block, "cache": kind}
                if threshold is not None:
                    options |= {"threshold": threshold, "steps": None}
                case.ours(**options)  # warms up
                began = time.perf_counter()
                out = case.ours(**options)
                equal = float((out.tokens == exact.tokens)[:, given:].double().mean())  # waits for the device
                seconds = time.perf_counter() - began
                figures[f"threshold {threshold}, cache {kind}"] = {
                    "equal_tokens": equal,
                    "mean_confidence": float(out.confidence[:, given:].mean()),
                    "tokens_per_step": (case.length - given) / (sum(out.row_steps) / len(out.row_steps)),
                    "steps": out.steps,  # of the slowest row
                    "tokens_per_second": case.written / seconds,
                }
    base = figures["threshold None, cache none"]["tokens_per_second"]
    for found in figures.values():
        found["times_as_fast"] = found["tokens_per_second"] / base  # relative to the exact loop
    float8 = replace(case, model=to_float8(copy.deepcopy(case.model)))
    with float8.model.inference():
        out = float8.ours(config="llada", block=case.block)
    figures["float8"] = {
        "equal_tokens": float((out.tokens == exact.tokens)[:, given:].double().mean()),
        "mean_confidence": float(out.confidence[:, given:].mean()),
    }
    return figures


def alone_and_together(case: Case, rows: int = 8) -> dict[str, Any]:
    """Share of tokens that differ between a request in a batch and alone. The noise is the same, so rounding is the cause."""
    mask_id = case.model.config.mask_id
    figures = {}
    with case.model.inference():
        for temperature in (0.0, 1.0):
            given: dict[str, Any] = {"length": case.length, "mask_id": mask_id, "config": "smdm-greedy", "steps": case.steps // 4}
            given["temperature"] = temperature
            together = generate(case.model.denoiser(), prompt=case.prompt, **given).tokens[:rows]
            alone = [
                generate(case.model.denoiser(), prompt=case.prompt[i : i + 1], numbers=[i], **given).tokens for i in range(rows)
            ]
            differing = (together != torch.cat(alone))[:, case.prompt.shape[1] :]
            rows_differing = float(differing.any(1).double().mean())
            figures[f"temperature {temperature}"] = {"tokens": float(differing.double().mean()), "rows": rows_differing}
    return {"compared_rows": rows, "steps": case.steps // 4, **figures}


def open_model(given: argparse.Namespace) -> DiffusionLM:
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    if given.checkpoint is not None:
        return load(given.checkpoint).model.to(given.device, dtype)
    config = ModelConfig.preset(given.preset, n_sinks=1)
    return accelerate(DiffusionLM(config, seed=0).to(given.device, dtype))


def case_of(model: DiffusionLM, given: argparse.Namespace, rows: int) -> Case:
    """A case with a different short prompt for each row: from a text's lines, or random."""
    words = torch.randint(0, model.config.vocab_size, (rows, given.prompt), generator=torch.Generator().manual_seed(0))
    if given.text is not None or given.made:
        tokenizer = load(given.checkpoint).tokenizer
        texts = corpus(4 * rows, seed=_MADE_SEED) if given.made else given.text.read_text().splitlines()
        lines = [tokenizer(text)["input_ids"][: given.prompt] for text in texts]
        words = torch.tensor([line for line in lines if len(line) == given.prompt][:rows])
    return Case(model, words.to(given.device), given.length, given.steps, given.block, given.device)


def arguments() -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default=None, help="shape of random weights; default: smdm-472m on a GPU, else nano")
    parser.add_argument("--checkpoint", type=Path, default=None, help="a trained model instead")
    parser.add_argument("--batch", type=int, nargs="+", default=None)
    parser.add_argument("--length", type=int, default=None)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=4, help="tokens of each prompt")
    parser.add_argument("--made", action="store_true", help="with --checkpoint: prompts from the synthetic corpus")
    parser.add_argument("--text", type=Path, default=None, help="with --checkpoint: prompts from the lines of this file")
    parser.add_argument("--tokens-per-step", type=float, default=None, help="also time parallel decoding at this rate")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--agreement-only", action="store_true", help="with --checkpoint: only effects of caches and thresholds")
    parser.add_argument("--compile", action="store_true", help="also time compiled blocks")
    parser.add_argument("--subject", default="")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result, for example benchmarks/results")
    given = parser.parse_args()
    gpu = given.device == "cuda"
    given.preset = given.preset or ("smdm-472m" if gpu else "nano")
    given.batch = given.batch or ([64, 1] if gpu else [1])
    given.length = given.length or (256 if gpu else 128)
    given.steps = given.steps or (256 if gpu else 64)
    return given


def main() -> None:
    given = arguments()
    model = open_model(given)
    cases = {f"batch {rows}": case_of(model, given, rows) for rows in given.batch}
    figures: dict[str, Any] = {}
    for name, case in cases.items():
        figures[name] = {} if given.agreement_only else speed(case, given.repeats)
        if given.tokens_per_step:
            figures[name] |= threshold_speed(case, given.tokens_per_step)
        if given.checkpoint is not None:
            figures[name]["agreement"] = agreement(case)
        if case.prompt.shape[0] > 1:
            figures[name]["alone_and_together"] = alone_and_together(case, min(8, case.prompt.shape[0]))
    if given.device == "cuda" and not given.agreement_only:
        if given.compile:
            compile_blocks(model)
            for name, case in cases.items():
                figures[name] |= speed_exact(case, given.repeats, "ours_compiled")
        to_float8(model := open_model(given))
        for name, case in cases.items():
            case = replace(case, model=model)
            figures[name] |= speed_exact(case, given.repeats, "ours_float8")
            if given.tokens_per_step:
                figures[name] |= threshold_speed(case, given.tokens_per_step, "float8_")
    for found in figures.values():
        if "official" in found:
            found["times_as_fast"] = compare(found)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items() if key != "out"}
    write(result("sampling", figures, device=given.device, settings=settings), given.out, subject=given.subject)


if __name__ == "__main__":
    main()
