"""Turn prompts and chats into tokens, check that a canvas fits, and let the tokenizer complete a policy.

The command line and the server share it. Takes a tokenizer by its methods; knows no model, file or option.
"""

import ctypes
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from sinkdlm.errors import SamplingError, first_line
from sinkdlm.sampling.unmasking import Policy

LENGTH = 64  # tokens to write by default
_MOST_TOKENS = 1 << 20  # of a canvas
_TEMPLATE_SECONDS = 5.0  # to render one conversation
_BLOCK = 32  # tokens appended at a time to an open end, if no block is given


class _TemplateLoops(Exception):  # noqa: N818  (named for the reader of a message)
    def __str__(self) -> str:
        return f"it has not ended after {_TEMPLATE_SECONDS:.0f} s; give another --tokenizer, or text instead of messages"


def piece_of(tokenizer: Any, token: int) -> str:
    """Decode one token as it reads within a text, with the space that some tokenizers drop at a text's beginning.

    A part of a character becomes a replacement sign."""
    once, twice = (str(tokenizer.decode([token] * n, clean_up_tokenization_spaces=False)) for n in (1, 2))
    return twice[len(once) :] if twice.startswith(once) else once


def encode(tokenizer: Any, text: str) -> list[int]:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:  # from an escape in a JSON file, or from bytes on a command line
            raise SamplingError(f"{text[:40]!r}: holds a lone surrogate, or bytes that are not UTF-8; give plain text") from None
    return tokenizer.encode(text, add_special_tokens=False) if text else []


def check_bos(tokenizer: Any, bos: bool | None) -> None:
    if bos and getattr(tokenizer, "bos_token_id", None) is None:
        raise SamplingError("--bos: the tokenizer has no beginning-of-sequence token; leave it out")


def begin(tokenizer: Any, ids: Sequence[int], bos: bool | None = None, *, chat: bool = False) -> list[int]:
    """Begin a text as fine-tuning examples begin: with one BOS where the tokenizer itself adds it.

    bos: overrides the tokenizer. chat: the template has already written the beginning."""
    bos_id = getattr(tokenizer, "bos_token_id", None)
    if bos_id is None or (bos is None and chat):
        return list(ids)
    has_bos = list(ids[:1]) == [bos_id]
    if bos is None:
        bos = has_bos or tokenizer.encode("a")[:1] == [bos_id]
    return [*([bos_id] if bos else []), *ids[int(has_bos) :]]


def missing_text(message: Mapping[str, Any]) -> str | None:
    """Say what a message has in place of text; None where it has text, or tool calls, which templates handle.

    Most templates write any content as it is: null as None, a list with its brackets."""
    content = message.get("content")
    if isinstance(content, str) or message.get("tool_calls") or message["role"] == "tool":
        return None
    return "missing" if "content" not in message else "null" if content is None else f"a {type(content).__name__}"


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def chat_text(tokenizer: Any, messages: list[Any]) -> str:
    """Render a conversation with the tokenizer's chat template, up to where the answer begins."""
    try:
        return render_chat(tokenizer, messages, add_generation_prompt=True)
    except Exception as failure:  # templates may raise anything
        raise SamplingError(f"the tokenizer's chat template fails: {first_line(failure)}") from None


def render_chat(tokenizer: Any, messages: Sequence[Any], **options: Any) -> str:
    """A conversation in the tokenizer's template: a program, which may loop for ever and is then ended by an exception."""
    late, this = threading.Event(), ctypes.c_ulong(threading.get_ident())

    def stop() -> None:
        late.set()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(this, ctypes.py_object(_TemplateLoops))

    watch = threading.Timer(_TEMPLATE_SECONDS, stop)
    watch.daemon = True
    watch.start()
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception:
        if late.is_set():  # Jinja makes another exception of it
            raise _TemplateLoops from None
        raise
    finally:
        watch.cancel()
        watch.join()  # what it raises comes here, and not later


def encode_prompt(tokenizer: Any, prompt: str | list[Any], bos: bool | None, *, chat: bool, source: object = None) -> list[int]:
    """The tokens before the text to write. Messages go through the chat template, and with `chat` every prompt does.

    source: the file of the messages, for the error."""
    is_chat = chat or isinstance(prompt, list)
    if is_chat:
        if not has_chat_template(tokenizer):
            raise SamplingError(
                "--chat: this tokenizer has no chat template; leave --chat out, or convert with another --tokenizer"
                if chat
                else f"{source}: has chat messages, and this tokenizer has no chat template; give prompts as text"
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
    room = min(room, _MOST_TOKENS)  # whatever a config promises
    if n_given + n_open > room:
        raise SamplingError(f"prompt of {n_given} tokens and {n_open} to write: the model reads at most {room}; shorten {cure}")


def policy_for(tokenizer: Any, policy: Policy, *, stop: bool, until_eos: bool, block_size: int | None = None) -> dict[str, Any]:
    """The policy fields that a tokenizer decides: which token ends a text. A text until EOS is written in blocks.

    block_size: of a block-diffusion model, which writes in blocks by itself."""
    eos_id = getattr(tokenizer, "eos_token_id", None) if stop else None
    if until_eos and policy.eos_id is None and eos_id is None:
        why = "the tokenizer has no EOS; give only a length" if stop else "EOS is set not to end it; leave one of the two out"
        raise SamplingError(f"a text until EOS: {why}")
    options: dict[str, Any] = {"eos_id": eos_id} if policy.eos_id is None else {}
    return options | ({"block": _BLOCK} if until_eos and policy.block is None and block_size is None else {})
