"""Answer requests with a model: log-likelihoods with their errors, whole documents, and generated text.

Owns which requests make a batch, which rank answers it, and how noise is keyed. A number is a function of (weights, request,
settings, seed): not of its batch, its order, or the rank that computed it. Uses the estimators and the sampler as any user would;
needs only the core packages.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.data.display import ItemBar
from sinkdlm.distributed.world import World
from sinkdlm.evals.encoding import TextEncoder
from sinkdlm.evals.generating import Generator, check_room
from sinkdlm.evals.requests import GENERATE, LOGLIKELIHOOD, ROLLING, Journal, Request, Response, Sheet, by_question, number_of
from sinkdlm.evals.settings import Settings
from sinkdlm.likelihood import Adaptive, Estimates, document_likelihood, is_greedy, log_likelihood
from sinkdlm.likelihood.mask_draws import MONTE_CARLO
from sinkdlm.model.model import Denoiser, DiffusionLM

_LETTERS = 4  # characters per token, roughly: enough to estimate the work of a request
# Forwards per batch: many fill up better; with few, a kill loses less and progress shows sooner.
_FORWARDS = {"cpu": 2, "cuda": 32}
_NEARLY = 0.99  # an estimated share of a batch never reaches 1
_CPU_TOKENS, _LEAST_TOKENS, _MOST_TOKENS = 1 << 11, 1 << 12, 1 << 16  # per forward; on a GPU by its memory
# An eighth of a GPU's memory is for logits: in half precision, in float32, and once more while they are summed.
_LOGITS_SHARE = 8


class CausalDenoiser(Denoiser):
    """The AR parent inside a model: row i of its logits is for token i + 1. Keeps no cache."""

    capturable = False

    def __init__(self, model: DiffusionLM, barred: Sequence[int] = ()) -> None:
        super().__init__(model, barred)
        self.block_size = None

    def __call__(  # type: ignore[override]
        self, tokens: Tensor, *, lengths: Tensor | None = None, where: Tensor | None = None
    ) -> Tensor:
        with torch.no_grad():
            return self.model.head(self.model(tokens, lengths=lengths, causal=True, select=where))


def forward_tokens(device: torch.device, vocab: int) -> int:
    """Choose the tokens per forward; at most a quarter reaches the head. With too few, a GPU waits for its host."""
    if device.type != "cuda":
        return _CPU_TOKENS
    places = torch.cuda.get_device_properties(device).total_memory // (_LOGITS_SHARE * 10 * vocab)
    return min(_MOST_TOKENS, max(_LEAST_TOKENS, 1 << (4 * places).bit_length() - 1))


class Answerer:
    """Answer the requests of a sheet with a model. budget: tokens per forward."""

    def __init__(self, lm: Any, sheet: Sheet, *, budget: int | None = None) -> None:
        self.lm, self.sheet = lm, sheet
        self._encoders = {bos: TextEncoder(lm.tokenizer, bos) for bos in {one.bos for one in sheet.settings.values()}}
        self.device, self.block_size = lm.model.embed.weight.device, lm.config.block_size
        self.budget = budget or forward_tokens(self.device, lm.config.vocab_size)
        self._options: dict[str, Any] = {"mask_id": lm.config.mask_id, "budget": self.budget, "device": self.device}
        absent = absent_ids(lm.tokenizer, lm.config.vocab_size)  # ids that are never written; logits stay the same
        self._denoisers = {False: lm.model.denoiser(absent), True: CausalDenoiser(lm.model, absent)}
        self._computed = self._expected = 0  # tokens of forwards, in the batch under way

    @contextmanager
    def watched(self, tell: Callable[[float], None]) -> Iterator[None]:
        """Call tell(share) after every forward, with the estimated share of the batch that is done."""

        def count(model: torch.nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
            self._computed += given[0].numel()
            tell(min(_NEARLY, self._computed / max(1, self._expected)))

        hook = self.lm.model.register_forward_hook(count)
        try:
            yield
        finally:
            hook.remove()

    def batches(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        """Yield batches of whole questions with the same settings, each about a few forwards."""
        for request in requests:
            if request.kind == GENERATE:
                check_room(request, self.sheet.settings[request.task], self.lm.config)
        alike: dict[Any, list[list[Request]]] = {}
        for question in by_question(requests):
            for kind, part in itertools.groupby(question, key=lambda request: request.kind):
                own = list(part)
                # Only questions with the same metrics: else a stopping test would depend on its batch.
                metrics = tuple(sorted(own[0].divisors)) if _has_ranking(own) else ()
                alike.setdefault((kind, self.sheet.settings[own[0].task], metrics), []).append(own)
        most = self.budget * _FORWARDS.get(self.device.type, _FORWARDS["cpu"])
        for questions in alike.values():
            batch: list[Request] = []
            work = 0
            for question in questions:
                batch += question
                work += sum(map(self._work, question))
                if work >= most:
                    yield batch
                    batch, work = [], 0
            if batch:
                yield batch

    def _work(self, request: Request) -> int:
        """Estimate the tokens that go through the model for a request."""
        settings = self.sheet.settings[request.task]
        length = 1 + (len(request.context) + len(request.continuation)) // _LETTERS
        if request.kind == GENERATE:
            return length * int(request.generation.get("steps") or settings.steps or 64)
        target = length if request.kind == ROLLING else 1 + len(request.continuation) // _LETTERS
        return _forwarded(length, target, settings, self.block_size)

    def answer(self, batch: Sequence[Request]) -> list[Response]:
        """Answer requests of one kind with the same settings."""
        began = time.perf_counter()
        settings = self.sheet.settings[batch[0].task]
        self._computed, self._expected = 0, sum(map(self._work, batch))
        make = {LOGLIKELIHOOD: self._score, ROLLING: self._score_documents, GENERATE: self._generate}[batch[0].kind]
        with self.lm.model.inference():
            found = make(batch, settings)
        each = (time.perf_counter() - began) / len(batch)
        return [Response(*request.key, seconds=each, **values) for request, values in zip(batch, found, strict=True)]

    def _room(self, settings: Settings) -> int:
        """Tokens of a row: an AR model does not read the last one."""
        return int(self.lm.config.context_length) + settings.causal

    def _drawn(self, settings: Settings) -> dict[str, Any]:
        """Options of every estimator."""
        return {"estimator": settings.estimator, "draws": settings.draws, "seed": self.sheet.seed, **self._options}

    def _score(self, batch: Sequence[Request], settings: Settings) -> list[dict[str, Any]]:
        encoder = self._encoders[settings.bos]
        rows = encoder.pairs(batch, self._room(settings))
        self._expected = sum(_forwarded(len(row.tokens), row.n_scored, settings, self.block_size) for row in rows)
        texts = self._denoisers[settings.causal], [row.tokens for row in rows], [row.scored for row in rows]
        groups, adaptive = [number_of(*request.question) for request in batch], _adaptive(batch, settings)
        drawn = self._drawn(settings) | {"guidance": settings.guidance, "groups": groups, "adaptive": adaptive}
        estimates = log_likelihood(*texts, **drawn)
        greedy: Sequence[bool | None] = [None] * len(batch)
        if settings.greedy:
            greedy = is_greedy(*texts, guidance=settings.guidance, causal=settings.causal, **self._options)
        counts = [
            {"n_tokens": row.n_scored, "truncated": row.truncated, "unknown": encoder.count_unknown(row.tokens)} for row in rows
        ]
        return [_numbers(estimates, i) | counts[i] | {"greedy": greedy[i]} for i in range(len(batch))]

    def _score_documents(self, batch: Sequence[Request], settings: Settings) -> list[dict[str, Any]]:
        encoder, room = self._encoders[settings.bos], self._room(settings)
        found = encoder.encode_documents(request.context for request in batch)
        ids = [found[request.context] for request in batch]
        self._expected = sum(_forwarded(len(row), min(len(row), room), settings, self.block_size) for row in ids)
        prefix = encoder.prefix(batch[0].place) if settings.causal or encoder.prefix_id is not None else ()
        drawn = self._drawn(settings) | {"numbers": [number_of(*request.key) for request in batch]}
        scores = document_likelihood(self._denoisers[settings.causal], ids, window=room, prefix=prefix, **drawn)
        counts = [{"n_tokens": int(n), "unknown": encoder.count_unknown(row)} for n, row in zip(scores.n_tokens, ids, strict=True)]
        return [_numbers(scores.estimates, i) | counts[i] for i in range(len(batch))]

    def _generate(self, batch: Sequence[Request], settings: Settings) -> list[dict[str, Any]]:
        config, writer, encoder = self.lm.config, self._denoisers[settings.causal], self._encoders[settings.bos]
        limits = {"room": config.context_length, "budget": self.budget}
        return Generator(writer, encoder, mask_id=config.mask_id, seed=self.sheet.seed, **limits).write(batch, settings)


def _forwarded(length: int, target: int, settings: Settings, block_size: int | None) -> int:
    """Tokens that go through the model to score `target` tokens of a row, its clean copies not counted."""
    if settings.causal:
        return length
    at_once = min(target, block_size or target)
    most = settings.draws if block_size is None else min(settings.draws, (1 << at_once) - 1)  # a block's equal masks are one
    return length * (most if settings.estimator in MONTE_CARLO else at_once) * (2 if settings.guidance else 1)


def _has_ranking(question: Sequence[Request]) -> bool:
    return len(question) > 1 and all(request.divisors for request in question)


def _adaptive(batch: Sequence[Request], settings: Settings) -> Adaptive | None:
    """The stopping rule, under every reported metric; None where the batch has no options to rank."""
    if not settings.adaptive or settings.estimator != "exact_k" or not all(map(_has_ranking, by_question(batch))):
        return None
    names = sorted({name for request in batch for name in request.divisors})
    metrics = {name: [request.divisors.get(name, 1.0) for request in batch] for name in names}
    return Adaptive(metrics, settings.error, settings.tolerance)


def _numbers(estimates: Estimates, row: int) -> dict[str, Any]:
    counts = {name: int(getattr(estimates, name)[row]) for name in ("draws", "full_draws", "forwards")}
    return {"value": float(estimates.mean[row]), "stderr": float(estimates.stderr[row]), "kind": estimates.kind, **counts}


def fingerprint(model: DiffusionLM) -> str:
    """Hash a model's config and the bits of its weights, the same on every device."""
    found = hashlib.sha256(json.dumps(model.config.to_dict(), sort_keys=True).encode())
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for name, weight in sorted(model.state_dict().items()):
        bits = weight.detach().contiguous().view(words[weight.element_size()]).flatten().to(torch.int64)
        odd = 2 * torch.arange(len(bits), device=bits.device) + 1  # so that the order of weights counts
        found.update(f"{name} {tuple(weight.shape)} {int((bits * odd).sum())}".encode())
    return found.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash everything by which a tokenizer turns text into ids and back."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    ids = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, getattr(tokenizer, "chat_template", None))
    return hashlib.sha256(json.dumps([ids, ends], default=str).encode()).hexdigest()


def answer_sheet(answerer: Answerer, journal: Journal, *, world: World | None = None, quiet: bool = False) -> dict[Any, Response]:
    """Return every response of the sheet, on every rank; responses in the journal are not computed again.

    Each rank answers a batch, then rank 0 writes them all: a kill loses at most the batches under way.
    """
    world = world or World(answerer.device)
    sheet = answerer.sheet
    done = world.from_first(lambda: journal.done)
    questions = [question for question in by_question(sheet.requests) if not all(request.key in done for request in question)]
    open_ = list(itertools.chain.from_iterable(questions))
    batches = list(answerer.batches(open_))
    found = dict(done)
    under_way = 0  # requests
    display = ItemBar("requests", len(sheet.requests), len(sheet.requests) - len(open_), shown=world.first and not quiet)
    with display, answerer.watched(lambda share: display.update(len(found), share, under_way)):
        for begin in range(0, len(batches), world.size):
            under_way = sum(map(len, batches[begin : begin + world.size]))
            mine = batches[begin + world.rank : begin + world.rank + 1]
            answers = answerer.answer(mine[0]) if mine else []
            fresh = [response for part in world.gather(answers) for response in part]
            if world.first:
                journal.append(fresh)
            found |= {response.key: response for response in fresh}
            display.update(len(found))
    return {request.key: found[request.key] for request in sheet.requests}
