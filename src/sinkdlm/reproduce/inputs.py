"""What runs of a scale read: data, a parent, questions, prompts. Two ways to come by it: made here (nano), or given (small)."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sinkdlm.analysis.prompts import PROMPTS
from sinkdlm.checkpoint.directory import fingerprint
from sinkdlm.data.inputs import find_sources
from sinkdlm.data.prepare import Settings as Preparation
from sinkdlm.data.prepare import prepare
from sinkdlm.data.shards import INDEX, Split, open_split
from sinkdlm.errors import ReproduceError
from sinkdlm.evals.requests import GENERATE, Sheet
from sinkdlm.evals.settings import Settings
from sinkdlm.interop import open_source
from sinkdlm.interop.tokenizer import read_tokenizer_at, tokenizer_of
from sinkdlm.reproduce.matrix import Scale

GOLD = "gold"  # in a sheet's `about`: task -> the right option, or the right answer, of each document
NO_PARENT = "--parent: which autoregressive model? a folder or a GGUF file, as `convert` reads it"
_HELD_OUT = 0.05  # of a corpus that is prepared here: enough documents for pairs
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SHORTEST = 8  # tokens of a document that is worth scoring


class Example(NamedTuple):
    """A held-out example of fine-tuning."""

    tokens: list[int]
    n_prompt: int


@dataclass(frozen=True)
class Inputs:
    """shape: model fields that follow from the data. sheet: every question, with the right answers in its `about`."""

    text: Path
    parent: str | None = None
    sft: Path | None = None
    sheet: Sheet | None = None
    prompts: Sequence[str] = PROMPTS
    examples: Sequence[Example] = ()
    shape: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def eos(self) -> int:
        found = open_split(self.text, "train").eos_id
        if found is None:
            raise ReproduceError(f"{self.text}: does not say which id ends documents; prepare it with: sinkdlm data prepare")
        return found

    def documents(self, count: int, length: int) -> list[list[int]]:
        """The first documents of the validation split, which was split by document; each cut where a row ends."""
        split = open_split(self.text, "validation")
        tokens = np.asarray(split.read(0, split.n_tokens))
        ends = np.flatnonzero(tokens == self.eos)
        found = [tokens[start:end] for start, end in zip(np.concatenate([[0], ends[:-1] + 1]), ends, strict=True)]
        found = [document[:length] for document in found if len(document) >= _SHORTEST][:count]
        if not found:
            raise ReproduceError(f"{self.text}: its validation split has no document to score; prepare it with --validation 0.01")
        return [document.tolist() for document in found]

    def questions(self, scale: Scale, task: str) -> Sheet | None:
        """One task's requests, as many documents as the scale asks, answered the declared way: exact-k, no guidance."""
        if self.sheet is None:
            return None
        most = scale.tasks.get(task)
        requests = [one for one in self.sheet.requests if one.task == task and (most is None or one.doc < most)]
        if not requests:
            return None
        settings = Settings(draws=scale.draws, greedy=len({one.index for one in requests}) == 1)
        if requests[0].kind == GENERATE:
            settings = self.sheet.settings[task]
        return Sheet(requests, {task: settings}, seed=0, about={GOLD: self.sheet.about.get(GOLD, {}).get(task)})


def examples_of(split: Split, count: int, length: int) -> list[Example]:
    rows = [row for row in split.example_rows().tolist() if row[2] <= length][:count]
    return [Example(np.asarray(split.read(start, start + total)).tolist(), prompt) for start, prompt, total in rows]


# -- small: given ---------------------------------------------------------------------------------------------------------------


class Given(NamedTuple):
    """What the command line names."""

    parent: str | None = None
    corpus: Sequence[str] = ()
    sft: Path | None = None
    data: Path | None = None
    requests: Path | None = None


def given_inputs(given: Given, scale: Scale, out: Path) -> Inputs:
    if not given.corpus:
        raise ReproduceError("--corpus: which text? give a prepared set, or texts that are prepared with the parent's tokenizer")
    sheet = read_questions(given, scale)
    text = prepared_corpus(given, out)
    sft = prepared_sft(given, out)
    examples = examples_of(open_split(sft, "validation"), scale.examples, scale.tables["sft"]["data"]["length"]) if sft else ()
    about = {"corpus": open_split(text, "train").fingerprint, "validation": open_split(text, "validation").fingerprint}
    if sheet is not None:
        about["requests"] = sheet.digest
    if given.parent is not None:
        about["parent"] = _mark_parent(given.parent)
    if sft is not None:
        about |= {f"fine-tuning, {split}": open_split(sft, split).fingerprint for split in ("train", "validation")}
    return Inputs(text, given.parent, sft, sheet, examples=examples, about=about)


def _mark_parent(name: str) -> str:
    """Of its weights' files, where they lie here; else its name."""
    path = Path(name)
    if path.is_file():
        return str(fingerprint(path)["sha256"])
    marks = [f"{file.name} {fingerprint(file)['sha256']}" for file in sorted(path.glob("*")) if file.suffix in _WEIGHTS]
    return hashlib.sha256("\n".join(marks).encode()).hexdigest() if marks else name


def prepared_corpus(given: Given, out: Path) -> Path:
    """A prepared set as it is; texts become one, in the folder of the reproduction."""
    first = Path(given.corpus[0])
    if len(given.corpus) == 1 and first.is_dir() and ((first / INDEX).exists() or any(first.glob("*.ds"))):
        return first
    find_sources(list(given.corpus))  # a wrong name is said before the tokenizer is read
    folder = out / "data" / "corpus"
    prepare(list(given.corpus), parent_tokenizer(given), folder, Preparation(validation=_HELD_OUT), source=given.parent)
    return folder


def prepared_sft(given: Given, out: Path) -> Path | None:
    if given.sft is None or given.sft.is_dir():
        return given.sft
    folder = out / "data" / "sft"
    settings = Preparation(kind="gsm8k-two-stage", validation=0.05)
    prepare([str(given.sft)], parent_tokenizer(given), folder, settings, source=given.parent)
    return folder


def parent_tokenizer(given: Given) -> Any:
    if given.parent is None:
        raise ReproduceError(f"{NO_PARENT}; its tokenizer is needed")
    path = Path(given.parent)
    found = read_tokenizer_at(path) if path.suffix in (".json", ".model") else tokenizer_of(open_source(path))
    if found is None:
        raise ReproduceError(f"{given.parent}: has no tokenizer; prepare the corpus with: sinkdlm data prepare --tokenizer T")
    return found


def read_questions(given: Given, scale: Scale) -> Sheet | None:
    """From a file of requests, or asked of the harness; None where neither is given: then no task is scored."""
    if given.requests is not None:
        sheet = Sheet.read(given.requests)
        if GOLD not in sheet.about:
            raise ReproduceError(
                f"{given.requests}: does not say which answers are right; write it anew with: sinkdlm eval --write-requests"
            )
        return sheet
    if given.data is None:
        return None
    from sinkdlm.evals import harness

    tasks = tuple(task for task in scale.tasks if given.sft is not None or not task.startswith("gsm8k"))
    return harness.Evaluation(harness.Plan(tasks=tasks, data=str(given.data))).ask()
