"""The command `compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from sinkdlm.cli.loading import check_tokenizer, choose_device, given, load_model, name_models, open_writer, say
from sinkdlm.cli.options import Bos, Computing, Device, Documents, Field, Json, PolicySet, Sampler, Seed, Split, Subset, option
from sinkdlm.errors import AnalysisError, EvalError

_ROW_TOKENS = 2048  # at most, where both models read more


def compare(
    first: Annotated[str, Argument(metavar="A", help="A checkpoint, or anything that `convert` reads.")],
    second: Annotated[str, Argument(metavar="B", help="The model that is compared with A.")],
    texts: Annotated[Path, Argument(metavar="TEXTS", help="As `score` reads them: files, hf://owner/name, or a prepared set.")],
    field: Field = "text",
    documents: Documents = "file",
    split: Split = "train",
    subset: Subset = None,
    limit: Annotated[int | None, option("Use only the first N documents.", min=1)] = None,
    tokens: Annotated[int, option("Score at most this many tokens.", min=1)] = 1 << 15,
    draws: Annotated[int, option("Masks per row, the same for both models.", min=8, max=1 << 16)] = 16,
    prompts: Annotated[int, option("Beginnings of texts that both models continue; 0 for none.", min=0)] = 4,
    length: Annotated[int | None, option("Tokens to write; by default 64, or as many as fit.", min=1)] = None,
    config: Sampler = "smdm-origin",
    temperature: Annotated[float | None, option("Temperature of the draw; by default the policy's.")] = None,
    overrides: PolicySet = None,
    bos: Bos = None,
    seed: Seed = 0,
    names: Annotated[str | None, option("Names of the models, comma-separated; by default their folders' names.")] = None,
    out: Annotated[Path | None, option("Folder for compare.html and compare.json.")] = None,
    device: Device = None,
    dtype: Computing = "auto",
    as_json: Json = False,
) -> None:
    """Compare two models on the same texts: nats a token, samples on the same seeds, attention on sinks."""
    from sinkdlm.analysis import compare as comparing
    from sinkdlm.checkpoint.hub import read_name
    from sinkdlm.evals.answering import forward_tokens
    from sinkdlm.sampling.unmasking import policy_of

    policy = policy_of(config, **given(temperature=temperature), **dict(overrides or []))
    called = name_models([first, second], names)
    if out is not None:
        from sinkdlm.analysis.figures import check_drawing

        check_drawing()  # before the models run
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise AnalysisError(f"{out}: cannot be written: {failure.strerror}; choose another folder with --out") from None
    read: dict[str, Any] = {"field": field, "documents": documents, "split": split, "subset": subset, "limit": limit}
    found, tokenizer, room, n_prefix = _read([first, second], texts, read, tokens, bos)
    rows = comparing.cut(found, min(_ROW_TOKENS, room), tokens)
    if not rows:
        raise EvalError(f"{texts}: no document has a token to score within the {room} tokens that both models read")
    masks, beginnings = comparing.draw(rows, draws, seed), comparing.prompts_of(rows, prompts, tokenizer, n_prefix)
    sides = []
    for name, source in zip(called, (first, second), strict=True):
        lm = load_model(source, choose_device(device), dtype, writes=True)
        budget = forward_tokens(lm.model.embed.weight.device, lm.config.vocab_size)
        sides.append(_measure(lm, name, source, rows, masks, beginnings, budget, policy, length, seed, bos))
        del lm  # before the next one is loaded
    place = str(read_name(texts) or texts)
    settings = {"texts": place, "tokens_at_most": tokens, "row_tokens": min(_ROW_TOKENS, room), "draws": draws, "seed": seed}
    settings |= {"policy": config, "temperature": policy.temperature, **given(length=length), **dict(overrides or [])}
    comparison = comparing.Comparison((sides[0], sides[1]), rows, masks, beginnings, settings)
    files = {} if out is None else comparison.write(out)
    if as_json:
        say(comparison.to_dict(), "", as_json)
        return
    typer.echo(_describe(comparison))
    if files:
        typer.echo(f"wrote {files['html']} and {files['json']}")


def _read(sources: list[str], texts: Path, read: dict[str, Any], most: int, bos: bool | None) -> tuple[list[Any], Any, int, int]:
    """Documents as tokens, the same to both models; a tokenizer; how many tokens both models read, and stand before a text."""
    from sinkdlm.analysis.compare import Document
    from sinkdlm.evals import documents as reading
    from sinkdlm.interop.tokenizer import tokenizer_of

    opened = [open_writer(source) for source in sources]
    tokenizers = [tokenizer_of(one) for one in opened]
    for source, tokenizer in zip(sources, tokenizers, strict=True):
        check_tokenizer(tokenizer, source)
    if reading.is_prepared(texts):
        encoded = [reading.read_prepared(texts, tokenizer, most) for tokenizer in tokenizers]
        found = [encoded[0][: read["limit"]]] * 2
    else:
        given_, _ = reading.read_documents(texts, **read)
        found = [reading.encode_documents(given_, tokenizer, bos) for tokenizer in tokenizers]
    prefixes = [reading.prefix_of(tokenizer, bos) for tokenizer in tokenizers]
    if found[0] != found[1] or prefixes[0] != prefixes[1]:
        cure = "nats a token do not compare; compare bits per byte: sinkdlm score A TEXTS, and sinkdlm score B TEXTS"
        raise EvalError(f"{sources[0]} and {sources[1]} have different tokenizers: {cure}")
    prefix = prefixes[0]
    whole = [Document([*prefix, *ids], len(prefix) + n_given, number) for ids, n_given, number in found[0]]
    room = min(one.config.context_length for one in opened)
    return whole, tokenizers[0], room, len(prefix)


def _measure(lm: Any, name: str, source: str, rows: Any, masks: Any, prompts: Any, budget: int, policy: Any, *rest: Any) -> Any:
    from sinkdlm.analysis import compare as comparing
    from sinkdlm.data.display import ItemBar
    from sinkdlm.sampling.unmasking import policy_of
    from sinkdlm.text.prompts import policy_for

    length, seed, bos = rest
    with ItemBar(f"rows through {name}", len(rows)) as display:
        nats = comparing.losses(lm, rows, masks, budget, display.update)
    attention = comparing.attention(lm, name, rows, seed)
    policy = policy_of(policy, **policy_for(lm.tokenizer, policy, stop=True, until_eos=False))
    return comparing.Side(name, source, nats, attention, comparing.samples(lm, prompts, policy, length, seed, bos))


def _describe(comparison: Any) -> str:
    from sinkdlm.evals.report import align

    lines = [comparison.title, comparison.caution, comparison.lede]
    for grid in comparison.grids():
        lines += ["", grid.title, align([grid.head, *grid.rows], 1)]
    for prompt, *written in comparison.written():
        lines += ["", f"prompt  {prompt!r}", *(f"{name}  {text!r}" for name, text in zip(comparison.names, written, strict=True))]
    return "\n".join([*lines, "", f"note  {comparison.method}"])
