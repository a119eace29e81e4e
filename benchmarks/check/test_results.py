"""Stored results have their form and show what the documentation promises."""

import json
from typing import Any

from benchmarks.check.form import check_result
from benchmarks.measuring import RESULTS


def figures_of(name: str) -> dict[str, Any]:
    (path,) = RESULTS.glob(f"{name}.json")
    return json.loads(path.read_text())["figures"]


def test_every_result_has_the_form() -> None:
    paths = sorted(RESULTS.glob("*.json"))
    assert len(paths) >= 32
    for path in paths:
        entry = json.loads(path.read_text())
        check_result(entry)
        assert ("gpu" in entry["hardware"]) != ("-cpu-" in path.name), path.name


def test_a_cpu_trains_faster_than_the_plain_form_where_blocks_are_one() -> None:
    paths = sorted(RESULTS.glob("train_step-nano-*.json"))
    assert len(paths) == 2
    for number, path in enumerate(paths, start=1):
        entry = json.loads(path.read_text())
        assert entry["hardware"]["threads"] == number
        assert entry["figures"]["to_official"]["sink-whole"] >= 1.3  # the official form has a sink too


def test_states_behind_cost_a_fraction_of_those_before() -> None:
    figures = figures_of("checkpoint-*")
    assert figures["behind"]["saves"] == figures["before"]["saves"] > 1
    assert figures["behind"]["lost_ms_per_save"] < 0.2 * figures["before"]["lost_ms_per_save"]


def test_a_server_keeps_its_promises() -> None:
    figures = figures_of("serving-*")
    assert figures["together_to_one_by_one"] >= 3
    assert figures["deterministic"]["differing"] == 0
    for form in ("together", "one_by_one", "deterministic"):
        assert figures[form]["broken"] == 0
        assert set(figures[form]["refused"]) <= {"429"}
        assert figures[form]["requests"] > 100


def test_constrained_samples_follow_their_law() -> None:
    law = figures_of("structured-law-*")["law"]
    assert len(law) == 3
    for found in law.values():
        assert found["samples"] == 100_000
        assert found["total_variation"] < 0.02


def test_blocks_are_fast_on_a_gpu() -> None:
    sampling = figures_of("blocks-smdm-472m-sampling-*")["sampling"]
    many, one = sampling["64 rows"], sampling["1 rows"]
    assert many["blocks_to_official"] >= 10
    assert many["blocks_to_full_cache_dual"] >= 1
    assert one["blocks_to_full_cache_none"] >= 1


def test_caches_pay_in_the_engine() -> None:
    served = figures_of("serving_engine-smdm-472m-*")
    rates = {part: found["64 clients"]["requests_per_second"] for part, found in served.items()}
    assert rates["dual"] >= 2.5 * rates["none"]
    assert rates["exact"] >= 3 * rates["uncached"]
    assert all(served[part]["engine_to_bare"] >= 0.85 for part in ("none", "dual"))


def test_a_gpu_keeps_the_promises_of_loss_and_noise() -> None:
    loss, noise = figures_of("loss-nvidia-h200"), figures_of("noise-nvidia-h200")
    big = loss["8192x896x151936"]
    assert big["peak_bytes"]["chunked"] <= big["peak_bytes"]["full_logits"] / 5
    assert big["ms_forward_backward"]["chunked"]["p50"] <= big["ms_forward_backward"]["full_logits"]["p50"]
    assert noise["equal_to_cpu"]
    assert noise["ms_corrupt"]["p50"] < 0.2


def test_attention_with_sinks_is_as_exact_as_the_plain_kernel() -> None:
    checked = 0
    for row in figures_of("attention-nvidia-h200").values():
        errors = row.get("relative_error", {})
        for form, of_form in errors.items():
            for name, error in of_form.items():
                limit = errors["plain"].get(name, max(errors["plain"].values()))
                assert error <= 1.5 * limit, (form, name)
                checked += 1
    assert checked >= 2 * (4 + 6)  # shapes, of plain without a sink and of one form with it


def test_the_laptop_recipes_read_their_context_on_three_books() -> None:
    seen: dict[str, Any] = {}
    for path in RESULTS.glob("laptop-*.json"):
        seen |= json.loads(path.read_text())["figures"]
    assert len(seen) == 3
    for book, figures in seen.items():
        assert set(figures["recipes"]) == {"laptop", "laptop-sink"}
        for recipe, run in figures["recipes"].items():
            assert run["below_unigram"]["0.25"] >= 0.8, (book, recipe)
