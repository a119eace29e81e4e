"""Whether a parent fits its recipe and its data, and what marks a run's data."""

from collections.abc import Mapping, Sequence
from typing import Any

from sinkdlm.checkpoint.directory import Loaded
from sinkdlm.config.model import ModelConfig, preset_fields, preset_names
from sinkdlm.config.recipe import Recipe
from sinkdlm.data.encoding import mark_tokenizer
from sinkdlm.data.rows import Rows
from sinkdlm.errors import TrainError

_SHAPE = ("vocab_size", "n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff")


def check_parent(recipe: Recipe, rows: Rows, loaded: Loaded) -> None:
    """The parent has the shape that [model] names, and its tokenizer made the data."""
    check_shape(recipe.init.from_, recipe.model.to_dict(), loaded.config, ModelConfig.keys())
    marks = [split.tokenizer for split in rows.splits if split.tokenizer is not None]
    if loaded.tokenizer is None or not marks:
        return
    if mark_tokenizer(loaded.tokenizer)["vocabulary_sha256"] != marks[0]["vocabulary_sha256"]:
        raise TrainError(
            f"init.from = {recipe.init.from_!r}: its tokenizer is not the one that the data was prepared with; "
            f"prepare it with: sinkdlm data prepare ... --tokenizer {recipe.init.from_}"
        )


def check_shape(name: str | None, given: Mapping[str, Any], parent: ModelConfig, fixed: Sequence[str]) -> None:
    """[model], or as much of it as is given, says of a parent what its weights do. fixed: the keys that they decide."""
    found = parent.to_dict()
    wanted = {**found, **given}
    odd = [f"{key} = {found[key]!r}, model.{key} is {wanted[key]!r}" for key in fixed if found[key] != wanted[key]]
    if odd:
        raise TrainError(f"init.from = {name!r}: has {'; '.join(odd)}: {_fitting(found, wanted, fixed)}")


def _fitting(found: dict[str, Any], wanted: dict[str, Any], fixed: Sequence[str]) -> str:
    """What to write into [model]: the preset whose shape this is, if another than the one that is there, and what it leaves."""
    shape = [key for key in _SHAPE if found[key] != wanted[key]]
    for name in preset_names() if shape else ():
        preset = preset_fields(name)
        if all(preset[key] == found[key] for key in _SHAPE):
            rest = [f"{key} = {found[key]!r}" for key in fixed if preset.get(key, wanted[key]) != found[key]]
            return f'set model.preset = "{name}"' + (f", and with it {', '.join(rest)}" if rest else "")
    return "leave out of [model], preset or key, what the parent decides, and it is the parent's"


def mark_sets(rows: Rows) -> dict[str, Any]:
    """What tells the sets of a run from others."""
    return {
        str(split.folder): {
            "fingerprint": split.fingerprint,
            "tokens": split.n_tokens,
            "documents": split.n_documents,
            "tokenizer": split.tokenizer["sha256"] if split.tokenizer else None,
        }
        for split in rows.splits
    }
