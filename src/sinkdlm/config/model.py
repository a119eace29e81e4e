"""ModelConfig: a model's fields, presets and parameter counts; and Frozen, the base class of all settings.

Knows nothing of recipes, files or torch.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sinkdlm.config.toml import describe_mistake, show, suggest
from sinkdlm.errors import ConfigError

MODEL_TYPE = "sinkdlm"
Count = Annotated[int, Field(ge=1)]


class Frozen(BaseModel):
    """A table of settings that refuses unknown keys and bad values with a ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_mistake(cls, data: Any, handler: Any) -> Self:
        if isinstance(data, Mapping):
            keys = cls.keys()
            for key in data:
                if key not in keys and key not in cls.model_fields:
                    raise ConfigError(f"{key} = {show(data[key])}: unknown key; {suggest(key, keys)}")
        try:
            return handler(data)
        except ValidationError as failure:
            # ConfigError is not a ValueError, so pydantic lets it pass through enclosing tables, which add their name.
            raise ConfigError(*(describe_mistake(error) for error in failure.errors())) from None

    @field_validator("*", mode="wrap")
    @classmethod
    def _name_the_place(cls, value: Any, handler: Any, info: Any) -> Any:
        kind = cls.model_fields[info.field_name].annotation
        if isinstance(kind, type) and issubclass(kind, Frozen) and not isinstance(value, Mapping | kind):
            raise ConfigError(f"{info.field_name} = {show(value)}: allowed is a table with the keys {', '.join(kind.keys())}")
        try:
            return handler(value)
        except ConfigError as failure:
            raise failure.within(info.field_name) from None

    @classmethod
    def keys(cls) -> list[str]:
        """Return the keys as they are written in a file."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True)

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with some fields changed."""
        return type(self)(**{**self.to_dict(), **changes})


class ParameterCount(NamedTuple):
    """non_embedding, which model names count, is all but embedding rows (tokens, [MASK], sinks) and an untied head."""

    embedding: int
    non_embedding: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.non_embedding + self.head


class ModelConfig(Frozen):
    """The shape of a model and its variant. Every field travels in a checkpoint's config.json."""

    vocab_size: Count = Field(description="rows of the head: the ids that can be predicted")
    mask_id: int = Field(ge=0, description="id of [MASK]: vocab_size for an embedding row of its own, or one in the vocabulary")
    n_layers: Count
    n_heads: Count
    n_kv_heads: Count = Field(description="key/value heads; each serves n_heads / n_kv_heads query heads")
    head_dim: Count = Field(description="width of a head; d_model / n_heads unless given")
    d_model: Count
    d_ff: Count
    context_length: Count = 2048
    rope_base: float = Field(default=10000.0, gt=1)
    rope_factor: float = Field(default=1.0, ge=1, description="Llama 3's rotary scaling: slow angles turn so many times slower")
    rope_low_freq_factor: float = Field(default=1.0, gt=0, description="turns in the original context up to which angles are slow")
    rope_high_freq_factor: float = Field(default=4.0, gt=0, description="turns from which angles keep their speed")
    rope_original_context: Count = Field(default=8192, description="context before the scaling")
    norm_eps: float = Field(default=1e-5, gt=0)
    qkv_bias: bool = False
    qk_norm: bool = Field(default=False, description="RMSNorm over each head of queries and keys before rotary, as in Qwen3")
    tie_embeddings: bool = False
    shift_logits: bool = Field(default=False, description="predict token i from position i-1, as Dream does")
    block_size: int | None = Field(
        default=None, ge=1, description="block diffusion: a token sees its own block and all blocks before it; None: every token"
    )
    n_sinks: int = Field(default=0, ge=0)
    sink_kind: Literal["isolated", "register", "logit"] = Field(
        default="isolated",
        description="isolated: the paper's sink, which sees only itself; register: a token that sees everything; "
        "logit: one learned logit per head, without key or value (position and value do not apply)",
    )
    sink_position: Literal["front", "end"] = "front"
    sink_value: Literal["learned", "zero"] = "learned"
    gate: Literal["none", "elementwise", "headwise"] = "none"

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        # If n_heads, d_model or vocab_size is missing or wrong, any value will do: that one is reported.
        heads, width = data.get("n_heads", 1), data.get("d_model", 1)
        fits = isinstance(heads, int) and isinstance(width, int) and heads > 0
        if fits and "head_dim" not in data and width % heads:
            raise ConfigError(_uneven(heads, width))
        derived = {"n_kv_heads": heads, "mask_id": data.get("vocab_size", 0), "head_dim": max(width // heads, 1) if fits else 1}
        return {**derived, **data}

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        heads, vocabulary = self.n_heads, self.vocab_size
        if self.head_dim % 2:
            own = self.head_dim != self.d_model // heads
            odd = f"head_dim = {self.head_dim}: must be even (rotary pairs)"
            raise ConfigError(odd if own else _uneven(heads, self.d_model))
        if self.rope_low_freq_factor >= self.rope_high_freq_factor:
            above = f"rope_low_freq_factor = {self.rope_low_freq_factor}"
            raise ConfigError(f"rope_high_freq_factor = {self.rope_high_freq_factor}: must be more than {above}")
        if heads % self.n_kv_heads:
            raise ConfigError(f"n_kv_heads = {self.n_kv_heads}: must divide n_heads = {heads}")
        if self.mask_id > vocabulary:
            rows = f"a row of the vocabulary (below {vocabulary}) or {vocabulary} for a row of its own"
            raise ConfigError(f"mask_id = {self.mask_id}: allowed is {rows}")
        if self.sink_kind == "logit" and self.n_sinks > 1:
            raise ConfigError(f"n_sinks = {self.n_sinks}: allowed with sink_kind = 'logit' is 0 or 1 (several add up to one)")
        if self.block_size is not None:
            self._check_blocks(self.block_size)
        return self

    def _check_blocks(self, size: int) -> None:
        if self.n_registers:
            why = "a register sees every token, later blocks too, and would tell them to earlier ones"
            raise ConfigError(f"sink_kind = 'register': does not go with block_size = {size}: {why}; use 'isolated'")
        if self.n_lane and self.sink_position == "end":
            why = "a finished block's keys would move whenever the row grows"
            raise ConfigError(f"sink_position = 'end': does not go with block_size = {size}: {why}; use 'front'")

    @classmethod
    def preset(cls, name: str, **flags: Any) -> "ModelConfig":
        """Build a named shape with flags on top: `ModelConfig.preset("smdm-34m", n_sinks=1)`."""
        return cls(**with_changes(preset_fields(name), flags))

    @property
    def attention_width(self) -> int:
        """Width of attention's output before its projection: that of all query heads."""
        return self.n_heads * self.head_dim

    @property
    def embedding_rows(self) -> int:
        return max(self.vocab_size, self.mask_id + 1)

    @property
    def n_lane(self) -> int:
        """Number of sinks that run as a lane beside the tokens."""
        return self.n_sinks if self.sink_kind == "isolated" else 0

    @property
    def n_registers(self) -> int:
        """Number of sinks that are tokens of the sequence."""
        return self.n_sinks if self.sink_kind == "register" else 0

    @property
    def has_sink_logit(self) -> bool:
        return self.n_sinks > 0 and self.sink_kind == "logit"

    @property
    def gate_width(self) -> int:
        """Numbers that a layer's gate gives for a token; 0 without a gate."""
        return {"none": 0, "elementwise": self.attention_width, "headwise": self.n_heads}[self.gate]

    def count_parameters(self) -> ParameterCount:
        """Count the parameters of the embedding, the head, and all else."""
        width = self.attention_width
        qkv = (self.d_model + int(self.qkv_bias)) * (width + 2 * self.n_kv_heads * self.head_dim)
        mlp = 3 * self.d_model * self.d_ff
        norms = 2 * self.d_model + (2 * self.head_dim if self.qk_norm else 0)
        logit = self.n_heads if self.has_sink_logit else 0
        layer = qkv + self.d_model * (width + self.gate_width) + mlp + norms + logit
        return ParameterCount(
            embedding=(self.embedding_rows + self.n_lane + self.n_registers) * self.d_model,
            non_embedding=self.n_layers * layer + self.d_model,
            head=0 if self.tie_embeddings else self.vocab_size * self.d_model,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {"model_type": MODEL_TYPE, **super().to_dict()}

    def replace(self, **changes: Any) -> "ModelConfig":
        """Return a validated copy with changes. Fields derived from changed ones (`with_changes`) follow them."""
        return ModelConfig(**with_changes(self.model_dump(), changes))


# The fields that a preset does not set.
_FLAGS = ("n_sinks", "sink_kind", "sink_position", "sink_value", "gate", "block_size")


def _uneven(heads: int, width: int) -> str:
    return f"n_heads = {heads}: must divide d_model = {width} into heads of even width (rotary pairs), or give head_dim"


def with_changes(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes to fields. A changed vocab_size, n_heads or d_model also changes the mask_id, n_kv_heads or head_dim that was
    derived from it, unless that is set too."""
    derived = (("mask_id", "vocab_size"), ("n_kv_heads", "n_heads"))
    stale = [field for field, source in derived if source in changes and fields.get(field) == fields.get(source)]
    heads, width = fields.get("n_heads"), fields.get("d_model")
    if {"n_heads", "d_model"} & set(changes) and heads and width and fields.get("head_dim") == width // heads:
        stale.append("head_dim")
    return {**{key: value for key, value in fields.items() if key not in stale}, **changes}


@cache
def _presets() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "presets.toml").read_text(encoding="utf-8"))


def preset_names() -> list[str]:
    return list(_presets())


def preset_fields(name: Any) -> dict[str, Any]:
    """Return every field of a preset, defaults included, so that a later preset replaces all of an earlier one."""
    if name not in preset_names():
        raise ConfigError(f"preset = {name!r}: unknown preset; {suggest(name, preset_names())}")
    shape = ModelConfig(**_presets()[name]).model_dump()
    return {key: value for key, value in shape.items() if key not in _FLAGS}
