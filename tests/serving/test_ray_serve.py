"""Replicas behind one address: a request whose replica dies is made again, and its client gets every piece once."""

import asyncio
import importlib.util
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from sinkdlm.serving.app import make_app
from sinkdlm.serving.engine import Capacity
from sinkdlm.serving.served import Limits
from sinkdlm.serving.server import make_site
from sinkdlm.serving.site import Metrics, Settings, Site
from sites import PROMPT, SECONDS, letters_lm

_FILE = Path(__file__).parents[2] / "launch" / "ray_serve.py"
_SPEC = importlib.util.spec_from_file_location("ray_serve", _FILE)
ray_serve = importlib.util.module_from_spec(_SPEC)
sys.modules["ray_serve"] = ray_serve  # where its dataclass looks for itself
_SPEC.loader.exec_module(ray_serve)

BODY = {"model": "letters", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "n": 2, "seed": 4}
CHAT = {"model": "letters", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10, "temperature": 1.0, "seed": 2}
ASKED = {
    "whole": ("/v1/completions", BODY),
    "stream": ("/v1/completions", BODY | {"stream": True, "logprobs": 2, "echo": False, "sinkdlm": {"block": 2}}),
    "frames": ("/v1/completions", BODY | {"stream": True, "sinkdlm": {"block": 4, "frames": True}}),
    "chat": (
        "/v1/chat/completions",
        CHAT | {"stream": True, "logprobs": True, "stream_options": {"include_usage": True}, "sinkdlm": {"block": 1}},
    ),
}


@pytest.fixture(scope="module")
def replica():
    site = make_site({"letters": letters_lm(seed=3)}, Capacity(), Limits(), Settings(frame_bytes=0), deterministic=True)
    found = object.__new__(ray_serve.Replica)
    found._site, found._app = site, make_app(site)
    yield found
    assert site.models["letters"].engine.close(SECONDS)


def post(replica, path, body, deaths=(), timeout=SECONDS, key=None):
    """The answer through a door whose replicas die after so many parts, one after the other; and the requests they got."""
    left, bodies = list(deaths), []

    async def ask(*asked):
        bodies.append(json.loads(asked[3]) if asked[3] else None)
        n = left.pop(0) if left else None
        parts = replica.answer(*asked)
        try:
            number = 0
            async for part in parts:
                if number == n:
                    raise ray_serve.LostError
                yield part
                number += 1
        finally:
            await parts.aclose()

    async def send():
        door = ray_serve.Door(ask, Site({}, Metrics(), Settings(api_key=key)), timeout).app()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://door", timeout=SECONDS) as http:
            return await (http.get(path) if body is None else http.post(path, json=body))

    return asyncio.run(send()), bodies


def told(answer):
    """What a client puts together of an answer; ids and times differ."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert len({(event["id"], event["created"]) for event in events}) == 1
    texts, logprobs, ends, roles = {}, {}, [], []
    for event in events:
        for choice in event["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            texts[index] = texts.get(index, "") + choice.get("text", "") + delta.get("content", "")
            roles += [index] * ("role" in delta)
            ends += [(index, choice["finish_reason"])] * (choice["finish_reason"] is not None)
            for name, entries in (choice["logprobs"] or {}).items():
                if isinstance(entries, list):
                    logprobs.setdefault((index, name), []).extend(entries)
    frames = [event["sinkdlm"]["frame"] for event in events if "frame" in event.get("sinkdlm", {})]
    return texts, logprobs, sorted(ends), roles, frames, [event["usage"] for event in events if event.get("usage")]


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_is_the_same_however_often_its_replicas_die(replica, name):
    path, body = ASKED[name]
    undisturbed, _ = post(replica, path, body)
    expected = told(undisturbed)
    for deaths in ([0, 1, 2], [5, 9, 7], [3] * 9):
        answer, bodies = post(replica, path, body, deaths)
        assert answer.status_code == 200
        assert told(answer) == expected
        assert len(bodies) > (name != "whole" or deaths[0] < 2)
        assert bodies[1:] == bodies[:-1]


def test_a_request_without_a_seed_gets_one(replica):
    """So that its second attempt gives what its first began."""
    body = {name: value for name, value in BODY.items() if name != "seed"} | {"stream": True, "sinkdlm": {"block": 1}}
    answer, bodies = post(replica, "/v1/completions", body, [7])
    assert len(bodies) == 2
    assert bodies[0] == bodies[1]
    again, _ = post(replica, "/v1/completions", {**body, "seed": bodies[0]["seed"]})
    assert told(again) == told(answer)
    assert ray_serve.seeded(b"[1") == (b"[1", False)
    assert ray_serve.seeded(b"[1]") == (b"[1]", False)


def test_a_request_that_kills_every_replica_is_refused(replica):
    answer, bodies = post(replica, "/v1/completions", BODY, [0] * 99)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replicas_died")
    assert len(bodies) == ray_serve.ATTEMPTS
    answer, _ = post(replica, "/v1/completions", BODY | {"stream": True}, [1] * 99)
    assert '"code": "replicas_died"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_what_replicas_and_the_door_refuse_comes_in_openais_shape(replica):
    answer, _ = post(replica, "/v1/completions", {"model": "letters", "promt": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "promt")
    answer, _ = post(replica, "/v1/completions", BODY | {"sinkdlm": {"inspect": True}})
    assert answer.json()["error"]["message"].endswith("this server keeps 0; ask for fewer texts or steps")
    assert post(replica, "/v1/inspect", None)[0].status_code == 404
    assert post(replica, "/v1/models", None)[0].json()["data"][0]["id"] == "letters"
    assert post(replica, "/health", None)[0].json()["status"] == "ok"
    assert "sinkdlm_requests" in post(replica, "/metrics", None)[0].text
    assert post(replica, "/v1/models", None, key="k")[0].status_code == 401
    slow, _ = post(replica, "/v1/completions", BODY, timeout=0.0)
    assert (slow.status_code, slow.json()["error"]["code"]) == (504, "timeout")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_kills_lose_no_request(tmp_path):
    from benchmarks import replica_kills

    found = replica_kills.run(tmp_path, clients=32, seconds=15, n_bodies=8)
    assert (found["not_answered"], found["differ"]) == (0, 0), found
    assert found["requests"] >= 32
    assert found["replicas_killed"] >= 1
