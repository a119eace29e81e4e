"""The demo: fast tests with a few steps, interrupted once; slow tests with default settings."""

import html
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import real_twins
from rich.console import Console

from sinkdlm import DiffusionLM, errors
from sinkdlm.analysis.study import read_capture
from sinkdlm.cli import entry as cli
from sinkdlm.config.recipe import LogSection
from sinkdlm.config.toml import flatten
from sinkdlm.demo import language, run, words
from sinkdlm.demo.run import compare_answers, compare_losses, exact_match, share_interval
from sinkdlm.demo.screen import OPEN, Look, Screen, has_room, spark

STEPS, TRAJECTORIES = 4, 6


def demo(monkeypatch, out: Path, *more: str) -> int:
    """The command in this process, with fewer stories; its exit status."""
    monkeypatch.setattr(language, "N_STORIES", 600)
    options = ["--steps", STEPS, "--trajectories", TRAJECTORIES, "--out", out, *more]
    monkeypatch.setattr(sys, "argv", ["sinkdlm", "demo", *map(str, options)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code or 0


@pytest.fixture(scope="module")
def made(made_once) -> Path:
    """A demo that Ctrl-C stopped in the middle of its second twin, and that was then run again. Beside it, what was said."""

    def make(folder: Path) -> None:
        progress = Screen.progress

        def interrupt(self: Screen, step: int, steps: int, seen: str) -> None:
            progress(self, step, steps, seen)
            if self.name == "sink" and step == 2:
                os.kill(os.getpid(), signal.SIGINT)

        streams = {name: io.StringIO() for name in ("first", "stopped", "second", "json")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Screen, "progress", interrupt)
            patch.setattr(sys, "stdout", streams["first"])
            patch.setattr(sys, "stderr", streams["stopped"])
            assert demo(patch, folder / "demo") == 128 + signal.SIGINT
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sinkdlm.analysis.figures._to_svg", lambda figure: "<svg></svg>")
            patch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **how: Path(file).touch())
            patch.setattr(sys, "stderr", streams["second"])
            patch.setattr(sys, "stdout", streams["json"])
            assert demo(patch, folder / "demo", "--json") == 0
        for name, stream in streams.items():
            (folder / name).write_text(stream.getvalue())

    return made_once("demo", make)


def text_of(page: Path) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page.read_text())).split())


# -- the language ---------------------------------------------------------------------------------------------------------------


def test_held_out_pairs_are_trained_on_in_neither_order():
    train, held_out = (language.problems(0, held_out=held) for held in (False, True))
    pairs = [{frozenset(map(int, problem.question[:-1].split("+"))) for problem in part} for part in (train, held_out)]
    assert not pairs[0] & pairs[1]
    assert len(pairs[1]) == language.N_HELD_OUT
    assert len({problem.question for problem in train + held_out}) == language.N_NUMBERS**2
    for problem in train + held_out:
        left, right = problem.question[:-1].split("+")
        assert int(problem.answer) == int(left) + int(right)
        assert len(problem.answer) == language.ANSWER
    assert language.problems(0, held_out=True) == held_out != language.problems(1, held_out=True)


def test_the_tokenizer_writes_back_what_it_read():
    tokenizer = language.word_tokenizer()
    texts = [*language.stories(300, seed=3), *("".join(problem) for problem in language.problems(3, held_out=True)[:50])]
    unknown = tokenizer.convert_tokens_to_ids("?")
    for text in texts:
        ids = tokenizer.encode(text)
        assert unknown not in ids
        assert tokenizer.decode(ids) == text
    assert max(len(tokenizer.encode(text)) for text in texts) <= run.LENGTH
    longest = max(len(tokenizer.encode(opening)) for opening in language.openings(200, seed=3))
    assert longest + run.WRITTEN <= run.LENGTH


def test_a_story_ends_with_who_has_the_thing():
    for text in language.stories(100, seed=1):
        assert re.search(r"(now|so) (\w+) has the (\w+) (\w+) and", text)
    openings = language.openings(40, seed=1)
    assert len(set(openings)) == 40
    assert all(opening.endswith(".") and opening.count(".") == 1 for opening in openings)


def test_twins_differ_in_one_flag_and_begin_alike():
    sets = {"sums": "a", "stories": "b"}
    recipes = [run.recipe_of(twin, sets, 10, 5) for twin in run.TWINS]
    one, other = (flatten(recipe.to_dict()) for recipe in recipes)
    assert [key for key in one if one[key] != other[key]] == ["model.n_sinks"]
    weights = [dict(DiffusionLM(recipe.model, seed=5).named_parameters()) for recipe in recipes]
    assert set(weights[1]) - set(weights[0]) == {"sinks"}
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


# -- scores ---------------------------------------------------------------------------------------------------------------------


def test_intervals_and_sign_test():
    assert share_interval(0, 20) == (0.0, pytest.approx(0.1611, abs=1e-4))  # Wilson's, from tables
    assert share_interval(20, 20)[1] == 1.0
    low, high = share_interval(81, 263)
    assert (low, high) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))
    problems = [language.Problem(f"{n}", "1") for n in range(20)]
    found = compare_answers(["1"] * 10 + ["0"] * 10, ["1"] * 4 + ["0"] * 15 + ["1"], problems)
    assert (found["only_first"], found["only_second"]) == (6, 1)
    assert found["p"] == pytest.approx(2 * (1 + 7) / 2**7)
    assert not found["differ"]
    same = compare_answers(["1"] * 20, ["1"] * 20, problems)
    assert same["p"] == 1
    assert compare_answers(["1"] * 20, ["0"] * 20, problems)["differ"]
    assert exact_match(["1"] * 15 + ["2"] * 5, problems)["mean"] == 0.75


def test_words_say_who_is_ahead_or_that_nobody_is():
    problems = [language.Problem(f"{n}", "1") for n in range(40)]
    right, wrong = ["1"] * 40, ["0"] * 40
    facts = {"seed": 4, "twins": {"vanilla": {}, "sink": {}}}
    for first, second, said in (
        (right, right, "do not differ"),
        (wrong, right, '"sink" is ahead'),
        (right, wrong, '"vanilla" is ahead'),
    ):
        assert said in words.sums_text(facts | {"sums": compare_answers(first, second, problems)})
    assert "--seed 5" in words.sums_text(facts | {"sums": compare_answers(right, wrong, problems)})
    losses = [{"loss": loss, "stderr": 0.01} for loss in (1.0, 0.5, 1.01)]
    for other, said in ((1, '"sink" has the lower loss'), (2, "do not differ")):
        assert said in words.stories_text(facts | {"stories": compare_losses(losses[0], losses[other])})


def test_the_recorded_twins_are_those_of_the_records():
    found = words.real_twins()
    assert real_twins.FILE.read_text() == real_twins.to_text(real_twins.content())
    assert real_twins.FILE.stat().st_size < 100_000
    (without, sink) = found["captures"]
    assert (without["model"]["n_sinks"], sink["model"]["n_sinks"]) == (0, 1)
    assert len(sink["quantities"]["sink_mass"]["layers"]) == 30


# -- what is seen ---------------------------------------------------------------------------------------------------------------


def screen(folder: Path, width: int, *, terminal: bool) -> tuple[Screen, io.StringIO]:
    (folder / "sink").mkdir(parents=True)
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, height=24, highlight=False, soft_wrap=True, markup=False)
    options = {"number": 2, "of": 2, "problem": language.Problem("47+38=", "085"), "opening": "tom", "length": 32}
    made = Screen(folder / "sink", LogSection(), console, **options)
    made.step, made.steps, made.losses = 350, 700, [3 - step / 200 for step in range(350)]
    made.layers = [{"sink_share": share, "top_content_share": 0.2} for share in (0.12, 0.34, 0.05)]
    made.look = Look([f"47+38={OPEN * 3}", f"47+38={OPEN}8{OPEN}", "47+38=085"], [f"tom has a{OPEN * 20}", "tom has a red ball."])
    made._began -= 35
    made._looked -= 60
    return made, file


def test_the_picture_fits_80_columns_and_shows_everything(tmp_path):
    shown, file = screen(tmp_path / "a", 80, terminal=True)
    assert has_room(shown.console)
    shown.console.print(shown)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in file.getvalue().splitlines()]
    text = "\n".join(lines)
    for part in (
        "twin 2 of 2: sink",
        "350/700",
        "10.0 steps/s 0:35 left",
        "loss       1.377  █",
        "47+38=085  right",
        "tom has a red ball.",
        "34%",
    ):
        assert part in text, text
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("width", "terminal"), [(50, True), (80, False)])
def test_a_narrow_terminal_and_a_pipe_get_short_plain_lines(tmp_path, width, terminal):
    shown, file = screen(tmp_path / "a", width, terminal=terminal)
    assert not has_room(shown.console)
    for line in shown.plain():
        shown.console.print(line)
    assert file.getvalue().splitlines() == [
        "sink 350/700 loss 1.38 10.0 steps/s 0:35 left",
        "  47+38= ___ _8_ 085  sink 17%",
    ]
    shown.layers = [{"top_content_share": 0.2}]
    assert shown.plain()[1].endswith("top 20%")


def test_a_curve_falls_as_its_values_do():
    assert spark([]) == ""
    assert spark([4.0, 2.0, 0.0]) == "█▄▁"
    assert len(spark([1.0] * 1000)) <= 24


# -- the whole, small -----------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_with_one_line_and_the_next_run_goes_on(made):
    stopped = (made / "stopped").read_text()
    assert stopped.count("\n") == 1
    assert stopped.startswith("sinkdlm: stopped by SIGINT after step 2 of 4")
    assert "run the same command to go on" in stopped
    second = (made / "second").read_text()
    assert "resuming the demo that is there" in second
    assert "sink: resuming after step 2 of 4" in second
    assert "vanilla: resuming" not in second
    for twin in run.TWINS:
        steps = [line["step"] for line in run._read_metrics(made / "demo" / twin) if line["kind"] == "train"]
        assert steps == [1, 2, 3, 4]


def test_what_is_printed_written_and_shown_is_the_same(made):
    printed = json.loads((made / "json").read_text())
    assert printed == json.loads((made / "demo" / "metrics.json").read_text())
    facts = printed["twins"]
    page, summary = text_of(made / "demo" / "report.html"), (made / "demo" / "summary.md").read_text()
    said = "\n".join(words.tell(printed, made / "demo", None))
    expected = [
        words.headline(facts),
        words.LARGER,
        *words.real_twins()["notes"],
        words.sums_text(facts),
        words.stories_text(facts),
    ]
    for twin in facts["twins"].values():
        expected += [words.match_text(twin["exact_match"]), words.loss_text(twin["story_loss"])]
        assert twin["exact_match"]["n"] == len(language.problems(0, held_out=True))
        assert f"{twin['train_seconds']:.0f}" in page
    expected.append(words._shares(facts["twins"]["sink"], "sink_share"))
    for part in expected:
        assert part in page
        assert part in said
        assert part in summary.replace("\\", "")
    for claim in printed["claims"][0]["claims"]:
        assert f"{claim['claim']}. {claim['evidence']}" in said
    assert [capture["n"]["trajectories"] for capture in printed["captures"]] == [TRAJECTORIES] * 2
    assert max(len(line) for line in (made / "first").read_text().splitlines() if line.startswith("  ")) <= 50


def test_without_what_draws_it_the_report_is_missing_and_the_rest_is_there(made, tmp_path, monkeypatch):
    def absent() -> None:
        raise errors.AnalysisError("reports need matplotlib: pip install 'sinkdlm[viz]'")

    monkeypatch.setattr("sinkdlm.analysis.figures.check_drawing", absent)
    captures = [read_capture(made / "demo" / "captures" / f"{twin}.json") for twin in run.TWINS]
    whole = json.loads((made / "demo" / "metrics.json").read_text())
    found, problem = run._report(captures, whole["twins"], tmp_path)
    assert found == whole
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    said = words.tell(found, tmp_path, problem)
    assert sum("pip install 'sinkdlm[viz]'" in line for line in said) == 1
    assert "--capture-only" in words.commands(found, tmp_path, draws=problem is None)[1]


def test_other_settings_start_over_and_other_files_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(language, "write_sets", lambda folder, seed: {})
    console = Console(highlight=False, soft_wrap=True, markup=False)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(errors.UserError, match=r"holds other files \(mine.txt\)"):
        run._settle(tmp_path, STEPS, 0, False, console)
    other = tmp_path / "other"
    other.mkdir()
    run._settle(other, STEPS, 0, False, console)
    (other / "vanilla").mkdir()
    (other / "kept.txt").write_text("a user's own")
    run._settle(other, STEPS, 0, False, console)
    assert (other / "vanilla").is_dir()
    run._settle(other, STEPS + 1, 0, False, console)
    assert not (other / "vanilla").exists()
    assert (other / "kept.txt").exists()
    said = capsys.readouterr().out
    assert "resuming the demo" in said
    assert "starting over: the demo that is there has other settings" in said
    run._settle(other, STEPS + 1, 0, True, console)
    assert capsys.readouterr().out.endswith("starting over\n")


def test_a_full_disk_and_a_second_demo_get_one_line(tmp_path, monkeypatch, command_line):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "demo.json"))

    monkeypatch.setattr(run, "replace_text", full)
    status, out, err = command_line("demo", "--out", tmp_path)
    assert (status, out) == (2, "")
    assert err == f"sinkdlm: {tmp_path}/demo.json: cannot be written: No space left on device; make room, or choose another --out\n"
    with run.held(tmp_path, "demo"):
        status, _, err = command_line("demo", "--out", tmp_path)
    assert status == 2
    assert "another demo runs there" in err


def test_commands_are_printed_as_the_program_was_called(made, monkeypatch, command_line):
    found = json.loads((made / "demo" / "metrics.json").read_text())
    monkeypatch.setattr(sys, "argv", ["/x/sinkdlm/__main__.py"])
    assert words.program() == [sys.executable, "-m", "sinkdlm"]
    monkeypatch.setattr(sys, "argv", [".venv/bin/sinkdlm"])
    commands = [shlex.split(command) for command in words.commands(found, made / "demo", draws=True)]
    assert [command[:2] for command in commands] == [[".venv/bin/sinkdlm", name] for name in ("sample", "analyze", "train")]
    status, out, _ = command_line(*commands[0][1:])
    assert status == 0
    assert out.startswith(found["twins"]["twins"]["sink"]["sums"][0]["question"])


# -- the whole, as it comes -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_demo_convinces_in_five_minutes(tmp_path):
    """As a user starts it, on one thread: neighbours stretch the clock and make two threads wait for each other, but hardly
    the time that one thread computes. On two idle cores five minutes of the clock have room for six of computing."""
    before = os.times()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sinkdlm", "demo", "--out", "demo"]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    after = os.times()
    assert shown.returncode == 0, shown.stderr
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used <= 360
    found = json.loads((tmp_path / "demo" / "metrics.json").read_text())
    page = text_of(tmp_path / "demo" / "report.html")
    for twin in found["twins"]["twins"].values():
        assert twin["exact_match"]["mean"] > 0.8
        assert words.match_text(twin["exact_match"]) in page
        assert words.match_text(twin["exact_match"]) in shown.stdout
    assert words.sums_text(found["twins"]) in page
    printed = [line.strip() for line in shown.stdout.splitlines()[-3:]]
    for line in printed:
        short = " --set train.steps=3" if " train " in line else ""
        subprocess.run(shlex.split(line + short), cwd=tmp_path, check=True, capture_output=True)
