"""The shapes people train: the SMDM family, AR parents and released diffusion models.

Plain tables. A preset says nothing of sinks or gates: those are flags on top.
Sources: SMDM's model table (names count non-embedding millions); the public configs of Qwen2.5, SmolLM2, LLaDA and Dream.
"""

from typing import Any

# name: (layers, heads, width, feed-forward width)
_SMDM = {
    6: (6, 4, 256, 1024),
    19: (8, 6, 384, 1536),
    34: (8, 8, 512, 2048),
    48: (9, 9, 576, 2304),
    66: (10, 10, 640, 2560),
    75: (16, 8, 640, 1600),
    85: (13, 10, 640, 2560),
    113: (12, 12, 768, 3072),
    142: (15, 12, 768, 3072),
    170: (18, 12, 768, 3072),
    180: (14, 14, 896, 3584),
    206: (16, 14, 896, 3584),
    231: (18, 14, 896, 3584),
    268: (16, 16, 1024, 4096),
    302: (18, 16, 1024, 4096),
    336: (20, 16, 1024, 4096),
    472: (18, 10, 1280, 5120),
    551: (21, 10, 1280, 5120),
    571: (18, 11, 1408, 5632),
    629: (24, 10, 1280, 5120),
    666: (21, 11, 1408, 5632),
    717: (19, 12, 1536, 6144),
    761: (24, 11, 1408, 5632),
    831: (22, 12, 1536, 6144),
    944: (25, 12, 1536, 6144),
    1028: (20, 14, 1792, 7168),
    1233: (24, 14, 1792, 7168),
    1476: (22, 16, 2048, 8192),
    1678: (25, 16, 2048, 8192),
    2121: (28, 17, 2176, 8704),
}


def _smdm(layers: int, heads: int, width: int, ff: int) -> dict[str, Any]:
    return {"vocab_size": 32000, "n_layers": layers, "n_heads": heads, "d_model": width, "d_ff": ff}


_QWEN = {"rope_base": 1e6, "norm_eps": 1e-6, "qkv_bias": True, "mask_id": 151666}

PRESETS: dict[str, dict[str, Any]] = {
    "nano": {"vocab_size": 64, "n_layers": 3, "n_heads": 4, "d_model": 64, "d_ff": 192, "context_length": 128},
    **{f"smdm-{name}m": _smdm(*shape) for name, shape in _SMDM.items()},
    "qwen2.5-0.5b": {
        **_QWEN,
        "vocab_size": 151936,
        "n_layers": 24,
        "n_heads": 14,
        "n_kv_heads": 2,
        "d_model": 896,
        "d_ff": 4864,
        "context_length": 32768,
        "tie_embeddings": True,
    },
    "qwen2.5-1.5b": {
        **_QWEN,
        "vocab_size": 151936,
        "n_layers": 28,
        "n_heads": 12,
        "n_kv_heads": 2,
        "d_model": 1536,
        "d_ff": 8960,
        "context_length": 131072,
        "tie_embeddings": True,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "n_layers": 30,
        "n_heads": 9,
        "n_kv_heads": 3,
        "d_model": 576,
        "d_ff": 1536,
        "context_length": 8192,
        "rope_base": 1e5,
        "tie_embeddings": True,
    },
    "llada-8b": {
        "vocab_size": 126464,
        "mask_id": 126336,
        "n_layers": 32,
        "n_heads": 32,
        "d_model": 4096,
        "d_ff": 12288,
        "context_length": 4096,
        "rope_base": 5e5,
    },
    "dream-7b": {
        **_QWEN,
        "vocab_size": 152064,
        "n_layers": 28,
        "n_heads": 28,
        "n_kv_heads": 4,
        "d_model": 3584,
        "d_ff": 18944,
        "context_length": 131072,
        "shift_logits": True,
    },
}
