"""The recipe of a run and its sections, frozen and validated once.

Owns every default and allowed value of a run, and how a recipe changes its base. Knows nothing of torch.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sinkdlm.config.model import Count, Frozen, ModelConfig, preset_fields, preset_names, with_changes
from sinkdlm.config.shipped import find_recipe
from sinkdlm.config.toml import flatten, nest, overlay, parse_override, read_table
from sinkdlm.errors import ConfigError

Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Compile = Literal["auto", "blocks", "whole", "none"]


def key(default: Any, description: str, **limits: Any) -> Any:
    """Define a key of a section. The JSON schema shows the description."""
    return Field(default=default, description=description, **limits)


class InitSection(Frozen):
    """Where the weights come from. Without `from`, the official random initialisation."""

    from_: str | None = key(None, "a checkpoint, or an AR parent that `convert` reads", alias="from", min_length=1)
    sink_init: Literal["mean", "normal"] = key("mean", "sinks added to a parent: the mean of its embeddings plus noise, or normal")
    gate_init: Literal["normal", "keep"] = key("normal", "gate added to a parent: near 0.5 (paper), or keep its function")


class AdapterSection(Frozen):
    """LoRA on a frozen parent, and what trains in full beside it."""

    kind: Literal["none", "lora"] = key("none", "lora: freeze the parent but for low-rank updates and what `full` names")
    base: Literal["nf4", "int8"] | None = key(
        None, "hold the frozen linear layers of blocks in 4 or 8 bits; by default in the weights' own precision"
    )
    rank: Count = key(16, "rank of an update")
    alpha: Positive = key(32.0, "updates are scaled by alpha / rank")
    dropout: Decay = key(0.0, "share of a layer's input features that updates do not see, drawn for each step")
    targets: tuple[Literal["qkv", "out", "gate_up", "down"], ...] = key(
        ("qkv", "out", "gate_up", "down"), "linear layers of each block that get an update", strict=False, min_length=1
    )
    full: tuple[Literal["sinks", "sink_logit", "gate", "mask"], ...] = key(
        ("sinks", "sink_logit", "gate", "mask"),
        "what trains in full, where it exists; mask: a [MASK] new to the parent",
        strict=False,
    )


class DataSection(Frozen):
    """The prepared sets that a run reads, their weights, and how rows are cut."""

    sets: dict[str, Positive] = key({}, "folder of a prepared set -> its share; relative paths start at the working directory")
    validation: str | None = key(None, "folder to validate on; by default the validation splits of the sets", min_length=1)
    length: Count = key(2048, "tokens in a row")
    stride: Count | None = key(None, "tokens from the start of one row to the next; by default length (SMDM: length + 1)")
    random_lengths: Fraction = key(0.0, "share of rows cut to a random length (LLaDA: 0.01); rows of examples are not cut")
    documents: Literal["joined", "confined"] = key("joined", "attention over all documents of a row (SMDM), or confined to each")
    padding: Literal["train", "ignore"] = key("train", "EOS after an example: trained on (official SFT), or no attention, no loss")
    eos: Natural | None = key(None, "id that ends documents, for sets without one (datatrove's, SMDM's)")
    first: Natural | None = key(None, "control experiment: id that replaces each text row's first token, never masked")


BUDGETS = ("steps", "tokens", "epochs", "flops")


class TrainSection(Frozen):
    """Optimizer, budget, noise. Defaults are the paper's from-scratch run (A.1)."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 3407
    steps: Count | None = key(None, "the budget, in optimizer steps; or as tokens, epochs or flops")
    tokens: Positive | None = key(None, "the budget, in tokens read")
    epochs: Positive | None = key(None, "the budget, in passes over all the rows")
    flops: Positive | None = key(None, "the budget, as SMDM counts it: 6 * non-embedding parameters * tokens")
    batch: Count = key(256, "sequences in one optimizer step, over all devices")
    micro_batch: Count | None = key(None, "sequences in one forward on one device; by default what fits")
    lr: Positive = 2e-4
    min_lr: float = Field(default=2e-5, ge=0)
    warmup: Fraction = key(0.01, "share of the budget for linear warm-up")
    min_warmup: Natural = key(0, "least steps of warm-up (official: 100)")
    betas: tuple[Decay, Decay] = Field(default=(0.9, 0.95), strict=False)
    adam_eps: Positive = 1e-8
    weight_decay: float = Field(default=0.1, ge=0)
    clip: Positive = key(1.0, "gradient norm limit")
    ema: float | None = key(None, "decay of an exponential average of the weights, exported beside them", gt=0, lt=1)
    anneal: Fraction = key(0.0, "attention annealing: share of the budget from causal to full (DiffuLLaMA); 0: full at once")
    precision: Literal["auto", "float64", "float32", "bf16", "fp8"] = key(
        "auto",
        "bf16: autocast over float32 weights; fp8: the same, with the matmuls of each block in float8, on GPUs that have them; "
        "auto: bf16 on a GPU, float32 on a CPU; float64: for tests",
    )
    residual: Literal["float32", "bf16"] = key("float32", "residual stream's dtype in bf16 or fp8 runs; bf16 takes less memory")
    runner: Literal["auto", "plain"] = key("auto", "plain: train with the readable model, without kernels or compiler")
    compile: Compile = key(
        "auto",
        "torch.compile for each block; whole: all blocks as one, on a CPU; auto: each on a GPU, where kernels leave work to fuse",
    )
    recompute: Literal["none", "selective", "full"] = key(
        "none", "activation checkpointing: full keeps only each block's input; selective also results of matmuls and attention"
    )
    graphs: Literal["auto", "on", "off"] = key("auto", "CUDA graphs of a micro-batch, on one GPU; auto: where they may help")
    schedule: Literal["linear", "cosine", "loglinear"] = "linear"
    eps: Decay = 1e-3
    weights: Literal["bound", "equal"] = key(
        "bound", "of masked tokens in the loss: p'/p, or all equal; validation keeps the bound"
    )
    times: Literal["golden", "independent"] = key("golden", "t of samples: spread evenly (golden ratio), or independent (official)")

    @field_validator("recompute", mode="before")
    @classmethod
    def _once_a_switch(cls, value: Any) -> Any:
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.min_lr > self.lr:
            raise ConfigError(f"min_lr = {self.min_lr}: allowed is at most lr = {self.lr}; set both")
        if self.micro_batch is not None and self.micro_batch > self.batch:
            raise ConfigError(f"micro_batch = {self.micro_batch}: allowed is at most batch = {self.batch}")
        if self.residual == "bf16" and self.precision in ("float32", "float64"):
            raise ConfigError(f"residual = 'bf16': allowed with precision = 'bf16' or 'fp8', not {self.precision!r}")
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)}: allowed is one budget")
        return self


class BlocksSection(Frozen):
    """How a block-diffusion model (model.block_size) trains. Validation keeps the model's own blocks and the full range of t."""

    t_range: tuple[Fraction, Fraction] = key(
        (0.0, 1.0), "t of blocks is drawn from this range; BD3-LM: 0.45 to 0.95 for blocks of 4, 0.3 to 0.8 for 16", strict=False
    )
    complementary: bool = key(False, "train each sample with its mask and with the complement of it (Fast-dLLM v2)")
    sizes: tuple[Annotated[tuple[Natural, Count], Field(strict=False)], ...] = key(
        (),
        "[step, size] pairs: blocks have this size from that step on (LLaDA2's warm-up and decay); the last is the model's",
        strict=False,
    )

    @field_validator("sizes", mode="before")
    @classmethod
    def _pairs(cls, given: Any) -> Any:
        if isinstance(given, list | tuple) and not all(isinstance(entry, list | tuple) and len(entry) == 2 for entry in given):
            raise ConfigError(f"sizes = {given}: allowed are pairs of a step and a block size, as in [[0, 4], [1000, 32]]")
        return given

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        low, high = self.t_range
        if low >= high:
            raise ConfigError(f"t_range = [{low}, {high}]: allowed is a lower and a higher time, as in [0.3, 0.8]")
        if self.complementary and abs(low + high - 1) > 1e-9:
            cure = "give a range around 0.5, as in [0.2, 0.8], or leave one out"
            raise ConfigError(f"complementary = true: the complement of t in [{low}, {high}] lies outside; {cure}")
        steps = [step for step, _ in self.sizes]
        if steps and (steps[0] != 0 or sorted(set(steps)) != steps):
            raise ConfigError(f"sizes: steps {steps}: allowed are growing steps from 0 on, as in [[0, 4], [1000, 32]]")
        return self

    def size_at(self, step: int) -> int | None:
        """Return the block size that replaces the model's at a step; None: the model's own."""
        return next((size for first, size in reversed(self.sizes) if step >= first), None)


class ParallelSection(Frozen):
    """How a run uses the ranks that torchrun starts. Changes no result."""

    mode: Literal["auto", "replicate", "shard", "hybrid"] = key(
        "auto", "replicate: all weights on each rank; shard: a part (FSDP2); hybrid: sharded copies; auto: what fits, least traffic"
    )
    shard_ranks: Count | None = key(None, "hybrid: ranks that share one copy; by default those of one node")
    reshard: bool = key(True, "sharded blocks free gathered weights after the forward and gather them again")
    gather: Literal["auto", "bf16", "float32"] = key("auto", "dtype in which sharded weights are gathered; auto: the matmuls'")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.shard_ranks is not None and self.mode != "hybrid":
            raise ConfigError(f"shard_ranks = {self.shard_ranks}: goes with mode = 'hybrid', not {self.mode!r}")
        return self


class EvalSection(Frozen):
    """Validation during training, on the same rows and noise every time."""

    every: Natural = key(1000, "steps between validations; 0: never")
    draws: Count = key(128, "Monte Carlo draws over the validation set, spread evenly over t")


class LogSection(Frozen):
    """What a run reports. Changes no result."""

    every: Count = key(1, "steps between lines in metrics.jsonl")
    probe_every: Natural = key(1000, "steps between probes of attention (sink share, top content column, value norms); 0: never")
    probe_rows: Count = key(2, "validation rows of a probe")
    sample_every: Natural = key(0, "steps between sampled texts; 0: never")
    sample_length: Count = key(64, "tokens of a sampled text")
    sample_prompt: str = key("", "beginning of a sampled text")
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = Field(default=(), strict=False)
    project: str = key("sinkdlm", "project or experiment name for the trackers")


class SaveSection(Frozen):
    """When a run writes its state. Changes no result."""

    every: Count = key(1000, "steps between states to resume from; one is always written at the end")
    keep: Count = key(2, "states kept, the newest")
    background: bool = key(False, "write during training, from a copy in memory")
    milestones: tuple[Count, ...] = key((), "steps after which a checkpoint is exported as well", strict=False)


# A resumed run may change these keys, and none that decides what is computed.
CHANGEABLE = ("log", "save", "parallel", "train.micro_batch", "train.runner", "train.compile", "train.recompute", "train.graphs")


class Recipe(Frozen):
    """A whole run: its model, initial weights, data and training."""

    model: ModelConfig
    init: InitSection = InitSection()
    adapter: AdapterSection = AdapterSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    blocks: BlocksSection = BlocksSection()
    parallel: ParallelSection = ParallelSection()
    eval: EvalSection = EvalSection()
    log: LogSection = LogSection()
    save: SaveSection = SaveSection()

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        size = self.model.block_size
        if self.adapter.kind == "none" and self.adapter != AdapterSection():
            raise ConfigError("adapter.kind = 'none': the other keys go with 'lora'; set it, or leave [adapter] out")
        if self.adapter.kind != "none" and self.init.from_ is None:
            raise ConfigError(f"adapter.kind = {self.adapter.kind!r}: needs a parent; set init.from, or leave [adapter] out")
        if self.adapter.base and self.train.precision == "fp8":
            raise ConfigError(f"adapter.base = {self.adapter.base!r}: does not go with train.precision = 'fp8'; set 'bf16'")
        if size is None and self.blocks != BlocksSection():
            raise ConfigError("blocks: goes with model.block_size, which is not set; set it, or leave [blocks] out")
        if size is not None and self.train.anneal:
            raise ConfigError(
                f"train.anneal = {self.train.anneal}: does not go with model.block_size; let blocks.sizes grow instead"
            )
        if self.blocks.complementary and self.train.schedule != "linear":
            why = "only the linear schedule masks a complement as at the time 1 - t"
            raise ConfigError(f"blocks.complementary = true: does not go with train.schedule = {self.train.schedule!r}: {why}")
        if self.blocks.sizes and self.blocks.sizes[-1][1] != size:
            raise ConfigError(f"blocks.sizes: ends with {self.blocks.sizes[-1][1]}, and model.block_size = {size}; end with that")
        return self

    @classmethod
    def load(
        cls, path: str | Path, overrides: Sequence[str] = (), fill: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    ) -> "Recipe":
        """Read a recipe, its base first, then `a.b=c` overrides. path: a TOML file, or the name of a shipped recipe.

        fill: completes the table. Without it nothing is added, not even from the parent of init.from."""
        table = _read_with_base(find_recipe(path), ())
        changes: dict[str, Any] = {}
        for override in overrides:  # together: overrides of one mixture are one change
            changes = overlay(changes, nest(*parse_override(override)))
        try:
            return cls.resolve(fill(merge(table, changes)))
        except ConfigError as failure:
            raise failure.within(str(path)) from None

    @classmethod
    def resolve(cls, table: Mapping[str, Any]) -> "Recipe":
        """Build a recipe from a table whose [model] may name a preset and set only what differs."""
        whole = merge({}, table)
        return cls(**{**whole, **({"model": expand(whole["model"])} if isinstance(whole.get("model"), Mapping) else {})})

    def differences(self, other: "Recipe") -> list[str]:
        """List `key = ours, not theirs` for each differing key that decides what is computed."""
        ours, theirs = flatten(self.to_dict()), flatten(other.to_dict())
        return [
            f"{key} = {ours.get(key)!r}, not {theirs.get(key)!r}"
            for key in dict.fromkeys([*ours, *theirs])
            if ours.get(key) != theirs.get(key) and not any(key == free or key.startswith(f"{free}.") for free in CHANGEABLE)
        ]

    def to_toml(self) -> str:
        """Write the resolved recipe; `Recipe.load` reads it back unchanged. TOML has no null: an unset key is left out."""
        import tomli_w

        return tomli_w.dumps(self.model_dump(by_alias=True, exclude_none=True))

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema of a recipe file, for editors: sections may be partial, `base` and `preset` are allowed."""
        schema = cls.model_json_schema(by_alias=True)
        schema.pop("required", None)
        schema["properties"]["base"] = {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
            "description": "recipes that this one changes: paths from this file, or shipped names; later ones change earlier ones",
        }
        model = schema["$defs"]["ModelConfig"]
        model.pop("required", None)
        model["properties"]["preset"] = {"enum": preset_names(), "description": "a named shape; the other keys are set on top"}
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "sinkdlm recipe"}


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into a table, table by table. A preset replaces all fields that it has."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if key == "model" and isinstance(value, Mapping) and isinstance(old, Mapping | None):
            merged[key] = _merge_model(old or {}, value)
        elif key == "sets" and isinstance(value, Mapping):
            merged[key] = dict(value)  # a mixture is one value: shares of two mixtures do not add up
        elif isinstance(old, Mapping) and isinstance(value, Mapping):
            budgets = BUDGETS if key == "train" and any(name in value for name in BUDGETS) else ()
            merged[key] = merge({name: kept for name, kept in old.items() if name not in budgets}, value)
        elif isinstance(value, Mapping) and old is not None:
            raise ConfigError(f"{key} = {old!r}: a value, not a table; cannot set {', '.join(value)} in it")
        else:
            merged[key] = value
    return merged


def _merge_model(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge [model] tables. A preset stays a name until `expand`, so that keys set beside it can be told from its own."""
    if "preset" in changes:
        try:
            own = preset_fields(changes["preset"])
        except ConfigError as failure:
            raise failure.within("model") from None
        base = {key: value for key, value in base.items() if key not in own}
    return with_changes(base, changes)


def expand(model: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the preset of a merged [model] by its fields."""
    if "preset" not in model:
        return dict(model)
    return with_changes(preset_fields(model["preset"]), {key: value for key, value in model.items() if key != "preset"})


def _read_with_base(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in readers:
        raise ConfigError(f"base = {path.name!r}: a recipe cannot be its own base", place=str(readers[-1]))
    table = read_table(path)
    bases = table.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"base = {bases!r}: allowed is a path or a list of paths, relative to this file", place=str(path))
    merged: dict[str, Any] = {}
    for base in bases:
        merged = merge(merged, _read_with_base(find_recipe(base, path.parent, f" (base of {path})"), (*readers, path)))
    return merge(merged, table)
