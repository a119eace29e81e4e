"""The command `convert`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from sinkdlm.cli.options import Json, parse_override, say


def convert(
    source: Annotated[Path, Argument(metavar="SRC", help="Official .pth or .safetensors, a model or run folder, or a GGUF.")],
    destination: Annotated[Path, Argument(metavar="DST")],
    to: Annotated[Literal["sinkdlm", "official", "hf"], Option(help="The form to write.")] = "sinkdlm",
    overrides: Annotated[
        list[Any] | None,
        Option("--set", metavar="KEY=VALUE", parser=parse_override, help="A field of the model, as in n_sinks=1."),
    ] = None,
    tokenizer: Annotated[Path | None, Option(help="A tokenizer to put with the model: a folder or a file.")] = None,
    sink_init: Annotated[
        Literal["mean", "normal"], Option(help="New sinks: mean of the embeddings plus noise, or normal.")
    ] = "mean",
    gate_init: Annotated[Literal["normal", "keep"], Option(help="A new gate: normal, or keep the parent's function.")] = "normal",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Option(help="Convert the weights; by default they stay as they are."),
    ] = None,
    seed: Annotated[int, Option(min=0, max=2**63 - 1, help="Of new rows and gates.")] = 0,
    standalone: Annotated[bool, Option("--standalone", help="With --to hf: add a modelling file of its own.")] = False,
    as_json: Json = False,
) -> None:
    """Read any supported model (its kind is detected) and write it as a checkpoint, in the official form or for transformers."""
    import torch

    from sinkdlm import interop

    report = interop.convert(
        source,
        destination,
        to,
        standalone=standalone,
        changes=dict(overrides or []),
        tokenizer=tokenizer,
        sink_init=sink_init,
        gate_init=gate_init,
        seed=seed,
        dtype=getattr(torch, dtype) if dtype is not None else None,
    )
    notes = [*report["notes"], *(["no tokenizer; --tokenizer adds one"] if report["tokenizer"] is None else [])]
    wrote = f"wrote  {report['wrote']} in {report['path']}, {report['dtype']}"
    say(report, "\n".join([f"found  {report['found']}", *(f"       {note}" for note in notes), wrote]), as_json)
