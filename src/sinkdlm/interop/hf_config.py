"""The config class by which transformers knows our models, apart from the model classes, which take seconds to load."""

from collections.abc import Callable
from typing import Any, ClassVar

from transformers import PretrainedConfig

from sinkdlm.config.model import ModelConfig

MODEL_FIELDS = tuple(ModelConfig.__annotations__)


class SinkDLMConfig(PretrainedConfig):
    """The fields of ModelConfig, as transformers carries them.

    The first one made, or unpickled, registers the model classes. An Auto class needs a config to find a model, so commands that
    make none never load transformers' models.
    """

    model_type = "sinkdlm"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "d_ff",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "norm_eps",
        "rope_theta": "rope_base",
        "mask_token_id": "mask_id",
    }

    register_models: ClassVar[Callable[[], None]] = staticmethod(lambda: None)  # set by interop/__init__.py

    def __new__(cls, *_: Any, **__: Any) -> "SinkDLMConfig":
        cls.register_models()
        return super().__new__(cls)

    def __init__(self, **kwargs: Any) -> None:
        kwargs = {self.attribute_map.get(key, key): value for key, value in kwargs.items()}
        fields = {key: kwargs.pop(key) for key in MODEL_FIELDS if key in kwargs}
        kwargs["tie_word_embeddings"] = False  # our tied head has no parameter to tie
        super().__init__(**kwargs)
        for key, value in (vars(ModelConfig(**fields)) if fields else {}).items():
            setattr(self, key, value)

    def to_diff_dict(self) -> dict[str, Any]:
        """What config.json holds: our fields, and the few keys by which transformers finds its classes."""
        whole = self.to_dict()
        kept = ("model_type", *MODEL_FIELDS, "architectures", "auto_map", "dtype", "transformers_version")
        return {key: whole[key] for key in kept if whole.get(key) is not None}

    def model_config(self) -> ModelConfig:
        return ModelConfig(**{key: getattr(self, key) for key in MODEL_FIELDS})
