"""Text from a denoiser: every step commits the positions that it is surest of.

Takes any callable that maps tokens (B, T) to logits (B, T, V); knows no model, tokenizer or file. Noise is keyed by (seed, request,
step, position), so a request draws the same numbers alone and in a batch.

B requests, T canvas, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sinkdlm.noise import Stream, uniform


class Sampled(NamedTuple):
    """tokens (B, T), prompt included; steps that were taken."""

    tokens: Tensor
    steps: int


@torch.no_grad()
def generate(
    denoiser: Callable[[Tensor], Tensor],
    *,
    prompt: Tensor,
    length: int,
    mask_id: int,
    steps: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> Sampled:
    """Fills a canvas of `length` after prompt (B, P), an equal number of positions a step (the remainder first), the most confident
    first: LLaDA's low-confidence remasking in one block. By default one position a step."""
    batch, given = prompt.shape
    if given >= length:
        raise ValueError(f"length = {length}: counts the whole canvas, prompt included, and the prompt alone has {given} tokens")
    if temperature < 0:
        raise ValueError(f"temperature = {temperature}: allowed is 0 or more")
    n_open = length - given
    steps = min(steps or n_open, n_open)
    tokens = torch.cat([prompt, prompt.new_full((batch, n_open), mask_id)], dim=1)
    for step in range(steps):
        logits = denoiser(tokens).double()  # (B, T, V)
        if mask_id < logits.shape[-1]:
            logits[..., mask_id] = -torch.inf
        proposal = _draw(logits, temperature, seed, step)
        confidence = logits.softmax(-1).gather(-1, proposal[..., None])[..., 0]
        confidence = confidence.masked_fill(tokens != mask_id, -1.0)
        quota = n_open // steps + (step < n_open % steps)
        chosen = confidence.topk(quota, dim=1).indices
        tokens = tokens.scatter(1, chosen, proposal.gather(1, chosen))
    return Sampled(tokens, steps)


def _draw(logits: Tensor, temperature: float, seed: int, step: int) -> Tensor:
    """Gumbel-max: argmax of logits / temperature + Gumbel noise is a draw from the softmax at that temperature."""
    if temperature == 0:
        return logits.argmax(-1)
    batch, length, vocab = logits.shape
    requests, positions, words = (torch.arange(n, device=logits.device) for n in (batch, length, vocab))
    noise = uniform(seed, Stream.SAMPLING, requests[:, None, None], step, positions[:, None], words)
    return (logits / temperature - torch.log(-torch.log(noise))).argmax(-1)
