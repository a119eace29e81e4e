"""How the same model runs fast. The only room, with kernels/, that asks about gradients, autocast, device and compiler."""

from sinkdlm.fast.runner import FastRunner, Plan, accelerate, compile_blocks, prepare, supports_flat

__all__ = ["FastRunner", "Plan", "accelerate", "compile_blocks", "prepare", "supports_flat"]
