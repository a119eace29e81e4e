"""Follow docs/tutorial.md on the example corpus, as it stands: what its commands print, how well its models do, seconds.

    OMP_NUM_THREADS=1 python -m benchmarks.tutorial --out benchmarks/results

tests/docs/test_tutorial.py follows it too, and compares.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import arguments, result, write
from sinkdlm.data.synthetic import corpus

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
LONG = ["train", "mine.toml", "--set", "train.steps=4400", "--out", "runs/long"]
ANSWER = re.compile(r"[a-z]+ has \d+ [a-z]+\.")
_LINE = re.compile(r"^(?:step \d+: validation loss .*|\S+/model: .* steps|(?:train|validation) .* tokens in .*)$", re.M)
_QUESTIONS = 100
Run = Callable[[list[str]], str]


def commands(text: str) -> list[list[str]]:
    """The page's commands, without `sinkdlm`, from the example corpus on."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    found = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("sinkdlm")]
    return found[next(place for place, words in enumerate(found) if words[:2] == ["data", "example"]) :]


def follow(run: Run, more: list[list[str]] | None = None) -> dict[str, Any]:
    """Run the commands in the current folder. run: gives what a command printed. more: further commands.

    printed: of training and preparing the lines that say what was made, without times; of sampling the text."""
    text = PAGE.read_text(encoding="utf-8")
    Path("mine.toml").write_text(re.findall(r"```toml\n(# mine\.toml.*?)```", text, re.S)[0])
    printed, seconds = {}, {}
    for words in [*commands(text), *(more or [])]:
        name, began = shlex.join(words), time.monotonic()
        said = run(words)
        seconds[name] = round(time.monotonic() - began, 1)
        printed[name] = said.rstrip("\n") if words[0] == "sample" else "\n".join(_LINE.findall(said))
    return {"printed": printed, "seconds": seconds, "answers": ask(run), "validation": {one.name: losses(one) for one in runs()}}


def runs() -> list[Path]:
    return sorted(path.parent for path in Path("runs").glob("*/metrics.jsonl"))


def losses(folder: Path) -> dict[str, float]:
    """Step -> validation loss."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {str(line["step"]): line["loss"] for line in lines if line["kind"] == "validation"}


def ask(run: Run) -> dict[str, int]:
    """Ask the fine-tuned model questions of the example corpus: answers of the right form, and right ones."""
    pairs = corpus(_QUESTIONS, 7, "sft")
    Path("questions.txt").write_text("".join(f"{pair['prompt']}\n" for pair in pairs))
    asked = ["sample", "runs/sft-nano-sink", "--prompts", "questions.txt", "--length", "20", "--json"]
    written = [row["text"] for row in json.loads(run(asked))["samples"]]
    answers = [text.removeprefix(pair["prompt"]).strip() for text, pair in zip(written, pairs, strict=True)]
    right = sum(answer == pair["response"].strip() for answer, pair in zip(answers, pairs, strict=True))
    return {"asked": len(pairs), "formed": sum(ANSWER.fullmatch(answer) is not None for answer in answers), "right": right}


def _run(words: list[str]) -> str:
    said = subprocess.STDOUT if words[0] == "train" else None  # training tells its steps there
    done = subprocess.run([sys.executable, "-m", "sinkdlm", *words], check=True, stdout=subprocess.PIPE, stderr=said, text=True)
    return done.stdout


def main() -> None:
    asked = arguments(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        figures = follow(_run, [LONG])
    write(result("tutorial", figures, device="cpu", settings={"threads": torch.get_num_threads()}), asked.out)


if __name__ == "__main__":
    main()
