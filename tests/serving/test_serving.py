"""The server as its users meet it: OpenAI's own client, plain HTTP, and attacks."""

import gc
import json
import re
import socket
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import torch

from evaluated import padded_lm, small_lm
from sinkdlm.sampling import policy_of
from sinkdlm.serving import app
from sinkdlm.serving.engine import LONGEST_RETRY, Capacity
from sinkdlm.serving.served import Limits
from sinkdlm.text.generate import Job, write
from sinkdlm.text.prompts import policy_for
from sites import PROMPT, SECONDS, bytes_lm, complete, letters_lm, ours, serving


@pytest.fixture(scope="module")
def lms():
    return {"letters": letters_lm(seed=3), "bytes": bytes_lm(seed=1)}


@pytest.fixture(scope="module")
def running(lms):
    with serving(lms, limits=Limits(n=8, steps=200)) as found:
        yield found


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as found:
        yield found


@pytest.fixture(scope="module")
def http(running):
    with httpx.Client(base_url=running.url, timeout=SECONDS) as found:
        yield found


def sampled(lm, job, **options):
    """What `sinkdlm sample` writes."""
    policy = policy_of("llada", **options)
    policy = policy_of(policy, **policy_for(lm.tokenizer, policy, stop=True, until_eos=False))
    return write(lm, job, policy)["samples"]


# -- OpenAI's client --------------------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_command_line_writes(client, lms):
    given = {"temperature": 0.8, "seed": 5, "n": 3}
    answer = complete(client, **given, **ours(steps=6))
    expected = sampled(lms["letters"], Job(PROMPT, length=12, n=3, seed=5), temperature=0.8, steps=6)
    assert [PROMPT + choice.text for choice in answer.choices] == [row["text"] for row in expected]
    assert len({choice.text for choice in answer.choices}) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.object == "text_completion"
    assert answer.model == "letters"
    written = sum(len(choice.text) for choice in answer.choices)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, written)
    assert answer.usage.total_tokens == 8 + written
    assert answer.sinkdlm["seed"] == 5
    assert answer.sinkdlm["steps"] == [row["steps"] for row in expected]
    assert answer.sinkdlm["policy"]["steps"] == 6
    assert answer.sinkdlm["forwards"] == answer.sinkdlm["steps"]
    assert answer.sinkdlm["accepted"] == [0, 0, 0]
    assert answer.sinkdlm["tokens_per_forward"] == pytest.approx(written / sum(answer.sinkdlm["forwards"]))
    timing = answer.sinkdlm["timing"]
    assert 0 <= timing["queue_seconds"] < timing["first_frame_seconds"] < timing["seconds"] < SECONDS
    assert timing["tokens_per_second"] == pytest.approx(written / (timing["seconds"] - timing["queue_seconds"]))
    assert re.fullmatch("fp_[0-9a-f]{12}", answer.system_fingerprint)


@pytest.mark.parametrize("bos", [None, False])
def test_prompts_begin_as_those_of_the_command_line(bos):
    lm = letters_lm(seed=3, bos=True)
    with serving({"letters": lm}, bos=bos) as found, openai.OpenAI(base_url=f"{found.url}/v1", api_key="none") as client:
        answer = complete(client, temperature=0.8, seed=5)
        assert answer.usage.prompt_tokens == len(PROMPT) + (bos is None)
        expected = sampled(lm, Job(PROMPT, length=12, seed=5, bos=bos), temperature=0.8)
        assert [PROMPT + choice.text for choice in answer.choices] == [row["text"] for row in expected]
        ids = lm.tokenizer.encode(PROMPT, add_special_tokens=False)
        assert complete(client, ids).usage.prompt_tokens == len(PROMPT)  # tokens are taken as they are
        chat = client.chat.completions.create(model="letters", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
        assert chat.usage.prompt_tokens == len("user: hi\nassistant: ")


def test_the_example_of_the_page_works_as_it_stands(capsys):
    """With the model that it names, which has no chat template."""
    page = (Path(__file__).parents[2] / "docs/howto/serve.md").read_text()
    (example,) = re.findall(r"```python\n(import openai\n.*?)```", page, re.DOTALL)
    assert 'model="nano-sink"' in example
    with serving({"nano-sink": small_lm(seed=3)}) as found:
        exec(compile(example.replace("http://127.0.0.1:8000", found.url), "docs/howto/serve.md", "exec"), {})
    whole, _, streamed = capsys.readouterr().out.partition("\n")
    assert "completion_tokens=" in whole
    assert streamed


def test_ids_without_a_token_are_never_written():
    lm = padded_lm()
    with serving({"letters": lm}) as found, openai.OpenAI(base_url=f"{found.url}/v1", api_key="none") as client:
        answer = complete(client, stream=True, **ours(frames=True, ignore_eos=True))
        frames = [chunk.sinkdlm["frame"]["tokens"] for chunk in answer if "frame" in (getattr(chunk, "sinkdlm", None) or {})]
    assert len(frames) == 13
    assert max(frames[-1]) < len(lm.tokenizer)


def test_top_p_without_a_temperature_is_refused_and_beside_0_taken(client):
    with pytest.raises(openai.BadRequestError, match=r"top_p = 0.9: has no effect at temperature 0.*give a temperature above 0"):
        complete(client, top_p=0.9)
    assert complete(client, top_p=0.9, temperature=0).choices[0].text == complete(client, top_p=1).choices[0].text


def test_a_seed_repeats_and_none_does_not(client):
    drawn = {"temperature": 1.0, "max_tokens": 24}
    texts = [complete(client, **drawn, seed=7).choices[0].text for _ in range(2)]
    assert texts[0] == texts[1]
    assert complete(client, **drawn, seed=-8).choices[0].text != texts[0]
    unseeded = [complete(client, **drawn) for _ in range(2)]
    assert unseeded[0].choices[0].text != unseeded[1].choices[0].text
    assert complete(client, **drawn, seed=unseeded[0].sinkdlm["seed"]).choices[0].text == unseeded[0].choices[0].text


def test_the_first_of_several_is_the_one_alone(client):
    several = complete(client, temperature=1.0, seed=11, n=3)
    assert several.choices[0].text == complete(client, temperature=1.0, seed=11).choices[0].text


def test_chat_goes_through_the_template(client, lms):
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answer = client.chat.completions.create(model="letters", messages=messages, max_completion_tokens=10, seed=1, temperature=0.5)
    text = "system: be brief\nuser: hi\nassistant: "
    assert answer.choices[0].message.content == complete(client, text, max_tokens=10, seed=1, temperature=0.5).choices[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(lms["letters"].tokenizer.encode(text))
    assert answer.object == "chat.completion"
    again = [*messages, answer.choices[0].message.model_dump(), {"role": "user", "content": "so?"}]  # as clients send it back
    assert client.chat.completions.create(model="letters", messages=again, max_tokens=4).choices[0].message.content is not None


@pytest.mark.parametrize("extras", [{}, {"block": 4}, {"block": 1}, {"policy": "fast", "block": 6}, {"policy": "dream"}], ids=str)
@pytest.mark.parametrize("model", ["letters", "bytes"])
def test_a_stream_adds_up_to_the_answer(client, model, extras):
    """Also where a character spans several tokens, and some are broken."""
    given = {"model": model, "max_tokens": 20, "temperature": 1.0, "seed": 4, "n": 2, **ours(**extras)}
    whole = complete(client, **given)
    chunks = list(complete(client, **given, stream=True, stream_options={"include_usage": True}))
    texts, reasons, n_pieces = ["", ""], [None, None], 0
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert chunk.usage is None
        assert reasons[choice.index] is None
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
        n_pieces += bool(choice.text)
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    if extras.get("block") == 1 and model == "letters":
        assert n_pieces == sum(len(text) for text in texts)


def test_a_streamed_chat_adds_up_to_the_answer(client):
    given = {"model": "letters", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "temperature": 1.0, "seed": 2}
    whole = client.chat.completions.create(**given)
    chunks = list(client.chat.completions.create(**given, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].sinkdlm["seed"] == 2
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_stop_ends_the_text_before_it(client):
    given = {"max_tokens": 30, "temperature": 1.0, "seed": 6, **ours(block=1, ignore_eos=True)}
    whole = complete(client, **given).choices[0]
    assert whole.finish_reason == "length"
    stop = whole.text[14:16]
    for stops in (stop, ["never", stop]):
        cut = complete(client, **given, stop=stops)
        assert cut.choices[0].text == whole.text.split(stop)[0]
        assert cut.choices[0].finish_reason == "stop"
        assert cut.sinkdlm["steps"][0] < 30  # what follows is not written at all
        streamed = complete(client, **given, stop=stops, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == cut.choices[0].text


def test_a_gap_is_filled_between_prompt_and_suffix(client, lms):
    answer = complete(client, "a dog ", suffix=" fast.", max_tokens=8, seed=3, temperature=0.7, echo=True)
    (expected,) = sampled(lms["letters"], Job("a dog ", suffix=" fast.", length=8, seed=3), temperature=0.7)
    assert expected["text"].startswith(answer.choices[0].text)
    assert expected["text"].endswith(" fast.")
    assert answer.usage.prompt_tokens == 12


def test_prompts_may_be_several_and_in_tokens(client, lms):
    ids = lms["letters"].tokenizer.encode(PROMPT)
    by_text = complete(client, [PROMPT, "why "], n=2, seed=1, temperature=1.0)
    assert [choice.index for choice in by_text.choices] == [0, 1, 2, 3]
    assert complete(client, ids, n=2, seed=1, temperature=1.0).choices == by_text.choices[:2]
    by_ids = complete(client, [ids, lms["letters"].tokenizer.encode("why ")], n=2, seed=1, temperature=1.0)
    assert by_ids.choices == by_text.choices


def test_a_prompt_that_is_null_is_not_there(client):
    assert complete(client, None, seed=1, max_tokens=8).choices == complete(client, "", seed=1, max_tokens=8).choices


def test_an_open_end_grows_by_blocks(client, lms):
    answer = complete(client, max_tokens=40, temperature=1.0, seed=9, **ours(until_eos=True, block=4))
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 40


def test_models_are_listed(client, lms):
    assert [card.id for card in client.models.list()] == ["letters", "bytes"]
    card = client.models.retrieve("letters")
    assert card.sinkdlm["context_length"] == 256
    assert card.sinkdlm["chat"]
    assert not client.models.retrieve("bytes").sinkdlm["chat"]
    assert card.sinkdlm["limits"] == {"length": 256, "steps": 200, "n": 8, "seconds": 300.0}


# -- mistakes ---------------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "model": (404, {"model": "none"}, "there is letters, bytes"),
    "n": (400, {"n": 9}, "at most 8"),
    "max_tokens": (400, {"max_tokens": 250}, "at most 256"),
    "huge": (400, {"max_tokens": 10**12}, "at most 256"),
    "temperature": (400, {"temperature": 3}, "temperature"),
    "logprobs": (400, {"logprobs": 21}, "less than or equal to 20"),
    "logprobs of a prompt": (400, {"logprobs": 2, "echo": True}, "the prompt that echo repeats has none"),
    "bias": (400, {"logit_bias": {"3": 5}}, "not supported"),
    "penalty": (400, {"frequency_penalty": 0.5}, "not supported"),
    "stop": (400, {"stop": [""]}, "stop"),
    "prompt": (400, {"prompt": [3, 400]}, "token 400"),
    "mask": (400, {"prompt": [3, 87]}, "mask token"),
    "steps": (400, {"sinkdlm": {"steps": 201}}, "at most 200"),
    "blocks": (400, {"sinkdlm": {"steps": 2, "block": 2}}, "fewer than the 6 blocks"),
    "policy": (400, {"sinkdlm": {"policy": "none"}}, "smdm-origin"),
    "together": (400, {"sinkdlm": {"remask": "cap"}}, "ancestral"),
    "unknown": (400, {"sinkdlm": {"step": 3}}, "sinkdlm.step: unknown field; did you mean steps? allowed: policy, steps, block,"),
    "unknown too": (400, {"promt": "x"}, "promt: unknown field; did you mean prompt? allowed: model, n, seed,"),
    "unknown here": (400, {"steps": 3}, "steps: unknown field; did you mean sinkdlm.steps? allowed: model, n, seed,"),
    "unknown option": (
        400,
        {"stream_options": {"usage": True}},
        "stream_options.usage: unknown field; allowed: include_usage, include_obfuscation",
    ),
    "unknown and long": (400, {"x" * 5000: 1}, "x: unknown field; allowed: model, n, seed,"),
    "frames": (400, {"sinkdlm": {"frames": True}}, "stream"),
    "grows": (400, {"sinkdlm": {"until_eos": True}, "suffix": "x"}, "open end"),
    "grows on": (400, {"sinkdlm": {"until_eos": True, "ignore_eos": True}}, "a text until EOS: EOS is set not to end it"),
    "options": (400, {"stream_options": {"include_usage": True}}, "stream"),
    "surrogate": (400, {"prompt": "\ud800"}, "hex escape at line 1 column"),
    "surrogate key": (400, {"\udc00": 1}, "hex escape at line 1 column"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_openais_shape(http, name):
    status, fields, words = MISTAKES[name]
    body = {"model": "letters", "prompt": PROMPT, "max_tokens": 12, **fields}
    answer = http.post("/v1/completions", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == status
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"], error
    assert "Extra inputs" not in error["message"]
    assert error["type"] == "invalid_request_error"


def test_a_lenient_server_leaves_out_what_it_does_not_know(lms, client):
    """Fields of other servers that have the same name under `sinkdlm` are taken; the answer names the rest."""
    theirs = {"min_p": 0.1, "repetition_penalty": 1.4, "ignore_eos": True, "best_of_all": 3, "guided_regex": None, "x" * 99: 1}
    given = {"temperature": 0.9, "seed": 3}
    expected = complete(client, **given, **ours(min_p=0.1, repetition_penalty=1.4, ignore_eos=True))
    assert "ignored" not in expected.sinkdlm or expected.sinkdlm["ignored"] is None
    with serving(lms, lenient=True) as found, openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as lenient:
        answer = complete(lenient, **given, extra_body=theirs)
        assert answer.choices == expected.choices
        assert answer.sinkdlm["ignored"] == ["best_of_all", "guided_regex", "x" * 64]
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = list(complete(lenient, stream=True, stream_options=options, **given))
        assert chunks[-2].sinkdlm["ignored"] == ["continuous_usage_stats"]
        assert complete(lenient, **given).sinkdlm["ignored"] == []
        for wrong in ({"sinkdlm": {"blok": 3}}, {"logit_bias": {"3": 5}}, {"min_p": 7}):  # ours, and OpenAI's, mean something
            with pytest.raises(openai.BadRequestError):
                complete(lenient, extra_body=wrong)


def test_an_unknown_field_is_named_with_what_is_allowed(http):
    """The error gives the place, also within a chat; the allowed fields it lists hold none that would be refused."""
    turn = {"role": "user", "content": [{"type": "text", "text": "x", "txt": "y"}]}
    asked = {"model": "letters", "messages": [{"role": "user", "content": "x"}]}
    for fields, param, words in (
        ({"max_completion_token": 3}, "max_completion_token", "did you mean max_completion_tokens?"),
        ({"tool": []}, "tool", "allowed: model, n, seed, stop,"),
        ({"messages": [turn]}, "messages.0.content.0.txt", "unknown field; did you mean text? allowed: type, text"),
        ({"sinkdlm": {"blok": 3}}, "sinkdlm.blok", "did you mean block?"),
    ):
        error = http.post("/v1/chat/completions", json=asked | fields).json()["error"]
        assert error["param"] == param
        assert words in error["message"]
        assert "tools" not in error["message"]
        assert len(error["message"]) < 1000  # whole


def test_openais_client_raises_its_own_errors(client):
    with pytest.raises(openai.NotFoundError) as failed:
        complete(client, model="none")
    assert failed.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, presence_penalty=1.0)
    assert refused.value.param == "presence_penalty"
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="bytes", messages=[{"role": "user", "content": "x"}])
    image = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="letters", messages=[{"role": "user", "content": image}])
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="letters",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )


def test_fields_that_ask_for_nothing_pass(client):
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "user": "me", "best_of": 1, "suffix": ""}
    assert complete(client, seed=1, **neutral).choices == complete(client, seed=1).choices
    client.chat.completions.create(
        model="letters",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=4,
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        logprobs=False,
        store=False,
        modalities=["text"],
        metadata={"a": "b"},
        parallel_tool_calls=True,
        service_tier="auto",
        verbosity="medium",
    )


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/none", None, 404),
        ("GET", "/v1/models/none", None, 404),
        ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", None, 404),
        ("GET", "/page/..%2f..%2fapp.py", None, 404),
        ("GET", "/page/%2fetc%2fpasswd", None, 404),
        ("GET", "/page/none.js", None, 404),
        ("DELETE", "/v1/completions", None, 405),
        ("POST", "/v1/completions", "{", 400),
        ("POST", "/v1/completions", "[]", 400),
        ("POST", "/v1/completions", "[" * 100_000, 400),
        ("POST", "/v1/completions", '{"seed": ' + "9" * 5000 + "}", 400),
        ("POST", "/v1/completions", '{"temperature": NaN}', 400),
        ("POST", "/v1/completions", b"\xff\xfe", 400),
        ("POST", "/v1/completions", b"x" * (1 << 20) + b"x", 413),
        ("GET", "/v1/inspect/none", None, 404),
    ],
)
def test_whatever_is_sent_the_answer_has_openais_shape(http, method, path, content, status):
    answer = http.request(method, path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_without_a_length_is_measured_as_it_comes(http):
    answer = http.post("/v1/completions", content=(b"x" * 65536 for _ in range(20)), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_page_of_another_site_gets_nothing(lms, running, http):
    """No CORS, no HTML form accepted as JSON, and with `hosts` only the server's own names."""
    body = json.dumps({"model": "letters", "prompt": PROMPT})
    told = http.post("/v1/completions", content=body, headers={"content-type": "text/plain"})
    assert told.status_code == 400
    assert "Content-Type: application/json" in told.json()["error"]["message"]  # what curl -d leaves out
    answer = http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers
    assert http.options("/v1/completions", headers={"origin": "https://evil.example"}).status_code == 405
    with serving(lms, hosts=frozenset({"127.0.0.1"})) as local, httpx.Client(base_url=local.url, timeout=SECONDS) as named:
        assert named.get("/v1/models").status_code == 200
        assert named.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert named.get("/v1/models", headers={"host": "127.0.0.1.evil.example:80"}).status_code == 403


def test_a_key_is_asked_for_everywhere_but_at_the_door(lms):
    with serving(lms, api_key="s3cret", origins=["https://page.example"]) as found:
        with httpx.Client(base_url=found.url, timeout=SECONDS) as http:
            for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/inspect/x", "/none"):
                answer = http.get(path)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/v1/models", headers={"authorization": "Bearer s3cre"}).status_code == 401
            assert http.get("/v1/models", headers={"authorization": b"Bearer \xff\xfe"}).status_code == 401
            assert http.get("/health").status_code == 200
            asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
            assert http.options("/v1/completions", headers=asked).status_code == 200
            refused = http.get("/v1/models", headers={"origin": "https://page.example"})
            assert refused.headers["access-control-allow-origin"] == "https://page.example"
        with openai.OpenAI(base_url=f"{found.url}/v1", api_key="s3cret", max_retries=0) as client:
            assert complete(client).choices
        with (
            openai.OpenAI(base_url=f"{found.url}/v1", api_key="other", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            complete(client)


# -- under way --------------------------------------------------------------------------------------------------------------------


class Slow:
    """A model with slow forwards, or forwards that wait for the gate, so that something can happen in between."""

    def __init__(self, lm, seconds=0.0):
        self.model, self.forwards, self.gate = lm.model, 0, threading.Event()
        self._handle = lm.model.register_forward_pre_hook(self._wait)
        self._seconds = seconds
        self.gate.set()

    def _wait(self, *_):
        self.forwards += 1
        time.sleep(self._seconds)
        assert self.gate.wait(SECONDS)

    @contextmanager
    def held(self):
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()


def until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def narrow():
    """Room for one running and one waiting request."""
    lm = letters_lm(seed=4)
    watch = Slow(lm)
    with serving({"letters": lm}, capacity=Capacity(rows=1, waiting=1)) as found:
        found.watch, found.engine = watch, found.site.models["letters"].engine
        yield found


def test_when_all_places_are_taken_a_client_is_told_when_to_come_back(narrow):
    body = {"model": "letters", "prompt": PROMPT, "max_tokens": 16}
    answers = []
    with httpx.Client(base_url=narrow.url, timeout=SECONDS) as http:
        threads = [threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body))) for _ in range(2)]
        with narrow.watch.held():
            threads[0].start()
            until(lambda: len(narrow.engine.running) == 1)
            threads[1].start()
            until(lambda: len(narrow.engine.waiting) == 1)
            told = http.post("/v1/completions", json=body)
        for thread in threads:
            thread.join()
        assert told.status_code == 429
        assert told.json()["error"]["code"] == "queue_full"
        assert 1 <= int(told.headers["retry-after"]) <= LONGEST_RETRY
        assert narrow.server.config.timeout_keep_alive > LONGEST_RETRY  # a client that waits so long finds its connection open
        assert [answer.status_code for answer in answers] == [200, 200]
        assert 'sinkdlm_requests_total{path="/v1/completions",status="429"}' in http.get("/metrics").text


def test_an_answer_says_whether_its_cache_was_used():
    """A row whose cache has no room is written without one."""
    lms, ask = {"letters": letters_lm(seed=4)}, {"policy": "fast", "block": 4}
    body = {"model": "letters", "prompt": PROMPT, "max_tokens": 8, "seed": 1}
    for room, cache in ((None, "dual"), (1, "none")):
        with serving(lms, capacity=Capacity(cache_bytes=room)) as found, httpx.Client(base_url=found.url, timeout=SECONDS) as http:
            told, again = (
                http.post("/v1/completions", json={**body, "sinkdlm": extras}).json() for extras in (ask, {**ask, "cache": cache})
            )
        assert told["sinkdlm"]["policy"]["cache"] == cache
        assert told["choices"] == again["choices"]  # what it says gives the same text again


def ask_and_leave(narrow, **more):
    """The client leaves during the first forward."""
    body = {"model": "letters", "prompt": PROMPT, "max_tokens": 150, "sinkdlm": {"ignore_eos": True}, **more}
    sent = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}\r\n\r\n"
    )
    address = urlsplit(narrow.url)
    before = narrow.watch.forwards
    with narrow.watch.held():
        with socket.create_connection((address.hostname, address.port), SECONDS) as client:
            client.sendall(head.encode() + sent)
            until(lambda: narrow.watch.forwards == before + 1)
        until(lambda: narrow.site.n_inside == 0)  # the server has noticed
    until(lambda: len(narrow.engine.running) == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_computed_for_a_client_that_left(narrow, stream):
    before = narrow.watch.forwards
    ask_and_leave(narrow, stream=stream)
    assert narrow.watch.forwards == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_request_held_is_free_when_it_ends(narrow, monkeypatch, stream):
    """Answered requests, or those left before they began, are freed at once, not only by the garbage collector."""
    kept = []

    class Watched(app.Exchange):
        def submit(self, **given):
            super().submit(**given)
            kept.extend([weakref.ref(self), weakref.ref(self.ticket)])

    monkeypatch.setattr(app, "Exchange", Watched)
    gc.disable()
    try:
        body = {"model": "letters", "prompt": PROMPT, "max_tokens": 4, "n": 2, "stream": stream, "sinkdlm": {"inspect": True}}
        assert httpx.post(f"{narrow.url}/v1/completions", json=body, timeout=SECONDS).status_code == 200
        ask_and_leave(narrow, stream=stream, n=2)
        assert len(kept) == 4
        until(lambda: [one() for one in kept] == [None] * 4)
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def slow():
    lm = letters_lm(seed=4)
    Slow(lm, 0.02)
    with serving({"letters": lm}, capacity=Capacity(rows=1, waiting=1, seconds=1.5)) as found:
        yield found


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_told_so(slow, stream):
    """The request needs 200 steps of at least 20 ms, and may take 1.5 s."""
    body = {"model": "letters", "max_tokens": 240, "stream": stream, "sinkdlm": {"ignore_eos": True}}
    with httpx.Client(base_url=slow.url, timeout=SECONDS) as http:
        answer = http.post("/v1/completions", json=body)
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")
        error = json.loads(answer.text.split("data: ")[-2])["error"]
    else:
        assert answer.status_code == 504
        error = answer.json()["error"]
    assert error["code"] == "timeout"
    assert "1.5 s" in error["message"]


def test_a_request_that_breaks_the_model_gets_500_and_no_details(monkeypatch):
    lm = letters_lm(seed=5)
    with serving({"letters": lm}) as found, httpx.Client(base_url=found.url, timeout=SECONDS) as http:

        def fail(*_):
            raise RuntimeError("a secret of the model")

        handle = lm.model.register_forward_pre_hook(fail)
        body = {"model": "letters", "prompt": PROMPT, "max_tokens": 4}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
        handle.remove()
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.get("/health").json() == {"status": "ok", "models": ["letters"]}


@pytest.mark.parametrize("extras", [{}, {"ignore_eos": True}], ids=str)
def test_a_model_that_overflows_is_no_mistake_of_the_client(extras):
    """Finite weights with NaN outputs: status 500 and the cure, in a stream too."""
    lm = letters_lm(seed=5)
    with torch.no_grad():
        lm.model.lm_head.weight.fill_(1.7e308)
    body = {"model": "letters", "prompt": PROMPT, "max_tokens": 4, "sinkdlm": extras}
    with serving({"letters": lm}) as found, httpx.Client(base_url=found.url, timeout=SECONDS) as http:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "model_failed")
        assert "no numbers" in error["message"]
        assert "--dtype float32" in error["message"]
        streamed = http.post("/v1/completions", json={**body, "stream": True}).text
        assert json.loads(streamed.splitlines()[-4].removeprefix("data: "))["error"] == error
        assert http.get("/health").json()["status"] == "ok"


def test_while_it_drains_what_runs_is_finished_and_nothing_is_begun():
    lm = letters_lm(seed=4)
    Slow(lm, 0.02)
    body = {"model": "letters", "prompt": PROMPT, "max_tokens": 20}
    with serving({"letters": lm}) as found, httpx.Client(base_url=found.url, timeout=SECONDS) as http:
        answers = []
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
        thread.start()
        until(lambda: len(found.site.models["letters"].engine.running))
        found.site.draining = True
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/health").status_code == 503
        thread.join()
        assert answers[0].status_code == 200
        assert len(answers[0].json()["choices"][0]["text"]) > 0


def test_a_server_is_healthy_and_counts(running, client, http):
    assert http.get("/health").json() == {"status": "ok", "models": ["letters", "bytes"]}
    before = metrics(http)
    complete(client, n=2, max_tokens=5, **ours(ignore_eos=True))
    after = metrics(http)
    assert http.get("/metrics").headers["content-type"].startswith("text/plain; version=")

    def grown(name):
        return after[name] - before.get(name, 0)

    assert grown('sinkdlm_requests_total{path="/v1/completions",status="200"}') == 1
    assert grown('sinkdlm_completion_tokens_total{model="letters"}') == 10
    assert grown('sinkdlm_prompt_tokens_total{model="letters"}') == 8
    assert grown('sinkdlm_batch_rows_sum{model="letters"}') == 10
    assert grown('sinkdlm_request_seconds_count{model="letters"}') == 1
    assert grown('sinkdlm_queue_seconds_count{model="letters"}') == 1
    assert after['sinkdlm_waiting_requests{model="letters"}'] == 0
    assert after['sinkdlm_running_rows{model="letters"}'] == 0


def metrics(http):
    lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}
