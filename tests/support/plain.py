"""Other people's models, written plainly from their public descriptions: one row, one head at a time, with dense masks.

Independent of the package: it reads state dicts under their own names. `logits` covers the Llama family (Qwen2, Llama, LLaDA,
Dream), `official_logits` the paper's released models, sink and gate included.
"""

import math

import torch
from torch import Tensor

from reference import frequencies, rms_norm, rotate


def attention_row(q: list[Tensor], k: list[Tensor], v: list[Tensor], positions: Tensor, speeds: list, bias: Tensor) -> list[Tensor]:
    """Per query head, (T, D); key/value heads are shared by consecutive query heads."""
    outputs = []
    for head, query in enumerate(q):
        group = head // (len(q) // len(k))
        scores = rotate(query, positions, speeds) @ rotate(k[group], positions, speeds).T / math.sqrt(query.shape[1])
        outputs.append(torch.softmax(scores + bias, dim=1) @ v[group])
    return outputs


LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "block": "model.layers.{}",
    "in": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "post": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
QWEN3_NAMES = {**LLAMA_NAMES, "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
LLADA_NAMES = {
    "embed": "model.transformer.wte",
    "norm": "model.transformer.ln_f",
    "head": "model.transformer.ff_out",
    "block": "model.transformer.blocks.{}",
    "in": "attn_norm",
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "attn_out",
    "post": "ff_norm",
    "gate": "ff_proj",
    "up": "up_proj",
    "down": "ff_out",
}


def logits(
    state: dict[str, Tensor],
    names: dict,
    tokens: Tensor,
    *,
    layers: int,
    width: int,
    base: float,
    eps: float,
    shift: bool,
    block: int | None = None,
    scaling: tuple = (),
) -> Tensor:
    """Logits of one row (T,): what a diffusion model of this family computes. width: of a head. block: a token sees its block and
    those before it. scaling: of Llama 3's rotary, as in `reference.frequencies`."""

    def linear(x: Tensor, name: str) -> Tensor:
        out = x @ state[f"{name}.weight"].T
        return out + state[f"{name}.bias"] if f"{name}.bias" in state else out

    x = state[f"{names['embed']}.weight"][tokens]
    positions, bias = torch.arange(len(tokens)), torch.zeros(len(tokens), len(tokens))
    if block is not None:
        for i in range(len(tokens)):
            bias[i, (i // block + 1) * block :] = -math.inf
    for layer in range(layers):
        place = names["block"].format(layer)
        h = rms_norm(x, state[f"{place}.{names['in']}.weight"], eps)
        q, k, v = (list(linear(h, f"{place}.{names[part]}").split(width, dim=1)) for part in "qkv")
        if names.get("q_norm"):
            q, k = (
                [rms_norm(x, state[f"{place}.{names[f'{part}_norm']}.weight"], eps) for x in had]
                for part, had in (("q", q), ("k", k))
            )
        mixed = attention_row(q, k, v, positions, frequencies(base, width, *scaling), bias)
        x = x + linear(torch.cat(mixed, dim=1), f"{place}.{names['o']}")
        h = rms_norm(x, state[f"{place}.{names['post']}.weight"], eps)
        x = x + linear(
            torch.nn.functional.silu(linear(h, f"{place}.{names['gate']}")) * linear(h, f"{place}.{names['up']}"),
            f"{place}.{names['down']}",
        )
    x = rms_norm(x, state[f"{names['norm']}.weight"], eps)
    if shift:
        x = torch.cat([x[:1], x[:-1]])
    return x @ state.get(f"{names['head']}.weight", state[f"{names['embed']}.weight"]).T


def official_logits(state: dict[str, Tensor], tokens: Tensor, *, layers: int, heads: int, sink: bool) -> Tensor:
    """The paper's models: the sink is token id vocab + 1 in front, isolated by the mask of eq. 6; its row is dropped."""
    vocab = state["lm_head.weight"].shape[0]
    if sink:
        tokens = torch.cat([torch.tensor([vocab + 1]), tokens])
    x = state["transformer.wte.weight"][tokens]
    width = x.shape[1] // heads
    positions, bias = torch.arange(len(tokens)), torch.zeros(len(tokens), len(tokens))
    if sink:
        bias[0, 1:] = -math.inf
    for layer in range(layers):
        block = f"transformer.h.{layer}"
        h = rms_norm(x, state[f"{block}.norm_1.weight"], 1e-5)
        pieces = (h @ state[f"{block}.attn.attn.weight"].T).split(width, dim=1)  # q0, k0, v0, q1, k1, v1, ...
        speeds = frequencies(10000.0, width)
        mixed = torch.cat(attention_row(pieces[0::3], pieces[1::3], pieces[2::3], positions, speeds, bias), dim=1)
        if f"{block}.attn.gate.weight" in state:
            mixed = mixed * torch.sigmoid(h @ state[f"{block}.attn.gate.weight"].T)
        x = x + mixed @ state[f"{block}.attn.proj.weight"].T
        h = rms_norm(x, state[f"{block}.norm_2.weight"], 1e-5)
        w1, w2, w3 = (state[f"{block}.mlp.swiglu.w{i}.weight"] for i in (1, 2, 3))
        x = x + (torch.nn.functional.silu(h @ w1.T) * (h @ w2.T)) @ w3.T
    x = rms_norm(x[1:] if sink else x, state["transformer.ln_f.weight"], 1e-5)
    return x @ state["lm_head.weight"].T
