"""Log-probabilities in OpenAI's shapes, through its own client: whole and streamed."""

import math

import openai
import pytest
import torch

from sinkdlm.sampling import Request, policy_of, start, step
from sinkdlm.serving.logprobs import name_token
from sinkdlm.serving.transcript import Transcript
from sites import PROMPT, SECONDS, bytes_lm, complete, letters_lm, ours, serving

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def lms():
    return {"letters": letters_lm(seed=3), "bytes": bytes_lm(seed=1)}


@pytest.fixture(scope="module")
def client(lms):
    with (
        serving(lms) as found,
        openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client,
    ):
        yield client


def test_a_completion_has_those_of_its_tokens(client, lms):
    """The values are the sampler's; a name of a likeliest token is its text."""
    lm = lms["letters"]
    answer = complete(client, logprobs=3, seed=5, temperature=0.9, **ours(steps=6, ignore_eos=True))
    (choice,), found = answer.choices, answer.choices[0].logprobs
    ids, mask_id = lm.tokenizer.encode(PROMPT), lm.config.mask_id
    policy = policy_of("llada", steps=6, temperature=0.9)
    (state,) = start([Request([*ids, *[mask_id] * 12], policy, mask_id, 5, logprobs=3)])
    with lm.model.inference(), torch.no_grad():
        while not state.done:
            step([state], lm.model.denoiser())
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == list(range(12))
    assert found.token_logprobs == pytest.approx(state.logprobs.tokens[len(ids) :].tolist(), abs=1e-6)
    for token, own, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == own
        assert len(top) in (3, 4)  # the written one may be none of the likeliest
        assert sum(map(math.exp, top.values())) < 1
    assert complete(client, seed=5).choices[0].logprobs is None
    assert [len(top) for top in complete(client, seed=5, logprobs=0).choices[0].logprobs.top_logprobs] == [1] * 12


def test_a_chat_has_them_with_bytes(client):
    given = {"model": "letters", "messages": MESSAGES, "max_tokens": 10, "temperature": 1.0, "seed": 2}
    answer = client.chat.completions.create(**given, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in content] == [2] * answer.usage.completion_tokens
    assert all(entry.top_logprobs[0].logprob >= max(entry.logprob, entry.top_logprobs[1].logprob) for entry in content)
    alone = client.chat.completions.create(**given, logprobs=True)
    assert [entry.top_logprobs for entry in alone.choices[0].logprobs.content] == [[]] * len(content)
    chunks = list(client.chat.completions.create(**given, logprobs=True, top_logprobs=2, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices]
    assert [entry for part in parts if part is not None for entry in part.content] == content
    with pytest.raises(openai.BadRequestError, match="top_logprobs: only with logprobs = true"):
        client.chat.completions.create(**given, top_logprobs=2)


@pytest.mark.parametrize("more", [{}, {"stop": ["e", "\n"]}, {"sinkdlm": {"block": 4}}, {"sinkdlm": {"block": 1}}], ids=str)
@pytest.mark.parametrize("model", ["letters", "bytes"])
def test_those_of_a_stream_add_up(client, model, more):
    """Also where a character spans several tokens and where a stop string ends the text."""
    extra = {"extra_body": {"sinkdlm": more["sinkdlm"]}} if "sinkdlm" in more else more
    given = {"model": model, "max_tokens": 20, "temperature": 1.0, "seed": 4, "n": 2, "logprobs": 1, **extra}
    whole = complete(client, **given)
    pieces = {0: [], 1: []}
    for chunk in complete(client, **given, stream=True):
        for choice in chunk.choices:
            if choice.logprobs is not None:
                pieces[choice.index].append(choice.logprobs)
    for choice in whole.choices:
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [entry for part in pieces[choice.index] for entry in getattr(part, name)]
            assert streamed == getattr(choice.logprobs, name)
        if model == "letters":
            assert "".join(choice.logprobs.tokens).replace("<unk>", "") == choice.text  # special tokens have names and no text
        assert all(offset <= len(choice.text) for offset in choice.logprobs.text_offset)


def test_parts_of_a_character_begin_where_it_does():
    tokenizer = bytes_lm().tokenizer
    text = "a\U0001f600 naïve"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    transcript = Transcript(tokenizer, tokens[:1], None)
    assert transcript.read(tokens, done=True) == text
    starts = [len(tokenizer.decode(tokens[:n]).rstrip("\ufffd")) for n in range(len(tokens))]
    assert transcript.offsets(tokens) == starts
    assert transcript.n_shown(tokens, done=True) == len(tokens)
    assert [name_token(part, 7) for part in (b"\xe2\x80", b" a", None)] == [
        ("bytes:\\xe2\\x80", [0xE2, 0x80]),
        (" a", [32, 97]),
        ("#7", None),
    ]
