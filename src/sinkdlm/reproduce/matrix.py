"""The declared matrix: which variants exist, which runs a table or figure needs, and how large everything is at each scale. Data.

A run is (group, variant, seed). Its seed changes data order, noise and the first values of new parameters together, and is shared
by all variants of a group. Learning rates are chosen for each variant from three values in short trials on one seed of their own,
which no table uses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sinkdlm.errors import ReproduceError

ADAPT, SCRATCH, SFT = "adapt", "scratch", "sft"
TRIAL_SEED = 0
FIRST_SEED = 1

# Variant -> what it changes of a group's recipe. `data.first` is filled with the id that ends documents.
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "sink": {"model": {"n_sinks": 1}},
    "gate": {"model": {"gate": "elementwise"}},
    "gate-keep": {"model": {"gate": "elementwise"}, "init": {"gate_init": "keep"}},
    "sink-end": {"model": {"n_sinks": 1, "sink_position": "end"}},
    "sinks-2": {"model": {"n_sinks": 2}},
    "sinks-4": {"model": {"n_sinks": 4}},
    "sink-zero": {"model": {"n_sinks": 1, "sink_value": "zero"}},
    "register": {"model": {"n_sinks": 1, "sink_kind": "register"}},
    "logit": {"model": {"n_sinks": 1, "sink_kind": "logit"}},
    "first": {"data": {"first": "eos"}},
    "vanilla-sink-rate": {},
    "sink-dlm-rate": {"model": {"n_sinks": 1}},
    "vanilla-lengths": {"data": {"random_lengths": 0.5}},
    "sink-lengths": {"model": {"n_sinks": 1}, "data": {"random_lengths": 0.5}},
}
# Variants that have no trials of their own: whose learning rate they take.
RATE_OF = {"vanilla-sink-rate": "sink", "sink-dlm-rate": "vanilla", "vanilla-lengths": "sink", "sink-lengths": "sink"}
LATE = tuple(RATE_OF)  # added after runs had been seen, to explain them
LABELS = {
    "vanilla": "DLM",
    "sink": "DLM + sink",
    "gate": "DLM + gate",
    "gate-keep": "DLM + gate, function-preserving init",
    "sink-end": "sink at the end",
    "sinks-2": "2 sinks",
    "sinks-4": "4 sinks",
    "sink-zero": "sink with zero value",
    "register": "register token",
    "logit": "sink logit",
    "first": "always visible first token",
    "vanilla-sink-rate": "DLM at the sink's learning rate",
    "sink-dlm-rate": "DLM + sink at the DLM's learning rate",
    "vanilla-lengths": "DLM at the sink's learning rate, half of its rows of random length",
    "sink-lengths": "DLM + sink, half of its rows of random length",
}
MAIN = ("vanilla", "sink", "gate")  # adapted, these have all seeds; other runs have a part of them
ONCE = ("vanilla-lengths", "sink-lengths")  # of the first seed alone: they explain, and are claimed nothing of
OFFICIAL = ("vanilla", "sink", "gate")  # of the first seed, scored once more with the official settings where that is asked


class Target(NamedTuple):
    """What one table or figure is made of: runs as group -> variants, and the paper's rows beside ours."""

    title: str
    runs: Mapping[str, Sequence[str]]
    paper: Mapping[str, Sequence[str]] = {}  # variant -> rows of evals.paper


TARGETS: dict[str, Target] = {
    "table1": Target(
        "Table 1: adapted from an autoregressive model",
        {ADAPT: ("vanilla", "sink", "gate", "gate-keep")},
        {
            "vanilla": ("table1:0.5b:dlm", "table1:1.5b:dlm"),
            "sink": ("table1:0.5b:sink", "table1:1.5b:sink"),
            "gate": ("table1:0.5b:ga", "table1:1.5b:ga"),
        },
    ),
    "table2": Target(
        "Table 2: from scratch",
        {SCRATCH: ("vanilla", "sink", "gate")},
        {"vanilla": ("table2:0.5b:dlm",), "sink": ("table2:0.5b:sink",), "gate": ("table2:0.5b:ga",)},
    ),
    "table3": Target(
        "Table 3: where the sink stands",
        {ADAPT: ("vanilla", "sink", "sink-end")},
        {"sink": ("table3:front",), "sink-end": ("table3:end",)},
    ),
    "table4": Target(
        "Table 4: how many sinks",
        {ADAPT: ("vanilla", "sink", "sinks-2", "sinks-4")},
        {"vanilla": ("table4:0",), "sink": ("table4:1",), "sinks-2": ("table4:2",), "sinks-4": ("table4:4",)},
    ),
    "table5": Target(
        "Table 5: what the sink's value holds",
        {ADAPT: ("vanilla", "sink", "sink-zero")},
        {"sink": ("table5:learned",), "sink-zero": ("table5:zero",)},
    ),
    "controls": Target(
        "Controls: is it isolation that helps?",
        {ADAPT: ("vanilla", "sink", "register", "logit", "first", "vanilla-sink-rate", "sink-dlm-rate")},
    ),
    "short": Target(
        "Rows shorter than those of training",
        {ADAPT: ("vanilla-sink-rate", "sink", "vanilla-lengths", "sink-lengths")},
    ),
    "figure1": Target("Figure 1: where heads rest, without a sink and with one", {ADAPT: ("vanilla", "sink")}),
    "figure3": Target("Figure 3: the sink in every layer, before and after fine-tuning", {ADAPT: ("sink",), SFT: ("sink",)}),
    "gsm8k": Target(
        "GSM8K: after fine-tuning",
        {SFT: ("vanilla", "sink", "gate")},
        {
            "vanilla": ("table1:0.5b:dlm", "table1:1.5b:dlm"),
            "sink": ("table1:0.5b:sink", "table1:1.5b:sink"),
            "gate": ("table1:0.5b:ga", "table1:1.5b:ga"),
        },
    ),
}
ALL = "all"
STUDIES = ("overlap", "inherited", "lengths", "steadiness")  # what gives no verdict: modules of the project's checkout


@dataclass(frozen=True)
class Scale:
    """How large. tables: group -> the recipe that variants change; `init.from` and `data.sets` are filled in where a run begins.

    lrs: group -> the three values of trials; groups without are trained as their recipe says. trial_share: of a run's budget.
    tasks: harness task -> documents that are asked, None for all; those of GSM8K go to fine-tuned models, the others to the rest.
    seconds: expected of a group's training, of its start, and of each stage, until records say it.
    """

    name: str
    tables: Mapping[str, Mapping[str, Any]]
    lrs: Mapping[str, Sequence[float]]
    seeds: int
    other_seeds: int
    trial_share: float
    documents: int  # of the validation split
    draws: int
    tasks: Mapping[str, int | None]
    official: Mapping[str, int]  # task -> documents that the official settings are asked of: ten times the work and more
    trajectories: int
    written: int  # tokens of a trajectory, one a step or two
    examples: int  # held-out examples of fine-tuning
    cuts: Sequence[int]  # to how many tokens documents are cut, for adapted models of the first seed; the last: rows of training
    seconds: Mapping[str, float] = field(default_factory=dict)


_NANO_TRAIN = {"batch": 24, "warmup": 0.1, "weight_decay": 0.01, "precision": "float32", "clip": 1.0}
_QUIET = {"eval": {"every": 0}, "log": {"probe_every": 0}, "save": {"every": 1_000_000, "keep": 1}}
_SMALL_TRAIN = {"batch": 128, "warmup": 0.02, "times": "golden", "eps": 1e-3}
_SMALL_KEEP = {"eval": {"every": 0}, "log": {"probe_every": 0}, "save": {"every": 300, "keep": 1}}

_LIKELIHOODS = ("lambada_openai", "arc_easy", "arc_challenge", "hellaswag", "piqa", "race", "social_iqa")

SCALES: dict[str, Scale] = {
    "nano": Scale(
        name="nano",
        tables={
            ADAPT: {"model": {"preset": "nano"}, "data": {"length": 32}, "train": {**_NANO_TRAIN, "steps": 40}, **_QUIET},
            SCRATCH: {"model": {"preset": "nano"}, "data": {"length": 32}, "train": {**_NANO_TRAIN, "steps": 40}, **_QUIET},
            SFT: {
                "model": {"preset": "nano"},
                "data": {"length": 32, "padding": "ignore"},
                "train": {**_NANO_TRAIN, "steps": 40, "batch": 64, "lr": 4e-3, "min_lr": 4e-4, "eps": 0.4},
                **_QUIET,
            },
        },
        lrs={ADAPT: (1e-3, 2e-3, 4e-3), SCRATCH: (2e-3, 4e-3, 8e-3)},
        seeds=3,
        other_seeds=3,
        trial_share=0.25,
        documents=48,
        draws=8,
        tasks={"lambada_openai": 60, "arc_easy": 30, "gsm8k_two_stage": 100},
        official={"lambada_openai": 20, "arc_easy": 20},
        trajectories=4,
        written=8,
        examples=100,
        cuts=(8, 16, 32),
        # Means over the 62 runs of `reproduce all --seeds 1` on one core.
        seconds={
            ADAPT: 2.4,
            SCRATCH: 2.4,
            SFT: 1.9,
            "start": 0.5,
            "validation": 0.35,
            "answers": 0.1,
            "task": 0.4,
            "cuts": 0.35,
            "capture": 0.45,
        },
    ),
    "small": Scale(
        name="small",
        tables={
            ADAPT: {
                "model": {"preset": "smollm2-135m", "context_length": 2048},
                "data": {"length": 512},
                "train": {**_SMALL_TRAIN, "steps": 600},
                **_SMALL_KEEP,
            },
            SCRATCH: {
                "model": {"preset": "smdm-34m", "vocab_size": 49152},
                "data": {"length": 512},
                "train": {**_SMALL_TRAIN, "steps": 1600},
                **_SMALL_KEEP,
            },
            SFT: {
                "model": {"preset": "smollm2-135m", "context_length": 2048},
                "data": {"length": 256, "padding": "train"},
                "train": {"batch": 256, "warmup": 0.02, "epochs": 3, "lr": 2e-4, "min_lr": 2e-5},
                **_SMALL_KEEP,
            },
        },
        lrs={ADAPT: (4e-4, 8e-4, 1.6e-3), SCRATCH: (5e-4, 1e-3, 2e-3)},
        seeds=5,
        other_seeds=3,
        trial_share=0.25,
        documents=512,
        draws=16,
        tasks={
            **dict.fromkeys(_LIKELIHOODS),
            "hellaswag": 2000,
            "race": 300,
            "gsm8k_two_stage": 200,
        },
        official={**dict.fromkeys(_LIKELIHOODS, 500), "race": 100},
        trajectories=16,
        written=64,
        examples=500,
        cuts=(16, 32, 64, 128, 256, 512),
        # From 331k tokens/s of smollm2-135m and 1.08M of smdm-34m on an H200 (benchmarks/results); the rest is guessed.
        seconds={
            ADAPT: 120,
            SCRATCH: 100,
            SFT: 40,
            "start": 20,
            "validation": 8,
            "answers": 8,
            "task": 9,
            "cuts": 6,
            "capture": 15,
        },
    ),
}
PAPER = "paper"
SCALE_NAMES = (*SCALES, PAPER)


class Job(NamedTuple):
    """One training with what is measured after it. lr: of a trial; of a run it is the chosen one."""

    group: str
    variant: str
    seed: int
    trial: int | None = None  # which of the three values

    @property
    def name(self) -> str:
        return f"{self.group}-{self.variant}-" + (f"lr{self.trial}" if self.trial is not None else f"s{self.seed}")

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


def jobs_of(targets: Sequence[str], scale: Scale, seeds: int) -> list[Job]:
    """In the order of work: seed after seed, so that pairs are complete early, trials before a variant's first run.

    A fine-tuning follows its base.
    """
    wanted: dict[tuple[str, str], None] = {}
    for target in targets:
        for group, variants in TARGETS[target].runs.items():
            for variant in variants:
                if group == SFT:
                    wanted[ADAPT, variant] = None
                wanted[group, variant] = None
    jobs = []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for group, variant in wanted:
            if group == SFT or seed >= FIRST_SEED + seeds_of(group, variant, scale, seeds):
                continue
            if seed == FIRST_SEED:
                jobs += [trial for trial in trials_of(group, variant, scale) if trial not in jobs]
            jobs.append(Job(group, variant, seed))
            tuned = (SFT, variant) in wanted and seed < FIRST_SEED + seeds_of(SFT, variant, scale, seeds)
            if group == ADAPT and tuned:
                jobs.append(Job(SFT, variant, seed))
    return jobs


def trials_of(group: str, variant: str, scale: Scale) -> list[Job]:
    """Those that say with which learning rate a variant's runs are made; none where the group's recipe says it."""
    return [Job(group, RATE_OF.get(variant, variant), TRIAL_SEED, number) for number in range(len(scale.lrs.get(group, ())))]


def seeds_of(group: str, variant: str, scale: Scale, seeds: int) -> int:
    if variant in ONCE:
        return 1
    return seeds if group == ADAPT and variant in MAIN else min(seeds, scale.other_seeds)


def stages_declared(job: Job, scale: Scale) -> list[str]:
    """What is measured of a run after training, official settings included, by the names that records have for it."""
    if job.group == SFT:
        found = ["answers", *(f"task {task}" for task in scale.tasks if task.startswith("gsm8k"))]
    else:
        found = ["validation"]
    if job.trial is not None:
        return found
    if job.group != SFT:
        twin = job.group == ADAPT and job.variant in OFFICIAL and job.seed == FIRST_SEED
        for task in scale.tasks:
            if not task.startswith("gsm8k"):
                found += [f"task {task}", *([f"official {task}"] if twin else [])]
    return [*found, *(["cuts"] if job.group == ADAPT and job.seed == FIRST_SEED else []), "capture"]


def select(jobs: Sequence[Job], only: Sequence[str]) -> list[Job]:
    """`--only variant`, `--only seed` or `--only variant,seed`; trials belong to their variant, and to no seed. Several add up."""
    if not only:
        return list(jobs)
    pairs = [_selection(text) for text in only]
    kept = [
        job
        for job in jobs
        if any(
            variant in (None, job.variant) and seed in (None, job.seed)
            if job.trial is None
            else variant is None or RATE_OF.get(variant, variant) == job.variant
            for variant, seed in pairs
        )
    ]
    if not kept:
        raise ReproduceError(f"--only {' '.join(only)}: no run of this target is that")
    return kept


def _selection(text: str) -> tuple[str | None, int | None]:
    variant, seed = None, None
    for word in text.split(","):
        if word.isdigit():
            seed = int(word)
        elif word in VARIANTS:
            variant = word
        else:
            raise ReproduceError(f"--only {text}: {word!r} is neither a seed nor a variant; variants are {', '.join(VARIANTS)}")
    return variant, seed
