"""lm-eval's own command line with our model: what `sinkdlm eval` gives, to the last digit."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from benches import HUB, lines
from evaluated import save_model

pytest.importorskip("lm_eval")
TASK = "arc_easy"
pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval warns about packages that it does not use


@pytest.fixture(scope="module")
def bridge():
    """Import late: lm-eval takes seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sinkdlm.cli import lm_eval as found

        found.register()
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("lm_eval") / "model", context_length=512)


@pytest.fixture(scope="module")
def rows():
    first = HUB[TASK][1]
    return [{**first[i % 2], "id": f"q{i}", "question": f"{first[i % 2]['question']} {i}"} for i in range(24)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("bench")
    flat = [{"question": r["question"], "choices": r["choices"]["text"], "gold": "ABC".index(r["answerKey"])} for r in rows]
    (folder / "arc_easy_test.jsonl").write_text(lines(flat))
    return folder


@pytest.fixture
def offline(bridge, rows, monkeypatch):
    """The hub's rows without a network, and an index of one task: that of all takes a quarter of a minute."""
    import datasets
    from lm_eval import tasks

    table = datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})
    empty = {name: table["test"].select([]) for name in ("train", "validation")}
    monkeypatch.setattr(datasets, "load_dataset", lambda **_: datasets.DatasetDict({**table, **empty}))
    manager = tasks.TaskManager(include_path=[Path(tasks.__file__).parent / "arc"], include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda **_: manager)
    return manager


def ours_of(command_line, checkpoint, bench, out, *words):
    asked = ("eval", checkpoint, "--tasks", TASK, "--data", bench, "--limit", 20, "--log-samples", "--out", out, "--json")
    status, said, err = command_line(*asked, *words)
    assert not status, err
    return json.loads(said)["results"][TASK], sample_values(out)


def sample_values(folder):
    (file,) = folder.rglob(f"samples_{TASK}*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["doc_id"]: [[float(value) for value, _ in one] for one in row["resps"]] for row in rows}


def results_in(folder):
    (file,) = folder.rglob("results_*.json")
    return json.loads(file.read_text())["results"][TASK]


def test_lm_eval_gives_what_eval_gives(bridge, offline, checkpoint, bench, command_line, monkeypatch, tmp_path):
    ours, our_samples = ours_of(command_line, checkpoint, bench, tmp_path / "ours", "--draws", 16, "--seed", 3)
    told = f"pretrained={checkpoint},draws=16,seed=3,device=cpu"
    asked = ["--model", "sinkdlm", "--model_args", told, "--tasks", TASK, "--limit", "20", "--log_samples"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *asked, "--output_path", str(tmp_path / "theirs")])
    bridge.main()
    theirs, their_samples = results_in(tmp_path / "theirs"), sample_values(tmp_path / "theirs")
    assert len(our_samples) == 20
    assert their_samples == our_samples
    for name in ("acc,none", "acc_norm,none", "acc_stderr,none", "acc_norm_stderr,none"):
        assert theirs[name] == ours[name], name


def test_python_names_it_too(bridge, offline, checkpoint):
    import lm_eval

    told = f"pretrained={checkpoint},draws=8,guidance=0,greedy=False"
    found = lm_eval.simple_evaluate(model="sinkdlm", model_args=told, tasks=[TASK], limit=2, task_manager=offline)
    assert 0 <= found["results"][TASK]["acc,none"] <= 1


@pytest.mark.parametrize(("given", "told"), [
    ("draws=16", "no pretrained=CKPT"),
    ("pretrained=CKPT,draw=16", "draw"),
    ("pretrained=nowhere,draws=16", "nowhere: no such file or folder"),
])  # fmt: skip
def test_wrong_arguments_are_told_in_a_line(bridge, offline, checkpoint, monkeypatch, capsys, given, told):
    words = ["--model", "sinkdlm", "--model_args", given.replace("CKPT", str(checkpoint)), "--tasks", TASK]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    with pytest.raises(SystemExit) as left:
        bridge.main()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sinkdlm: ")]
    assert left.value.code == 2
    assert told in line


@pytest.mark.slow
def test_the_real_command_without_a_network(checkpoint, bench, rows, command_line, tmp_path):
    """A task's own file names the rows: `--include_path`, as lm-eval documents it."""
    data = tmp_path / "tasks" / "rows.jsonl"
    data.parent.mkdir()
    data.write_text(lines(rows))
    task = f"""
task: arc_here
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{choices.label.index(answerKey)}}}}"
doc_to_choice: "{{{{choices.text}}}}"
metric_list: [{{metric: acc}}]
"""
    (data.parent / "arc_here.yaml").write_text(task)
    words = ["--model", "sinkdlm", "--model_args", f"pretrained={checkpoint},draws=16,device=cpu", "--tasks", "arc_here"]
    words += ["--limit", "20", "--include_path", str(data.parent), "--output_path", str(tmp_path / "theirs")]
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, "-m", "sinkdlm.cli.lm_eval", *words], env=os.environ | own, check=True, capture_output=True)
    (file,) = (tmp_path / "theirs").rglob("results_*.json")
    assert 0 <= json.loads(file.read_text())["results"]["arc_here"]["acc,none"] <= 1
