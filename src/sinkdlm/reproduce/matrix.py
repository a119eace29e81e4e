"""The declared matrix of matrix.toml: variants, the runs that each table or figure needs, and the sizes of each scale.

A run is (group, variant, seed). Its seed changes data order, noise and the initial values of new parameters together; all variants
of a group share it. A variant's learning rate is chosen from three values in short trials, on a seed that no table uses.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sinkdlm.config.toml import overlay
from sinkdlm.errors import ReproduceError
from sinkdlm.evals.paper import PAPER_ROWS

ADAPT, SCRATCH, SFT = "adapt", "scratch", "sft"
TRIAL_SEED = 0
FIRST_SEED = 1
OTHER_SEEDS = 3  # of variants that are not among the main ones
TRIAL_SHARE = 0.25  # of a run's budget


class Variant(NamedTuple):
    """A variant of the matrix, which explains the fields."""

    label: str
    changes: Mapping[str, Mapping[str, Any]]
    rate_of: str = ""
    paper: str = ""

    @classmethod
    def of(cls, label: str, rate_of: str = "", paper: str = "", **changes: Any) -> "Variant":
        return cls(label, changes, rate_of, paper)


DECLARED = tomllib.loads((Path(__file__).parent / "matrix.toml").read_text(encoding="utf-8"))
VARIANTS = {name: Variant.of(**fields) for name, fields in DECLARED["variants"].items()}
LABELS = {name: variant.label for name, variant in VARIANTS.items()}


def difference(variant: str, against: str) -> str:
    """Name the difference of two variants. A label that has a plus stands in parentheses."""
    one, other = (f"({label})" if " + " in label else label for label in (LABELS[variant], LABELS[against]))
    return f"{one} \N{MINUS SIGN} {other}"


MAIN = ("vanilla", "sink", "gate")  # of adapted variants, only these have all seeds, and scores by the official settings
ONCE = ("vanilla-lengths", "sink-lengths")  # first seed only: exploratory, without claims


class Target(NamedTuple):
    """The runs of one table or figure: group -> variants."""

    title: str
    runs: Mapping[str, Sequence[str]]


TARGETS = {name: Target(**fields) for name, fields in DECLARED["targets"].items()}
ALL = "all"
STUDIES = ("overlap", "inherited", "lengths", "steadiness", "equal_rates")  # modules of the checkout's studies/: no verdicts


@dataclass(frozen=True)
class Scale:
    """The sizes of a scale. tables: group -> the recipe that variants change; a run fills in `init.from` and `data.sets`.

    lrs: group -> the three learning rates of trials; other groups use their recipe's.
    tasks: harness task -> number of documents, None for all; GSM8K is for fine-tuned models, the others for the rest.
    seconds: expected for a group's training, its start and each stage, until there are results.
    """

    name: str
    tables: Mapping[str, Mapping[str, Any]]
    lrs: Mapping[str, Sequence[float]]
    seeds: int
    documents: int  # of the validation split
    draws: int
    tasks: Mapping[str, int | None]
    official: Mapping[str, int]  # task -> documents scored with the official settings, at ten times the cost and more
    trajectories: int
    written: int  # tokens that a trajectory writes, one a step
    examples: int  # held-out examples of fine-tuning
    cuts: Sequence[int]  # lengths to cut documents to, for adapted models of the first seed; the last is the training length
    seconds: Mapping[str, float]

    @classmethod
    def of(cls, name: str) -> "Scale":
        declared = dict(DECLARED["scales"][name])
        common = declared.pop("all")
        declared["tables"] = {group: overlay(common, own) for group, own in declared["tables"].items()}
        declared["tasks"] = {task: most or None for task, most in declared["tasks"].items()}
        return cls(name, **declared)


SCALES = {name: Scale.of(name) for name in DECLARED["scales"]}


class Job(NamedTuple):
    """One training and the measurements after it: a trial of a learning rate, or a run with the chosen one."""

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
        raise ReproduceError(f"{name}: a study, not a target; in the project's checkout run: python -m studies.{name}")
    if name not in TARGETS:
        raise ReproduceError(f"{name}: no such target; choose one of {', '.join((*TARGETS, ALL))}")
    return [name]


def paper_rows(target: str, variant: str) -> list[str]:
    """Names of the paper's rows to show beside ours. GSM8K's numbers are in table 1's rows."""
    table, names = "table1" if target == "gsm8k" else target, VARIANTS[variant].paper.split()
    return [row for row in PAPER_ROWS if row.split(":")[0] == table and row.split(":")[-1] in names]


def jobs_of(targets: Sequence[str], scale: Scale, seeds: int) -> list[Job]:
    """Jobs in the order of work: seed after seed, so that pairs are complete early; trials before a variant's first run.

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
    """The trials that choose a variant's learning rate; none where the group's recipe sets it."""
    return [Job(group, rate_of(variant), TRIAL_SEED, number) for number in range(len(scale.lrs.get(group, ())))]


def seeds_of(group: str, variant: str, scale: Scale, seeds: int) -> int:
    if variant in ONCE:
        return 1
    return seeds if group == ADAPT and variant in MAIN else min(seeds, OTHER_SEEDS)


def stages_declared(job: Job, scale: Scale) -> list[str]:
    """Names of the measurements after a job's training, official settings included."""
    tuned, first = job.group == SFT, job.group == ADAPT and job.seed == FIRST_SEED
    if job.trial is not None:
        return ["answers" if tuned else "validation"]
    tasks = [task for task in scale.tasks if task.startswith("gsm8k") == tuned]
    kinds = ("task", "official") if first and job.variant in MAIN else ("task",)
    asked = [f"{kind} {task}" for task in tasks for kind in kinds]
    return ["answers" if tuned else "validation", *asked, *(["cuts"] if first else []), "capture"]


def select(jobs: Sequence[Job], only: Sequence[str]) -> list[Job]:
    """Jobs that --only selects: `variant`, `seed` or `variant,seed`. Trials belong to their variant, to no seed. Several add up."""
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
        raise ReproduceError(f"--only {' '.join(only)}: matches no run of this target; --plan lists them")
    return [job for job in jobs if job in kept]
