"""Structured output over the server, the command line and Python: what is written fits, and what cannot is refused."""

import json

import jsonschema
import openai
import pytest

from formats import check_text
from sinkdlm import load, save
from sites import SECONDS, TEMPLATE, bytes_lm, ours, serving

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 1, "maximum": 40}},
    "required": ["ok", "n"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
WRITE = {"model": "bytes", "max_tokens": 40}


@pytest.fixture(scope="module")
def lm():
    lm = bytes_lm(seed=2)
    lm.tokenizer.chat_template = TEMPLATE
    return lm


@pytest.fixture(scope="module")
def client(lm):
    with (
        serving({"bytes": lm}) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as found,
    ):
        yield found


def chat(client, **more):
    return client.chat.completions.create(messages=[{"role": "user", "content": "x"}], **WRITE | {"max_tokens": 35} | more)


def test_openais_client_gets_json_of_a_schema(client):
    answer = chat(client, response_format=FORMAT, seed=1, temperature=1.0, n=2)
    for choice in answer.choices:
        check_text("schema", SCHEMA, choice.message.content)
        assert choice.finish_reason == "stop"
    assert len(answer.sinkdlm["log_weights"]) == 2
    assert all(weight <= 0 for weight in answer.sinkdlm["log_weights"])
    assert chat(client).sinkdlm["log_weights"] is None


def test_a_streamed_answer_is_the_whole_one(client):
    options = {"response_format": FORMAT, "seed": 4, "temperature": 0.8, **ours(block=8)}
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True, **options) if chunk.choices]
    assert "".join(pieces) == chat(client, **options).choices[0].message.content


def test_json_objects_and_regexes(client):
    found = chat(client, response_format={"type": "json_object"}, temperature=1.0, seed=2).choices[0].message.content
    assert isinstance(json.loads(found), dict)
    written = client.completions.create(prompt="x", **WRITE, **ours(regex="(yes|no)!{2}", steps=4)).choices[0]
    check_text("regex", "(yes|no)!{2}", written.text)
    written = client.completions.create(prompt="x", suffix="y", **WRITE, extra_body={"response_format": FORMAT}).choices[0]
    check_text("schema", SCHEMA, written.text)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": 9, "response_format": FORMAT}, "its shortest text takes 18 tokens, and 9 may be written; give 18"),
        ({"response_format": {"type": "json_schema"}}, "json_schema: goes with type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema is an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "nam": 1}}}, "json_schema.nam: unknown field"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": FORMAT, **ours(regex="a")}, "schema and regex: give one of them"),
        (ours(regex="(?=a)"), "write it without"),
    ],
)
def test_what_cannot_be_written_is_refused(client, more, said):
    with pytest.raises(openai.BadRequestError, match=said.replace("(", r"\(")):
        chat(client, **more)


def test_the_command_line_and_python_write_the_same(lm, tmp_path, command_line):
    save(tmp_path / "model", lm.model.float(), lm.tokenizer)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    words = ("sample", tmp_path / "model", "--device", "cpu", "--length", 40, "--temperature", 1, "--json")
    status, out, err = command_line(*words, "--schema", tmp_path / "schema.json")
    assert (status, err) == (0, "")
    (sample,) = json.loads(out)["samples"]
    jsonschema.validate(json.loads(sample["text"]), SCHEMA)
    assert sample["log_weight"] <= 0
    found = load(tmp_path / "model")
    assert found.write(schema=SCHEMA, length=40, temperature=1.0) == sample["text"]
    check_text("regex", "[ab]{3}", found.write(regex="[ab]{3}", length=9))
    status, out, err = command_line(*words, "--schema", tmp_path / "none.json")
    assert (status, out) == (2, "")
    assert "none.json: no JSON schema" in err
    status, _, err = command_line(*words, "--regex", "a{50}")
    assert status == 2
    assert "its shortest text takes 51 tokens, and 40 may be written; give 51" in err
