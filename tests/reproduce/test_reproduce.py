"""The method: planted effects are found and absent ones are not, pairs cancel what they share, results hold what they say."""

import json
import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks import reproduction_page as page
from benchmarks.marked import prose
from studies.asking import write_beside
from studies.lengths import PLAIN
from studies.steadiness import NAME as STEADINESS

from evaluated import small_lm
from reproductions import ITEMS, TOKENS, matrix, result, trial
from sinkdlm.cli.loading import load_parent
from sinkdlm.config.recipe import Recipe
from sinkdlm.config.shipped import RECIPES
from sinkdlm.config.toml import flatten
from sinkdlm.data.rows import open_rows
from sinkdlm.data.synthetic import character_tokenizer, prepare_example
from sinkdlm.errors import ReproduceError
from sinkdlm.evals.paper import PAPER_ROWS
from sinkdlm.evals.requests import LOGLIKELIHOOD, Request, Sheet
from sinkdlm.evals.settings import Settings
from sinkdlm.interop import open_source
from sinkdlm.reproduce import claims, paper, statistics
from sinkdlm.reproduce.inputs import GOLD, Asked, Inputs, Parents
from sinkdlm.reproduce.markdown import bullets, table, to_html, to_markdown
from sinkdlm.reproduce.matrix import (
    ADAPT,
    ONCE,
    SCALES,
    SCRATCH,
    SFT,
    TARGETS,
    VARIANTS,
    Job,
    jobs_of,
    paper_rows,
    select,
    stages_declared,
    trials_of,
)
from sinkdlm.reproduce.measuring import Model, ask_officially
from sinkdlm.reproduce.report import findings, verdicts, write_report
from sinkdlm.reproduce.results import MAX_BYTES, Outcome, read_result, read_results, write_result
from sinkdlm.reproduce.running import Bench, recipe_of

CLAIM = {claim.name: claim for claim in claims.CLAIMS}


def judged(name, results):
    return {one.outcome: one for one in claims.judge(CLAIM[name], results)}


# -- statistics -----------------------------------------------------------------------------------------------------------------


def test_intervals_and_tests_are_students():
    from scipy import stats

    values = [0.3, -0.1, 0.25, 0.4, 0.05]
    found = statistics.over_seeds(values)
    theirs = stats.ttest_1samp(values, 0.0)
    low, high = theirs.confidence_interval(0.95)
    assert (found.low, found.high, found.p) == pytest.approx((low, high, theirs.pvalue))


def test_one_seed_gives_a_mean_and_no_interval():
    found = statistics.over_seeds([0.2])
    assert (found.mean, found.n, found.known) == (0.2, 1, False)
    assert math.isnan(found.low)
    assert not statistics.over_seeds([0.1, 0.2]).known
    assert statistics.over_seeds([]).n == 0


def test_intervals_cover_what_they_say():
    draws = np.random.default_rng(0).normal(0.7, 2.0, (4000, 5))
    hits = [found.low <= 0.7 <= found.high for found in map(statistics.over_seeds, draws.tolist())]
    assert 0.94 < np.mean(hits) < 0.96


def test_pairs_cancel_what_items_share():
    rng = np.random.default_rng(1)
    shared = rng.gamma(4.0, 10.0, 300)
    one, other = shared, shared + 0.5 + rng.normal(0, 0.1, 300)
    found = statistics.pair_items(one, other, 600.0)
    assert found.difference == pytest.approx(0.25, abs=0.01)
    assert found.stderr < 0.01 * shared.std() * math.sqrt(300) / 600  # unpaired, it would be that of the items
    with pytest.raises(ValueError, match="same items"):
        statistics.pair_items(one, other[:-1], 600.0)


def test_equal_differences_are_no_proof():
    """Three seeds that all gave one right answer more: how seeds scatter is not known, and a p of 0 would be made up."""
    found = statistics.over_seeds([1 / 30] * 3)
    assert math.isnan(found.p)
    assert math.isnan(statistics.over_seeds([0.1 + 0.2, 0.3, 0.3]).p)  # equal but for rounding
    assert statistics.over_seeds([0.0] * 3).p == 1.0


def test_holm_is_holms():
    *found, unknown = statistics.holm([0.01, 0.04, 0.03, 0.005, math.nan])
    assert found == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert math.isnan(unknown)


def test_holm_seldom_finds_something_among_many_nulls():
    p = np.random.default_rng(2).random((2000, 20))
    wrong = [min(statistics.holm(row)) <= statistics.ALPHA for row in p.tolist()]
    assert np.mean(wrong) < 0.06


def test_equivalence_is_two_one_sided_tests():
    from scipy import stats

    values, shown = np.array([0.002, -0.004, 0.003, 0.001, -0.001]), []
    for shift in np.linspace(0, 0.02, 41):
        found = statistics.over_seeds((values + shift).tolist(), 1 - 2 * statistics.ALPHA)
        sides = (stats.ttest_1samp(values + shift, edge, alternative=tail) for edge, tail in ((-0.01, "greater"), (0.01, "less")))
        assert found.within(0.01) == all(side.pvalue <= statistics.ALPHA for side in sides)
        shown.append(found.within(0.01))
    assert (shown[0], shown[-1]) == (True, False)
    assert not statistics.over_seeds([0.05, -0.05, 0.0], 0.9).within(0.01)  # too noisy to tell
    assert not statistics.over_seeds([0.0, 0.0], 0.9).within(0.01)  # too few


# -- verdicts -------------------------------------------------------------------------------------------------------------------


def test_a_planted_effect_is_found_and_its_opposite_refused():
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): -0.02, (ADAPT, "gate"): 0.03})
    found = judged("sink-helps", results)
    assert set(found) == set(claims.PRIMARY)
    assert {one.verdict for one in found.values()} == {claims.HOLDS}
    assert found["nelbo"].spread.mean == pytest.approx(-0.02, abs=0.003)
    assert {one.verdict for one in judged("gate-helps", results).values()} == {claims.FAILS}
    assert claims.overall(claims.judge(CLAIM["sink-beats-gate"], results)) == claims.HOLDS


def test_nothing_is_found_where_nothing_is():
    """Seeds that scatter: better or worse may be said as seldom as the level says."""
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): 0.0}, n_seeds=300, seeds=0.05)
    verdicts = []
    for first in range(1, 300, 5):
        five = {name: one for name, one in results.items() if first <= one.seed < first + 5}
        verdicts.append(judged("sink-helps", five)["nelbo"].verdict)
    assert len(verdicts) == 60
    assert verdicts.count(claims.OPEN) >= 54


def test_a_difference_too_small_to_matter_does_not_hold():
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): 0.0}, seeds=0.0005)
    assert judged("sink-helps", results)["nelbo"].verdict == claims.FAILS


def test_equivalence_needs_the_margin():
    same = matrix({(ADAPT, "sink"): 0.0, (ADAPT, "sink-end"): 0.003}, seeds=0.0005)
    assert judged("position", same)["nelbo"].verdict == claims.HOLDS
    far = matrix({(ADAPT, "sink"): 0.0, (ADAPT, "sink-end"): 0.03}, seeds=0.0005)
    assert judged("position", far)["nelbo"].verdict == claims.FAILS
    noisy = matrix({(ADAPT, "sink"): 0.0, (ADAPT, "sink-end"): 0.0}, seeds=0.05)
    assert judged("position", noisy)["nelbo"].verdict == claims.OPEN


def test_few_seeds_give_no_verdict():
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): -0.5}, n_seeds=2)
    assert claims.overall(claims.judge(CLAIM["sink-helps"], results)) == claims.FEW
    assert claims.overall(claims.judge(CLAIM["sink-helps"], {})) == claims.FEW


def test_a_claim_waits_for_all_of_its_outcomes():
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): -0.02})
    for one in results.values():
        del one.outcomes["lambada_openai.nll"]  # type: ignore[attr-defined]
    found = judged("sink-helps", results)
    assert {name: one.verdict for name, one in found.items()} == {
        "nelbo": claims.HOLDS,
        "lambada_openai.nll": claims.FEW,
        "choices.nll": claims.HOLDS,
    }
    assert claims.overall(list(found.values())) == claims.FEW
    assert "not measured yet" in found["lambada_openai.nll"].sentence


def test_only_seeds_that_both_have_are_paired():
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): -0.02})
    del results["adapt-sink-s2"]
    found = judged("sink-helps", results)["nelbo"]
    assert (found.spread.n, sorted(found.within)) == (4, [1, 3, 4, 5])


def test_runs_scored_on_other_items_are_no_pairs():
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): 0.0}, n_seeds=1)
    short = results["adapt-sink-s1"]
    short.outcomes["nelbo"] = Outcome.of_items([1.0, 2.0], 20.0)  # type: ignore[index]
    with pytest.raises(ValueError, match="other items"):
        judged("sink-helps", results)


def test_quantities_are_held_against_their_bounds():
    results = matrix({(ADAPT, "sink"): 0.0, (ADAPT, "vanilla"): 0.0, (SFT, "sink"): 0.0})
    verdicts = {
        name: claims.overall(claims.judge(CLAIM[name], results)) for name in ("share", "norm", "norm-after", "low-norm", "moving")
    }
    assert set(verdicts.values()) == {claims.HOLDS}
    assert claims.verdict_of(claims.BELOW, statistics.over_seeds([0.5, 0.6, 0.4])) == claims.FAILS


# -- results ----------------------------------------------------------------------------------------------------------------------


def test_a_result_comes_back_as_it_was(tmp_path):
    made = result(ADAPT, "sink", 3, -0.02)
    path = write_result(tmp_path, made)
    found = read_result(path)
    assert found.to_json() == made.to_json()
    assert claims.pair(found, made, "nelbo") == statistics.Paired(0.0, 0.0, ITEMS)
    assert found.outcomes["nelbo"].value == made.outcomes["nelbo"].value  # rounded when made, not when written
    assert read_results(tmp_path, "small").keys() == {"adapt-sink-s3"}
    assert read_results(tmp_path, "nano") == {}


@pytest.mark.parametrize("top", [1.0, 30.0, 4000.0])
def test_values_are_kept_closely_enough_to_pair(top):
    values = np.random.default_rng(3).uniform(0, top, 500)
    kept = Outcome.of_items(values, 500.0)
    assert np.abs(kept.values - values).max() <= max(5e-4, top / 32767 * 5)
    assert abs(kept.value - values.mean()) < 1e-4 * max(1.0, top)
    assert np.array_equal(Outcome.from_json(kept.to_json()).values, kept.values)


def test_a_full_result_of_small_is_small(tmp_path):
    """As many items as the declared tasks have, those of the official settings and of cut documents too."""
    counts = {"lambada_openai": 5153, "arc_easy": 2376, "arc_challenge": 1172, "hellaswag": 2000, "piqa": 1838, "race": 300}
    counts |= {"social_iqa": 1954}
    made = result(ADAPT, "sink", 1, 0.0)
    rng = np.random.default_rng(4)
    outcomes = {"nelbo": Outcome.of_items(rng.uniform(500, 2500, 512), 2e5)}
    for task, count in counts.items():
        outcomes[f"{task}.nll"] = Outcome.of_items(rng.uniform(0, 200, count), 10.0 * count)
        for name in ("acc", "acc_norm", "official.acc", "official.acc_norm"):
            outcomes[f"{task}.{name}"] = Outcome.of_items(rng.random(count) < 0.5, count)
    for length in SCALES["small"].cuts:
        outcomes |= {f"{kind}.{length}": Outcome.of_items(rng.uniform(5, 2500, 128), 1e4) for kind in ("rows", "ends")}
    layers: dict[str, list[float | None]] = {f"quantity{number}": rng.random(30).round(6).tolist() for number in range(7)}
    facts = {**made.facts, "recipe": "x" * 1500}
    whole = type(made)(made.name, made.kind, "small", ADAPT, "sink", 1, 4e-4, outcomes, layers, facts)
    assert write_result(tmp_path, whole).stat().st_size <= MAX_BYTES
    outcomes["again.nll"] = Outcome.of_items(rng.uniform(0, 200, 12_000), 1e5)
    with pytest.raises(ReproduceError, match="fewer items"):
        write_result(tmp_path, whole)


def test_damaged_results_are_named(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ReproduceError, match=r"a\.json: is no result"):
        read_results(tmp_path, "small")
    path = write_result(tmp_path, result(ADAPT, "sink", 1, 0.0))
    said = json.loads(path.read_text())
    said["outcomes"]["nelbo"]["n"] += 1
    path.write_text(json.dumps(said))
    with pytest.raises(ReproduceError, match="damaged"):
        read_result(path)
    with pytest.raises(ReproduceError, match="not finite"):
        Outcome.of_items([1.0, math.inf], 2)


# -- the matrix -------------------------------------------------------------------------------------------------------------------


def test_every_target_is_made_of_known_runs_and_rows():
    for target in TARGETS.values():
        assert all(variant in VARIANTS for variants in target.runs.values() for variant in variants)
    beside = [row for name, one in TARGETS.items() for names in one.runs.values() for own in names for row in paper_rows(name, own)]
    assert set(beside) == set(PAPER_ROWS)
    for claim in claims.CLAIMS:
        runs = TARGETS[claim.target].runs[claim.group]
        assert claim.variant in runs
        assert not claim.against or claim.against in runs
    assert len({claim.name for claim in claims.CLAIMS}) == len(claims.CLAIMS) == 28


def test_the_matrix_has_the_seeds_that_were_declared():
    jobs = jobs_of(list(TARGETS), SCALES["small"], 5)
    counts = {}
    for job in jobs:
        if job.trial is None:
            counts[job.group, job.variant] = counts.get((job.group, job.variant), 0) + 1
    assert all(counts[ADAPT, variant] == 5 for variant in ("vanilla", "sink", "gate"))
    assert all(counts[ADAPT, variant] == 3 for variant in VARIANTS if variant not in ("vanilla", "sink", "gate", *ONCE))
    assert all(counts[ADAPT, variant] == 1 for variant in ONCE)
    assert all(counts[group, variant] == 3 for group in (SCRATCH, SFT) for variant in ("vanilla", "sink", "gate"))
    assert len(set(jobs)) == len(jobs) == len({job.name for job in jobs})


def test_variants_of_a_seed_differ_in_what_is_declared_and_nothing_else(tmp_path):
    prepare_example(tmp_path / "text", documents=20)
    inputs = Inputs(tmp_path / "text", parent="parent", sft=tmp_path / "sft")
    bench = Bench(Asked("all", "small", tmp_path), inputs, load_parent)
    plain = recipe_of(Job(ADAPT, "vanilla", 3), bench, 4e-4)
    assert (plain.train.seed, plain.init.from_, plain.train.min_lr) == (3, "parent", pytest.approx(4e-5))
    for name, variant in VARIANTS.items():
        odd = recipe_of(Job(ADAPT, name, 3), bench, 4e-4).differences(plain)
        assert sorted(one.split(" ")[0] for one in odd) == sorted(flatten(variant.changes))
    other = recipe_of(Job(ADAPT, "vanilla", 4), bench, 4e-4).differences(plain)
    assert [one.split(" ")[0] for one in other] == ["train.seed"]
    tried = recipe_of(Job(ADAPT, "vanilla", 0, 2), bench, 8e-4)
    assert (tried.train.steps, tried.train.seed) == (plain.train.steps // 4, 0)


@pytest.mark.slow
def test_pictures_are_drawn_of_results_and_named_on_the_page(tmp_path):
    from benchmarks.reproduction import draw

    effects = {(ADAPT, "vanilla"): 0.0, (ADAPT, "vanilla-sink-rate"): 0.0, (ADAPT, "sink"): -0.02, (SFT, "sink"): 0.0}
    results = matrix(effects, n_seeds=3)
    for variant in PLAIN:
        cut = results[f"adapt-{variant}-s1"].outcomes
        cut |= {f"rows.{length}": Outcome.of_items([4.0, 5.0], 2) for length in SCALES["small"].cuts}  # type: ignore[operator]
        cut |= {f"attention.writes.{length}": Outcome.of_value(0.4) for length in SCALES["small"].cuts}  # type: ignore[operator]
    course = {"gradient": [9.0, 1.0, None, 2.0], "looks": [2, 4], "share": [[0.1] * 3] * 2, "norm": [[0.5] * 3, [2.0] * 3]}
    plain = {**course, "share": [[None] * 3] * 2, "norm": [[None] * 3] * 2}  # without a sink
    given = {"lr": 1e-3, "loss": [4.0] * 4, "recipe": "[train]\nwarmup = 0.5\nmin_warmup = 1\n"}
    watched = {"forms": {"vanilla": {"label": "DLM", **given, **plain}, "sink": {"label": "DLM + sink", **given, **course}}}
    write_beside(Asked("all", "small", tmp_path), STEADINESS, watched)
    names = {name for name, _ in page.PICTURES.values()}
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        draw(results, watched, tmp_path / folder)
    assert {path.name for path in (tmp_path / "one").iterdir()} == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    for one in results.values():
        write_result(tmp_path / "records", one)
    said = page.write_page(tmp_path / "records", tmp_path / "one")
    assert all(f"](assets/{name})" in said for name in names)
    draw({}, None, tmp_path / "one")  # what has no results any more goes
    assert not list((tmp_path / "one").iterdir())


def test_small_is_as_large_as_was_declared():
    scale = SCALES["small"]
    tokens = {
        group: math.prod((table["train"].get("steps", 0), table["train"]["batch"], table["data"]["length"]))
        for group, table in scale.tables.items()
    }
    assert tokens[ADAPT] == 39_321_600
    assert tokens[SCRATCH] >= 100e6
    assert (scale.draws, scale.tasks["hellaswag"], scale.tasks["race"], scale.tasks["lambada_openai"]) == (16, 2000, 300, None)
    assert all(len(rates) == 3 for rates in scale.lrs.values())


def test_work_comes_in_an_order_that_works():
    jobs = jobs_of(list(TARGETS), SCALES["nano"], 3)
    place = {job: number for number, job in enumerate(jobs)}
    for job in jobs:
        if job.trial is None and job.group != SFT:
            trials = trials_of(job.group, job.variant, SCALES["nano"])
            assert len(trials) == 3
            assert all(place[trial] < place[job] for trial in trials)
    for number, job in enumerate(jobs):
        if job.base is not None:
            assert jobs[number - 1] == job.base  # its weights are still there
    seeds = [job.seed for job in jobs if job.trial is None]
    assert seeds == sorted(seeds)


def test_runs_are_chosen_by_variant_and_seed():
    jobs = jobs_of(["table1"], SCALES["nano"], 3)
    assert {job.variant for job in select(jobs, ["sink"])} == {"sink"}
    chosen = select(jobs, ["sink,2", "gate,1"])
    assert [job for job in chosen if job.trial is None] == [Job(ADAPT, "gate", 1), Job(ADAPT, "sink", 2)]
    assert len(chosen) == 2 + 6  # with their trials
    for wrong in ("sing", "sink,x", "first"):
        with pytest.raises(ReproduceError, match="--only"):
            select(jobs, [wrong])


def test_a_variant_may_take_the_learning_rate_of_another():
    jobs = jobs_of(["controls", "short"], SCALES["small"], 5)
    late = {name: variant.rate_of for name, variant in VARIANTS.items() if variant.rate_of}
    assert len(late) == 4
    for variant, other in late.items():
        assert trials_of(ADAPT, variant, SCALES["small"]) == trials_of(ADAPT, other, SCALES["small"])
        assert not any(job.trial is not None and job.variant == variant for job in jobs)
        assert select(jobs, [f"{variant},1"]) == [*trials_of(ADAPT, other, SCALES["small"]), Job(ADAPT, variant, 1)]


def test_official_settings_are_asked_of_the_first_questions_alone():
    requests = [Request(LOGLIKELIHOOD, "piqa", doc, index, "the cat ", text) for doc in range(4) for index, text in enumerate("ab")]
    sheet = Sheet(requests, {"piqa": Settings(draws=8)}, about={GOLD: [0, 1, 1, 0]})
    found = ask_officially(Model(small_lm(), None), sheet, "piqa", 3).outcomes
    assert {name: len(one.items) for name, one in found.items()} == {"official.piqa.acc": 3}
    assert set(SCALES["small"].official) == {task for task in SCALES["small"].tasks if not task.startswith("gsm8k")}


def test_the_papers_recipes_are_those_of_the_project(tmp_path):
    """A variant's changes on top of a base are what its own file says, but for the parent of fine-tuning."""
    names = {"sink": "-sink", "gate": "-gate", "sink-end": "-sink-end", "sinks-2": "-sinks-2", "sinks-4": "-sinks-4"}
    names |= {"vanilla": "", "sink-zero": "-sink-zero"}
    checked = 0
    for base, group in (("qwen2.5-0.5b", ADAPT), ("smdm-472m", SCRATCH), ("sft-gsm8k-qwen2.5-0.5b", SFT)):
        for variant, suffix in names.items():
            path = RECIPES / "paper" / f"{base}{suffix}.toml"
            if path.exists():
                odd = paper.paper_recipe(base, Job(group, variant, 1), tmp_path).differences(Recipe.load(path))
                assert [one.split(" ")[0] for one in odd] == ["init.from"] * (group == SFT)
                checked += 1
    assert checked == 13


def test_the_papers_scale_is_laid_out(tmp_path, command_line):
    status, said, _ = command_line("reproduce", "all", "--scale", "paper", "--out", tmp_path / "p")
    assert status == 0
    assert "GPU hours" in said
    plan = json.loads((tmp_path / "p" / "plan.json").read_text())
    launches = [line for line in (tmp_path / "p" / "launch.sh").read_text().splitlines() if line.startswith("launch/torchrun.sh")]
    assert len(plan["runs"]) == len(launches) == len(list((tmp_path / "p" / "recipes").glob("*.toml"))) == 24
    bases = [row["run"] for row in plan["runs"]]
    assert bases.index("qwen2.5-0.5b-sink-s1") < bases.index("sft-gsm8k-qwen2.5-0.5b-sink-s1")
    scratch = next(row for row in plan["runs"] if row["run"] == "smdm-472m-vanilla-s1")
    assert scratch["tokens"] == pytest.approx(105.95e9, rel=1e-3)
    assert Recipe.load(tmp_path / "p" / "recipes" / "qwen2.5-0.5b-first-s1.toml").data.first == 151643


# -- the always visible first token -----------------------------------------------------------------------------------------------


def test_the_first_token_is_there_and_never_masked(tmp_path):
    prepare_example(tmp_path / "text", documents=40)
    recipe = Recipe.resolve(
        {"model": {"preset": "nano"}, "data": {"sets": {str(tmp_path / "text"): 1.0}, "length": 16, "first": 5}}
    )
    options = {"seed": 0, "vocab_size": 64, "mask_id": 64}
    plain = open_rows(recipe.data.replace(first=None), "train", **options).batch(np.arange(6))
    batch = open_rows(recipe.data, "train", **options).batch(np.arange(6))
    assert bool((batch.tokens[:, 0] == 5).all())
    assert bool((batch.tokens[:, 1:] == plain.tokens[:, 1:]).all())
    assert batch.maskable is not None
    assert not bool(batch.maskable[:, 0].any())
    assert bool(batch.maskable[:, 1:].all())
    assert batch.count_scored() == 6 * 15


# -- reports ----------------------------------------------------------------------------------------------------------------------


def test_a_report_says_what_its_results_say(tmp_path):
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): -0.02, (ADAPT, "gate"): 0.0, (ADAPT, "gate-keep"): 0.0})
    results |= {one.name: one for one in (trial(ADAPT, "sink", n, lr, 3.0 + n) for n, lr in enumerate((2e-4, 4e-4, 8e-4)))}
    found = write_report(tmp_path, ["table1"], SCALES["small"], results)
    assert json.loads((tmp_path / "report.json").read_text()) == found
    row = next(row for row in found["targets"]["table1"]["rows"] if row["variant"] == "sink")
    assert row["seeds"] == [1, 2, 3, 4, 5]
    assert row["paper"]["table1:0.5b:sink"]["arc_easy"] == 0.5547
    assert row["values"]["nelbo"]["mean"] == pytest.approx(
        np.mean([results[f"adapt-sink-s{seed}"].outcomes["nelbo"].value for seed in row["seeds"]])
    )
    assert found["rates"] == [
        {"group": ADAPT, "variant": "sink", "chosen": 2e-4, "edge": True, "tried": {"0.0002": 3.0, "0.0004": 4.0, "0.0008": 5.0}}
    ]
    tests = found["targets"]["table1"]["exploratory"]
    assert tests
    assert all(one["holm"] >= one["p"] for one in tests)
    text, site = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    for said in (text, site):
        assert "A sink improves an adapted DLM" in said
        assert "55.47" in said
    assert "**holds**" in text
    assert "<strong>holds</strong>" in site


def test_a_report_begins_with_three_sentences_and_two_figures(tmp_path, monkeypatch):
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): -0.02})
    found = write_report(tmp_path, ["table1", "figure1"], SCALES["small"], results)
    shares = [
        100 * np.mean([results[f"adapt-{variant}-s{seed}"].outcomes[f"attention.{name}"].total for seed in range(1, 6)])
        for name in ("sink_mass", "sink_heads")
        for variant in ("vanilla", "sink")
    ]
    helps = found["targets"]["table1"]["claims"][0]["outcomes"][0]
    assert found["lead"] == [
        "Of 7 claims of the paper 4 hold, 3 have too few seeds.",
        f"(DLM + sink) \N{MINUS SIGN} DLM, validation NELBO, nats/token: {helps['figures']}, over 5 seeds.",
        "Attention on the sink: {:.1f} % (DLM), {:.1f} % (DLM + sink). "
        "Heads with a content sink: {:.1f} % (DLM), {:.1f} % (DLM + sink).".format(*shares),
    ]
    text, site = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert text.index(found["lead"][2]) < text.index("](figures/differences.svg)") < text.index("](figures/layers.svg)")
    assert text.index("](figures/layers.svg)") < text.index("## Verdicts")
    assert [site.count(part) for part in ("<figure", "<svg", "<h2>Verdicts", "<details><summary><h2>")] == [2, 2, 1, 3]
    assert site.rindex("</figure>") < site.index("<h2>Verdicts")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write_report(tmp_path, ["table1", "figure1"], SCALES["small"], results) == found
    text, site = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    assert "No figures: reports need matplotlib" in text
    assert "<figure" not in site


def test_tokens_and_seconds_are_those_of_a_run(tmp_path):
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): -0.02})
    found = write_report(tmp_path, ["table1"], SCALES["small"], results)
    row = found["targets"]["table1"]["rows"][0]
    assert (row["tokens"], row["seconds"]) == (1000, 4.0)
    assert "| tokens/run | s/run |" in (tmp_path / "report.md").read_text()


def test_right_answers_to_gsm8k_stand_with_fine_tuned_models(tmp_path):
    results = matrix({(ADAPT, "sink"): 0.0, (SFT, "sink"): 0.0}, n_seeds=3)
    for one in results.values():
        if one.group == SFT:
            one.outcomes["gsm8k_two_stage.exact_match"] = Outcome.of_items([0, 1, 0, 0], 4)  # type: ignore[index]
    write_report(tmp_path, ["table1", "gsm8k"], SCALES["small"], results)
    adapted, tuned = (tmp_path / "report.md").read_text().split("## GSM8K")
    assert "| lambada_openai |\n" in adapted
    assert "|  | gsm8k |" in tuned
    assert "| DLM + sink, ours | 25.00 |" in tuned
    assert "| DLM + sink, paper (table1:0.5b:sink) | 49.20 |" in tuned


def test_official_settings_stand_beside_the_same_questions(tmp_path):
    results = matrix({(ADAPT, "sink"): 0.0}, n_seeds=3)
    outcomes = results["adapt-sink-s1"].outcomes
    outcomes["piqa.acc"] = Outcome.of_items([1, 0, 1, 1] + [0] * 196, 200)  # type: ignore[index]
    outcomes["official.piqa.acc"] = Outcome.of_items([1, 1, 1, 1], 4)  # type: ignore[index]
    write_report(tmp_path, ["table4"], SCALES["small"], results)
    said = (tmp_path / "report.md").read_text()
    assert "| DLM + sink, ours, seed 1, same questions as the next line |  |  |  |  | 75.00 |" in said
    assert "| DLM + sink, ours, seed 1, official settings |  |  |  |  | 100.00 |" in said


def test_claims_of_different_rates_are_told(tmp_path):
    chosen = {"vanilla": 2, "sink": 1, "sink-zero": 2, "gate": 2}
    made = [
        trial(ADAPT, variant, number, lr, 3.0 + abs(number - best))
        for variant, best in chosen.items()
        for number, lr in enumerate(SCALES["small"].lrs[ADAPT])
    ]
    write_report(tmp_path, list(TARGETS), SCALES["small"], {one.name: one for one in made})
    said = (tmp_path / "report.md").read_text()
    assert (
        "- table5: A zero value does not differ from a learned one (sink with zero value at 0.0016, DLM + sink at 0.0008)" in said
    )
    assert "- gsm8k: A sink improves the fine-tuned DLM (DLM + sink at 0.0008, DLM at 0.0016, before fine-tuning)" in said
    assert "- table1: Gated attention" not in said
    assert "- controls: A sink is better than none" not in said


def test_the_table_of_verdicts_has_what_each_rests_on():
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): -0.02})
    found = findings(["table1", "figure1"], SCALES["small"], results)
    head, _, *rows = ([cell.strip() for cell in line.split("|")] for line in verdicts(found).splitlines())
    cells = {row[2]: dict(zip(head, row, strict=True)) for row in rows}
    helps = cells["A sink improves an adapted DLM"]
    outcome = found["targets"]["table1"]["claims"][0]["outcomes"][0]
    assert helps["validation NELBO"] == f"{outcome['mean']:+.4f} [{outcome['low']:+.4f}, {outcome['high']:+.4f}]"
    assert (helps["verdict"], helps["seeds"], helps["other quantity"]) == ("**holds**", "5", "")
    moving = cells["Content sinks of a DLM move: more than a tenth change per step"]
    assert moving["other quantity"].endswith("against 0.1")
    assert moving["validation NELBO"] == ""
    missing = cells["Gated attention improves an adapted DLM (in the paper at 0.5B)"]
    assert (missing["LAMBADA NLL"], missing["seeds"]) == ("", "0")


def test_a_comparison_of_two_targets_is_explored_once():
    """Table 1 and figure 1 both compare sink and DLM; what either claims of it is not explored."""
    results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): -0.02})
    found = findings(["table1", "figure1"], SCALES["small"], results)["targets"]
    explored = [one["outcome"] for one in found["table1"]["exploratory"]]
    assert explored
    assert not {"nelbo", "attention.sink_heads"} & set(explored)
    assert not found["figure1"]["exploratory"]


def test_two_seeds_test_nothing():
    """Fewer than three give no verdict, on what is exploratory neither."""
    for seeds, any_test in ((2, False), (3, True)):
        results = matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): -0.02}, n_seeds=seeds)
        rows = findings(["table1"], SCALES["small"], results)["targets"]["table1"]["exploratory"]
        assert rows
        assert any(one["holm"] is not None for one in rows) == any_test


def test_blocks_are_written_safely():
    blocks = ["# a & b", "`x<y` **z**", bullets(["c", "d"]), table(["", "h|"], [["<b>", ""]])]
    site = to_html("t<", blocks)
    assert "a &amp; b" in site
    assert "<code>x&lt;y</code> <strong>z</strong>" in site
    assert "<h1>a &amp; b</h1>" in site
    site = site.replace("\n", "")
    assert "<ul><li>c</li><li>d</li></ul>" in site
    assert "<tr><td></td><th>h|</th></tr></thead><tbody><tr><td>&lt;b&gt;</td><td></td></tr>" in site
    assert "|  | h\\| |" in to_markdown(blocks)


def test_a_page_without_results_names_the_runs_that_are_missing(tmp_path):
    for one in matrix({(ADAPT, "vanilla"): 0.0, (ADAPT, "sink"): -0.02}).values():
        write_result(tmp_path / "records", one)
    empty, full = (page.write_page(folder, tmp_path) for folder in (tmp_path / "none", tmp_path / "records"))
    assert "adapt-sink-lr2, adapt-sink-s1, " in empty
    assert "adapt-sink-lr2, " in full
    assert "adapt-sink-s1, " not in full
    assert prose(empty) == prose(full)
    assert "A sink improves an adapted DLM: holds." in full
    assert findings(["table1"], SCALES["small"], {})["targets"]["table1"]["claims"][0]["verdict"] == claims.FEW


def test_a_matrix_is_complete_where_everything_was_measured(tmp_path):
    """Runs of one seed without the official settings are not; runs of other learning rates are none."""
    scale = SCALES["small"]
    jobs = jobs_of(list(TARGETS), scale, scale.seeds)
    for job in jobs:
        if job.trial is not None:
            made = trial(job.group, job.variant, job.trial, scale.lrs[job.group][job.trial], 3.0)
        else:
            made = result(job.group, job.variant, job.seed, 0.0)
        seconds = dict.fromkeys(["train", *stages_declared(job, scale)], 1.0)
        if job.name == "adapt-gate-s1":
            seconds = {stage: value for stage, value in seconds.items() if not stage.startswith("official")}
        write_result(tmp_path / "records", replace(made, facts={**made.facts, "seconds": seconds}))
    said = page.write_page(tmp_path / "records", tmp_path)
    assert "Not everything was measured" in said
    assert "- adapt-gate-s1: official lambada_openai, official arc_easy" in said
    whole = result(ADAPT, "gate", 1, 0.0)
    seconds = dict.fromkeys(["train", *stages_declared(Job(ADAPT, "gate", 1), scale)], 1.0)
    write_result(tmp_path / "records", replace(whole, facts={**whole.facts, "seconds": seconds}))
    said = page.write_page(tmp_path / "records", tmp_path)
    assert f"All {len(jobs)} declared runs are there" in said
    for words in ("Not everything", "measured yet", "Missing"):
        assert words not in said, words
    (tmp_path / "records" / "adapt-sink-dlm-rate-s3.json").unlink()
    said = page.write_page(tmp_path / "records", tmp_path)
    told = f"{len(jobs) - 1} of {len(jobs)} declared runs are there, trials included."
    assert f"{told} Missing: adapt-sink-dlm-rate-s3." in said
    assert "| **too few seeds** | 1 | controls (1) |" in said
    other = replace(whole, facts={**whole.facts, "seconds": seconds, "trials": {"0.0001": 1.0, "0.0002": 1.0, "0.0004": 1.0}})
    write_result(tmp_path / "records", other)
    said = page.write_page(tmp_path / "records", tmp_path)
    assert "Missing: adapt-gate-s1, adapt-sink-dlm-rate-s3." in said
    assert page.declared_results(tmp_path / "records").keys() == {job.name for job in jobs} - {
        "adapt-gate-s1",
        "adapt-sink-dlm-rate-s3",
    }


def test_items_have_the_tokens_that_the_tests_assume():
    assert result(ADAPT, "sink", 1, 0.0).outcomes["nelbo"].units == TOKENS * ITEMS


def test_a_parent_that_is_held_stays_what_it_was(tmp_path):
    """Runs change their copies, each with new parameters of its own seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, rms_norm_eps=1e-5, **shape)).save_pretrained(
        tmp_path / "p"
    )
    character_tokenizer().save_pretrained(tmp_path / "p")
    fields = open_source(tmp_path / "p").config.replace(mask_id=64, n_sinks=1).to_dict()
    del fields["model_type"]
    recipes = [
        Recipe.resolve({"model": fields, "init": {"from": str(tmp_path / "p")}, "train": {"seed": seed}}) for seed in (1, 2, 1)
    ]
    parents = Parents(load_parent, tmp_path / "tokenizer")
    found = []
    for recipe in recipes:
        held, plain = parents(recipe, torch.float32), load_parent(recipe, torch.float32)
        for name, weight in plain.model.state_dict().items():
            assert torch.equal(held.model.state_dict()[name], weight), name
        assert held.tokenizer.get_vocab() == plain.tokenizer.get_vocab()
        found.append({name: weight.clone() for name, weight in held.model.state_dict().items()})
        with torch.no_grad():
            for weight in held.model.parameters():
                weight.add_(1.0)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "tokenizer").rglob("*.json")}
    Parents(load_parent, tmp_path / "tokenizer")(recipes[0], torch.float32)  # another process: what the first one reads stays
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "tokenizer").rglob("*.json")} == files
    assert files
    assert torch.equal(found[0]["sinks"], found[2]["sinks"])
    assert not torch.equal(found[0]["sinks"], found[1]["sinks"])
    assert not torch.equal(found[0]["embed.weight"][64], found[1]["embed.weight"][64])  # [MASK]
