"""The command's options, and the inputs of runs: data, parent, questions, prompts; made here (nano) or given (small)."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sinkdlm.analysis.prompts import PROMPTS
from sinkdlm.checkpoint.directory import fingerprint, written_aside
from sinkdlm.checkpoint.durable import held
from sinkdlm.checkpoint.tokenizer import write_tokenizer
from sinkdlm.config.model import MODEL_TYPE
from sinkdlm.config.recipe import Recipe
from sinkdlm.config.toml import parse_override
from sinkdlm.data.encoding import mark_tokenizer
from sinkdlm.data.inputs import find_sources
from sinkdlm.data.prepare import Settings as Preparation
from sinkdlm.data.prepare import prepare
from sinkdlm.data.shards import INDEX, Split, open_split
from sinkdlm.errors import ReproduceError
from sinkdlm.evals.requests import GENERATE, Sheet
from sinkdlm.evals.settings import Settings
from sinkdlm.interop import Source, open_source
from sinkdlm.interop.tensors import TensorFile
from sinkdlm.interop.tokenizer import read_tokenizer_at, tokenizer_of
from sinkdlm.reproduce.matrix import SCALES, Scale

GOLD = "gold"  # in a sheet's `about`: task -> the right option, or the right answer, of each document
NO_PARENT = "--parent: an autoregressive model is needed; give a folder or a GGUF file, as `convert` reads it"
_HELD_OUT = 0.05  # validation share of a corpus that is prepared here: enough documents for pairs
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SHORTEST = 8  # tokens of the shortest document that is scored


Load = Callable[..., Any]  # (recipe, dtype, source=, tokenizer=): as the command line loads init.from


class Asked(NamedTuple):
    """The options of the command line. seeds: None for the scale's number."""

    target: str
    scale: str
    out: Path
    seeds: int | None = None
    records: Path | None = None
    parent: str | None = None
    corpus: Sequence[str] = ()
    sft: Path | None = None
    data: Path | None = None
    requests: Path | None = None
    only: Sequence[str] = ()
    tasks: Sequence[str] | None = None
    overrides: Sequence[str] = ()
    time_limit: float | None = None
    keep_weights: bool = False
    official: bool = False
    device: str | None = None

    @property
    def folder(self) -> Path:
        """The folder of results."""
        return self.records or self.out / "records"

    @property
    def changes(self) -> dict[str, Any]:
        """The --set changes, kept with results so that these do not pass for results of the declared settings."""
        return dict(parse_override(override) for override in self.overrides)


class Example(NamedTuple):
    """A held-out example of fine-tuning."""

    tokens: list[int]
    n_prompt: int


class Inputs(NamedTuple):
    """shape: model fields that follow from the data. sheet: every question, with the right answers in its `about`."""

    text: Path
    parent: str | None = None
    sft: Path | None = None
    sheet: Sheet | None = None
    prompts: Sequence[str] = PROMPTS
    examples: Sequence[Example] = ()
    shape: Mapping[str, Any] = {}
    about: Mapping[str, Any] = {}

    @property
    def eos(self) -> int:
        found = open_split(self.text, "train").eos_id
        if found is None:
            raise ReproduceError(f"{self.text}: does not say which id ends documents; prepare it with: sinkdlm data prepare")
        return found

    def documents(self, count: int, length: int) -> list[list[int]]:
        """The first documents of the validation split, each cut to `length` tokens."""
        every = documents_of(open_split(self.text, "validation"), self.eos)
        found = [document[:length].tolist() for document in every if len(document) >= _SHORTEST][:count]
        if not found:
            raise ReproduceError(f"{self.text}: its validation split has no document to score; prepare it with --validation 0.01")
        return found

    def questions(self, scale: Scale, task: str) -> Sheet | None:
        """One task's requests, of as many documents as the scale says, to answer with exact-k and no guidance."""
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


def documents_of(split: Split, eos: int | None) -> Iterator[np.ndarray]:
    """Tokens of one document after the other, without the id that ends them."""
    tokens = np.asarray(split.read(0, split.n_tokens))
    ends = np.flatnonzero(tokens == eos).tolist()
    return (tokens[before + 1 : end] for before, end in pairwise([-1, *ends]))


def given_inputs(asked: Asked) -> Inputs:
    if not asked.corpus:
        raise ReproduceError("--corpus: text is needed; give a prepared set, or texts to prepare with the parent's tokenizer")
    scale, sheet = SCALES[asked.scale], read_questions(asked)
    text = prepared_corpus(asked)
    about = {"corpus": open_split(text, "train").fingerprint, "validation": open_split(text, "validation").fingerprint}
    if sheet is not None:
        about["requests"] = sheet.digest
    if asked.parent is not None:
        about["parent"] = _mark_parent(asked.parent)
    sft, examples = asked.sft, list[Example]()
    if sft is not None:
        if not sft.is_dir():
            sft = _prepare(asked, [str(sft)], "sft", Preparation(kind="gsm8k-two-stage", validation=_HELD_OUT))
        splits = {split: open_split(sft, split) for split in ("train", "validation")}
        about |= {f"fine-tuning, {name}": split.fingerprint for name, split in splits.items()}
        held_out, longest = splits["validation"], scale.tables["sft"]["data"]["length"]
        rows = [row for row in held_out.example_rows().tolist() if row[2] <= longest][: scale.examples]
        examples = [Example(held_out.read(start, start + total).tolist(), prompt) for start, prompt, total in rows]
    return Inputs(text, asked.parent, sft, sheet, examples=examples, about=about)


def _mark_parent(name: str) -> str:
    """A hash of the parent's weight files if they are local, else its name."""
    path = Path(name)
    if path.is_file():
        return str(fingerprint(path)["sha256"])
    marks = [f"{file.name} {fingerprint(file)['sha256']}" for file in sorted(path.glob("*")) if file.suffix in _WEIGHTS]
    return hashlib.sha256("\n".join(marks).encode()).hexdigest() if marks else name


def prepared_corpus(asked: Asked) -> Path:
    """The folder of a prepared set; texts are prepared into one."""
    first = Path(asked.corpus[0])
    if len(asked.corpus) == 1 and first.is_dir() and ((first / INDEX).exists() or any(first.glob("*.ds"))):
        return first
    find_sources(list(asked.corpus))  # fail on a wrong name before the tokenizer is read
    return _prepare(asked, list(asked.corpus), "corpus", Preparation(validation=_HELD_OUT))


def _prepare(asked: Asked, sources: list[str], name: str, settings: Preparation) -> Path:
    folder = asked.out / "data" / name
    prepare(sources, parent_tokenizer(asked.parent), folder, settings, source=asked.parent)
    return folder


def parent_tokenizer(parent: str | None) -> Any:
    if parent is None:
        raise ReproduceError(f"{NO_PARENT}; its tokenizer is needed")
    return read_tokenizer_at(parent)


def read_questions(asked: Asked) -> Sheet | None:
    """Questions from a file of requests or from the harness; None without either, and then no task is scored."""
    if asked.requests is not None:
        sheet = Sheet.read(asked.requests)
        if GOLD not in sheet.about:
            cure = "write it anew with: sinkdlm eval --write-requests"
            raise ReproduceError(f"{asked.requests}: does not say which answers are right; {cure}")
        return sheet
    if asked.data is None:
        return None
    from sinkdlm.evals import harness

    tasks = tuple(task for task in SCALES[asked.scale].tasks if asked.sft is not None or not task.startswith("gsm8k"))
    return harness.Evaluation(harness.Plan(tasks=tasks, data=str(asked.data))).ask()


class Parents:
    """Loads `init.from` of recipes; a foreign one is read once: a GGUF file takes a quarter of a minute to unpack.

    Our own checkpoints are quick to read and are not kept in memory. folder: for parents' tokenizers."""

    def __init__(self, load: Load, folder: Path) -> None:
        self._load, self._folder = load, folder
        self._held: dict[str, dict[str, Any]] = {}

    def __call__(self, recipe: Recipe, dtype: torch.dtype) -> Any:
        path = str(recipe.init.from_)
        if path not in self._held:
            found = open_source(path)
            self._held[path] = {}
            if found.kind != MODEL_TYPE:
                held = dict(found.read())  # under our names; readers copy them, so they never change
                shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
                kept = replace(found, layout=None, tensors=TensorFile(found.path, shapes, held.__getitem__))
                self._held[path] = {"source": kept, "tokenizer": self._tokenizer(found)}
        return self._load(recipe, dtype, **self._held[path])

    def _tokenizer(self, found: Source) -> Path | None:
        """Write the parent's tokenizer once and atomically, as other processes may read it."""
        tokenizer = tokenizer_of(found)
        if tokenizer is None:
            return None
        folder = self._folder / mark_tokenizer(tokenizer)["sha256"][:16]
        with held(self._folder, "reproduction", wait=True):
            if not folder.is_dir():
                with written_aside(folder) as aside:
                    write_tokenizer(aside, tokenizer)
        return folder
