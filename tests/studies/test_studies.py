"""The studies: what they find is planted, and asking the command line for one names its module."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from studies import inherited, steadiness
from studies.asking import read_beside
from studies.equal_rates import equal_rate_rows
from studies.inherited import FORMS, NAME, inherited_blocks
from studies.overlap import GRAM, corpus_texts, overlap
from studies.steadiness import steadiness_blocks, thirds_of

from reproductions import CUT, LESS, less_of_nano, make_cut, matrix, told
from sinkdlm import load
from sinkdlm.data.shards import open_split
from sinkdlm.data.synthetic import prepare_example
from sinkdlm.reproduce import nano
from sinkdlm.reproduce.markdown import to_markdown
from sinkdlm.reproduce.matrix import ADAPT, SCALES
from sinkdlm.reproduce.results import read_results


@pytest.fixture(scope="module")
def made(made_once) -> Path:
    return made_once("reproduce", make_cut)


def words(start: int, count: int) -> str:
    return " ".join(f"word{number}" for number in range(start, start + count))


def test_a_planted_gram_is_found_whatever_its_punctuation():
    tasks = {"a": [words(0, 30), words(100, 30)], "b": [words(200, GRAM - 1), words(300, GRAM)]}
    corpus = [f"Some text. {words(5, GRAM).upper().replace(' ', ', ')}! More.", words(100, GRAM - 1), words(300, GRAM)]
    found = overlap(iter(corpus), tasks)["tasks"]
    assert (found["a"]["documents_hit"], found["a"]["short"], found["a"]["documents_half"]) == (1, 0, 0)
    assert (found["b"]["documents_hit"], found["b"]["short"], found["b"]["documents_half"]) == (1, 1, 1)


def test_a_prepared_corpus_is_read_as_its_texts(tmp_path):
    prepare_example(tmp_path / "set", documents=60)
    texts = list(corpus_texts([str(tmp_path / "set")]))
    assert len(texts) == open_split(tmp_path / "set").n_documents
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert list(corpus_texts([str(lines)])) == texts


# -- rates ---


def test_what_was_compared_at_two_rates_is_compared_at_one():
    """The sink's lead over the DLM and the gate, -0.02 and -0.05, is the rate's: at theirs it has none."""
    effects = {"vanilla": 0.0, "sink": -0.02, "gate": 0.03, "vanilla-sink-rate": -0.02, "sink-dlm-rate": 0.03, "sinks-2": -0.02}
    slow = ("sink", "vanilla-sink-rate", "sinks-2")
    records = {
        name: replace(one, lr=4e-4 if one.variant in slow else 8e-4)
        for name, one in matrix({(ADAPT, variant): effect for variant, effect in effects.items()}, seeds=1e-5).items()
    }
    found = [
        (label, rates, round(float(nelbo.split()[0]), 2), seeds) for label, rates, nelbo, *_, seeds in equal_rate_rows(records)
    ]
    assert found == [
        ("(DLM + sink) \N{MINUS SIGN} DLM", "0.0004 and 0.0008", -0.02, "5"),
        ("the same, at one rate", "0.0008", 0.03, "5"),
        ("the same, at one rate", "0.0004", 0.0, "5"),
        ("(DLM + sink) \N{MINUS SIGN} (DLM + gate)", "0.0004 and 0.0008", -0.05, "5"),
        ("the same, at one rate", "0.0008", 0.0, "5"),
        ("DLM: larger rate \N{MINUS SIGN} smaller rate", "0.0008 and 0.0004", 0.02, "5"),
        ("DLM + sink: larger rate \N{MINUS SIGN} smaller rate", "0.0008 and 0.0004", 0.05, "5"),
    ]
    assert equal_rate_rows(matrix({(ADAPT, variant): 0.0 for variant in effects})) == []  # all at one rate


def test_what_sinks_are_before_training(made, tmp_path, capsys):
    """An isolated sink is the parent's first token: alone, with the same numbers in every layer. A register is not."""
    shutil.copytree(made / "cut", tmp_path / "cut")
    words = ["--out", str(tmp_path / "cut"), "--json", *CUT[:2]]
    with less_of_nano():
        inherited.main(words)
        inputs = nano.nano_inputs(SCALES["nano"], tmp_path / "cut")
    found = json.loads(capsys.readouterr().out)
    assert read_beside(tmp_path / "cut" / "records", NAME, "nano") == found
    lm = load(tmp_path / "cut" / "parent")
    rows = sorted(inputs.documents(LESS["documents"], 32), key=lambda row: -len(row))[:8]
    tokens = torch.tensor([row[: len(rows[-1])] for row in rows])
    assert (found["rows"], found["length"]) == (8, len(tokens[0]))
    hidden = ~torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    firsts = []

    def keep(layer, q, k, v, sink_k, sink_v):
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        firsts.append((scores.softmax(-1)[:, :, 1:, 0].mean(), v[:, :, 0].norm(dim=-1).mean(), v[:, :, 1:].norm(dim=-1).mean()))

    with lm.model.inference():
        lm.model(tokens, causal=True, observe=keep)
    for number, name in enumerate(("share", "norm", "other")):
        assert found["forms"]["parent"][name] == pytest.approx([float(layer[number]) for layer in firsts], rel=1e-3)
    shares = {name: sum(form["share"]) for name, form in found["forms"].items()}
    assert set(shares) == set(FORMS)
    assert len({round(share, 6) for share in shares.values()}) == len(shares)  # each is a form of its own
    said = to_markdown(inherited_blocks(found))
    assert all(form.label in said for form in FORMS.values())


def test_trainings_are_watched_and_not_made_again(made, tmp_path, capsys):
    """A form that is there is kept as it is, as long as its recipe is the same."""
    shutil.copytree(made / "cut", tmp_path / "cut")
    words = ["--out", str(tmp_path / "cut"), "--json", *CUT[:2]]
    with pytest.MonkeyPatch.context() as patch, less_of_nano():
        patch.setattr(steadiness, "FORMS", {name: steadiness.FORMS[name] for name in ("vanilla", "sink-end-slower")})
        steadiness.main(words)
        found = json.loads(capsys.readouterr().out)
        steadiness.main(words)
        assert told(json.loads(capsys.readouterr().out)) == told(found)
    assert read_beside(tmp_path / "cut" / "records", steadiness.NAME, "nano")["forms"] == found["forms"]
    assert not list((tmp_path / "cut" / "runs").glob("steadiness-*"))
    plain, sink = found["forms"].values()
    assert (len(plain["loss"]), len(sink["loss"]), sink["looks"]) == (1, 4, [0, 1, 2, 3, 4])  # a trial, and a run
    assert all(len(layers) == 3 and min(layers) > 0 for name in ("share", "norm") for layers in sink[name])
    assert plain["share"] == plain["norm"] == [[None] * 3] * 2  # before the only step, and after it
    said = to_markdown(steadiness_blocks(found, read_results(made / "cut" / "records", "nano"), []))
    assert "| sink at the end | 0.002 | 4 | 0 |" in said
    assert "Counted in 5 results" in said


def test_layers_are_summed_up_by_thirds():
    assert thirds_of([1.0, 3.0, 4.0, 4.0, 4.0, 8.0]) == pytest.approx((2.0, 5.0))
    assert thirds_of([None, None, None]) is None


def test_the_page_says_which_warm_up_kept_a_sink():
    """Both trainings have the same label and rate."""
    form = {
        "label": "DLM + sink",
        "lr": 0.004,
        "loss": [2.0] * 10,
        "gradient": [1.0] * 10,
        "looks": [0, 5],
        "norm": [[0.5] * 3] * 2,
    }
    short, long = ({**form, "recipe": f"[train]\nwarmup = {share}\nmin_warmup = 0\n"} for share in (0.1, 0.4))
    forms = {"short": short | {"share": [[0.3] * 3, [0.0] * 3]}, "long": long | {"share": [[0.3] * 3, [0.4] * 3]}}
    *_, lost, kept = to_markdown(steadiness_blocks({"forms": forms}, {}, [])).splitlines()
    assert lost.startswith("| DLM + sink | 0.004 | 10 | 1 | 2.000 |")
    assert lost.endswith("| 30% → 0% | 30% → 0% | 0.50 → 0.50 | 0.50 → 0.50 | step 5: 3 of 3 layers | step 0 |")
    assert kept.startswith("| DLM + sink | 0.004 | 10 | 4 | 2.000 |")
    assert kept.endswith("| 30% → 40% | 30% → 40% | 0.50 → 0.50 | 0.50 → 0.50 |  | step 0 |")


def test_nothing_is_said_where_nothing_was_measured():
    assert steadiness_blocks(None, {}, []) == []
