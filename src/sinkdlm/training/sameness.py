"""Is it the same thing? The marks of a run's data, and whether a parent fits its recipe and its data."""

from typing import Any

from sinkdlm.checkpoint import Loaded
from sinkdlm.config import Recipe
from sinkdlm.data.encoding import mark_tokenizer
from sinkdlm.data.rows import Rows
from sinkdlm.errors import TrainError


def check_parent(recipe: Recipe, rows: Rows, loaded: Loaded) -> None:
    """The parent has the shape that [model] names, and its tokenizer made the data."""
    found, wanted = loaded.config.to_dict(), recipe.model.to_dict()
    odd = [f"{key} = {found[key]!r}, model.{key} is {wanted[key]!r}" for key in wanted if found[key] != wanted[key]]
    if odd:
        raise TrainError(f"init.from = {recipe.init.from_!r}: has {'; '.join(odd)}: make [model] fit it")
    marks = [split.tokenizer for split in rows.splits if split.tokenizer is not None]
    if loaded.tokenizer is None or not marks:
        return
    if mark_tokenizer(loaded.tokenizer)["vocabulary_sha256"] != marks[0]["vocabulary_sha256"]:
        raise TrainError(
            f"init.from = {recipe.init.from_!r}: its tokenizer is not the one that the data was prepared with; "
            f"prepare it with: sinkdlm data prepare ... --tokenizer {recipe.init.from_}"
        )


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
