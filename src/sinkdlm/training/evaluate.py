"""Measure a model while it trains: validation loss with fixed noise, attention and value norms, a sampled text.

Nothing here changes weights or uses global randomness: a run gives the same weights with and without it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.data.rows import Batch, Rows
from sinkdlm.diffusion import Loss, Noisy, Schedule, corrupt, denoising_loss
from sinkdlm.distributed.world import World
from sinkdlm.fast.objective import chunked_nll, mask_compiled
from sinkdlm.model.model import DiffusionLM
from sinkdlm.model.observe import Watcher
from sinkdlm.sampling import generate
from sinkdlm.text.prompts import begin, encode

VALIDATION_SEED = 20_260_127  # the same in every run, so that all are compared on the same rows and masks
BUCKETS = 4  # of the masked ratio
_VALIDATION_TOKENS = 16_384  # per forward; fixed, because how rows share a forward changes the last bits
_PROBE_TOKENS = 512  # per row of a probe, to bound its cost

Precision = Callable[[], AbstractContextManager[Any]]
Times = Literal["golden", "independent"]


def bucket_of(probability: Tensor) -> Tensor:
    return (probability * BUCKETS).long().clamp_max(BUCKETS - 1)


def add_by_ratio(sums: Tensor, probability: Tensor, loss: Loss) -> None:
    """Add per-token NLL and counts to sums (2, BUCKETS), by the masked ratio of the row or block: easy and hard ones improve
    differently.

    probability: of masking, (B,) of each row, or (B, T) of each token's block."""
    buckets = bucket_of(probability)
    index = buckets[loss.rows] if buckets.dim() == 1 else buckets.flatten()[loss.positions]
    counted = torch.ones_like(index, dtype=torch.float64) if loss.used is None else loss.used.double()
    sums[0].index_add_(0, index, loss.nll.double())
    sums[1].index_add_(0, index, counted)


def means_by_ratio(sums: list[list[float]]) -> list[float | None]:
    return [total / count if count else None for total, count in zip(*sums, strict=True)]


def corrupt_batch(
    batch: Batch,
    model: DiffusionLM,
    schedule: Schedule,
    seed: int = VALIDATION_SEED,
    times: Times = "golden",
    *,
    block_size: int | None = None,
    t_range: tuple[float, float] = (0.0, 1.0),
) -> Noisy:
    """Mask a batch. block_size: instead of the model's."""
    config = model.config
    chosen: dict[str, Any] = {"schedule": schedule, "seed": seed, "times": times, "mask_id": config.mask_id, "t_range": t_range}
    chosen |= {"maskable": batch.maskable, "block_size": block_size or config.block_size, "documents": batch.documents}
    return corrupt(batch.tokens, batch.samples, **chosen, mask=mask_compiled)


@torch.no_grad()
def validate(
    model: DiffusionLM, rows: Rows, n_draws: int, schedule: Schedule, precision: Precision, world: World
) -> dict[str, Any]:
    """Return the bound in nats per token over `n_draws` draws, its standard error, and the mean NLL by masked ratio.

    Draw i masks a fixed row at a fixed t. The t are evenly spread, so the standard error of independent draws is an upper
    estimate. Batches are dealt to the ranks, but neither they nor the result depend on the number of ranks.
    """
    device, size = world.device, max(1, _VALIDATION_TOKENS // rows.section.length)
    # Per draw: loss, maskable, then sums of NLL and counts by masked ratio.
    found = torch.zeros(2 + 2 * BUCKETS, n_draws, dtype=torch.float64, device=device)
    for first in range(size * world.rank, n_draws + size * world.rank, size * world.size):
        part = slice(first, min(n_draws, first + size))
        host_batch = rows.batch(np.arange(part.start, part.stop)).rows(slice(0, size))
        batch = host_batch.to(device)
        noisy = corrupt_batch(batch, model, schedule)
        with precision():
            packed: dict[str, Any] = {"lengths": batch.lengths, "documents": batch.documents}
            loss = denoising_loss(model, batch.tokens, noisy, denominator=1.0, **packed, nll=chunked_nll)
        if first >= n_draws:
            continue
        per_position = torch.zeros(batch.tokens.shape, dtype=torch.float64, device=device)
        per_position[loss.scored] = loss.nll.double()
        by_row = noisy.t.dim() == 1
        losses = per_position.sum(1) * noisy.weight if by_row else (per_position * noisy.weight).sum(1)
        maskable = host_batch.scored(shifted=model.config.shift_logits).sum(1).to(device)
        buckets = bucket_of(schedule.probability(noisy.t if not by_row else noisy.t[:, None]))
        chosen = functional.one_hot(buckets, BUCKETS).double().expand(*per_position.shape, -1)
        sums = [(values[..., None] * chosen).sum(1).T for values in (per_position, loss.scored.double())]
        found[:, part] = torch.cat([losses[None], maskable.double()[None], *sums])
    losses, maskable, *sums = world.sum_(found).cpu()
    scored = float(maskable.sum())
    stderr = float(losses.std() / n_draws**0.5) / (scored / n_draws) if n_draws > 1 else None
    buckets = torch.stack(sums).sum(1).view(2, BUCKETS)
    return {
        "loss": float(losses.sum()) / scored,
        "stderr": stderr,
        "draws": n_draws,
        "nll_by_ratio": means_by_ratio(buckets.tolist()),
    }


@torch.no_grad()
def probe(
    model: DiffusionLM, rows: Rows, n_rows: int, schedule: Schedule, precision: Precision, device: torch.device
) -> list[dict[str, float]]:
    """Return per layer: attention shares on sinks and on the most attended content position, value norms (eq. 16), entropy.

    Every rank runs the same few rows: with sharded weights all ranks take part in a forward.
    """
    batch = rows.batch(np.arange(n_rows)).rows(slice(0, n_rows)).to(device)
    noisy = corrupt_batch(batch, model, schedule)
    tokens = noisy.tokens[:, :_PROBE_TOKENS]
    lengths = None if batch.lengths is None else batch.lengths.clamp_max(tokens.shape[1])
    own = slice(None) if lengths is None else torch.arange(tokens.shape[1], device=device) < lengths[:, None]  # no padding
    logits = [weight for name, weight in model.named_parameters() if name.endswith("sink_logit")]  # never sharded
    size = model.config.block_size
    clean = None if size is None else batch.tokens[:, :_PROBE_TOKENS]
    copies = 1 if clean is None else 2
    watcher = Watcher(lengths, logits or None, n_registers=model.config.n_registers, block_size=size, copies=copies)
    with precision():
        model(tokens, lengths=lengths, clean=clean, observe=watcher)
    found = []
    for layer in watcher.layers:
        top = layer.received.mean(1).amax(-1)
        facts = {"top_content_share": top, "content_value_norm": layer.value_norm[own], "entropy": layer.entropy}
        if layer.sink_received.shape[-1]:
            facts["sink_share"] = layer.sink_share
        if layer.sink_value_norm.shape[-1]:
            facts["sink_value_norm"] = layer.sink_value_norm
        found.append({name: float(values.mean()) for name, values in facts.items()})
    return found


@torch.no_grad()
def sample_text(
    model: DiffusionLM,
    tokenizer: Any,
    prompt: str,
    length: int,
    seed: int,
    precision: Precision,
    device: torch.device,
    *,
    config: str = "smdm-origin",
) -> str:
    """Sample a text, the same on every rank; all must call it. The prompt starts as in `sample`; the text comes without BOS."""
    ids = begin(tokenizer, encode(tokenizer, prompt))
    with precision():
        out = generate(
            model.denoiser(absent_ids(tokenizer, model.config.vocab_size)),
            prompt=[ids],
            device=device,
            length=len(ids) + length,
            mask_id=model.config.mask_id,
            config=config,
            temperature=1.0,
            seed=seed,
        )
    return tokenizer.decode(out.tokens[0, int(ids[:1] == [tokenizer.bos_token_id]) :].tolist())
