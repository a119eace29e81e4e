"""FLOPs and memory of a recipe, by formula. Knows nothing of torch or of what is installed.

FLOPs of training one token: 6 (N + share * H) + 12 layers width T, where N counts the non-embedding parameters, H the head's, share
the positions that reach the head (the masked ones: logits exist nowhere else), and the last term is attention's two matmuls over T
keys, forward and backward. The lane's S tokens a forward, norms, rotary and softmax are left out, as is usual. Where the last layer
ends at the positions that reach the head, what it does not compute behind its attention is not counted.
"""

from typing import NamedTuple

from sinkdlm.config.model import ModelConfig
from sinkdlm.config.recipe import ParallelSection, Recipe, TrainSection
from sinkdlm.errors import ConfigError

# Dense bf16 matrix FLOP/s from the makers' data sheets, by a word of the device's name.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
    "A10G": 70e12,
}


class Chip(NamedTuple):
    """What a maker's data sheet says of one device. Bytes are of 10^9, as there."""

    name: str
    flops: float  # dense bf16, a second
    bandwidth: float  # bytes of memory a second
    memory: int
    link: float  # bytes a second to the others of its host, one way
    float8: bool = True  # whether it has float8 matmuls


# The data sheets of NVIDIA A100 80GB (SXM), H100 (SXM), H200 and HGX B200, NVLink halved for one direction.
CHIPS = {
    "a100": Chip("A100", PEAK_FLOPS["A100"], 2.039e12, 80 * 10**9, 300e9, float8=False),
    "h100": Chip("H100", PEAK_FLOPS["H100"], 3.35e12, 80 * 10**9, 450e9),
    "h200": Chip("H200", PEAK_FLOPS["H200"], 4.8e12, 141 * 10**9, 450e9),
    "b200": Chip("B200", PEAK_FLOPS["B200"], 8.0e12, 180 * 10**9, 900e9),
}
# float8 is counted as bf16, and takes less: inputs of matmuls are kept rounded, results and attention as in bf16.
_BYTES = {"float64": 8, "float32": 4, "bf16": 2, "fp8": 2, "auto": 2}
USABLE = 0.85  # of a device's memory: the rest is fragments, workspaces and the context


def peak_flops(device: str) -> float | None:
    """Of a device by its name (NVIDIA H200), or None where the table has none."""
    words = [word for word in PEAK_FLOPS if word in device.upper()]
    return PEAK_FLOPS[max(words, key=len)] if words else None


def find_chip(device: str) -> Chip | None:
    """Of a device by its name, where the table has it. GH200, PCIe cards and the A100 of 40 GB are other devices."""
    words = device.upper().replace("-", " ").split()
    return next((chip for chip in CHIPS.values() if chip.name in words and not {"PCIE", "40GB"} & set(words)), None)


def head_chunk(vocab_size: int) -> int:
    """Rows of logits that a loss holds at a time, as diffusion.head_chunk, which needs torch to be imported."""
    return max(2048, 160_000_000 // vocab_size // 256 * 256)


def training_flops(config: ModelConfig, length: int, scored_share: float = 0.5, *, ends_early: bool = False) -> float:
    """Of one token of a row of `length`, forward and backward. scored_share: positions that reach the head, half with uniform t.
    ends_early: the last layer computes no others once attention is."""
    width = config.d_model
    dense = config.count_parameters().non_embedding + scored_share * config.vocab_size * width
    if ends_early:  # the matmuls of one layer behind attention, the gate's among them
        dense -= (1 - scored_share) * width * (width + _gate_width(config) + 3 * config.d_ff)
    return 6 * dense + 12 * config.n_layers * width * length


def _gate_width(config: ModelConfig) -> int:
    return {"none": 0, "elementwise": config.d_model, "headwise": config.n_heads}[config.gate]


def budget_steps(train: TrainSection, config: ModelConfig, length: int, n_rows: int) -> int:
    """The budget in optimizer steps. FLOPs are counted as SMDM does: 6 N a token, N the non-embedding parameters."""
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
    """Bytes on one device at the height of a step."""

    weights: int
    gradients: int
    optimizer: int
    ema: int
    copies: int  # of weights from the forward to the backward: gathered from other ranks, or cast
    activations: int
    head: int  # a chunk of logits with its gradient, and the head's own, at the end of the forward
    backward: int  # of one block, with its weights on their way
    accumulates: bool  # whether gradients of earlier forwards are held during a forward

    @property
    def state(self) -> int:
        """What is held for parameters from step to step, and their gradients."""
        return self.weights + self.gradients + self.optimizer + self.ema

    @property
    def total(self) -> int:
        """Gradients come as activations go, so that a step of one forward never holds both."""
        held = self.weights + self.optimizer + self.ema + self.copies
        full = self.activations + max(self.head, self.backward)
        return held + (self.gradients + full if self.accumulates else max(full, self.gradients + self.backward))


class Layout(NamedTuple):
    """Over how many ranks the weights are copied, and over how many each copy is cut."""

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
    """state: bytes of weights, gradients, moments and average, whole. memory: of one rank's device, where it is known.

    auto copies everything while it takes at most a quarter of the device; else it shards over a node's ranks, or over all.
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
    """What `train` takes for a recipe on so many ranks; None for a process alone."""
    whole = training_memory(recipe, 1).state
    return None if ranks == 1 else choose_layout(recipe.parallel, ranks, node_ranks, whole, memory)


def settle_precision(recipe: Recipe, *, on_gpu: bool) -> Recipe:
    """The recipe with train.precision = "auto" as it is read there."""
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
    """Of one rank. compiled: whether blocks are; by default what the recipe says, "auto" meaning a GPU. Against peaks on an H200:
    benchmarks/results/memory-*.json."""
    config, train = recipe.model, recipe.train
    layout = layout or Layout()
    weight = 8 if train.precision == "float64" else 4
    unit = _BYTES[train.precision]
    tokens = micro_batch * recipe.data.length
    count, alone = config.count_parameters(), layout.ranks == 1
    part = -(-count.total // layout.shards) * weight
    kept = kept_by_block(config, unit, train.compile != "none" if compiled is None else compiled, train.residual)
    logits = min(head_chunk(config.vocab_size), tokens) * config.vocab_size * (4 + unit)
    # Alone, autocast keeps every block's weights in its own precision for the backward, unless the backward casts them again.
    # Sharded, the root is gathered whole; on their way are two gathered blocks and a third's buffer, one's gradient and its sum.
    cast = unit * count.non_embedding if unit < weight and train.recompute == "none" else 0
    gathered = weight * (count.embedding + count.head) if layout.shards > 1 else 0
    travelling = 0 if alone else count.non_embedding // config.n_layers * (4 * unit + weight)
    # With recomputation the backward first makes what the block would have kept.
    again = tokens * (kept["none"] - kept[train.recompute])
    return Memory(
        weights=part,
        gradients=part,
        optimizer=2 * part,
        ema=part if train.ema is not None else 0,
        copies=cast if alone else gathered,
        activations=tokens * config.n_layers * kept[train.recompute],
        head=logits + config.vocab_size * config.d_model * (4 + unit) + 2 * tokens * config.d_model * 4,
        backward=again + tokens * unit * (config.d_ff + 3 * config.d_model) + travelling,
        accumulates=accumulates,
    )


def kept_by_block(config: ModelConfig, unit: int, compiled: bool, residual: str = "float32") -> dict[str, int]:
    """Bytes a token that one block keeps for its backward, by recomputation. residual: the recipe's.

    none: both residuals, both normed inputs, q, k and v before rotary, q and k after it, attention's output, gate and up;
    and where blocks are not compiled the sinks beside keys and values, silu(gate), its product and the norms before rounding.
    selective: the block's input and the results of its matmuls and of attention. full: its input.
    """
    d, ff, kv = config.d_model, config.d_ff, config.n_kv_heads * config.head_dim
    wide = 8 if unit == 8 else 2 if residual == "bf16" else 4
    gate = _gate_width(config)
    every = 2 * wide * d + unit * (5 * d + 3 * kv + 2 * ff) + (unit * (gate + d) if gate else 0)
    if not compiled:
        every += unit * (2 * ff + kv) + (wide * d if unit < wide else 0)
    return {"none": every, "selective": wide * d + unit * (4 * d + 2 * kv + 2 * ff + gate), "full": wide * d}


def fitting_micro_batch(
    recipe: Recipe, memory: int | None, share: int, layout: Layout | None = None, *, compiled: bool | None = None
) -> int:
    """The largest cut of `share` rows into equal forwards that fits in a device's memory; all of them where memory is not known."""
    if memory is None:
        return share
    for cuts in range(1, share + 1):
        rows = -(-share // cuts)
        if training_memory(recipe, rows, layout, accumulates=cuts > 1, compiled=compiled).total <= USABLE * memory:
            return rows
    return 1
