"""Read benchmarks from files: find a task's splits in a folder and give their rows the shape that the harness's task expects.

Owns which files belong to which task, and their formats: the authors' own, the hub's (JSON lines or parquet, as downloaded), and
plain ones with the same fields. Makes no prompts: the harness's task makes them from the rows.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sinkdlm.data.inputs import Reader, find_sources, form_of
from sinkdlm.errors import DataError, EvalError
from sinkdlm.evals.requests import read_bytes
from sinkdlm.evals.settings import ALIASES

Row = dict[str, Any]
_SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}
_WORD = re.compile(r"[a-z0-9]+")
_SHARD = re.compile(r"[-_]\d+[-_]of[-_]\d+$")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _fields(*names: str, **others: Callable[[Any], Any]) -> Callable[[Row], Row]:
    """Make a converter that copies the fields `names` and passes each of `others` through its function."""
    return lambda row: {name: row[name] for name in names} | {name: change(row[name]) for name, change in others.items()}


def _stated(stem: str, row: Row) -> Row:
    """Convert a question of ARC or OpenBookQA: the authors' nested form, the hub's, or a list with the gold index."""
    question = row["question"] if "question" in row else row[stem]
    nested = isinstance(question, Mapping)
    options = question["choices"] if nested else row["choices"]
    if isinstance(options, Mapping):
        choices, gold = {name: list(options[name]) for name in ("text", "label")}, row["answerKey"]
    elif nested:
        choices, gold = {name: [option[name] for option in options] for name in ("text", "label")}, row["answerKey"]
    else:
        choices = {"text": list(options), "label": list(_LETTERS[: len(options)])}
        gold = choices["label"][int(row["gold"])]
    return {"id": str(row.get("id", "")), stem: question["stem"] if nested else question, "choices": choices, "answerKey": gold}


def _hellaswag(row: Row) -> Row:
    return _fields("activity_label", "ctx_a", "ctx_b", "endings", label=str)({"label": "", **row}) | {"ctx": row.get("ctx", "")}


def _race(row: Row) -> Row:
    """Convert an article. The harness asks its last question, shows the others answered, and reads problems as a literal."""
    if isinstance(row.get("problems"), str):
        return {"article": row["article"], "problems": row["problems"]}
    columns = (row["questions"], row["options"], row["answers"])
    problems = [{"question": q, "answer": a, "options": list(options)} for q, options, a in zip(*columns, strict=True)]
    return {"article": row["article"], "problems": repr(problems)}


def _lambada(row: Row) -> Row:
    """The harness cuts a text at its last space only: line breaks in or after the last word stay in it."""
    return {"text": row["text"] if "text" in row else f"{row['context']} {row['continuation'].removeprefix(' ')}"}


def _boolq(row: Row) -> Row:
    return _fields("question", "passage", label=int)(row if "label" in row else {**row, "label": row["answer"]})


@dataclass(frozen=True)
class Benchmark:
    """names: word sequences, one of which must be in a file's path. needs, without: words that must, or must not, be there.

    split: what the harness scores. folder: where the harness keeps the task, below its tasks/.
    labels: whether the authors give labels in a .lst file beside the rows.
    whole: whether a file whose path names no split is the test set.
    trains: whether examples in prompts come from a train split; else they come from the scored split.
    """

    names: tuple[str, ...]
    convert: Callable[[Row], Row]
    split: str
    folder: str
    needs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    labels: bool = False
    whole: bool = False
    trains: bool = True


_ARC, _OPENBOOKQA = partial(_stated, "question"), partial(_stated, "question_stem")
_PIQA, _SIQA = (
    _fields("goal", "sol1", "sol2", label=int),
    _fields("context", "question", "answerA", "answerB", "answerC", label=str),
)
BENCHMARKS = {
    "arc_easy": Benchmark(("arc easy",), _ARC, "test", "arc"),
    "arc_challenge": Benchmark(("arc challenge",), _ARC, "test", "arc"),
    "hellaswag": Benchmark(("hellaswag",), _hellaswag, "validation", "hellaswag"),
    "piqa": Benchmark(("piqa", "physicaliqa"), _PIQA, "validation", "piqa", labels=True),
    "social_iqa": Benchmark(("social i qa", "social iqa", "socialiqa", "siqa"), _SIQA, "validation", "siqa", labels=True),
    "race": Benchmark(("race",), _race, "test", "race", needs=("high",), without=("middle",), trains=False),
    "lambada_openai": Benchmark(
        ("lambada openai",), _lambada, "test", "lambada", without=("de", "es", "fr", "it"), whole=True, trains=False
    ),
    "lambada_standard": Benchmark(("lambada standard", "cimec lambada"), _lambada, "test", "lambada", trains=False),
    "gsm8k": Benchmark(("gsm8k",), _fields("question", "answer"), "test", "gsm8k", without=("socratic", "cot")),
    "openbookqa": Benchmark(("openbookqa",), _OPENBOOKQA, "test", "openbookqa", without=("additional",)),
    "boolq": Benchmark(("boolq",), _boolq, "validation", "super_glue/boolq"),
}


def find_splits(folder: Path, task: str) -> dict[str, list[Path]]:
    """Find the files of each split of a task: its shards, or for RACE as published a file per article."""
    if not folder.is_dir():
        raise EvalError(f"--data {folder}: no such folder")
    wanted = BENCHMARKS[task]
    found: dict[str, dict[tuple[Path, str], list[Path]]] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or not _is_rows(path, task):
            continue
        split = _split_of(path.relative_to(folder), folder.resolve().name, wanted)
        if split is not None:
            stem = "" if path.suffix == ".txt" else _SHARD.sub("", path.name.split(".")[0]) + path.suffix
            found.setdefault(split, {}).setdefault((path.parent, stem), []).append(path)
    for split, forms in found.items():
        if len(forms) > 1:
            two = [str(files[0].relative_to(folder)) for files in forms.values()][:2]
            raise EvalError(f"{task}: {folder} has two sets for {split}: {' and '.join(two)}; keep one of them")
    return {split: files for split, forms in found.items() for files in forms.values()}


def _is_rows(path: Path, task: str) -> bool:
    if path.suffix == ".txt":
        return task == "race" and path.parent.name == "high"  # as published: a JSON object per file
    return form_of(path) in ("jsonl", "parquet")


def _split_of(path: Path, parent: str, wanted: Benchmark) -> str | None:
    """Which split of the task a file holds, by the words of its path."""
    words = _WORD.findall(str(path).lower())
    line = " ".join([*_WORD.findall(parent.lower()), *words])
    named = any(f" {name} " in f" {line} " for name in wanted.names)
    if not named or any(word not in words for word in wanted.needs) or any(word in words for word in wanted.without):
        return None
    own = _WORD.findall(path.name.lower())
    # The file's own name says more than its folder's.
    splits = [split for part in (own, words) for split, aliases in _SPLITS.items() if not set(aliases).isdisjoint(part)]
    return next(iter(splits), wanted.split if wanted.whole else None)


def read_rows(files: Sequence[Path], task: str) -> list[Row]:
    """Rows of a split in the hub's form, in the order of the files."""
    wanted = BENCHMARKS[task]
    found = []
    for path in files:
        beside = path.with_name(f"{path.name.split('.')[0]}-labels.lst")  # labels that the authors keep apart
        labels = beside.read_text().split() if wanted.labels and beside.exists() else None
        for number, row in enumerate(_rows(path)):
            if labels is not None and "label" not in row:
                if number >= len(labels):
                    raise EvalError(f"{path}: has more rows than labels, which are {len(labels)}")
                row = {**row, "label": labels[number]}
            try:
                found.append(wanted.convert(row))
            except (KeyError, TypeError, ValueError, IndexError) as failure:
                what = f"no field {failure}" if isinstance(failure, KeyError) else str(failure)
                there = ", ".join(sorted(row)) or "none"
                raise EvalError(f"{path}: row {number + 1} does not fit {task}: {what}; its fields are {there}") from None
    if not found:
        raise EvalError(f"{files[0]}: holds no row")
    return found


def _rows(path: Path) -> Iterator[Row]:
    if path.suffix in (".txt", ".json"):
        try:
            value = json.loads(read_bytes(path))
        except (ValueError, RecursionError):
            value = None  # one object a line, perhaps
        if isinstance(value, dict) and isinstance(value.get("data"), list):
            value = value["data"]
        if value is not None:
            yield from value if isinstance(value, list) else [value]
            return
    try:
        yield from (row.value for _, _, row in Reader(find_sources([str(path)])).rows())
    except DataError as failure:
        raise EvalError(str(failure)) from None


def load_splits(folder: Path, task: str) -> dict[str, list[Row]]:
    """Load the scored split, which must be there, and the train split, if there is one."""
    if task not in BENCHMARKS:
        raise EvalError(f"task {task!r}: not among those that --data reads: {', '.join([*BENCHMARKS, *ALIASES])}")
    files = find_splits(folder, task)
    split = BENCHMARKS[task].split
    if split not in files:
        names = BENCHMARKS[task].names[0].replace(" ", "_")
        raise EvalError(f"{task}: {folder} has no file for it; expected for example {names}_{split}.jsonl")
    return {name: read_rows(files[name], task) for name in dict.fromkeys(("train", split)) if name in files}
