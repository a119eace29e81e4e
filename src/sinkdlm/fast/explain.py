"""Tell which path a model's forward takes here, and why: `python -m sinkdlm.fast.explain CHECKPOINT`, or `explain` in code."""

import json
import sys
from pathlib import Path

import torch

from sinkdlm.config.model import ModelConfig
from sinkdlm.fast.runner import FastRunner, Plan, supports_flat
from sinkdlm.kernels.available import has_kernels
from sinkdlm.model.context import Context
from sinkdlm.model.model import DiffusionLM
from sinkdlm.model.visibility import Annealing

_WORDS = {  # and of sinks
    "flat": ("tokens in one matrix, cuDNN's attention", ", sinks merged into it"),
    "inference": ("torch's attention, Triton kernels for rotary and SwiGLU", ", sinks as extra keys"),
    "flex": ("FlexAttention, which computes visibility in its kernel", ""),
    "blocks": ("plain blocks, torch's attention", ", sinks as extra keys"),
}


def explain(
    model: DiffusionLM, device: torch.device, dtype: torch.dtype, *, trains: bool, tokens: int | None = None, annealed: bool = False
) -> str:
    """Name the path of a forward of full rows with matmuls in `dtype`, and why. annealed: while attention is annealed."""
    if not isinstance(model.runner, FastRunner):
        return "blocks (the plain runner)"
    config, tokens = model.config, tokens or model.config.context_length
    x = torch.empty((), device=device, dtype=dtype).expand(1, tokens, config.d_model)
    ctx = Context((0, tokens), annealing=Annealing(0.5, 0) if annealed else None, form=model.attention_form)
    with torch.set_grad_enabled(trains), torch.autocast(device.type, enabled=False):
        path = model.runner.choose(config, x, ctx)
    explains = path == "blocks" and trains and device.type == "cuda" and not annealed
    words = "".join(_WORDS[path][: 1 + bool(config.n_sinks)])
    return f"{path} ({words}{f': {_why_not_flat(config, dtype, tokens)}' if explains else ''})"


def _why_not_flat(config: ModelConfig, dtype: torch.dtype, tokens: int) -> str:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the flat path needs half precision, not {dtype}"
    if config.n_registers:
        return "register sinks are tokens of the row and attend to all others"
    if not has_kernels():
        return "Triton kernels cannot be built here"
    if supports_flat(config, "cuda", dtype, 1 << 20):
        return f"rows of {tokens} tokens are too short for the flat path to pay"
    return f"cuDNN's attention does not run here with heads of {config.head_dim}"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m sinkdlm.fast.explain CHECKPOINT")
    fields = json.loads((Path(sys.argv[1]) / "config.json").read_text())
    config = ModelConfig(**{name: fields[name] for name in ModelConfig.model_fields if name in fields})
    with torch.device("meta"):
        model = DiffusionLM(config)
    model.runner = FastRunner(Plan())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lines = [f"{device.type}, {dtype}, rows of {config.context_length} tokens"]
    for name, trains, annealed in (("training", True, False), ("annealed training", True, True), ("inference", False, False)):
        lines.append(f"{name}: {explain(model, device, dtype, trains=trains, annealed=annealed)}")
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
