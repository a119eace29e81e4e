"""Where a lead is: by how many tokens a row has. Rows of training all have the same length; questions are much shorter.

Counts the tokens of every question once, beside the records, so that the scores that records keep of single items can be put
together by length; and shows documents that were cut to several lengths. Explains; no claim rests on it.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sinkdlm.errors import ReproduceError
from sinkdlm.evals.encoding import TextEncoder
from sinkdlm.evals.requests import by_question
from sinkdlm.reproduce.blocks import Block, Heading, Paragraph, Table
from sinkdlm.reproduce.claims import NELBO, pair, runs_of
from sinkdlm.reproduce.inputs import GOLD, Given, parent_tokenizer, read_questions
from sinkdlm.reproduce.matrix import ADAPT, FIRST_SEED, LABELS, VARIANTS, Scale
from sinkdlm.reproduce.measuring import ENDS, ROWS, WRITES
from sinkdlm.reproduce.records import Outcome, Record, write_beside
from sinkdlm.reproduce.statistics import LEVEL, over_seeds, pair_items

NAME = "lengths"
BASE, OTHER = "vanilla-sink-rate", "sink"  # which pair is shown: same learning rate, with and without
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
    write_beside(records, NAME, scale.name, found)
    return found


_ROOM = 1 << 15  # tokens of a row; no question is cut


# -- leads by length --------------------------------------------------------------------------------------------------------------


def leads(records: Mapping[str, Record], counted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows with a value for each range of lengths: the mean over seeds of OTHER - BASE, nats a token, and how many questions."""
    found = []
    for task, said in counted["tasks"].items():
        tokens, scored = (Outcome.from_json(said[name]).values for name in ("tokens", "scored"))
        cells = []
        for low, high in pairwise((*_EDGES, math.inf)):
            kept = (tokens >= low) & (tokens < high)
            lead = [_lead(*both, f"{task}.nll", kept, scored) for both in _pairs(records)] if kept.sum() >= _FEWEST else []
            cells.append({"n": int(kept.sum()), "spread": over_seeds(lead)})
        found.append({"task": task, "cells": cells})
    return found


def _pairs(records: Mapping[str, Record]) -> list[tuple[Record, Record]]:
    """BASE and OTHER of each seed that both have."""
    base, other = runs_of(records, ADAPT, BASE), runs_of(records, ADAPT, OTHER)
    return [(base[seed], other[seed]) for seed in base if seed in other]


def _lead(base: Record, other: Record, outcome: str, kept: np.ndarray, scored: np.ndarray) -> float:
    one, two = (run.outcomes[outcome].values[kept] for run in (base, other))
    return pair_items(one, two, float(scored[kept].sum())).difference


def lengths_blocks(records: Mapping[str, Record], counted: Mapping[str, Any] | None, scale: Scale, level: int) -> list[Block]:
    questions = _questions(records, counted, scale) if counted is not None else []
    cuts = _cuts(records, scale)
    if not questions and not cuts:
        return []
    return [Heading(level, "Examined: rows shorter than those of training"), *questions, *cuts]


def _questions(records: Mapping[str, Record], counted: Mapping[str, Any], scale: Scale) -> list[Block]:
    rows = [[row["task"], *map(_cell, row["cells"])] for row in leads(records, counted)]
    if not any(cell for row in rows for cell in row[1:]):
        return []
    documents = [pair(*both, NELBO) for both in _pairs(records)]
    whole = over_seeds([one.difference for one in documents if one is not None])
    length = scale.tables[ADAPT]["data"]["length"]
    head = ["", *(f"{low} to {high - 1}" for low, high in pairwise(_EDGES)), f"{_EDGES[-1]} and more"]
    return [
        Paragraph(
            f"{LABELS[OTHER]} \N{MINUS SIGN} {LABELS[BASE]}, NLL of the right option in nats a token, by how many tokens the "
            f"question has with its option; mean over {whole.n} seeds, and how many questions. Training had rows of {length} "
            f"tokens alone; there, on held-out documents, the difference is {whole.mean:+.4f}. Found after the runs, not declared "
            "before:"
        ),
        Table(head, rows),
    ]


def _cell(cell: Mapping[str, Any]) -> str:
    return f"{cell['spread'].mean:+.3f} ({cell['n']:,})" if cell["spread"].n else ""


def _cuts(records: Mapping[str, Record], scale: Scale) -> list[Block]:
    runs = {variant: runs_of(records, ADAPT, variant).get(FIRST_SEED) for variant in VARIANTS}
    made = {variant: run for variant, run in runs.items() if run is not None and f"{ROWS}.{scale.cuts[-1]}" in run.outcomes}
    base = made.get(BASE)
    if base is None or len(made) < 2:
        return []
    head = ["", *map(str, scale.cuts)]
    blocks: list[Block] = []
    for kind, text in (
        (ROWS, "whole rows"),
        (ENDS, f"the last {scale.cuts[0] // 2} tokens of rows, given the others: the same tokens at every length"),
    ):
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
        [LABELS[variant], *(_value(run, f"attention.{WRITES}.{length}") for length in scale.cuts)] for variant, run in made.items()
    ]
    blocks += [
        Paragraph(
            "What heads write at each length: the norm of their output, of the mean norm of the values that they mix, over all "
            "heads and layers, half of the tokens masked:"
        ),
        Table(head, rows),
    ]
    return blocks


def _value(run: Record, outcome: str) -> str:
    found = run.outcomes.get(outcome)
    return "" if found is None else f"{found.value:.3f}"


def _difference(base: Record, run: Record, outcome: str) -> str:
    found = pair(base, run, outcome)
    return "" if found is None else f"{found.difference:+.3f} \N{PLUS-MINUS SIGN} {1.96 * found.stderr:.3f}"


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
