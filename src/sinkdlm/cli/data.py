"""The commands `data prepare`, `data info` and `data example`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument

from sinkdlm.cli.loading import say
from sinkdlm.cli.options import Documents, Field, Json, Seed, Split, option

app = typer.Typer(help="Prepare training data and look at it.", rich_markup_mode=None, no_args_is_help=True, add_completion=False)
Kind = Literal["text", "sft", "gsm8k-two-stage", "gsm8k-one-stage"]
Executor = Literal["local", "datatrove", "slurm", "ray"]


def _count(text: str) -> int:
    """Parse a number that may end in K, M or G, as in 100M."""
    scale = {"K": 10**3, "M": 10**6, "G": 10**9}.get(text[-1:].upper(), 1)
    try:
        return int(float(text[:-1]) * scale) if scale > 1 else int(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a number of tokens; write it as in 100M") from None


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
    inputs: Annotated[list[str], Argument(metavar="IN...", help="Files, folders, or data sets of the hub, hf://owner/name.")],
    tokenizer: Annotated[str, option("bytes, chars or bpe:2048, from the text itself; or a file, a folder or hf://owner/name.")],
    out: Annotated[Path, option("Folder for the token shards; the same command resumes there.")],
    kind: Annotated[Kind, option("text: running text; the others: prompts with responses.")] = "text",
    field: Field = "text",
    documents: Documents = "file",
    validation: Annotated[float, option("Share of documents held out for validation.", min=0.0, max=0.999)] = 0.01,
    shard_tokens: Annotated[Any, option("Tokens per shard, as in 100M.", parser=_count, metavar="N")] = "100M",
    length: Annotated[int | None, option("Leave out examples with more tokens than this.", min=2)] = None,
    eos: Annotated[int | None, option("Token id that ends a document; by default the tokenizer's EOS.", min=0)] = None,
    bos: Annotated[bool | None, option("Begin examples with BOS or not; default: as the tokenizer.", "--bos/--no-bos")] = None,
    split: Split = "train",
    config: Annotated[str | None, option("Configuration of a hub data set.", "--config", "--subset")] = None,
    executor: Annotated[Executor, option("local: this process; the others: datatrove's executors.")] = "local",
    tasks: Annotated[int, option("datatrove: number of tasks that share the files.", min=1)] = 1,
    workers: Annotated[int, option("datatrove: tasks run at the same time; -1 for all.", min=-1)] = -1,
    partition: Annotated[str | None, option("Slurm: partition.")] = None,
    time: Annotated[str, option("Slurm: time limit of a task.")] = "24:00:00",
    logging_dir: Annotated[Path | None, option("datatrove: folder for logs; by default logs/ in --out.")] = None,
    as_json: Json = False,
) -> None:
    """Turn text, jsonl, parquet or a hub data set into token shards. After an interruption, the same command resumes."""
    from sinkdlm.data.prepare import Settings, prepare

    read: dict[str, Any] = {"field": field, "documents": documents, "split": split, "config": config}
    written: dict[str, Any] = {"validation": validation, "shard_tokens": shard_tokens, "length": length, "eos_id": eos, "bos": bos}
    settings = Settings(kind=kind, **read, **written)
    loaded = _tokenizer(tokenizer, inputs, settings)
    if executor == "local":
        _say_prepared(prepare(inputs, loaded, out, settings, source=tokenizer), as_json)
        return
    from sinkdlm.data.scale import prepare_at_scale

    found = prepare_at_scale(inputs, loaded, out, settings, executor, tasks, workers, partition, time, logging_dir)
    say(found, found["said"], as_json)


def _tokenizer(name: str, inputs: list[str], settings: Any) -> Any:
    """Read the tokenizer, or make it from the inputs."""
    from sinkdlm.data.inputs import find_sources
    from sinkdlm.data.own_tokenizer import ALLOWED, is_own, make_tokenizer
    from sinkdlm.errors import DataError
    from sinkdlm.interop.tokenizer import read_tokenizer_at

    sources = find_sources(inputs, split=settings.split, config=settings.config)  # report a wrong name first
    if is_own(name):
        return make_tokenizer(name, sources, settings)
    if not (name.startswith("hf:/") or Path(name).exists()):
        raise DataError(f"--tokenizer {name}: no such tokenizer file or folder; to make one of the text, give {ALLOWED}")
    return read_tokenizer_at(name)


@app.command("info")
def data_info(
    folder: Annotated[Path, Argument(metavar="DIR", help="Folder with token shards, datatrove's *.ds, or SMDM's packed *.bin.")],
    samples: Annotated[int, option("Documents or examples to show.", min=0)] = 2,
    tokenizer: Annotated[Path | None, option("Tokenizer that decodes samples; by default the one in DIR.")] = None,
    as_json: Json = False,
) -> None:
    """Check a prepared set and show samples. Verifies every size and checksum, and prints counts."""
    from sinkdlm.data.inspect import describe, read_set
    from sinkdlm.interop.tokenizer import read_tokenizer_at

    found = read_set(folder, read_tokenizer_at(tokenizer) if tokenizer else None, samples=samples)
    say(found, describe(found), as_json)


@app.command("example")
def data_example(
    out: Annotated[Path, option("Folder for the token shards.")],
    documents: Annotated[int, option("Number of documents, or of question-answer pairs.", min=2)] = 20_000,
    kind: Annotated[Literal["text", "sft"], option("text: running text; sft: questions with answers.")] = "text",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Write a small synthetic corpus. It has sums, word problems, patterns, sentences and a character-level tokenizer."""
    from sinkdlm.data.synthetic import prepare_example

    _say_prepared(prepare_example(out, documents=documents, kind=kind, seed=seed), as_json)
