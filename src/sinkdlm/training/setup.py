"""Open what a run needs before its first step: its data, recorded facts, model and tokenizer; and say what the run is.

Every rank opens the same things; rank 0 writes down what is kept. Must not know the loop.
"""

import functools
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from sinkdlm.checkpoint.directory import Loaded, written_aside
from sinkdlm.checkpoint.tokenizer import check_vocabulary, read_tokenizer, write_tokenizer
from sinkdlm.config.model import ModelConfig, preset_fields, preset_names
from sinkdlm.config.recipe import Recipe
from sinkdlm.data.encoding import mark_tokenizer
from sinkdlm.data.rows import Rows, open_rows, tokenizer_folder
from sinkdlm.errors import TrainError, panics_raised
from sinkdlm.fast.explain import explain
from sinkdlm.model.model import DiffusionLM
from sinkdlm.planning.formulas import Layout, budget_steps
from sinkdlm.planning.plan import line_of_run
from sinkdlm.text.prompts import begin, encode
from sinkdlm.training.adapter import mark_base
from sinkdlm.training.choose import Way
from sinkdlm.training.evaluate import VALIDATION_SEED
from sinkdlm.training.run import RunFolder

LoadParent = Callable[[Recipe, torch.dtype], Loaded]
Say = Callable[[str], None]
_DRAWING = 16  # threads that draw initial weights, at most
_SHAPE = ("vocab_size", "n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff", "head_dim", "qk_norm")


class Data(NamedTuple):
    rows: Rows
    validation: Rows | None
    steps: int


class DrawnAhead:
    """Draws a model's random initial weights in several threads, ahead of their use: one thread would keep a GPU waiting for
    seconds. The weights do not depend on the order."""

    def __init__(
        self, model: DiffusionLM, seed: int, n_threads: int, *, to: tuple[torch.device, torch.dtype] | None = None
    ) -> None:
        """to: final device and dtype of all weights. All are then started at once, the largest first, and moved there by the
        threads that draw them. Without it they wait on the host, a few at a time."""
        shapes, (device, dtype) = {name: tuple(p.shape) for name, p in model.named_parameters()}, to or (None, None)
        self._draw = lambda name: model.initial_weight(name, shapes[name], seed).to(device, dtype)
        self._drawn: dict[str, Future[Tensor]] = {}
        self._pool = ThreadPoolExecutor(n_threads)
        self._rest = iter(shapes if to is None else sorted(shapes, key=lambda name: -math.prod(shapes[name])))
        for name in itertools.islice(self._rest, 2 * n_threads if to is None else len(shapes)):
            self._begin(name)

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        while name not in self._drawn:
            self._begin(next(self._rest))
        for following in itertools.islice(self._rest, 1):
            self._begin(following)
        return self._drawn.pop(name).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel weights that are not drawn yet: after a failure nobody asks for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, name: str) -> None:
        self._drawn[name] = self._pool.submit(self._draw, name)


class RunTokenizer:
    """The tokenizer for sampled texts and exports. It is read on the first call, because transformers takes a second to load.
    Files that are broken or do not fit the model still fail at once."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._read = functools.cache(lambda: read_tokenizer(folder))
        if folder.is_dir() and _highest_id(folder) >= config.vocab_size and self() is not None:
            cure = "; set model.vocab_size to what `sinkdlm data info` says of the data"
            check_vocabulary(self(), config, folder, cure)

    def __call__(self) -> Any:
        return self._read()


def _highest_id(folder: Path) -> float:
    """The highest id, if it can be found without transformers; else infinity."""
    from tokenizers import Tokenizer

    try:
        with panics_raised():
            ids = set(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values())
        for settings in folder.glob("*_*.json"):
            ids.update(map(int, json.loads(settings.read_text()).get("added_tokens_decoder", ())))
        return max(ids)
    except Exception:  # tokenizers raises a bare one
        return math.inf


def open_data(recipe: Recipe, say: Say) -> Data:
    config, section, train = recipe.model, recipe.data, recipe.train
    if section.length > config.context_length:
        raise TrainError(f"data.length = {section.length}: allowed is at most model.context_length = {config.context_length}")
    if section.first is not None and (section.first >= config.vocab_size or section.first == config.mask_id):
        raise TrainError(
            f"data.first = {section.first}: must be an id of the vocabulary (below {config.vocab_size}) other than [MASK]"
        )
    if section.documents == "confined" and config.n_registers:
        raise TrainError(
            "data.documents = 'confined': impossible with model.sink_kind = 'register', which sees every document; "
            "set data.documents = 'joined' or model.sink_kind = 'isolated'"
        )
    ids = {"vocab_size": config.vocab_size, "mask_id": config.mask_id}
    rows = open_rows(section, "train", seed=train.seed, **ids)
    assert rows is not None
    validation = open_rows(section, "validation", seed=VALIDATION_SEED, **ids)
    if rows.n_too_long:
        say(f"{rows.n_too_long} examples are longer than data.length = {section.length} and are left out")
    if validation is None and recipe.eval.every:
        say("data.sets: no validation split, so there is no validation; data.validation can name another folder")
    steps = budget_steps(train, config, section.length, rows.n_rows)
    beyond = [milestone for milestone in recipe.save.milestones if milestone >= steps]
    if beyond:
        say(f"save.milestones: {', '.join(map(str, beyond))}: not before the last step, {steps}; only model/ is exported then")
    return Data(rows, validation, steps)


def settle_facts(folder: RunFolder, data: Data) -> dict[str, Any]:
    """Record what the first start found; refuse other data in a resumed run or on another rank: it would be another run."""
    parts = (("data", data.rows), ("validation", data.validation))
    marks = {part: _mark_sets(rows) for part, rows in parts if rows is not None}
    kept = folder.world.from_first(folder.facts)
    facts: dict[str, Any] = kept or folder.world.from_first(lambda: {"steps": data.steps, **marks})
    if kept is None:
        folder.write_json("run.json", facts)
    for part in ("data", "validation"):
        for name, mark in facts.get(part, {}).items():
            now = marks.get(part, {}).get(name, {})
            if now != mark:
                what = "changed" if now.get("tokenizer") == mark["tokenizer"] else "prepared with another tokenizer"
                raise TrainError(f"{name}: {what} since the run began; restore it or choose another --out")
    return facts


def _mark_sets(rows: Rows) -> dict[str, Any]:
    """What identifies a run's data sets."""
    return {
        str(split.folder): {
            "fingerprint": split.fingerprint,
            "tokens": split.n_tokens,
            "documents": split.n_documents,
            "tokenizer": split.tokenizer["sha256"] if split.tokenizer else None,
        }
        for split in rows.splits
    }


def check_parent(recipe: Recipe, rows: Rows, loaded: Loaded) -> None:
    """Check that the parent has the shape of [model] and that its tokenizer made the data."""
    check_shape(recipe.init.from_, recipe.model.to_dict(), loaded.config, ModelConfig.keys())
    marks = [split.tokenizer["vocabulary_sha256"] for split in rows.splits if split.tokenizer is not None]
    if loaded.tokenizer is not None and marks and mark_tokenizer(loaded.tokenizer)["vocabulary_sha256"] != marks[0]:
        raise TrainError(
            f"init.from = {recipe.init.from_!r}: its tokenizer is not the one that the data was prepared with; "
            f"prepare it with: sinkdlm data prepare ... --tokenizer {recipe.init.from_}"
        )


def check_shape(name: str | None, given: Mapping[str, Any], parent: ModelConfig, fixed: Sequence[str]) -> None:
    """Check that the given part of [model] agrees with a parent. fixed: the keys that the parent's weights decide."""
    found = parent.to_dict()
    wanted = {**found, **given}
    odd = [f"{key} = {found[key]!r}, model.{key} is {wanted[key]!r}" for key in fixed if found[key] != wanted[key]]
    if odd:
        raise TrainError(f"init.from = {name!r}: has {'; '.join(odd)}: {_fitting(found, wanted, fixed)}")


def _fitting(found: dict[str, Any], wanted: dict[str, Any], fixed: Sequence[str]) -> str:
    """What to write into [model]: the preset of this shape, if another one is set, and the keys that it leaves open."""
    shape = [key for key in _SHAPE if found[key] != wanted[key]]
    for name in preset_names() if shape else ():
        preset = preset_fields(name)
        if all(preset[key] == found[key] for key in _SHAPE):
            rest = [f"{key} = {found[key]!r}" for key in fixed if preset.get(key, wanted[key]) != found[key]]
            return f'set model.preset = "{name}"' + (f", and with it {', '.join(rest)}" if rest else "")
    return "leave out of [model] these keys, or the preset that sets them, to take the parent's"


def open_model(
    recipe: Recipe, folder: RunFolder, data: Data, dtype: torch.dtype, load_parent: LoadParent | None, *, resumes: bool
) -> tuple[DiffusionLM, DrawnAhead | None, RunTokenizer, dict[str, Any]]:
    """Open the model, its initial weights, its tokenizer and the run's facts.

    A parent's model is on the host, and so is an adapter's base at every start. Any other is on the meta device, with initial
    weights as in the official code, or None where a state will fill them."""
    facts = settle_facts(folder, data)
    if not resumes and folder.world.from_first((folder.path / "model").is_dir):
        raise TrainError(
            f"{folder.path}: has a model/ but no state to resume from: the run is over; "
            "choose another --out, or remove model/ to train it again"
        )
    adapts = recipe.adapter.kind != "none"
    if recipe.init.from_ is not None and (adapts or not resumes):
        if load_parent is None:
            raise TrainError("init.from: no loader was given for it; use the command line, or pass load_parent=")
        loaded = load_parent(recipe, dtype)
        check_parent(recipe, data.rows, loaded)
        facts = facts if resumes else {**facts, "parent": dict(loaded.provenance)}
        if adapts:
            facts = _settle_base(recipe, folder, facts, mark_base(loaded.model))
        folder.write_json("run.json", facts)
        return loaded.model, None, _settle_tokenizer(recipe, folder, data.rows, loaded.tokenizer), facts
    with torch.device("meta"):
        model = DiffusionLM(recipe.model)
    n_threads = max(1, min(_DRAWING, (os.cpu_count() or 1) // folder.world.local_size))
    tokenizer = _settle_tokenizer(recipe, folder, data.rows, None)
    # With several ranks, the whole weights may not fit on one device.
    place = (folder.world.device, dtype) if folder.world.alone else None
    first = None if resumes else DrawnAhead(model, recipe.train.seed, n_threads, to=place)
    return model, first, tokenizer, facts


def _settle_base(recipe: Recipe, folder: RunFolder, facts: dict[str, Any], mark: str) -> dict[str, Any]:
    """Record the weights that an adapter's state does not hold; refuse others in a resumed run or on another rank."""
    facts = {**facts, "base": folder.world.from_first(lambda: facts.get("base") or {"path": recipe.init.from_, "sha256": mark})}
    if facts["base"]["sha256"] != mark:
        raise TrainError(f"init.from = {recipe.init.from_!r}: changed since the run began; restore it, or choose another --out")
    return facts


def _settle_tokenizer(recipe: Recipe, folder: RunFolder, rows: Rows, given: Any) -> RunTokenizer:
    """The tokenizer that the exported checkpoints carry: the parent's, or the data's."""
    kept = folder.path / "tokenizer"
    if folder.world.first and not kept.is_dir():
        _keep_tokenizer(kept, recipe.model, tokenizer_folder(rows.splits), given)
    folder.world.wait()
    tokenizer, log, most = RunTokenizer(kept, recipe.model), recipe.log, recipe.model.context_length
    if not log.sample_every:
        return tokenizer
    if tokenizer() is None:
        raise TrainError("log.sample_every: neither the data nor the parent has a tokenizer to write texts with; set it to 0")
    if len(begin(tokenizer(), encode(tokenizer(), log.sample_prompt))) + log.sample_length > most:
        raise TrainError(f"log.sample_length = {log.sample_length}: at most model.context_length = {most} with the prompt")
    return tokenizer


def _keep_tokenizer(kept: Path, config: ModelConfig, source: Path | None, given: Any) -> None:
    if given is None and source is not None:
        of_data = RunTokenizer(source, config)  # checked before anything is kept
        if (source / "tokenizer.json").exists():
            with written_aside(kept) as aside:
                for file in filter(Path.is_file, source.iterdir()):
                    shutil.copyfile(file, aside / file.name)
            return
        given = of_data()
    if given is not None:
        with written_aside(kept) as aside:
            write_tokenizer(aside, given)


def greeting(
    recipe: Recipe, folder: RunFolder, data: Data, model: DiffusionLM, way: Way, layout: Layout | None, precision: str, *, step: int
) -> Iterator[str]:
    """The lines with which a run begins after `step` steps: what it does, how, and what of it is odd."""
    rows, section, train, device = data.rows, recipe.data, recipe.train, folder.world.device
    on_gpu, n_tokens = device.type == "cuda", data.steps * train.batch * section.length
    state = f"resumed at step {step}" if step else "from the beginning"
    shares = [f" ({share:g})" if len(rows.splits) > 1 else "" for share in rows.shares]
    sets = ", ".join(f"{split.folder}{share}" for split, share in zip(rows.splits, shares, strict=True))
    overlapping = " overlapping" * (section.stride not in (None, section.length))
    dtype = {"float64": torch.float64, "float32": torch.float32}.get(precision, torch.bfloat16)  # of matmuls
    path = explain(model, device, dtype, trains=True, tokens=section.length)
    residual = " with a bf16 residual stream" * (train.residual == "bf16")
    yield (
        f"{folder.path}: {state}, {data.steps} steps of {train.batch} rows ({way.micro_batch} a forward), {n_tokens:,} tokens; "
        f"{rows.n_rows:,}{overlapping} rows in {sets}; {precision}{residual} on {device.type}, {(layout or Layout()).text}; "
        f"runs {path}" + (f"; compiled: {way.compile}" if on_gpu else "")
    )
    if (sizes := recipe.blocks.sizes) and sizes[-1][0] >= data.steps:
        late = f"blocks.sizes: step {sizes[-1][0]}, from which blocks have model.block_size = {sizes[-1][1]}"
        yield f"{late}, is not before the run's end at step {data.steps}; train longer, or give earlier steps"
    if on_gpu and way.frugal:
        name, world = torch.cuda.get_device_name(device), folder.world
        plan = line_of_run(recipe, name, world.memory, layout, way.micro_batch, world.size, data.steps - step)
        if plan is not None:
            yield plan
    if precision == "bf16" and not on_gpu:
        yield 'train.precision = "bf16": slow on most CPUs; set "float32" or "auto"'


def provenance_of(recipe: Recipe, facts: Mapping[str, Any], rows: Rows, run: str, *, steps: int, updates: int) -> dict[str, Any]:
    """What a run's checkpoint says of its origin: the parent's provenance, updated with this run's facts."""
    return {
        **facts.get("parent", {}),
        "recipe": recipe.to_dict(),
        "seed": recipe.train.seed,
        "tokens_seen": steps * recipe.train.batch * recipe.data.length,
        "data": facts["data"],
        "data_kind": "examples" if trains_on_examples(rows) else "text",
        "run": run,
        "steps": steps,
        "updates": updates,
    }


def trains_on_examples(rows: Rows) -> bool:
    return any(split.kind == "examples" for split in rows.splits)
