"""docs/reproduction.md, from the results alone: the method as it was declared, and then what came of it.

The method's part depends on the matrix and the claims, not on results: it is the same text before the first run and after the last.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.asking import read_beside
from studies.equal_rates import equal_rate_blocks, equal_rate_rows
from studies.inherited import NAME as INHERITED
from studies.inherited import inherited_blocks
from studies.lengths import NAME as LENGTHS
from studies.lengths import lengths_blocks
from studies.overlap import GRAM, overlap_blocks
from studies.overlap import NAME as OVERLAP
from studies.steadiness import NAME as STEADINESS
from studies.steadiness import steadiness_blocks

from sinkdlm.config.toml import flatten
from sinkdlm.reproduce.claims import CLAIMS, FAILS, FEW, MARGIN, OPEN, OUTCOMES, PRIMARY, SAME, outcome_name
from sinkdlm.reproduce.markdown import bullets, table, to_markdown
from sinkdlm.reproduce.matrix import (
    ADAPT,
    FIRST_SEED,
    LABELS,
    SCALES,
    SCRATCH,
    SFT,
    TARGETS,
    TRIAL_SEED,
    TRIAL_SHARE,
    VARIANTS,
    Job,
    Scale,
    jobs_of,
    seeds_of,
    stages_declared,
)
from sinkdlm.reproduce.report import findings, rate_blocks, target_blocks, verdicts, work_blocks
from sinkdlm.reproduce.results import RunResult, find_made, read_results
from sinkdlm.reproduce.statistics import ALPHA, LEVEL, MIN_SEEDS

SCALE = "small"
VERDICTS = "verdicts"
PICTURES = {  # target, VERDICTS or STEADINESS -> file and what it shows
    VERDICTS: ("reproduction-differences.svg", "Differences on each primary outcome, with intervals over seeds"),
    "short": ("reproduction-lengths.svg", "NELBO and what heads write by how long rows are, with and without a sink"),
    STEADINESS: ("reproduction-steadiness.svg", "Gradient norms, and attention on the sink, step by step"),
    "figure1": (
        "reproduction-figure1.svg",
        "Value norms of content sinks and other tokens, and where the top content sink is at each step",
    ),
    "figure3": ("reproduction-figure3.svg", "Attention on the sink and value norms by layer, before and after fine-tuning"),
}


def write_page(folder: Path, assets: Path) -> str:
    """The page's text; pictures are named where their files are."""
    scale = SCALES[SCALE]
    found = declared_results(folder, scale)
    blocks = [
        "# Reproduction",
        (
            "Written by `python -m benchmarks.reproduction` from the results in `benchmarks/results/reproduction`. The method "
            "comes first: it was committed before any run at this scale, and what changed since is told there."
        ),
        *method(scale),
        *outcome(scale, found, folder, assets),
    ]
    return to_markdown(blocks)


def declared_results(folder: Path, scale: Scale = SCALES[SCALE]) -> dict[str, RunResult]:
    """Those of the matrix. Runs at rates that were chosen from other values are to be made again, and do not count meanwhile."""
    every = read_results(folder, scale.name)
    made = {job.name: find_made(job, every, scale) for job in jobs_of(list(TARGETS), scale, scale.seeds)}
    return {name: result for name, result in made.items() if result is not None}


# -- the method -------------------------------------------------------------------------------------------------------------------


def method(scale: Scale) -> list[str]:
    return [
        "## Method, declared before running",
        bullets(_design(scale)),
        "### Runs",
        (
            "A run has a result of its name in `benchmarks/results/reproduction`: the command, commit and machine that made it, "
            "its recipe, and what was measured, item by item. Trials of learning rates have `-lr0` to `-lr2` instead of a seed. "
            "Those marked late were added after runs had been seen, to explain them."
        ),
        _matrix(scale),
        "### Claims",
        (
            "Each claim, of the paper or of a control, is a comparison on primary outcomes, or a quantity against a number. Those "
            "marked late were added after runs had been seen: controls of learning rates, and what the paper claims and the list "
            "had left out:"
        ),
        _claims(),
        "### Verdicts",
        bullets(_rules()),
        "### Deviations from the paper",
        bullets(_deviations(scale)),
        "### Commands",
        _commands(),
    ]


def _design(scale: Scale) -> list[str]:
    rates = "; ".join(f"{group}: {', '.join(f'{rate:g}' for rate in values)}" for group, values in scale.lrs.items())
    plan = scale.tables[ADAPT]["train"]
    trial, whole = (round(plan["warmup"] * plan["steps"] * share) for share in (TRIAL_SHARE, 1.0))
    asked = ", ".join(task if most is None else f"{task} (first {most:,})" for task, most in scale.tasks.items())
    return [
        "**Seeds.** A seed changes data order, noise and the first values of new parameters together. All variants share "
        "it, so that a seed is a pair of runs for every two variants.",
        "**Primary outcomes**, lower is better: " + "; ".join(OUTCOMES[name] for name in PRIMARY) + ". Accuracy is told "
        "beside them: near chance at this size, it can show little. After fine-tuning: " + OUTCOMES["gsm8k.nll"] + ".",
        "**Intervals.** Within a seed, differences are paired over items (the same documents, questions and masks). Over "
        f"seeds, the seeds' differences are a sample: mean and Student's {LEVEL:.0%} interval. Fewer than {MIN_SEEDS} "
        "seeds give no verdict.",
        "**Everything else is exploratory**: other outcomes of the same comparisons, with Holm's correction over all of "
        f"a table's, at {ALPHA:.2g}.",
        f"**No difference** (tables 3 to 5) is shown by two one-sided tests at {ALPHA:.2g} against a margin of {MARGIN} "
        "nats: the 90 % interval lies inside it.",
        f"**Learning rate.** Chosen for each variant from three values ({rates}) by validation NELBO, in trials of a "
        f"quarter of a run's budget on seed {TRIAL_SEED}, which no table uses; the same budget for each. Cosine to a "
        "tenth. Fine-tuning takes one rate for all. Changed once, before any run that a table uses: for adaptation 0.0002, "
        "0.0004 and 0.0008 had been declared, and the first nine trials (vanilla, sink, gate) all chose the largest.",
        "**Rates that differ.** The DLM's trials chose 0.0016, the sink's 0.0008, so that a difference between the two may "
        "be the rate's. The DLM at the sink's rate was added as a control, after these trials and one seed had been seen; "
        "the sink at the DLM's rate after all seeds of both, when the sink's trial at this rate had been seen to lose its "
        f"sink within a few steps (below): a trial has {trial} steps to warm up, and a run {whole}. Other claims whose "
        "variants chose different rates are listed with the rates; these two controls also stand beside variants that had "
        "their rate from the beginning (below, exploratory).",
        "**Changed before any run**: seeds from scratch and after fine-tuning (five had been declared, three were made), "
        "tokens of an adapted run (26M had been), and the corpus, of which half the files were taken, so that a run reads "
        "nearly all of it once.",
        "**Lengths.** Half of the rows of random length, with and without a sink, on one seed, and documents cut to "
        f"{', '.join(map(str, scale.cuts))} tokens for adapted models of seed {FIRST_SEED}, were added "
        f"after three seeds of table 1 had been seen, to explain them. {_short_rows(scale)}",
        "**Gate.** Both with the paper's plain init, whose gates start near one half, and with one that starts open and "
        "keeps the parent's function; this one had been declared with as many seeds as the first, which was changed before "
        "any of its runs.",
        f"**Validation.** {scale.documents} documents of a validation split that was split by document, each cut to a row; "
        f"exact-k with {scale.draws} masks, the same masks for every run.",
        f"**Tasks.** {asked}; exact-k, {scale.draws} draws, no guidance, the harness's prompts, without "
        "examples; GSM8K's answers are written by the official sampler, and compared as numbers. The table 1 "
        "twins of the first seed are also scored with the official settings (128 draws or the chain rule, guidance), on "
        f"the first questions of each task: {', '.join(f'{task} {most}' for task, most in scale.official.items())}. All of "
        "them had been declared, which was changed before any such run.",
        f"**Contamination.** {GRAM}-grams of words (letters and digits, lower case) that the corpus shares with each "
        "benchmark's documents are counted. Nothing is removed: the corpus is the same for every variant.",
    ]


def _short_rows(scale: Scale) -> str:
    """How little of training is short where lengths are drawn evenly: what such a run can refute is limited by it."""
    length, share = scale.tables[ADAPT]["data"]["length"], VARIANTS["sink-lengths"].changes["data"]["random_lengths"]
    short = length // 8
    left = (1 - share) * length + share * (length + 1) / 2
    tokens = share * short / length * (short + 1) / 2
    return (
        f"A cut row loses what is behind the cut: {left / length:.0%} of the tokens are left (tables count rows as whole), and "
        f"rows of at most {short} tokens are {share * short / length:.0%} of the rows and {tokens / left:.1%} of the tokens."
    )


def _matrix(scale: Scale) -> str:
    rows = []
    pairs = {(group, variant): None for target in TARGETS.values() for group, names in target.runs.items() for variant in names}
    for group, variant in sorted(pairs, key=lambda pair: ((ADAPT, SCRATCH, SFT).index(pair[0]), list(VARIANTS).index(pair[1]))):
        used = [name for name, target in TARGETS.items() if variant in target.runs.get(group, ())]
        changes = ", ".join(f"{key} = {value}" for key, value in flatten(VARIANTS[variant].changes).items())
        seeds = seeds_of(group, variant, scale, scale.seeds)
        first = Job(group, variant, FIRST_SEED).name
        names = f"`{first}`" if seeds == 1 else f"`{first}` to `-s{FIRST_SEED + seeds - 1}`"
        rows.append(
            [group, LABELS[variant], f"`{changes}`" if changes else "", str(seeds), names, ", ".join(used), _added(variant)]
        )
    return table(["group", "variant", "changes", "seeds", "results", "used in", "added"], rows)


def _added(variant: str) -> str:
    return "late" if VARIANTS[variant].rate_of else ""


def _claims() -> str:
    rows = []
    for claim in CLAIMS:
        if claim.against:
            sign = "is within the margin of" if claim.kind == SAME else "is lower than"
            said = "" if claim.outcomes == PRIMARY else f" in {', '.join(map(outcome_name, claim.outcomes))}"
            test = f"{claim.group}: {claim.variant} {sign} {claim.against}{said}"
        else:
            names = ", ".join(name.removeprefix("attention.") for name in claim.outcomes)
            test = f"{claim.group}: {names} of {claim.variant} is {claim.kind} {claim.bound:g}"
        rows.append([claim.target, claim.text, test, "late" if claim.late else ""])
    return table(["", "claim", "holds if", "added"], rows)


def _rules() -> list[str]:
    return [
        "*Lower* holds where the whole interval is below 0; does not hold where it is above 0, or where all of it is "
        f"closer to 0 than {MARGIN} nats; else it cannot be told.",
        "*The same* holds where the two one-sided tests say so; does not hold where the interval lies outside the margin; "
        "else it cannot be told.",
        "A claim holds where each of its outcomes does, and does not hold where any does not. So *lower* can fail by a "
        "difference that counts as none where *the same* is claimed: which outcome failed, and by how much, is told.",
        "A share of heads is judged as nats are.",
    ]


def _deviations(scale: Scale) -> list[str]:
    adapt, scratch, sft = (scale.tables[group] for group in (ADAPT, SCRATCH, SFT))
    tokens = {
        group: scale.tables[group]["train"].get("steps", 0) * scale.tables[group]["train"]["batch"] for group in (ADAPT, SCRATCH)
    }
    told = {group: rows * scale.tables[group]["data"]["length"] / 1e6 for group, rows in tokens.items()}
    return [
        "**Model.** SmolLM2-135M-Instruct from a 4-bit GGUF file, not Qwen2.5-0.5B and 1.5B; from scratch "
        f"{scratch['model']['preset']} with SmolLM2's vocabulary, not 472M with Llama 2's.",
        f"**Tokens.** {told[ADAPT]:.0f}M adapted and {told[SCRATCH]:.0f}M from scratch, rows of {adapt['data']['length']}; the "
        "paper has 30B, 100B and 100B, and does not give its rows' length for the first two.",
        "**Data.** English Wikipedia and novels, 10,160 documents with 42.3M tokens and 531 held out (half the files of a corpus "
        "that is not part of this project; results carry its fingerprint, and other data does not stand beside them), not FineWeb "
        f"and SlimPajama: adapted runs read nearly all of it once, those from scratch {told[SCRATCH] / 42.3:.1f} times.",
        f"**Fine-tuning.** GSM8K's own 6,973 chains of thought, less a twentieth that is held out and what is longer than "
        f"{sft['data']['length']} tokens, for {sft['train']['epochs']} epochs, not 385K augmented ones for 10; of adapted models "
        "alone: the paper's table 2 has GSM8K too.",
        f"**Figures.** Attention is that of our own adapted models, along {scale.trajectories} answers of {scale.written} tokens, "
        "a token a step, to the built-in prompts of `sinkdlm analyze` (word problems, code, letters, beginnings of texts), whose "
        "guide says what each quantity is. The paper has LLaDA and Dream on GSM8K and HumanEval for figure 1, and 100K steps on "
        "GSM8K, of fine-tuned models alone, for figure 3.",
        "**Assumed where the paper is silent**: no logit shift, full attention at once, several sinks see only themselves, sinks "
        "begin as the mean embedding plus noise, no examples in prompts.",
        "**t** is spread evenly over samples (golden ratio), not drawn independently.",
        "**Always visible first token**: the id that ends documents replaces the first token of every row and is never masked; at "
        "evaluation it stands before prompts and documents.",
    ]


def _commands() -> str:
    asked = "--tasks " + ",".join(SCALES[SCALE].tasks) + " --data bench --estimator exact_k --draws 16 --guidance 0"
    tokens = "--tokenizer SmolLM2-135M.gguf"
    kept = "--records benchmarks/results/reproduction"
    common = "--scale small --parent SmolLM2-135M.gguf --corpus data/corpus --sft data/gsm8k --requests requests.jsonl"
    lines = [
        "# the machinery, on generated data: minutes on a CPU",
        "sinkdlm reproduce all --scale nano --out runs/reproduce-nano",
        "# once, on a machine with the harness",
        f"sinkdlm data prepare corpus/ {tokens} --validation 0.05 --out data/corpus",
        f"sinkdlm data prepare gsm8k_cot_train.txt --kind gsm8k-two-stage {tokens} --validation 0.05 --out data/gsm8k",
        f"sinkdlm eval --write-requests requests.jsonl {asked}",
        f"python -m studies.overlap --scale small --corpus corpus/ --requests requests.jsonl {kept}",
        f"python -m studies.inherited --scale small --parent SmolLM2-135M.gguf --corpus data/corpus {kept}",
        f"python -m studies.lengths --scale small --parent SmolLM2-135M.gguf --requests requests.jsonl {kept}",
        "# on the GPU, as often as needed: finished runs are skipped. Started several times at once, on one GPU or",
        "# on several, processes with the same --out share the runs among themselves (three trials fit on an H200)",
        f"sinkdlm reproduce all {common} {kept} --official --time-limit 540",
        f"sinkdlm reproduce all {common} {kept} --official --plan",
        f"python -m studies.steadiness --scale small --parent SmolLM2-135M.gguf --corpus data/corpus {kept}",
        "# this page",
        "python -m benchmarks.reproduction",
    ]
    return "```sh\n" + "\n".join(lines) + "\n```"


# -- results ----------------------------------------------------------------------------------------------------------------------


def outcome(scale: Scale, results: Mapping[str, RunResult], folder: Path, assets: Path) -> list[str]:
    jobs = jobs_of(list(TARGETS), scale, scale.seeds)
    missing = [job.name for job in jobs if job.name not in results]
    found = findings(list(TARGETS), scale, results, missing)
    blocks = ["## Results", *_missing(jobs, missing, _unmeasured(jobs, results, scale))]
    blocks += overlap_blocks(read_beside(folder, OVERLAP, scale.name))
    if not results:
        return blocks
    blocks += ["### Verdicts", verdicts(found), *_negative(found), *_picture(VERDICTS, assets)]
    for target, one in found["targets"].items():
        if any(row["seeds"] for row in one["rows"]):
            blocks += [*_deeper(target_blocks(target, one)), *_picture(target, assets)]
    blocks += equal_rate_blocks(equal_rate_rows(results))
    before = read_beside(folder, INHERITED, scale.name)
    if before is not None:
        blocks += inherited_blocks(before)
    blocks += lengths_blocks(results, read_beside(folder, LENGTHS, scale.name), scale)
    blocks += steadiness_blocks(read_beside(folder, STEADINESS, scale.name), results, _picture(STEADINESS, assets))
    return [*blocks, *_deeper([*rate_blocks(found), *work_blocks(found)])]


def _deeper(blocks: Sequence[str]) -> list[str]:
    """Headings of a report, one level further down."""
    return [f"#{block}" if block.startswith("#") else block for block in blocks]


def _picture(place: str, assets: Path) -> list[str]:
    name, text = PICTURES.get(place, ("", ""))
    return [f"![{text}](assets/{name})"] if name and (assets / name).exists() else []


def _unmeasured(jobs: Sequence[Job], results: Mapping[str, RunResult], scale: Scale) -> list[str]:
    """Of each run that has a result: what was declared to be measured of it, and is not there."""
    lines = []
    for job in jobs:
        if job.name in results:
            lacks = [stage for stage in stages_declared(job, scale) if stage not in results[job.name].facts["seconds"]]
            lines += [f"{job.name}: {', '.join(lacks)}"] if lacks else []
    return lines


def _missing(jobs: Sequence[Job], missing: list[str], unmeasured: list[str]) -> list[str]:
    lacks = ["Not everything was measured of these runs:", bullets(unmeasured)] if unmeasured else []
    late = {job.name for job in jobs if VARIANTS[job.variant].rate_of}
    whole = "All runs are there" if unmeasured else "The matrix is complete"
    if not missing:
        return [f"{whole}: {len(jobs)} runs, trials included.", *lacks]
    groups: dict[str, list[str]] = {}
    for name in missing:
        run, _, end = name.rpartition("-")
        groups.setdefault(run, []).append(end)
    lines = [f"{run}: {', '.join(ends)}" for run, ends in groups.items()]
    told = f"{len(missing)} of {len(jobs)} runs are missing (lr: trials, s: seeds):"
    if late.issuperset(missing):
        told = (
            f"{whole} but for what was added late: {len(jobs) - len(late)} runs, trials included. "
            f"Of {len(late)} later ones these are missing (s: seeds):"
        )
    return [told, bullets(lines), *lacks]


_NAMED = 3  # claims without a verdict: more are seen in the table


def _negative(found: Mapping[str, Any]) -> list[str]:
    rows = [(target, claim) for target, one in found["targets"].items() for claim in one["claims"]]
    fails = [f"{target}: {claim['text']} ({_by_outcome(claim)})" for target, claim in rows if claim["verdict"] == FAILS]
    told = ((OPEN, "cannot be told at this scale"), (FEW, "have too few seeds so far"))
    counts = [(sum(claim["verdict"] == verdict for _, claim in rows), words) for verdict, words in told]
    alone = sum(claim["verdict"] == FAILS and _fails(claim) == 1 for _, claim in rows)
    said = [f"{count} of {len(rows)} claims {words}." for count, words in counts if count]
    few = [f"{target}: {claim['text']}" for target, claim in rows if claim["verdict"] == FEW]
    said += [f"These have too few: {'; '.join(few)}."] if 0 < len(few) <= _NAMED else []
    if not fails:
        return [" ".join([*said, "None is contradicted."])]
    said.append(f"{len(fails)} do not hold, {'all' if alone == len(fails) else alone} of them on one outcome alone:")
    return [" ".join(said), bullets(fails)]


def _fails(claim: Mapping[str, Any]) -> int:
    return sum(one["verdict"] == FAILS for one in claim["outcomes"])


def _by_outcome(claim: Mapping[str, Any]) -> str:
    """One outcome that says no is enough by the rule; what the others say belongs to it."""
    return "; ".join(f"{outcome_name(one['outcome'])}: {one['verdict']}" for one in claim["outcomes"])
