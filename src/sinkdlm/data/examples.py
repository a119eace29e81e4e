"""Rows of fine-tuning sets as prompt and response: plain pairs, chat messages, GSM8K in one or two stages.

Owns what is prompt and what is response, in text and in ids. The prompt is never masked; EOS closes every response.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sinkdlm.data.encoding import Encoder
from sinkdlm.data.inputs import missing_field
from sinkdlm.errors import DataError, first_line
from sinkdlm.text.prompts import missing_text

KINDS = ("sft", "gsm8k-two-stage", "gsm8k-one-stage")
MARK = "####"  # before GSM8K's answer
FIELDS = {"sft": ("messages", "prompt", "response"), **dict.fromkeys(KINDS[1:], ("question", "answer"))}


class Draft(NamedTuple):
    """An example before tokenisation. `rest` is the response; of style "chat", the whole text, prompt included.

    plain: the tokenizer's own beginning (BOS) before the prompt. segments: before both, as the paper's GSM8K code has it.
    chat: rendered by the tokenizer's chat template, whose special tokens are meant."""

    prompt: str
    rest: str
    style: Literal["plain", "segments", "chat"]


def drafts_of(kind: str, value: Any, tokenizer: Any, place: str) -> list[Draft]:
    """The examples of one row, in order. place: where the row stands, for messages."""
    if kind == "sft":
        return _pairs(value, tokenizer, place)
    question, thought, answer = _gsm8k(value, place)
    asked = f"Question: {question}"
    if kind == "gsm8k-one-stage":
        return [Draft(asked, f"Answer: {thought} {MARK} {answer}", "segments")]
    thinks = Draft(asked, f"Answer: {thought}", "segments")
    return [thinks, Draft(f"{asked} Answer: {thought}", f"{MARK} {answer}", "segments")]


def _gsm8k(value: Any, place: str) -> tuple[str, str, str]:
    """Question, thought, answer. The spaces around "||" and before "####" belong to neither side; the answer keeps its end,
    the line's break where a line has one."""
    if isinstance(value, str):
        question, bars, solution = value.partition("||")
        if not bars:
            raise DataError(f"{place}: no `||`; expected question||thought #### answer")
    else:
        question, solution = (_text(value, field, place) for field in FIELDS["gsm8k-two-stage"])
    thought, mark, answer = solution.rpartition(MARK)
    if not mark:
        raise DataError(f"{place}: no `####` before the answer; expected question||thought #### answer")
    return question.strip(), thought.strip(), answer.lstrip(" ")


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
    return [Draft(_text(value, "prompt", place), _text(value, "response", place), "plain")]


def _turns(messages: Any, tokenizer: Any, place: str) -> list[Draft]:
    """One example for each assistant turn: all before it is prompt."""
    if not isinstance(messages, list) or not all(isinstance(turn, Mapping) and "role" in turn for turn in messages):
        raise DataError(f"{place}: messages is no list of objects with role and content")
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
            prompt = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
            whole = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
        except Exception as failure:  # templates raise what they like
            raise DataError(f"{place}: the tokenizer's chat template fails: {first_line(failure)}") from None
        # The turn ends with its EOS; a break that a template puts after it belongs to the next turn.
        ended = whole.rstrip()
        drafts.append(Draft(prompt, ended if tokenizer.eos_token and ended.endswith(tokenizer.eos_token) else whole, "chat"))
    if not drafts:
        raise DataError(f"{place}: messages without an assistant turn after the first: there is no response to learn")
    return drafts


def encode_drafts(encoder: Encoder, drafts: Sequence[Draft], places: Callable[[int], str]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of each draft; places gives where the draft at an index stands."""
    found: list[tuple[list[int], list[int]]] = [([], [])] * len(drafts)
    for style in ("plain", "segments", "chat"):
        chosen = [index for index, draft in enumerate(drafts) if draft.style == style]
        if not chosen:
            continue
        parse = style == "chat"
        prompts = encoder.encode([drafts[index].prompt for index in chosen], add_special=not parse, parse=parse)
        rests = encoder.encode([drafts[index].rest for index in chosen], add_special=style == "segments", parse=parse)
        for index, prompt, rest in zip(chosen, prompts, rests, strict=True):
            if parse and rest[: len(prompt)] != prompt:
                raise DataError(
                    f"{places(index)}: the chat template with its generation prompt is no beginning of the whole conversation, "
                    "so prompt and response cannot be told apart; use a template that keeps it, or give prompt and response"
                )
            if parse:
                rest = rest[len(prompt) :]
            elif prompt[-1:] == [encoder.eos_id]:
                prompt = prompt[:-1]  # a tokenizer that closes every text by itself
            found[index] = prompt, rest if rest[-1:] == [encoder.eos_id] else [*rest, encoder.eos_id]
    return found
