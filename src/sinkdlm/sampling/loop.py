"""The sampling loop: requests of any length, policy and progress share forwards, one step at a time (speculation.py: or several).

`generate` fills whole canvases, `stream` yields after each step, and both call `step(states, denoiser)`, which groups states by the
forward they can share and advances each group as a `Batch`. Between steps requests may join and leave. Noise is keyed by (seed,
request, step, position), so a request draws the same numbers alone and in a batch.

B requests, T canvas, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkdlm.errors import SamplingError
from sinkdlm.sampling.aliases import translate
from sinkdlm.sampling.batch import Batch, scoring_policy
from sinkdlm.sampling.constraint import Automaton
from sinkdlm.sampling.denoiser import Denoise, DenoiserAdapter, fixed_width
from sinkdlm.sampling.requests import Request, State, start
from sinkdlm.sampling.speculation import advance_group
from sinkdlm.sampling.unmasking import APPROXIMATE, FIELDS, Policy, policy_of

_PADDING = -1  # beyond a row's end, where rows of a result differ in length

Rows = Tensor | Sequence[Sequence[int] | Tensor]


@torch.no_grad()
def step(
    states: Sequence[State],
    denoiser: Denoise | DenoiserAdapter,
    *,
    device: torch.device | str | None = None,
    deterministic: bool = False,
    together: bool = False,
) -> list[State]:
    """Take one step of every request that is not done; return those that took it. Rows share a forward wherever they can.

    deterministic: give bit-identical tokens whatever else is in the batch. On a CPU rows share forwards whose shapes depend on the
        row's own length; on a GPU, and with caches, each is computed alone, in shapes of its own.
        A row that speculates then takes one step a forward, for the same reason. Whether bits are kept is tried once for each
        shape by a `DenoiserAdapter`; give one, since a plain denoiser gets a new one at each call.
    together: rows with a cache wait at the end of a block for those still in it, so that they go on in one forward. Changes no
    token; leave it off where requests join all the time.
    """
    adapter = DenoiserAdapter.of(denoiser)
    active = [state for state in states if not state.done]
    if together and not deterministic:
        active = _without_waiting(active)
    groups: dict[Any, list[State]] = {}
    for state in active:
        place = torch.device(device or ("cpu" if state.batch is None else state.batch.device))
        key: Any = _forward_key(state, adapter)  # which also refuses what the denoiser cannot do
        fixed = deterministic and state.policy.cache == "none" and adapter.keeps_bits(place)
        if deterministic:
            key = (key, fixed_width(state.length)) if fixed else id(state)
        groups.setdefault((place, fixed, key), []).append(state)
    for (place, fixed, _), group in groups.items():
        if deterministic or not any(state.policy.speculate for state in group):
            counts = [state.plan.n_predicted for state in group]
            apart = fixed and not adapter.keeps_bits(place, group[0].length, counts)
            for part in [[state] for state in group] if apart else [group]:
                Batch.of(part, place, fixed).advance(part, adapter)
        else:
            advance_group(group, adapter, place)
    return active


def _without_waiting(active: list[State]) -> list[State]:
    """Leave out rows about to begin a block while others that could share their forward are still in the block before."""
    open_until = {(_shared(state), state.plan.stop) for state in active if state.policy.cache in APPROXIMATE}
    return [state for state in active if not (state.plan.first and (_shared(state), state.plan.start) in open_until)]


def _shared(state: State) -> Any:
    """What rows with a cache must have in common to share a forward, apart from the block."""
    return state.request.mask_id, scoring_policy(state.policy), state.length


def _forward_key(state: State, adapter: DenoiserAdapter) -> Any:
    """Rows with equal keys share a forward."""
    policy, plan = state.policy, state.plan
    if state.request.block_size != adapter.block_size:
        given = f"the request was made for block_size = {state.request.block_size}, the denoiser has {adapter.block_size}"
        raise SamplingError(f"{given}; make requests with the model's own, as generate does")
    if policy.cache != "none" and adapter.takes_cache:
        return policy.cache, state.request.mask_id, policy.shift, scoring_policy(policy) if policy.guidance else None
    if policy.cache == "none":
        return state.request.mask_id, policy.shift, None if adapter.takes_lengths else plan.length
    why = "this denoiser supports none, as with a register sink, which sees every token"
    raise SamplingError(f"cache = {policy.cache!r}: {why}; use cache = 'none'")


class Sampled(NamedTuple):
    """tokens (B, T): prompt included, -1 beyond the end of a shorter row. steps: of the row that took most.

    lengths, row_steps: of each row. confidence (B, T): probability of each written token when it was committed; NaN elsewhere.
    log_weights: of each row with a constraint.
    """

    tokens: Tensor
    steps: int
    lengths: list[int]
    row_steps: list[int]
    confidence: Tensor
    log_weights: list[float | None] | None = None

    @property
    def rows(self) -> list[list[int]]:
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths, strict=True)]


class Step(NamedTuple):
    """A batch after one step: tokens (B, T), what this step committed (B, T), confidence (B, T) of all that is committed."""

    tokens: Tensor
    committed: Tensor
    confidence: Tensor


def stream(denoiser: Denoise, states: Sequence[State], *, device: Any = None, deterministic: bool = False) -> Iterator[Step]:
    """Take steps until every request is done, and yield the batch after each, also of those that shared a forward."""
    adapter = DenoiserAdapter.of(denoiser)
    while moved := step(states, adapter, device=device, deterministic=deterministic, together=True):
        taken = {id(state): max(1, len(state.passed)) for state in moved}
        try:
            for turn in range(max(taken.values())):
                for state in moved:
                    state.show(turn)
                new = [turn < taken.get(id(state), 0) for state in states]
                now = gather(states)
                committed = [state.committed & is_new for state, is_new in zip(states, new, strict=True)]
                yield Step(now.tokens, _stack(committed, False), now.confidence)
        finally:
            for state in moved:
                state.show(-1)


def _stack(rows: list[Tensor], fill: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def requests_of(
    prompt: Rows,
    *,
    length: int | Sequence[int] | None = None,
    limit: int | Sequence[int] | None = None,
    suffix: Rows | None = None,
    config: str | Policy = "llada",
    seed: int = 0,
    numbers: Sequence[int] | None = None,
    block_size: int | None = None,
    constraint: Automaton | Sequence[Automaton | None] | None = None,
    **options: Any,
) -> list[Request]:
    """Make a request of each row of the prompt (B, P), or of each of a list of rows. `generate` says what the arguments mean."""
    options = translate(options, ("mask_id", "new_tokens", *FIELDS))
    mask_id, new_tokens = options.pop("mask_id", None), options.pop("new_tokens", None)
    if not isinstance(mask_id, int):
        raise SamplingError(f"mask_id = {mask_id}: give the id of [MASK], as in mask_id=lm.config.mask_id")
    policy = policy_of(config, **options)
    heads = as_rows(prompt)
    tails = [[]] * len(heads) if suffix is None else as_rows(suffix)
    if [length, limit, new_tokens].count(None) != 2:
        sizes_of = "length= (the whole canvas, prompt included), new_tokens= (what follows a prompt)"
        raise SamplingError(f"give one of {sizes_of} and limit= (an open end, at most this long)")
    given: Any = limit if length is None else length
    if new_tokens is not None:
        if type(new_tokens) is not int or new_tokens < 0:
            raise SamplingError(f"new_tokens = {new_tokens!r}: expected a whole number")
        given = [len(head) + len(tail) + new_tokens for head, tail in zip(heads, tails, strict=False)]
    sizes = [given] * len(heads) if isinstance(given, int) else list(given)
    keys = range(len(heads)) if numbers is None else numbers
    wanted = [constraint] * len(heads) if constraint is None or isinstance(constraint, Automaton) else list(constraint)
    if len(wanted) != len(heads):
        raise SamplingError(f"constraint: {len(wanted)} of them and {len(heads)} prompts; give one, or one of each per row")
    if not len(heads) == len(tails) == len(sizes) == len(keys):
        counts = f"{len(heads)} prompts, {len(tails)} suffixes, {len(sizes)} lengths, {len(keys)} numbers"
        raise SamplingError(f"{counts}: give one of each per row")
    found = []
    for number, head, tail, size, own in zip(keys, heads, tails, sizes, wanted, strict=True):
        n_given = len(head) + len(tail)
        if size < n_given or (size == n_given and mask_id not in head + tail):
            why = f"counts the whole canvas, prompt included, and {n_given} tokens are given; give a larger one"
            raise SamplingError(f"length = {size}: {why}")
        canvas = [*head, *[mask_id] * (size - n_given), *tail]
        how: dict[str, Any] = {"grow": limit is not None, "block_size": block_size, "constraint": own}
        found.append(Request(canvas, policy, mask_id, seed, number, **how))
    return found


def as_rows(rows: Rows) -> list[list[int]]:
    if isinstance(rows, str) or any(isinstance(row, str) for row in rows):
        raise SamplingError("prompt: text; give rows of token ids, as in prompt=[tokenizer.encode(text)]")
    return [row.tolist() if isinstance(row, Tensor) else list(row) for row in rows]


def generate(
    denoiser: Denoise,
    *,
    prompt: Rows,
    device: torch.device | str | None = None,
    deterministic: bool = False,
    **given: Any,
) -> Sampled:
    """Fill a canvas of `length` tokens, prompt included, for each row of the prompt; or write new_tokens after it.

    mask_id in a prompt is a gap to be filled; every other token stays. suffix: rows at the end of the canvas. limit instead of
    length: an open end, to which blocks are appended until EOS. config: a named configuration or a Policy; its fields may be given
    beside it (steps, temperature, block, threshold, guidance, ...). (seed, numbers) key the noise; rows are numbered from 0.
    constraint: an `Automaton` that what is written must fit, or one for each row; text/schema.py makes them.
    aliases.py has other names of these.
    """
    adapter = DenoiserAdapter.of(denoiser)
    states = start(requests_of(prompt, block_size=adapter.block_size, **given))
    if device is None:
        device = prompt.device if isinstance(prompt, Tensor) else getattr(denoiser, "device", None)
    while step(states, adapter, device=device, deterministic=deterministic, together=True):
        pass
    return gather(states)


def gather(states: Sequence[State]) -> Sampled:
    """Collect the results of requests, finished or not."""
    tokens = _stack([state.tokens for state in states], _PADDING)
    confidence = _stack([state.confidence for state in states], math.nan)
    steps = [state.steps for state in states]
    weights = [state.log_weight for state in states]
    return Sampled(
        tokens,
        max(steps),
        [state.length for state in states],
        steps,
        confidence,
        None if weights == [None] * len(weights) else weights,
    )
