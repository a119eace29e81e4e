"""What of a model torch's compiler takes for training, and how it is asked to."""

import importlib.util
from typing import Any

import torch

from sinkdlm.config import Compile
from sinkdlm.errors import TrainError
from sinkdlm.model import DiffusionLM
from sinkdlm.training.parallel import World


def compiles(wanted: Compile, device: torch.device) -> bool:
    if wanted == "auto":
        return device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return wanted != "none"


def compile_model(model: DiffusionLM, wanted: Compile, world: World) -> None:
    """In place. Also says whether the last layer ends where the loss looks: on a GPU the host would wait to know where that is."""
    on_cpu = world.device.type == "cpu"
    model.picks_early = on_cpu and wanted != "blocks"  # which want few shapes
    if wanted == "whole":
        if not (on_cpu and world.alone):
            raise TrainError("train.compile = 'whole': for one process on a CPU; 'blocks' is the cure")
        _compile_whole(model)
    elif compiles(wanted, world.device):
        for block in model.blocks:
            block.forward = torch.compile(block.forward)  # its arithmetic: hooks that gather its weights stay outside


def _compile_whole(model: DiffusionLM) -> None:
    """All blocks as one function without Python inside, which a small model spends much of its time in."""
    plain = model.run_blocks
    compiled = torch.compile(plain, dynamic=True, options={"cpp_wrapper": True})

    def run_blocks(*args: Any, **given: Any) -> Any:
        # Validation and probes would be compiled once more, and are short.
        return (compiled if torch.is_grad_enabled() else plain)(*args, **given)

    model.run_blocks = run_blocks  # type: ignore[method-assign]
