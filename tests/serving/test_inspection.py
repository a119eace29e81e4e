"""Frames while a text is written, inspection of finished requests, and the page that shows them."""

import base64

import httpx
import numpy as np
import openai
import pytest
import torch

from evaluated import padded_lm
from recordings import unpack
from sinkdlm.analysis.capture import attention_maps
from sinkdlm.serving import app as app_module
from sinkdlm.serving.frames import FrameStore, RequestFrames, quantise
from sites import PROMPT, SECONDS, complete, letters_lm, ours, serving


def test_frames_show_the_canvas_after_every_step():
    lm = letters_lm(seed=3)
    given = {"max_tokens": 6, "seed": 1, "temperature": 1.0, "n": 2, "stream": True, **ours(frames=True, ignore_eos=True)}
    with serving({"letters": lm}) as found, openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(complete(client, **given))
    frames = [chunk.sinkdlm["frame"] for chunk in chunks if not chunk.choices]
    for choice in (0, 1):
        mine = [frame for frame in frames if frame["choice"] == choice]
        assert [frame["step"] for frame in mine] == list(range(7))
        assert [frame["tokens"].count(None) for frame in mine] == [6, 5, 4, 3, 2, 1, 0]
        for frame in mine:
            assert frame["tokens"][:8] == lm.tokenizer.encode(PROMPT)
            assert [piece is None for piece in frame["pieces"]] == [token is None for token in frame["tokens"]]
            sure = frame["confidence"][8:]
            assert all((a is None) == (b is None) for a, b in zip(sure, frame["tokens"][8:], strict=True))
            assert all(0 <= value <= 1 for value in sure if value is not None)
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices and chunk.choices[0].index == choice)
        assert "".join(mine[-1]["pieces"]) == PROMPT + text


def bytes_of(answer):
    return np.frombuffer(base64.b64decode(answer["data"]), np.uint8).reshape(answer["shape"]) * answer["scale"]


def test_what_is_never_written_is_no_candidate():
    lm = padded_lm()
    known = set(lm.tokenizer.get_vocab().values())
    with serving({"padded": lm}) as found, httpx.Client(base_url=found.url, timeout=SECONDS) as http:
        asked = {"model": "padded", "prompt": PROMPT, "max_tokens": 4, "sinkdlm": {"inspect": True, "ignore_eos": True}}
        base = f"/v1/inspect/{http.post('/v1/completions', json=asked).json()['id']}/0"
        told = http.get(f"{base}/0/candidates", params={"position": 9, "k": 5}).json()["candidates"]
        assert {one["token"] for one in told} <= known
        side = http.get(f"{base}/recording").json()
        assert {token for frame in side["candidates"] for place in frame for token, _ in place} <= known


@pytest.mark.parametrize("flags", [{}, {"n_sinks": 0}, {"sink_kind": "register"}, {"sink_kind": "logit"}, {"sink_position": "end"}])
def test_a_finished_request_can_be_looked_into(flags):
    """Values equal those of the model itself on the canvas that the step saw."""
    lm = letters_lm(seed=6, **flags)
    with serving({"letters": lm}) as found, httpx.Client(base_url=found.url, timeout=SECONDS) as http:
        body = {"model": "letters", "prompt": PROMPT, "max_tokens": 6, "seed": 2, "n": 2, "temperature": 1.0}
        answer = http.post("/v1/completions", json={**body, "sinkdlm": {"inspect": True, "ignore_eos": True}}).json()
        base = f"/v1/inspect/{answer['id']}"
        facts = http.get(base).json()
        assert [choice["frames"] for choice in facts["choices"]] == [7, 7]
        assert facts["choices"][1]["n_given"] == 8
        assert 0 < facts["seconds_left"] <= 600
        took = {"forwards": 6, "accepted": 0, "tokens_per_forward": 1.0}
        assert facts["choices"][1].items() >= took.items()

        frames = http.get(f"{base}/1/frames").json()
        pieces = frames["pieces"]
        last = frames["frames"][-1]["tokens"]
        assert "".join(pieces[str(token)] for token in last) == PROMPT + answer["choices"][1]["text"]
        seen = frames["frames"][3]
        assert seen["tokens"].count(None) == 3
        sure = np.frombuffer(base64.b64decode(seen["confidence"]), np.uint8)
        assert [bool(value) for value in sure[8:]] == [token is not None for token in seen["tokens"][8:]]
        assert http.get(f"{base}/1/frames", params={"start": 5, "count": 1}).json()["frames"] == frames["frames"][5:6]

        canvas = [lm.config.mask_id if token is None else token for token in seen["tokens"]]
        places = [(layer, head) for layer in range(2) for head in range(2)]
        maps = attention_maps(lm.model, canvas, places)
        received = bytes_of(http.get(f"{base}/1/3/received").json())
        n_sinks = 0 if flags.get("n_sinks") == 0 else 1
        assert received.shape == (2, 2, n_sinks + 14)
        for layer, head in places:
            expected = maps[layer, head].mean(0)
            if flags.get("sink_kind") == "logit":
                expected = torch.cat([1 - expected.sum()[None], expected])
            np.testing.assert_allclose(received[layer, head], expected, atol=received.max() / 255)
        one = bytes_of(http.get(f"{base}/1/3/received", params={"layer": 1}).json())
        np.testing.assert_allclose(one[0], received[1], atol=received.max() / 255)

        row = bytes_of(http.get(f"{base}/1/3/row", params={"layer": 1, "head": 0, "position": 9}).json())
        np.testing.assert_allclose(row, maps[1, 0][9], atol=row.max() / 255)
        norms = bytes_of(http.get(f"{base}/1/3/values").json())
        assert norms.shape == (2, (0 if flags.get("sink_kind") == "logit" else n_sinks) + 14)
        assert (norms[:, -14:] > 0).all()

        mean = bytes_of(http.get(f"{base}/1/3/row", params={"position": 9}).json())
        np.testing.assert_allclose(mean, np.mean([maps[one][9] for one in places], axis=0), atol=mean.max() / 255)
        look = http.get(f"{base}/1/3/look").json()
        np.testing.assert_array_equal(bytes_of(look["received"]), received)
        np.testing.assert_array_equal(bytes_of(look["values"]), norms)
        exact = np.stack([np.stack([maps[layer, head].mean(0) for head in range(2)]) for layer in range(2)])[..., -14:]
        assert look["absolute"] == np.flatnonzero(exact > 0.3).tolist()
        column = exact * 14
        stand_out = column - (column.sum(-1, keepdims=True) - column) / 13 > 3
        assert look["relative"] == np.flatnonzero(stand_out).tolist()
        assert look["top"] == exact.argmax(-1).ravel().tolist()
        side = http.get(f"{base}/1/recording").json()
        assert side.items() >= took.items()
        assert side["tokens"] == [frame["tokens"] for frame in frames["frames"]]
        assert side["confidence"] == [frame["confidence"] for frame in frames["frames"]]
        assert side["absolute"][3] == look["absolute"]
        np.testing.assert_array_equal(unpack(side["received"])[3], received)
        every = np.stack([maps[one] for one in places]).reshape(2, 2, 14, -1)
        np.testing.assert_allclose(unpack(side["rows"])[3], every, atol=every.max() / 255)
        assert {token: frames["kinds"][token] for token in pieces} == {token: side["kinds"][token] for token in pieces}
        assert frames["kinds"][str(seen["tokens"][3])] == "space"

        place = seen["tokens"].index(None)
        assert [token for token, _ in side["candidates"][3][place]] == [
            one["token"] for one in http.get(f"{base}/1/3/candidates", params={"position": place, "k": 5}).json()["candidates"]
        ]
        told = http.get(f"{base}/1/3/candidates", params={"position": place, "k": 5}).json()["candidates"]
        with lm.model.inference():
            chances = lm.model.denoiser()(torch.tensor([canvas]))[0, place].softmax(-1)
        assert [row["token"] for row in told] == chances.topk(5).indices.tolist()
        assert [row["probability"] for row in told] == pytest.approx(chances.topk(5).values.tolist())
        for path, status in (
            ("2/frames", 404),
            ("1/7/received", 404),
            ("1/3/received?layer=2", 400),
            ("1/3/row?layer=0&head=2&position=0", 400),
            ("1/3/row?layer=0&head=0&position=14", 400),
            ("1/3/candidates?position=14", 400),
            ("1/3/candidates", 400),
            ("1/7/look", 404),
            ("2/recording", 404),
        ):
            assert http.get(f"{base}/{path}").status_code == status, path


def test_what_was_not_asked_for_is_not_kept_and_what_is_too_large_is_refused():
    with (
        serving({"letters": letters_lm(seed=3)}, frame_bytes=8000) as found,
        httpx.Client(base_url=found.url, timeout=SECONDS) as http,
    ):
        body = {"model": "letters", "prompt": PROMPT, "max_tokens": 6}
        answer = http.post("/v1/completions", json=body).json()
        assert not answer["sinkdlm"]["inspect"]
        assert http.get(f"/v1/inspect/{answer['id']}").status_code == 404
        ids = [
            http.post("/v1/completions", json={**body, "sinkdlm": {"inspect": True, "ignore_eos": True}}).json()["id"]
            for _ in range(4)
        ]
        kept = [http.get(f"/v1/inspect/{name}").status_code for name in ids]
        assert kept[-1] == 200
        assert kept[0] == 404
        assert found.site.frames.n_bytes <= 8000
        refused = http.post("/v1/completions", json={**body, "max_tokens": 60, "sinkdlm": {"inspect": True}})
        assert refused.status_code == 400
        assert "inspect" in refused.json()["error"]["message"]


def test_frames_go_after_a_while_and_before_they_are_too_many():
    now = [0.0]
    store = FrameStore(100, seconds=10, clock=lambda: now[0])
    for number in range(3):
        store.add(RequestFrames(str(number), "m", 0, [], [], n_bytes=40))
        now[0] += 1
    assert [store.find(name) is not None for name in "012"] == [False, True, True]
    store.add(RequestFrames("big", "m", 0, [], [], n_bytes=101))
    assert store.find("big") is None
    store.add(RequestFrames("3", "m", 0, [], [], n_bytes=100))
    assert store.n_bytes == 100
    now[0] += 10.5
    assert store.find("3") is None
    assert store.n_bytes == 0


def test_bytes_are_within_half_a_step_of_the_numbers():
    values = np.random.default_rng(0).random((3, 4, 50)) * 7
    told = quantise(values)
    assert np.abs(bytes_of(told) - values).max() <= told["scale"] * 0.5000001
    assert bytes_of(quantise(np.zeros((2, 3)))).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_two_models_write_from_the_same_noise():
    """Side by side, as on the page: models with equal weights agree in every token."""
    twins = {"a": letters_lm(seed=8), "b": letters_lm(seed=8)}
    with serving(twins) as found, openai.OpenAI(base_url=f"{found.url}/v1", api_key="none", max_retries=0) as both:
        texts = [complete(both, model=name, temperature=1.0, seed=3, max_tokens=20).choices[0].text for name in twins]
    assert texts[0] == texts[1]


def test_a_page_is_served_where_there_is_one(tmp_path, monkeypatch):
    (tmp_path / "parts").mkdir()
    (tmp_path / "index.html").write_text("<p>sinks</p>")
    (tmp_path / "parts" / "a.js").write_text("1")
    (tmp_path / "secret.txt").write_text("no")
    monkeypatch.setattr(app_module, "PAGE", tmp_path)
    with serving({"letters": letters_lm()}, api_key="key") as found, httpx.Client(base_url=found.url, timeout=SECONDS) as http:
        assert http.get("/").text == "<p>sinks</p>"
        assert http.get("/").headers["content-type"] == "text/html; charset=utf-8"
        assert http.get("/page/parts/a.js").text == "1"
        assert http.get("/page/secret.txt").status_code == 404
        (tmp_path / "index.html").unlink()
        assert http.get("/").status_code == 200  # read once, never looked up
