"""Where a lead is: by how many tokens a row has. Rows of training all have the same length; questions are much shorter.

Counts the tokens of every question once, beside the records, so that the scores that records keep of single items can be put
together by length; and shows documents that were cut to several lengths, and whether a lead on short ones goes where training had
short rows. Explains; no claim rests on it.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sinkdlm.errors import ReproduceError
from sinkdlm.evals.encoding import TextEncoder
from sinkdlm.evals.requests import by_question
from sinkdlm.reproduce.blocks import Block, Heading, Paragraph, Table
from sinkdlm.reproduce.claims import MARGIN, NELBO, pair, runs_of
from sinkdlm.reproduce.inputs import GOLD, Given, parent_tokenizer, read_questions
from sinkdlm.reproduce.matrix import ADAPT, FIRST_SEED, LABELS, SCALES, VARIANTS, Scale
from sinkdlm.reproduce.measuring import ENDS, ROWS, WRITES
from sinkdlm.reproduce.results import Outcome, Record
from sinkdlm.reproduce.statistics import LEVEL, Paired, over_seeds, pair_items
from studies.asking import run_study, write_beside

NAME = "lengths"
Pair = tuple[str, str]  # variants without and with a sink
BASE, OTHER = "vanilla-sink-rate", "sink"  # same learning rate, with and without
PLAIN: Pair = (BASE, OTHER)
MIXED: Pair = ("vanilla-lengths", "sink-lengths")
_TRAINED = {PLAIN: "rows of one length", MIXED: "half of random length"}  # what training had
_REACH = 1.96  # standard errors: LEVEL, over many documents
_EDGES = (0, 32, 64, 128, 256, 512)
_FEWEST = 50  # questions that make a cell


# -- how long questions are -------------------------------------------------------------------------------------------------------


def count_lengths(given: Given, records: Path, scale: Scale) -> dict[str, Any]:
    """Of every question whose right option is known, as records keep them: tokens of prompt and right option, and of the option."""
    sheet = read_questions(given, scale)
    if sheet is None:
        raise ReproduceError(
            "--data or --requests: which questions? give the benchmarks' files, or what eval --write-requests wrote"
        )
    encoder = TextEncoder(parent_tokenizer(given))
    tasks = {}
    for task, most in scale.tasks.items():
        own = [one for one in sheet.requests if one.task == task and (most is None or one.doc < most) and one.continuation]
        gold = sheet.about[GOLD].get(task)
        right = [question[gold[question[0].doc]] for question in by_question(own) if gold[question[0].doc] is not None]
        if right:
            rows = encoder.pairs(right, _ROOM)
            tokens = Outcome.of_items([len(row.tokens) for row in rows], len(rows))
            scored = Outcome.of_items([len(row.tokens) - row.n_given for row in rows], len(rows))
            tasks[task] = {"tokens": tokens.to_json(), "scored": scored.to_json()}
    found = {"requests": sheet.digest, "tasks": tasks}
    return write_beside(records, NAME, scale.name, found)


_ROOM = 1 << 15  # tokens of a row; no question is cut


# -- leads by length --------------------------------------------------------------------------------------------------------------


def leads(records: Mapping[str, Record], counted: Mapping[str, Any], of: Pair = PLAIN) -> list[dict[str, Any]]:
    """Rows with a value for each range of lengths: of each seed, other - base, nats a token; and how many questions."""
    _check_questions(records, counted)
    found = []
    for task, said in counted["tasks"].items():
        tokens, scored = (Outcome.from_json(said[name]).values for name in ("tokens", "scored"))
        asked = [both for both in _pairs(records, of) if all(f"{task}.nll" in run.outcomes for run in both)]
        cells = []
        for low, high in pairwise((*_EDGES, math.inf)):
            kept = (tokens >= low) & (tokens < high)
            lead = [_lead(*both, f"{task}.nll", kept, scored) for both in asked] if kept.sum() >= _FEWEST else []
            cells.append({"n": int(kept.sum()), "seeds": lead, "spread": over_seeds(lead)})
        found.append({"task": task, "cells": cells})
    return found


def _check_questions(records: Mapping[str, Record], counted: Mapping[str, Any]) -> None:
    """Lengths of other questions, or of the same ones in another order, would be put beside the scores without a word."""
    for record in records.values():
        if "requests" in counted and record.data.get("requests", counted["requests"]) != counted["requests"]:
            raise ReproduceError(
                f"{NAME}: counted of other questions than those of {record.name}; count again with: python -m studies.{NAME}"
            )


def _pairs(records: Mapping[str, Record], of: Pair) -> list[tuple[Record, Record]]:
    """Both runs of each seed that has both."""
    base, other = (runs_of(records, ADAPT, variant) for variant in of)
    return [(base[seed], other[seed]) for seed in base if seed in other]


def _lead(base: Record, other: Record, outcome: str, kept: np.ndarray, scored: np.ndarray) -> float:
    one, two = (run.outcomes[outcome].values[kept] for run in (base, other))
    return pair_items(one, two, float(scored[kept].sum())).difference


def lengths_blocks(records: Mapping[str, Record], counted: Mapping[str, Any] | None, scale: Scale, level: int) -> list[Block]:
    questions = [] if counted is None else [*_questions(records, counted, scale), *_questions_again(records, counted)]
    cuts = [*_cuts(records, scale), *_tested(records, scale)]
    if not questions and not cuts:
        return []
    return [Heading(level, "Examined: rows shorter than those of training"), *questions, *cuts]


_RANGES = ["", *(f"{low} to {high - 1}" for low, high in pairwise(_EDGES)), f"{_EDGES[-1]} and more"]


def _questions(records: Mapping[str, Record], counted: Mapping[str, Any], scale: Scale) -> list[Block]:
    rows = [[row["task"], *map(_cell, row["cells"])] for row in leads(records, counted)]
    if not any(cell for row in rows for cell in row[1:]):
        return []
    documents = [pair(*both, NELBO) for both in _pairs(records, PLAIN)]
    whole = over_seeds([one.difference for one in documents if one is not None])
    length = scale.tables[ADAPT]["data"]["length"]
    return [
        Paragraph(
            f"{LABELS[OTHER]} \N{MINUS SIGN} {LABELS[BASE]}, NLL of the right option in nats a token, by how many tokens the "
            f"question has with its option; mean over {whole.n} seeds, from which value to which they go, and how many questions. "
            f"Training had rows of {length} tokens alone; there, on held-out documents, the difference is {whole.mean:+.4f}. Found "
            "after the runs, not declared before:"
        ),
        Table(_RANGES, rows),
    ]


def _cell(cell: Mapping[str, Any]) -> str:
    seeds = cell["seeds"]
    if not seeds:
        return ""
    spread = f"{min(seeds):+.3f} to {max(seeds):+.3f}; " if len(seeds) > 1 else ""
    return f"{cell['spread'].mean:+.3f} ({spread}{cell['n']:,})"


def _questions_again(records: Mapping[str, Record], counted: Mapping[str, Any]) -> list[Block]:
    """Both pairs on the same seed: leads of one seed and another differ more than what is looked for."""
    first = {name: one for name, one in records.items() if one.seed == FIRST_SEED}
    both = [leads(first, counted, of) for of in (PLAIN, MIXED)]
    if not all(any(cell["seeds"] for row in found for cell in row["cells"]) for found in both):
        return []
    rows = [
        [f"{row['task']}, {_TRAINED[of]}", *map(_cell, row["cells"])]
        for one in zip(*both, strict=True)
        for of, row in zip(_TRAINED, one, strict=True)
    ]
    return [
        Paragraph(f"The same of seed {FIRST_SEED} alone, beside the pair whose training had rows of random length as well:"),
        Table(_RANGES, rows),
    ]


def _cuts(records: Mapping[str, Record], scale: Scale) -> list[Block]:
    runs = {variant: runs_of(records, ADAPT, variant).get(FIRST_SEED) for variant in VARIANTS}
    made = {variant: run for variant, run in runs.items() if run is not None and f"{ROWS}.{scale.cuts[-1]}" in run.outcomes}
    base = made.get(BASE)
    if base is None or len(made) < 2:
        return []
    head = ["", *map(str, scale.cuts)]
    blocks: list[Block] = []
    for kind, text in _kinds(scale).items():
        rows = [
            [LABELS[variant], *(_difference(base, run, f"{kind}.{length}") for length in scale.cuts)]
            for variant, run in made.items()
            if variant != BASE
        ]
        told = [f"{LABELS[BASE]}: NELBO", *(_value(base, f"{kind}.{length}") for length in scale.cuts)]
        blocks += [
            Paragraph(
                f"Held-out documents cut to so many tokens, seed {FIRST_SEED}, {text}. NELBO in nats a token of the "
                f"{LABELS[BASE]}, and what others have more or less, with the {LEVEL:.0%} interval over documents:"
            ),
            Table(head, [told, *rows]),
        ]
    rows = [
        [LABELS[variant], *(_value(run, f"attention.{WRITES}.{length}") for length in scale.cuts)]
        for variant, run in made.items()
        if f"attention.{WRITES}.{scale.cuts[-1]}" in run.outcomes
    ]
    blocks += [
        Paragraph(
            "What heads write at each length: the norm of their output, of the mean norm of the values that they mix, over all "
            "heads and layers, half of the tokens masked:"
        ),
        Table(head, rows),
        *_together(made, scale),
    ]
    return blocks


def _together(made: Mapping[str, Record], scale: Scale) -> list[Block]:
    """Whether models whose heads write more on short rows lose more there. Those that training gave short rows are left out."""
    short, long = scale.cuts[0], scale.cuts[-1]
    found = []
    for variant, run in made.items():
        named = [f"{name}.{length}" for name in (ROWS, f"attention.{WRITES}") for length in (short, long)]
        if "random_lengths" not in VARIANTS[variant].get("data", {}) and all(name in run.outcomes for name in named):
            lost, lost_long, wrote, wrote_long = (run.outcomes[name].value for name in named)
            found.append((lost - lost_long, wrote / wrote_long))
    if len(found) < _FEW:
        return []
    correlation = _rank_correlation(found)
    return [
        Paragraph(
            f"Models whose heads write more at {short} tokens than at {long} {'lose' if correlation > 0 else 'do not lose'} more "
            f"there: over the {len(found)} whose training had rows of {long} tokens alone, the rank correlation of the two is "
            f"{correlation:.2f}."
        )
    ]


_FEW = 5  # models, below which ranks say nothing


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's; values that are equal do not occur."""
    ranks = np.argsort(np.argsort(np.array(pairs), axis=0), axis=0)
    centred = ranks - ranks.mean(0)
    return float(centred.prod(1).sum() / np.sqrt((centred**2).sum(0).prod()))


def _kinds(scale: Scale) -> dict[str, str]:
    last = f"the last {scale.cuts[0] // 2} tokens of rows, given the others: the same tokens at every length"
    return {ROWS: "whole rows", ENDS: last}


# -- is it the length? ------------------------------------------------------------------------------------------------------------


class Lead(NamedTuple):
    """Of one length and seed, nats a token over the same documents. plain, mixed: other - base of each pair; change: mixed less
    plain, above 0 where rows of random length made the sink's lead smaller."""

    plain: Paired
    mixed: Paired
    change: Paired


def lead_at(records: Mapping[str, Record], outcome: str) -> Lead | None:
    runs = [runs_of(records, ADAPT, variant).get(FIRST_SEED) for variant in (*PLAIN, *MIXED)]
    found = [run.outcomes[outcome] for run in runs if run is not None and outcome in run.outcomes]
    if len(found) < len(runs):
        return None
    units = found[0].units
    if any(one.units != units or len(one.values) != len(found[0].values) for one in found):
        raise ValueError(f"{outcome}: scored on other items")
    base, other, mixed_base, mixed_other = (one.values for one in found)
    plain, mixed = other - base, mixed_other - mixed_base
    none = np.zeros_like(plain)
    return Lead(pair_items(none, plain, units), pair_items(none, mixed, units), pair_items(plain, mixed, units))


def conclude(short: Lead, long: Lead) -> str:
    """What the leads at the shortest cut and at rows of training say of length as a cause. Intervals are over documents alone."""
    grows = short.plain.difference - long.plain.difference, math.hypot(short.plain.stderr, long.plain.stderr)
    if _high(*grows) >= 0:
        return "the lead is not larger on short rows of documents, so that it is not length by itself that questions share"
    if _low(short.change.difference, short.change.stderr) <= 0:
        return (
            "the lead on short rows stays after training on rows of random length, which speaks against length as the cause, as "
            "far as so few short rows can"
        )
    if _high(short.mixed.difference, short.mixed.stderr) < -MARGIN:
        return (
            "rows of random length take a part of the lead on short rows away, and not all: length is a part of it, whether all "
            "cannot be said with so few short rows in training"
        )
    return "rows of random length take the lead on short rows away, as they should if length is the cause"


def _low(difference: float, stderr: float) -> float:
    return difference - _REACH * stderr


def _high(difference: float, stderr: float) -> float:
    return difference + _REACH * stderr


def _tested(records: Mapping[str, Record], scale: Scale) -> list[Block]:
    blocks: list[Block] = []
    for kind, text in _kinds(scale).items():
        found = [lead_at(records, f"{kind}.{length}") for length in scale.cuts]
        short, long = found[0], found[-1]
        if short is None or long is None:
            continue
        rows = [
            [label, *("" if one is None else _said(getattr(one, name)) for one in found)]
            for name, label in (("plain", _TRAINED[PLAIN]), ("mixed", _TRAINED[MIXED]), ("change", "the second less the first"))
        ]
        blocks += [
            Paragraph(
                f"DLM + sink \N{MINUS SIGN} the same without, by what training had, seed {FIRST_SEED}, {text}, with the "
                f"{LEVEL:.0%} interval over documents. On this seed, {conclude(short, long)}. Other seeds may differ by more "
                "than such intervals:"
            ),
            Table(["", *map(str, scale.cuts)], rows),
        ]
    return blocks


def _said(found: Paired) -> str:
    return f"{found.difference:+.3f} \N{PLUS-MINUS SIGN} {_REACH * found.stderr:.3f}"


def _value(run: Record, outcome: str) -> str:
    found = run.outcomes.get(outcome)
    return "" if found is None else f"{found.value:.3f}"


def _difference(base: Record, run: Record, outcome: str) -> str:
    found = pair(base, run, outcome)
    return "" if found is None else _said(found)


def said(found: Mapping[str, Any]) -> Sequence[str]:
    """For the terminal: how long each task's questions are."""
    lines = []
    for task, one in found["tasks"].items():
        tokens = Outcome.from_json(one["tokens"]).values
        low, middle, high = np.percentile(tokens, (5, 50, 95))
        lines.append(
            f"{task:16s}{len(tokens):6d} questions, {low:.0f} to {high:.0f} tokens with the right option, median {middle:.0f}"
        )
    return lines


def main(words: Sequence[str] | None = None) -> None:
    run_study(__doc__ or "", lambda asked: count_lengths(asked.given, asked.folder, SCALES[asked.scale]), said, words)


if __name__ == "__main__":
    main()
