"""Write the card of a checkpoint on the hub: what it is, how to use it, where it comes from, how it was evaluated.

Says only what the checkpoint's provenance and its evaluations hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from sinkdlm.checkpoint.durable import read_object
from sinkdlm.config.model import ModelConfig
from sinkdlm.errors import CheckpointError

CARD, SIGN = "README.md", "<!-- Written by sinkdlm push, which replaces this card unless this line is removed. -->"
_FACTS = {
    "tokens_seen": "tokens seen",
    "steps": "steps",
    "seed": "seed",
    "created": "created",
    "sinkdlm_version": "sinkdlm",
    "torch_version": "torch",
}


def read_evaluations(folder: Path, provenance: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What `sinkdlm eval --out` wrote beside a model or within its run, of these very weights."""
    run = folder.parent if folder.name == "model" else folder
    found = [read_object(path, CheckpointError) for path in sorted([*run.glob("results.json"), *run.glob("*/results.json")])]
    own = [one["sinkdlm"] for one in found if isinstance(one.get("sinkdlm"), dict)]
    return [one for one in own if provenance.get("weights") and one.get("model", {}).get("weights") == provenance["weights"]]


def write_card(repo: str, config: ModelConfig, provenance: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> str:
    parent = provenance.get("parent")
    parent = parent if isinstance(parent, Mapping) else {}
    told = [("parent", parent.get("found")), ("parent's place", parent.get("path"))]
    data = provenance.get("data")
    for name, one in data.items() if isinstance(data, Mapping) else ():
        told.append(("data", f"{Path(name).name}: {one.get('tokens')} tokens" if isinstance(one, Mapping) else name))
    told += [(word, provenance.get(key)) for key, word in _FACTS.items()]
    sinks = f"{config.n_sinks}, {config.sink_kind}, {config.sink_position}" if config.n_sinks else "none"
    shape = [
        ("parameters", f"{config.count_parameters().total:,}"),
        ("layers, width, heads", f"{config.n_layers}, {config.d_model}, {config.n_heads} ({config.n_kv_heads} kv)"),
        ("vocabulary, [MASK]", f"{config.vocab_size}, id {config.mask_id}"),
        ("context", f"{config.context_length} tokens"),
        ("sinks", sinks),
        ("gate", config.gate),
        ("block size", config.block_size),
    ]
    base = str(parent.get("path", ""))
    lines = ["---", "library_name: sinkdlm", "tags: [masked-diffusion, attention-sink]"]
    lines += [f"base_model: {base.removeprefix('hf://').partition('@')[0]}"] if base.startswith("hf://") else []
    lines += ["---", SIGN, f"# {repo.rpartition('/')[2]}", "", "A masked diffusion language model, written by sinkdlm.", ""]
    lines += ["```sh", "pip install sinkdlm", f'sinkdlm sample hf://{repo} --prompt "..."', "```", ""]
    lines += ["In transformers:", "", "```python", "import sinkdlm.interop", "from transformers import AutoModelForMaskedLM", ""]
    lines += [f'model = AutoModelForMaskedLM.from_pretrained("{repo}")']
    lines += ["found = model.diffusion_generate(input_ids, attention_mask, max_new_tokens=64)", "```", ""]
    lines += ["## Model", "", *_table(("", ""), shape), "", "## Provenance", "", *_table(("", ""), told), ""]
    if isinstance(recipe := provenance.get("recipe"), Mapping):
        lines += ["The recipe:", "", "```toml", tomli_w.dumps(_set(recipe)).strip(), "```", ""]
    lines += ["## Evaluation", ""]
    for one in evaluations:
        rows = [[_number(line.get(name)) for name in ("task", "metric", "value", "stderr", "items")] for line in one["table"]]
        kinds = sorted({f"{task}: {own['estimator']}, {own['draws']} draws" for task, own in one["settings"].items()})
        lines += [*_table(("task", "metric", "value", "stderr", "items"), rows), ""]
        lines += [f"By {one['environment'].get('harness', 'lm-eval')}, seed {one['seed']}. {'; '.join(kinds)}.", ""]
    return "\n".join([*lines, *([] if evaluations else ["None is recorded.", ""])])


def _set(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table without keys that are not set, which TOML cannot say."""
    return {key: _set(one) if isinstance(one, Mapping) else one for key, one in table.items() if one is not None}


def _number(value: Any) -> Any:
    return f"{value:.4f}" if isinstance(value, float) else value


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    kept = [row for row in rows if row[1] is not None]
    cells = [[str("" if cell is None else cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in kept]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells)]
