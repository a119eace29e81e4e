"""One run on any number of ranks. All jobs of 2 ranks share one launch, and so do those of 4, in the slow suite."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from benchmarks import kills
from safetensors.numpy import save_file

import ranks
from launches import plain_ranks, starts
from sinkdlm import UserError
from sinkdlm.config.recipe import ParallelSection
from sinkdlm.planning.formulas import Layout, choose_layout, training_memory
from small_models import VARIANTS

SHAPE = {"vocab_size": 64, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "d_model": 24, "d_ff": 20, "context_length": 64}
STEPS, VARIANT_STEPS = 20, 4  # of the run that is compared everywhere, and of a variant's run
QUIET = {"eval": {"every": 0}, "log": {"probe_every": 0}, "save": {"every": 1000}}


def with_head(flags: dict, tied: bool) -> dict:
    return {**SHAPE, **flags, **({"mask_id": 62} if "mask_id" in flags else {}), "tie_embeddings": tied}


# Every variant, with an untied head and with a tied one.
MODELS = {f"{name}-{head}": with_head(flags, head == "tied") for name, flags in VARIANTS.items() for head in ("untied", "tied")}

FEW = ("sink-untied", "parent-tied")
FIRST = [*FEW, "vanilla-untied", "gate-headwise-sink-untied", "register-untied", "logit-untied"]  # every kind of lane and gate


def launch(n_ranks: int, jobs: list[dict], folder: Path) -> None:
    file = folder / f"jobs-{len(list(folder.glob('jobs-*.json')))}.json"
    file.write_text(json.dumps(jobs))
    path = os.pathsep.join([str(Path(ranks.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with plain_ranks(n_ranks, [ranks.__file__, str(file)], file.with_suffix(".said"), PYTHONPATH=path) as started:
        assert started.wait(1500) == 0, started.text()[-8000:]


def tables(folder: Path, /, **sections) -> dict:
    found = {
        "model": {**SHAPE, "n_sinks": 1},
        "data": {"length": 16, "sets": {str(folder): 1.0}, "random_lengths": 0.1},
        "train": {"steps": 16, "batch": 8, "micro_batch": 3, "lr": 1e-3, "min_lr": 1e-4, "precision": "float32"},
        **QUIET,
    }
    return {name: {**found.get(name, {}), **sections.get(name, {})} for name in {*found, *sections}}


def variants_job(data: Path, out: Path, name: str, **train) -> dict:
    train = {"micro_batch": 8, "steps": VARIANT_STEPS, **train}
    sections = {"model": MODELS[name], "train": train, "parallel": {"mode": "shard"}, "log": {"probe_every": VARIANT_STEPS}}
    return {"recipe": tables(data, **sections), "out": str(out / name)}


@pytest.fixture
def two(made_once) -> Path:
    """All the runs of one and of two ranks that the tests below look at."""
    return made_once("ranks-2", make_runs_of_two)


@pytest.fixture
def four(made_once) -> Path:
    return made_once("ranks-4", make_runs_of_four)


@pytest.fixture(params=[2, pytest.param(4, marks=pytest.mark.slow)])
def n_ranks(request) -> int:
    return request.param


@pytest.fixture
def runs(made_once, n_ranks) -> Path:
    return made_once(f"ranks-{n_ranks}", {2: make_runs_of_two, 4: make_runs_of_four}[n_ranks])


SHARD = {"parallel": {"mode": "shard"}}


class Recipes:
    def __init__(self, folder: Path) -> None:
        self.data = data = kills.write_set(folder / "data")
        precise = {"steps": STEPS, "precision": "float64", "ema": 0.9}
        seen = {"eval": {"every": STEPS // 2, "draws": 5}, "save": {"every": 12}}
        self.exact = tables(data, train=precise, **seen, parallel={"mode": "shard"})
        self.single = tables(data)
        self.uneven = tables(data, train={"batch": 5, "micro_batch": 2, "steps": 6})
        self.empty = tables(data, train={"batch": 1, "micro_batch": 1, "steps": 6})
        blocks = {"sizes": [[0, 4], [3, 8]], "complementary": True}
        self.blocks = tables(data, model={**SHAPE, "n_sinks": 1, "block_size": 8}, train={**precise, "steps": 6}, blocks=blocks)


def run_alone(recipes: Recipes, folder: Path) -> None:
    for job in [
        {"recipe": recipes.exact, "out": str(folder / "exact-1")},
        {"recipe": recipes.single, "out": str(folder / "single-1")},
        {"recipe": recipes.uneven, "out": str(folder / "uneven-1")},
        {"recipe": recipes.exact, "out": str(folder / "elastic"), "stop": {"rank": 0, "step": 4}},
        {"recipe": recipes.single, "out": str(folder / "elastic-32"), "stop": {"rank": 0, "step": 4}},
    ]:
        ranks.run(job)
    ranks.validate(look_job(recipes.exact, folder, "whole-1"))


def elastic_jobs(recipes: Recipes, folder: Path, *stops: dict) -> list[dict]:
    found = ((recipes.exact, "elastic"), (recipes.single, "elastic-32"))
    return [{"recipe": recipe, "out": str(folder / name), "stop": stop} for (recipe, name), stop in zip(found, stops, strict=True)]


def end_alone(recipes: Recipes, folder: Path) -> None:
    ranks.run({"recipe": recipes.exact, "out": str(folder / "elastic")})
    ranks.run({"recipe": recipes.single, "out": str(folder / "elastic-32")})


def make_runs_of_two(folder: Path) -> None:
    recipes = Recipes(folder)
    exact, single, uneven, empty = recipes.exact, recipes.single, recipes.uneven, recipes.empty
    run_alone(recipes, folder)
    (folder / "variants-1").mkdir()
    (folder / "variants-2").mkdir()
    for job in [
        {"recipe": empty, "out": str(folder / "empty-1")},
        {"recipe": recipes.blocks, "out": str(folder / "blocks-1")},
        *(variants_job(recipes.data, folder / "variants-1", name) for name in FIRST),
    ]:
        ranks.run(job)
    launch(
        2,
        [
            {"recipe": exact, "out": str(folder / "exact-2")},
            {"recipe": {**single, "parallel": {"mode": "replicate"}}, "out": str(folder / "single-2")},
            {"recipe": {**uneven, **SHARD}, "out": str(folder / "uneven-2"), "chunks": True},
            {"recipe": {**empty, **SHARD}, "out": str(folder / "empty-2")},
            {"recipe": {**recipes.blocks, **SHARD}, "out": str(folder / "blocks-2")},
            {"recipe": {**single, "save": {"every": 4, "keep": 9}}, "out": str(folder / "full-2"), "full": True},
            *elastic_jobs(recipes, folder, {"rank": 1, "step": 9}, {"rank": 0, "step": 8}),
            {"recipe": exact, "out": str(folder / "resumed-2"), "stop": {"rank": 0, "step": 13}},
            {"recipe": exact, "out": str(folder / "resumed-2")},
            look_job(exact, folder, "whole-2"),
            look_job(exact, folder, "shard-2"),
            *(variants_job(recipes.data, folder / "variants-2", name) for name in FIRST),
        ],
        folder,
    )
    end_alone(recipes, folder)


def make_runs_of_four(folder: Path) -> None:
    """Runs of 4 ranks, and of 2 on the way there."""
    recipes = Recipes(folder)
    exact, single, uneven = recipes.exact, recipes.single, recipes.uneven
    behind = {**exact, "save": {"every": 12, "background": True}}
    run_alone(recipes, folder)
    launch(2, elastic_jobs(recipes, folder, {"rank": 1, "step": 9}, {"rank": 0, "step": 8}), folder)
    launch(
        4,
        [
            {"recipe": behind, "out": str(folder / "exact-4")},
            {"recipe": {**single, **SHARD}, "out": str(folder / "single-4")},
            {"recipe": in_ones(single, {"mode": "shard"}), "out": str(folder / "ones-shard-4")},
            {"recipe": in_ones(single, {"mode": "hybrid", "shard_ranks": 2}), "out": str(folder / "ones-hybrid-4")},
            {"recipe": {**uneven, **SHARD}, "out": str(folder / "uneven-4"), "chunks": True},
            {"recipe": {**single, "parallel": {"mode": "hybrid", "shard_ranks": 2}}, "out": str(folder / "hybrid-4")},
            *elastic_jobs(recipes, folder, {"rank": 3, "step": 14}, {"rank": 2, "step": 12}),
            {"recipe": behind, "out": str(folder / "resumed-4"), "stop": {"rank": 1, "step": 13}},
            {"recipe": behind, "out": str(folder / "resumed-4")},
            look_job(exact, folder, "shard-4"),
            {
                "held": str(folder / "held-4.json"),
                "recipe": tables(recipes.data, model={"d_model": 48, "d_ff": 96, "vocab_size": 512}),
            },
        ],
        folder,
    )
    end_alone(recipes, folder)


def in_ones(recipe: dict, parallel: dict) -> dict:
    """Two forwards of one row on each of 4 ranks."""
    return {**recipe, "train": {**recipe["train"], "micro_batch": 1}, "parallel": parallel}


def look_job(exact: dict, folder: Path, name: str) -> dict:
    model, file = folder / "exact-1" / "model", folder / f"look-{name}.json"
    return {"recipe": exact, "model": str(model), "validate": str(file), "shard": name.startswith("shard")}


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in kills.read_metrics(out) if line["kind"] == "train"]


def looks(out: Path) -> tuple[list[int], np.ndarray]:
    """Steps of the probes, and all their values, in order."""
    found = [line for line in kills.read_metrics(out) if line["kind"] == "probe"]
    values = [list(layer.values()) for line in found for layer in line["layers"]]
    return [line["step"] for line in found], np.array(values)


def seen(out: Path) -> dict[str, str]:
    """Every sample that any rank read, and how it was masked; a sample that two ranks read would clash."""
    found: dict[str, str] = {}
    files = sorted(Path(f"{out}.seen").glob("*.json"))
    assert files
    for file in files:
        for sample, masked in json.loads(file.read_text()).items():
            assert found.setdefault(sample, masked) == masked
    return found


def test_float64_losses_ignore_the_number_of_ranks(runs, n_ranks):
    expected = losses(runs / "exact-1")
    assert len(expected) == STEPS
    np.testing.assert_allclose(losses(runs / f"exact-{n_ranks}"), expected, rtol=1e-9)


def test_float32_losses_ignore_the_number_of_ranks(runs, n_ranks):
    expected = losses(runs / "single-1")
    assert len(expected) == 16
    np.testing.assert_allclose(losses(runs / f"single-{n_ranks}"), expected, rtol=1e-5)


def test_ranks_read_and_mask_the_same_samples(runs, n_ranks):
    expected = seen(runs / "exact-1")
    assert sorted(map(int, expected)) == list(range(STEPS * 8))
    assert seen(runs / f"exact-{n_ranks}") == expected
    own = [json.loads(file.read_text()) for file in Path(f"{runs}/exact-{n_ranks}.seen").glob("*.json")]
    assert [len(part) for part in own] == [STEPS * 8 // n_ranks] * n_ranks


def test_blocks_ignore_the_number_of_ranks(two):
    """Block diffusion, sharded: the same times and masks, and losses."""
    assert len(losses(two / "blocks-1")) == 6
    np.testing.assert_allclose(losses(two / "blocks-2"), losses(two / "blocks-1"), rtol=1e-10)
    assert seen(two / "blocks-2") == seen(two / "blocks-1")


def test_a_run_goes_on_exactly_on_other_numbers_of_ranks(runs, n_ranks):
    """1 -> 2 -> 1 and 1 -> 2 -> 4 -> 1 ranks, stopped each time by SIGTERM to a different rank."""
    expected = {2: [(1, 0), (2, 4), (1, 10)], 4: [(1, 0), (2, 4), (4, 10), (1, 15)]}[n_ranks]
    assert [(start["ranks"], start["step"]) for start in starts(runs / "elastic")] == expected
    expected = losses(runs / "exact-1")
    found = losses(runs / "elastic")
    assert len(found) == len(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert seen(runs / "elastic") == seen(runs / "exact-1")
    weights = [kills.read_tensors(runs / name / "model") for name in ("elastic", "exact-1")]
    assert weights[0].keys() == weights[1].keys()
    for name in weights[0]:
        np.testing.assert_allclose(weights[0][name], weights[1][name], rtol=1e-9, atol=1e-12)


def test_a_run_in_float32_goes_on_on_other_numbers_of_ranks(runs, n_ranks):
    expected = {2: [(1, 0), (2, 4), (1, 9)], 4: [(1, 0), (2, 4), (4, 9), (1, 13)]}[n_ranks]
    assert [(start["ranks"], start["step"]) for start in starts(runs / "elastic-32")] == expected
    np.testing.assert_allclose(losses(runs / "elastic-32"), losses(runs / "single-1"), rtol=1e-5)
    assert seen(runs / "elastic-32") == seen(runs / "single-1")


def test_a_resumed_run_is_bit_equal_on_the_same_number_of_ranks(runs, n_ranks):
    """The states of 4 ranks are written in the background."""
    assert [start["step"] for start in starts(runs / f"resumed-{n_ranks}")] == [0, 14]
    assert kills.differences(runs / f"exact-{n_ranks}", runs / f"resumed-{n_ranks}") == []
    assert kills.differences(runs / "exact-1", runs / f"exact-{n_ranks}") != []  # the comparison can fail


def test_a_difference_in_any_ranks_file_is_found(tmp_path):
    """The ranks' files of a state hold different rows under the same names."""
    runs = [tmp_path / "one", tmp_path / "other"]
    for out in runs:
        for folder in ("model", "ema", "checkpoints/step-1"):
            (out / folder).mkdir(parents=True)
            for rank in range(2):
                save_file({"rows": np.full(3, float(rank))}, out / folder / f"state-{rank}.safetensors")
        (out / "metrics.jsonl").write_text("")
    assert kills.differences(*runs) == []
    for rank in range(2):
        file = runs[1] / "checkpoints" / "step-1" / f"state-{rank}.safetensors"
        kept = file.read_bytes()
        save_file({"rows": np.full(3, 5.0)}, file)
        assert kills.differences(*runs) == ["state"], rank
        file.write_bytes(kept)


def test_batches_that_ranks_cannot_share_evenly(runs, n_ranks):
    """5 rows, 2 a forward: ranks have different numbers of rows, or none. The head takes one masked position a chunk, so that no
    two ranks have equally many chunks."""
    np.testing.assert_allclose(losses(runs / f"uneven-{n_ranks}"), losses(runs / "uneven-1"), rtol=1e-5)


def test_a_rank_without_any_masked_position(two):
    """A batch of one row: the other rank has nothing to score, and takes part in every collective."""
    np.testing.assert_allclose(losses(two / "empty-2"), losses(two / "empty-1"), rtol=1e-5)


def test_a_state_that_rank_0_cannot_write_is_left_out_by_all(two):
    """One rank's disk is full at the first state: all go on, and later states are written."""
    np.testing.assert_allclose(losses(two / "full-2"), losses(two / "single-1"), rtol=1e-5)
    assert sorted(path.name for path in (two / "full-2" / "checkpoints").iterdir()) == [f"step-{n:010d}" for n in (8, 12, 16)]


@pytest.mark.parametrize("name", FIRST)
def test_sharded_training_equals_one_process(two, name):
    expected = losses(two / "variants-1" / name)
    assert len(expected) == VARIANT_STEPS
    assert expected[-1] != expected[0]
    np.testing.assert_allclose(losses(two / "variants-2" / name), expected, rtol=1e-5)
    (steps, alone), (others, shared) = looks(two / "variants-1" / name), looks(two / "variants-2" / name)
    assert steps == others == [0, VARIANT_STEPS]
    np.testing.assert_allclose(shared, alone, rtol=1e-4)


@pytest.mark.slow
def test_gradients_of_several_forwards_add_up_in_every_layout(four):
    """Hybrid sharding sums over copies in the last backward only, over shards in every one."""
    for name in ("ones-shard-4", "ones-hybrid-4"):
        np.testing.assert_allclose(losses(four / name), losses(four / "single-1"), rtol=1e-5)


@pytest.mark.slow
def test_hybrid_sharding_equals_full_sharding(four):
    np.testing.assert_allclose(losses(four / "hybrid-4"), losses(four / "single-4"), rtol=1e-6)
    weights = [kills.read_tensors(four / name / "model") for name in ("hybrid-4", "single-4")]
    for name in weights[0]:
        np.testing.assert_allclose(weights[0][name], weights[1][name], rtol=1e-3, atol=1e-5)


def test_validation_ignores_the_number_of_ranks(runs, n_ranks):
    """Weights differ in their last bits, so the values do; on the same weights they are bit-equal (test below)."""
    expected, found = (
        [line for line in kills.read_metrics(runs / f"exact-{n}") if line["kind"] == "validation"] for n in (1, n_ranks)
    )
    assert len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
        assert ours["ema"]["loss"] == pytest.approx(theirs["ema"]["loss"], rel=1e-9)
        assert ours["ema"]["loss"] != ours["loss"]


def test_validation_of_the_same_weights_is_bit_equal_on_any_number_of_ranks(runs, n_ranks):
    names = {2: ("whole-1", "whole-2", "shard-2"), 4: ("whole-1", "shard-4")}[n_ranks]
    found = {name: json.loads((runs / f"look-{name}.json").read_text()) for name in names}
    assert found["whole-1"]["draws"] == 13
    assert all(other == found["whole-1"] for other in found.values())


@pytest.mark.slow
def test_memory_of_a_rank_falls_as_planned(four):
    """Bytes of weights and moments that a rank of 4 really holds."""
    from sinkdlm import Recipe

    found = json.loads((four / "held-4.json").read_text())
    planned = training_memory(Recipe.resolve(found["recipe"]), 1, Layout(1, 4))
    assert len(found["bytes"]) == 4
    for held in found["bytes"]:
        assert held == pytest.approx(planned.weights + planned.optimizer, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "names"),
    [
        ({}, tuple(name for name in MODELS if name not in FIRST)),
        ({"compile": "blocks", "recompute": "full"}, (*FEW, "logit-untied")),
        ({"recompute": "full"}, tuple(FIRST)),
        ({"recompute": "selective"}, tuple(FIRST)),
        ({"compile": "blocks", "recompute": "selective"}, FEW[1:]),
    ],
    ids=["plain", "compiled and full", "full", "selective", "compiled and selective"],
)
def test_compiled_and_recomputed_blocks_on_two_ranks(tmp_path, made_once, train, names):
    """Compared with one process that does neither."""
    data = kills.write_set(tmp_path / "data")
    launch(2, [variants_job(data, tmp_path, name, **train) for name in names], tmp_path)
    for name in names:
        alone = made_once(f"ranks-1-{name}", lambda folder, name=name: ranks.run(variants_job(data, folder, name)))
        expected = losses(alone / name)
        assert len(expected) == VARIANT_STEPS
        np.testing.assert_allclose(losses(tmp_path / name), expected, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_kills_of_single_ranks_change_nothing(tmp_path):
    """Six kills; some aim at a state that is being written. torchrun's agent restarts all four ranks each time; once, a launch by
    torchrun itself resumes where forked ranks were ended. The end is bit-equal to that of four ranks left alone."""
    found = kills.run(6, seed=0, folder=tmp_path, ranks=4)
    assert found["kills"] == 6
    assert found["torn_states"] > 0
    assert found["differences"] == []


@pytest.mark.parametrize(
    ("section", "ranks", "node", "state", "memory", "expected"),
    [
        ({}, 8, 8, 10, 100, Layout(8, 1)),
        ({}, 8, 8, 30, 100, Layout(1, 8)),
        ({}, 16, 8, 150, 100, Layout(2, 8)),
        ({}, 16, 8, 300, 100, Layout(1, 16)),
        ({}, 16, 8, 300, None, Layout(16, 1)),
        ({"mode": "hybrid", "shard_ranks": 4}, 16, 8, 1, 100, Layout(4, 4)),
        ({"mode": "hybrid"}, 16, 8, 1, 100, Layout(2, 8)),
    ],
)
def test_the_layout_follows_the_memory(section, ranks, node, state, memory, expected):
    assert choose_layout(ParallelSection(**section), ranks, node, state, memory) == expected


def test_a_layout_says_what_each_rank_holds():
    texts = [Layout(*counts).text for counts in ((1, 1), (4, 1), (1, 4), (2, 4))]
    several = ["4 ranks, a copy on each", "4 ranks, sharded", "8 ranks, 2 copies sharded over 4 ranks each"]
    assert texts == ["one process", *several]


def test_a_layout_that_does_not_divide_the_ranks_is_refused():
    with pytest.raises(UserError, match=r"parallel\.shard_ranks = 3: allowed is a divisor of the 4 ranks"):
        choose_layout(ParallelSection(mode="hybrid", shard_ranks=3), 4, 4, 1, None)
    with pytest.raises(UserError, match="goes with mode = 'hybrid'"):
        ParallelSection(mode="shard", shard_ranks=2)
