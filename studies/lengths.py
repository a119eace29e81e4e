"""At which row lengths does the sink lead? Training rows all have one length; questions are much shorter.

Counts the tokens of every question, so that stored scores can be grouped by length. Shows documents cut to several lengths, and
whether training on rows of random length removes a lead on short ones. Explains; no claim rests on it.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import correlation
from typing import Any, NamedTuple

import numpy as np

from sinkdlm.errors import ReproduceError
from sinkdlm.evals.encoding import TextEncoder
from sinkdlm.evals.requests import by_question
from sinkdlm.reproduce.claims import MARGIN, NELBO, pair, runs_of
from sinkdlm.reproduce.inputs import GOLD, Asked, parent_tokenizer
from sinkdlm.reproduce.markdown import table
from sinkdlm.reproduce.matrix import ADAPT, FIRST_SEED, LABELS, SCALES, VARIANTS, Scale, difference
from sinkdlm.reproduce.measuring import ENDS, ROWS, WRITES
from sinkdlm.reproduce.results import Outcome, RunResult, read_results
from sinkdlm.reproduce.statistics import LEVEL, Paired, over_seeds, pair_items
from studies.asking import questions, run_study, write_beside

NAME = "lengths"
Pair = tuple[str, str]  # variants without and with a sink
Results = Mapping[str, RunResult]
BASE, OTHER = "vanilla-sink-rate", "sink"  # same learning rate, with and without
PLAIN: Pair = (BASE, OTHER)
MIXED: Pair = ("vanilla-lengths", "sink-lengths")
_TRAINED = {PLAIN: "rows of one length", MIXED: "half of random length"}  # in training
_REACH = 1.96  # standard errors: LEVEL, over many documents
_EDGES = (0, 32, 64, 128, 256, 512)
_RANGES = ["", *(f"{low} to {high - 1}" for low, high in pairwise(_EDGES)), f"{_EDGES[-1]} and more"]
_FEWEST = 50  # questions that make a cell
_FEW = 5  # models, below which ranks say nothing
_ROOM = 1 << 15  # tokens of a row; no question is cut


def count_lengths(asked: Asked) -> dict[str, Any]:
    """Of every question with a known correct option: tokens of prompt and option together, and of the option."""
    sheet = questions(asked)
    encoder = TextEncoder(parent_tokenizer(asked.parent))
    tasks = {}
    for task, most in SCALES[asked.scale].tasks.items():
        own = [one for one in sheet.requests if one.task == task and (most is None or one.doc < most) and one.continuation]
        gold = sheet.about[GOLD].get(task)
        right = [question[gold[question[0].doc]] for question in by_question(own) if gold[question[0].doc] is not None]
        if right:
            rows = encoder.pairs(right, _ROOM)
            counts = {"tokens": [len(row.tokens) for row in rows], "scored": [len(row.tokens) - row.n_given for row in rows]}
            tasks[task] = {name: Outcome.of_items(values, len(rows)).to_json() for name, values in counts.items()}
    return write_beside(asked, NAME, {"requests": sheet.digest, "tasks": tasks})


class Cell(NamedTuple):
    """One task and range of lengths: number of questions, and other - base of each seed, nats per token."""

    n: int
    leads: list[float]

    def __str__(self) -> str:
        if not self.leads:
            return ""
        seeds = f"{min(self.leads):+.3f} to {max(self.leads):+.3f}; " if len(self.leads) > 1 else ""
        return f"{over_seeds(self.leads).mean:+.3f} ({seeds}{self.n:,})"


def leads(results: Results, counted: Mapping[str, Any], of: Pair = PLAIN) -> dict[str, list[Cell]]:
    """Task -> a cell for each range of lengths."""
    for result in results.values():
        if "requests" in counted and result.data.get("requests", counted["requests"]) != counted["requests"]:
            odd = f"counted of other questions than those of {result.name}"
            raise ReproduceError(f"{NAME}: {odd}; count again with: python -m studies.{NAME}")
    found: dict[str, list[Cell]] = {}
    for task, lengths in counted["tasks"].items():
        tokens, scored = (Outcome.from_json(lengths[name]).values for name in ("tokens", "scored"))
        asked = [both for both in _pairs(results, of) if all(f"{task}.nll" in run.outcomes for run in both)]
        values = [[run.outcomes[f"{task}.nll"].values for run in both] for both in asked]
        cells = found[task] = []
        for low, high in pairwise((*_EDGES, math.inf)):
            kept = (tokens >= low) & (tokens < high)
            n, units = int(kept.sum()), float(scored[kept].sum())
            cells.append(Cell(n, [pair_items(one[kept], two[kept], units).difference for one, two in values if n >= _FEWEST]))
    return found


def _pairs(results: Results, of: Pair) -> list[tuple[RunResult, RunResult]]:
    """Both runs of each seed that has both."""
    base, other = (runs_of(results, ADAPT, variant) for variant in of)
    return [(base[seed], other[seed]) for seed in base if seed in other]


def lengths_blocks(results: Results, counted: Mapping[str, Any] | None, scale: Scale) -> list[str]:
    asked = [] if counted is None else [*_questions(results, counted, scale), *_questions_again(results, counted)]
    return [*asked, *_cuts(results, scale), *_tested(results, scale)]


def _questions(results: Results, counted: Mapping[str, Any], scale: Scale) -> list[str]:
    found = leads(results, counted)
    if not any(cell.leads for cells in found.values() for cell in cells):
        return []
    whole = over_seeds([one.difference for both in _pairs(results, PLAIN) if (one := pair(*both, NELBO)) is not None])
    length = scale.tables[ADAPT]["data"]["length"]
    told = (
        f"{difference(OTHER, BASE)}, NLL of the correct option, nats/token, by tokens of question and option: "
        f"mean over {whole.n} seeds (lowest to highest seed; questions). On held-out rows of {length} tokens: {whole.mean:+.4f}."
    )
    return [told, table(_RANGES, [[task, *map(str, cells)] for task, cells in found.items()])]


def _questions_again(results: Results, counted: Mapping[str, Any]) -> list[str]:
    """Both pairs on one seed: leads differ more between seeds than between pairs."""
    first = {name: one for name, one in results.items() if one.seed == FIRST_SEED}
    both = {of: leads(first, counted, of) for of in _TRAINED}
    if not all(any(cell.leads for cells in found.values() for cell in cells) for found in both.values()):
        return []
    rows = [[f"{task}, {had}", *map(str, both[of][task])] for task in counted["tasks"] for of, had in _TRAINED.items()]
    told = f"The same on seed {FIRST_SEED} alone, for both pairs: trained on rows of one length, or half of random length."
    return [told, table(_RANGES, rows)]


def _kinds(scale: Scale) -> dict[str, str]:
    return {ROWS: "all tokens of a row", ENDS: f"the last {scale.cuts[0] // 2} tokens of a row, given the others"}


def _cuts(results: Results, scale: Scale) -> list[str]:
    made = {
        run.variant: run
        for variant in VARIANTS
        if (run := runs_of(results, ADAPT, variant).get(FIRST_SEED)) is not None and f"{ROWS}.{scale.cuts[-1]}" in run.outcomes
    }
    base = made.get(BASE)
    if base is None or len(made) < 2:
        return []
    head = ["", *map(str, scale.cuts)]
    blocks = []
    for kind, text in _kinds(scale).items():
        names = [f"{kind}.{length}" for length in scale.cuts]
        others = [
            [LABELS[one], *(_with_reach(pair(base, run, name)) for name in names)] for one, run in made.items() if one != BASE
        ]
        blocks += [
            f"NELBO in nats/token of held-out documents cut to each length, {text}, seed {FIRST_SEED}. Below the first line: "
            f"difference from it, with the {LEVEL:.0%} interval over documents.",
            table(head, [[f"{LABELS[BASE]}: NELBO", *(_value(base, name) for name in names)], *others]),
        ]
    names = [f"attention.{WRITES}.{length}" for length in scale.cuts]
    rows = [[LABELS[one], *(_value(run, name) for name in names)] for one, run in made.items() if names[-1] in run.outcomes]
    told = f"Attention output norm / mean value norm at each length, seed {FIRST_SEED}:"
    return [*blocks, told, table(head, rows), *_together(made, scale)]


def _value(run: RunResult, outcome: str) -> str:
    found = run.outcomes.get(outcome)
    return "" if found is None else f"{found.value:.3f}"


def _with_reach(found: Paired | None) -> str:
    return "" if found is None else f"{found.difference:+.3f} \N{PLUS-MINUS SIGN} {_REACH * found.stderr:.3f}"


def _together(made: Results, scale: Scale) -> list[str]:
    """Does a larger output norm on short rows go with a larger loss there? Without models trained on rows of random length."""
    short, long = scale.cuts[0], scale.cuts[-1]
    names = [f"{name}.{length}" for name in (ROWS, f"attention.{WRITES}") for length in (short, long)]
    found = []
    for variant, run in made.items():
        if "random_lengths" not in VARIANTS[variant].changes.get("data", {}) and run.outcomes.keys() >= set(names):
            lost, lost_long, wrote, wrote_long = (run.outcomes[name].value for name in names)
            found.append((lost - lost_long, wrote / wrote_long))
    if len(found) < _FEW:
        return []
    ranks = np.argsort(np.argsort(np.array(found), axis=0), axis=0)  # Spearman's correlation: no two values are equal
    together = correlation(*ranks.T.tolist())
    return [
        f"Rank correlation between the increase of NELBO and that of the output norm, from {long} to {short} tokens, over the "
        f"{len(found)} models trained on rows of {long} tokens alone: {together:.2f}."
    ]


class Lead(NamedTuple):
    """One length and seed, nats per token over the same documents. plain, mixed: other - base of each pair. change: mixed - plain,
    above 0 where rows of random length made the sink's lead smaller."""

    plain: Paired
    mixed: Paired
    change: Paired


def lead_at(results: Results, outcome: str) -> Lead | None:
    runs = [runs_of(results, ADAPT, variant).get(FIRST_SEED) for variant in (*PLAIN, *MIXED)]
    found = [run.outcomes[outcome] for run in runs if run is not None and outcome in run.outcomes]
    if len(found) < len(runs):
        return None
    base, other, mixed_base, mixed_other = (one.values for one in found)
    pairs = (base, other), (mixed_base, mixed_other), (other - base, mixed_other - mixed_base)
    return Lead(*(pair_items(one, two, found[0].units) for one, two in pairs))


def conclude(short: Lead, long: Lead) -> str:
    """Is length the cause of the lead? From the leads at the shortest cut and at training's length; intervals over documents."""
    grows = short.plain.difference - long.plain.difference
    if grows + _REACH * math.hypot(short.plain.stderr, long.plain.stderr) >= 0:
        return "the lead is not larger on short rows: length alone does not explain the lead on questions"
    if short.change.difference - _REACH * short.change.stderr <= 0:
        return "the lead on short rows stays, which speaks against length as the cause, as far as so few short rows can"
    if short.mixed.difference + _REACH * short.mixed.stderr < -MARGIN:
        return "part of the lead on short rows goes: length is part of the cause; so few short rows cannot show whether it is all"
    return "the lead on short rows goes, as it should if length is the cause"


def _tested(results: Results, scale: Scale) -> list[str]:
    blocks = []
    labels = {"plain": _TRAINED[PLAIN], "mixed": _TRAINED[MIXED], "change": "second \N{MINUS SIGN} first"}
    for kind, text in _kinds(scale).items():
        found = [lead_at(results, f"{kind}.{length}") for length in scale.cuts]
        short, long = found[0], found[-1]
        if short is None or long is None:
            continue
        rows = [[label, *(_with_reach(getattr(one, name, None)) for one in found)] for name, label in labels.items()]
        blocks += [
            f"Lead of the sink, NELBO with \N{MINUS SIGN} without it, {text}, seed {FIRST_SEED}, by training rows, with the "
            f"{LEVEL:.0%} interval over documents. With half of the training rows of random length, {conclude(short, long)}.",
            table(["", *map(str, scale.cuts)], rows),
        ]
    return blocks


def main(words: Sequence[str] | None = None) -> None:
    def section(asked: Asked, counted: Mapping[str, Any]) -> list[str]:
        return lengths_blocks(read_results(asked.folder, asked.scale), counted, SCALES[asked.scale])

    run_study(__doc__ or "", count_lengths, section, words)


if __name__ == "__main__":
    main()
