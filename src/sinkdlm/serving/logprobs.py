"""Log-probabilities of written tokens in OpenAI's two shapes. Knows names of tokens; no engine, no request."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from sinkdlm.sampling.logprobs import LogProbs
from sinkdlm.serving.schemas import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

Named = tuple[str, list[int] | None]


def name_token(text: bytes | None, token: int) -> Named:
    """A token's text and bytes. A part of a character is named as OpenAI does: bytes:\\xe2\\x80."""
    if text is None:
        return f"#{token}", None
    try:
        return text.decode(), list(text)
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text), list(text)


def in_completion(found: LogProbs, tokens: Sequence[int], offsets: Sequence[int], name: Callable[[int], Named]) -> dict[str, Any]:
    """found: of these tokens. offsets: where each begins in the answer's text."""
    own = found.tokens.tolist()
    top = [
        {name(token)[0]: value for token, value in [(chosen, mine), *best]}  # the written token is always there
        for chosen, mine, best in zip(tokens, own, _best(found), strict=True)
    ]
    names = [name(token)[0] for token in tokens]
    return CompletionLogprobs(tokens=names, token_logprobs=own, top_logprobs=top, text_offset=list(offsets)).model_dump()


def in_chat(found: LogProbs, tokens: Sequence[int], name: Callable[[int], Named]) -> dict[str, Any]:
    def described(token: int, value: float) -> dict[str, Any]:
        text, parts = name(token)
        return {"token": text, "bytes": parts, "logprob": value}

    content = [
        TokenLogprob(**described(token, mine), top_logprobs=[TopLogprob(**described(*other)) for other in best])
        for token, mine, best in zip(tokens, found.tokens.tolist(), _best(found), strict=True)
    ]
    return ChatLogprobs(content=content).model_dump()


def _best(found: LogProbs) -> list[list[tuple[int, float]]]:
    """The likeliest tokens at each position, without those that are never written."""
    pairs = zip(found.ids.tolist(), found.values.tolist(), strict=True)
    return [[(token, value) for token, value in zip(*pair, strict=True) if value > -math.inf] for pair in pairs]
