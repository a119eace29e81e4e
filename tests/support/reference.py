"""The paper's model, written plainly: sinks are tokens of the sequence and a dense mask isolates them (eq. 5, 6, 7).

The oracle of the lane. It shares no code with the package: it reads a state dict and computes row by row, head by head, with the
(S + T) x (S + T) mask that the package never builds.
"""

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def frequencies(base: float, width: int, factor: float = 1.0, low: float = 1.0, high: float = 4.0, context: int = 8192) -> list:
    """Radians by position of each rotary pair, with Llama 3's scaling, which is told in wavelengths."""
    found = []
    for pair in range(width // 2):
        plain = base ** (-2 * pair / width)
        wavelength = 2 * math.pi / plain
        smooth = (context / wavelength - low) / (high - low)
        if wavelength > context / low:
            found.append(plain / factor)
        elif wavelength < context / high:
            found.append(plain)
        else:
            found.append((1 - smooth) * plain / factor + smooth * plain)
    return found


def frequencies_of(config) -> list:
    scaling = (config.rope_factor, config.rope_low_freq_factor, config.rope_high_freq_factor, config.rope_original_context)
    return frequencies(config.rope_base, config.head_dim, *scaling)


def rotate(x: Tensor, positions: Tensor, speeds: list) -> Tensor:
    """x (P, D); pairs are (i, i + D/2)."""
    half = x.shape[-1] // 2
    angles = positions.to(x.dtype)[:, None] * torch.tensor(speeds, dtype=x.dtype)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * torch.cos(angles) - b * torch.sin(angles), b * torch.cos(angles) + a * torch.sin(angles)], dim=1)


def hidden_states(weights: dict[str, Tensor], config, tokens: Tensor) -> Tensor:
    """One row of tokens (T,) -> (T, d), as the masked form computes it."""
    n_tokens = len(tokens)
    n_sinks = config.n_sinks if config.sink_kind in ("isolated", "register") else 0
    content = weights["embed.weight"][tokens]
    if n_sinks and config.sink_position == "front":
        x = torch.cat([weights["sinks"], content])
        sinks, body = list(range(n_sinks)), slice(n_sinks, n_sinks + n_tokens)
    elif n_sinks:
        x = torch.cat([content, weights["sinks"]])
        sinks, body = list(range(n_tokens, n_tokens + n_sinks)), slice(0, n_tokens)
    else:
        x, sinks, body = content, [], slice(0, n_tokens)
    positions = torch.arange(len(x))
    bias = torch.zeros(len(x), len(x), dtype=x.dtype)
    if config.sink_kind == "isolated":
        for sink in sinks:  # eq. 6, for each sink
            bias[sink] = -math.inf
            bias[sink, sink] = 0.0
    for layer in range(config.n_layers):
        h = x_in(weights, config, layer, "attention_norm", x)
        x = x + attention(weights, config, f"blocks.{layer}.attention", h, positions, bias, sinks)
        h = x_in(weights, config, layer, "mlp_norm", x)
        gate, up = (h @ weights[f"blocks.{layer}.mlp.gate_up.weight"].T).split(config.d_ff, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[f"blocks.{layer}.mlp.down.weight"].T
    x = rms_norm(x[body], weights["norm.weight"], config.norm_eps)
    if config.shift_logits:
        x = torch.stack([x[max(i - 1, 0)] for i in range(n_tokens)])
    return x


def x_in(weights, config, layer: int, norm: str, x: Tensor) -> Tensor:
    return rms_norm(x, weights[f"blocks.{layer}.{norm}.weight"], config.norm_eps)


def attention(weights, config, name: str, x: Tensor, positions: Tensor, bias: Tensor, sinks: list[int]) -> Tensor:
    width, heads, groups = config.head_dim, config.n_heads, config.n_kv_heads
    projected = x @ weights[f"{name}.qkv.weight"].T
    if config.qkv_bias:
        projected = projected + weights[f"{name}.qkv.bias"]
    pieces = projected.split(width, dim=-1)
    gate = torch.sigmoid(x @ weights[f"{name}.gate.weight"].T) if config.gate != "none" else None
    outputs, speeds = [], frequencies_of(config)
    for head in range(heads):
        group = head // (heads // groups)
        q, k = pieces[head], pieces[heads + group]
        if config.qk_norm:
            q = rms_norm(q, weights[f"{name}.q_norm.weight"], config.norm_eps)
            k = rms_norm(k, weights[f"{name}.k_norm.weight"], config.norm_eps)
        q, k = rotate(q, positions, speeds), rotate(k, positions, speeds)
        v = pieces[heads + groups + group]
        if config.sink_value == "zero" and sinks:
            keep = torch.ones(len(x), 1, dtype=x.dtype)
            keep[sinks] = 0.0
            v = v * keep
        scores = q @ k.T / math.sqrt(width) + bias
        if config.sink_kind == "logit" and config.n_sinks:
            column = weights[f"{name}.sink_logit"][head].expand(len(x), 1)
            out = torch.softmax(torch.cat([scores, column], dim=1), dim=1)[:, :-1] @ v
        else:
            out = torch.softmax(scores, dim=1) @ v
        if config.gate == "elementwise":
            out = out * gate[:, head * width : (head + 1) * width]
        elif config.gate == "headwise":
            out = out * gate[:, head : head + 1]
        outputs.append(out)
    return torch.cat(outputs, dim=1) @ weights[f"{name}.out.weight"].T
