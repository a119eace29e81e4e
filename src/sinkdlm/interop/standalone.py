"""Generate a modelling file that needs only transformers and torch, from this package's own sources.

`trust_remote_code=True` loads it where sinkdlm is not installed. It is the same code: noise, model/, sampling/ and the transformers
classes, one after another without the package's imports. A plain dataclass replaces the validated config, and plain torch the
samplers' Triton kernel.
"""

import ast
import inspect
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from sinkdlm import errors, noise
from sinkdlm.checkpoint.directory import CONFIG
from sinkdlm.config.model import ModelConfig
from sinkdlm.config.toml import suggest
from sinkdlm.diffusion import number_blocks
from sinkdlm.interop import hf, hf_config, hf_generation
from sinkdlm.kernels import cuda_graph
from sinkdlm.kernels.sampling import keep_eager
from sinkdlm.model import attention, context, lane, model, positions, visibility
from sinkdlm.sampling import (
    aliases,
    batch,
    constrained_drawing,
    constraint,
    denoiser,
    drawing,
    logprobs,
    loop,
    prefill,
    prefix_cache,
    requests,
    speculation,
    unmasking,
)

MODULE = "modeling_sinkdlm"
_MODEL = (noise, visibility, attention, lane, positions, context, model)
_SAMPLERS = (
    *(aliases, unmasking, constraint, logprobs, requests, drawing, constrained_drawing),
    *(cuda_graph, prefix_cache, prefill, denoiser, batch, speculation, loop),
)
_SOURCES = (*_MODEL, *_SAMPLERS, hf_config, hf_generation, hf)
_PARTS = (number_blocks, suggest, keep_eager, errors.UserError, errors.ModelError, errors.SamplingError)  # of other modules
_NO_KERNEL = "def draw_candidates(*_: Any) -> None:\n    return None"
_TITLE = '"""sinkdlm in one file: generated from the sources of the package sinkdlm. Apache-2.0."""'


def make_standalone(folder: Path) -> None:
    """Add the modelling file to a directory that SinkDLMForMaskedLM.save_pretrained wrote, and point config.json at it."""
    (folder / f"{MODULE}.py").write_text(source_text())
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    classes = {"AutoConfig": "SinkDLMConfig", "AutoModel": "SinkDLMForMaskedLM", "AutoModelForMaskedLM": "SinkDLMForMaskedLM"}
    config["auto_map"] = {auto: f"{MODULE}.{name}" for auto, name in classes.items()}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def source_text() -> str:
    plain, named = {"dataclasses", "difflib", "sys"}, defaultdict[str, set[str]](set)  # import a; from a import b
    bodies = [_config_source(), f"NO_NUMBERS = {errors.NO_NUMBERS!r}", _NO_KERNEL]
    bodies += [inspect.getsource(part).rstrip() for part in _PARTS]
    for module in _SOURCES:
        text = inspect.getsource(module)
        lines = text.splitlines()
        for node in reversed(ast.parse(text).body):  # bottom up, so that line numbers stay right
            if isinstance(node, ast.Import):
                plain.update(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                if not str(node.module).startswith("sinkdlm"):
                    named[str(node.module)].update(alias.name for alias in node.names)
            elif not isinstance(node, ast.Expr):  # a docstring
                continue
            del lines[node.lineno - 1 : node.end_lineno]
        bodies.append("\n".join(lines).strip())
    imports = [f"import {name}" for name in sorted(plain)]
    imports += [f"from {name} import {', '.join(sorted(names))}" for name, names in sorted(named.items())]
    return "\n\n".join([_TITLE, "\n".join(imports)]) + "\n\n\n" + "\n\n\n".join(bodies) + "\n"


def _config_source() -> str:
    """ModelConfig as a dataclass: its fields, filled from a checkpoint's config.json, and its properties."""
    lines = ["@dataclasses.dataclass(frozen=True)", "class ModelConfig:"]
    for name, field in ModelConfig.model_fields.items():
        kind = "int" if field.is_required() else "int | None" if field.default is None else type(field.default).__name__
        lines.append(f"    {name}: {kind}" + ("" if field.is_required() else f" = {field.default!r}"))
    properties = [value.fget for value in vars(ModelConfig).values() if isinstance(value, property) and value.fget is not None]
    return "\n".join(lines) + "\n\n" + "\n".join(map(inspect.getsource, properties)).rstrip()
