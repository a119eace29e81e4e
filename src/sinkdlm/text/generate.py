"""Turn prompts into canvases, run the sampler, show text as it appears, and describe the result as JSON.

Reads prompts from a text, a file, gaps or a chat. Takes a loaded model with its tokenizer; does not know where it came from.
"""

import json
import math
import re
import time
from collections.abc import Sequence
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
from sinkdlm.errors import SamplingError
from sinkdlm.model.model import Denoiser
from sinkdlm.model.observe import Watcher
from sinkdlm.sampling import Policy, Request, State, start, step
from sinkdlm.text.prompts import begin, check_bos, check_room, encode, encode_prompt, lay_out, missing_text, piece_of

_GAP = re.compile(r"\[(_*)(?::(\d+))?\]")  # [____] is four tokens, [_:12] twelve
_OPEN = "░"


@dataclass(frozen=True)
class Job:
    """What is to be written. One of prompt, prompts and infill says where it starts."""

    prompt: str = ""
    prompts: Path | None = None
    infill: str | None = None
    suffix: str = ""
    chat: bool = False
    length: int | None = None  # of what follows a prompt; None: LENGTH, or what fits
    gap: int | None = None
    n: int = 1
    seed: int = 0
    until_eos: bool = False
    batch: int = 64
    deterministic: bool = False
    bos: bool | None = None  # before what is given; None: as the tokenizer begins a text, and as a chat template has it


def read_prompts(path: Path) -> list[Any]:
    """Read a line of text for each prompt; or a line of .jsonl: a string, {"prompt": ...}, {"question": ...}, {"messages": [...]}.

    A field that is null counts as absent."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as failure:
        reason = getattr(failure, "strerror", None) or "it is no UTF-8 text"
        raise SamplingError(f"{path}: cannot be read: {reason}") from None
    if not lines:
        raise SamplingError(f"{path}: holds no prompt; give a line of text for each, or a .jsonl with prompt or messages")
    if path.suffix != ".jsonl":
        return lines
    return [_read_prompt(line, f"{path}: line {number}") for number, line in enumerate(lines, start=1)]


def _read_prompt(line: str, place: str) -> str | list[Any]:
    try:
        value = json.loads(line)
    except ValueError:
        raise SamplingError(f"{place} is no JSON") from None
    name = "prompt"
    if isinstance(value, dict):
        name = next((name for name in ("prompt", "messages", "question") if value.get(name) is not None), name)
        value = value.get(name)
    if value is None:
        raise SamplingError(f"{place} has neither prompt nor question nor messages")
    if isinstance(value, list) or name == "messages":
        _check_messages(value, place)
    elif not isinstance(value, str):
        raise SamplingError(f"{place}: {name} is {type(value).__name__}, expected text")
    return value


def _check_messages(messages: Any, place: str) -> None:
    for number, message in enumerate(messages if isinstance(messages, list) else [None], start=1):
        if not isinstance(message, dict) or "role" not in message:
            raise SamplingError(f"{place}: messages is no list of objects with role and content")
        if missing := missing_text(message):
            raise SamplingError(f"{place}: message {number} ({message['role']}): content is {missing}, expected text")


def parse_gaps(text: str, gap: int | None = None) -> list[str | int]:
    """Cut "The [____] sat" into text and the sizes of gaps: as many tokens as underscores, the number after a colon, or `gap`."""
    pieces: list[str | int] = []
    end = 0
    for found in _GAP.finditer(text):
        size = gap or int(found[2] if found[2] is not None else len(found[1]))
        if size < 1:
            raise SamplingError(f"--infill: the gap {found[0]} has zero length; write [____] for four tokens, or [_:12] for twelve")
        pieces += [text[end : found.start()], size]
        end = found.end()
    if not pieces:
        raise SamplingError(f"--infill {text!r}: has no gap; write [____] where tokens are missing")
    return [*pieces, text[end:]]


def check(job: Job) -> None:
    """What is wrong whatever the model is."""
    if sum([bool(job.prompt), job.prompts is not None, job.infill is not None]) > 1:
        raise SamplingError("--prompt, --prompts and --infill: give one of them")
    if job.infill is not None:
        if job.suffix or job.until_eos or job.chat:
            raise SamplingError("--infill has its own end: leave out --suffix, --until-eos and --chat")
        if job.length is not None:
            raise SamplingError("--length: of what follows a prompt; gaps of --infill have their own: [_:12], or --gap for all")
        parse_gaps(job.infill, job.gap)
    elif job.gap is not None:
        raise SamplingError("--gap goes with --infill")
    if job.prompts is not None:
        read_prompts(job.prompts)


def canvases(lm: Any, job: Job) -> list[list[int]]:
    """The canvas of each prompt, [MASK] where there is something to write."""
    tokenizer, mask_id, room = lm.tokenizer, lm.config.mask_id, lm.config.context_length
    check_bos(tokenizer, job.bos)
    if job.infill is not None:
        row: list[int] = []
        for piece in parse_gaps(job.infill, job.gap):
            row += [mask_id] * piece if isinstance(piece, int) else encode(tokenizer, piece)
        row, n_open = begin(tokenizer, row, job.bos), row.count(mask_id)
        check_room(len(row) - n_open, n_open, room, "the text or its gaps" if job.gap is None else "the text or --gap")
        return [row]
    tail, cure = encode(tokenizer, job.suffix), "the prompt" if job.length is None else "the prompt or --length"
    prompts = [job.prompt] if job.prompts is None else read_prompts(job.prompts)
    heads = [encode_prompt(tokenizer, prompt, job.bos, chat=job.chat, source=job.prompts) for prompt in prompts]
    return [lay_out(head, tail, job.length, mask_id, room, cure) for head in heads]


class Watched(Denoiser):
    """A denoiser that also looks where attention goes, in the first forward of each step."""

    capturable = False
    seen: Watcher | None = None

    def __call__(
        self, tokens: Tensor, *, lengths: Tensor | None = None, where: Tensor | None = None, cache: Any = None, **facts: Any
    ) -> Tensor:
        if self.seen is None:
            logits = [weight for name, weight in self.model.named_parameters() if name.endswith("sink_logit")]
            facts["observe"] = self.seen = Watcher(lengths, logits or None, n_registers=self.model.config.n_registers)
        return super().__call__(tokens, lengths=lengths, where=where, cache=cache, **facts)

    def attention(self) -> tuple[float | None, int, float]:
        """Mean over layers and heads: share on the sinks, the most attended content position and its share."""
        assert self.seen is not None
        received = torch.stack([layer.received.mean((0, 1)) for layer in self.seen.layers]).mean(0)
        has_sinks = self.seen.layers[0].sink_received.shape[-1] > 0
        share = float(torch.stack([layer.sink_share.mean() for layer in self.seen.layers]).mean()) if has_sinks else None
        top = int(received.argmax())
        return share, top, float(received[top])


def _shown(lm: Any, state: State, attention: tuple[float | None, int, float]) -> Text:
    """The canvas as text: what is open as blocks, what the step wrote in bold, the most attended position underlined."""
    share, top, top_share = attention
    text = Text()
    for place, (token, new) in enumerate(zip(state.tokens.tolist(), state.committed.tolist(), strict=True)):
        is_open = token == lm.config.mask_id
        style = "bold green" if new else "dim" if is_open else ""
        shown = _OPEN if is_open else piece_of(lm.tokenizer, token)
        text.append(shown, f"{style} underline reverse".strip() if place == top else style)
    sink = "" if share is None else f"  sink {share:.0%}"
    return text.append(f"\nstep {state.steps}{sink}  most attended: place {top} ({top_share:.0%})", "dim")


def _watch(denoiser: Watched, lm: Any, state: State, job: Job) -> None:
    """Show text as it appears: in place on a terminal, elsewhere as a line for each step."""
    console = Console(stderr=True)
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
    with live or nullcontext():
        while not state.done:
            denoiser.seen = None
            step([state], denoiser, device=denoiser.device, deterministic=job.deterministic)
            if denoiser.seen is None:
                continue
            text = _shown(lm, state, denoiser.attention())
            if live is not None:
                live.update(text, refresh=True)
            else:
                body, _, facts = text.plain.rpartition("\n")
                console.print(f"{facts}  {body!r}", markup=False, highlight=False, soft_wrap=True)


def write(lm: Any, job: Job, policy: Policy, *, watch: bool = False, world: Any = None) -> dict[str, Any]:
    """Sample what the job asks for. The dictionary is what --json prints.

    world: a World whose ranks each write a share of the texts. Noise is keyed by the sample index, so that a text is the same
    whoever writes it.
    """
    mask_id = lm.config.mask_id
    rows = [row for row in canvases(lm, job) for _ in range(job.n)]
    requests = [Request(row, policy, mask_id, job.seed, index, grow=job.until_eos) for index, row in enumerate(rows)]
    if watch and world is not None and not world.alone:
        raise SamplingError("--watch: shows one text, in one process; leave torchrun out")
    if watch and len(requests) > 1:
        raise SamplingError(f"--watch: shows one text, and there are {len(requests)}; leave out --n or --prompts")
    states = start(requests if world is None else requests[world.share(len(requests))])
    absent = absent_ids(lm.tokenizer, lm.config.vocab_size)
    began = time.perf_counter()
    with lm.model.inference():
        if watch:
            _watch(Watched(lm.model, absent), lm, states[0], job)
        else:
            _run(lm.model.denoiser(absent), states, job)
    seconds = time.perf_counter() - began
    own = [(_sample(lm, state), state.request.canvas[: state.length].count(mask_id)) for state in states]
    parts = [(own, seconds)] if world is None else world.gather((own, seconds))
    found = [pair for part, _ in parts for pair in part]
    seconds = max(taken for _, taken in parts)
    written = sum(tokens for _, tokens in found)
    return {
        "seed": job.seed,
        "steps": max(sample["steps"] for sample, _ in found),
        "policy": asdict(policy),
        "timing": {"seconds": seconds, "tokens": written, "tokens_per_second": written / seconds},
        "samples": [sample for sample, _ in found],
    }


def _run(denoiser: Denoiser, states: Sequence[State], job: Job) -> None:
    """At most job.batch samples at a time: when one is done, the next takes its slot."""
    waiting = iter(states)
    running = list(islice(waiting, job.batch))
    while running:
        step(running, denoiser, device=denoiser.device, deterministic=job.deterministic)
        running = [state for state in running if not state.done]
        running += islice(waiting, job.batch - len(running))


def _sample(lm: Any, state: State) -> dict[str, Any]:
    tokens, canvas, eos_id = state.tokens.tolist(), state.request.canvas[: state.length], state.policy.eos_id
    first = int(canvas[0] == getattr(lm.tokenizer, "bos_token_id", None))  # BOS begins a text, and is no part of it
    ends = [place for place, token in enumerate(canvas) if token == state.request.mask_id and tokens[place] == eos_id]
    # What follows an EOS that ends the text is no part of it, unless something given stands there.
    if ends and canvas[-1] == state.request.mask_id:
        shown = tokens[first : ends[0]]
    else:
        shown = [token for token in tokens[first:] if token != eos_id or not ends]
    return {
        "text": lm.tokenizer.decode(shown),
        "tokens": tokens,
        "steps": state.steps,
        "confidences": [None if math.isnan(sure) else sure for sure in state.confidence.tolist()],
    }
