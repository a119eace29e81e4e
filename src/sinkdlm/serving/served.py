"""A served model: its name, tokenizer and engine, and the step from a request's body to canvases for the engine.

Owns every refusal that depends on the model. Knows no HTTP.
"""

import functools
import hashlib
import itertools
import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from sinkdlm import __version__
from sinkdlm.analysis.kinds import kind_finder, texts_of
from sinkdlm.checkpoint.directory import Loaded
from sinkdlm.errors import SamplingError
from sinkdlm.sampling import NAMED, Automaton, Policy, Request, policy_of
from sinkdlm.sampling.unmasking import APPROXIMATE
from sinkdlm.serving.engine import Engine
from sinkdlm.serving.logprobs import Named, name_token
from sinkdlm.serving.schemas import Card, ChatRequest, CompletionRequest
from sinkdlm.serving.transcript import Transcript
from sinkdlm.text.prompts import LENGTH, begin, chat_text, encode, has_chat_template, lay_out, piece_of, policy_for
from sinkdlm.text.schema import constraint_of, pieces_of


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    length: int | None = None  # tokens of a canvas; None: what the model reads
    steps: int = 1024
    n: int = 16  # texts for each prompt
    rows: int = 64  # texts in all


@dataclass(frozen=True)
class Order:
    """A request in tokens: a row for each text."""

    rows: list[Request]
    transcripts: list[Transcript]
    policy: Policy
    seed: int
    n_prompt_tokens: int


class Served:
    """A model behind the server. bos: whether text prompts begin with BOS; None: as the tokenizer or chat template does."""

    def __init__(self, name: str, lm: Loaded, engine: Engine, limits: Limits, bos: bool | None = None) -> None:
        self.name, self.lm, self.engine, self.limits, self.bos = name, lm, engine, limits, bos
        self.room = min(lm.config.context_length, limits.length or lm.config.context_length)
        self.fingerprint = _fingerprint(lm)
        # The text of a token as it reads within a text, and its kind, as in the analysis.
        self.piece: Callable[[int], str] = functools.cache(functools.partial(piece_of, lm.tokenizer))
        self.kind = kind_finder(lm.tokenizer, lm.config.mask_id)
        self._tokenizing = threading.Lock()  # fast tokenizers are not thread-safe

    @functools.cached_property
    def _token_texts(self) -> list[bytes | None]:
        return texts_of(self.lm.tokenizer, range(self.lm.config.vocab_size))

    def name_token(self, token: int) -> Named:
        """A token's name and bytes in log-probabilities."""
        return name_token(self._token_texts[token], token)

    def card(self) -> Card:
        config, engine = self.lm.config, self.engine
        sinks = {"n": config.n_sinks, "kind": config.sink_kind, "position": config.sink_position, "value": config.sink_value}
        named = ("context_length", "vocab_size", "mask_id", "n_layers", "n_heads", "gate", "block_size")
        facts = {name: getattr(config, name) for name in named} | {
            "eos_id": self.lm.tokenizer.eos_token_id,
            "sinks": sinks,
            "chat": has_chat_template(self.lm.tokenizer),
            "policies": {name: asdict(policy) for name, policy in NAMED.items()},
            "defaults": {"policy": "llada", "max_tokens": LENGTH},
            "limits": {"length": self.room, "steps": self.limits.steps, "n": self.limits.n, "seconds": engine.capacity.seconds},
            "deterministic": engine.deterministic,
        }
        return Card(id=self.name, created=_created(self.lm), sinkdlm=facts)

    def complete(self, body: CompletionRequest) -> Order:
        with self._tokenizing:
            heads = [prompt if isinstance(prompt, list) else self._begin(prompt) for prompt in body.prompts]
            tail = encode(self.lm.tokenizer, body.suffix or "")
        return self._order(body, heads, tail, body.max_tokens, echo=bool(body.echo))

    def chat(self, body: ChatRequest) -> Order:
        if not has_chat_template(self.lm.tokenizer):
            raise SamplingError(f"{self.name}: its tokenizer has no chat template; use /v1/completions")
        with self._tokenizing:
            head = self._begin(chat_text(self.lm.tokenizer, [message.plain() for message in body.messages]), chat=True)
        return self._order(body, [head], [], body.max_completion_tokens or body.max_tokens, echo=False)

    def _begin(self, text: str, *, chat: bool = False) -> list[int]:
        return begin(self.lm.tokenizer, encode(self.lm.tokenizer, text), self.bos, chat=chat)

    def _order(
        self, body: CompletionRequest | ChatRequest, heads: list[list[int]], tail: list[int], n_tokens: int | None, *, echo: bool
    ) -> Order:
        config, tokenizer = self.lm.config, self.lm.tokenizer
        n, mask_id = body.n or 1, config.mask_id
        for token in itertools.chain(*heads, tail):
            if token == mask_id:
                raise SamplingError("the prompt holds the mask token; give prompt and suffix, and the model writes between them")
            if not 0 <= token < config.vocab_size:
                raise SamplingError(f"token {token}: this model has {config.vocab_size} tokens, from 0 on")
        if n > self.limits.n or n * len(heads) > self.limits.rows:
            raise SamplingError(f"n = {n}: this server writes at most {self.limits.n} texts per prompt, {self.limits.rows} in all")
        policy = self._policy(body)
        if body.n_logprobs is not None:
            _ = self._token_texts  # read here, not in the event loop
        seed = secrets.randbits(63) if body.seed is None else body.seed
        how: dict[str, Any] = {"grow": body.sinkdlm.until_eos, "block_size": config.block_size, "logprobs": body.n_logprobs}
        how["constraint"] = self._constraint(body)
        rows: list[Request] = []
        transcripts: list[Transcript] = []
        for head in heads:
            canvas = lay_out(head, tail, n_tokens, mask_id, self.room, "the prompt or max_tokens")
            text = tokenizer.decode(head, skip_special_tokens=True) if echo else ""
            for _ in range(n):
                rows.append(Request(canvas, policy, mask_id, seed, len(rows), **how))
                transcripts.append(Transcript(tokenizer, head, policy.eos_id, body.stops, text))
        return Order(rows, transcripts, rows[0].policy, seed, sum(len(head) + len(tail) for head in heads))

    def _constraint(self, body: CompletionRequest | ChatRequest) -> Automaton | None:
        schema, regex = body.response_format and body.response_format.wanted, body.sinkdlm.regex
        if schema is None and regex is None:
            return None
        tokenizer, vocab_size = self.lm.tokenizer, self.lm.config.vocab_size
        with self._tokenizing:
            pieces_of(tokenizer, vocab_size)  # kept for later
        return constraint_of(tokenizer, vocab_size, schema=schema, regex=regex)

    def _policy(self, body: CompletionRequest | ChatRequest) -> Policy:
        extras = body.sinkdlm
        options = extras.policy_fields()
        options |= {name: value for name in ("temperature", "top_p") if (value := getattr(body, name)) is not None}
        if body.temperature == 0 and not policy_of(extras.policy).tempered:
            for cut in ("top_p", "top_k", "min_p"):
                options.pop(cut, None)  # clients send them by habit; at temperature 0 they change nothing
        policy = policy_of(extras.policy, **options)
        ends: dict[str, Any] = {
            "stop": not extras.ignore_eos,
            "until_eos": extras.until_eos,
            "block_size": self.lm.config.block_size,
        }
        policy = policy_of(policy, **policy_for(self.lm.tokenizer, policy, **ends))
        if policy.steps is not None and policy.steps > self.limits.steps:
            raise SamplingError(f"steps = {policy.steps}: this server takes at most {self.limits.steps}")
        if policy.cache in APPROXIMATE and self.lm.config.n_registers:
            raise SamplingError(f"cache = {policy.cache!r}: not with a register sink, which sees every token; use cache = 'none'")
        return policy


def _fingerprint(lm: Loaded) -> str:
    """Hash what decides answers besides the request: weights, precision, device and version."""
    weight = lm.model.embed.weight
    facts = [lm.config.to_dict(), lm.provenance.get("weights"), str(weight.dtype), weight.device.type, __version__]
    return f"fp_{hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]}"


def _created(lm: Loaded) -> int:
    try:
        return int(datetime.fromisoformat(str(lm.provenance.get("created"))).timestamp())
    except ValueError:
        return 0
