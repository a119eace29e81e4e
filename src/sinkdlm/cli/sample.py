"""The command `sample`."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from sinkdlm.cli.loading import load_model
from sinkdlm.cli.options import Bos, Checkpoint, Compile, Computing, Device, Json, PolicyOverrides, Sampler, Seed, say


def sample(
    checkpoint: Checkpoint,
    prompt: Annotated[str, Option(help="What the text begins with.")] = "",
    prompts: Annotated[Path | None, Option(help="A file of prompts: a line each, or .jsonl with prompt or messages.")] = None,
    infill: Annotated[str | None, Option(help="Text with gaps, as in 'The [____] sat' or 'The [_:12] sat'.")] = None,
    gap: Annotated[int | None, Option(min=1, help="With --infill: tokens of every gap.")] = None,
    suffix: Annotated[str, Option(help="What the text ends with.")] = "",
    chat: Annotated[bool, Option("--chat", help="The prompt is a user's turn in the tokenizer's chat template.")] = False,
    bos: Bos = None,
    length: Annotated[int | None, Option(min=1, help="Tokens to write; by default 64, or what fits.")] = None,
    until_eos: Annotated[bool, Option("--until-eos", help="Append blocks until EOS; --length is the limit.")] = False,
    n: Annotated[int, Option("--n", "-n", min=1, help="Texts for each prompt.")] = 1,
    seed: Seed = 0,
    config: Sampler = "llada",
    steps: Annotated[int | None, Option(help="Denoising steps; by default one a token.")] = None,
    block: Annotated[int | None, Option(help="Tokens of a block, filled left to right; by default all at once.")] = None,
    temperature: Annotated[float | None, Option(help="0: the most likely token.")] = None,
    top_k: Annotated[int | None, Option(help="Draw among so many tokens.")] = None,
    top_p: Annotated[float | None, Option(help="Draw among the tokens that hold this much probability.")] = None,
    guidance: Annotated[float | None, Option(help="Classifier-free guidance; 0: none.")] = None,
    threshold: Annotated[float | None, Option(help="Commit every token this sure, and at least one a step.")] = None,
    cache: Annotated[str | None, Option(help="none, or approximate: prefix, dual (with --block).")] = None,
    overrides: PolicyOverrides = None,
    stop: Annotated[bool, Option("--stop/--no-stop", help="Whether EOS ends a text.")] = True,
    batch: Annotated[int, Option(min=1, help="Texts that are written at the same time.")] = 64,
    deterministic: Annotated[bool, Option("--deterministic", help="Bit-equal alone and in any batch; slower.")] = False,
    compile_: Compile = False,
    watch: Annotated[bool, Option("--watch", help="Show the text as it appears, and where attention goes.")] = False,
    device: Device = None,
    dtype: Computing = "auto",
    as_json: Json = False,
) -> None:
    """Write text with a model: after a prompt, into gaps, or as an answer."""
    from sinkdlm.sampling.unmasking import policy_of

    named = {"steps": steps, "block": block, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    named |= {"guidance": guidance, "threshold": threshold, "cache": cache}
    given = {name: value for name, value in named.items() if value is not None}
    policy = policy_of(config, **given | dict(overrides or []))
    from sinkdlm.text.generate import Job, check, write
    from sinkdlm.text.prompts import policy_for

    job = Job(prompt, prompts, infill, suffix, chat, length, gap, n, seed, until_eos, batch, deterministic, bos)
    check(job)  # a wrong file or gap is said before the model is read
    from sinkdlm.distributed.world import joined

    with joined(device) as world:  # under torchrun each rank writes its share
        lm = load_model(checkpoint, world.device, dtype, compiled=compile_)
        policy = policy_of(policy, **policy_for(lm.tokenizer, policy, stop=stop, until_eos=until_eos))
        found = write(lm, job, policy, watch=watch, world=world)
    if not world.first:
        return
    if n > 1 and not policy.is_drawn:
        typer.echo("note  at temperature 0 the texts of a prompt are copies; --temperature 0.7 makes them differ", err=True)
    say(found, "\n".join(row["text"] for row in found["samples"]), as_json)
