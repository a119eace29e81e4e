"""The shapes people train: the SMDM family, AR parents and released diffusion models.

Plain tables. A preset says nothing of sinks or gates: those are flags on top.
Sources: SMDM's model table (names count non-embedding millions); the public configs of Qwen2.5, SmolLM2, LLaDA and Dream.
"""

from typing import Any

_TABLE = """
name          vocab_size  n_layers  n_heads  n_kv_heads  d_model   d_ff  context_length
nano                  64         3        4           4       64    192             128
smdm-6m            32000         6        4           4      256   1024            2048
smdm-19m           32000         8        6           6      384   1536            2048
smdm-34m           32000         8        8           8      512   2048            2048
smdm-48m           32000         9        9           9      576   2304            2048
smdm-66m           32000        10       10          10      640   2560            2048
smdm-75m           32000        16        8           8      640   1600            2048
smdm-85m           32000        13       10          10      640   2560            2048
smdm-113m          32000        12       12          12      768   3072            2048
smdm-142m          32000        15       12          12      768   3072            2048
smdm-170m          32000        18       12          12      768   3072            2048
smdm-180m          32000        14       14          14      896   3584            2048
smdm-206m          32000        16       14          14      896   3584            2048
smdm-231m          32000        18       14          14      896   3584            2048
smdm-268m          32000        16       16          16     1024   4096            2048
smdm-302m          32000        18       16          16     1024   4096            2048
smdm-336m          32000        20       16          16     1024   4096            2048
smdm-472m          32000        18       10          10     1280   5120            2048
smdm-551m          32000        21       10          10     1280   5120            2048
smdm-571m          32000        18       11          11     1408   5632            2048
smdm-629m          32000        24       10          10     1280   5120            2048
smdm-666m          32000        21       11          11     1408   5632            2048
smdm-717m          32000        19       12          12     1536   6144            2048
smdm-761m          32000        24       11          11     1408   5632            2048
smdm-831m          32000        22       12          12     1536   6144            2048
smdm-944m          32000        25       12          12     1536   6144            2048
smdm-1028m         32000        20       14          14     1792   7168            2048
smdm-1233m         32000        24       14          14     1792   7168            2048
smdm-1476m         32000        22       16          16     2048   8192            2048
smdm-1678m         32000        25       16          16     2048   8192            2048
smdm-2121m         32000        28       17          17     2176   8704            2048
qwen2.5-0.5b      151936        24       14           2      896   4864           32768
qwen2.5-1.5b      151936        28       12           2     1536   8960          131072
smollm2-135m       49152        30        9           3      576   1536            8192
llada-8b          126464        32       32          32     4096  12288            4096
dream-7b          152064        28       28           4     3584  18944          131072
"""
_QWEN = {"rope_base": 1e6, "norm_eps": 1e-6, "qkv_bias": True, "mask_id": 151666}
_REST: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {**_QWEN, "tie_embeddings": True},
    "qwen2.5-1.5b": {**_QWEN, "tie_embeddings": True},
    "smollm2-135m": {"rope_base": 1e5, "tie_embeddings": True},
    "llada-8b": {"rope_base": 5e5, "mask_id": 126336},
    "dream-7b": {**_QWEN, "shift_logits": True},
}
_HEAD, *_ROWS = (line.split() for line in _TABLE.strip().splitlines())
PRESETS = {name: dict(zip(_HEAD[1:], map(int, shape), strict=True)) | _REST.get(name, {}) for name, *shape in _ROWS}
