"""FLOPs and memory of a recipe, by formula. Knows nothing of torch or of what is installed.

FLOPs of training one token: 6 (N + share * H) + 12 layers width T, where N counts the non-embedding parameters, H the head's, share
the positions that reach the head (the masked ones: logits exist nowhere else), and the last term is attention's two matmuls over T
keys, forward and backward. In block diffusion a row is computed twice, noised and clean: N counts twice, and the two copies of a
token see T + L keys together, L the block size. The lane's S tokens a forward, norms, rotary and softmax are left out, as is usual.
Where the last layer computes only positions that reach the head, its matmuls after attention count for these alone.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

from sinkdlm.config.model import ModelConfig
from sinkdlm.config.recipe import ParallelSection, Recipe, TrainSection
from sinkdlm.errors import ConfigError


class Chip(NamedTuple):
    """One device's data sheet. A GB is 10^9 bytes, as there."""

    name: str
    flops: float  # dense bf16, a second
    bandwidth: float  # bytes of memory a second
    memory: int
    link: float  # bytes a second to other devices of its host, one way
    float8: bool = True  # whether it has float8 matmuls


_SHEETS = tomllib.loads((Path(__file__).parent / "devices.toml").read_text(encoding="utf-8"))
PEAK_FLOPS: dict[str, float] = _SHEETS["flops"]
CHIPS = {chip["name"].lower(): Chip(flops=PEAK_FLOPS[chip["name"]], **chip) for chip in _SHEETS["chip"]}
# float8 is counted as bf16 but takes less: inputs of matmuls are kept in float8, results and attention as in bf16.
_BYTES = {"float64": 8, "float32": 4, "bf16": 2, "fp8": 2, "auto": 2}
USABLE = 0.85  # of a device's memory: the rest is fragmentation, workspaces and the CUDA context


def peak_flops(device: str) -> float | None:
    """Find a device's FLOP/s by its name (NVIDIA H200), or None."""
    words = [word for word in PEAK_FLOPS if word in device.upper()]
    return PEAK_FLOPS[max(words, key=len)] if words else None


def find_chip(device: str) -> Chip | None:
    """Find a device's data sheet by its name, or None. GH200, PCIe cards and the A100 of 40 GB are other devices."""
    words = device.upper().replace("-", " ").split()
    return next((chip for chip in CHIPS.values() if chip.name in words and not {"PCIE", "40GB"} & set(words)), None)


def head_chunk(vocab_size: int) -> int:
    """Return the rows of logits that a loss holds at a time: the formula of fast/objective.py, which imports torch."""
    return max(2048, 160_000_000 // vocab_size // 256 * 256)


def training_flops(
    config: ModelConfig, length: int, scored_share: float = 0.5, *, ends_early: bool = False, trained: int | None = None
) -> float:
    """Count the FLOPs of one token in a row of `length`, forward and backward. scored_share: share of positions that reach the
    head, half with uniform t. ends_early: after attention, the last layer computes only these. trained: parameters that train,
    where the others are frozen; None: all do."""
    width, heads, copies = config.d_model, config.attention_width, copies_of(config, length)
    dense = copies * config.count_parameters().non_embedding + scored_share * config.vocab_size * width
    if ends_early:  # one layer's matmuls after attention, the gate's among them
        dense -= (copies - scored_share) * width * (heads + config.gate_width + 3 * config.d_ff)
    matmuls = 6 * dense if trained is None else 4 * dense + 6 * trained  # without the gradient of frozen weights
    return matmuls + 12 * config.n_layers * heads * keys_of(config, length)


def count_held(recipe: Recipe) -> tuple[int, int]:
    """Count a run's parameters, and those of them that train. A new [MASK] row is left out."""
    config, section = recipe.model, recipe.adapter
    total, d = config.count_parameters().total, config.d_model
    if section.kind == "none":
        return total, total
    sides = {name: sum(shape) for name, shape in block_matrices(config).items()}
    full = {
        "sinks": (config.n_lane + config.n_registers) * d,
        "sink_logit": config.n_layers * config.n_heads * config.has_sink_logit,
        "gate": config.n_layers * d * config.gate_width,
    }
    added = config.n_layers * section.rank * sum(sides[name] for name in section.targets)
    return total + added, added + sum(full.get(name, 0) for name in section.full)


def block_matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of a block's linear layers, but for a gate."""
    d, ff, heads = config.d_model, config.d_ff, config.attention_width
    return {"qkv": (heads + 2 * config.n_kv_heads * config.head_dim, d), "out": (d, heads), "gate_up": (2 * ff, d), "down": (d, ff)}


def copies_of(config: ModelConfig, length: int) -> int:
    """Return how often a row of `length` is computed in a forward: noised and clean in block diffusion."""
    return 2 if config.block_size is not None and config.block_size < length else 1


def keys_of(config: ModelConfig, length: int) -> int:
    """Return the keys that a token's copies see together, on average over the row."""
    return length + (config.block_size or 0) * (copies_of(config, length) - 1)


def budget_steps(train: TrainSection, config: ModelConfig, length: int, n_rows: int) -> int:
    """Convert the budget to optimizer steps. FLOPs are counted as SMDM does: 6 N a token, N the non-embedding parameters."""
    per_step = train.batch * length
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        steps = train.tokens / per_step
    elif train.epochs is not None:
        steps = train.epochs * n_rows / train.batch
    elif train.flops is not None:
        steps = train.flops / (6 * config.count_parameters().non_embedding * per_step)
    else:
        raise ConfigError("train: no budget; set one of train.steps, train.tokens, train.epochs, train.flops")
    if steps < 1:
        raise ConfigError(f"train: the budget is less than one step of {train.batch} rows of {length} tokens")
    return int(steps)


class Memory(NamedTuple):
    """Bytes on one device at the peak of a step, by part."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    copies: int  # of weights from the forward to the backward: gathered from other ranks, or cast
    activations: int
    head: int  # a chunk of logits with its gradient, and the head's own, at the end of the forward
    backward: int  # of one block, with its weights in transit
    accumulates: bool  # whether gradients of earlier forwards are held during a forward

    @property
    def state(self) -> int:
        """Bytes of weights, gradients, optimizer state and average."""
        return self.weights + self.gradients + self.optimizer + self.ema

    @property
    def total(self) -> int:
        """Peak bytes. Gradients grow while activations are freed, so a step of one forward never holds all of both."""
        held = self.weights + self.optimizer + self.ema + self.copies
        full = self.activations + max(self.head, self.backward)
        return held + (self.gradients + full if self.accumulates else max(full, self.gradients + self.backward))


class Layout(NamedTuple):
    """How many copies of the weights there are, and over how many ranks each is sharded."""

    copies: int = 1
    shards: int = 1

    @property
    def name(self) -> str:
        return "replicate" if self.shards == 1 else "shard" if self.copies == 1 else "hybrid"

    @property
    def ranks(self) -> int:
        return self.copies * self.shards

    @property
    def text(self) -> str:
        if self.ranks == 1:
            return "one process"
        hybrid = f"{self.copies} copies sharded over {self.shards} ranks each"
        held = {"replicate": "a copy on each", "shard": "sharded", "hybrid": hybrid}[self.name]
        return f"{self.ranks} ranks, {held}"


def choose_layout(section: ParallelSection, ranks: int, node_ranks: int, state: int, memory: int | None) -> Layout:
    """Choose the layout. state: bytes of weights, gradients, moments and average, unsharded. memory: of one rank's device, or None.

    auto replicates while the state takes at most a quarter of the device; else it shards over a node's ranks, or over all.
    """
    mode = section.mode
    if mode == "auto":
        room = state if memory is None else memory // 4
        if state <= room:
            mode = "replicate"
        else:
            several_nodes = node_ranks < ranks and ranks % node_ranks == 0
            mode = "hybrid" if several_nodes and state <= room * node_ranks else "shard"
    if mode == "replicate":
        return Layout(ranks, 1)
    if mode == "shard":
        return Layout(1, ranks)
    shards = section.shard_ranks or node_ranks
    if ranks % shards:
        raise ConfigError(f"parallel.shard_ranks = {shards}: allowed is a divisor of the {ranks} ranks")
    return Layout(ranks // shards, shards)


def lay_out(recipe: Recipe, ranks: int, node_ranks: int, memory: int | None) -> Layout | None:
    """Return the layout that `train` chooses on so many ranks; None for one process."""
    whole = training_memory(recipe, 1).state
    return None if ranks == 1 else choose_layout(recipe.parallel, ranks, node_ranks, whole, memory)


def settle_precision(recipe: Recipe, *, on_gpu: bool) -> Recipe:
    """Resolve train.precision = "auto": bf16 on a GPU, float32 on a CPU."""
    if recipe.train.precision != "auto":
        return recipe
    if recipe.train.residual == "bf16" and not on_gpu:
        raise ConfigError(
            "train.residual = 'bf16' with train.precision = 'auto', which is float32 on a CPU: "
            "set train.precision = 'bf16', or leave residual out"
        )
    table = recipe.to_dict()
    return Recipe.resolve({**table, "train": {**table["train"], "precision": "bf16" if on_gpu else "float32"}})


def training_memory(
    recipe: Recipe, micro_batch: int, layout: Layout | None = None, *, accumulates: bool = True, compiled: bool | None = None
) -> Memory:
    """Estimate one rank's memory. compiled: whether blocks are; by default as the recipe says, "auto" meaning a GPU. Compared with
    peaks on an H200: benchmarks/results/memory-*.json."""
    config, train = recipe.model, recipe.train
    layout = layout or Layout()
    weight = 8 if train.precision == "float64" else 4
    unit = _BYTES[train.precision]
    tokens = micro_batch * recipe.data.length
    # A schedule of block sizes takes two copies for its smaller blocks.
    shortest = min([size for _, size in recipe.blocks.sizes] or [recipe.data.length])
    computed = tokens * max(copies_of(config, recipe.data.length), 1 + (shortest < recipe.data.length))
    count, alone = config.count_parameters(), layout.ranks == 1
    base, matrices = recipe.adapter.base, block_matrices(config).values()
    sizes = [n_out * n_in for n_out, n_in in matrices] if base else [0]
    quantized = config.n_layers * sum(sizes)
    floats, n_trained = count_held(recipe)
    held, trained = (-(-number // layout.shards) * weight for number in (floats - quantized, n_trained))
    if base:  # whole on every rank, with scales of four bytes: one an output, or one a group of 64
        scales = sum(n_out for n_out, _ in matrices) if base == "int8" else sum(sizes) // 64
        held += config.n_layers * (sum(sizes) // (1 if base == "int8" else 2) + 4 * scales)
    floating = count.non_embedding - quantized
    kept = kept_by_block(config, unit, train.compile != "none" if compiled is None else compiled, train.residual)
    logits = min(head_chunk(config.vocab_size), tokens) * config.vocab_size * (4 + unit)
    # On one rank, autocast keeps every block's cast weights for the backward, unless the backward casts them again.
    # Sharded, the root is gathered whole; in transit are two gathered blocks and a third's buffer, one's gradient and its sum.
    cast = unit * floating if unit < weight and train.recompute == "none" else 0
    gathered = weight * (count.embedding + count.head) if layout.shards > 1 else 0
    travelling = 0 if alone else floating // config.n_layers * (4 * unit + weight)
    # A matmul with a quantised weight looks its levels up, in float32, and rounds the result.
    travelling += max(sizes) * (4 + unit + (2 if base == "nf4" else 0))
    # With recomputation, the backward first computes what the block would have kept.
    again = computed * (kept["none"] - kept[train.recompute])
    return Memory(
        weights=held,
        gradients=trained,
        optimizer=2 * trained,
        ema=trained if train.ema is not None else 0,
        copies=cast if alone else gathered,
        activations=computed * config.n_layers * kept[train.recompute],
        head=logits + config.vocab_size * config.d_model * (4 + unit) + 2 * tokens * config.d_model * 4,
        backward=again + computed * unit * (config.d_ff + 3 * config.d_model) + travelling,
        accumulates=accumulates or recipe.blocks.complementary,  # whose two forwards add up their gradients
    )


def kept_by_block(config: ModelConfig, unit: int, compiled: bool, residual: str = "float32") -> dict[str, int]:
    """Count the bytes per token that one block keeps for its backward, by recomputation. residual: as in the recipe.

    none: both residuals, both normed inputs, q, k and v before rotary, q and k after it, attention's output, gate and up; q and k
    before their norms, if they have them;
    and, unless blocks are compiled, keys and values with the sinks, silu(gate), its product and the norms before rounding.
    selective: the block's input and the results of its matmuls and of attention. full: its input.
    """
    d, ff, heads, kv = config.d_model, config.d_ff, config.attention_width, config.n_kv_heads * config.head_dim
    wide = 8 if unit == 8 else 2 if residual == "bf16" else 4
    gate = config.gate_width
    every = 2 * wide * d + unit * (2 * d + 3 * heads + 3 * kv + 2 * ff) + (unit * (gate + heads) if gate else 0)
    every += unit * (heads + kv) if config.qk_norm else 0
    if not compiled:
        every += unit * (2 * ff + kv) + (wide * d if unit < wide else 0)
    return {"none": every, "selective": wide * d + unit * (2 * d + 2 * heads + 2 * kv + 2 * ff + gate), "full": wide * d}


def fitting_micro_batch(
    recipe: Recipe, memory: int | None, share: int, layout: Layout | None = None, *, compiled: bool | None = None
) -> int:
    """Return the largest micro-batch that fits, of `share` rows cut into equal forwards; all of them where memory is unknown."""
    if memory is None:
        return share
    for cuts in range(1, share + 1):
        rows = -(-share // cuts)
        if training_memory(recipe, rows, layout, accumulates=cuts > 1, compiled=compiled).total <= USABLE * memory:
            return rows
    return 1
