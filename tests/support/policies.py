"""Every policy of the sampler, and most of its options."""

from sinkdlm.sampling.unmasking import NAMED, ORDERS, REMASKS

EOS = 3
POLICIES = {
    **{name: {"config": name, "steps": 9} for name in NAMED if name != "fast"},
    **{order: {"order": order, "steps": 7, "temperature": 0.9} for order in ORDERS},
    **{f"remask-{kind}": {"order": "ancestral", "remask": kind, "remask_rate": 0.4, "steps": 12, "temperature": 1.0}
       for kind in REMASKS if kind != "none"},
    "cosine": {"schedule": "cosine", "steps": 6, "temperature": 0.7},
    "blocks": {"block": 4, "steps": 8, "temperature": 1.0},
    "threshold": {"threshold": 0.2, "temperature": 0.5},
    "threshold-in-time": {"threshold": 0.3, "steps": 4, "block": 6},
    "guided": {"guidance": 1.5, "temperature": 0.8, "steps": 5},
    "order-temperature": {"config": "dream", "order_temperature": 0.5, "top_p": 0.9, "top_k": 4, "steps": 8},
    "last-ids": {"last_ids": (2, 5), "threshold": 0.2, "temperature": 0.7},
    "top-k-p": {"temperature": 1.3, "top_k": 5, "top_p": 0.8, "steps": 6},
    "min-p-penalty": {"temperature": 1.3, "min_p": 0.2, "repetition_penalty": 1.8, "block": 4, "steps": 8},
    "suppressed": {"suppressed": (0, 7), "guidance": 0.5, "steps": 5, "temperature": 1.0},
    "prefix-cache": {"block": 5, "cache": "prefix", "temperature": 0.6},
    "dual-cache": {"block": 5, "cache": "dual", "temperature": 0.6, "guidance": 0.4},
    "fast": {"config": "fast", "block": 4, "threshold": 0.2},
    "eos": {"eos_id": EOS, "block": 4, "temperature": 1.2},
    "remask-blocks-eos": {"order": "ancestral", "remask": "rescale", "steps": 12, "block": 5, "temperature": 1.0, "eos_id": EOS},
}  # fmt: skip
