"""Models of other families, in and out. Importing it registers sinkdlm checkpoints with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from sinkdlm.interop.adapt import FREE_KEYS, load_any
from sinkdlm.interop.export import convert
from sinkdlm.interop.hf import SinkDLMConfig, SinkDLMForMaskedLM
from sinkdlm.interop.sources import Source, open_source

AutoConfig.register("sinkdlm", SinkDLMConfig, exist_ok=True)
AutoModel.register(SinkDLMConfig, SinkDLMForMaskedLM, exist_ok=True)
AutoModelForMaskedLM.register(SinkDLMConfig, SinkDLMForMaskedLM, exist_ok=True)

__all__ = ["FREE_KEYS", "SinkDLMConfig", "SinkDLMForMaskedLM", "Source", "convert", "load_any", "open_source"]
