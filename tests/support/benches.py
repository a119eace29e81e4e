"""Rows of every benchmark in the hub's own schema, and the forms that the same rows come in as files."""

import json
from pathlib import Path
from typing import Any

# Task -> (split that is scored, rows as the hub has them).
HUB: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "arc_easy": (
        "test",
        [
            {"id": "a1", "question": "Which is hot?", "choices": {"text": ["ice", "fire"], "label": ["A", "B"]}, "answerKey": "B"},
            {"id": "a2", "question": "2 + 2?", "choices": {"text": ["4", "5", "6"], "label": ["A", "B", "C"]}, "answerKey": "A"},
        ],
    ),
    "hellaswag": (
        "validation",
        [
            {
                "activity_label": "Cooking",
                "ctx_a": "A man cuts [title] an onion.",
                "ctx_b": "he",
                "ctx": "A man cuts [title] an onion. he",
                "endings": ["cries.", "flies [step] away.", "dies.", "sings  loud."],
                "label": label,
            }
            for label in ("0", "3")
        ],
    ),
    "piqa": ("validation", [{"goal": "boil water", "sol1": "heat it", "sol2": "cool it", "label": label} for label in (0, 1)]),
    "social_iqa": (
        "validation",
        [
            {
                "context": "Al fell.",
                "question": "How is Al?",
                "answerA": "hurt",
                "answerB": "glad",
                "answerC": "tall",
                "label": label,
            }
            for label in ("1", "2")
        ],
    ),
    "race": (
        "test",
        [
            {
                "article": "A story it's about.",
                "problems": repr(
                    [
                        {"question": "It is  _  .", "answer": "B", "options": ["a", "b", "c", "d"]},
                        {"question": "Who?", "answer": "A", "options": ["me", "you", "he", "she"]},
                        {"question": "Why?", "answer": "D", "options": ["so", "no", "it's", "go"]},
                    ]
                ),
            }
        ],
    ),
    "lambada_openai": ("test", [{"text": "The cat sat on the mat"}, {"text": 'He said:\n\n"Go away.\n\nNow\n'}]),
    "gsm8k": ("test", [{"question": "1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]),
    "openbookqa": (
        "test",
        [{"id": "o", "question_stem": "Fire is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]}, "answerKey": "A"}],
    ),
    "boolq": (
        "validation",
        [{"question": "is it so", "passage": "It is.", "label": 1}, {"question": "not", "passage": "No.", "label": 0}],
    ),
}
HUB["arc_challenge"] = HUB["arc_easy"]
HUB["lambada_standard"] = ("test", [{"text": "the cat sat on the mat"}, {"text": "he said : `` go away . '' now"}])

# Task -> the path of the hub's own file, less its ending.
HUB_PATHS = {
    "arc_easy": "ai2_arc/ARC-Easy/test-00000-of-00001",
    "arc_challenge": "ai2_arc/ARC-Challenge/test-00000-of-00001",
    "hellaswag": "Rowan/hellaswag/data/validation-00000-of-00001",
    "piqa": "piqa/plain_text/validation-00000-of-00001",
    "social_iqa": "lighteval/siqa/data/validation-00000-of-00001",
    "race": "race/high/test-00000-of-00001",
    "lambada_openai": "EleutherAI/lambada_openai/data/lambada_test_en",
    "lambada_standard": "cimec/lambada/plain_text/test-00000-of-00001",
    "gsm8k": "openai/gsm8k/main/test-00000-of-00001",
    "openbookqa": "openbookqa/main/test-00000-of-00001",
    "boolq": "super_glue/boolq/validation-00000-of-00001",
}


def nested(row: dict, stem: str) -> dict:
    options = [{"text": text, "label": label} for text, label in zip(*(row["choices"][k] for k in ("text", "label")), strict=True)]
    return {"id": row["id"], "question": {"stem": row[stem], "choices": options}, "answerKey": row["answerKey"]}


def race_columns(row: dict) -> dict:
    problems = eval(row["problems"], {"__builtins__": {}})
    columns = {"questions": "question", "answers": "answer", "options": "options"}
    return {"article": row["article"], **{ours: [problem[name] for problem in problems] for ours, name in columns.items()}}


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def plain_files(task: str) -> dict[str, str]:
    """One file with the fields of the hub, or simpler ones."""
    split, rows = HUB[task]
    if task.startswith("arc"):
        rows = [
            {"id": row["id"], "question": row["question"], "choices": row["choices"]["text"], "gold": "ABC".index(row["answerKey"])}
            for row in rows
        ]
    if task == "race":
        return {"race_test_high.jsonl": lines([race_columns(row) for row in rows])}
    if task.startswith("lambada"):
        halves = [row["text"].rpartition(" ") for row in rows]
        return {f"{task}_test.jsonl": lines([{"context": context, "continuation": word} for context, _, word in halves])}
    name = "social_i_qa" if task == "social_iqa" else task
    return {f"{name}_{split}.jsonl": lines(rows)}


def makers_files(task: str) -> dict[str, str]:
    """As their makers published them."""
    split, rows = HUB[task]
    if task.startswith("arc"):
        name = {"arc_easy": "ARC-Easy", "arc_challenge": "ARC-Challenge"}[task]
        return {f"ARC-V1/{name}/{name}-Test.jsonl": lines([nested(row, "question") for row in rows])}
    if task == "openbookqa":
        own = lines([nested(row, "question_stem") for row in rows])
        return {"OpenBookQA-V1/Data/Main/test.jsonl": own, "OpenBookQA-V1/Data/Additional/test_complete.jsonl": own}
    if task in ("piqa", "social_iqa"):
        folder = {"piqa": "physicaliqa-train-dev", "social_iqa": "socialiqa-train-dev"}[task]
        bare = [{name: value for name, value in row.items() if name != "label"} for row in rows]
        return {f"{folder}/dev.jsonl": lines(bare), f"{folder}/dev-labels.lst": "\n".join(str(row["label"]) for row in rows)}
    if task == "race":
        return {f"RACE/test/high/{i}.txt": json.dumps(race_columns(row)) for i, row in enumerate(rows)} | {
            "RACE/test/middle/9.txt": json.dumps(race_columns(rows[0]))
        }
    if task == "boolq":
        return {"BoolQ/dev.jsonl": lines([{"answer": bool(row["label"]), "title": "t", **_without(row, "label")} for row in rows])}
    if task == "hellaswag":
        return {"hellaswag_val.jsonl": lines([{**row, "label": int(row["label"])} for row in rows])}
    if task == "gsm8k":
        return {"gsm8k/test.jsonl": lines(rows), "gsm8k/test_socratic.jsonl": lines(rows), "gsm8k_cot_train.txt": "q||t #### 1\n"}
    return {f"{task}_{split}.json": json.dumps(rows)}


def _without(row: dict, name: str) -> dict:
    return {key: value for key, value in row.items() if key != name}


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def write_parquet(path: Path, rows: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
