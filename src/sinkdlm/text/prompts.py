"""Turn prompts and chats into tokens, check that a canvas fits, and let the tokenizer complete a policy.

The command line and the server share it. Takes a tokenizer by its methods; knows no model, file or option.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sinkdlm.errors import SamplingError, first_line
from sinkdlm.sampling.unmasking import Policy

LENGTH = 64  # tokens to write, where nobody says
_BLOCK = 32  # appended at a time where the end is open and no block was given


def piece_of(tokenizer: Any, token: int) -> str:
    """A token as it reads within a text, with the space that some tokenizers drop at a text's beginning.

    A part of a character is a replacement sign."""
    once, twice = (str(tokenizer.decode([token] * n, clean_up_tokenization_spaces=False)) for n in (1, 2))
    return twice[len(once) :] if twice.startswith(once) else once


def encode(tokenizer: Any, text: str) -> list[int]:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # of an escape in a JSON file, or of bytes on a command line
            raise SamplingError(f"{text[:40]!r}: half of a surrogate pair, or bytes that are no UTF-8, which is no text") from None
    return tokenizer.encode(text, add_special_tokens=False) if text else []


def check_bos(tokenizer: Any, bos: bool | None) -> None:
    if bos and getattr(tokenizer, "bos_token_id", None) is None:
        raise SamplingError("--bos: the tokenizer has no beginning-of-text token; leave it out")


def begin(tokenizer: Any, ids: Sequence[int], bos: bool | None = None, *, chat: bool = False) -> list[int]:
    """Begin a text as fine-tuning examples begin: with one BOS where the tokenizer puts it by itself.

    bos: overrides the tokenizer. chat: a template has written all that belongs there."""
    bos_id = getattr(tokenizer, "bos_token_id", None)
    if bos_id is None or (bos is None and chat):
        return list(ids)
    has_bos = list(ids[:1]) == [bos_id]
    if bos is None:
        bos = has_bos or tokenizer.encode("a")[:1] == [bos_id]
    return [*([bos_id] if bos else []), *ids[int(has_bos) :]]


def missing_text(message: Mapping[str, Any]) -> str | None:
    """What stands where text is expected; None where there is text, or tools, of which templates know more than we do.

    Most templates write whatever content is: null as None, a list with its brackets."""
    content = message.get("content")
    if isinstance(content, str) or message.get("tool_calls") or message["role"] == "tool":
        return None
    return "missing" if "content" not in message else "null" if content is None else f"a {type(content).__name__}"


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def chat_text(tokenizer: Any, messages: list[Any]) -> str:
    """A conversation in the tokenizer's own template, up to where the answer begins."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as failure:  # templates raise what they like
        raise SamplingError(f"the tokenizer's chat template fails: {first_line(failure)}") from None


def encode_prompt(tokenizer: Any, prompt: str | list[Any], bos: bool | None, *, chat: bool, source: object = None) -> list[int]:
    """The tokens before the text to write. Messages go through the chat template, and with `chat` every prompt does.

    source: where messages were read, for the error."""
    is_chat = chat or isinstance(prompt, list)
    if is_chat:
        if not has_chat_template(tokenizer):
            raise SamplingError(
                "--chat: this tokenizer has no chat template; leave --chat out, or convert with another --tokenizer"
                if chat
                else f"{source}: has chat messages, and this tokenizer has no chat template; give prompts in text"
            )
        prompt = chat_text(tokenizer, prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}])
    return begin(tokenizer, encode(tokenizer, str(prompt)), bos, chat=is_chat)


def lay_out(head: Sequence[int], tail: Sequence[int], n_tokens: int | None, mask_id: int, room: int, cure: str) -> list[int]:
    """Lay out a canvas: head, [MASK] for each token to write, tail. n_tokens: None for LENGTH, or what fits."""
    n_given = len(head) + len(tail)
    n_open = n_tokens or max(1, min(LENGTH, room - n_given))
    check_room(n_given, n_open, room, cure)
    return [*head, *[mask_id] * n_open, *tail]


def check_room(n_given: int, n_open: int, room: int, cure: str) -> None:
    if n_given + n_open > room:
        raise SamplingError(f"prompt of {n_given} and {n_open} tokens to write: the model reads at most {room}; shorten {cure}")


def policy_for(tokenizer: Any, policy: Policy, *, stop: bool, until_eos: bool) -> dict[str, Any]:
    """The policy fields that a tokenizer decides: which token ends a text. Text until EOS is written in blocks."""
    eos_id = getattr(tokenizer, "eos_token_id", None) if stop else None
    if until_eos and policy.eos_id is None and eos_id is None:
        why = "the tokenizer names no EOS; give a length alone" if stop else "and EOS is not to end it; leave one of them out"
        raise SamplingError(f"a text until EOS: {why}")
    options: dict[str, Any] = {"eos_id": eos_id} if policy.eos_id is None else {}
    return options | ({"block": _BLOCK} if until_eos and policy.block is None else {})
