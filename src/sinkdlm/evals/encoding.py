"""Encode the text of requests as rows of tokens, cut as the harness cuts them.

A prompt and its continuation are tokenised together, so that the tokenizer sets their border; blanks at the end of the prompt go
with the continuation. The tokenizer's own BOS is kept. Rows that do not fit the model are cut from the left.
"""

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sinkdlm.data.encoding import unknown_counter, with_bos
from sinkdlm.errors import EvalError
from sinkdlm.evals.requests import Request

_PROBE = "a"


class EncodedRow(NamedTuple):
    """tokens, the first `n_given` of which are the prompt; truncated: how many were cut."""

    tokens: list[int]
    n_given: int
    truncated: int

    @property
    def n_scored(self) -> int:
        return len(self.tokens) - self.n_given

    @property
    def scored(self) -> list[bool]:
        return [place >= self.n_given for place in range(len(self.tokens))]


class TextEncoder:
    """Encode each text of a batch once.

    bos: whether prompts and documents begin with BOS, whatever the tokenizer does. None: prompts as it does, documents as in the
    harness."""

    def __init__(self, tokenizer: Any, bos: bool | None = None) -> None:
        self.tokenizer, self.bos = tokenizer, bos
        self.eos_id: int | None = tokenizer.eos_token_id
        self.bos_id: int | None = tokenizer.bos_token_id
        # In place of an empty prompt and before a document, as in the harness; without BOS, the EOS of another text.
        self.prefix_id = self.eos_id if self.bos_id is None or bos is False else self.bos_id
        if bos and self.bos_id is None:
            raise EvalError("--bos: the tokenizer has no beginning-of-sequence token")
        self.count_unknown = unknown_counter(tokenizer)  # counts ids of characters that the tokenizer does not have
        self._closes = self.eos_id is not None and tokenizer.encode(_PROBE)[-1:] == [self.eos_id]  # every text

    def encode(self, texts: Iterable[str], *, special: bool = True) -> dict[str, list[int]]:
        """Ids of each text. special: with the special tokens that the tokenizer adds, unless the text begins with BOS already."""
        bos = self.tokenizer.bos_token if special else None
        found: dict[str, list[int]] = {}
        wanted = list(dict.fromkeys(texts))
        for add in (True, False):
            part = [text for text in wanted if (special and not (bos and text.startswith(bos))) == add]
            if part:
                ids = self.tokenizer(part, add_special_tokens=add, verbose=False)["input_ids"]
                found |= dict(zip(part, ids, strict=True))
        if not special:
            return found
        # The EOS that the tokenizer adds would end a prompt.
        return {text: with_bos(ids[:-1] if self._closes else ids, self.bos_id, self.bos) for text, ids in found.items()}

    def encode_documents(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Ids of each text without BOS: as in the harness, or, if bos is set, as training data is made.

        A text that spells a special token is then taken letter by letter. BOS at its beginning is dropped: there are never two."""
        if self.bos is None:
            return self.encode(texts, special=False)
        wanted = list(dict.fromkeys(texts))
        bare = [text.removeprefix(self.tokenizer.bos_token or "") for text in wanted]
        ids = self.tokenizer(bare, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
        return dict(zip(wanted, ids, strict=True))

    def pairs(self, requests: Sequence[Request], room: int) -> list[EncodedRow]:
        """Rows of at most `room` tokens, prompt and continuation."""
        parts = [_move_blanks(request) for request in requests]
        whole = self.encode(text for context, rest in parts if context for text in (context, context + rest))
        alone = self.encode((rest for context, rest in parts if not context), special=False)
        rows = []
        for request, (context, rest) in zip(requests, parts, strict=True):
            given = whole[context] if context else self.prefix(request.place)
            target = whole[context + rest][len(given) :] if context else alone[rest]
            if not context and target[:1] == given:
                target = target[1:]
            if not target:
                raise EvalError(f"{request.place}: the continuation {rest!r} has no token of its own: there is nothing to score")
            if len(target) > room - 1:
                raise EvalError(f"{request.place}: a continuation of {len(target)} tokens: the model reads {room}, prompt included")
            cut = max(0, len(given) + len(target) - room)
            rows.append(EncodedRow([*given[cut:], *target], len(given) - cut, cut))
        return rows

    def prefix(self, place: str) -> list[int]:
        if self.prefix_id is None:
            without, cure = "no EOS (and BOS is left out)", "say --bos"
            if self.bos_id is None:
                without, cure = "neither BOS nor EOS", "name one as eos_token in its tokenizer_config.json"
            raise EvalError(f"{place}: the prompt is empty, and the tokenizer has {without} to stand for it; {cure}")
        return [self.prefix_id]

    def decode(self, tokens: Sequence[int], until: Sequence[str] = ()) -> str:
        """Decode up to the first EOS or stop string, without special tokens. A stop string may be a special token."""
        ended = list(tokens[: tokens.index(self.eos_id)] if self.eos_id in tokens else tokens)
        if self.stops(ended, until):
            least = bisect.bisect_left(range(len(ended)), True, key=lambda n: self.stops(ended[:n], until))
            ended = ended[:least]
        return cut_at(str(self.tokenizer.decode(ended, skip_special_tokens=True)), until)

    def stops(self, tokens: Sequence[int], until: Sequence[str]) -> bool:
        """Whether a stop string has been written."""
        text = str(self.tokenizer.decode(list(tokens), skip_special_tokens=False)) if until else ""
        return any(stop in text for stop in until)


def cut_at(text: str, until: Sequence[str]) -> str:
    """Up to the first stop string."""
    for stop in until:
        text = text.partition(stop)[0]
    return text


def _move_blanks(request: Request) -> tuple[str, str]:
    kept = request.context.rstrip()
    return kept, request.context[len(kept) :] + request.continuation
