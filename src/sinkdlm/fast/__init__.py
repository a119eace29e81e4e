"""Fast runners of the same model. Only this package and kernels/ ask about gradients, autocast, device and compiler."""

from sinkdlm.fast.runner import FastRunner, Plan, accelerate, compile_blocks, prepare, supports_flat

__all__ = ["FastRunner", "Plan", "accelerate", "compile_blocks", "prepare", "supports_flat"]
