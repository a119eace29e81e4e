"""Block diffusion, written plainly: sinks are tokens of the row, a dense mask says who sees whom, one row and one head at a time.

The oracle of the two-copy forward. It shares no code with the package but `reference.py`, which reads a state dict.
"""

import math

import torch
from torch import Tensor

from reference import attention, rms_norm, x_in


def pair_sees(query: tuple[str, int], key: tuple[str, int], size: int) -> bool:
    """Tokens are (copy, position in their document)."""
    (mine, i), (theirs, j) = query, key
    if theirs == "clean":
        return j // size < i // size or (mine == "clean" and j // size == i // size)
    return mine == "noised" and i // size == j // size


def mask_of(size: int, n_tokens: int, documents: list[int] | None = None) -> Tensor:
    """(2 T, 2 T): the noised copy, then the clean one."""
    numbers = documents or [0] * n_tokens
    start = [min(j for j in range(i + 1) if numbers[j : i + 1] == [numbers[i]] * (i + 1 - j)) for i in range(n_tokens)]
    tokens = [(copy, i - start[i], start[i]) for copy in ("noised", "clean") for i in range(n_tokens)]
    seen = [[a[2] == b[2] and pair_sees(a[:2], b[:2], size) for b in tokens] for a in tokens]
    return torch.tensor(seen)


def hidden_states(weights, config, noised: Tensor, clean: Tensor, size: int, documents: list[int] | None = None) -> Tensor:
    """Rows (T,) of noised and clean tokens -> states (T, d) after the final norm, at the tokens that they predict."""
    n_tokens = len(noised)
    n_sinks = config.n_sinks if config.sink_kind == "isolated" else 0
    body = [*noised.tolist(), *clean.tolist()]
    x = weights["embed.weight"][torch.tensor(body)]
    if n_sinks:
        x = torch.cat([weights["sinks"], x])
    numbers = documents or [0] * n_tokens
    start = [min(j for j in range(i + 1) if numbers[j : i + 1] == [numbers[i]] * (i + 1 - j)) for i in range(n_tokens)]
    places = [n_sinks + i - start[i] for i in range(n_tokens)]
    positions = torch.tensor([*range(n_sinks), *places, *places])
    bias = torch.full((len(x), len(x)), -math.inf, dtype=x.dtype)
    bias[:, :n_sinks] = 0.0
    bias[:n_sinks] = -math.inf
    for sink in range(n_sinks):
        bias[sink, sink] = 0.0
    bias[n_sinks:, n_sinks:].masked_fill_(mask_of(size, n_tokens, documents), 0.0)
    for layer in range(config.n_layers):
        h = x_in(weights, config, layer, "attention_norm", x)
        x = x + attention(weights, config, f"blocks.{layer}.attention", h, positions, bias, list(range(n_sinks)))
        h = x_in(weights, config, layer, "mlp_norm", x)
        gate, up = (h @ weights[f"blocks.{layer}.mlp.gate_up.weight"].T).split(config.d_ff, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[f"blocks.{layer}.mlp.down.weight"].T
    x = rms_norm(x[n_sinks:], weights["norm.weight"], config.norm_eps)
    own, kept = x[:n_tokens], x[n_tokens:]
    if not config.shift_logits:
        return own
    rows = []
    for i in range(n_tokens):
        inside = i - start[i]
        rows.append(own[i] if inside == 0 else kept[i - 1] if inside % size == 0 else own[i - 1])
    return torch.stack(rows)
