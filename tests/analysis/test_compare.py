"""`sinkdlm compare`: paired differences by hand, intervals that cover, one page, and mistakes in one line."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sinkdlm
from evaluated import TEXTS, save_model, small_lm
from sinkdlm.analysis import compare
from sinkdlm.analysis.compare import Comparison, Document, Side, Sums
from sinkdlm.cli.app import app
from sinkdlm.data.shards import open_split
from sinkdlm.likelihood import document_likelihood

DRAWS, WINDOW = 8, 24
TEXTS_OF = [TEXTS[number % 4] * (1 + number % 3) for number in range(9)]


@pytest.fixture(scope="module")
def twins():
    return small_lm(seed=1, n_sinks=0), small_lm(seed=2)


@pytest.fixture(scope="module")
def documents(twins):
    """With one token in front, as EOS."""
    encode = twins[0].tokenizer.encode
    return [Document([1, *encode(text, add_special_tokens=False)], 1, number) for number, text in enumerate(TEXTS_OF)]


@pytest.fixture(scope="module")
def measured(twins, documents):
    rows = compare.cut(documents, WINDOW, 10**6)
    masks = compare.draw(rows, DRAWS, seed=3)
    return rows, masks, [compare.losses(lm, rows, masks, 4096, lambda rows: None) for lm in twins]


def nats_by_hand(lm, tokens, masked):
    """Of the masked tokens, one forward for one mask."""
    canvas = torch.tensor(tokens).masked_fill(masked, lm.config.mask_id)
    with torch.no_grad():
        logp = lm.model.head(lm.model(canvas[None]))[0].log_softmax(-1)
    return -float(logp[masked, torch.tensor(tokens)[masked]].sum())


def test_the_difference_is_the_one_computed_by_hand(twins, documents, measured):
    rows, masks, nats = measured
    found = compare.paired(rows, masks, nats, seed=0)
    assert found["unit"] == "document"
    sums, shares = np.zeros((2, len(documents))), {}
    for row, drawn in zip(rows, masks, strict=True):
        for chosen, weight in zip(drawn.masked, drawn.weight, strict=True):
            masked = torch.tensor([False] * row.n_given + chosen.tolist())
            pair = [nats_by_hand(lm, row.tokens, masked) for lm in twins]
            sums[:, row.document] += np.array(pair) * weight / DRAWS
            quarter = math.ceil(4 * chosen.sum() / len(chosen))
            shares.setdefault(quarter, []).append([*pair, chosen.sum()])
    n_tokens = sum(len(one.tokens) - 1 for one in documents)
    assert found["total"]["tokens"] == n_tokens == sum(row.n_scored for row in rows)
    assert found["total"]["difference"]["mean"] == pytest.approx((sums[1] - sums[0]).sum() / n_tokens, abs=1e-9)
    assert [found["total"][side] for side in ("first", "second")] == pytest.approx(sums.sum(1) / n_tokens, abs=1e-9)
    assert [[one["first"], one["second"]] for one in found["units"]] == pytest.approx(sums.T, abs=1e-9)
    assert found["n_lower"] == (sums[1] < sums[0]).sum()
    assert list(found["by_share"]) == ["0 to 25 %", "25 to 50 %", "50 to 75 %", "75 to 100 %"]
    for quarter, one in enumerate(found["by_share"].values(), start=1):
        first, second, n = np.sum(shares[quarter], axis=0)
        assert one["tokens"] == n
        assert one["difference"]["mean"] == pytest.approx((second - first) / n, abs=1e-9)
    sizes = np.array([len(one.tokens) - 1 for one in documents])
    assert list(found["by_length"]) == ["1 to 64", "65 to 256"]
    for one, kept in zip(found["by_length"].values(), (sizes <= 64, sizes > 64), strict=True):
        assert one["difference"]["mean"] == pytest.approx((sums[1] - sums[0])[kept].sum() / sizes[kept].sum(), abs=1e-9)


def test_the_nats_of_a_document_are_those_of_its_likelihood(twins, documents, measured):
    rows, masks, nats = measured
    found = compare.paired(rows, masks, nats, seed=0)["units"]
    for lm, side in zip(twins, ("first", "second"), strict=True):
        given = {"mask_id": lm.config.mask_id, "window": WINDOW, "prefix": [1], "draws": DRAWS, "seed": 3}
        scored = document_likelihood(lm.model.denoiser(), [one.tokens[1:] for one in documents], numbers=range(9), **given)
        assert [one[side] for one in found] == pytest.approx(scored.nats.tolist(), abs=1e-9)


def test_a_model_equals_itself_and_order_changes_the_sign(measured):
    rows, masks, nats = measured
    same = compare.paired(rows, masks, [nats[0], nats[0]], seed=0)["total"]["difference"]
    assert (same["mean"], same["low"], same["high"]) == (0, 0, 0)
    there, back = (compare.paired(rows, masks, pair, seed=0)["total"]["difference"] for pair in (nats, nats[::-1]))
    assert there["mean"] == -back["mean"] != 0
    assert there["low"] < there["mean"] < there["high"]


def test_few_documents_are_compared_row_by_row(measured):
    rows, masks, nats = measured
    kept = [number for number, row in enumerate(rows) if row.document < 5]
    found = compare.paired([rows[i] for i in kept], [masks[i] for i in kept], [one[kept] for one in nats], seed=0)
    assert (found["unit"], len(found["units"])) == ("row", len(kept))
    assert found["total"]["difference"]["low"] is not None
    few = compare.paired(rows[:3], masks[:3], [one[:3] for one in nats], seed=0)
    assert few["total"]["difference"]["low"] is None


def test_rows_end_at_the_budget_and_prompts_too_long_are_left_out(documents):
    rows = compare.cut(documents, WINDOW, 100)
    assert 100 - WINDOW < sum(row.n_scored for row in rows) <= 100
    assert len(compare.cut(documents, WINDOW, 1)) == 1
    assert compare.cut([Document([1] * 40, 30, 0), Document([1] * 40, 12, 1)], WINDOW, 100)[0].document == 1


def test_an_interval_of_a_ratio_covers(monkeypatch):
    """Documents of unequal lengths, whose difference a token varies with their length: 24 of them, 400 times."""
    monkeypatch.setattr("sinkdlm.analysis.intervals.N_RESAMPLES", 2000)
    random = np.random.default_rng(0)
    # Lengths from 20 to 400; the difference a token is -0.1 on average over tokens, with more of it in long documents.
    covered = 0
    for _ in range(400):
        tokens = random.integers(20, 401, 24).astype(float)
        gap = tokens * (-0.05 - tokens / 4000 + random.normal(0, 0.2, 24))
        line = Sums(np.zeros(24), gap, tokens).line(seed=0)
        mean, square = 210, (380**2 + 2 * 380) / 12 + 210**2  # of a whole number drawn from 20 to 400
        true = -0.05 - square / 4000 / mean
        covered += line["difference"]["low"] <= true <= line["difference"]["high"]
    assert 0.91 <= covered / 400 <= 0.98


def made_side(name, n_sinks, nats, texts=()):
    """A side with the attention of a small model."""
    lm = small_lm(n_sinks=n_sinks)
    rows = compare.cut([Document(lm.tokenizer.encode(TEXTS[0] * 3), 1, number) for number in range(2)], WINDOW, 100)
    return Side(name, f"runs/{name}", nats, compare.attention(lm, name, rows, 0), list(texts))


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (-0.5, "lane predicts these texts better than plain, by 0."),
        (0.5, "plain predicts these texts better than lane, by 0."),
        (0.0, "No difference shown between plain and lane"),
    ],
)
def test_the_title_says_what_the_interval_allows(measured, gap, words):
    rows, masks, nats = measured
    sides = made_side("plain", 0, nats[0]), made_side("lane", 1, nats[0] + gap)
    told = Comparison(sides, rows, masks, [], {"seed": 0})
    assert told.title.startswith(words)
    attended = list(told.grids())[-1].rows
    assert attended[0][:2] == ["attention on the sink token", "none"]
    assert attended[0][2].endswith(" %")
    assert attended[0][3] == ""


# -- the command ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Twins in float32, in which commands compute on a CPU, texts, and what `compare` says of them."""
    found = tmp_path_factory.mktemp("compared")
    for name, n_sinks in (("plain", 0), ("sunk", 1)):
        lm = small_lm(seed=4, n_sinks=n_sinks)
        sinkdlm.save(found / name / "model", lm.model.float(), lm.tokenizer)
    (found / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS_OF))
    return found


def run(*words, status=0):
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.stdout


def models(home):
    return home / "plain" / "model", home / "sunk" / "model"


@pytest.fixture(scope="module")
def compared(home):
    out = home / "out"
    return run("compare", *models(home), home / "texts.jsonl", "--draws", 8, "--length", 12, "--out", out), out


def test_a_summary_comes_first_then_the_files(home, compared):
    shown, out = compared
    found = json.loads((out / "compare.json").read_text())
    title, caution, lede, blank, table, *_ = shown.splitlines()
    assert ("sunk" in title, "nats a token" in title) == (True, True)
    assert lede.startswith("sunk \N{MINUS SIGN} plain: ")
    assert lede.endswith("of 9 documents. 9 documents, 9 rows, 390 tokens, 8 masks a row, the same for both.")
    assert caution.startswith("This compares two training runs: ")
    assert "sunk puts " in caution
    assert (blank, table) == ("", "Nats a token")
    assert shown.splitlines()[-1] == f"wrote {out / 'compare.html'} and {out / 'compare.json'}"
    assert [model["name"] for model in found["models"]] == ["plain", "sunk"]
    assert found["attention"]["models"][1]["quantities"]["sink_mass"]["total"]["mean"] > 0
    assert found["attention"]["models"][0]["quantities"]["sink_mass"]["total"]["n"] > 0
    assert len(found["samples"]) == 4


def test_the_unigram_entropy_is_that_of_the_scored_tokens():
    rows = [compare.Row(0, 0, [9, 5, 5, 6], 1, 0), compare.Row(0, 1, [5, 7], 1, 0)]  # scored: 5, 5, 6, 7
    assert compare.unigram_entropy(rows) == pytest.approx(1.5 * math.log(2))


def test_prompts_are_whole_words():
    tokenizer, words = small_lm().tokenizer, "om has 3 apples and more of them"
    ids = tokenizer.encode(words, add_special_tokens=False)
    rows = [compare.Row(0, place, part, 0, 0) for place, part in enumerate((ids, ids[:2], ids[:11]))]
    assert tokenizer.decode(ids[:11]) == "om has 3 ap"
    assert compare.prompts_of(rows, 3, tokenizer, 0) == [words[3:16], "om", "has 3"]


def test_both_sides_are_what_score_and_sample_give(home, compared):
    found = json.loads((compared[1] / "compare.json").read_text())
    (home / "prompts.txt").write_text("".join(sample["prompt"] + "\n" for sample in found["samples"]))
    for path, side in zip(models(home), ("first", "second"), strict=True):
        total = json.loads(run("score", path, home / "texts.jsonl", "--draws", 8, "--json"))["total"]
        assert found["total"][side] == pytest.approx(total["nats"] / total["tokens"], rel=1e-6)
        words = ["--prompts", home / "prompts.txt", "--length", 12, "--policy", "smdm-origin", "--json"]
        samples = json.loads(run("sample", path, *words))["samples"]
        assert [one["prompt"] + one[side] for one in found["samples"]] == [sample["text"] for sample in samples]


def test_json_is_what_the_file_holds(home, compared):
    words = ["--draws", 8, "--length", 12, "--json"]
    assert json.loads(run("compare", *models(home), home / "texts.jsonl", *words)) == json.loads(
        (compared[1] / "compare.json").read_text()
    )


def test_a_prepared_set_is_read_from_its_validation_split(home, tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 30))
    tokenizer = home / "plain" / "model"
    words = ["--tokenizer", tokenizer, "--documents", "line", "--validation", "0.2", "--out", tmp_path / "set"]
    run("data", "prepare", tmp_path / "texts.txt", *words)
    found = json.loads(run("compare", *models(home), tmp_path / "set", "--draws", 8, "--prompts", 0, "--tokens", 300, "--json"))
    split = open_split(tmp_path / "set", "validation")
    tokens = split.read(0, split.n_tokens).tolist()
    lengths = [len(part) for part in "".join(chr(token) for token in tokens).split(chr(1))[:-1]]  # EOS is 1
    n = sum(np.cumsum(lengths) <= 300)
    assert [unit["tokens"] for unit in found["units"]][:n] == lengths[:n]
    assert 250 < found["total"]["tokens"] <= 300
    assert found["samples"] == []
    scored = json.loads(run("score", models(home)[0], tmp_path / "set", "--draws", 8, "--json"))
    assert [one["tokens"] for one in scored["documents"]] == lengths


AXE = "axe.run(document, {resultTypes: ['violations']}).then(found => [found.passes.length, found.violations.map(one => one.id)])"


def test_the_page_fits_and_needs_nothing_else(browser, compared):
    axe = pytest.importorskip("axe_playwright_python")
    for width, scheme in ((1280, "light"), (390, "dark")):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.goto((compared[1] / "compare.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
        assert page.evaluate("[...document.querySelectorAll('figure svg')].map(one => one.clientWidth > 300)") == [True, True]
        assert page.locator("section#samples .pair").count() == 4
        page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
        passes, violations = page.evaluate(AXE)
        assert passes > 10
        assert violations == [], width
        assert said == []
        assert [url.partition(":")[0] for url in asked if not url.startswith("data:")] == ["file"]
        page.close()


@pytest.fixture(scope="module")
def other(home):
    """A model whose tokenizer begins texts with BOS, which the others do not have."""
    return save_model(home / "other" / "model", bos=True)


@pytest.mark.parametrize(
    ("second", "texts", "words", "said"),
    [
        (
            "other",
            "texts.jsonl",
            [],
            "have different tokenizers: nats a token do not compare; compare bits per byte: sinkdlm score",
        ),
        ("sunk", "absent.txt", [], "absent.txt: no such file or folder"),
        ("sunk", "empty.txt", [], "empty.txt: holds no text to score"),
        ("sunk", "texts.jsonl", ["--field", "body"], "body"),
        ("sunk", "texts.jsonl", ["--names", "a,a"], "give a different name for each of the 2 models"),
        ("sunk", "texts.jsonl", ["--policy", "lada"], "policy 'lada': unknown"),
        ("sunk", "texts.jsonl", ["--draws", "3"], "--draws"),
        ("sunk", "texts.jsonl", ["--out", "texts.jsonl"], "texts.jsonl: cannot be written"),
        ("absent", "texts.jsonl", [], "absent"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(home, other, command_line, monkeypatch, second, texts, words, said):
    monkeypatch.chdir(home)
    (home / "empty.txt").write_text("")
    status, shown, told = command_line("compare", "plain/model", f"{second}/model", texts, "--prompts", 0, "--draws", 8, *words)
    assert (status, shown) == (2, "")
    assert said in told
    assert told.rstrip("\n").count("\n") == 0
