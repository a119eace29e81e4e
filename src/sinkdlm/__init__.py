"""sinkdlm: masked diffusion language models with a stable sink token.

Importing the package is cheap: each name loads its module, and torch, on first use.
"""

TYPE_CHECKING = False  # stands in for typing's: importing typing is slow and delays the answer to Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from sinkdlm import diffusion, likelihood, noise, sampling
    from sinkdlm.checkpoint.directory import Loaded, save
    from sinkdlm.config.model import ModelConfig
    from sinkdlm.config.recipe import Recipe
    from sinkdlm.errors import UserError
    from sinkdlm.lm import LM, load
    from sinkdlm.model import attention
    from sinkdlm.model.model import DiffusionLM

_HOME = {
    "ModelConfig": "config.model",
    "Recipe": "config.recipe",
    "DiffusionLM": "model.model",
    "Loaded": "checkpoint.directory",
    "LM": "lm",
    "load": "lm",
    "save": "checkpoint.directory",
    "UserError": "errors",
}
_MODULES = {
    "attention": "model.attention",
    "diffusion": "diffusion",
    "likelihood": "likelihood",
    "noise": "noise",
    "sampling": "sampling",
}

__all__ = [
    "LM",
    "DiffusionLM",
    "Loaded",
    "ModelConfig",
    "Recipe",
    "UserError",
    "attention",
    "diffusion",
    "likelihood",
    "load",
    "noise",
    "sampling",
    "save",
]
__version__ = "0.2.0"


def __getattr__(name: str) -> "Any":
    import importlib

    if name in _HOME:
        return getattr(importlib.import_module(f"sinkdlm.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"sinkdlm.{_MODULES[name]}")
    raise AttributeError(f"module 'sinkdlm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
