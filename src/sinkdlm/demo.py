"""A first look in about a minute: twins that differ in one flag learn two-digit sums with a plain loop.

Owns its generated data and its report. It uses the core as a user would; nothing else imports it.
"""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from sinkdlm.checkpoint import check_destination, save
from sinkdlm.config import Recipe
from sinkdlm.diffusion import Schedule, corrupt, denoising_loss
from sinkdlm.errors import UserError
from sinkdlm.model import DiffusionLM
from sinkdlm.noise import permute
from sinkdlm.observe import AttentionStatistics, Watcher

SYMBOLS = "0123456789+="
N_SUMS = 100 * 100
N_HELD_OUT = 1000
QUESTION, ANSWER = 6, 3  # "12+34=" and "046"
_LINES = 8  # of progress, where there is no terminal


def recipe_of(twin: str, steps: int, seed: int) -> Recipe:
    return Recipe.resolve(
        {
            "model": {
                "preset": "nano",
                "vocab_size": len(SYMBOLS),
                "context_length": QUESTION + ANSWER,
                "n_sinks": {"vanilla": 0, "sink": 1}[twin],
            },
            "train": {
                "seed": seed,
                "steps": steps,
                "batch": 128,
                "lr": 4e-3,
                "min_lr": 4e-4,
                "warmup": 0.05,
                "weight_decay": 0.01,
                "precision": "float32",
            },
        }
    )


def write_sums(index: Tensor) -> Tensor:
    """Row i of the data set, (B, 9): the sum of its two digits pairs, written out and tokenised."""
    first, second = index // 100, index % 100
    total = first + second
    plus, equals = (torch.full_like(first, SYMBOLS.index(symbol)) for symbol in "+=")
    columns = [first // 10, first % 10, plus, second // 10, second % 10, equals, total // 100, total // 10 % 10, total % 10]
    return torch.stack(columns, dim=1)


def train(model: DiffusionLM, recipe: Recipe) -> Iterator[tuple[int, float]]:
    """Yields (step, loss). Only answers are maskable: the question is always given."""
    plan = recipe.train
    assert plan.steps is not None
    schedule = Schedule(plan.schedule, plan.eps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=plan.betas, weight_decay=plan.weight_decay)
    maskable = torch.arange(QUESTION + ANSWER) >= QUESTION
    n_train = N_SUMS - N_HELD_OUT
    for step in range(plan.steps):
        samples = torch.arange(plan.batch) + step * plan.batch
        # A permutation of all sums sets the held-out ones apart; each epoch reads the others in an order of its own.
        epochs = samples // n_train
        rows = torch.cat([permute(samples[epochs == e] % n_train, n_train, plan.seed, int(e)) for e in epochs.unique()])
        tokens = write_sums(permute(rows, N_SUMS, plan.seed))
        noisy = corrupt(tokens, samples, seed=plan.seed, mask_id=model.config.mask_id, schedule=schedule, maskable=maskable)
        loss = denoising_loss(model, tokens, noisy, denominator=plan.batch * ANSWER).total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, recipe)
        optimizer.step()
        optimizer.zero_grad()
        yield step, float(loss.detach())


def _learning_rate(step: int, recipe: Recipe) -> float:
    plan = recipe.train
    assert plan.steps is not None
    warmup = max(1, int(plan.warmup * plan.steps))
    if step < warmup:
        return plan.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, plan.steps - warmup)
    return plan.min_lr + (plan.lr - plan.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def exact_match(model: DiffusionLM, seed: int) -> float:
    """Share of held-out sums answered right, the most confident digit first."""
    clean = write_sums(permute(torch.arange(N_SUMS - N_HELD_OUT, N_SUMS), N_SUMS, seed))
    tokens = clean.clone()
    tokens[:, QUESTION:] = model.config.mask_id
    with model.inference():
        denoise = model.denoiser()
        for _ in range(ANSWER):
            confidence, best = denoise(tokens).softmax(-1).max(-1)
            confidence = confidence.masked_fill(tokens != model.config.mask_id, -1)
            chosen = confidence.argmax(1, keepdim=True)
            tokens = tokens.scatter(1, chosen, best.gather(1, chosen))
    return float((tokens == clean).all(1).double().mean())


def watch_attention(model: DiffusionLM, seed: int) -> list[dict[str, float]]:
    """Per layer: the share of attention on the sink, on the most attended content position, and the value norms (eq. 16)."""
    tokens = write_sums(permute(torch.arange(256), N_SUMS, seed))
    tokens[:, QUESTION:] = model.config.mask_id
    watcher = Watcher()
    with model.inference():
        model(tokens, observe=watcher)
    return [_facts(layer) for layer in watcher.layers]


def _facts(layer: AttentionStatistics) -> dict[str, float]:
    facts = {
        "top_content_share": float(layer.received.mean((0, 1)).max()),
        "content_value_norm": float(layer.value_norm.mean()),
    }
    if layer.sink_received.shape[-1]:
        facts |= {"sink_share": float(layer.sink_share.mean()), "sink_value_norm": float(layer.sink_value_norm.mean())}
    return facts


def train_twin(twin: str, steps: int, seed: int, console: Console) -> tuple[DiffusionLM, Recipe, dict[str, Any]]:
    recipe = recipe_of(twin, steps, seed)
    model = DiffusionLM(recipe.model, seed=seed)
    began, recent = time.perf_counter(), 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[seen]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{twin:8s}", total=steps, seen="")
        for step, loss in train(model, recipe):
            recent = loss if step == 0 else 0.98 * recent + 0.02 * loss
            rate = (step + 1) / (time.perf_counter() - began)
            seen = f"step {step + 1}/{steps}  loss {recent:.3f}  {rate:.0f} steps/s"
            bar.update(task, advance=1, seen=seen)
            if not console.is_terminal and (step + 1) % max(1, steps // _LINES) == 0:
                console.print(f"{twin:8s} {seen}")
    found = {
        "final_loss": recent,
        "exact_match": exact_match(model, seed),
        "seconds": time.perf_counter() - began,
        "layers": watch_attention(model, seed),
    }
    return model, recipe, found


def run_demo(out: Path, *, steps: int, seed: int, as_json: bool) -> dict[str, Any]:
    console = Console(stderr=as_json, highlight=False, soft_wrap=True, markup=False)
    for twin in ("vanilla", "sink"):
        check_destination(out / twin)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json").write_text("{}\n")
    except OSError as failure:
        raise UserError(f"{failure.filename}: cannot write there: {failure.strerror}; choose another --out") from None
    console.print("Two models that differ in one flag (n_sinks) learn two-digit sums; 1,000 of 10,000 sums are held out.")
    results: dict[str, Any] = {"steps": steps, "seed": seed, "twins": {}}
    for twin in ("vanilla", "sink"):
        model, recipe, found = train_twin(twin, steps, seed, console)
        save(out / twin, model, provenance={"recipe": recipe.to_dict(), "seed": seed})
        results["twins"][twin] = found
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        _say(results, out, console)
    return results


def _say(results: dict[str, Any], out: Path, console: Console) -> None:
    console.print("\ntwin      loss   held-out exact match   seconds")
    for twin, found in results["twins"].items():
        console.print(f"{twin:8s} {found['final_loss']:6.3f}   {found['exact_match']:20.1%}   {found['seconds']:7.1f}")
    console.print("\nwhere attention goes (all heads, answers masked)   layer:  " + "      ".join(map(str, range(3))))
    rows = (
        ("sink", "sink_share", "share on the sink token"),
        ("sink", "top_content_share", "share on the top content token, with a sink"),
        ("vanilla", "top_content_share", "share on the top content token, without"),
        ("sink", "sink_value_norm", "value norm of the sink"),
        ("sink", "content_value_norm", "value norm of content"),
    )
    for twin, key, label in rows:
        values = "".join(f"{layer[key]:7.2f}" for layer in results["twins"][twin]["layers"])
        console.print(f"  {label:54s}{values}")
    gap = 100 * (results["twins"]["sink"]["exact_match"] - results["twins"]["vanilla"]["exact_match"])
    verdict = (
        "they do not differ by more than 2 points" if abs(gap) <= 2 else f"the sink twin is {gap:+.1f} points from the vanilla one"
    )
    console.print(
        f"\nHeld-out sums: {verdict}. This is one seed of a toy task; try --seed 1. Checkpoints and results.json are in {out}."
    )
