"""The command `sample`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from sinkdlm.cli.loading import given, load_on_ranks, say
from sinkdlm.cli.options import (
    Bos,
    Chat,
    Checkpoint,
    Compile,
    Computing,
    Device,
    Exact,
    Json,
    NumberWord,
    PolicySet,
    Sampler,
    Seed,
    TextWord,
    WholeWord,
    option,
)

# Suits a model of plain text, which repeats itself where every token is the likeliest.
BASE_POLICY = ("--policy", "smdm-origin", "--temperature", "0.8")


def sample(
    checkpoint: Checkpoint,
    prompt: Annotated[str, option("Text that the model continues.")] = "",
    prompts: Annotated[Path | None, option("File of prompts: one per line, or .jsonl with prompt, question or messages.")] = None,
    infill: Annotated[str | None, option("Text with gaps to fill, as in 'The [____] sat' or 'The [_:12] sat'.")] = None,
    gap: Annotated[int | None, option("With --infill: tokens in every gap.", min=1)] = None,
    suffix: Annotated[str, option("Fixed text that follows what the model writes.")] = "",
    chat: Chat = False,
    bos: Bos = None,
    length: Annotated[int | None, option("Tokens to write; by default 64, or as many as fit.", min=1)] = None,
    until_eos: Annotated[bool, option("Write block after block until EOS, at most --length tokens.", "--until-eos")] = False,
    schema: Annotated[Path | None, option("File of a JSON schema: what is written is JSON that fits it.")] = None,
    regex: Annotated[str | None, option("Regular expression that what is written must match as a whole.")] = None,
    n: Annotated[int, option("Number of texts per prompt.", "--n", "-n", min=1)] = 1,
    seed: Seed = 0,
    config: Sampler = "llada",
    steps: Annotated[int | None, option("Denoising steps; by default one per token.")] = None,
    block: Annotated[
        int | None, option("Tokens per block, filled left to right; by default one block, or the model's own.")
    ] = None,
    temperature: Annotated[float | None, option("Temperature of the draw; by default 0, the most likely token.")] = None,
    top_k: Annotated[int | None, option("Draw from this many of the most likely tokens.")] = None,
    top_p: Annotated[float | None, option("Draw from the most likely tokens that together have this probability.")] = None,
    min_p: Annotated[float | None, option("Draw from tokens at least this probable, as a share of the likeliest.")] = None,
    repetition_penalty: Annotated[float | None, option("Make tokens on the canvas less likely; by default 1, none.")] = None,
    guidance: Annotated[float | None, option("Weight of classifier-free guidance; by default 0, none.")] = None,
    threshold: Annotated[float | None, option("Commit every token with at least this probability; at least one per step.")] = None,
    cache: Annotated[
        str | None,
        option("KV cache: auto, none, exact (block diffusion, the default there); with --block prefix, dual (approximate)."),
    ] = None,
    speculate: Annotated[
        str | None, option("Take several steps in a forward, same tokens: how many canvases it checks, as in 4, or auto.")
    ] = None,
    draft: Annotated[
        str | None, option("With --speculate: canvases in a line (linear, the default) or with second choices (tree).")
    ] = None,
    overrides: PolicySet = None,
    stop: Annotated[bool, option("End a text at EOS, or write on.", "--stop/--no-stop")] = True,
    batch: Annotated[int, option("Number of texts written at the same time.", min=1)] = 64,
    deterministic: Exact = False,
    compile_: Compile = False,
    watch: Annotated[bool, option("Show the text and its attention at every step.", "--watch")] = False,
    device: Device = None,
    dtype: Computing = "auto",
    as_json: Json = False,
    max_new_tokens: WholeWord = None,
    gen_length: WholeWord = None,
    num_inference_steps: WholeWord = None,
    diffusion_steps: WholeWord = None,
    block_length: WholeWord = None,
    cfg_scale: NumberWord = None,
    guidance_scale: NumberWord = None,
    remasking: TextWord = None,
    alg: TextWord = None,
    alg_temp: NumberWord = None,
) -> None:
    """Write text with a model: after a prompt, into gaps, or as a chat answer."""
    from sinkdlm.sampling.aliases import translate
    from sinkdlm.sampling.unmasking import FIELDS, policy_of

    named = given(steps=steps, block=block, temperature=temperature, top_k=top_k, top_p=top_p)
    named |= given(min_p=min_p, repetition_penalty=repetition_penalty, guidance=guidance, threshold=threshold, cache=cache)
    named |= given(draft=draft)
    named |= given(speculate=int(speculate) if speculate is not None and speculate.isdecimal() else speculate)
    named |= given(num_inference_steps=num_inference_steps, diffusion_steps=diffusion_steps, block_length=block_length)
    named |= given(cfg_scale=cfg_scale, guidance_scale=guidance_scale, remasking=remasking, alg=alg, alg_temp=alg_temp)
    sizes = given(length=length, max_new_tokens=max_new_tokens, gen_length=gen_length)
    named = translate(sizes | named, ("length", *FIELDS))
    length = named.pop("length", None)
    policy = policy_of(config, **named | translate(dict(overrides or []), FIELDS))
    from sinkdlm.text.generate import Job, check, write
    from sinkdlm.text.prompts import policy_for
    from sinkdlm.text.schema import read_schema

    job = Job(prompt, prompts, infill, suffix, chat, length, gap, n, seed, until_eos, batch, deterministic, bos)
    job = replace(job, schema=None if schema is None else read_schema(schema), regex=regex)
    check(job)  # report a wrong file or gap before reading the model
    with load_on_ranks(checkpoint, device, dtype, compiled=compile_, writes=True) as (world, lm):  # each rank writes a share
        ends = {"stop": stop, "until_eos": until_eos, "block_size": lm.config.block_size}
        policy = policy_of(policy, **policy_for(lm.tokenizer, policy, **ends))
        found = write(lm, job, policy, watch=watch, world=world)
    if not world.first:
        return
    if lm.provenance.get("data_kind") == "text" and infill is None and not (policy.is_drawn or named or overrides):
        typer.echo(
            f"note  greedy text of a base model tends to repeat itself; try {' '.join(BASE_POLICY)}, or --temperature 1", err=True
        )
    elif n > 1 and not policy.is_drawn:
        typer.echo("note  at temperature 0 the texts of a prompt are copies; --temperature 0.8 makes them differ", err=True)
    say(found, "\n".join(row["text"] for row in found["samples"]), as_json)
