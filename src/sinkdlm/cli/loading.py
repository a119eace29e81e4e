"""Recipes as commands read them: what [model] leaves out of a run that starts from a parent is the parent's.

Only where the parent is here: a recipe that says everything can be shown and planned anywhere. A run that has begun keeps its
recipe whole, and needs the parent no more; where the parent is still here it is asked all the same, so that a line taken out of a
recipe is not made up for by the run that had it. Like cli.py, it imports what it needs when it runs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def load_recipe(path: Path, overrides: Sequence[str] | None, out: Path | None = None) -> Any:
    """out: the run folder, which may hold a run that has begun."""
    from sinkdlm.config.recipe import Recipe

    return Recipe.load(path, overrides or [], fill=lambda table: fill_model(table, out))


def fill_model(table: Mapping[str, Any], out: Path | None = None) -> Mapping[str, Any]:
    """A recipe's table, presets written out, with what [model] leaves open."""
    init, model = table.get("init"), table.get("model", {})
    parent = init.get("from") if isinstance(init, Mapping) else None
    if not isinstance(parent, str) or not isinstance(model, Mapping):
        return table  # a parent is not asked for, or a mistake that is told elsewhere
    return {**table, "model": {**_of_parent(parent, model, _of_run(out, parent)), **model}}


def _of_run(out: Path | None, parent: str) -> dict[str, Any] | None:
    if out is None or not (out / "recipe.toml").is_file():
        return None
    from sinkdlm.config.recipe import Recipe
    from sinkdlm.errors import ConfigError
    from sinkdlm.training.run import made_a_step

    try:
        kept = Recipe.load(out / "recipe.toml")
    except ConfigError:
        return None  # training says what is wrong with it
    return kept.model.model_dump() if kept.init.from_ == parent and made_a_step(out) else None


def _of_parent(parent: str, model: Mapping[str, Any], begun: dict[str, Any] | None) -> dict[str, Any]:
    """begun: [model] of the run that goes on, if there is one."""
    from sinkdlm.config.model import ModelConfig
    from sinkdlm.errors import ConfigError, UserError

    given = {"mask_id", "n_kv_heads", *model}  # these two follow from others
    missing = [name for name, field in ModelConfig.model_fields.items() if field.is_required() and name not in given]
    if not Path(parent).exists() and (begun is not None or not missing):
        return begun or {}  # before anything heavy is imported
    from sinkdlm import interop
    from sinkdlm.interop.adapt import check_mask, choose_mask
    from sinkdlm.interop.tokenizer import tokenizer_of
    from sinkdlm.training.parent_check import check_fields

    try:
        source = interop.open_source(parent)
    except UserError as failure:
        if begun is not None or not missing:
            return begun or {}  # whoever trains anew is told; a plan needs no parent
        why = f"[model] leaves out {', '.join(missing)}, and the parent cannot be asked: {failure}"
        raise ConfigError(f"init.from = {parent!r}: {why}; give it where it can be read, or a preset") from None
    try:
        check_fields(parent, model, source.config, interop.fixed_keys(source))
    except UserError:
        if begun is None:
            raise
        return begun  # another parent lies there by now, or training says how the recipe differs from the run's
    found = source.config.model_dump()
    if not source.has_mask:
        del found["mask_id"]
        given_mask = model.get("mask_id")
        if given_mask is None and "vocab_size" not in model:  # where that is given, [MASK] follows it
            found["mask_id"] = choose_mask(source, tokenizer_of(source))[0]
        elif isinstance(given_mask, int) and 0 <= given_mask < source.config.vocab_size and begun is None:
            tokenizer = tokenizer_of(source)
            if tokenizer is not None:
                check_mask(given_mask, tokenizer, "model.mask_id")
    return found
