"""Generate answers: the sampler continues prompts until a stop string, in one stage or several.

Owns what the harness's generation settings mean here, and when a text has ended. Each stage continues all text so far, which is
tokenised again. Takes a denoiser; noise is keyed by the request, so a text is the same in any batch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sinkdlm.config.model import ModelConfig
from sinkdlm.errors import EvalError
from sinkdlm.evals.encoding import TextEncoder
from sinkdlm.evals.requests import Request, number_of
from sinkdlm.evals.settings import Settings
from sinkdlm.kernels.cuda_graph import many_shapes
from sinkdlm.sampling import Denoise, DenoiserAdapter, Policy, State, policy_of, start, step
from sinkdlm.sampling import Request as Canvas

_TOKENS = 256  # tokens to write by default, as in the harness
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_LEAST = 16  # tokens that a canvas of fixed size always leaves to write
_KNOWN = (*_LIMITS, "until", "do_sample", "temperature", "top_k", "top_p", "steps", "block", "policy", "canvas", "stages")


@dataclass(frozen=True)
class Manner:
    """How to write an answer. canvas: tokens of the whole row, prompt included, in place of a number of tokens to write.

    stages: passes, each of which continues prompt and text so far.
    """

    policy: Policy
    n_tokens: int
    until: tuple[str, ...]
    canvas: int | None
    stages: int
    grows: bool

    @classmethod
    def of(cls, request: Request, settings: Settings, eos_id: int | None) -> "Manner":
        given = dict(request.generation)
        unknown = [name for name in given if name not in _KNOWN]
        if unknown:
            raise EvalError(f"{request.task}: generation setting {unknown[0]!r} is not supported; there are {', '.join(_KNOWN)}")
        until = given.get("until") or []
        stops = [until] if isinstance(until, str) else until
        if not (isinstance(stops, list | tuple) and all(isinstance(stop, str) for stop in stops)):
            raise EvalError(f"{request.task}: until = {until!r}: expected a string, or a list of strings")
        temperature, named = _temperature(request), given.get("policy") or settings.policy
        chosen: dict[str, Any] = {"steps": settings.steps, "block": settings.block, "guidance": settings.guidance, "eos_id": eos_id}
        chosen |= {name: given[name] for name in ("steps", "block") if given.get(name) is not None}
        if temperature > 0 or policy_of(named).tempered:  # tasks have top_p beside do_sample = false, where it means nothing
            chosen |= {"top_k": given.get("top_k") or None, "top_p": given.get("top_p")}
        options = {name: value for name, value in chosen.items() if value is not None} | {"temperature": temperature}
        if settings.causal:  # an AR model decodes one token after the other
            options |= {"block": 1, "steps": None, "shift": True}
        limits = [_whole(request, name, given[name]) for name in _LIMITS if given.get(name) is not None]
        return cls(
            policy=policy_of(named, **options),
            n_tokens=limits[0] if limits else _TOKENS,
            until=tuple(stop for stop in stops if stop),
            canvas=None if given.get("canvas") is None else _whole(request, "canvas", given["canvas"]),
            stages=_whole(request, "stages", given.get("stages", 1)),
            grows=settings.causal and eos_id is not None,
        )


def _whole(request: Request, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EvalError(f"{request.task}: {name} = {value!r}: expected a whole number of at least 1")
    return value


def _temperature(request: Request) -> float:
    """Read the temperature as the harness does: 0 without sampling."""
    sample, value = request.generation.get("do_sample"), request.generation.get("temperature")
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise EvalError(f"{request.task}: temperature = {value!r}: expected a number of 0 or more")
    if sample is False:
        return 0.0
    return float(value or 0.0) if "temperature" in request.generation else float(bool(sample))


def ignored_cuts(request: Request, settings: Settings) -> bool:
    """Whether top_k and top_p of a request change nothing."""
    named = request.generation.get("policy") or settings.policy
    return not _temperature(request) and not policy_of(named).tempered


def check_room(request: Request, settings: Settings, config: ModelConfig) -> None:
    """Refuse, before hours of other requests, an answer that does not fit beside one token of the prompt, or the model's blocks."""
    manner, room = Manner.of(request, settings, None), config.context_length
    if manner.canvas is None and manner.n_tokens >= room:
        raise _no_room(request.place, manner.n_tokens, room, "--gen-kwargs max_gen_toks=N")
    if not settings.causal:
        given = [-1] * ((config.block_size or 1) - 1)  # a prompt that ends inside a block leaves the most blocks, each with a step
        canvas = [*given, *[config.mask_id] * (manner.n_tokens if manner.canvas is None else 1)]
        start([Canvas(canvas, manner.policy, config.mask_id, block_size=config.block_size)])


def _no_room(place: str, size: int, room: int, cure: str) -> EvalError:
    return EvalError(f"{place}: {size} tokens to write: the model reads {room}, prompt included; set {cure}")


class Generator:
    """Write answers with a denoiser. room: tokens that the model reads; budget: tokens per forward."""

    def __init__(self, denoiser: Denoise, encoder: TextEncoder, *, mask_id: int, room: int, budget: int, seed: int) -> None:
        self.access, self.encoder, self.mask_id = DenoiserAdapter.of(denoiser), encoder, mask_id
        self.room, self.budget, self.seed = room, budget, seed
        self.device: Any = getattr(denoiser, "device", None)

    def write(self, batch: Sequence[Request], settings: Settings) -> list[dict[str, Any]]:
        """Return the fields of each request's Response."""
        manners = [Manner.of(request, settings, self.encoder.eos_id) for request in batch]
        contexts = [request.context for request in batch]
        found = [Counter[str](truncated=0, unknown=0, forwards=0, n_tokens=0) for _ in batch]
        texts: list[list[str]] = [[] for _ in batch]
        for stage in range(max(manner.stages for manner in manners)):
            active = [i for i, manner in enumerate(manners) if stage < manner.stages]
            ids = self.encoder.encode(contexts[i] for i in active)
            states = start([self._canvas(batch[i], manners[i], ids[contexts[i]], stage, found[i]) for i in active])
            self._run(states, [manners[i] for i in active])
            for i, state in zip(active, states, strict=True):
                texts[i].append(self.encoder.decode(_written(state), manners[i].until))
                found[i].update(forwards=state.forwards, n_tokens=state.length - _n_given(state))
                contexts[i] += f" {texts[i][-1]}"
        return [{"texts": own, "kind": "text", **counts} for own, counts in zip(texts, found, strict=True)]

    def _canvas(self, request: Request, manner: Manner, prompt: list[int], stage: int, found: Counter[str]) -> Canvas:
        prompt = prompt or self.encoder.prefix(request.place)
        size = manner.n_tokens if manner.canvas is None else max(_LEAST, manner.canvas - len(prompt))
        kept = min(self.room, manner.canvas or self.room) - size
        if kept < 1:
            cure = "--gen-kwargs max_gen_toks=N" if manner.canvas is None else f"canvas={self.room}"
            raise _no_room(request.place, size, self.room, cure)
        found["truncated"] += max(0, len(prompt) - kept)
        if stage == 0:  # the prompts of later stages contain the first
            found["unknown"] = self.encoder.count_unknown(prompt)
        row = [*prompt[-kept:], *[self.mask_id] * size]
        options: dict[str, Any] = {"grow": manner.grows, "block_size": self.access.block_size}
        return Canvas(row, manner.policy, self.mask_id, self.seed, number_of(*request.key, stage), **options)

    def _run(self, states: Sequence[State], manners: Sequence[Manner]) -> None:
        """As many rows at a time as make a forward; when one is done, the next takes its place."""
        waiting = list(zip(states, manners, strict=True))
        widest = max(len(state.request.canvas) for state in states)
        at_once = max(1, self.budget // widest)
        running: list[tuple[State, Manner]] = []
        while running or waiting:
            free = at_once - len(running)
            running, waiting = running + waiting[:free], waiting[free:]
            before = [-1 if state.done else state.plan.start for state, _ in running]
            with many_shapes:
                step([state for state, _ in running], self.access, device=self.device)
            for (state, manner), began in zip(running, before, strict=True):
                # Only what lies before the block is final; a stop string there ends the text.
                begins = state.plan.start
                if not state.done and begins != began and self.encoder.stops(_written(state, begins), manner.until):
                    state.end()
            running = [pair for pair in running if not pair[0].done]


def _written(state: State, stop: int | None = None) -> list[int]:
    tokens: list[int] = state.tokens[_n_given(state) : stop].tolist()
    return tokens


def _n_given(state: State) -> int:
    return state.request.canvas.index(state.request.mask_id)
