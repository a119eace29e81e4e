"""The commands `data prepare`, `data info` and `data example`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument

from sinkdlm.cli.loading import say
from sinkdlm.cli.options import Documents, Field, Json, Seed, option

app = typer.Typer(help="Prepare training data, and look at it.", rich_markup_mode=None, no_args_is_help=True)
Kind = Literal["text", "sft", "gsm8k-two-stage", "gsm8k-one-stage"]
Executor = Literal["local", "datatrove", "slurm", "ray"]


def _count(text: str) -> int:
    """A number that may end in K, M or G, as in 100M."""
    scale = {"K": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:].upper(), 1)
    try:
        return int(float(text[:-1]) * scale) if scale > 1 else int(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is no number of tokens, such as 100M") from None


def _say_prepared(found: dict[str, Any], as_json: bool) -> None:
    from sinkdlm.data.display import counted

    lines = [f"{found['out']}: already prepared, with these settings and inputs"] if found["already"] else []
    for split, part in found["splits"].items():
        documents = counted(part["documents"], "document" if found["kind"] == "text" else "example")
        lines.append(f"{split:11s}{part['tokens']:,} tokens in {documents}, {counted(part['shards'], 'shard')} of {found['dtype']}")
    lines += [f"note       {note}" for note in found["notes"]]
    if "seconds" in found:
        rate = f"{found['bytes'] / found['seconds'] / 1e6:.1f} MB/s, {found['tokens_per_second'] / 1e6:.2f}M tokens/s"
        lines.append(f"wrote      {found['out']} in {found['seconds']:.1f} s ({rate})")
    say(found, "\n".join(lines), as_json)


@app.command("prepare")
def data_prepare(
    inputs: Annotated[list[str], Argument(metavar="IN...", help="Files, folders, or data sets of the Hugging Face hub.")],
    tokenizer: Annotated[Path, option("A checkpoint, folder, tokenizer.json, SentencePiece .model or GGUF.")],
    out: Annotated[Path, option("The folder of token shards to write, or to go on with.")],
    kind: Annotated[Kind, option("Running text, or examples of prompt and response.")] = "text",
    field: Field = "text",
    documents: Documents = "file",
    validation: Annotated[float, option("Share of documents held out.", min=0.0, max=0.999)] = 0.01,
    shard_tokens: Annotated[Any, option("Tokens in a shard.", parser=_count, metavar="N")] = "100M",
    length: Annotated[int | None, option("Examples of more tokens are left out.", min=2)] = None,
    eos: Annotated[int | None, option("Id that ends a document; by default the tokenizer's own.", min=0)] = None,
    bos: Annotated[bool | None, option("Examples: BOS or not; by default as the tokenizer.", "--bos/--no-bos")] = None,
    split: Annotated[str, option("Of a hub data set.")] = "train",
    config: Annotated[str | None, option("Of a hub data set.")] = None,
    executor: Annotated[Executor, option("This process, or datatrove's: local, Slurm, Ray.")] = "local",
    tasks: Annotated[int, option("datatrove: parts that the files are dealt to.", min=1)] = 1,
    workers: Annotated[int, option("datatrove: tasks at a time, -1 for all.", min=-1)] = -1,
    partition: Annotated[str | None, option("Slurm: the partition.")] = None,
    time: Annotated[str, option("Slurm: time limit of a task.")] = "24:00:00",
    logging_dir: Annotated[Path | None, option("datatrove: its logs; by default logs/ in the output.")] = None,
    as_json: Json = False,
) -> None:
    """Turn text into token shards: text, jsonl, parquet or a hub data set. The same command goes on where it was interrupted."""
    from sinkdlm.data.prepare import Settings, prepare

    read: dict[str, Any] = {"field": field, "documents": documents, "split": split, "config": config}
    written: dict[str, Any] = {"validation": validation, "shard_tokens": shard_tokens, "length": length, "eos_id": eos, "bos": bos}
    settings = Settings(kind=kind, **read, **written)
    from sinkdlm.data.inputs import find_sources
    from sinkdlm.interop.tokenizer import read_tokenizer_at

    find_sources(inputs, split=split, config=config)  # a wrong name is said before the tokenizer is read
    loaded = read_tokenizer_at(tokenizer)
    if executor == "local":
        _say_prepared(prepare(inputs, loaded, out, settings, source=str(tokenizer)), as_json)
        return
    from sinkdlm.data.scale import prepare_at_scale

    found = prepare_at_scale(inputs, loaded, out, settings, executor, tasks, workers, partition, time, logging_dir)
    say(found, found["said"], as_json)


@app.command("info")
def data_info(
    folder: Annotated[Path, Argument(metavar="DIR", help="Our shards, datatrove's *.ds, or SMDM's packed *.bin.")],
    samples: Annotated[int, option("Documents or examples to show.", min=0)] = 2,
    tokenizer: Annotated[Path | None, option("To decode samples; by default the one in DIR.")] = None,
    as_json: Json = False,
) -> None:
    """Check every size and checksum of a set, count it, and show some of it as text."""
    from sinkdlm.data.inspect import describe, read_set
    from sinkdlm.interop.tokenizer import read_tokenizer_at

    found = read_set(folder, read_tokenizer_at(tokenizer) if tokenizer else None, samples=samples)
    say(found, describe(found), as_json)


@app.command("example")
def data_example(
    out: Annotated[Path, option("The folder of token shards to write.")],
    documents: Annotated[int, option("Documents, or question and answer pairs.", min=2)] = 20_000,
    kind: Annotated[Literal["text", "sft"], option("Running text, or questions with answers.")] = "text",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write a small made-up corpus with its own character-level tokenizer: sums, word problems, patterns, sentences."""
    from sinkdlm.data.synthetic import prepare_example

    _say_prepared(prepare_example(out, documents=documents, kind=kind, seed=seed), as_json)
