"""Split rows of fine-tuning sets into prompt and response: plain pairs, chat messages, GSM8K in one or two stages.

Owns what is prompt and what is response, in text and in ids. The prompt is never masked; EOS ends every response.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sinkdlm.data.encoding import Encoder
from sinkdlm.data.inputs import missing_field
from sinkdlm.errors import DataError, first_line
from sinkdlm.text.prompts import missing_text, render_chat

KINDS = ("sft", "gsm8k-two-stage", "gsm8k-one-stage")
MARK = "####"  # before GSM8K's answer
FIELDS = {"sft": ("messages", "prompt", "response"), **dict.fromkeys(KINDS[1:], ("question", "answer"))}


class Draft(NamedTuple):
    """An example before tokenisation. `rest` is the response; with style "chat" it is the whole text, prompt included.

    plain: the tokenizer's BOS before the prompt. segments: BOS before each part of the prompt and before the response, as in the
    paper's GSM8K code. chat: rendered by the tokenizer's chat template, whose special tokens are parsed."""

    prompt: tuple[str, ...]
    rest: str
    style: Literal["plain", "segments", "chat"]


def drafts_of(kind: str, value: Any, tokenizer: Any, place: str) -> list[Draft]:
    """Return the examples of one row, in order. place: the row's file and line, for messages."""
    if kind == "sft":
        return _pairs(value, tokenizer, place)
    found = _gsm8k(value, place)
    if found is None:
        return []
    asked, thought, answer = f"Question: {found[0]}", f"Answer: {found[1]}", f"{MARK}{found[2]}"
    if kind == "gsm8k-one-stage":
        return [Draft((asked,), thought + answer, "segments")]
    return [Draft((asked,), thought, "segments"), Draft((asked, thought), answer, "segments")]


def _gsm8k(value: Any, place: str) -> tuple[str, str, str] | None:
    """Return question, thought and answer, cut at "||" and "####" with white space kept, as in the official sft/gsm8k_data.py.
    Lines with two of either give None, as there. Fields of an object give the same parts as a line."""
    if isinstance(value, str):
        if value.count("||") > 1 or value.count(MARK) > 1:
            return None
        question, bars, solution = value.partition("||")
        if not bars:
            raise DataError(f"{place}: no `||`; expected question||thought #### answer")
    else:
        question, solution = (_text(value, field, place).strip() for field in FIELDS["gsm8k-two-stage"])
    thought, mark, answer = solution.rpartition(MARK)
    if not mark:
        raise DataError(f"{place}: no `####` before the answer; expected question||thought #### answer")
    return (question, thought, answer) if isinstance(value, str) else (question, f"{thought.strip()} ", f" {answer.strip()}")


def _text(value: Mapping[str, Any], field: str, place: str) -> str:
    if field not in value:
        raise DataError(missing_field(place, [field], value, cure=""))
    if not isinstance(value[field], str):
        raise DataError(f"{place}: field {field} is {type(value[field]).__name__}, expected text")
    return str(value[field])


def _pairs(value: Any, tokenizer: Any, place: str) -> list[Draft]:
    if not isinstance(value, Mapping):
        raise DataError(f"{place}: a line of text; --kind sft reads rows with prompt and response, or messages")
    if value.get("messages") is not None:
        return _turns(value["messages"], tokenizer, place)
    if "prompt" not in value and "response" not in value:
        raise DataError(missing_field(place, ["prompt and response", "messages"], value, cure=""))
    return [Draft((_text(value, "prompt", place),), _text(value, "response", place), "plain")]


def _turns(messages: Any, tokenizer: Any, place: str) -> list[Draft]:
    """Make one example per assistant turn: everything before it is prompt."""
    if not isinstance(messages, list) or not all(isinstance(turn, Mapping) and "role" in turn for turn in messages):
        raise DataError(f"{place}: messages is not a list of objects with role and content")
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{place}: messages, but the tokenizer has no chat template; give prompt and response, or another --tokenizer"
        )
    for turn, message in enumerate(messages, start=1):
        found = missing_text(message)
        if found is not None:
            told = f"{place}: message {turn} ({message['role']}): content is {found}"
            raise DataError(f"{told}, expected text; give it as one, or leave the conversation out")
    drafts = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or turn == 0:
            continue
        try:
            prompt = render_chat(tokenizer, messages[:turn], add_generation_prompt=True)
            whole = render_chat(tokenizer, messages[: turn + 1])
        except Exception as failure:  # templates raise anything
            raise DataError(f"{place}: the tokenizer's chat template fails: {first_line(failure)}") from None
        # The turn ends with its EOS; a break that a template puts after it belongs to the next turn.
        ended = whole.rstrip()
        drafts.append(Draft((prompt,), ended if tokenizer.eos_token and ended.endswith(tokenizer.eos_token) else whole, "chat"))
    if not drafts:
        raise DataError(f"{place}: messages without an assistant turn after the first: there is no response to learn")
    return drafts


def encode_drafts(encoder: Encoder, drafts: Sequence[Draft], places: Callable[[int], str]) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, response ids) of each draft. places(i): file and line of draft i, for messages."""
    found: list[tuple[list[int], list[int]]] = [([], [])] * len(drafts)
    for style in ("plain", "segments", "chat"):
        chosen = [index for index, draft in enumerate(drafts) if draft.style == style]
        if not chosen:
            continue
        parse = style == "chat"
        parts = iter(encoder.encode([part for i in chosen for part in drafts[i].prompt], add_special=not parse, parse=parse))
        prompts = [[token for _ in drafts[index].prompt for token in _open(next(parts), encoder, parse)] for index in chosen]
        rests = encoder.encode([drafts[index].rest for index in chosen], add_special=style == "segments", parse=parse)
        for index, prompt, rest in zip(chosen, prompts, rests, strict=True):
            if parse and rest[: len(prompt)] != prompt:
                raise DataError(
                    f"{places(index)}: the prompt as the chat template renders it is not a prefix of the whole conversation, "
                    "so prompt and response cannot be told apart; use a template that keeps it, or give prompt and response"
                )
            if parse:
                rest = rest[len(prompt) :]
            found[index] = prompt, rest if rest[-1:] == [encoder.eos_id] else [*rest, encoder.eos_id]
    return found


def _open(ids: list[int], encoder: Encoder, parse: bool) -> list[int]:
    """A part of a prompt, without the EOS that some tokenizers put after every text."""
    return ids[:-1] if not parse and ids[-1:] == [encoder.eos_id] else ids
