"""Turn prompts into canvases, run the sampler, show text as it appears, and describe the result as JSON.

Reads prompts from a text, a file, gaps or a chat. Takes a loaded model with its tokenizer; does not know where it came from.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text
from torch import Tensor

from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.errors import SamplingError, check_regular
from sinkdlm.model.model import Denoiser
from sinkdlm.model.observe import Watcher
from sinkdlm.sampling import DenoiserAdapter, Policy, Request, State, start, step
from sinkdlm.text.prompts import begin, check_bos, check_room, encode, encode_prompt, lay_out, missing_text, piece_of
from sinkdlm.text.schema import constraint_of

_GAP = re.compile(r"\[(_*)(?::(\d+))?\]")  # [____] is four tokens, [_:12] twelve
_OPEN = "░"
_MOST_TEXTS = 100_000  # of a prompt: all are kept until they are printed


@dataclass(frozen=True)
class Job:
    """What to write. Give one of prompt, prompts and infill."""

    prompt: str = ""
    prompts: Path | Sequence[Any] | None = None  # a file, or texts and chats
    infill: str | None = None
    suffix: str = ""
    chat: bool = False
    length: int | None = None  # tokens after a prompt; None: LENGTH, or as many as fit
    gap: int | None = None
    n: int = 1
    seed: int = 0
    until_eos: bool = False
    batch: int = 64
    deterministic: bool = False
    bos: bool | None = None  # in front of a prompt; None: as the tokenizer, or its chat template, does
    schema: Any = None  # a JSON schema that what is written must fit
    regex: str | None = None  # or a regular expression


def read_prompts(path: Path | Sequence[Any]) -> list[Any]:
    """Read one prompt per line: text, or in .jsonl a string, {"prompt": ...}, {"question": ...} or {"messages": [...]}.

    A field that is null counts as absent. A list, instead of a path, has the prompts themselves."""
    if not isinstance(path, Path):
        return [_check_prompt(prompt, f"prompt {number}") for number, prompt in enumerate(path, start=1)]
    check_regular(path, SamplingError)
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as failure:
        reason = getattr(failure, "strerror", None) or "it is not UTF-8 text"
        raise SamplingError(f"{path}: cannot be read: {reason}") from None
    if not lines:
        raise SamplingError(f"{path}: holds no prompt; give one per line, or a .jsonl with prompt, question or messages")
    if path.suffix != ".jsonl":
        return lines
    return [_read_prompt(line, f"{path}: line {number}") for number, line in enumerate(lines, start=1)]


def _read_prompt(line: str, place: str) -> str | list[Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise SamplingError(f"{place} is not JSON; write a quoted text, or an object with a prompt") from None
    name = "prompt"
    if isinstance(value, dict):
        name = next((name for name in ("prompt", "messages", "question") if value.get(name) is not None), name)
        value = value.get(name)
    if value is None:
        raise SamplingError(f"{place} has neither prompt nor question nor messages")
    is_chat = isinstance(value, list) or name == "messages"
    return _check_prompt(value, place if is_chat else f"{place}: {name}", is_chat=is_chat)


def _check_prompt(value: Any, place: str, *, is_chat: bool = False) -> str | list[Any]:
    if isinstance(value, list) or is_chat:
        _check_messages(value, place)
    elif not isinstance(value, str):
        raise SamplingError(f"{place} is {type(value).__name__}, expected text")
    return value


def _check_messages(messages: Any, place: str) -> None:
    for number, message in enumerate(messages if isinstance(messages, list) else [None], start=1):
        if not isinstance(message, dict) or "role" not in message:
            raise SamplingError(f"{place}: messages is not a list of objects with role and content")
        if missing := missing_text(message):
            raise SamplingError(f"{place}: message {number} ({message['role']}): content is {missing}, expected text")


def parse_gaps(text: str, gap: int | None = None) -> list[str | int]:
    """Cut "The [____] sat" into text and the sizes of gaps: as many tokens as underscores, the number after a colon, or `gap`."""
    pieces: list[str | int] = []
    end = 0
    for found in _GAP.finditer(text):
        size = gap or int(found[2][:4000] if found[2] is not None else len(found[1]))
        if size < 1:
            raise SamplingError(f"--infill: the gap {found[0]} has zero length; write [____] for four tokens, or [_:12] for twelve")
        pieces += [text[end : found.start()], size]
        end = found.end()
    if not pieces:
        raise SamplingError(f"--infill {text!r}: has no gap; write [____] where tokens are missing")
    return [*pieces, text[end:]]


def check(job: Job) -> None:
    """Refuse a job that no model can do."""
    for name, least in (("length", 1), ("gap", 1), ("batch", 1), ("seed", 0)):
        value = getattr(job, name)
        if value is not None and (type(value) is not int or not least <= value < 2**63):
            raise SamplingError(f"{name} = {value!r}: expected a whole number, {least} or more")
    if sum([bool(job.prompt), job.prompts is not None, job.infill is not None]) > 1:
        raise SamplingError("--prompt, --prompts and --infill: give only one of them")
    if job.n > _MOST_TEXTS:
        raise SamplingError(f"--n {job.n}: at most {_MOST_TEXTS} texts of a prompt at once; more come with other seeds")
    if job.infill is not None:
        if job.suffix or job.until_eos or job.chat:
            raise SamplingError("--infill: says itself how the text ends; leave out --suffix, --until-eos and --chat")
        if job.length is not None:
            raise SamplingError("--length: counts what follows a prompt; for gaps of --infill write [_:12], or give --gap for all")
        parse_gaps(job.infill, job.gap)
    elif job.gap is not None:
        raise SamplingError("--gap: goes with --infill; add it, or leave --gap out")
    if job.prompts is not None:
        read_prompts(job.prompts)


def canvases(lm: Any, job: Job) -> list[list[int]]:
    """Lay out the canvas of each prompt, with [MASK] where text is to be written."""
    tokenizer, mask_id, room = lm.tokenizer, lm.config.mask_id, lm.config.context_length
    check_bos(tokenizer, job.bos)
    if job.infill is not None:
        pieces = [piece if isinstance(piece, int) else encode(tokenizer, piece) for piece in parse_gaps(job.infill, job.gap)]
        cure = "the text or its gaps" if job.gap is None else "the text or --gap"
        check_room(0, sum(piece for piece in pieces if isinstance(piece, int)), room, cure)
        row = [token for piece in pieces for token in ([mask_id] * piece if isinstance(piece, int) else piece)]
        row, n_open = begin(tokenizer, row, job.bos), row.count(mask_id)
        check_room(len(row) - n_open, n_open, room, cure)
        return [row]
    tail, cure = encode(tokenizer, job.suffix), "the prompt" if job.length is None else "the prompt or --length"
    prompts = [job.prompt] if job.prompts is None else read_prompts(job.prompts)
    heads = [encode_prompt(tokenizer, prompt, job.bos, chat=job.chat, source=job.prompts) for prompt in prompts]
    return [lay_out(head, tail, job.length, mask_id, room, cure) for head in heads]


class Watched(Denoiser):
    """A denoiser that also records where attention goes, in the first forward of each step."""

    capturable = False
    seen: Watcher | None = None
    reached: int | None = None  # statistics are of so many tokens of the row; None: of all

    def __call__(
        self, tokens: Tensor, *, lengths: Tensor | None = None, where: Tensor | None = None, cache: Any = None, **facts: Any
    ) -> Tensor:
        if self.seen is None:
            logits = [weight for name, weight in self.model.named_parameters() if name.endswith("sink_logit")]
            config, counted = self.model.config, lengths
            if self.reached is not None:
                counted = torch.full((len(tokens),), self.reached, device=tokens.device)
            self.seen = Watcher(counted, logits or None, n_registers=config.n_registers, block_size=config.block_size)
            facts["observe"] = self.seen
        return super().__call__(tokens, lengths=lengths, where=where, cache=cache, **facts)

    def attention(self) -> tuple[float | None, int, float]:
        """Mean over layers and heads: share on the sinks, the most attended content position and its share."""
        assert self.seen is not None
        received = torch.stack([layer.received.mean((0, 1)) for layer in self.seen.layers]).mean(0)
        has_sinks = self.seen.layers[0].sink_received.shape[-1] > 0
        share = float(torch.stack([layer.sink_share.mean() for layer in self.seen.layers]).mean()) if has_sinks else None
        top = int(received.argmax())
        return share, top, float(received[top])


@dataclass(frozen=True)
class Look:
    """One step of a text that is being written, and where attention went in it: means over layers and heads.

    seen, tokens: the canvas before and after the step. sink: the share of attention on the sinks, None without sinks. top: the
    position of the text that receives most, and top_share what it receives."""

    step: int
    seen: list[int]
    tokens: list[int]
    sink: float | None
    top: int
    top_share: float
    shown: Text  # the canvas: open positions as blocks, new tokens in bold, the most attended position underlined

    @property
    def facts(self) -> str:
        sink = "" if self.sink is None else f"  sink {self.sink:.0%}"
        return f"step {self.step}{sink}  most attended: position {self.top} ({self.top_share:.0%})"

    def __str__(self) -> str:
        return f"{self.facts}  {self.shown.plain!r}"


def look_at_steps(lm: Any, state: State, *, deterministic: bool = False) -> Iterator[Look]:
    """Write a text and yield every step that asks the model."""
    denoiser = Watched(lm.model, absent_ids(lm.tokenizer, lm.config.vocab_size))
    in_blocks = lm.config.block_size is not None
    state.step_alone()
    if in_blocks:
        state.leave_cache()
    while not state.done:
        denoiser.seen, seen = None, state.tokens.tolist()
        denoiser.reached = state.reached if in_blocks else None
        with lm.model.inference():
            step([state], denoiser, device=denoiser.device, deterministic=deterministic)
        if denoiser.seen is not None:
            sink, top, top_share = denoiser.attention()
            tokens = state.tokens.tolist()
            shown = _show(lm, tokens, state.committed.tolist(), top)
            yield Look(state.steps, seen, tokens, sink, top, top_share, shown)


def _show(lm: Any, tokens: Sequence[int], committed: Sequence[bool], top: int) -> Text:
    text = Text()
    for place, (token, new) in enumerate(zip(tokens, committed, strict=True)):
        is_open = token == lm.config.mask_id
        style = "bold green" if new else "dim" if is_open else ""
        shown = _OPEN if is_open else piece_of(lm.tokenizer, token)
        text.append(shown, f"{style} underline reverse".strip() if place == top else style)
    return text


def _watch(lm: Any, state: State, job: Job) -> None:
    """Show text as it appears: in place on a terminal, elsewhere as a line for each step."""
    console = Console(stderr=True)
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    with live or nullcontext():
        for look in look_at_steps(lm, state, deterministic=job.deterministic):
            if live is not None:
                live.update(look.shown.append(f"\n{look.facts}", "dim"), refresh=True)
            else:
                console.print(str(look), markup=False, highlight=False, soft_wrap=True)


def requests_of(lm: Any, job: Job, policy: Policy) -> list[Request]:
    """A request for each text of a job. Noise is keyed by the sample index: a text is the same whoever writes it."""
    rows = [row for row in canvases(lm, job) for _ in range(job.n)]
    constraint = constraint_of(lm.tokenizer, lm.config.vocab_size, schema=job.schema, regex=job.regex)
    given: dict[str, Any] = {"grow": job.until_eos, "block_size": lm.config.block_size, "constraint": constraint}
    return [Request(row, policy, lm.config.mask_id, job.seed, index, **given) for index, row in enumerate(rows)]


def write(lm: Any, job: Job, policy: Policy, *, watch: bool = False, world: Any = None) -> dict[str, Any]:
    """Sample what the job asks for. The dictionary is what --json prints.

    world: a World whose ranks each write a share of the texts.
    """
    requests = requests_of(lm, job, policy)
    if watch and world is not None and not world.alone:
        raise SamplingError("--watch: shows one text, in one process; leave torchrun out")
    if watch and len(requests) > 1:
        raise SamplingError(f"--watch: shows one text, and there are {len(requests)}; leave out --n or --prompts")
    states = start(requests if world is None else requests[world.share(len(requests))])
    began = time.perf_counter()
    if watch:
        _watch(lm, states[0], job)
    else:
        with lm.model.inference():
            _run(lm.model.denoiser(absent_ids(lm.tokenizer, lm.config.vocab_size)), states, job)
    seconds = time.perf_counter() - began
    own = [(describe(lm, state), state.request.canvas[: state.length].count(lm.config.mask_id)) for state in states]
    parts = [(own, seconds)] if world is None else world.gather((own, seconds))
    found = [pair for part, _ in parts for pair in part]
    seconds = max(taken for _, taken in parts)
    written, forwards = sum(tokens for _, tokens in found), sum(sample["forwards"] for sample, _ in found)
    timing = {"seconds": seconds, "tokens": written, "tokens_per_second": written / seconds}
    timing |= {"forwards": forwards, "tokens_per_forward": written / max(1, forwards)}
    return {
        "seed": job.seed,
        "steps": max(sample["steps"] for sample, _ in found),
        "policy": asdict(requests[0].policy),
        "timing": timing,
        "samples": [sample for sample, _ in found],
    }


def _run(denoiser: Denoiser, states: Sequence[State], job: Job) -> None:
    """At most job.batch samples at a time: when one is done, the next takes its slot."""
    waiting, adapter = iter(states), DenoiserAdapter(denoiser)
    running = list(islice(waiting, job.batch))
    while running:
        step(running, adapter, device=denoiser.device, deterministic=job.deterministic)
        running = [state for state in running if not state.done]
        running += islice(waiting, job.batch - len(running))


def describe(lm: Any, state: State) -> dict[str, Any]:
    """A finished text as --json prints it."""
    tokens, canvas, eos_id = state.tokens.tolist(), state.request.canvas[: state.length], state.policy.eos_id
    first = int(canvas[0] == getattr(lm.tokenizer, "bos_token_id", None))  # BOS is not part of the text
    ends = [place for place, token in enumerate(canvas) if token == state.request.mask_id and tokens[place] == eos_id]
    # The text ends at its first EOS, unless given tokens follow it.
    if ends and canvas[-1] == state.request.mask_id:
        shown = tokens[first : ends[0]]
    else:
        shown = [token for token in tokens[first:] if token != eos_id or not ends]
    return {
        "text": lm.tokenizer.decode(shown),
        "tokens": tokens,
        "steps": state.steps,
        "forwards": state.forwards,
        "accepted": state.accepted,  # tokens beyond those of one step per forward
        "confidences": [None if math.isnan(sure) else sure for sure in state.confidence.tolist()],
    } | ({} if state.log_weight is None else {"log_weight": state.log_weight})
