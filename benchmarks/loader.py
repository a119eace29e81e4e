"""Measure the data loader's tokens a second beside those of a training step of smdm-34m, in one run.

    python -m benchmarks.loader

The loader is measured as a whole: keyed order, reading, filling rows, checks of ids, the reader thread, the copy to the device.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.kills import write_set
from benchmarks.measuring import arguments, measure, quantiles, result, write
from sinkdlm.config.model import ModelConfig
from sinkdlm.config.recipe import DataSection
from sinkdlm.data.rows import Rows, open_rows
from sinkdlm.diffusion import corrupt, denoising_loss
from sinkdlm.model.model import DiffusionLM
from sinkdlm.training.prefetch import prefetch

LENGTH = 1024
TOKENS = 20_000_000


def loader_rates(rows: Rows, batch: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Tokens a second of the loader, over several stretches of batches."""
    per_stretch = max(4, 2_000_000 // (batch * LENGTH))
    rates = []
    for number in range(repeats + 1):
        feed = prefetch(rows, number * per_stretch, (number + 1) * per_stretch, batch, slice(0, batch), device)
        began = time.perf_counter()
        for item in feed:
            assert item.to(device).tokens.shape == (batch, LENGTH)
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(per_stretch * batch * LENGTH / (time.perf_counter() - began))
    return quantiles(rates[1:])


def model_rate(rows: Rows, batch: int, device: torch.device) -> dict[str, float]:
    """Tokens a second of training steps of smdm-34m with a sink: forward, backward and update."""
    model = DiffusionLM(ModelConfig.preset("smdm-34m", n_sinks=1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    if device.type == "cuda":
        for block in model.blocks:
            block.compile()
    item = rows.batch(np.arange(batch)).to(device)

    def step() -> None:
        noisy = corrupt(item.tokens, item.samples, seed=0, mask_id=model.config.mask_id)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = denoising_loss(model, item.tokens, noisy, denominator=float(item.tokens.numel()))
        loss.total.backward()
        optimizer.step()
        optimizer.zero_grad()

    times = measure(step, device.type, warmup=2 if device.type == "cuda" else 1, repeats=None if device.type == "cuda" else 2)
    return {key: batch * LENGTH / value * 1000 if key != "repeats" else value for key, value in _slow_first(times).items()}


def _slow_first(times: dict[str, float]) -> dict[str, float]:
    """Swap percentiles for rates: the 20th of a rate is the 80th of its time."""
    return {"p20": times["p80"], "p50": times["p50"], "p80": times["p20"], "repeats": times["repeats"]}


def main() -> None:
    given = arguments(__doc__ or "")
    device = torch.device(given.device)
    batch = 128 if device.type == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        data = write_set(Path(folder) / "set", tokens=TOKENS)
        section = DataSection(sets={str(data): 1.0}, length=LENGTH)
        rows = open_rows(section, "train", seed=0, vocab_size=32000, mask_id=32000)
        assert rows is not None
        loader = loader_rates(rows, 128, device, repeats=7)
        model = model_rate(rows, batch, device)
    figures = {"loader_tokens_per_second": loader, "model_tokens_per_second": model, "ratio": loader["p50"] / model["p50"]}
    settings = {"length": LENGTH, "loader_batch": 128, "model_batch": batch, "set_tokens": TOKENS}
    write(result("loader", figures, device=given.device, settings=settings), given.out)


if __name__ == "__main__":
    main()
