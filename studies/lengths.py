"""Where a lead is: by how many tokens a row has. Rows of training all have the same length; questions are much shorter.

Counts the tokens of every question once, beside the results, so that the scores that results keep of single items can be put
together by length; and shows documents that were cut to several lengths, and whether a lead on short ones goes where training had
short rows. Explains; no claim rests on it.
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
from sinkdlm.reproduce.matrix import ADAPT, FIRST_SEED, LABELS, SCALES, VARIANTS, Scale
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
_TRAINED = {PLAIN: "rows of one length", MIXED: "half of random length"}  # what training had
_REACH = 1.96  # standard errors: LEVEL, over many documents
_EDGES = (0, 32, 64, 128, 256, 512)
_RANGES = ["", *(f"{low} to {high - 1}" for low, high in pairwise(_EDGES)), f"{_EDGES[-1]} and more"]
_FEWEST = 50  # questions that make a cell
_FEW = 5  # models, below which ranks say nothing
_ROOM = 1 << 15  # tokens of a row; no question is cut


# -- how long questions are -------------------------------------------------------------------------------------------------------


def count_lengths(asked: Asked) -> dict[str, Any]:
    """Of every question whose right option is known, as results keep them: tokens of prompt and right option, and of the option."""
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


# -- leads by length --------------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """Of one task and range of lengths: how many questions, and of each seed the lead, other - base, nats a token."""

    n: int
    leads: list[float]

    def __str__(self) -> str:
        if not self.leads:
            return ""
        seeds = f"{min(self.leads):+.3f} to {max(self.leads):+.3f}; " if len(self.leads) > 1 else ""
        return f"{over_seeds(self.leads).mean:+.3f} ({seeds}{self.n:,})"


def leads(results: Results, counted: Mapping[str, Any], of: Pair = PLAIN) -> dict[str, list[Cell]]:
    """Task -> a cell for each range of lengths."""
    for result in results.values():  # lengths of other questions would be put beside the scores without a word
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
    blocks = [*asked, *_cuts(results, scale), *_tested(results, scale)]
    return ["### Examined: rows shorter than those of training", *blocks] if blocks else []


def _questions(results: Results, counted: Mapping[str, Any], scale: Scale) -> list[str]:
    found = leads(results, counted)
    if not any(cell.leads for cells in found.values() for cell in cells):
        return []
    whole = over_seeds([one.difference for both in _pairs(results, PLAIN) if (one := pair(*both, NELBO)) is not None])
    length = scale.tables[ADAPT]["data"]["length"]
    told = (
        f"{LABELS[OTHER]} \N{MINUS SIGN} {LABELS[BASE]}, NLL of the right option in nats a token, by how many tokens the "
        f"question has with its option; mean over {whole.n} seeds, from which value to which they go, and how many questions. "
        f"Training had rows of {length} tokens alone; there, on held-out documents, the difference is {whole.mean:+.4f}. Found "
        "after the runs, not declared before:"
    )
    return [told, table(_RANGES, [[task, *map(str, cells)] for task, cells in found.items()])]


def _questions_again(results: Results, counted: Mapping[str, Any]) -> list[str]:
    """Both pairs on the same seed: leads of one seed and another differ more than what is looked for."""
    first = {name: one for name, one in results.items() if one.seed == FIRST_SEED}
    both = {of: leads(first, counted, of) for of in _TRAINED}
    if not all(any(cell.leads for cells in found.values() for cell in cells) for found in both.values()):
        return []
    rows = [[f"{task}, {had}", *map(str, both[of][task])] for task in counted["tasks"] for of, had in _TRAINED.items()]
    told = f"The same of seed {FIRST_SEED} alone, beside the pair whose training had rows of random length as well:"
    return [told, table(_RANGES, rows)]


# -- documents that were cut ------------------------------------------------------------------------------------------------------


def _kinds(scale: Scale) -> dict[str, str]:
    last = f"the last {scale.cuts[0] // 2} tokens of rows, given the others: the same tokens at every length"
    return {ROWS: "whole rows", ENDS: last}


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
            f"Held-out documents cut to so many tokens, seed {FIRST_SEED}, {text}. NELBO in nats a token of the "
            f"{LABELS[BASE]}, and what others have more or less, with the {LEVEL:.0%} interval over documents:",
            table(head, [[f"{LABELS[BASE]}: NELBO", *(_value(base, name) for name in names)], *others]),
        ]
    names = [f"attention.{WRITES}.{length}" for length in scale.cuts]
    rows = [[LABELS[one], *(_value(run, name) for name in names)] for one, run in made.items() if names[-1] in run.outcomes]
    told = (
        "What heads write at each length: the norm of their output, of the mean norm of the values that they mix, over all "
        "heads and layers, half of the tokens masked:"
    )
    return [*blocks, told, table(head, rows), *_together(made, scale)]


def _value(run: RunResult, outcome: str) -> str:
    found = run.outcomes.get(outcome)
    return "" if found is None else f"{found.value:.3f}"


def _with_reach(found: Paired | None) -> str:
    return "" if found is None else f"{found.difference:+.3f} \N{PLUS-MINUS SIGN} {_REACH * found.stderr:.3f}"


def _together(made: Results, scale: Scale) -> list[str]:
    """Whether models whose heads write more on short rows lose more there. Those that training gave short rows are left out."""
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
        f"Models whose heads write more at {short} tokens than at {long} {'lose' if together > 0 else 'do not lose'} more "
        f"there: over the {len(found)} whose training had rows of {long} tokens alone, the rank correlation of the two is "
        f"{together:.2f}."
    ]


# -- is it the length? ------------------------------------------------------------------------------------------------------------


class Lead(NamedTuple):
    """Of one length and seed, nats a token over the same documents. plain, mixed: other - base of each pair; change: mixed less
    plain, above 0 where rows of random length made the sink's lead smaller."""

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
    """What the leads at the shortest cut and at rows of training say of length as a cause. Intervals are over documents alone."""
    grows = short.plain.difference - long.plain.difference
    if grows + _REACH * math.hypot(short.plain.stderr, long.plain.stderr) >= 0:
        return "the lead is not larger on short rows of documents, so that it is not length by itself that questions share"
    if short.change.difference - _REACH * short.change.stderr <= 0:
        return (
            "the lead on short rows stays after training on rows of random length, which speaks against length as the cause, as "
            "far as so few short rows can"
        )
    if short.mixed.difference + _REACH * short.mixed.stderr < -MARGIN:
        return (
            "rows of random length take a part of the lead on short rows away, and not all: length is a part of it, whether all "
            "cannot be said with so few short rows in training"
        )
    return "rows of random length take the lead on short rows away, as they should if length is the cause"


def _tested(results: Results, scale: Scale) -> list[str]:
    blocks = []
    labels = {"plain": _TRAINED[PLAIN], "mixed": _TRAINED[MIXED], "change": "the second less the first"}
    for kind, text in _kinds(scale).items():
        found = [lead_at(results, f"{kind}.{length}") for length in scale.cuts]
        short, long = found[0], found[-1]
        if short is None or long is None:
            continue
        rows = [[label, *(_with_reach(getattr(one, name, None)) for one in found)] for name, label in labels.items()]
        blocks += [
            f"DLM + sink \N{MINUS SIGN} the same without, by what training had, seed {FIRST_SEED}, {text}, with the "
            f"{LEVEL:.0%} interval over documents. On this seed, {conclude(short, long)}. Other seeds may differ by more "
            "than such intervals:",
            table(["", *map(str, scale.cuts)], rows),
        ]
    return blocks


def main(words: Sequence[str] | None = None) -> None:
    def section(asked: Asked, counted: Mapping[str, Any]) -> list[str]:
        return lengths_blocks(read_results(asked.folder, asked.scale), counted, SCALES[asked.scale])

    run_study(__doc__ or "", count_lengths, section, words)


if __name__ == "__main__":
    main()
