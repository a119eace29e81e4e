"""Read and write models of other families. Importing it registers sinkdlm checkpoints with transformers' Auto classes."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from sinkdlm.checkpoint.directory import fingerprint, write_provenance
from sinkdlm.fast import accelerate
from sinkdlm.interop.adapt import FREE_KEYS, fixed_keys, load_any
from sinkdlm.interop.export import convert
from sinkdlm.interop.hf_config import SinkDLMConfig
from sinkdlm.interop.sources import Source, open_source

if TYPE_CHECKING:
    from sinkdlm.interop.hf import SinkDLMForMaskedLM

AutoConfig.register("sinkdlm", SinkDLMConfig, exist_ok=True)

__all__ = ["FREE_KEYS", "SinkDLMConfig", "SinkDLMForMaskedLM", "Source", "convert", "fixed_keys", "load_any", "open_source"]


def __getattr__(name: str) -> Any:
    """Import the model class on first use: commands import this package, and transformers' models take seconds to load."""
    if name == "SinkDLMForMaskedLM":
        from sinkdlm.interop.hf import SinkDLMForMaskedLM

        return SinkDLMForMaskedLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _register_models() -> None:
    from transformers import AutoModel, AutoModelForMaskedLM

    from sinkdlm.interop.hf import SinkDLMForMaskedLM

    SinkDLMForMaskedLM.accelerate, SinkDLMForMaskedLM.stamp = staticmethod(accelerate), staticmethod(_stamp)
    for auto in (AutoModel, AutoModelForMaskedLM):
        auto.register(SinkDLMConfig, SinkDLMForMaskedLM, exist_ok=True)


def _stamp(folder: Path, config: SinkDLMConfig) -> None:
    """Write fingerprints for `sinkdlm.load`, in place of those of an earlier checkpoint."""
    fingerprints = {file.name: fingerprint(file) for file in sorted(folder.glob("*.safetensors"))}
    write_provenance(folder, config.model_config(), fingerprints, {"written_by": "transformers"})


SinkDLMConfig.register_models = staticmethod(_register_models)
