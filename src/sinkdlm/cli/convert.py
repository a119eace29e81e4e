"""The command `convert`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument

from sinkdlm.cli.loading import say
from sinkdlm.cli.options import Json, ModelSet, Seed, option


def convert(
    source: Annotated[Path, Argument(metavar="SRC", help="Official .pth or .safetensors, a model or run folder, or a GGUF.")],
    destination: Annotated[Path, Argument(metavar="DST")],
    to: Annotated[Literal["sinkdlm", "official", "hf"], option("The form to write.")] = "sinkdlm",
    overrides: ModelSet = None,
    tokenizer: Annotated[Path | None, option("A tokenizer to put with the model: a folder or a file.")] = None,
    sink_init: Annotated[Literal["mean", "normal"], option("New sinks: mean of the embeddings plus noise, or normal.")] = "mean",
    gate_init: Annotated[Literal["normal", "keep"], option("A new gate: normal, or keep the parent's function.")] = "normal",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, option("Of the weights; by default as they are.")] = None,
    seed: Seed = 0,
    standalone: Annotated[bool, option("With --to hf: add a modelling file of its own.", "--standalone")] = False,
    as_json: Json = False,
) -> None:
    """Read any supported model (its kind is detected) and write it as a checkpoint, in the official form or for transformers."""
    import torch

    from sinkdlm import interop

    made: dict[str, Any] = {"sink_init": sink_init, "gate_init": gate_init, "seed": seed, "tokenizer": tokenizer}
    made |= {"changes": dict(overrides or []), "dtype": getattr(torch, dtype) if dtype is not None else None}
    report = interop.convert(source, destination, to, standalone=standalone, **made)
    notes = [*report["notes"], *(["no tokenizer; --tokenizer adds one"] if report["tokenizer"] is None else [])]
    wrote = f"wrote  {report['wrote']} in {report['path']}, {report['dtype']}"
    say(report, "\n".join([f"found  {report['found']}", *(f"       {note}" for note in notes), wrote]), as_json)
