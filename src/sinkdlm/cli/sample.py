"""The command `sample`."""

from pathlib import Path
from typing import Annotated

import typer

from sinkdlm.cli.loading import given, load_on_ranks, say
from sinkdlm.cli.options import Bos, Chat, Checkpoint, Compile, Computing, Device, Exact, Json, PolicySet, Sampler, Seed, option


def sample(
    checkpoint: Checkpoint,
    prompt: Annotated[str, option("What the text begins with.")] = "",
    prompts: Annotated[Path | None, option("A file of prompts: a line each, or .jsonl with prompt or messages.")] = None,
    infill: Annotated[str | None, option("Text with gaps, as in 'The [____] sat' or 'The [_:12] sat'.")] = None,
    gap: Annotated[int | None, option("With --infill: tokens of every gap.", min=1)] = None,
    suffix: Annotated[str, option("What the text ends with.")] = "",
    chat: Chat = False,
    bos: Bos = None,
    length: Annotated[int | None, option("Tokens to write; by default 64, or what fits.", min=1)] = None,
    until_eos: Annotated[bool, option("Append blocks until EOS; --length is the limit.", "--until-eos")] = False,
    n: Annotated[int, option("Texts for each prompt.", "--n", "-n", min=1)] = 1,
    seed: Seed = 0,
    config: Sampler = "llada",
    steps: Annotated[int | None, option("Denoising steps; by default one a token.")] = None,
    block: Annotated[int | None, option("Tokens of a block, filled left to right; by default all at once.")] = None,
    temperature: Annotated[float | None, option("0: the most likely token.")] = None,
    top_k: Annotated[int | None, option("Draw among so many tokens.")] = None,
    top_p: Annotated[float | None, option("Draw among the tokens that hold this much probability.")] = None,
    guidance: Annotated[float | None, option("Classifier-free guidance; 0: none.")] = None,
    threshold: Annotated[float | None, option("Commit every token this sure, and at least one a step.")] = None,
    cache: Annotated[str | None, option("none, or approximate: prefix, dual (with --block).")] = None,
    overrides: PolicySet = None,
    stop: Annotated[bool, option("Whether EOS ends a text.", "--stop/--no-stop")] = True,
    batch: Annotated[int, option("Texts that are written at the same time.", min=1)] = 64,
    deterministic: Exact = False,
    compile_: Compile = False,
    watch: Annotated[bool, option("Show the text as it appears, and where attention goes.", "--watch")] = False,
    device: Device = None,
    dtype: Computing = "auto",
    as_json: Json = False,
) -> None:
    """Write text with a model: after a prompt, into gaps, or as an answer."""
    from sinkdlm.sampling.unmasking import policy_of

    named = given(steps=steps, block=block, temperature=temperature, top_k=top_k, top_p=top_p)
    named |= given(guidance=guidance, threshold=threshold, cache=cache)
    policy = policy_of(config, **named | dict(overrides or []))
    from sinkdlm.text.generate import Job, check, write
    from sinkdlm.text.prompts import policy_for

    job = Job(prompt, prompts, infill, suffix, chat, length, gap, n, seed, until_eos, batch, deterministic, bos)
    check(job)  # a wrong file or gap is said before the model is read
    with load_on_ranks(checkpoint, device, dtype, compiled=compile_) as (world, lm):  # each rank writes its share
        policy = policy_of(policy, **policy_for(lm.tokenizer, policy, stop=stop, until_eos=until_eos))
        found = write(lm, job, policy, watch=watch, world=world)
    if not world.first:
        return
    if n > 1 and not policy.is_drawn:
        typer.echo("note  at temperature 0 the texts of a prompt are copies; --temperature 0.7 makes them differ", err=True)
    say(found, "\n".join(row["text"] for row in found["samples"]), as_json)
