"""Models of other families, in and out. Importing it registers sinkdlm checkpoints with transformers' Auto classes.

That takes seconds: the package itself, its commands too, uses `sinkdlm.conversion`, where all of this is.
"""

import sys

from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from sinkdlm.conversion import adapt, export, hf, layouts, sources, standalone, tensors, tokenizer
from sinkdlm.conversion.adapt import FREE_KEYS, load_any
from sinkdlm.conversion.export import convert
from sinkdlm.conversion.hf import SinkDLMConfig, SinkDLMForMaskedLM
from sinkdlm.conversion.sources import Source, open_source

AutoConfig.register("sinkdlm", SinkDLMConfig, exist_ok=True)
AutoModel.register(SinkDLMConfig, SinkDLMForMaskedLM, exist_ok=True)
AutoModelForMaskedLM.register(SinkDLMConfig, SinkDLMForMaskedLM, exist_ok=True)

for _module in (adapt, export, hf, layouts, sources, standalone, tensors, tokenizer):  # by their former paths, the same modules
    sys.modules[_module.__name__.replace("sinkdlm.conversion", __name__)] = _module

__all__ = ["FREE_KEYS", "SinkDLMConfig", "SinkDLMForMaskedLM", "Source", "convert", "load_any", "open_source"]
