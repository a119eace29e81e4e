"""Bodies of requests and answers: OpenAI's fields, checked by pydantic, and ours under `sinkdlm`.

Every field that OpenAI defines is known. A field that this server cannot honour is refused unless its value is neutral. A field
that OpenAI does not define is refused too: it is a typing mistake, or an option that would be ignored. --lenient leaves it out.
"""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from sinkdlm.config.toml import suggest
from sinkdlm.errors import SamplingError
from sinkdlm.sampling.aliases import translate, words_for
from sinkdlm.sampling.unmasking import CACHES, DRAFTS, MOST_CANVASES, NAMED, ORDERS, REMASKS, SCHEDULES

# Names that were left out while this body was read, for --lenient; None: unknown names are refused.
ignored: ContextVar[list[str] | None] = ContextVar("ignored", default=None)
UNKNOWN = "unknown_field"
_LONGEST_NAME, _MOST_IGNORED = 64, 64  # characters of an unknown field's name that are repeated; such names in an answer
MOST_STOPS, LONGEST_STOP, MOST_PROMPTS = 16, 256, 64
_MOST_TOKENS, _MOST_MESSAGES, _MOST_PAIRS = 1 << 17, 1024, 16
MOST_LOGPROBS = 20
_INT64 = 2**63


def only(*neutral: Any) -> Any:
    """Declare a field that this server cannot honour: only neutral values pass. `exclude` marks it."""
    return Field(default=None, exclude=True, json_schema_extra={"enum": [None, *neutral]})


def _named(names: Iterable[str]) -> Any:
    return Field(json_schema_extra={"enum": list(names)}, max_length=64)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        fields = cls.model_fields
        words, left_out = words_for([*fields]), ignored.get()
        if left_out is not None and isinstance(data, Mapping) and cls is not Extras:
            data = cls._leave_out(data, [*fields, *words], left_out)
        for given in data if isinstance(data, Mapping) else ():
            if given not in fields and given not in words:
                name = str(given)[:_LONGEST_NAME]
                allowed = [key for key, field in fields.items() if not field.exclude]
                ours = "sinkdlm" in allowed and name in (*Extras.model_fields, *words_for([*Extras.model_fields]))
                cure = f"did you mean sinkdlm.{name}? allowed: {', '.join(allowed)}" if ours else suggest(name, [*allowed, *words])
                raise PydanticCustomError(UNKNOWN, "unknown field; {cure}", {"field": name, "cure": cure})
        if not isinstance(data, Mapping) or words.keys().isdisjoint(data):
            return data
        try:
            return translate(data, [*fields])
        except SamplingError as failure:
            raise PydanticCustomError("together", "{why}", {"why": str(failure)}) from None

    @classmethod
    def _leave_out(cls, data: Mapping[Any, Any], known: list[str], left_out: list[str]) -> dict[Any, Any]:
        """Move what other servers have beside OpenAI's fields to `sinkdlm` where we have it there, and leave the rest out."""
        ours = [*Extras.model_fields, *words_for([*Extras.model_fields])] if "sinkdlm" in known else []
        unknown = {name: value for name, value in data.items() if name not in known}
        kept = {name: value for name, value in data.items() if name in known}
        if moved := {name: value for name, value in unknown.items() if name in ours and value is not None}:
            given = kept.get("sinkdlm") or {}
            kept["sinkdlm"] = {**moved, **given} if isinstance(given, Mapping) else given
        left_out += [str(name)[:_LONGEST_NAME] for name in unknown if name not in ours][: _MOST_IGNORED - len(left_out)]
        return kept

    @field_validator("*", mode="before")
    @classmethod
    def _check_neutral(cls, value: Any, info: ValidationInfo) -> Any:
        field: Any = cls.model_fields[str(info.field_name)]
        if field.exclude:
            allowed = field.json_schema_extra["enum"]
            if not any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in allowed):
                cure = " or ".join(["leave it out", *(f"give {same!r}" for same in allowed[1:])])
                raise PydanticCustomError("unsupported", "is not supported by this server; {cure}", {"cure": cure})
        return value


class Extras(Strict):
    """How a diffusion model writes. Fields given here replace those of the named policy."""

    policy: Annotated[str, _named(NAMED)] = "llada"
    steps: int | None = Field(default=None, ge=1, description="Denoising steps; by default one per token.")
    block: int | None = Field(
        default=None,
        ge=1,
        le=_INT64 - 1,
        description="Tokens per block, filled left to right; in block diffusion a part of its own.",
    )
    threshold: float | None = Field(default=None, gt=0, le=1, description="Commit all tokens this probable, at least one per step.")
    guidance: float | None = Field(default=None, ge=-1, le=100, description="Weight of classifier-free guidance; 0: none.")
    top_k: int | None = Field(default=None, ge=1, le=_INT64 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1, description="Draw tokens this probable, as a share of the likeliest.")
    repetition_penalty: float | None = Field(
        default=None, gt=0, le=100, description="Make tokens less likely that the canvas holds; 1: none."
    )
    order: Annotated[str, _named(ORDERS)] | None = None
    order_temperature: float | None = Field(default=None, ge=0, description="Draw the positions too; 0: the surest first.")
    schedule: Annotated[str, _named(SCHEDULES)] | None = None
    remask: Annotated[str, _named(REMASKS)] | None = None
    remask_rate: float | None = Field(default=None, gt=0, le=1)
    cache: Annotated[str, _named(CACHES)] | None = Field(
        default=None, description="auto: exact in block diffusion, else none. prefix, dual: approximate, with a block."
    )
    speculate: Annotated[int, Field(ge=1, le=MOST_CANVASES)] | Literal["auto"] | None = Field(
        default=None, description="Most canvases that a forward checks to take several steps; fewer where requests share it."
    )
    draft: Annotated[str, _named(DRAFTS)] | None = Field(default=None, description="With speculate: canvases in a line or a tree.")
    until_eos: bool = Field(default=False, description="Write block after block until EOS, at most max_tokens.")
    ignore_eos: bool = Field(default=False, description="Do not end a text at EOS.")
    regex: str | None = Field(default=None, min_length=1, max_length=4096, description="What is written matches it as a whole.")
    frames: bool = Field(default=False, description="With stream: send the canvas and confidences after every step.")
    inspect: bool = Field(default=False, description="Keep the request's frames for a while, for /v1/inspect.")

    def policy_fields(self) -> dict[str, Any]:
        return self.model_dump(exclude={"policy", "until_eos", "ignore_eos", "regex", "frames", "inspect"}, exclude_none=True)


class ResponseFormat(Strict):
    """json_object: an object of at most three levels. json_schema: {"name", "schema"}; the schema is kept, strict or not."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @property
    def wanted(self) -> Any:
        """The schema; None for text."""
        return None if self.type == "text" else {"type": "object"} if self.json_schema is None else self.json_schema["schema"]

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("together", "json_schema: goes with type = 'json_schema'; give both or neither")
        given = {} if self.json_schema is None else self.json_schema
        if self.json_schema is not None and not isinstance(given.get("schema"), dict):
            raise PydanticCustomError("together", "json_schema: expected an object with name and schema, and schema is an object")
        if unknown := given.keys() - {"name", "description", "schema", "strict"}:
            name = str(min(unknown))[:_LONGEST_NAME]
            raise PydanticCustomError(
                "together", "json_schema.{name}: unknown field; allowed: name, description, schema, strict", {"name": name}
            )
        return self


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


class _Body(Strict):
    """The fields of both completions and chat."""

    model: str = Field(max_length=256)
    n: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-_INT64, le=_INT64 - 1, description="The same request and seed draw the same noise.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, description="By default the policy's own, which is 0.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    user: str | None = Field(default=None, description="Accepted and not used.")
    frequency_penalty: Any = only(0)
    presence_penalty: Any = only(0)
    logit_bias: Any = only({})
    response_format: ResponseFormat | None = Field(default=None, description="JSON, or JSON that fits a schema.")
    sinkdlm: Extras = Field(default_factory=Extras)

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check_together(self) -> "_Body":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("together", "stream_options: only with stream = true")
        if self.sinkdlm.frames and not self.stream:
            raise PydanticCustomError("together", "sinkdlm.frames: only with stream = true; without it use sinkdlm.inspect")
        return self


# fail_fast: a list of a million mistakes would take seconds, and a gigabyte, to tell them all.
Ids = Annotated[list[Annotated[int, Field(ge=0, le=_INT64 - 1)]], Field(min_length=1, max_length=_MOST_TOKENS, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]


class CompletionRequest(_Body):
    prompt: str | Ids | Texts | ManyIds | None = ""
    suffix: str | None = Field(default=None, description="Given text after the gap; the model writes what is between.")
    max_tokens: int | None = Field(default=None, ge=1, description="Tokens to write; by default 64, or as many as fit.")
    echo: bool | None = None
    best_of: Any = only(1)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS, description="The written tokens' and this many likeliest.")

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt if self.prompt is not None else ""
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return [given] if is_one else given

    @model_validator(mode="after")
    def _check_echo(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise PydanticCustomError(
                "together", "logprobs: of what is written; the prompt that echo repeats has none; leave one out"
            )
        return self


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a chat. Clients send answers back with OpenAI's empty fields; a field that is not empty is refused."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": {"enum": [None, [], {}]}})

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=_MOST_MESSAGES, fail_fast=True)]
    name: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "Message":
        for name, value in (self.model_extra or {}).items():
            if value not in (None, [], {}):
                raise PydanticCustomError("unsupported", "{name} is not supported by this server; leave it out", {"name": name})
        return self

    def plain(self) -> dict[str, str]:
        """The message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        found = {"role": "system" if self.role == "developer" else self.role, "content": text}
        return found if self.name is None else {**found, "name": self.name}


def _check_parts(messages: Any) -> Any:
    """Before any of them is looked at: the limit of a list of parts holds for all lists together."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    if sum(len(content) for content in contents if isinstance(content, list)) > _MOST_MESSAGES:
        raise PydanticCustomError("parts", "more than {most} parts in all; join them", {"most": _MOST_MESSAGES})
    return messages


def _check_pairs(given: Any) -> Any:
    """Before any of them is looked at: pydantic counts them last."""
    if isinstance(given, dict) and len(given) > _MOST_PAIRS:
        raise PydanticCustomError("pairs", "has {n} entries; give at most {most}", {"n": len(given), "most": _MOST_PAIRS})
    return given


class ChatRequest(_Body):
    messages: Annotated[
        list[Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True), BeforeValidator(_check_parts)
    ]
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Tokens to write; by default 64, or as many as fit.")
    max_tokens: int | None = Field(default=None, ge=1, description="The older name of max_completion_tokens.")
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_check_pairs)] = Field(
        default=None, description="Accepted and not used."
    )
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    parallel_tool_calls: bool | None = None
    service_tier: Any = only("auto", "default")
    store: Any = only(False)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS, description="Of the likeliest tokens at each position.")
    modalities: Any = only(["text"])
    reasoning_effort: Any = only("none")
    verbosity: Any = only("medium")
    tools: Any = only([])
    tool_choice: Any = only("none", "auto")
    functions: Any = only([])
    function_call: Any = only("none", "auto")
    audio: Any = only()
    moderation: Any = only()
    prediction: Any = only()
    web_search_options: Any = only()

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _check_limits(self) -> "ChatRequest":
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("together", "max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("together", "top_logprobs: only with logprobs = true")
        return self


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timing(BaseModel):
    """Seconds since the request arrived."""

    queue_seconds: float = Field(description="Until its first step.")
    first_frame_seconds: float = Field(description="Until the end of its first step.")
    seconds: float = Field(description="Until now.")
    tokens_per_second: float = Field(description="Tokens of usage.completion_tokens a second, without the time in the queue.")


class Written(BaseModel):
    """What reproduces an answer, and what it cost."""

    seed: int
    steps: list[int] = Field(description="Denoising steps of each choice.")
    forwards: list[int] = Field(description="Forwards of the model for each choice; the two of guidance count as one.")
    accepted: list[int] = Field(description="Tokens of each choice beyond those of one step per forward; see speculate.")
    tokens_per_forward: float = Field(description="Tokens of usage.completion_tokens for each of the forwards.")
    timing: Timing
    policy: dict[str, Any]
    inspect: bool = Field(description="Whether /v1/inspect/{id} has its frames.")
    log_weights: list[float | None] | None = Field(default=None, description="With a constraint: log weight of each choice.")
    ignored: list[str] | None = Field(default=None, description="With --lenient: unknown fields, which had no effect.")


FinishReason = Literal["stop", "length"]


class Choice(BaseModel):
    index: int
    finish_reason: FinishReason


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(BaseModel):
    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None = None


class Answer(BaseModel):
    """The fields of answers of both completions and chat."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: Usage
    sinkdlm: Written


class Completion(Answer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatCompletion(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class Card(BaseModel):
    """A model. sinkdlm: its shape, its policies, and this server's limits."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sinkdlm"
    sinkdlm: dict[str, Any]


class Cards(BaseModel):
    object: Literal["list"] = "list"
    data: list[Card]


class Problem(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: Problem


class Health(BaseModel):
    status: Literal["ok", "draining", "failed"]
    models: list[str]
