"""Load what several commands need (recipes, parents of runs, models with tokenizers), name models, print results.

A recipe that starts from a parent may leave [model] fields out: the parent fills them in. A recipe that gives all fields can be
shown and planned without the parent. A run that has begun keeps its whole recipe and no longer needs the parent. If the parent is
still there, it is read all the same, so that removing a line from a recipe has effect. Commands import what they need when run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import typer

from sinkdlm.errors import AnalysisError, ConfigError, ConvertError, UserError

_LOSSES = {  # of accuracy, by --dtype
    "float8": "rounds weights and inputs: SmolLM2-135M with a sink lost 0.36 nats a token",
    "nf4": "rounds weights to 4 bits: laptop-sink lost 0.002 nats a token, int8 nothing",
    "int4": "rounds weights to 4 bits: laptop-sink lost 0.009 nats a token, nf4, of the same size, 0.002",
}


def load_recipe(path: Path, overrides: Sequence[str] | None, out: Path | None = None) -> Any:
    """Read a recipe, its [model] filled in from its parent. out: the run folder, which may hold a run that has begun."""
    from sinkdlm.config.recipe import Recipe

    return Recipe.load(path, overrides or [], fill=lambda table: _fill_model(table, out))


def _fill_model(table: Mapping[str, Any], out: Path | None) -> Mapping[str, Any]:
    from sinkdlm.config.recipe import expand

    init, model = table.get("init"), table.get("model", {})
    parent = init.get("from") if isinstance(init, Mapping) else None
    if not isinstance(model, Mapping) or not isinstance(parent, str | None):
        return table  # a mistake, which Recipe reports
    if parent is None:
        return table if "vocab_size" in model else {**table, "model": {**model, **_vocabulary(table, out)}}
    return {**table, "model": _with_parent(parent, model, expand(model), _fields_of_run(out, parent), out is not None)}


def _vocabulary(table: Mapping[str, Any], out: Path | None) -> dict[str, int]:
    """vocab_size of a model from scratch: that of the run which goes on, or the rows that the data's tokenizer needs."""
    if (begun := _fields_of_run(out, None)) is not None:
        return {"vocab_size": begun["vocab_size"]}
    from sinkdlm.data.shards import open_split

    section = table.get("data")
    sets = section.get("sets") if isinstance(section, Mapping) else None
    try:
        found = [open_split(folder).tokenizer for folder in sets] if isinstance(sets, Mapping) else []
    except UserError:
        return {}  # training reports it
    rows = [tokenizer["rows"] for tokenizer in found if tokenizer is not None]
    return {"vocab_size": max(rows)} if rows else {}


def _fields_of_run(out: Path | None, parent: str | None) -> dict[str, Any] | None:
    """[model] of the run in this folder, if it has begun from this parent, or without one."""
    if out is None or not (out / "recipe.toml").is_file():
        return None
    from sinkdlm.config.recipe import Recipe
    from sinkdlm.training.run import made_a_step

    try:
        kept = Recipe.load(out / "recipe.toml")
    except ConfigError:
        return None  # training reports what is wrong with it
    return kept.model.model_dump() if kept.init.from_ == parent and made_a_step(out) else None


def _with_parent(
    parent: str, own: Mapping[str, Any], model: dict[str, Any], begun: dict[str, Any] | None, trains: bool
) -> dict[str, Any]:
    """Complete [model] from its parent. own: as written; model: with the preset's fields; begun: of the run that goes on;
    trains: not only shown or planned.

    A preset's vocabulary gives way to that of a diffusion model, which follows the data it was trained on.
    """
    from sinkdlm.checkpoint.hub import read_name
    from sinkdlm.config.model import ModelConfig

    given = {"mask_id", "n_kv_heads", "head_dim", *model}  # these are derived from others
    missing = [name for name, field in ModelConfig.model_fields.items() if field.is_required() and name not in given]
    follows = "vocab_size" not in own and model.get("mask_id") == model.get("vocab_size")
    vocabulary = {"vocab_size", "mask_id"} - {*own} if follows else set()
    open_model = {key: value for key, value in model.items() if key not in vocabulary}
    # A parent of the hub is fetched to train, and to know what [model] leaves out.
    absent = not Path(parent).exists() and not (trains and read_name(parent) is not None)
    if absent and (begun is not None or not missing):
        return {**begun, **open_model} if begun else model  # before anything heavy is imported
    from sinkdlm import interop
    from sinkdlm.interop.adapt import check_mask, choose_mask
    from sinkdlm.interop.tokenizer import tokenizer_of
    from sinkdlm.training.setup import check_shape

    try:
        source = interop.open_source(parent)
    except UserError as failure:
        if begun is not None or not missing:
            return {**begun, **open_model} if begun else model  # a new run reports it; a plan needs no parent
        why = f"[model] leaves out {', '.join(missing)}, and the parent cannot be read: {failure}"
        raise ConfigError(f"init.from = {parent!r}: {why}; give a parent that can be read, or a preset") from None
    model = open_model if source.has_mask else model
    try:
        check_shape(parent, model, source.config, interop.fixed_keys(source))
    except UserError:
        if begun is None:
            raise
        return {**begun, **model}  # the path holds another parent now, or training reports how the recipe differs from the run's
    found = source.config.model_dump()
    if not source.has_mask:
        del found["mask_id"]
        mask_id = model.get("mask_id")
        if mask_id is None and "vocab_size" not in model:  # with a vocab_size, [MASK] follows it
            found["mask_id"] = choose_mask(source, tokenizer_of(source))[0]
        elif isinstance(mask_id, int) and 0 <= mask_id < source.config.vocab_size and begun is None:
            tokenizer = tokenizer_of(source)
            if tokenizer is not None:
                check_mask(mask_id, tokenizer, "model.mask_id")
    return {**found, **model}


def load_parent(recipe: Any, dtype: Any, source: Any = None, tokenizer: Any = None) -> Any:
    """Load init.from of a recipe, whatever `convert` reads, as the variant that [model] describes.

    source, tokenizer: pass them if they are already read."""
    from sinkdlm import interop
    from sinkdlm.training.setup import check_shape

    init, fields = recipe.init, recipe.model.to_dict()
    source = source or interop.open_source(init.from_)
    check_shape(init.from_, fields, source.config, interop.fixed_keys(source))
    changes = {key: fields[key] for key in interop.FREE_KEYS}
    new = {"sink_init": init.sink_init, "gate_init": init.gate_init, "seed": recipe.train.seed}
    try:
        return interop.load_any(source, changes, **new, dtype=dtype, tokenizer=tokenizer)
    except ConvertError as failure:  # a field is called model.x in a recipe
        option, told = "--set ", str(failure)
        raise ConvertError(f"model.{told.removeprefix(option)}" if told.startswith(option) else told) from None


def given(**options: Any) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def say(found: Any, text: str, as_json: bool) -> None:
    """Print what a command found: as JSON, or as text."""
    typer.echo(json.dumps(found, indent=2, ensure_ascii=False) if as_json else text)


def name_models(models: list[str], given: str | None = None) -> list[str]:
    """Give each model a short name of its own: from `given`, comma-separated, or from its folder."""
    if given is not None:
        names = [name.strip() for name in given.split(",")]
    else:
        paths = [Path(model).resolve() for model in models]
        names = [path.parent.name if path.name == "model" else path.stem if path.is_file() else path.name for path in paths]
        names = [name if names.count(name) == 1 else f"{name}-{number}" for number, name in enumerate(names, start=1)]
    if len(names) != len(models) or len(set(names)) != len(names) or not all(names):
        raise AnalysisError(f"--names {','.join(names)}: give a different name for each of the {len(models)} models")
    for name in names:
        if "/" in name or name.startswith("."):
            raise AnalysisError(f"--names: {name!r} is used as a file name; leave out slashes and a leading dot")
    return names


def choose_device(name: str | None) -> Any:
    """Find the device of this name; by default a GPU if there is one."""
    import torch

    from sinkdlm.checkpoint.directory import find_device

    return find_device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def open_writer(checkpoint: str) -> Any:
    """Open a source of a model that can fill gaps."""
    from sinkdlm import interop

    source = interop.open_source(checkpoint)
    if not source.has_mask:
        cure = "adapt it first: sinkdlm train RECIPE --set init.from=..., as in smollm2-135m-sink"
        raise UserError(f"{checkpoint}: an AR model ({source.kind}), which has not learned to fill [MASK]; {cure}")
    return source


def load_model(checkpoint: str, device: Any, dtype: str | None, *, compiled: bool = False, writes: bool = False) -> Any:
    """Load a model with its tokenizer. dtype: None or auto is bfloat16 on a GPU, float32 elsewhere; float8 needs a GPU. int8, nf4
    and int4 hold the weights of blocks in fewer bits, and compute as auto does.

    writes: refuse an AR parent, which cannot fill gaps."""
    import torch

    from sinkdlm import interop

    if dtype == "float8":
        from sinkdlm.fast.float8_training import why_not

        if (missing := why_not(device)) is not None:
            raise UserError(f"--dtype float8: {missing}; leave it out")
    held = dtype if dtype in ("int8", "nf4", "int4") else None
    if dtype in (None, "auto", held):
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    source = open_writer(checkpoint) if writes else interop.open_source(checkpoint)
    kind = torch.bfloat16 if dtype == "float8" else getattr(torch, str(dtype))
    lm = interop.load_any(source, device="cpu" if held else device, dtype=kind)
    check_tokenizer(lm.tokenizer, checkpoint)
    if dtype == "float8":
        from sinkdlm.fast.quantized import to_float8

        to_float8(lm.model)
    if held:
        from sinkdlm.fast.weight_only import quantize_blocks

        quantize_blocks(lm.model, cast(Any, held))
        lm.model.to(device)
    if loss := _LOSSES.get(held or dtype):
        typer.echo(f"note  --dtype {held or dtype} {loss}; sinkdlm score compares it with --dtype auto on your texts", err=True)
    if compiled:
        from sinkdlm.fast import compile_blocks

        compile_blocks(lm.model)
    return lm


@contextmanager
def load_on_ranks(
    checkpoint: str, device: str | None, dtype: str | None, *, compiled: bool = False, writes: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Join the ranks that torchrun started, if any, and yield (world, model), the model on this rank's device."""
    from sinkdlm.distributed.world import joined

    with joined(device) as world:
        yield world, load_model(checkpoint, world.device, dtype, compiled=compiled, writes=writes)


def check_tokenizer(tokenizer: Any, checkpoint: str) -> None:
    if tokenizer is None:
        raise UserError(f"{checkpoint}: has no tokenizer; add one with: sinkdlm convert {checkpoint} DST --tokenizer T")
