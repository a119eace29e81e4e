"""The command `convert`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument

from sinkdlm.cli.loading import say
from sinkdlm.cli.options import Json, ModelSet, Seed, option


def convert(
    source: Annotated[
        str, Argument(metavar="SRC", help="Official .pth or .safetensors, a model or run folder, a GGUF, or hf://owner/name.")
    ],
    destination: Annotated[Path, Argument(metavar="DST")],
    to: Annotated[Literal["sinkdlm", "official", "hf"], option("Format to write; hf is for transformers.")] = "sinkdlm",
    overrides: ModelSet = None,
    tokenizer: Annotated[str | None, option("Tokenizer to store with the model: a folder, a file, or of the hub.")] = None,
    sink_init: Annotated[Literal["mean", "normal"], option("Start of new sinks: mean embedding plus noise, or normal.")] = "mean",
    gate_init: Annotated[Literal["normal", "keep"], option("Start of a new gate: normal, or the parent's function.")] = "normal",
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, option("Precision of weights; by default as found.")] = None,
    seed: Seed = 0,
    standalone: Annotated[bool, option("With --to hf: add code, so that it loads without sinkdlm.", "--standalone")] = False,
    as_json: Json = False,
) -> None:
    """Read any supported model (its format is detected); write a checkpoint, the official format, or one for transformers."""
    import torch

    from sinkdlm import interop

    made: dict[str, Any] = {"sink_init": sink_init, "gate_init": gate_init, "seed": seed, "tokenizer": tokenizer}
    made |= {"changes": dict(overrides or []), "dtype": getattr(torch, dtype) if dtype is not None else None}
    report = interop.convert(source, destination, to, standalone=standalone, **made)
    notes = [*report["notes"], *(["no tokenizer; --tokenizer adds one"] if report["tokenizer"] is None else [])]
    wrote = f"wrote  {report['wrote']} in {report['path']}, {report['dtype']}"
    say(report, "\n".join([f"found  {report['found']}", *(f"       {note}" for note in notes), wrote]), as_json)
