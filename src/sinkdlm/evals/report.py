"""Report an evaluation: a table to read, and results.json in lm-eval's format, with its provenance.

Takes the harness's results as a plain dictionary; knows neither the harness nor a model.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sinkdlm.errors import EvalError
from sinkdlm.evals.requests import Key, Response

_HEAD = ("task", "metric", "value", "stderr", "items", "draws", "seconds")


def summarise(results: Mapping[str, Any], responses: Mapping[Key, Response]) -> list[dict[str, Any]]:
    """One line per metric of each task. draws: mean per request; seconds: computing time, summed over ranks."""
    by_task: dict[str, list[Response]] = {}
    for response in responses.values():
        by_task.setdefault(response.task, []).append(response)
    lines = []
    for task, metrics in results["results"].items():
        own = by_task.get(task, [])
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            error = metrics.get(f"{metric}_stderr,{filtered}")
            if metric.endswith("_stderr") or not filtered or not isinstance(value, int | float):
                continue
            lines.append(
                {
                    "task": task,
                    "metric": metric if filtered == "none" else f"{metric} ({filtered})",
                    "value": float(value),
                    "stderr": float(error) if isinstance(error, int | float) else None,
                    "items": len({response.doc for response in own}),
                    "draws": sum(response.draws for response in own) / max(1, len(own)),
                    "seconds": sum(response.seconds for response in own),
                }
            )
    return lines


def notes_on(responses: Mapping[Key, Response]) -> list[str]:
    """What a reader of the numbers should know."""
    found = list(responses.values())
    full, drawn = (sum(getattr(response, name) for response in found) for name in ("full_draws", "draws"))
    cut, lost = ([getattr(response, name) for response in found if getattr(response, name)] for name in ("truncated", "unknown"))
    notes = []
    if cut:
        notes.append(f"{len(cut)} of {len(found)} requests were longer than the model and lost up to {max(cut)} tokens on the left")
    if lost:
        what = f"characters that the tokenizer does not have ({sum(lost)} in all)"
        notes.append(f"{len(lost)} of {len(found)} requests have {what}; these are lost")
    if drawn < full:
        saved = f"adaptive draws saved {1 - drawn / full:.1%} of {full:,}"
        notes.append(f"{saved}; values of questions that ended early only rank their options")
    if any(response.kind == "score" for response in found):
        notes.append("guided values are scores: they rank options, and are neither likelihoods nor bounds on them")
    return notes


# Task -> the paper's column. Its GSM8K has two stages; it does not name its LAMBADA (its release scores the standard one).
_SAME = {"gsm8k_two_stage": "gsm8k", "gsm8k_one_stage": "gsm8k", "lambada_standard": "lambada_openai"}


def draw_table(lines: Sequence[Mapping[str, Any]], paper: Mapping[str, float] | None = None) -> str:
    """paper: task -> the paper's value, shown beside the first accuracy of each task."""
    rows: list[tuple[str, ...]] = [(*_HEAD, "paper") if paper is not None else _HEAD]
    told: set[str] = set()
    for line in lines:
        error = "" if line["stderr"] is None else f"{line['stderr']:.4f}"
        cells = [line["task"], line["metric"], f"{line['value']:.4f}", error, f"{line['items']}"]
        cells += [f"{line['draws']:.1f}", f"{line['seconds']:.1f}"]
        if paper is not None:
            value = paper.get(_SAME.get(line["task"], line["task"]))
            beside = value is not None and line["task"] not in told and line["metric"].startswith(("acc", "exact_match"))
            cells.append(f"{value:.4f}" if beside else "")
            told |= {line["task"]} if beside else set()
        rows.append(tuple(cells))
    return align(rows, n_left=2)


def align(rows: Sequence[Sequence[str]], n_left: int = 0) -> str:
    """A table of text: the first columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    for row, cells in zip(rows, padded, strict=True):
        cells[:n_left] = [cell.ljust(width) for cell, width in zip(row[:n_left], widths, strict=False)]
    return "\n".join(map("  ".join, padded))


def write_results(folder: Path, results: Mapping[str, Any], samples: Mapping[str, Sequence[Any]]) -> None:
    """results.json, and samples_TASK.jsonl for each task whose samples are kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(to_json(results) + "\n", encoding="utf-8")
        for task, rows in samples.items():
            text = "".join(json.dumps(row, default=str, ensure_ascii=False) + "\n" for row in rows)
            (folder / f"samples_{task}.jsonl").write_text(text, encoding="utf-8")
    except OSError as failure:
        raise EvalError(f"{folder}: cannot be written: {failure.strerror}") from None


def to_json(value: Any) -> str:
    """Encode as JSON; numpy's numbers become plain ones, other objects of a task's config text."""
    return json.dumps(value, indent=2, ensure_ascii=False, default=lambda odd: odd.item() if hasattr(odd, "item") else str(odd))
