"""The commands on a block-diffusion checkpoint: what they write and show, and what they refuse."""

import json

import pytest

import sinkdlm
from evaluated import save_model

SIZE, PROMPT = 4, "the cat sat "
ON_CPU = ("--device", "cpu", "--dtype", "float32")
ASKED = {
    "three": ("--prompt", PROMPT, "--length", 9, "--n", 3),
    "open end": ("--prompt", PROMPT, "--length", 40, "--until-eos"),
    "sub-blocks": ("--prompt", PROMPT, "--length", 9, "--block", 2, "--until-eos"),
    "suffix": ("--prompt", PROMPT, "--length", 9, "--suffix", " end of it."),
    "gaps": ("--infill", "a [_:5] dog [___] ran home", "--n", 2),
    "guidance": ("--prompt", PROMPT, "--length", 9, "--guidance", 0.5, "--steps", 6),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("blocks") / "model", block_size=SIZE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture
def sample(command_line, checkpoint):
    def run(*words):
        status, out, err = command_line("sample", checkpoint, *words, *ON_CPU, "--temperature", 1, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


@pytest.mark.parametrize("name", ASKED)
def test_the_exact_cache_is_used_by_itself_and_changes_no_text(sample, name):
    found, exact, without = (sample(*ASKED[name], *more) for more in ((), ("--cache", "exact"), ("--cache", "none")))
    assert [one["policy"]["cache"] for one in (found, exact, without)] == ["exact", "exact", "none"]
    assert found["policy"]["block"] == (2 if name == "sub-blocks" else SIZE)
    for row, other, uncached in zip(found["samples"], exact["samples"], without["samples"], strict=True):
        assert row["tokens"] == other["tokens"] == uncached["tokens"]
        assert row["steps"] == uncached["steps"]
        assert len(row["tokens"]) % SIZE == 0 or name != "open end" or len(row["tokens"]) == len(PROMPT) + 40
    assert len(found["samples"]) == {"three": 3, "gaps": 2}.get(name, 1)


def test_watching_shows_every_step_and_writes_the_same(command_line, sample, checkpoint):
    asked = ("--prompt", PROMPT, "--length", 6)
    (row,) = sample(*asked)["samples"]
    status, out, err = command_line("sample", checkpoint, *asked, *ON_CPU, "--temperature", 1, "--watch")
    assert (status, out) == (0, f"{row['text']}\n")
    shown = err.splitlines()
    assert len(shown) == row["steps"] == 6
    assert all("sink " in line and "most attended: position " in line for line in shown)
    # No token of a block that is not begun is attended to.
    assert all(int(line.split("position ")[1].split(" ")[0]) < 16 for line in shown[:4])
    lm = sinkdlm.load(checkpoint)
    watched = lm.watch(PROMPT, length=6, temperature=1.0)
    assert len(list(watched)) == 6
    assert watched.text == lm.write(PROMPT, length=6, temperature=1.0)
    recording = watched.recording()
    assert len(recording["sides"][0]["tokens"]) == 7


@pytest.mark.usefixtures("unrendered")
def test_analyze_reports_sinks_over_blocks_and_steps(command_line, checkpoint, tmp_path):
    (tmp_path / "prompts.txt").write_text("the cat\nwhy is it so\na\n")
    given = (
        "--prompts",
        tmp_path / "prompts.txt",
        "--length",
        6,
        "--device",
        "cpu",
        "--dtype",
        "float64",
        "--out",
        tmp_path / "out",
    )
    status, said, err = command_line("analyze", checkpoint, *given)
    assert (status, err) == (0, "")
    assert "Attention on the sink" in said
    (path,) = (tmp_path / "out" / "captures").iterdir()
    found = json.loads(path.read_text())
    assert found["settings"]["policy"]["cache"] == "none"
    assert found["n"] == {**found["n"], "trajectories": 3, "forwards": 9}
    assert 0 < found["quantities"]["sink_mass"]["total"]["mean"] < 1
    assert [row["name"] for row in found["interventions"]] == ["remove", "zero", "move-end", "move-middle", "ban"]
    assert found["recording"] is not None
    assert not found["omitted"]


@pytest.mark.parametrize("size", [1, 2])
def test_analyze_gives_small_blocks_enough_steps(command_line, tmp_path, size):
    model = save_model(tmp_path / "model", block_size=size)
    given = (
        "--length",
        6,
        "--trajectories",
        2,
        "--capture-only",
        "--no-interventions",
        "--device",
        "cpu",
        "--out",
        tmp_path / "out",
    )
    assert command_line("analyze", model, *given)[0] == 0
    (tmp_path / "texts.txt").write_text("the cat sat\nwhy\n")
    given = ("--texts", tmp_path / "texts.txt", "--capture-only", "--device", "cpu", "--out", tmp_path / "noise")
    assert command_line("analyze", model, *given)[0] == 0


def test_texts_are_scored(command_line, checkpoint, tmp_path):
    (tmp_path / "texts.txt").write_text("the cat sat on the mat.\nwhy?\n")
    status, out, err = command_line("score", checkpoint, tmp_path / "texts.txt", "--documents", "line", "--json", "--device", "cpu")
    assert status == 0, err
    assert all(row["nats"] > 0 for row in json.loads(out)["documents"])


REFUSED = {
    "no blocks": ("plain", ("--cache", "exact"), "cache = 'exact': needs a block-diffusion model"),
    "divide": ("checkpoint", ("--block", 3), "block = 3: must divide the model's block_size = 4"),
    "larger": ("checkpoint", ("--block", 8, "--cache", "exact"), "block = 8: must divide the model's block_size = 4"),
    "dual": ("checkpoint", ("--block", 4, "--cache", "dual"), "cache = 'dual': this model keeps finished blocks exactly"),
    "prefix": ("checkpoint", ("--block", 2, "--cache", "prefix"), "cache = 'prefix': this model keeps finished blocks exactly"),
    "fast": ("checkpoint", ("--policy", "fast"), "cache = 'dual': this model keeps finished blocks exactly"),
    "few steps": ("checkpoint", ("--steps", 1), "steps = 1: fewer than the 2 blocks"),
    "unknown": ("checkpoint", ("--cache", "all"), "cache = 'all': allowed: auto, none, prefix, dual, exact"),
}


@pytest.mark.parametrize("more", [(), ("--watch",)], ids=["", "watch"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_gets_one_line(command_line, request, name, more):
    which, words, told = REFUSED[name]
    status, out, err = command_line("sample", request.getfixturevalue(which), "--prompt", PROMPT, "--length", 6, *words, *more)
    assert (status, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
