"""Block-diffusion models behind the server: rows at different blocks share forwards with their exact caches."""

import base64
import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest
import torch

from engines import EOS, MASK, SECONDS, Owner, alone
from sinkdlm.analysis.recording import look_at
from sinkdlm.sampling import Request, policy_of, start
from sinkdlm.sampling.denoiser import DenoiserAdapter
from sinkdlm.sampling.prefill import PrefixStore, compute_prefixes
from sinkdlm.serving import engine as engine_module
from sinkdlm.serving.engine import Capacity, Engine, share_forwards
from sinkdlm.text.generate import Job, write
from sites import PROMPT, complete, letters_lm, ours, serving
from small_models import small_model

SIZE = 4
LONG = "a dog ran home, fast, and sat. "


@pytest.fixture(scope="module")
def lm():
    return letters_lm(block_size=SIZE)


@pytest.fixture(scope="module")
def running(lm):
    with serving({"letters": lm, "plain": letters_lm()}) as found:
        yield found


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as found:
        yield found


@pytest.fixture(scope="module")
def http(running):
    with httpx.Client(base_url=running.url, timeout=SECONDS) as found:
        yield found


def test_rows_at_different_blocks_share_forwards_and_write_what_each_writes_alone():
    model, shapes, steps = small_model(seed=1, n_sinks=1, block_size=SIZE), [], []
    model.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    policies = [policy_of("llada", **more) for more in ({}, {"temperature": 1.0, "block": 2}, {"threshold": 0.3}, {"eos_id": EOS})]
    requests = [
        Request([*range(n % 10), *[MASK] * (9 + n)], policies[n % 4], MASK, n, block_size=SIZE, grow=n % 4 == 3) for n in range(12)
    ]
    expected = [alone(model, request).rows[0][request.canvas.index(MASK) :] for request in requests]
    plain = [replace(request, policy=replace(request.policy, cache="none")) for request in requests]
    assert expected == [alone(model, request).rows[0][request.canvas.index(MASK) :] for request in plain]
    shapes.clear()
    engine, gate, inside = Engine(model, Capacity(), stepped=lambda n, _: steps.append(n)), threading.Event(), threading.Event()
    try:
        engine.query(lambda: (inside.set(), gate.wait(SECONDS)))
        assert inside.wait(SECONDS)
        owners = [Owner([request], progress=True) for request in requests]
        for owner in owners:
            engine.submit(owner.ticket)
        gate.set()
        assert [owner.tokens()[0] for owner in owners] == expected
    finally:
        assert engine.close(timeout=SECONDS)
    assert not any(owner.ticket.without_cache for owner in owners)
    n_prefills = sum(width in (4, 8) and rows < 4 for rows, width in shapes)
    assert len(shapes) <= len(steps) + n_prefills
    assert max(rows for rows, _ in shapes) == 12
    assert max(width for _, width in shapes) <= 2 * SIZE


def test_a_long_prompt_is_computed_in_parts_between_the_steps_of_others(monkeypatch):
    """And a prompt that begins like an earlier one computes only the rest."""
    monkeypatch.setattr(engine_module, "_PREFILL_TOKENS", 4 * SIZE)  # two rows' step has as many
    for more in ({"n_sinks": 1}, {"tie_embeddings": True, "mask_id": 10, "shift_logits": True}):
        model, shapes = small_model(seed=1, block_size=SIZE, **more), []
        mask_id = model.config.mask_id
        texts = [[1, 2], [n % 10 for n in range(43)], [n % 10 for n in range(38)] + [7, 8, 9], [n % 10 for n in range(40)] + [1]]
        policies = [policy_of("llada", guidance=guidance) for guidance in (0.0, 0.0, 0.0, 0.5)]
        requests = [
            Request([*text, *[mask_id] * 9], policy, mask_id, n, block_size=SIZE)
            for n, (text, policy) in enumerate(zip(texts, policies, strict=True))
        ]
        expected = [alone(model, request).rows[0][request.canvas.index(mask_id) :] for request in requests]
        model.register_forward_pre_hook(lambda _, given, seen=shapes: seen.append(tuple(given[0].shape)))
        engine = Engine(model, Capacity())
        try:
            gate, inside = threading.Event(), threading.Event()
            engine.query(lambda gate=gate, inside=inside: (inside.set(), gate.wait(SECONDS)))
            assert inside.wait(SECONDS)
            first = [Owner([request], progress=True, frames=True, ends=lambda row, written: False) for request in requests[:2]]
            for owner in first:
                engine.submit(owner.ticket)
            gate.set()
            found = [owner.tokens()[0] for owner in first]
            assert shapes.count((1, 4 * SIZE)) == 2  # 40 tokens in parts of 16
            assert [shape[1] for shape in shapes[:5]] == [16, 4, 16, 4, 8]  # a step of the other row between two parts
            shapes.clear()
            for request in requests[2:]:
                later = Owner([request])
                engine.submit(later.ticket)
                found += later.tokens()
            assert found == expected
            assert all(width <= 4 * SIZE for _, width in shapes)
            # 36 tokens are known; then 40, beside the branch without a prompt, which nothing is like.
            assert [shape for shape in shapes if shape[1] == 4 * SIZE] == [(1, 4 * SIZE)] * 2
        finally:
            assert engine.close(timeout=SECONDS)


def test_shared_prompts_stay_within_their_memory():
    model = small_model(seed=1, n_sinks=1, block_size=SIZE)
    adapter, cpu = DenoiserAdapter(model.denoiser()), torch.device("cpu")
    one = compute_prefixes(adapter, [(1,) * 16], SIZE, cpu)[(1,) * 16][0].n_bytes
    adapter.prefixes = PrefixStore(3 * one)
    for first in range(5):
        compute_prefixes(adapter, [(first, *[5] * 15)], SIZE, cpu)
        adapter.prefixes.find((0, *[5] * 15), SIZE)  # this one is used all the time
        assert adapter.prefixes.n_bytes <= 3 * one
    found = [adapter.prefixes.find((first, *[5] * 15), SIZE)[0] for first in range(5)]
    assert found == [16, 0, 0, 16, 16]
    assert adapter.prefixes.find((4, *[5] * 8, 6, 6, 6), SIZE)[0] == 8


def test_rows_with_exact_caches_are_not_cut_by_length():
    def row(length, steps, cache="exact"):
        request = Request([1] * (length - 1) + [MASK], policy_of("llada", cache=cache), MASK, block_size=SIZE)
        (state,) = start([request])
        state.batch = "its own" if steps else None
        return SimpleNamespace(state=state)

    def cut(*rows):
        return [[one.state.length for one in part] for part in share_forwards(rows, 4096)]

    assert cut(row(4000, 1), row(10, 1), row(900, 1)) == [[4000, 10, 900]]
    assert cut(row(4000, 0), row(10, 1), row(900, 1)) == [[10, 900], [4000]]
    assert cut(row(200, 0), row(10, 1), row(900, 1)) == [[10, 900, 200]]  # padding costs less than another forward
    assert cut(row(4000, 0), row(4000, 0)) == [[4000], [4000]]  # prompts are to be computed
    assert cut(row(4000, 1, "none"), row(4000, 1, "none")) == [[4000], [4000]]


@pytest.mark.parametrize(
    ("prompt", "extras"),
    [
        (PROMPT, {}),
        (LONG, {}),
        ("", {"block": 2}),
        (LONG, {"until_eos": True}),
        (LONG, {"cache": "none"}),
        ([LONG, PROMPT, "a"], {"cache": "exact"}),
    ],
    ids=str,
)
def test_an_answer_is_what_the_command_line_writes_and_a_stream_adds_up_to_it(client, lm, prompt, extras):
    given = {"max_tokens": 11, "temperature": 1.0, "seed": 4, "n": 2, **ours(**extras)}
    whole = complete(client, prompt, **given)
    n = 2 if isinstance(prompt, str) else 6
    assert whole.sinkdlm["policy"]["cache"] == extras.get("cache", "exact")
    texts = [""] * n
    for chunk in complete(client, prompt, **given, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    prompts = [prompt] if isinstance(prompt, str) else prompt
    options = {name: value for name, value in extras.items() if name != "until_eos"}
    policy = policy_of("llada", temperature=1.0, eos_id=lm.tokenizer.eos_token_id, **options)
    job = Job(prompts=prompts, length=11, seed=4, n=2, until_eos="until_eos" in extras)
    rows = write(letters_lm(block_size=SIZE), job, policy)["samples"]
    assert len(rows) == n
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        assert row["text"].replace("<unk>", "") == prompts[number // 2] + text  # which the server leaves out


MISTAKES = {
    "no blocks": ("plain", {"cache": "exact"}, "cache = 'exact': needs a block-diffusion model"),
    "divide": ("letters", {"block": 3}, "block = 3: must divide the model's block_size = 4"),
    "dual": ("letters", {"block": 4, "cache": "dual"}, "cache = 'dual': this model keeps finished blocks exactly"),
    "fast": ("letters", {"policy": "fast"}, "cache = 'dual': this model keeps finished blocks exactly"),
    "unknown": ("letters", {"cache": "all"}, "allowed: auto, none, prefix, dual, exact"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_openais_shape(http, name, stream):
    model, extras, told = MISTAKES[name]
    answer = http.post("/v1/completions", json={"model": model, "prompt": "a", "stream": stream, "sinkdlm": extras})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert told in error["message"]


def test_models_say_their_block_size(http):
    cards = {card["id"]: card["sinkdlm"] for card in http.get("/v1/models").json()["data"]}
    assert {name: card["block_size"] for name, card in cards.items()} == {"letters": SIZE, "plain": None}


def test_the_inspector_shows_the_blocks_so_far(http, lm):
    body = {"model": "letters", "prompt": PROMPT, "max_tokens": 6, "seed": 2, "temperature": 1.0}
    answer = http.post("/v1/completions", json={**body, "sinkdlm": {"inspect": True, "ignore_eos": True}}).json()
    base = f"/v1/inspect/{answer['id']}/0"
    frames = http.get(f"{base}/frames").json()["frames"]
    assert len(frames) == 7
    canvas = [lm.config.mask_id if token is None else token for token in frames[2]["tokens"]]
    expected = look_at(letters_lm(block_size=SIZE).model, canvas).received
    found = http.get(f"{base}/2/look").json()["received"]
    values = np.frombuffer(base64.b64decode(found["data"]), np.uint8).reshape(found["shape"]) * found["scale"]
    np.testing.assert_allclose(values, expected, atol=expected.max() / 255)
    assert not expected[..., 1 + 12 :].any()
    assert torch.tensor(expected[..., 1:13]).all()
    assert http.get(f"{base}/recording").status_code == 200
