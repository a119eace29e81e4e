"""Random visibility rules."""

import torch

from sinkdlm import noise
from sinkdlm.model.visibility import PADDING, SHARED, DrawnAnnealing, Visibility


def random_rule(batch, n_tokens, share, n_registers=0, padded=False, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.rand(batch, n_tokens, generator=generator) < 0.008).cumsum(1).to(torch.int32)
    if padded:
        lengths = torch.randint(1, n_tokens, (batch,), generator=generator)
        numbers = torch.where(torch.arange(n_tokens) < lengths[:, None], numbers, PADDING)
    numbers = torch.nn.functional.pad(numbers, (n_registers, 0), value=SHARED).to(device)
    words = noise.pair_words(3, noise.Stream.ANNEALING, n_tokens + n_registers, torch.device(device))
    return Visibility(numbers, None if share is None else DrawnAnnealing.draw(share, words))
