"""Which path a forward of a model takes here, and why: `python -m sinkdlm.fast.explain CHECKPOINT`, or `explain` in code."""

import json
import sys
from pathlib import Path as File
from typing import NamedTuple

import torch

from sinkdlm.config.model import ModelConfig
from sinkdlm.fast.runner import FastRunner, Path, Plan, supports_flat
from sinkdlm.kernels.available import has_kernels
from sinkdlm.model.context import Context
from sinkdlm.model.model import DiffusionLM
from sinkdlm.model.visibility import Annealing

_WORDS = {
    "flat": "tokens and sinks as flat tokens of one matrix, sinks merged into cuDNN's attention",
    "inference": "sinks as more keys of torch's attention, heads placed and SwiGLU computed by Triton kernels",
    "flex": "FlexAttention, which computes who sees whom in its kernel",
    "blocks": "plain blocks, sinks as more keys of torch's attention",
}


class Choice(NamedTuple):
    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


def explain(
    model: DiffusionLM, device: torch.device, dtype: torch.dtype, *, trains: bool, tokens: int | None = None, annealed: bool = False
) -> Choice:
    """The path of a forward of full rows, in matmuls of this dtype. annealed: with attention that is not yet full."""
    if not isinstance(model.runner, FastRunner):
        return Choice("blocks", "the plain runner")
    config, tokens = model.config, tokens or model.config.context_length
    x = torch.empty((), device=device, dtype=dtype).expand(1, tokens, config.d_model)
    ctx = Context((0, tokens), annealing=Annealing(0.5, 0) if annealed else None, form=model.attention_form)
    with torch.set_grad_enabled(trains), torch.autocast(device.type, enabled=False):
        path = model.runner.choose(config, x, ctx)
    words = _WORDS[path]
    if path != "blocks" or not trains or device.type != "cuda" or annealed:
        return Choice(path, words)
    return Choice(path, f"{words}: {_why_not_flat(config, dtype, tokens)}")


def _why_not_flat(config: ModelConfig, dtype: torch.dtype, tokens: int) -> str:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flat tokens are for half precision, not {dtype}"
    if config.n_registers:
        return "register sinks are tokens of the row, which attend to all others"
    if not has_kernels():
        return "Triton's kernels cannot be built here"
    if supports_flat(config, "cuda", dtype, 1 << 20):
        return f"rows of {tokens} tokens are too short for flat tokens to pay"
    return f"cuDNN's attention does not run here with heads of {config.head_dim}"


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m sinkdlm.fast.explain CHECKPOINT")
    fields = json.loads((File(sys.argv[1]) / "config.json").read_text())
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
