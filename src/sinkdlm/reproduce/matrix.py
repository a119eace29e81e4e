"""The declared matrix: which variants exist, which runs a table or figure needs, and how large everything is at each scale. Data.

A run is (group, variant, seed). Its seed changes data order, noise and the first values of new parameters together, and is shared
by all variants of a group. Learning rates are chosen for each variant from three values in short trials on one seed of their own,
which no table uses.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sinkdlm.errors import ReproduceError
from sinkdlm.evals.paper import PAPER_ROWS

ADAPT, SCRATCH, SFT = "adapt", "scratch", "sft"
TRIAL_SEED = 0
FIRST_SEED = 1
OTHER_SEEDS = 3  # of variants that are not among the main ones
TRIAL_SHARE = 0.25  # of a run's budget


class Variant(NamedTuple):
    """changes: of a group's recipe; `data.first` is filled with the id that ends documents. rate_of: the variant whose trials chose
    its learning rate, where it has none of its own; these were added after runs had been seen, to explain them."""

    label: str
    changes: Mapping[str, Mapping[str, Any]] = {}
    rate_of: str = ""


_VARIANTS = """
vanilla = {label = "DLM"}
sink = {label = "DLM + sink", model.n_sinks = 1}
gate = {label = "DLM + gate", model.gate = "elementwise"}
gate-keep = {label = "DLM + gate, function-preserving init", model.gate = "elementwise", init.gate_init = "keep"}
sink-end = {label = "sink at the end", model.n_sinks = 1, model.sink_position = "end"}
sinks-2 = {label = "2 sinks", model.n_sinks = 2}
sinks-4 = {label = "4 sinks", model.n_sinks = 4}
sink-zero = {label = "sink with zero value", model.n_sinks = 1, model.sink_value = "zero"}
register = {label = "register token", model.n_sinks = 1, model.sink_kind = "register"}
logit = {label = "sink logit", model.n_sinks = 1, model.sink_kind = "logit"}
first = {label = "always visible first token", data.first = "eos"}
vanilla-sink-rate = {label = "DLM at the sink's learning rate", rate_of = "sink"}
sink-dlm-rate = {label = "DLM + sink at the DLM's learning rate", rate_of = "vanilla", model.n_sinks = 1}
vanilla-lengths = {label = "DLM at the sink's learning rate, half of its rows of random length", \
rate_of = "sink", data.random_lengths = 0.5}
sink-lengths = {label = "DLM + sink, half of its rows of random length", \
rate_of = "sink", model.n_sinks = 1, data.random_lengths = 0.5}
"""
VARIANTS = {
    name: Variant(changes.pop("label"), rate_of=changes.pop("rate_of", ""), changes=changes)
    for name, changes in tomllib.loads(_VARIANTS).items()
}
LABELS = {name: variant.label for name, variant in VARIANTS.items()}
MAIN = ("vanilla", "sink", "gate")  # adapted, these have all seeds, and the official settings' scores; other runs have a part
ONCE = ("vanilla-lengths", "sink-lengths")  # of the first seed alone: they explain, and are claimed nothing of


class Target(NamedTuple):
    """What one table or figure is made of: runs as group -> variants."""

    title: str
    runs: Mapping[str, Sequence[str]]


TARGETS = {
    "table1": Target("Table 1: adapted from an autoregressive model", {ADAPT: (*MAIN, "gate-keep")}),
    "table2": Target("Table 2: from scratch", {SCRATCH: MAIN}),
    "table3": Target("Table 3: where the sink stands", {ADAPT: ("vanilla", "sink", "sink-end")}),
    "table4": Target("Table 4: how many sinks", {ADAPT: ("vanilla", "sink", "sinks-2", "sinks-4")}),
    "table5": Target("Table 5: what the sink's value holds", {ADAPT: ("vanilla", "sink", "sink-zero")}),
    "controls": Target(
        "Controls: is it isolation that helps?",
        {ADAPT: ("vanilla", "sink", "register", "logit", "first", "vanilla-sink-rate", "sink-dlm-rate")},
    ),
    "short": Target("Rows shorter than those of training", {ADAPT: ("vanilla-sink-rate", "sink", *ONCE)}),
    "figure1": Target("Figure 1: where heads rest, without a sink and with one", {ADAPT: ("vanilla", "sink")}),
    "figure3": Target("Figure 3: the sink in every layer, before and after fine-tuning", {ADAPT: ("sink",), SFT: ("sink",)}),
    "gsm8k": Target("GSM8K: after fine-tuning", {SFT: MAIN}),
}
# Variant -> how the paper's rows call it, at the end of their names.
_PAPER = {
    "vanilla": "dlm 0",
    "sink": "sink front 1 learned",
    "gate": "ga",
    "sink-end": "end",
    "sink-zero": "zero",
    "sinks-2": "2",
    "sinks-4": "4",
}
ALL = "all"
STUDIES = ("overlap", "inherited", "lengths", "steadiness")  # what gives no verdict: modules of the project's checkout


@dataclass(frozen=True)
class Scale:
    """How large. tables: group -> the recipe that variants change; `init.from` and `data.sets` are filled in where a run begins.

    lrs: group -> the three values of trials; groups without are trained as their recipe says.
    tasks: harness task -> documents that are asked, None for all; those of GSM8K go to fine-tuned models, the others to the rest.
    seconds: expected of a group's training, of its start, and of each stage, until results say it.
    """

    name: str
    tables: Mapping[str, Mapping[str, Any]]
    lrs: Mapping[str, Sequence[float]]
    seeds: int
    documents: int  # of the validation split
    draws: int
    tasks: Mapping[str, int | None]
    official: Mapping[str, int]  # task -> documents that the official settings are asked of: ten times the work and more
    trajectories: int
    written: int  # tokens of a trajectory, one a step or two
    examples: int  # held-out examples of fine-tuning
    cuts: Sequence[int]  # to how many tokens documents are cut, for adapted models of the first seed; the last: rows of training
    seconds: Mapping[str, float]


_QUIET = {"eval": {"every": 0}, "log": {"probe_every": 0}}
_NANO_TRAIN = {"batch": 24, "steps": 40, "warmup": 0.1, "weight_decay": 0.01, "precision": "float32", "clip": 1.0}
_NANO_KEEP = {**_QUIET, "save": {"every": 1_000_000, "keep": 1}}
_NANO = {"model": {"preset": "nano"}, "data": {"length": 32}, "train": _NANO_TRAIN, **_NANO_KEEP}
_SMALL_TRAIN = {"batch": 128, "warmup": 0.02, "times": "golden", "eps": 1e-3}
_SMALL = {**_QUIET, "save": {"every": 300, "keep": 1}}
_SMOLLM = {"preset": "smollm2-135m", "context_length": 2048}
_LIKELIHOODS = ("lambada_openai", "arc_easy", "arc_challenge", "hellaswag", "piqa", "race", "social_iqa")
_STAGES = (ADAPT, SCRATCH, SFT, "start", "validation", "answers", "task", "cuts", "capture")

SCALES = {
    "nano": Scale(
        name="nano",
        tables={
            ADAPT: _NANO,
            SCRATCH: _NANO,
            SFT: {
                **_NANO,
                "data": {"length": 32, "padding": "ignore"},
                "train": {**_NANO_TRAIN, "batch": 64, "lr": 4e-3, "min_lr": 4e-4, "eps": 0.4},
            },
        },
        lrs={ADAPT: (1e-3, 2e-3, 4e-3), SCRATCH: (2e-3, 4e-3, 8e-3)},
        seeds=3,
        documents=48,
        draws=8,
        tasks={"lambada_openai": 60, "arc_easy": 30, "gsm8k_two_stage": 100},
        official={"lambada_openai": 20, "arc_easy": 20},
        trajectories=4,
        written=8,
        examples=100,
        cuts=(8, 16, 32),
        # Means over the 62 runs of `reproduce all --seeds 1` on one core.
        seconds=dict(zip(_STAGES, (2.4, 2.4, 1.9, 0.5, 0.35, 0.1, 0.4, 0.35, 0.45), strict=True)),
    ),
    "small": Scale(
        name="small",
        tables={
            ADAPT: {"model": _SMOLLM, "data": {"length": 512}, "train": {**_SMALL_TRAIN, "steps": 600}, **_SMALL},
            SCRATCH: {
                "model": {"preset": "smdm-34m", "vocab_size": 49152},
                "data": {"length": 512},
                "train": {**_SMALL_TRAIN, "steps": 1600},
                **_SMALL,
            },
            SFT: {
                "model": _SMOLLM,
                "data": {"length": 256, "padding": "train"},
                "train": {"batch": 256, "warmup": 0.02, "epochs": 3, "lr": 2e-4, "min_lr": 2e-5},
                **_SMALL,
            },
        },
        lrs={ADAPT: (4e-4, 8e-4, 1.6e-3), SCRATCH: (5e-4, 1e-3, 2e-3)},
        seeds=5,
        documents=512,
        draws=16,
        tasks={**dict.fromkeys(_LIKELIHOODS), "hellaswag": 2000, "race": 300, "gsm8k_two_stage": 200},
        official={**dict.fromkeys(_LIKELIHOODS, 500), "race": 100},
        trajectories=16,
        written=64,
        examples=500,
        cuts=(16, 32, 64, 128, 256, 512),
        # From 331k tokens/s of smollm2-135m and 1.08M of smdm-34m on an H200 (benchmarks/results); the rest is guessed.
        seconds=dict(zip(_STAGES, (120, 100, 40, 20, 8, 8, 9, 6, 15), strict=True)),
    ),
}


class Job(NamedTuple):
    """One training with what is measured after it. lr: of a trial; of a run it is the chosen one."""

    group: str
    variant: str
    seed: int
    trial: int | None = None  # which of the three values

    @property
    def name(self) -> str:
        return f"{self.group}-{self.variant}-" + (f"s{self.seed}" if self.trial is None else f"lr{self.trial}")

    @property
    def base(self) -> "Job | None":
        """The run that this one starts from."""
        return Job(ADAPT, self.variant, self.seed) if self.group == SFT else None


def targets_of(name: str) -> list[str]:
    if name == ALL:
        return list(TARGETS)
    if name in STUDIES:
        raise ReproduceError(f"{name}: is a study, which gives no verdict; in the project's checkout run: python -m studies.{name}")
    if name not in TARGETS:
        raise ReproduceError(f"{name}: no such target; there are {', '.join((*TARGETS, ALL))}")
    return [name]


def paper_rows(target: str, variant: str) -> list[str]:
    """Names of the paper's rows that stand beside ours. GSM8K's numbers are in those of table 1."""
    table, names = "table1" if target == "gsm8k" else target, _PAPER.get(variant, "").split()
    return [row for row in PAPER_ROWS if row.split(":")[0] == table and row.split(":")[-1] in names]


def jobs_of(targets: Sequence[str], scale: Scale, seeds: int) -> list[Job]:
    """In the order of work: seed after seed, so that pairs are complete early, trials before a variant's first run.

    A fine-tuning follows its base.
    """
    pairs = [(group, variant) for target in targets for group, names in TARGETS[target].runs.items() for variant in names]
    bases = {SFT: ADAPT}
    wanted = dict.fromkeys(run for group, variant in pairs for run in ((bases.get(group, group), variant), (group, variant)))
    jobs = []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for group, variant in wanted:
            if group == SFT or seed >= FIRST_SEED + seeds_of(group, variant, scale, seeds):
                continue
            if seed == FIRST_SEED:
                jobs += [trial for trial in trials_of(group, variant, scale) if trial not in jobs]
            jobs.append(Job(group, variant, seed))
            if group == ADAPT and (SFT, variant) in wanted and seed < FIRST_SEED + seeds_of(SFT, variant, scale, seeds):
                jobs.append(Job(SFT, variant, seed))
    return jobs


def rate_of(variant: str) -> str:
    """The variant whose trials chose its learning rate."""
    return VARIANTS[variant].rate_of or variant


def trials_of(group: str, variant: str, scale: Scale) -> list[Job]:
    """Those that say with which learning rate a variant's runs are made; none where the group's recipe says it."""
    return [Job(group, rate_of(variant), TRIAL_SEED, number) for number in range(len(scale.lrs.get(group, ())))]


def seeds_of(group: str, variant: str, scale: Scale, seeds: int) -> int:
    if variant in ONCE:
        return 1
    return seeds if group == ADAPT and variant in MAIN else min(seeds, OTHER_SEEDS)


def stages_declared(job: Job, scale: Scale) -> list[str]:
    """What is measured of a run after training, official settings included, by the names that results have for it."""
    tuned, first = job.group == SFT, job.group == ADAPT and job.seed == FIRST_SEED
    if job.trial is not None:
        return ["answers" if tuned else "validation"]
    tasks = [task for task in scale.tasks if task.startswith("gsm8k") == tuned]
    kinds = ("task", "official") if first and job.variant in MAIN else ("task",)
    asked = [f"{kind} {task}" for task in tasks for kind in kinds]
    return ["answers" if tuned else "validation", *asked, *(["cuts"] if first else []), "capture"]


def select(jobs: Sequence[Job], only: Sequence[str]) -> list[Job]:
    """`--only variant`, `--only seed` or `--only variant,seed`; trials belong to their variant, and to no seed. Several add up."""
    kept = set[Job](() if only else jobs)
    for text in only:
        words = set(text.split(","))
        seeds = {word for word in words if word.isdigit()}
        variants = words - seeds
        if unknown := variants - VARIANTS.keys():
            odd = f"{unknown.pop()!r} is neither a seed nor a variant"
            raise ReproduceError(f"--only {text}: {odd}; variants are {', '.join(VARIANTS)}")
        trained = {rate_of(variant) for variant in variants}
        for job in jobs:
            names, right_seed = (variants, not seeds or str(job.seed) in seeds) if job.trial is None else (trained, True)
            if right_seed and (not names or job.variant in names):
                kept.add(job)
    if only and not kept:
        raise ReproduceError(f"--only {' '.join(only)}: no run of this target is that")
    return [job for job in jobs if job in kept]
