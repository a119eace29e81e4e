"""`sinkdlm reproduce` as a user runs it: a cut of nano, interrupted and resumed; slow: killed, and small on tiny inputs."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reproductions import CUT, less_of_nano, make_cut, reproduce, told
from sinkdlm import DiffusionLM, ModelConfig, save
from sinkdlm.checkpoint.durable import held
from sinkdlm.data.synthetic import character_tokenizer, corpus, prepare_example
from sinkdlm.evals.requests import LOGLIKELIHOOD, Request, Sheet
from sinkdlm.evals.settings import Settings
from sinkdlm.reproduce import command
from sinkdlm.reproduce.matrix import SCALES, STUDIES, Job
from sinkdlm.reproduce.results import find_made, read_results


@pytest.fixture(scope="module")
def made(made_once) -> Path:
    return made_once("reproduce", make_cut)


@pytest.fixture
def less() -> Iterator[None]:
    """The nano of `made`, for commands that are not run by `reproduce`."""
    with less_of_nano():
        yield


def test_a_cut_of_nano_writes_records_and_a_report(made):
    out = made / "cut"
    records = read_results(out / "records", "nano")
    assert set(records) == {"adapt-sink-lr0", "adapt-sink-lr1", "adapt-sink-lr2", "adapt-sink-s1", "sft-sink-s1"}
    run, tuned = records["adapt-sink-s1"], records["sft-sink-s1"]
    tried = {one.lr: one.outcomes["nelbo"].value for one in records.values() if one.kind == "trial"}
    assert run.lr == min(tried, key=tried.get)
    assert run.facts["trials"] == {f"{lr:g}": round(value, 5) for lr, value in tried.items()}
    assert {"nelbo", "lambada_openai.nll", "lambada_openai.greedy", "arc_easy.nll", "arc_easy.acc", "arc_easy.acc_norm"} <= set(
        run.outcomes
    )
    assert {"gsm8k.nll", "gsm8k_two_stage.exact_match", "attention.middle_norm_ratio"} <= set(tuned.outcomes)
    assert len(run.layers["sink_mass"]) == 3
    assert "n_sinks = 1" in run.facts["recipe"]
    assert run.facts["tokens"] == 4 * 24 * 32
    assert not list((out / "runs").iterdir())  # weights go once the records are written
    report = json.loads((out / "report.json").read_text())
    assert [row["variant"] for row in report["targets"]["figure3"]["rows"]] == ["sink", "sink"]
    assert "report.html" in {path.name for path in out.iterdir()}


def test_an_interrupted_run_goes_on_stage_by_stage(made):
    """What was measured before Ctrl-C was not measured again."""
    assert json.loads((made / "parts").read_text()) == ["cuts", "task arc_easy", "task lambada_openai", "train", "validation"]


def test_a_finished_reproduction_makes_nothing_again(made, tmp_path):
    out = tmp_path / "cut"
    shutil.copytree(made / "cut", out)
    before = {path: path.stat().st_mtime_ns for path in (out / "records").iterdir()}
    report = json.loads((out / "report.json").read_text())
    assert reproduce("figure3", "--out", out, *CUT) == 0
    assert {path: path.stat().st_mtime_ns for path in (out / "records").iterdir()} == before
    assert json.loads((out / "report.json").read_text()) == report


@pytest.mark.usefixtures("less")
def test_records_of_other_settings_are_not_mixed(made, command_line):
    status, _, said = command_line("reproduce", "figure3", "--out", made / "cut", "--seeds", 1, "--set", "train.steps=5")
    assert status == 2
    assert "made with --set" in said


def test_records_of_other_data_are_not_mixed(made, tmp_path, capsys):
    """Results made from other data or settings are refused, and so is a folder that has other settings."""
    shutil.copytree(made / "cut", tmp_path / "cut")
    records = tmp_path / "cut" / "records"
    for path in sorted(records.iterdir()):
        said = json.loads(path.read_text())
        said["data"]["corpus"] = "another"
        path.write_text(json.dumps(said))
        assert reproduce("figure3", "--out", tmp_path / "cut", *CUT) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "other data (corpus)" in told
    assert f"{records / 'adapt-sink-lr0.json'}: made from other data (corpus); give the same, or give another --records" in told
    shutil.rmtree(records)
    assert reproduce("figure3", "--out", tmp_path / "cut", *CUT[2:], "--set", "train.steps=5") == 2
    assert "settings.json: made with --set" in capsys.readouterr().err


@pytest.mark.usefixtures("less")
def test_a_plan_says_what_is_missing(made, command_line):
    status, said, _ = command_line("reproduce", "figure3", "--out", made / "cut", *CUT[:2], "--seeds", 2, "--plan", "--json")
    assert status == 0
    assert [one["run"] for one in json.loads(said)] == ["adapt-sink-s2", "sft-sink-s2"]


@pytest.mark.usefixtures("less")
def test_a_plan_says_about_how_long(made, tmp_path, command_line):
    """Expected times come from the scale's declared seconds before there are results."""
    asked = ("reproduce", "all", "--out", made / "cut", "--records", tmp_path / "none", *CUT[:2], "--seeds", 1, "--plan")
    status, said, _ = command_line(*asked)
    assert status == 0
    *runs, total = said.splitlines()
    assert len(runs) == 63
    assert all(re.fullmatch(r"\S+ +about [1-9] s", run) for run in runs)
    assert re.fullmatch(r"63 runs are missing, about \d minutes", total)
    stages = {stage.split()[0] for one in json.loads(command_line(*asked, "--json")[1]) for stage in one["stages"]}
    for scale in SCALES.values():
        assert {"start", *scale.tables, *stages} == set(scale.seconds)


@pytest.mark.usefixtures("less")
def test_trials_of_other_rates_and_what_they_chose_are_made_again(made, command_line):
    rates = {**SCALES["nano"].lrs, "adapt": (2e-3, 4e-3, 8e-3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "nano", replace(SCALES["nano"], lrs=rates))
        status, said, _ = command_line("reproduce", "figure3", "--out", made / "cut", *CUT, "--plan", "--json")
    assert status == 0
    expected = ["adapt-sink-lr0", "adapt-sink-lr1", "adapt-sink-lr2", "adapt-sink-s1"]
    assert [one["run"] for one in json.loads(said)] == expected


def test_a_fine_tuning_of_another_base_is_made_again(made):
    records, scale = read_results(made / "cut" / "records", "nano"), SCALES["nano"]
    base, tuned = Job("adapt", "sink", 1), Job("sft", "sink", 1)
    assert find_made(tuned, records, scale) is records["sft-sink-s1"]
    again = replace(records[base.name], lr=1e-5)
    assert find_made(tuned, {**records, base.name: again}, scale) is None


def test_time_that_is_up_begins_nothing(made, tmp_path):
    out = tmp_path / "cut"
    shutil.copytree(made / "cut", out)
    assert reproduce("figure3", "--out", out, *CUT[:2], "--seeds", 2, "--time-limit", 0) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["left"] == ["adapt-sink-s2", "sft-sink-s2"]
    assert "2 runs are missing" in (out / "report.md").read_text()


def test_time_that_is_up_within_a_run_keeps_what_is_done(made, tmp_path):
    out = tmp_path / "cut"
    shutil.copytree(made / "cut", out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.Work, "_is_late", lambda self, following=None: following is None)  # not before runs, only within
        assert reproduce("figure3", "--out", out, *CUT[:2], "--seeds", 2) == 0
    assert json.loads((out / "report.json").read_text())["left"] == ["adapt-sink-s2", "sft-sink-s2"]
    assert (out / "runs" / "adapt-sink-s2" / "model").is_dir()
    assert [path.stem for path in (out / "parts" / "adapt-sink-s2").glob("*.json")] == ["train"]


def test_what_another_process_makes_is_left_to_it(made, tmp_path):
    """The command waits for another process's run only if its own runs need it."""
    out, theirs = tmp_path / "cut", tmp_path / "theirs"
    shutil.copytree(made / "cut", out)
    for name in ("adapt-sink-s1", "sft-sink-s1"):
        (theirs / name).parent.mkdir(exist_ok=True)
        (out / "records" / f"{name}.json").rename(theirs / name)
    claim, seen = held(out / "claims" / "adapt-sink-s1", "process"), []

    def others_end(_: float) -> None:
        seen.append(sorted(path.stem for path in (out / "records").iterdir()))
        for name in ("adapt-sink-s1", "sft-sink-s1"):
            (theirs / name).rename(out / "records" / f"{name}.json")
        claim.__exit__(None, None, None)

    claim.__enter__()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.time, "sleep", others_end)
        assert reproduce("figure3", "--out", out, *CUT) == 0
    assert seen == [["adapt-sink-lr0", "adapt-sink-lr1", "adapt-sink-lr2"]]
    assert not (out / "runs" / "adapt-sink-s1").exists()
    assert json.loads((out / "report.json").read_text()) == json.loads((made / "cut" / "report.json").read_text())


def test_a_run_that_fits_is_made_where_one_before_it_does_not(made, tmp_path):
    out = tmp_path / "cut"
    shutil.copytree(made / "cut", out)
    (out / "records" / "sft-sink-s1.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.Work, "_is_late", lambda self, following=None: following is not None and following.job.seed == 2)
        assert reproduce("figure3", "--out", out, *CUT[:2], "--seeds", 2) == 0
    assert json.loads((out / "report.json").read_text())["left"] == [
        "adapt-sink-s2",
        "sft-sink-s2",
    ]  # the first comes before sft-sink-s1
    assert (out / "records" / "sft-sink-s1.json").exists()


def test_nobody_waits_for_what_nobody_makes(made, tmp_path):
    """Without time for a base, and with no other process making it, its fine-tuning is not waited for."""
    out = tmp_path / "cut"
    shutil.copytree(made / "cut", out)
    (out / "records" / "adapt-sink-lr1.json").unlink()  # in other hands, and nothing that is left needs it
    with pytest.MonkeyPatch.context() as patch, held(out / "claims" / "adapt-sink-lr1", "process"):
        patch.setattr(command, "trials_of", lambda *_: [])
        patch.setattr(command.Work, "_is_late", lambda self, following=None: following.job.name == "adapt-sink-s2")
        patch.setattr(command.time, "sleep", lambda _: pytest.fail("waits"))
        assert reproduce("figure3", "--out", out, *CUT[:2], "--seeds", 2) == 0
    assert json.loads((out / "report.json").read_text())["left"] == ["adapt-sink-lr1", "adapt-sink-s2", "sft-sink-s2"]


def test_a_report_tells_of_what_others_made_last(made, tmp_path):
    out, theirs = tmp_path / "cut", tmp_path / "theirs.json"
    shutil.copytree(made / "cut", out)
    record = out / "records" / "sft-sink-s1.json"
    record.rename(theirs)
    run = command.Work.run

    def others_go_on(work: object) -> None:
        run(work)
        theirs.rename(record)

    with pytest.MonkeyPatch.context() as patch, held(out / "claims" / "sft-sink-s1", "process"):
        patch.setattr(command.Work, "run", others_go_on)
        assert reproduce("figure3", "--out", out, *CUT) == 0
    assert json.loads((out / "report.json").read_text()) == json.loads((made / "cut" / "report.json").read_text())


def test_every_study_is_named_to_who_asks_for_it_as_a_target():
    modules = {path.stem for path in (Path(__file__).parents[2] / "studies").glob("*.py") if "run_study(" in path.read_text()}
    assert len(modules) >= 5
    assert modules - {"asking"} == set(STUDIES)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("table9",), "figure3, gsm8k, all"),
        *(((name, "--scale", "small", "--plan"), f"python -m studies.{name}") for name in STUDIES),
        (("lengths", "--scale", "paper"), "python -m studies.lengths"),
        (("table1", "--only", "sing"), "neither a seed nor a variant"),
        (("table1", "--scale", "small"), "--data or --requests"),
        (("table1", "--scale", "small", "--tasks", ""), "--corpus"),
    ],
)
def test_mistakes_are_named(words, complaint, tmp_path, command_line):
    status, _, said = command_line("reproduce", *words, "--out", tmp_path / "out")
    assert status == 2
    assert complaint in said
    assert len(said.splitlines()) == 1


# -- slow -------------------------------------------------------------------------------------------------------------------------


def write_small(folder: Path) -> list[str]:
    """A parent, a corpus, fine-tuning data and questions, all tiny, in the forms that the small scale takes."""
    shape = {"preset": "nano", "context_length": 512}
    save(folder / "parent", DiffusionLM(ModelConfig.preset("nano", context_length=512), seed=0), character_tokenizer())
    prepare_example(folder / "corpus", documents=300)
    rows = [f"tom has {n} eggs and gets 2.||{n}+2={n + 2} #### {n + 2}" for n in range(3, 90)]
    (folder / "gsm8k.txt").write_text("\n".join(rows) + "\n")
    texts = corpus(12, seed=5)
    requests = [Request(LOGLIKELIHOOD, "lambada_openai", n, 0, text[:-2], text[-2:]) for n, text in enumerate(texts)]
    requests += [Request(LOGLIKELIHOOD, "piqa", n, o, text[:-1], c) for n, text in enumerate(texts) for o, c in enumerate(".!")]
    gold = {"lambada_openai": [0] * 12, "piqa": [n % 2 for n in range(12)]}
    Sheet(requests, {task: Settings() for task in gold}, about={"gold": gold}).write(folder / "requests.jsonl")
    changes = [f"model.{key}={value}" for key, value in shape.items()] + ["data.length=96", "train.steps=4", "train.batch=8"]
    changes.append("model.vocab_size=64")
    given = {
        "parent": folder / "parent",
        "corpus": folder / "corpus",
        "sft": folder / "gsm8k.txt",
        "requests": folder / "requests.jsonl",
    }
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    return [*words, *(word for change in changes for word in ("--set", change))]


@pytest.mark.slow
def test_small_runs_on_what_it_is_given(tmp_path):
    """Its own stages and settings, on a model of this size; a machine without the harness has the same packages."""
    less = {"documents": 12, "draws": 8, "trajectories": 2, "written": 8, "examples": 10}
    words = ["figure3", "--scale", "small", "--seeds", "1", "--official", "--out", str(tmp_path / "out"), *write_small(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "small", replace(SCALES["small"], **less))
        assert reproduce(*words) == 0
    records = read_results(tmp_path / "out" / "records", "small")
    assert set(records) == {"adapt-sink-lr0", "adapt-sink-lr1", "adapt-sink-lr2", "adapt-sink-s1", "sft-sink-s1"}
    assert len(records["adapt-sink-s1"].outcomes["piqa.nll"].values) == 12
    assert {"official.piqa.acc", "official.lambada_openai.greedy"} <= set(records["adapt-sink-s1"].outcomes)
    assert "official.piqa.nll" not in records["adapt-sink-s1"].outcomes  # a score, and no likelihood
    assert "gsm8k.nll" in records["sft-sink-s1"].outcomes
    heavy = ("lm_eval", "datasets", "matplotlib", "gguf", "math_verify")
    script = f"import sys, sinkdlm.reproduce.command\nprint([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# The command, killed after a step of a run.
KILLED = """
import os, signal
from sinkdlm.cli import entry as cli
from sinkdlm.training import loop
look = loop.Trainer._look_around
def die(self):
    look(self)
    if (self.folder.path.name, self.step) == ("adapt-sink-s1", 20):
        os.kill(os.getpid(), signal.SIGKILL)
loop.Trainer._look_around = die
cli.main()
"""
# The command, which says when it could begin, and then waits for a line.
HELD = """
import sys
import sinkdlm.reproduce.command
from sinkdlm.cli import entry as cli
print("ready", flush=True)
sys.stdin.readline()
cli.main()
"""


@pytest.mark.slow
def test_a_killed_reproduction_ends_with_the_same_table(tmp_path):
    """SIGKILL in the middle of a run, and then to the end; beside it, one that was left alone. Nano's own parent."""
    words = ["reproduce", "table5", "--only", "sink", "--tasks", "lambada_openai", "--set", "train.steps=40", "--seeds", "1"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-c", KILLED, *words, "--out", str(killed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-4000:]
    assert not (killed / "records" / "adapt-sink-s1.json").exists()
    assert len(list((killed / "records").glob("*.json"))) == 3
    whole.mkdir()
    for name in ("data", "parent"):
        shutil.copytree(killed / name, whole / name)
    for folder in (killed, whole):
        assert reproduce(*words[1:], "--out", folder, whole=True) == 0
    first, second = (json.loads((folder / "report.json").read_text()) for folder in (killed, whole))
    assert told(first) == told(second)
    assert first["work"]["records"] == 4


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path):
    """The same command twice at the same time: every run is made once, and the report is that of one process. They begin together:
    one that had imported its packages much sooner could have made all of it."""
    words = ["reproduce", "table5", "--only", "sink", "--tasks", "", "--set", "train.steps=8", "--seeds", "2"]
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    assert reproduce(*words[1:], "--out", alone, whole=True) == 0
    for name in ("data", "parent"):
        shutil.copytree(alone / name, shared / name)
    command = [sys.executable, "-c", HELD, *words, "--out", str(shared)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    said = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    names = ["adapt-sink-lr0", "adapt-sink-lr1", "adapt-sink-lr2", "adapt-sink-s1", "adapt-sink-s2"]
    made = [[name for name in names if f"{name}: " in text] for text in said]
    assert sorted(made[0] + made[1]) == names
    assert made[0]
    assert made[1]
    assert reproduce(*words[1:], "--out", shared, whole=True) == 0
    first, second = (json.loads((folder / "report.json").read_text()) for folder in (alone, shared))
    assert told(first) == told(second)
