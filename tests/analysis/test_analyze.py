"""`sinkdlm analyze` from checkpoints to a report, and its error messages."""

import json
import re
from pathlib import Path

import pytest

from evaluated import padded_lm, save_model, small_lm
from sinkdlm import UserError, load, save
from sinkdlm.analysis import interventions
from sinkdlm.analysis.prompts import PROMPTS
from sinkdlm.analysis.study import Plan, read_capture
from sinkdlm.checkpoint.tokenizer import absent_ids
from sinkdlm.sampling import Policy, requests_of

QUICK = ("--length", 6, "--steps", 3, "--device", "cpu", "--dtype", "float64")


@pytest.fixture(scope="session")
def models(made_once) -> Path:
    def make(folder: Path) -> None:
        save_model(folder / "vanilla", n_sinks=0)
        save_model(folder / "sink", n_sinks=1)
        (folder / "prompts.txt").write_text("the cat\nwhy is it\na dog ran\ncount: 1\nhome, \nso cold\nfast. \n1 2 3\n")

    return made_once("analyzed", make)


@pytest.fixture
def analyze(command_line, models):
    return lambda *words: command_line("analyze", *words)


@pytest.mark.usefixtures("without_pngs")
def test_two_models_side_by_side(analyze, models, tmp_path):
    out = tmp_path / "report"
    status, said, shown = analyze(models / "vanilla", models / "sink", "--prompts", models / "prompts.txt", "--out", out, *QUICK)
    assert (status, shown) == (0, "")
    assert said.endswith(f"\n\nwrote {out / 'report.html'}, summary.md, metrics.json, inspect.html and figures/\n")
    assert 'Findings in "sink"\n  Attention on the sink: The sink token receives ' in said
    assert not re.search(r"\\|^#|\*\*|^\||Intervention|commit", said, flags=re.MULTILINE)  # what the files have
    assert said.count("\n") < 30
    title, claims = said.split("\n", 1)[0], re.findall(r"^- \*\*(.+?)\*\*: (.+?)\.", (out / "summary.md").read_text(), re.MULTILINE)
    assert (out / "summary.md").read_text().startswith(f"# {title}\n")
    assert len(claims) == 5
    assert all(f"\n  {verdict:15s}{claim}\n" in said for verdict, claim in claims)
    names = {path.name for path in out.iterdir()}
    assert names == {"report.html", "inspect.html", "recording.json", "metrics.json", "summary.md", "figures", "captures"}
    captures = [json.loads((out / "captures" / f"{name}.json").read_text()) for name in ("vanilla", "sink")]
    for capture, n_sinks in zip(captures, (0, 1), strict=True):
        assert capture["n"] == {"trajectories": 8, "forwards": 24, "tokens_seen": capture["n"]["tokens_seen"]}
        assert capture["model"]["n_sinks"] == n_sinks
        assert [row["prompt"] for row in capture["trajectories"]][:2] == ["the cat", "why is it"]
        assert capture["trajectories"][0]["text"].startswith("the cat")
        assert len(capture["maps"]) == 2
        assert all(sum(row) == pytest.approx(1, abs=0.01) for one in capture["maps"] for row in one["weights"])
    assert captures[0]["quantities"]["sink_mass"]["total"]["mean"] == 0
    assert 0 < captures[1]["quantities"]["sink_mass"]["total"]["mean"] < 1
    assert [row["name"] for row in captures[1]["interventions"]] == ["remove", "zero", "move-end", "move-middle", "ban"]
    assert captures[1]["interventions"][0]["nelbo"]["n"] == 8
    page = (out / "report.html").read_text()
    assert 'href="inspect.html"' in page
    recording = json.loads((out / "recording.json").read_text())
    assert [side["model"] for side in recording["sides"]] == ["vanilla", "sink"]
    assert recording["asked"]["prompt"] == "the cat"
    assert len(recording["sides"][0]["tokens"]) == 4  # three steps, and the finished text
    assert "<svg" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page

    again = tmp_path / "again"
    status, printed, _ = analyze(*(out / "captures" / f"{name}.json" for name in ("vanilla", "sink")), "--out", again, "--json")
    assert status == 0
    assert json.loads(printed) == json.loads((out / "metrics.json").read_text())
    assert (again / "summary.md").read_text() == (out / "summary.md").read_text()
    assert (again / "report.html").read_text() == page
    assert (again / "inspect.html").read_text() == (out / "inspect.html").read_text()


def test_capturing_alone_needs_no_matplotlib(analyze, models, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    given = (models / "sink", "--prompts", models / "prompts.txt", "--out", tmp_path, "--no-interventions", *QUICK)
    status, _, shown = analyze(*given)
    assert status == 2
    assert "sinkdlm[viz]" in shown
    assert not (tmp_path / "captures").exists()  # said before anything was captured
    status, said, _ = analyze(*given, "--capture-only", "--json")
    assert status == 0
    capture = read_capture(Path(json.loads(said)["captures"]["sink"]))
    assert capture["interventions"] == []
    assert capture["omitted"] == {"interventions": "not asked for"}


@pytest.mark.parametrize("kind", ["bos", "padded"])
def test_what_is_watched_is_what_sample_writes(analyze, command_line, tmp_path, kind):
    """Prompts begin with BOS as the tokenizer or the command says; ids that the tokenizer lacks are never written."""
    lm = small_lm(bos=True) if kind == "bos" else padded_lm()
    model = save(tmp_path / "model", lm.model, lm.tokenizer)
    (tmp_path / "prompts.txt").write_text("the cat\n1 2 3\n")
    given, quick, tokenizer = ("--prompts", tmp_path / "prompts.txt"), (*QUICK[:-1], "float32"), load(model).tokenizer
    for more in [(), ("--no-bos",)] if kind == "bos" else [()]:
        status, _, said = analyze(model, *given, "--out", tmp_path / "out", "--names", "it", "--capture-only", *quick, *more)
        assert status == 0, said
        seen = [row["text"] for row in read_capture(tmp_path / "out" / "captures" / "it.json")["trajectories"]]
        _, printed, _ = command_line("sample", model, *given, "--no-stop", "--json", *quick, *more)
        written = [row["tokens"] for row in json.loads(printed)["samples"]]
        assert seen == [tokenizer.decode(tokens) for tokens in written]
        assert len({tokens[0] == tokenizer.bos_token_id for tokens in written}) == 1
        assert (written[0][0] == tokenizer.bos_token_id) == (kind == "bos" and not more)


def test_interventions_write_no_ids_that_the_tokenizer_lacks():
    lm = padded_lm()
    requests = requests_of([[5, 6]], mask_id=lm.config.mask_id, length=8, steps=4)
    absent = absent_ids(lm.tokenizer, lm.config.vocab_size)
    highest = []
    for barred in ((), absent):
        _, (written,) = interventions._look(lm.model, interventions.Ground([[5, 6, 7]], requests, barred=barred), None)
        highest.append(int(written.max()))
    assert highest[0] in absent
    assert highest[1] < len(lm.tokenizer)


def test_given_texts_under_noise(analyze, models, tmp_path):
    given = ("--texts", models / "prompts.txt", "--shares", "0.8,0.2", "--map", "1,0,1", "--capture-only", *QUICK[4:])
    assert analyze(models / "sink", "--out", tmp_path, "--names", "mine", *given)[0] == 0
    capture = read_capture(tmp_path / "captures" / "mine.json")
    assert capture["settings"]["inputs"] == "noise"
    assert capture["n"]["forwards"] == 16
    assert capture["trajectories"][4]["text"] == capture["trajectories"][4]["prompt"] == "home, "
    assert [(one["step"], one["layer"], one["head"]) for one in capture["maps"]] == [(1, 0, 1)]
    assert capture["interventions"][0]["nelbo"]["n"] == 8
    assert capture["interventions"][0]["changed"]["mean"] is None  # nothing is written


@pytest.mark.slow
def test_a_single_token_a_single_step(analyze, models, tmp_path):
    (tmp_path / "one.txt").write_text("a\n")
    given = ("--prompts", tmp_path / "one.txt", "--length", 1, "--steps", 1, *QUICK[4:])
    for name in ("vanilla", "sink"):
        status, said, shown = analyze(models / name, "--out", tmp_path / name, *given)
        assert (status, shown) == (0, ""), shown
        assert "undecided" in said
    lm = small_lm(shift_logits=True)
    save(tmp_path / "shifted-model", lm.model, lm.tokenizer)
    status, said, shown = analyze(tmp_path / "shifted-model", "--out", tmp_path / "shifted", *given)
    assert (status, shown) == (0, "")
    assert "interventions: the prompts have no token to score" in said
    (tmp_path / "t.txt").write_text("b\n")
    status, _, shown = analyze(models / "vanilla", "--out", tmp_path / "noise", "--texts", tmp_path / "t.txt", *QUICK[4:])
    assert (status, shown) == (0, "")


def test_built_in_prompts_are_cut_and_a_length_is_found(analyze, tmp_path):
    lm = small_lm(n_sinks=1, context_length=40)
    save(tmp_path / "short", lm.model, lm.tokenizer)
    given = ("--capture-only", "--no-interventions", "--trajectories", 3, "--device", "cpu")
    assert analyze(tmp_path / "short", "--out", tmp_path, *given)[0] == 0
    capture = read_capture(tmp_path / "captures" / "short.json")
    assert capture["settings"]["length"] == 20
    assert capture["settings"]["steps"] == 10
    assert capture["trajectories"][0]["prompt"] == lm.tokenizer.decode(lm.tokenizer.encode(PROMPTS[0])[:20])
    assert len(set(PROMPTS)) == 32


def test_prompts_of_a_chat_go_through_the_template(analyze, models, tmp_path):
    lm = small_lm()
    lm.tokenizer.chat_template = "{% for turn in messages %}{{ turn['role'] }}: {{ turn['content'] }} {% endfor %}"
    save(tmp_path / "tuned", lm.model, lm.tokenizer)
    asked = [{"prompt": "why"}, {"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    given = ("--prompts", tmp_path / "asked.jsonl", "--capture-only", "--no-interventions", *QUICK, "--out", tmp_path)
    status, _, shown = analyze(tmp_path / "tuned", *given)
    assert status == 2
    assert "say --chat" in shown
    assert analyze(tmp_path / "tuned", *given, "--chat")[0] == 0
    capture = read_capture(tmp_path / "captures" / "tuned.json")
    assert [row["prompt"] for row in capture["trajectories"]] == ["user: why ", "user: a bot: b "]
    status, _, shown = analyze(models / "sink", *given, "--chat")
    assert status == 2
    assert "no chat template" in shown


def test_copies_are_no_trajectories():
    plan = Plan(prompts=[[1], [2]], policy=Policy(), length=4)
    assert plan.with_trajectories(2).trajectories == 2
    with pytest.raises(UserError, match="2 prompts at temperature 0 give 2 different ones"):
        plan.with_trajectories(3)
    twice = Plan(prompts=[[1], [1], [], [2], []], policy=Policy(), length=4)
    assert [list(prompt) for prompt in twice.with_trajectories(3).prompts] == [[1], [], [2]]
    with pytest.raises(UserError, match="5 prompts at temperature 0 give 3 different ones"):
        twice.with_trajectories(4)
    drawn = Plan(prompts=[[1], [2]], policy=Policy(temperature=1.0), length=4)
    assert drawn.with_trajectories(100).trajectories == 100


def test_built_in_prompts_without_room_are_one_trajectory(analyze, tmp_path):
    lm = small_lm(n_sinks=1, context_length=8)
    save(tmp_path / "short", lm.model, lm.tokenizer)
    given = ("--capture-only", "--no-interventions", "--length", 8, "--device", "cpu")
    assert analyze(tmp_path / "short", "--out", tmp_path, *given)[0] == 0
    assert read_capture(tmp_path / "captures" / "short.json")["n"]["trajectories"] == 1


def test_only_prompts_that_are_used_must_fit(analyze, models, tmp_path):
    (tmp_path / "long.txt").write_text("a cat\na dog\n" + "x" * 400 + "\n")
    quick = ("--device", "cpu", "--capture-only", "--no-interventions", "--steps", 4)
    given = (models / "sink", "--prompts", tmp_path / "long.txt", "--out", tmp_path, *quick)
    assert analyze(*given, "--trajectories", 2)[0] == 0
    capture = read_capture(tmp_path / "captures" / "sink.json")
    assert (capture["n"]["trajectories"], capture["settings"]["length"]) == (2, 64)
    status, _, shown = analyze(*given)
    assert status == 2
    assert "prompt of 400" in shown


@pytest.mark.usefixtures("unrendered")
def test_maps_of_steps_that_were_not_taken(analyze, models, tmp_path):
    """A policy that stops early: the report names the missing maps and keeps everything captured."""
    given = (
        "--set",
        "threshold=1e-9",
        "--length",
        6,
        "--trajectories",
        1,
        "--map",
        "0,1,1",
        "--map",
        "5,1,1",
        "--no-interventions",
    )
    status, said, shown = analyze(models / "sink", "--out", tmp_path, "--device", "cpu", *given)
    assert (status, shown) == (0, "")
    assert "maps of later steps: the first trajectory stopped after step 0" in said
    assert [one["step"] for one in read_capture(tmp_path / "captures" / "sink.json")["maps"]] == [0]


def test_enough_trajectories_for_so_many_forwards(analyze, models, tmp_path):
    given = ("--forwards", 10, "--set", "temperature=1", "--capture-only", "--no-interventions", *QUICK)
    assert analyze(models / "sink", "--out", tmp_path, *given)[0] == 0
    assert read_capture(tmp_path / "captures" / "sink.json")["n"]["forwards"] == 12  # 4 of 3 steps


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--length", 400], "the model reads at most 256"),
        (["--prompts", "empty.txt"], "holds no prompt"),
        (["--prompts", "missing.txt"], "missing.txt: cannot be read"),
        (["--trajectories", 99], "32 prompts at temperature 0"),
        (["--set", "guidance=1", "--length", 4], "guidance"),
        (["--config", "nonsense"], "nonsense"),
        (["--map", "0,1"], "expected step, layer and head"),
        (["--map", "99,0,0", "--length", 4, "--trajectories", 1, "--no-interventions"], "from 0,0,0 to 1,1,1"),
        (["--map", "0,7,0", "--length", 4, "--trajectories", 1, "--no-interventions"], "from 0,0,0 to 1,1,1"),
        (["--texts", "prompts.txt", "--length", 4], "leave out --length"),
        (["--texts", "prompts.txt", "--prompts", "prompts.txt"], "leave out --prompts"),
        (["--texts", "empty.txt"], "holds no prompt"),
        (["--names", "a,b"], "a different name for each of the 1 models"),
        (["--names", "../x"], "leave out slashes"),
        (["--shares", "x", "--texts", "prompts.txt"], "expected numbers"),
        (["--shares", "0.5"], "--shares: goes with --texts"),
        (["--out", "prompts.txt"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(analyze, models, tmp_path, monkeypatch, words, complaint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "prompts.txt").write_text("a cat\n")
    status, said, shown = analyze(models / "sink", "--out", "report", "--device", "cpu", *words)
    assert status == 2
    assert said == ""
    assert complaint in shown
    assert shown.count("\n") == 1


def test_a_capture_that_is_none(analyze, tmp_path):
    (tmp_path / "a.json").write_text('{"format": "other"}')
    (tmp_path / "b.json").write_text("{")
    for name in ("a", "b", "c"):
        status, _, shown = analyze(tmp_path / f"{name}.json", "--out", tmp_path / "report")
        assert status == 2
        assert f"{name}.json" in shown
        assert shown.count("\n") == 1
