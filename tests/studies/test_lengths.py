"""Records by length: tokens of questions are counted as they are scored, leads stand where they were planted, cuts are cut."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from studies.asking import read_beside
from studies.lengths import BASE, MIXED, NAME, OTHER, PLAIN, conclude, lead_at, leads, lengths_blocks, main

from evaluated import small_lm, tiny_tokenizer
from reproductions import matrix
from sinkdlm.data.synthetic import prepare_example
from sinkdlm.errors import ReproduceError
from sinkdlm.evals.requests import LOGLIKELIHOOD, Request, Sheet
from sinkdlm.evals.settings import Settings
from sinkdlm.model.attention import attend_naive
from sinkdlm.reproduce.claims import pair
from sinkdlm.reproduce.inputs import GOLD, Inputs
from sinkdlm.reproduce.markdown import to_markdown
from sinkdlm.reproduce.matrix import ADAPT, SCALES
from sinkdlm.reproduce.measuring import Model, _writes, score_cuts
from sinkdlm.reproduce.results import Outcome, RunResult

QUESTIONS = [("abc", " de", 0), ("abcdef", " g", 0), ("a" * 40, " bcd", 1), ("abcd ", "xyz", 0)]


def sheet() -> Sheet:
    """Two options each; the other one is longer."""
    requests = []
    for doc, (context, right, gold) in enumerate(QUESTIONS):
        options = [right, right + "!!!!"] if gold == 0 else [right + "!!!!", right]
        for index, option in enumerate(options):
            requests.append(Request(LOGLIKELIHOOD, "arc_easy", doc, index, context, option))
    return Sheet(requests, {"arc_easy": Settings()}, seed=0, about={GOLD: {"arc_easy": [gold for _, _, gold in QUESTIONS]}})


def test_tokens_are_counted_of_prompt_and_right_option(tmp_path, capsys):
    sheet().write(tmp_path / "requests.jsonl")
    tiny_tokenizer().save_pretrained(tmp_path / "parent")
    given = [f"--parent={tmp_path / 'parent' / 'tokenizer.json'}", "--scale=small", f"--records={tmp_path / 'records'}"]
    main([*given, f"--requests={tmp_path / 'requests.jsonl'}", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert read_beside(tmp_path / "records", NAME, "small") == found
    counted = found["tasks"]["arc_easy"]
    assert Outcome.from_json(counted["tokens"]).values.tolist() == [len(context + right) for context, right, _ in QUESTIONS]
    assert Outcome.from_json(counted["scored"]).values.tolist() == [3, 2, 4, 4]  # a prompt's last blank goes with the option
    with pytest.raises(SystemExit) as left:
        main(given)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "--requests" in said
    assert len(said.splitlines()) == 1


def test_a_lead_is_shown_at_the_lengths_where_it_is():
    """Planted in short questions alone."""
    records = matrix({(ADAPT, BASE): 0.0, (ADAPT, OTHER): 0.0}, n_seeds=3)
    tokens = np.where(np.arange(200) < 100, 20, 100)
    for name, one in records.items():
        if one.variant == OTHER:
            values = one.outcomes["arc_easy.nll"].values - np.where(tokens < 32, 3.0, 0.0)  # of ten tokens
            records[name] = replace(one, outcomes={**one.outcomes, "arc_easy.nll": Outcome.of_items(values, 2000.0)})
    counted = {
        "tasks": {
            "arc_easy": {
                name: Outcome.of_items(values, 200).to_json() for name, values in (("tokens", tokens), ("scored", np.full(200, 10)))
            }
        }
    }
    cells = leads(records, counted)["arc_easy"]
    short, _, longer, *_ = cells
    assert (short.n, longer.n) == (100, 100)
    assert np.mean(short.leads) == pytest.approx(-0.3, abs=0.01)
    assert np.mean(longer.leads) == pytest.approx(0.0, abs=0.01)
    assert [len(cell.leads) for cell in cells] == [3, 0, 3, 0, 0, 0]
    said = to_markdown(lengths_blocks(records, counted, SCALES["small"]))
    told = [f"{np.mean(one.leads):+.3f} ({min(one.leads):+.3f} to {max(one.leads):+.3f}; 100)" for one in (short, longer)]
    assert f"| arc_easy | {told[0]} |  | {told[1]} |" in said
    assert not lengths_blocks({}, counted, SCALES["small"])


def test_lengths_of_other_questions_are_refused():
    records = matrix({(ADAPT, BASE): 0.0, (ADAPT, OTHER): 0.0}, n_seeds=1)
    for name, one in records.items():
        records[name] = replace(one, facts={**one.facts, "data": {"requests": "these"}})
    assert leads(records, {"requests": "these", "tasks": {}}) == {}
    with pytest.raises(ReproduceError, match="other questions"):
        leads(records, {"requests": "those", "tasks": {}})


CUTS = (16, 512)


def with_leads(plain: tuple[float, float], mixed: tuple[float, float]) -> dict[str, RunResult]:
    """Leads of the sink at a short cut and at a long one, nats a token, by what training had; documents scatter far more."""
    shared = np.random.default_rng(5).normal(4.0, 1.0, 128)
    found = {}
    for variants, values in ((PLAIN, plain), (MIXED, mixed)):
        for variant, shifts in zip(variants, ((0.0, 0.0), values), strict=True):
            (one,) = matrix({(ADAPT, variant): 0.0}, n_seeds=1).values()
            outcomes = dict(one.outcomes)
            for kind in ("rows", "ends"):
                for length, shift in zip(CUTS, shifts, strict=True):
                    noise = np.random.default_rng([*map(ord, variant), length]).normal(0, 0.1, 128)
                    outcomes[f"{kind}.{length}"] = Outcome.of_items(length * (shared + shift + noise), length * 128)
            found[one.name] = replace(one, outcomes=outcomes)
    return found


@pytest.mark.parametrize(
    ("plain", "mixed", "said"),
    [
        ((-0.3, -0.01), (0.0, -0.01), "as it should if length is the cause"),
        ((-0.3, -0.01), (-0.3, -0.01), "speaks against length"),
        ((-0.3, -0.01), (-0.6, -0.01), "speaks against length"),
        ((-0.3, -0.01), (-0.15, -0.01), "length is part of the cause"),
        ((0.0, 0.0), (0.0, 0.0), "not larger on short rows"),
        ((-0.3, -0.3), (0.0, 0.0), "not larger on short rows"),
    ],
)
def test_length_is_the_cause_where_short_rows_in_training_take_the_lead_away(plain, mixed, said):
    records = with_leads(plain, mixed)
    short, long = (lead_at(records, f"rows.{length}") for length in CUTS)
    assert short is not None
    assert long is not None
    assert short.plain.difference == pytest.approx(plain[0], abs=0.05)
    assert short.change.difference == pytest.approx(mixed[0] - plain[0], abs=0.07)
    assert said in conclude(short, long)
    text = to_markdown(lengths_blocks(records, None, replace(SCALES["small"], cuts=CUTS)))
    assert text.count(said) == 2  # whole rows, and their ends
    assert f"| half of random length | {short.mixed.difference:+.3f}" in text
    assert f"| second \N{MINUS SIGN} first | {short.change.difference:+.3f}" in text
    del records[f"adapt-{MIXED[0]}-s1"]
    assert lead_at(records, "rows.16") is None
    assert said not in to_markdown(lengths_blocks(records, None, replace(SCALES["small"], cuts=CUTS)))


def test_pairs_that_had_short_rows_stand_beside_those_that_had_not_on_one_seed():
    effects = {(ADAPT, variant): 0.0 for variant in (*PLAIN, *MIXED)}
    records = matrix(effects, n_seeds=3)
    tokens = {name: Outcome.of_items(np.full(200, value), 200).to_json() for name, value in (("tokens", 20), ("scored", 10))}
    said = to_markdown(lengths_blocks(records, {"tasks": {"arc_easy": tokens}}, SCALES["small"]))
    (cells,) = leads({name: one for name, one in records.items() if one.seed == 1}, {"tasks": {"arc_easy": tokens}}, MIXED).values()
    assert f"| arc_easy, half of random length | {np.mean(cells[0].leads):+.3f} (200) |" in said
    assert "| arc_easy, rows of one length |" in said


@pytest.fixture
def cut(tmp_path):
    prepare_example(tmp_path / "text", documents=60)
    return Inputs(tmp_path / "text"), replace(SCALES["nano"], cuts=(8, 16, 64), documents=24)


def test_documents_are_scored_at_every_length(cut):
    inputs, scale = cut
    model = Model(small_lm(n_sinks=1), None)
    found = score_cuts(model, inputs, scale).outcomes
    documents = inputs.documents(scale.documents, 64)
    for length in scale.cuts:
        rows = [document[:length] for document in documents if len(document) >= length]
        expected = model.score(rows, [0] * len(rows), scale.draws)
        assert found[f"rows.{length}"].value == expected.value
    full = [document for document in documents if len(document) == 64]
    assert full
    ends = model.score([row[-16:] for row in full], [12] * len(full), scale.draws)
    assert found["ends.16"].value == ends.value
    other = score_cuts(Model(small_lm(seed=1, n_sinks=1), None), inputs, scale).outcomes
    runs = {
        variant: replace(one, outcomes={**one.outcomes, **outcomes})
        for variant, outcomes in ((BASE, found), (OTHER, other))
        for one in matrix({(ADAPT, variant): 0.0}, n_seeds=1).values()
    }
    said = to_markdown(lengths_blocks({one.name: one for one in runs.values()}, None, scale))
    assert f"{pair(runs[BASE], runs[OTHER], 'rows.8').difference:+.3f}" in said
    assert f"{found['attention.writes.16'].value:.3f}" in said


@pytest.mark.parametrize("losses", [[1, 2, 3, 5, 4], [5, 4, 3, 1, 2]])
def test_what_heads_write_is_held_against_what_is_lost(losses):
    """By ranks, over models whose training had no short rows: the sixth, which would say the opposite, is none of them."""
    short, *between, long = SCALES["small"].cuts
    records = {}
    for number, (variant, lost) in enumerate(
        zip((BASE, "sink", "gate", "register", "logit", MIXED[0]), [*losses, 99], strict=True)
    ):
        (one,) = matrix({(ADAPT, variant): 0.0}, n_seeds=1).values()
        rows = {f"rows.{length}": Outcome.of_items([4.0, 4.0], 2) for length in (*between, long)}
        wrote = {f"attention.writes.{length}": Outcome.of_value(0.4) for length in (*between, long)}
        more = {
            f"rows.{short}": Outcome.of_items([4.0 + lost] * 2, 2),
            f"attention.writes.{short}": Outcome.of_value(0.5 + number / 10),
        }
        records[one.name] = replace(one, outcomes={**one.outcomes, **rows, **wrote, **more})
    said = to_markdown(lengths_blocks(records, None, SCALES["small"]))
    correlation = 0.9 if losses[0] == 1 else -0.9
    assert f"5 models trained on rows of {long} tokens alone: {correlation:.2f}." in said


@pytest.mark.parametrize(
    "flags",
    [
        {"n_sinks": 0},
        {"n_sinks": 1},
        {"n_sinks": 1, "sink_kind": "logit"},
        {"n_sinks": 1, "sink_kind": "register"},
        {"gate": "elementwise"},
        {"gate": "headwise", "n_sinks": 1},
    ],
)
def test_what_heads_write_is_what_their_output_holds(flags):
    """Against attention done again, with the gate that its input has."""
    lm = small_lm(**flags)
    rows = [[5, 6, 7, 8, 9, 10, 11, 12], [9, 9, 8, 7, 6, 5, 4, 3]]
    found = _writes(Model(lm, None), rows)
    entered, shares = {}, []

    def observe(layer, q, k, v, sink_k, sink_v):
        attention = lm.model.blocks[layer].attention
        mixed, _ = attend_naive(q, k, v, sink_k, sink_v, sink_logit=attention.sink_logit)
        if attention.gate is not None:
            gate = torch.sigmoid(attention.gate(entered.pop(layer))).unflatten(-1, (attention.n_heads, -1))
            mixed = mixed * gate.transpose(1, 2)
        shares.append(float(mixed.norm(dim=-1).mean() / v.norm(dim=-1).mean()))

    for block in lm.model.blocks:
        block.attention.register_forward_pre_hook(lambda module, given: entered.update({module.layer: given[0]}))
    hidden = torch.rand(2, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    with lm.model.inference():
        for row in torch.tensor(rows).masked_fill(hidden, lm.config.mask_id):
            lm.model(row[None], observe=observe)
    assert len(shares) == 2 * lm.config.n_layers
    assert found == pytest.approx(np.mean(shares), rel=1e-4)
