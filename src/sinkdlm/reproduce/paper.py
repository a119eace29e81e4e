"""Lay out the paper's own scale: a recipe for each run of a target, the commands that launch it on a cluster, and its cost.

Recipes are those of recipes/paper with the variant's changes and a seed on top; learning rates are the paper's, without trials.
Trains nothing.
"""

import json
import shlex
from itertools import product
from pathlib import Path
from typing import Any

from sinkdlm.config.recipe import Recipe
from sinkdlm.config.shipped import RECIPES
from sinkdlm.config.toml import flatten
from sinkdlm.planning.plan import Machine, make_plan
from sinkdlm.reproduce.matrix import ADAPT, FIRST_SEED, SCRATCH, SFT, TARGETS, VARIANTS, Job, targets_of
from sinkdlm.reproduce.results import write_text

# Group -> the recipes of recipes/paper that its variants change.
_RECIPES = {
    ADAPT: ("qwen2.5-0.5b", "qwen2.5-1.5b"),
    SCRATCH: ("smdm-472m",),
    SFT: ("sft-gsm8k-qwen2.5-0.5b", "sft-gsm8k-qwen2.5-1.5b"),
}
_ABLATED = ("qwen2.5-0.5b",)  # tables 3 to 5, controls and figures use the smaller one only
_TASKS = "arc_easy,arc_challenge,hellaswag,piqa,race,social_iqa,lambada"
_EOS = 151643  # Qwen2.5's <|endoftext|>, which ends documents
_EXAMPLES = 769_240  # of an epoch of the augmented GSM8K, as the authors count them
MACHINE = Machine("h100", 8)


def paper_recipe(base: str, job: Job, out: Path) -> Recipe:
    changes = VARIANTS[job.variant].changes
    if "data" in changes:
        changes = {} if job.group == SFT else {"data": {"first": _EOS}}
    overrides = [f"{key}={json.dumps(value)}" for key, value in flatten(changes).items()]
    if job.group == SFT:
        parent = run_name(base.removeprefix("sft-gsm8k-"), job._replace(group=ADAPT))
        overrides.append(f"init.from={json.dumps(str(out / 'runs' / parent / 'model'))}")
    # The paper's own seed is the first one; others count on from it.
    recipe = Recipe.load(RECIPES / "paper" / f"{base}.toml", overrides)
    return recipe.replace(train={**recipe.train.to_dict(), "seed": recipe.train.seed + job.seed - FIRST_SEED})


def run_name(base: str, job: Job) -> str:
    return f"{base}-{job.variant}-s{job.seed}"


def _runs(targets: list[str], seeds: int) -> dict[tuple[str, Job], None]:
    """(base recipe, job), a fine-tuning after the run that it starts from."""
    found: dict[tuple[str, Job], None] = {}
    declared = [(target, *runs) for target in targets for runs in TARGETS[target].runs.items()]
    for target, group, variants in declared:
        bases = _ABLATED if group == ADAPT and target != "table1" else _RECIPES[group]
        for base, seed, variant in product(bases, range(FIRST_SEED, FIRST_SEED + seeds), variants):
            if VARIANTS[variant].rate_of:  # the paper has one rate for all
                continue
            if group == SFT:
                found[base.removeprefix("sft-gsm8k-"), Job(ADAPT, variant, seed)] = None
            found[base, Job(group, variant, seed)] = None
    return found


def lay_out(target: str, out: Path, seeds: int) -> dict[str, Any]:
    """Write recipes, launch.sh and plan.json to `out`; return the content of plan.json."""
    told = "# Each line goes on where it stopped. launch/torchrun.sh says how to use several hosts."
    lines = ["#!/usr/bin/env bash", told, "set -e"]
    rows: list[dict[str, Any]] = []
    for base, job in _runs(targets_of(target), seeds):
        name = run_name(base, job)
        recipe = paper_recipe(base, job, out)
        path, run = out / "recipes" / f"{name}.toml", out / "runs" / name
        write_text(path, recipe.to_toml())
        tasks = "gsm8k_two_stage" if job.group == SFT else _TASKS
        commands = (
            ["launch/torchrun.sh", str(path), "--out", str(run)],
            ["sinkdlm", "eval", str(run / "model"), "--tasks", tasks, "--data", "bench", "--out", str(run / "eval")],
            ["sinkdlm", "analyze", str(run / "model"), "--out", str(run / "analysis")],
        )
        lines += map(shlex.join, commands)
        plan = make_plan(recipe, name, MACHINE, _EXAMPLES)
        assert plan.tokens is not None
        assert plan.gpu_hours is not None
        flops = plan.tokens * plan.flops_per_token
        rows.append({"run": name, "tokens": plan.tokens, "flops": flops, "gpu_hours": round(plan.gpu_hours, 1)})
    write_text(out / "launch.sh", "\n".join(lines) + "\n")
    hours = sum(row["gpu_hours"] for row in rows)
    assumed = f"planned on {MACHINE.text}: {plan.source}"
    said = f"{len(rows)} runs, {hours:,.0f} GPU hours of training ({assumed}); {out / 'launch.sh'} has the commands"
    found = {"runs": rows, "gpu_hours": round(hours, 1), "assumed": assumed, "said": said}
    write_text(out / "plan.json", json.dumps(found, indent=1) + "\n")
    return found
