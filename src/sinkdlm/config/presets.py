"""The shapes people train: the SMDM family, AR parents and released diffusion models.

Plain tables. A preset says nothing of sinks or gates: those are flags on top.
Sources: SMDM's model table (names count non-embedding millions); the public configs of Qwen2.5, SmolLM2, LLaDA and Dream.
"""

from typing import Any

# name: (layers, heads, width); the feed-forward width is 4 times the width, of 75 alone 1600
_SMDM = {
    6: (6, 4, 256),
    19: (8, 6, 384),
    34: (8, 8, 512),
    48: (9, 9, 576),
    66: (10, 10, 640),
    75: (16, 8, 640),
    85: (13, 10, 640),
    113: (12, 12, 768),
    142: (15, 12, 768),
    170: (18, 12, 768),
    180: (14, 14, 896),
    206: (16, 14, 896),
    231: (18, 14, 896),
    268: (16, 16, 1024),
    302: (18, 16, 1024),
    336: (20, 16, 1024),
    472: (18, 10, 1280),
    551: (21, 10, 1280),
    571: (18, 11, 1408),
    629: (24, 10, 1280),
    666: (21, 11, 1408),
    717: (19, 12, 1536),
    761: (24, 11, 1408),
    831: (22, 12, 1536),
    944: (25, 12, 1536),
    1028: (20, 14, 1792),
    1233: (24, 14, 1792),
    1476: (22, 16, 2048),
    1678: (25, 16, 2048),
    2121: (28, 17, 2176),
}


# name: (vocabulary, layers, heads, key/value heads, width, feed-forward width, context)
_OTHERS = {
    "nano": (64, 3, 4, 4, 64, 192, 128),
    "qwen2.5-0.5b": (151936, 24, 14, 2, 896, 4864, 32768),
    "qwen2.5-1.5b": (151936, 28, 12, 2, 1536, 8960, 131072),
    "smollm2-135m": (49152, 30, 9, 3, 576, 1536, 8192),
    "llada-8b": (126464, 32, 32, 32, 4096, 12288, 4096),
    "dream-7b": (152064, 28, 28, 4, 3584, 18944, 131072),
}
_QWEN = {"rope_base": 1e6, "norm_eps": 1e-6, "qkv_bias": True, "mask_id": 151666}
_REST: dict[str, dict[str, Any]] = {
    "smdm-75m": {"d_ff": 1600},
    "qwen2.5-0.5b": {**_QWEN, "tie_embeddings": True},
    "qwen2.5-1.5b": {**_QWEN, "tie_embeddings": True},
    "smollm2-135m": {"rope_base": 1e5, "tie_embeddings": True},
    "llada-8b": {"rope_base": 5e5, "mask_id": 126336},
    "dream-7b": {**_QWEN, "shift_logits": True},
}
_FIELDS = ("vocab_size", "n_layers", "n_heads", "n_kv_heads", "d_model", "d_ff", "context_length")


def _all_presets() -> dict[str, dict[str, Any]]:
    """The nano model, the SMDM family, then the others: the order in which they are listed."""
    smdm = {f"smdm-{name}m": (32000, n, heads, heads, width, 4 * width, 2048) for name, (n, heads, width) in _SMDM.items()}
    shapes = {"nano": _OTHERS["nano"], **smdm, **_OTHERS}
    return {name: {**dict(zip(_FIELDS, shape, strict=True)), **_REST.get(name, {})} for name, shape in shapes.items()}


PRESETS = _all_presets()
