"""What a model is and what a run does: ModelConfig and Recipe, frozen and validated once.

Owns every default, every allowed value, the presets, and how a recipe changes its base. Knows nothing of torch.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sinkdlm.config.presets import PRESETS
from sinkdlm.config.toml import describe_mistake, flatten, nest, overlay, parse_override, read_table, suggest
from sinkdlm.errors import ConfigError

MODEL_TYPE = "sinkdlm"

Table = Mapping[str, Any]
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Compile = Literal["auto", "blocks", "whole", "none"]


class _Frozen(BaseModel):
    """A table of settings that refuses unknown keys and bad values with a ConfigError."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_mistake(cls, data: Any, handler: Any) -> Self:
        if isinstance(data, Mapping):
            keys = cls.keys()
            for key in data:
                if key not in keys and key not in cls.model_fields:
                    raise ConfigError(f"{key} = {data[key]!r}: unknown key; {suggest(key, keys)}")
        try:
            return handler(data)
        except ValidationError as failure:
            # ConfigError is no ValueError, so pydantic lets it pass through enclosing tables, which add their name.
            raise ConfigError(*(describe_mistake(error) for error in failure.errors())) from None

    @field_validator("*", mode="wrap")
    @classmethod
    def _name_the_place(cls, value: Any, handler: Any, info: Any) -> Any:
        kind = cls.model_fields[info.field_name].annotation
        if isinstance(kind, type) and issubclass(kind, _Frozen) and not isinstance(value, Mapping | kind):
            raise ConfigError(f"{info.field_name} = {value!r}: allowed is a table with the keys {', '.join(kind.keys())}")
        try:
            return handler(value)
        except ConfigError as failure:
            raise failure.within(info.field_name) from None

    @classmethod
    def keys(cls) -> list[str]:
        """The keys as they are written in a file."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True)

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed."""
        return type(self)(**{**self.to_dict(), **changes})


class ParameterCount(NamedTuple):
    """non_embedding is what model names count: everything but embedding rows (tokens, [MASK], sinks) and an untied head."""

    embedding: int
    non_embedding: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.non_embedding + self.head


class ModelConfig(_Frozen):
    """The shape of a model and its variant. Every field travels in a checkpoint's config.json."""

    vocab_size: Count = Field(description="rows of the head: what can be predicted")
    mask_id: int = Field(ge=0, description="[MASK]: vocab_size for an extra embedding row, or a row of the parent's vocabulary")
    n_layers: Count
    n_heads: Count
    n_kv_heads: Count = Field(description="key/value heads; each serves n_heads / n_kv_heads query heads")
    d_model: Count
    d_ff: Count
    context_length: Count = 2048
    rope_base: float = Field(default=10000.0, gt=1)
    norm_eps: float = Field(default=1e-5, gt=0)
    qkv_bias: bool = False
    tie_embeddings: bool = False
    shift_logits: bool = Field(default=False, description="predict token i from position i-1, as Dream does")
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
        # Where n_heads or vocab_size itself is missing, any value will do: that is the mistake to report.
        return {"n_kv_heads": data.get("n_heads", 1), "mask_id": data.get("vocab_size", 0), **data}

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.d_model % self.n_heads or (self.d_model // self.n_heads) % 2:
            raise ConfigError(
                f"n_heads = {self.n_heads}: must divide d_model = {self.d_model} into heads of even width (rotary pairs)"
            )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"n_kv_heads = {self.n_kv_heads}: must divide n_heads = {self.n_heads}")
        if self.mask_id > self.vocab_size:
            raise ConfigError(
                f"mask_id = {self.mask_id}: allowed is a row of the vocabulary (below {self.vocab_size}) "
                f"or {self.vocab_size} for a row of its own"
            )
        if self.sink_kind == "logit" and self.n_sinks > 1:
            raise ConfigError(
                f"n_sinks = {self.n_sinks}: allowed with sink_kind = 'logit' is 0 or 1 (several logits add up to one)"
            )
        return self

    @classmethod
    def preset(cls, name: str, **flags: Any) -> "ModelConfig":
        """A named shape with flags on top: `ModelConfig.preset("smdm-34m", n_sinks=1)`."""
        return cls(**_with_changes(preset_fields(name), flags))

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def embedding_rows(self) -> int:
        return max(self.vocab_size, self.mask_id + 1)

    @property
    def n_lane(self) -> int:
        """Sinks that travel as a lane beside the tokens."""
        return self.n_sinks if self.sink_kind == "isolated" else 0

    @property
    def n_registers(self) -> int:
        """Sinks that join the sequence."""
        return self.n_sinks if self.sink_kind == "register" else 0

    @property
    def has_sink_logit(self) -> bool:
        return self.n_sinks > 0 and self.sink_kind == "logit"

    def count_parameters(self) -> ParameterCount:
        """Of the embedding, of the head, and of all else."""
        kv_width = self.n_kv_heads * self.head_dim
        qkv = (self.d_model + int(self.qkv_bias)) * (self.d_model + 2 * kv_width)
        gate = {"none": 0, "elementwise": self.d_model**2, "headwise": self.d_model * self.n_heads}[self.gate]
        mlp = 3 * self.d_model * self.d_ff
        norms = 2 * self.d_model
        logit = self.n_heads if self.has_sink_logit else 0
        layer = qkv + self.d_model**2 + gate + mlp + norms + logit
        return ParameterCount(
            embedding=(self.embedding_rows + self.n_lane + self.n_registers) * self.d_model,
            non_embedding=self.n_layers * layer + self.d_model,
            head=0 if self.tie_embeddings else self.vocab_size * self.d_model,
        )

    def to_dict(self) -> dict[str, Any]:
        """What config.json holds."""
        return {"model_type": MODEL_TYPE, **super().to_dict()}

    def replace(self, **changes: Any) -> "ModelConfig":
        """A validated copy with some fields changed; [MASK] and key/value heads that followed from others follow them again."""
        return ModelConfig(**_with_changes(self.model_dump(), changes))


# What a preset leaves open.
_FLAGS = ("n_sinks", "sink_kind", "sink_position", "sink_value", "gate")


def _with_changes(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with changes on top. A field that followed from another ([MASK] from the vocabulary, key/value heads from heads)
    follows it again."""
    derived = (("mask_id", "vocab_size"), ("n_kv_heads", "n_heads"))
    stale = [field for field, source in derived if source in changes and fields.get(field) == fields.get(source)]
    return {**{key: value for key, value in fields.items() if key not in stale}, **changes}


def preset_names() -> list[str]:
    return list(PRESETS)


def preset_fields(name: Any) -> dict[str, Any]:
    """Every field of a shape, defaults written out, so that a preset set later replaces one set earlier whole."""
    if name not in PRESETS:
        raise ConfigError(f"preset = {name!r}: unknown preset; {suggest(name, list(PRESETS))}")
    shape = ModelConfig(**PRESETS[name]).model_dump()
    return {key: value for key, value in shape.items() if key not in _FLAGS}


class InitSection(_Frozen):
    """Where the weights come from. Without `from`, the official random initialisation."""

    from_: str | None = Field(
        default=None, alias="from", min_length=1, description="what `convert` reads: a checkpoint, an AR parent"
    )
    sink_init: Literal["mean", "normal"] = Field(
        default="mean", description="sinks added to a parent: the mean of its embedding table plus a little noise, or normal"
    )
    gate_init: Literal["normal", "keep"] = Field(
        default="normal",
        description="a gate added to a parent: normal (gates near 0.5, as the paper), or keep: the parent's function is kept",
    )


class DataSection(_Frozen):
    """What is read: prepared sets with their weights, and how rows are cut."""

    sets: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default={}, description="folder of a prepared set -> its share; relative paths start where the command runs"
    )
    validation: str | None = Field(
        default=None, min_length=1, description="folder to validate on; by default the validation splits of the sets"
    )
    length: Count = Field(default=2048, description="tokens in a row")
    stride: Count | None = Field(
        default=None, description="tokens from the start of one row to the next; by default length (SMDM: length + 1)"
    )
    random_lengths: Fraction = Field(
        default=0.0, description="share of rows cut to a random length (LLaDA: 0.01); rows of examples are not cut"
    )
    documents: Literal["joined", "confined"] = Field(
        default="joined",
        description="joined: attention crosses the documents of a row, as SMDM; confined: each document sees itself and the sinks",
    )
    padding: Literal["train", "ignore"] = Field(
        default="train",
        description="EOS that fills rows of examples up: trained on, as the official SFT, or out of sight and out of the loss",
    )
    eos: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="id that ends documents, for sets that do not say (datatrove's, SMDM's)"
    )
    first: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="id that replaces the first token of rows of text, never masked: the always visible first token, a control",
    )


BUDGETS = ("steps", "tokens", "epochs", "flops")


class TrainSection(_Frozen):
    """Optimizer, budget, noise. Defaults are the paper's from-scratch run (A.1)."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 3407
    steps: Count | None = Field(default=None, description="the budget, in optimizer steps; or as tokens, epochs or flops")
    tokens: Annotated[float, Field(gt=0)] | None = Field(default=None, description="the budget, in tokens read")
    epochs: Annotated[float, Field(gt=0)] | None = Field(default=None, description="the budget, in passes over all the rows")
    flops: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="the budget, as SMDM counts it: 6 * non-embedding parameters * tokens"
    )
    batch: Count = Field(default=256, description="sequences in one optimizer step, over all devices")
    micro_batch: Count | None = Field(
        default=None, description="sequences in one forward on one device; by default what fits (planning.py)"
    )
    lr: float = Field(default=2e-4, gt=0)
    min_lr: float = Field(default=2e-5, ge=0)
    warmup: Fraction = Field(default=0.01, description="share of the budget spent on linear warmup")
    min_warmup: Annotated[int, Field(ge=0)] = Field(default=0, description="steps of warmup at least (official: 100)")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), strict=False)
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, gt=0, description="gradient norm limit")
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="decay of an exponential average of the weights, kept and exported beside them"
    )
    anneal: Fraction = Field(
        default=0.0, description="share of the budget over which attention opens from causal to full (DiffuLLaMA); 0: full at once"
    )
    precision: Literal["auto", "float64", "float32", "bf16", "fp8"] = Field(
        default="auto",
        description="bf16: autocast over float32 weights; fp8: the same, with the products of each block in float8, on GPUs that "
        "have them; auto: bf16 on a GPU, float32 on a CPU; float64: for tests",
    )
    residual: Literal["float32", "bf16"] = Field(
        default="float32",
        description="what layers add to, and its gradient, where precision is bf16 or fp8; bf16 takes less traffic and memory",
    )
    compile: Compile = Field(
        default="auto",
        description="torch.compile of each block; whole: of all as one, on a CPU; auto: each, on a GPU with Triton, where our own "
        "kernels leave anything to fuse or the host would be too slow to launch them",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="activation checkpointing of each block: full keeps its input alone and runs it again in the backward; "
        "selective keeps the results of matrix products and attention, and runs the rest again",
    )
    graphs: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="a forward and its backward are recorded as CUDA graphs and replayed, on one GPU, wherever rows are full; "
        "auto: where that may gain something",
    )
    schedule: Literal["linear", "cosine", "loglinear"] = "linear"
    eps: float = Field(default=1e-3, ge=0, lt=1)
    times: Literal["golden", "independent"] = Field(
        default="golden", description="t of consecutive samples: spread by the golden ratio, or drawn independently (official)"
    )

    @field_validator("recompute", mode="before")
    @classmethod
    def _once_a_switch(cls, value: Any) -> Any:
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.min_lr > self.lr:
            raise ConfigError(f"min_lr = {self.min_lr}: allowed is at most lr = {self.lr}; whoever sets lr sets both")
        if self.micro_batch is not None and self.micro_batch > self.batch:
            raise ConfigError(f"micro_batch = {self.micro_batch}: allowed is at most batch = {self.batch}")
        if self.residual == "bf16" and self.precision in ("float32", "float64"):
            raise ConfigError(f"residual = 'bf16': allowed with precision = 'bf16' or 'fp8', not {self.precision!r}")
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)}: allowed is one budget")
        return self


class ParallelSection(_Frozen):
    """How a run spreads over the ranks that torchrun starts. Changes nothing that is computed."""

    mode: Literal["auto", "replicate", "shard", "hybrid"] = Field(
        default="auto",
        description="replicate: every rank holds everything; shard: each a part (FSDP2); hybrid: copies, each sharded over some "
        "ranks; auto: what fits, with the least traffic",
    )
    shard_ranks: Count | None = Field(default=None, description="hybrid: ranks that share one copy; by default those of one node")
    reshard: bool = Field(
        default=True, description="sharded blocks drop their gathered weights after the forward and gather them again"
    )
    gather: Literal["auto", "bf16", "float32"] = Field(
        default="auto", description="what sharded weights travel as; auto: what the products are computed in"
    )

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.shard_ranks is not None and self.mode != "hybrid":
            raise ConfigError(f"shard_ranks = {self.shard_ranks}: goes with mode = 'hybrid', not {self.mode!r}")
        return self


class EvalSection(_Frozen):
    """Validation while training, with the same rows and noise every time."""

    every: Annotated[int, Field(ge=0)] = Field(default=1000, description="steps between validations; 0: never")
    draws: Count = Field(default=128, description="Monte Carlo draws over the validation set, spread evenly over t")


class LogSection(_Frozen):
    """What a run says while it goes. Changes nothing that is computed."""

    every: Count = Field(default=1, description="steps between lines in metrics.jsonl")
    probe_every: Annotated[int, Field(ge=0)] = Field(
        default=1000, description="steps between looks at attention (share on the sink, top content column, value norms); 0: never"
    )
    probe_rows: Count = Field(default=2, description="validation rows a look reads")
    sample_every: Annotated[int, Field(ge=0)] = Field(default=0, description="steps between sampled texts; 0: never")
    sample_length: Count = Field(default=64, description="tokens of a sampled text")
    sample_prompt: str = Field(default="", description="what a sampled text begins with")
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(default=(), strict=False)
    project: str = Field(default="sinkdlm", description="project or experiment name for the trackers")


class SaveSection(_Frozen):
    """When state is written. Changes nothing that is computed."""

    every: Count = Field(default=1000, description="steps between states to resume from; one is always written at the end")
    keep: Count = Field(default=2, description="states kept, the newest")
    background: bool = Field(default=False, description="write while training goes on, from a copy in memory")
    milestones: tuple[Count, ...] = Field(
        default=(), strict=False, description="steps after which a checkpoint is exported as well"
    )


# How a run goes on may change between its parts; what it computes may not.
CHANGEABLE = ("log", "save", "parallel", "train.micro_batch", "train.compile", "train.recompute", "train.graphs")


class Recipe(_Frozen):
    """One run, whole: what the model is, where it starts, what it reads, how it trains."""

    model: ModelConfig
    init: InitSection = InitSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    parallel: ParallelSection = ParallelSection()
    eval: EvalSection = EvalSection()
    log: LogSection = LogSection()
    save: SaveSection = SaveSection()

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = (), fill: Callable[[Table], Table] = dict) -> "Recipe":
        """Reads a TOML recipe, its base first, then `a.b=c` overrides.

        fill: what is left out, where somebody knows it. Without it nobody is asked, not even the parent of init.from."""
        table = _read_with_base(Path(path), ())
        changes: dict[str, Any] = {}
        for override in overrides:  # together: two shares of a mixture are one change
            changes = overlay(changes, nest(*parse_override(override)))
        try:
            return cls.resolve(fill(_merge(table, changes)))
        except ConfigError as failure:
            raise failure.within(str(path)) from None

    @classmethod
    def resolve(cls, table: Mapping[str, Any]) -> "Recipe":
        """A recipe from a table whose [model] may name a preset and set only what differs."""
        return cls(**_merge({}, table))

    def differences(self, other: "Recipe") -> list[str]:
        """`key: ours, not theirs` for every key that decides what is computed and differs."""
        ours, theirs = flatten(self.to_dict()), flatten(other.to_dict())
        return [
            f"{key} = {ours.get(key)!r}, not {theirs.get(key)!r}"
            for key in dict.fromkeys([*ours, *theirs])
            if ours.get(key) != theirs.get(key) and not any(key == free or key.startswith(f"{free}.") for free in CHANGEABLE)
        ]

    def to_toml(self) -> str:
        """The resolved recipe; `Recipe.load` reads it back unchanged. TOML has no null: an unset key is left out."""
        import tomli_w

        return tomli_w.dumps(self.model_dump(by_alias=True, exclude_none=True))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema of a recipe file, for editors: sections may be partial, `base` and `preset` are allowed."""
        schema = cls.model_json_schema(by_alias=True)
        schema.pop("required", None)
        schema["properties"]["base"] = {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            "description": "other recipes, relative to this file, that this one changes; later ones change earlier ones",
        }
        model = schema["$defs"]["ModelConfig"]
        model.pop("required", None)
        model["properties"]["preset"] = {"enum": preset_names(), "description": "a named shape; the other keys are set on top"}
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "sinkdlm recipe"}


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with changes on top, table by table. A preset is written out where it is set, over what stood there before."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if key == "model" and isinstance(value, Mapping) and isinstance(old, Mapping | None):
            merged[key] = _merge_model(old or {}, value)
        elif key == "sets" and isinstance(value, Mapping):
            merged[key] = dict(value)  # a mixture is one value: its shares mean nothing beside those of another
        elif isinstance(old, Mapping) and isinstance(value, Mapping):
            budgets = BUDGETS if key == "train" and any(name in value for name in BUDGETS) else ()
            merged[key] = _merge({name: kept for name, kept in old.items() if name not in budgets}, value)
        elif isinstance(value, Mapping) and old is not None:
            raise ConfigError(f"{key} = {old!r}: a value, not a table; cannot set {', '.join(value)} in it")
        else:
            merged[key] = value
    return merged


def _merge_model(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    if "preset" in changes:
        try:
            base = {**base, **preset_fields(changes["preset"])}
        except ConfigError as failure:
            raise failure.within("model") from None
    return _with_changes(base, {key: value for key, value in changes.items() if key != "preset"})


def _read_with_base(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in readers:
        raise ConfigError(f"base = {path.name!r}: a recipe cannot be its own base", place=str(readers[-1]))
    table = read_table(path, f" (base of {readers[-1]})" if readers else "")
    bases = table.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"base = {bases!r}: allowed is a path or a list of paths, relative to this file", place=str(path))
    merged: dict[str, Any] = {}
    for base in bases:
        merged = _merge(merged, _read_with_base(path.parent / base, (*readers, path)))
    return _merge(merged, table)
