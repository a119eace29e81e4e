"""Plan a recipe on given hardware: memory, changes that make it fit, tokens a second, hours, cost, disk.

Combines formulas.py's bytes and step_time.py's seconds, and words them. Knows nothing of torch: a CPU's rate is measured elsewhere
and passed in.
"""

from dataclasses import dataclass, replace
from typing import Any

from sinkdlm.config.recipe import Recipe
from sinkdlm.errors import ConfigError, UserError
from sinkdlm.planning.formulas import (
    CHIPS,
    USABLE,
    Layout,
    Memory,
    budget_steps,
    count_held,
    find_chip,
    fitting_micro_batch,
    lay_out,
    settle_precision,
    training_flops,
    training_memory,
)
from sinkdlm.planning.step_time import HOST_RANKS, calibration, step_seconds

_MOST_RANKS = 1024  # most ranks that are proposed
_SHARD = {"mode": "shard", "shard_ranks": None}
_SHARDED = "--set parallel.mode=shard"
_Tables = dict[str, dict[str, Any]]  # changes to a recipe, by table


@dataclass(frozen=True)
class Machine:
    """The hardware of a plan: a number of devices of one kind."""

    device: str  # a100, h100, h200, b200 or cpu
    ranks: int = 1
    memory: int | None = None  # bytes of each; by default the data sheet's
    tokens_per_second: float | None = None  # of each, where it was measured

    @property
    def capacity(self) -> int | None:
        return self.memory if self.memory is not None or self.device == "cpu" else CHIPS[self.device].memory

    def fits(self, memory: Memory) -> bool:
        return self.capacity is None or memory.total <= USABLE * self.capacity

    def lay_out(self, recipe: Recipe) -> Layout | None:
        return lay_out(recipe, self.ranks, min(self.ranks, HOST_RANKS), self.capacity)

    @property
    def text(self) -> str:
        return f"{self.ranks} x {self.device}" if self.ranks > 1 else self.device


@dataclass(frozen=True)
class Plan:
    """The plan of one recipe on one machine. Bytes are per device; hours are of steps alone, without validation and saving."""

    name: str
    recipe: Recipe
    machine: Machine
    layout: Layout
    rows: int  # of a forward
    forwards: int  # of a step, on the device that makes most
    memory: Memory
    steps: int | None  # None: epochs over data that is not here
    tokens_per_second: float | None
    source: str  # of the rate, or why there is none

    @property
    def fits(self) -> bool:
        return self.machine.fits(self.memory)

    @property
    def tokens(self) -> int | None:
        return None if self.steps is None else self.steps * self.recipe.train.batch * self.recipe.data.length

    @property
    def flops_per_token(self) -> float:
        trained = None if self.recipe.adapter.kind == "none" else self.trained
        once = training_flops(self.recipe.model, self.recipe.data.length, trained=trained)
        return once * (1 + self.recipe.blocks.complementary)

    @property
    def trained(self) -> int:
        """Parameters that train."""
        return count_held(self.recipe)[1]

    @property
    def hours(self) -> float | None:
        if self.tokens is None or self.tokens_per_second is None:
            return None
        return self.tokens / self.tokens_per_second / 3600

    @property
    def gpu_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.machine.ranks

    @property
    def mfu(self) -> float | None:
        if self.tokens_per_second is None or self.machine.device == "cpu":
            return None
        return self.tokens_per_second * self.flops_per_token / self.machine.ranks / CHIPS[self.machine.device].flops

    @property
    def checkpoint_bytes(self) -> int:
        return self.recipe.model.count_parameters().total * self._weight_bytes

    @property
    def state_bytes(self) -> int:
        """Size of a state to resume from: weights that train, two moments, the average."""
        return self.trained * self._weight_bytes * (3 + (self.recipe.train.ema is not None))

    @property
    def _weight_bytes(self) -> int:
        return 8 if self.recipe.train.precision == "float64" else 4

    def to_dict(self, price: float | None = None) -> dict[str, Any]:
        count, gpu_hours = self.recipe.model.count_parameters(), self.gpu_hours
        same = ("flops_per_token", "steps", "tokens", "forwards", "fits", "tokens_per_second", "mfu", "hours", "gpu_hours")
        return {
            **{name: getattr(self, name) for name in (*same, "checkpoint_bytes", "state_bytes")},
            "recipe": self.name,
            "device": self.machine.device,
            "gpus": self.machine.ranks,
            "parameters": {**count._asdict(), "total": count.total, "trained": self.trained},
            "flops": None if self.tokens is None else self.flops_per_token * self.tokens,
            "layout": {"mode": self.layout.name, **self.layout._asdict()},
            "micro_batch": self.rows,
            "memory": {**self.memory._asdict(), "peak": self.memory.total, "device": self.machine.capacity},
            "change": changes_that_fit(self),
            "rate": self.source,
            "cost": None if price is None or gpu_hours is None else price * gpu_hours,
        }


def make_plan(recipe: Recipe, name: str, machine: Machine, n_rows: int | None = None) -> Plan:
    """Plan a recipe. n_rows: of the data, where the budget is in epochs."""
    train = recipe.train
    if machine.ranks > train.batch:
        raise UserError(f"{name}: {machine.ranks} devices for train.batch = {train.batch} rows; give at most that many")
    if recipe.data.length > recipe.model.context_length:
        most = recipe.model.context_length
        raise UserError(f"{name}: data.length = {recipe.data.length}: allowed is at most model.context_length = {most}")
    if train.precision == "fp8" and (machine.device == "cpu" or not CHIPS[machine.device].float8):
        raise UserError(f'{name}: train.precision = "fp8": {machine.device} has no float8 matmuls; set train.precision = "bf16"')
    if machine.device == "cpu":
        try:
            recipe = settle_precision(recipe, on_gpu=False)
        except ConfigError as error:
            raise UserError(f"{name}: {error}") from None
    unknown = train.epochs is not None and n_rows is None
    steps = None if unknown else budget_steps(train, recipe.model, recipe.data.length, n_rows or 0)
    layout = machine.lay_out(recipe)
    rows, forwards, memory = _cut(recipe, machine, layout)
    rate, source = _rate(recipe, machine, layout, forwards) if machine.fits(memory) else (None, "none: it does not fit")
    return Plan(name, recipe, machine, layout or Layout(), rows, forwards, memory, steps, rate, source)


def _cut(recipe: Recipe, machine: Machine, layout: Layout | None, rows: int | None = None) -> tuple[int, int, Memory]:
    """Return rows of a forward, forwards of a step, and their memory. rows: by default as `train` would choose them."""
    share, compiled = -(-recipe.train.batch // machine.ranks), machine.device != "cpu"
    rows = rows or recipe.train.micro_batch
    rows = min(rows, share) if rows else fitting_micro_batch(recipe, machine.capacity, share, layout, compiled=compiled)
    forwards = -(-share // rows)
    return rows, forwards, training_memory(recipe, rows, layout, accumulates=forwards > 1, compiled=compiled)


def _rate(recipe: Recipe, machine: Machine, layout: Layout | None, forwards: int) -> tuple[float | None, str]:
    """Return tokens a second of all devices together, and where the number comes from."""
    if machine.device == "cpu":
        rate = machine.tokens_per_second
        return rate, "not known: too large to try on a CPU" if rate is None else "measured here, by a few steps in float32"
    if recipe.adapter.kind != "none":
        return None, "not known: records are of runs that train every weight"
    if recipe.train.precision not in ("bf16", "auto") or recipe.train.compile == "none":
        return None, "not known: records are of bf16 with compiled blocks"
    chip, names = CHIPS[machine.device], calibration()["device"]
    source = "calibrated on its records" if chip.name in names else f"scaled from {' and '.join(names)} records, not measured"
    seconds = step_seconds(recipe, -(-recipe.train.batch // machine.ranks), forwards, chip, layout)
    if machine.ranks > 1:
        source += "; exchange between GPUs by data sheets, not measured"
    return recipe.train.batch * recipe.data.length / seconds.total, source


def changes_that_fit(plan: Plan) -> list[str]:
    """List options that make a plan fit: each alone is enough, the gentlest first."""
    machine, train = plan.machine, plan.recipe.train
    if plan.fits:
        return []
    hows = [how for how in ("selective", "full") if how != train.recompute]
    changes: dict[str, _Tables] = {"": {}, **{f"--set train.recompute={how}": {"train": {"recompute": how}} for how in hows}}
    sharded: dict[str, _Tables] = {_SHARDED: {"parallel": _SHARD}}
    sharded[f"{_SHARDED} --set train.recompute=full"] = {"parallel": _SHARD, "train": {"recompute": "full"}}
    if machine.ranks > 1 and plan.layout.name != "shard":
        changes |= sharded
    found = [enough for words, tables in changes.items() if (enough := _try(plan, words, machine, tables))]
    ranks = 2 * machine.ranks
    while machine.device != "cpu" and ranks <= min(_MOST_RANKS, train.batch):
        for words, tables in sharded.items():
            if enough := _try(plan, f"--gpus {ranks} {words}", replace(machine, ranks=ranks), tables):
                return [*found, enough]
        ranks *= 2
    return found


def _try(plan: Plan, words: str, machine: Machine, tables: _Tables) -> str | None:
    """Return the options of a change if it makes the plan fit; they replace a train.micro_batch that the recipe forces."""
    whole = plan.recipe.to_dict()
    whole["train"] |= {"micro_batch": None}
    recipe = Recipe.resolve({**whole, **{name: {**whole[name], **table} for name, table in tables.items()}})
    rows, _, memory = _cut(recipe, machine, machine.lay_out(recipe))
    if not machine.fits(memory):
        return None
    return words if plan.recipe.train.micro_batch in (None, rows) else f"{words} --set train.micro_batch={rows}".strip()


def describe(plan: Plan, price: float | None = None) -> str:
    count, train, length = plan.recipe.model.count_parameters(), plan.recipe.train, plan.recipe.data.length
    memory, capacity = plan.memory, plan.machine.capacity
    untied = f" + head {_big(count.head)}" if count.head else ""
    budget, flops = f"{train.epochs or 0:g} passes over data that is not here; give its number of rows with --rows", ""
    if plan.tokens is not None:
        budget = f"{plan.tokens:,} tokens, {plan.steps:,} steps of {train.batch} rows of {length}"
        flops = f", {plan.flops_per_token * plan.tokens:.3g} in all"
    verdict = "fits" if plan.fits else f"does not fit in the {USABLE:.0%} that can be used"
    room = "" if capacity is None else f" of {_bytes(capacity)} on each device: {verdict}"
    # Gradients grow while activations are freed, so the parts add up to more than the peak.
    sizes = {**memory._asdict(), "accumulates": 0}
    names = {"ema": "average", "backward": "a block's backward"}
    parts = [f"{names.get(name, name)} {_bytes(size)}" for name, size in sizes.items() if size]
    speed = plan.source
    if plan.tokens_per_second is not None:
        mfu = f", {plan.mfu:.0%} MFU" if plan.mfu is not None else ""
        speed = f"{plan.tokens_per_second:,.0f} tokens/s{mfu} ({plan.source})"
    section = plan.recipe.adapter
    trains = f"trained     {_big(plan.trained)}: LoRA of rank {section.rank} on {', '.join(section.targets)}"
    trains += f"; the base in {section.base}" if section.base else ""
    lines = [
        f"{plan.name} on {plan.machine.text}",
        f"parameters  {_big(count.total)}: {_big(count.non_embedding)} + embedding {_big(count.embedding)}{untied}",
        *([] if section.kind == "none" else [trains]),
        f"budget      {budget}",
        f"FLOPs       {_big(plan.flops_per_token)} a token{flops}",
        f"memory      {_bytes(memory.total)}{room}",
        f"            {', '.join(parts)}",
        f"            {plan.rows} rows of {length} a forward, {plan.forwards} a step; {plan.layout.text}; "
        f"recompute {train.recompute}",
    ]
    if not plan.fits:
        enough = changes_that_fit(plan) or ["no change that was tried is enough: use a device with more memory or a smaller model"]
        lines += [f"{'change' if number == 0 else '    or':12s}{words}" for number, words in enumerate(enough)]
    lines.append(f"speed       {speed}")
    if plan.hours is not None and plan.gpu_hours is not None:
        cost = "" if price is None else f", {_few(price * plan.gpu_hours)} at {price:g} each"
        unit = "device" if plan.machine.device == "cpu" else "GPU"
        lines.append(f"time        {say_hours(plan.hours)} of steps, {_few(plan.gpu_hours)} {unit}-hours{cost}")
    state = f"a state {_bytes(plan.state_bytes)}, {plan.recipe.save.keep} kept"
    return "\n".join([*lines, f"disk        checkpoint {_bytes(plan.checkpoint_bytes)}; {state}"])


def say_hours(hours: float) -> str:
    if hours * 60 < 2:
        return f"{hours * 3600:.0f} s"
    if hours < 2:
        return f"{hours * 60:.0f} min"
    return f"{hours:.1f} h" if hours < 72 else f"{hours / 24:.1f} days"


def _big(count: float) -> str:
    for scale, letter in ((1e9, "G"), (1e6, "M")):
        if count >= scale:
            return f"{count / scale:.{1 if letter == 'M' else 2}f}{letter}"
    return f"{count / 1e3:.1f}K"


def _few(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.1f}"


def _bytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def describe_all(plans: list[Plan], price: float | None = None) -> str:
    """Format plans as a table, with the sources of their rates."""
    names = ("recipe", "GPUs", "parameters", "tokens", "GB each", "rows a forward", "tokens/s", "hours", "GPU-hours", "cost")
    table = [names[: None if price is not None else -1]]
    for plan in plans:
        tokens = "?" if plan.tokens is None else f"{plan.tokens / 1e9:.2f}G"
        cost = None if plan.gpu_hours is None else (price or 0) * plan.gpu_hours
        numbers = ((plan.tokens_per_second, 0), (plan.hours, 1), (plan.gpu_hours, 0), (cost, 0))
        rates = ["?" if value is None else f"{value:,.{digits}f}" for value, digits in numbers]
        size = f"{plan.memory.total / 1e9:.1f}" + ("" if plan.fits else " (too much)")
        count = _big(plan.recipe.model.count_parameters().total)
        row = (plan.name, plan.machine.text, count, tokens, size, str(plan.rows), *rates)
        table.append(row[: len(table[0])])
    first, *widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], widths)]) for row in table]
    return "\n".join([*lines, *dict.fromkeys(f"rates: {plan.source}" for plan in plans)])


def line_of_run(
    recipe: Recipe, device: str, memory: int | None, layout: Layout | None, rows: int, ranks: int, steps: int
) -> str | None:
    """Return the line on the remaining steps that `train` prints at its start; None for an unknown device."""
    chip = find_chip(device)
    if chip is None:
        return None
    machine = Machine(chip.name.lower(), ranks, memory)
    _, forwards, held = _cut(recipe, machine, layout, rows)
    rate, source = _rate(recipe, machine, layout, forwards)
    if rate is None:
        return None
    hours = steps * recipe.train.batch * recipe.data.length / rate / 3600
    of = f" of {memory / 1e9:.0f}" if memory is not None else ""
    return f"plan: {held.total / 1e9:.1f}{of} GB, about {rate:,.0f} tokens/s ({source}), {say_hours(hours)} of steps"
