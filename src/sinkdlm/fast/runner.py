"""Decide how a model runs: `prepare` or `accelerate` once, then a `FastRunner` at each forward.

The only place that asks about gradients, autocast, device and compiler before a forward. Four paths, all equal to `run_plain`:
flat (half-precision training on a GPU, tokens and sinks in one matrix), inference (Triton kernels on a GPU), flex (documents,
annealing and blocks on a GPU), and blocks (plain arithmetic, whose last layer computes only selected positions).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from sinkdlm.config.model import ModelConfig
from sinkdlm.fast import blocks, float8_training
from sinkdlm.fast.attention import attend_flex, attend_grouped, attend_kept, attend_span, block_mask
from sinkdlm.fast.blocks import FastContext
from sinkdlm.fast.checkpointing import Recompute
from sinkdlm.fast.functions import add_last_norm
from sinkdlm.fast.lane_cache import LaneCache
from sinkdlm.kernels.available import has_kernels, load_kernels
from sinkdlm.model import model as plain
from sinkdlm.model.context import Context, View, rotations, unruled_mask, visibility
from sinkdlm.model.lane import Lane
from sinkdlm.model.model import DiffusionLM, run_plain

_HALF = (torch.bfloat16, torch.float16)
_ALIGNMENT = 8  # elements; GPU kernels read heads in 16-byte pieces
_CUDNN_WIDTH = 128  # the widest head of cuDNN attention's backward
_FLAT_TOKENS = 512  # row length from which merging sinks pays
_FLEX_WIDTH = 16  # the narrowest head of FlexAttention's GPU kernel
_SPAN_TOKENS = 128  # longest span of a cached row for which attention is our own kernel
_MULTIPLE = 16  # flat tokens are padded to it, for fast matmuls

Path = Literal["blocks", "flat", "inference", "flex"]


@dataclass(frozen=True)
class Plan:
    """Decisions for a whole run, made before weights are on their device."""

    float8: bool = False  # matmuls of blocks, while they train
    residual: torch.dtype | None = None  # dtype of the residual stream under autocast; None: the weights'
    recompute: Recompute = "none"  # activation checkpointing: what the backward recomputes
    compile: Literal["none", "blocks", "whole"] = "none"


def prepare(model: DiffusionLM, plan: Plan) -> list[str]:
    """Give a model a fast runner and fast blocks, in place. Call it before materialising, sharding, compiling and capturing.

    Only the shipped Block is replaced; with a user's subclass the model runs plain. Returns log lines about that.
    """
    foreign = [type(block).__name__ for block in model.blocks if type(block) not in (plain.Block, blocks.Block)]
    if foreign:
        model.runner = run_plain
        return [f"blocks of class {foreign[0]}: not sinkdlm's own, so the plain runner is used"]
    for block in model.blocks:
        block.__class__ = blocks.Block
        for layer in block.modules() if plan.float8 else ():
            if type(layer) is nn.Linear and float8_training.fits(layer) and layer is not block.get_submodule("attention").gate:
                layer.__class__ = float8_training.Linear
    model.runner = FastRunner(plan)
    return []


def accelerate(model: DiffusionLM) -> DiffusionLM:
    """Give a model a fast runner for inference, as `sinkdlm.load` does."""
    prepare(model, Plan())
    return model


def compile_blocks(model: DiffusionLM) -> None:
    """Compile each block's forward; hooks that gather its weights stay outside."""
    for block in model.blocks:
        block.forward = _compiled(block.forward)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a forward, but run it eagerly while it is observed or intervened in, or keeps blocks: at each of them it would be
    compiled anew."""
    fast = torch.compile(forward)

    def run(x: Tensor, sinks: Tensor | Lane | None, ctx: FastContext) -> Any:
        view = ctx.view
        eager = view.observe is not None or view.intervene is not None or getattr(view.cache, "block_size", None) is not None
        return (forward if eager else fast)(x, sinks, ctx)

    return run


def supports_flat(config: ModelConfig, device: str, dtype: torch.dtype, tokens: int) -> bool:
    """Check whether full rows of `tokens` tokens train on the flat path. It needs Triton kernels and cuDNN attention, which is
    slower for T + 1 keys than for T: hence sinks are merged."""
    if device != "cuda" or dtype not in _HALF or tokens < _FLAT_TOKENS or config.n_registers:
        return False
    if config.block_size is not None and config.block_size < tokens:
        return False
    if config.head_dim > _CUDNN_WIDTH or config.head_dim % _ALIGNMENT:
        return False
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled() and torch.cuda.get_device_capability()[0] >= 9
    return has_cudnn and has_kernels()


def supports_flex(config: ModelConfig, device: str, dtype: torch.dtype) -> bool:
    """Check whether FlexAttention's GPU kernel takes these heads."""
    width = config.head_dim
    return device == "cuda" and dtype != torch.float64 and width >= _FLEX_WIDTH and width & (width - 1) == 0


def dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype of matmuls with x: autocast's where it is on, else x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class FastRunner:
    """Run a prepared model. Holds a plan, and no model.

    force: for tests, a path for every forward that can take it."""

    def __init__(self, plan: Plan, *, force: Path | None = None) -> None:
        self.plan, self._force = plan, force
        self._blocks: Callable[..., tuple[Tensor, list[Lane]]] = run_blocks
        if plan.compile == "whole":  # one function: Python between blocks is most of a small model's time
            self._blocks = torch.compile(run_blocks, dynamic=True, options={"cpp_wrapper": True})

    def choose(self, config: ModelConfig, x: Tensor, ctx: Context) -> Path:
        """Choose the path of a forward."""
        trains, kind, dtype = torch.is_grad_enabled(), x.device.type, dtype_of(x)
        if _watched(ctx) or torch.compiler.is_compiling():
            return "blocks"
        if ctx.pairwise:
            runs = supports_flex(config, kind, dtype)
            asked = ctx.form == "flex" or self._force == "flex"
            if asked and kind != "cpu" and not runs:
                raise ValueError(
                    f"attention form 'flex': on a GPU it needs float32 or half precision and a head width of a power of two from "
                    f"{_FLEX_WIDTH} on, not {dtype} and {config.head_dim}; use 'auto'"
                )
            return "flex" if asked or (ctx.form == "auto" and runs) else "blocks"
        if ctx.causal or ctx.form not in ("auto", "append") or config.n_registers:
            return "blocks"
        if trains:
            full = ctx.lengths is None and ctx.cache is None and ctx.form == "auto"
            flat = supports_flat(config, kind, dtype, x.shape[1]) or self._force == "flat"
            return "flat" if full and flat else "blocks"
        kernels = load_kernels() if kind == "cuda" or self._force == "inference" else None
        return "inference" if kernels is not None and x.dtype in kernels.DTYPES else "blocks"

    def __call__(self, model: DiffusionLM, x: Tensor, ctx: Context, select: Tensor | None = None) -> Tensor:
        trains, path = torch.is_grad_enabled(), self.choose(model.config, x, ctx)
        if self.plan.residual is not None and torch.is_autocast_enabled(x.device.type):
            x = x.to(self.plan.residual)
        cache = _lane_cache(model)
        fast = FastContext(self._view(model.config, x, ctx, path, cache), recompute=self.plan.recompute if trains else "none")
        if path == "flat":
            fast = fast._replace(flat_batch=x.shape[0], dtype=dtype_of(x), float8=self.plan.float8)
            return self._run_flat(model, x, fast, select)
        if path == "inference":
            fast = fast._replace(kernels=load_kernels())
        sinks, lanes = model.first_lane(x, ctx), None
        if cache is not None and sinks is not None:
            lanes = cache.find(model)
            fast = fast._replace(keeps_lane=lanes is None)
        last = self._end_early(fast, ctx, select, path)
        if last.select is None and ctx.copies > 1 and not (model.config.shift_logits or _watched(ctx)):
            front = x.shape[1] // ctx.copies  # nothing reads the clean copy's last states
            last = last._replace(front=front)
            select = None if select is None else select // x.shape[1] * front + select % x.shape[1]
        run = self._blocks if trains and not _watched(ctx) else run_blocks
        x, found = run(model, x, lanes or sinks, fast, last)
        if cache is not None and found:
            cache.keep(model, found)
        x = model.norm(x)
        if select is None:
            return x
        return x.flatten(0, 1).index_select(0, select) if last.select is None else x.flatten(0, -2)

    def _end_early(self, fast: FastContext, ctx: Context, select: Tensor | None, path: Path) -> FastContext:
        """Return the last layer's context: to compute only the selected positions, where it can."""
        recompiles = self.plan.compile == "blocks" and torch.is_grad_enabled()  # for each number of positions
        uneven = path == "inference" and not ctx.per_row
        if select is None or ctx.causal or _watched(ctx) or recompiles or uneven:
            return fast
        # These masks cover all T queries: positions are selected after attention.
        seen = fast.view.visible
        masked = ctx.pairwise or (seen is not None and seen.shape[2] > 1)
        return fast._replace(select=select, per_row=0 if masked else ctx.per_row)

    def _view(self, config: ModelConfig, x: Tensor, ctx: Context, path: Path, kept: LaneCache | None) -> View:
        if ctx.form == "naive":
            return ctx.view(config, x)
        by_shape = ctx.lengths is None and ctx.documents is None and all(isinstance(edge, int) for edge in ctx.span)
        if by_shape and kept is not None:
            key = (x.dtype, x.device, ctx.causal, x.shape[1], ctx.copies, ctx.span)
            rotation, of_sinks = kept.table(key, lambda: rotations(config, x, ctx))
        else:
            rotation, of_sinks = rotations(config, x, ctx)
        rule = visibility(config, x, ctx)
        watchers = (ctx.observe, ctx.intervene, ctx.cache)
        if path == "flex" and rule is not None:
            return View(rotation, of_sinks, block_mask(rule, x.shape[0], config.n_lane), ctx.causal, attend_flex, *watchers)
        if path == "inference" and ctx.cache is not None and x.shape[1] <= _SPAN_TOKENS:
            ends = ctx.cache.ends(x.shape[1], x.device)
            ends = torch.full((1, 1, 1, 1), ctx.cache.length, device=x.device) if ends is None else ends
            return View(rotation, of_sinks, ends + config.n_lane, ctx.causal, attend_span, *watchers)
        visible = unruled_mask(config, x, ctx) if rule is None else rule.dense()
        attend = attend_grouped if x.device.type == "cuda" else View._field_defaults["attend"]
        attend = attend if ctx.cache is None else attend_kept
        return View(rotation, of_sinks, visible, ctx.causal, attend, *watchers)

    def _run_flat(self, model: DiffusionLM, x: Tensor, fast: FastContext, select: Tensor | None) -> Tensor:
        """Run the blocks on the flat path. The result has the matmuls' dtype."""
        n_tokens = x.shape[0] * x.shape[1]
        flat = x.flatten(0, 1)
        if fast.view.sink_rotation is not None and model.sinks is not None:
            filling = x.new_zeros(-(n_tokens + len(model.sinks)) % _MULTIPLE, x.shape[2])
            flat = torch.cat([flat, model.sinks.to(x), filling])
        # A zero update, so that the first block runs the same code as the others.
        update = torch.zeros_like(flat, dtype=fast.dtype, requires_grad=True)
        *others, last = model.blocks
        for block in others:
            flat, update, _ = block(flat, update, fast)
        own = type(last) is blocks.Block  # not sharded
        early = select is not None and (own or self.plan.compile == "none")
        fast = fast._replace(select=select if early else None)
        if early and own:  # eager, not compiled: its shapes change at every step
            flat, update, _ = blocks.Block.forward(cast(blocks.Block, last), flat, update, fast)  # type: ignore[assignment]
        else:
            flat, update, _ = last(flat, update, fast)
        out = add_last_norm(flat, update, model.norm.weight, model.norm.eps, fast.dtype)
        if early:
            return out
        return out[:n_tokens].view_as(x) if select is None else out.index_select(0, select)


def run_blocks(
    model: DiffusionLM, x: Tensor, sinks: Tensor | list[Lane] | None, fast: FastContext, last: FastContext
) -> tuple[Tensor, list[Lane]]:
    """Run all blocks as `run_plain` does; keep the two loops alike. sinks: the lane's states, or each layer's cached Lane. last:
    the last layer's context. Also returns new Lanes, if `fast` asks for them."""
    found: list[Lane] = []
    cached = sinks if isinstance(sinks, list) else None
    states: Any = None if cached is not None else sinks
    for layer, block in enumerate(model.blocks):
        ctx = last if layer == len(model.blocks) - 1 else fast
        x, states, lane = block(x, states if cached is None else cached[layer], ctx)
        if lane is not None:
            found.append(lane)
    return x, found


def _watched(ctx: Context) -> bool:
    return ctx.observe is not None or ctx.intervene is not None


def _lane_cache(model: DiffusionLM) -> LaneCache | None:
    """Return the cache of the model's inference scope, created at its first forward; None without one."""
    if model.scope is None or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if model.scope.kept is None:
        model.scope.kept = LaneCache()
    return cast(LaneCache, model.scope.kept)
