"""The benchmarks of block diffusion and of LoRA run at tiny sizes, and go on where they ended."""

import json
import sys

import pytest
from benchmarks import block_twins, blocks, lora, serving_engine, speculation, train_step
from benchmarks.check.form import check_result

import sinkdlm
from sinkdlm.data.synthetic import prepare_example
from sites import letters_lm


def run(module, words, monkeypatch, folder=None):
    """Run a benchmark's main; return its result, if it has written one."""
    name = module.__name__.removeprefix("benchmarks.")
    monkeypatch.setenv("SINKDLM_COMMIT", "abc")
    monkeypatch.setattr(sys, "argv", [name, *words, *([] if folder is None else ["--out", str(folder)])])
    module.main()
    written = [] if folder is None or not folder.exists() else sorted(folder.iterdir())
    return [json.loads(path.read_text()) for path in written]


def test_blocks_are_a_suffix_of_a_form():
    assert train_step.split_form("sink-block32-plain") == ({"n_sinks": 1, "block_size": 32}, {"runner": "plain"})
    assert train_step.split_form("vanilla-block8") == ({"block_size": 8}, {})
    assert train_step.split_form("vanilla") == ({}, {})


def test_masks_of_blocks_have_one_hash_on_any_device_and_cut(tmp_path, monkeypatch):
    words = ["--device", "cpu", "--parts", "noise", "--block", "8", "--length", "64"]
    (entry,) = run(blocks, words, monkeypatch, tmp_path / "out")
    noise = entry["figures"]["noise"]
    assert noise["equal_on_cpu"]
    assert noise["equal_cut"]
    assert len({*noise["digest"].values()}) == 2


@pytest.mark.slow
def test_every_part_of_the_block_benchmark_is_measured(tmp_path, monkeypatch):
    training = ["--rows", "1", "--length", "16", "--steps", "1"]
    writing = ["--batch", "2", "1", "--canvas", "16", "--prompts", "8", "24", "--repeats", "1"]
    (entry,) = run(blocks, ["--device", "cpu", "--block", "8", *training, *writing], monkeypatch, tmp_path / "out")
    check_result(entry)
    figures = entry["figures"]
    assert set(figures) == set(blocks.PARTS)
    assert {"sink", "sink-block8", "vanilla-block8", "blocks_to_full", "sink_to_none"} == set(figures["training"])
    for rows in ("2 rows", "1 rows"):
        sampled = figures["sampling"][rows]
        assert sampled["blocks_cache_exact"]["steps"] == sampled["full_cache_dual"]["steps"] == sampled["official"]["steps"] == 12
        assert sampled["blocks_to_official"] > 0
        steps = figures["prompts"][rows]
        assert list(steps) == ["8", "24"]
        assert 0 < steps["24"]["ms_attention"] < steps["24"]["ms_kernels"]
        assert steps["8"]["to_shortest"]["ms_kernels_less_attention"] == 1


@pytest.mark.slow
def test_twins_in_blocks_are_made_one_by_one_and_compared(tmp_path, monkeypatch, capsys):
    common = ["--device", "cpu", "--scale", "nano", "--run", str(tmp_path / "run"), "--set", "train.steps=4"]
    assert run(block_twins, [*common, "--only", "vanilla"], monkeypatch, tmp_path / "out") == []
    assert "once both twins are" in capsys.readouterr().err
    (entry,) = run(block_twins, common, monkeypatch, tmp_path / "out")
    check_result(entry)
    twins, apart = entry["figures"]["twins"], entry["figures"]["sink_less_none"]
    for variant in block_twins.TWINS:
        assert len(twins[variant]["train"]["loss"]) == 4
        assert {"nelbo", "lambada_openai.nll", "attention.sink_heads"} <= set(twins[variant]["outcomes"])
        assert twins[variant]["layers"]["sink_heads"]
    assert twins["vanilla"]["weights"] != twins["sink"]["weights"]
    found = twins["sink"]["outcomes"]["nelbo"] - twins["vanilla"]["outcomes"]["nelbo"]
    assert apart["nelbo"]["difference"] == pytest.approx(found, abs=1e-5)
    assert apart["nelbo"]["stderr"] > 0
    assert "block_size = 8" in entry["settings"]["recipe"]
    from_records = ["--device", "cpu", "--scale", "nano", "--records", str(tmp_path / "run" / "records")]
    (again,) = run(block_twins, from_records, monkeypatch, tmp_path / "out")
    assert again["figures"] == entry["figures"]


@pytest.mark.slow
def test_lora_and_all_weights_continue_the_same_base(tmp_path, monkeypatch, capsys):
    prepare_example(tmp_path / "text", documents=60)
    prepare_example(tmp_path / "other", documents=40)
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        '[model]\npreset = "nano"\nn_sinks = 1\n[data]\nlength = 32\n'
        '[train]\nsteps = 8\nbatch = 4\nlr = 4e-3\nprecision = "float32"\n'
    )
    budget = "--base-tokens 1024 --tokens 1024 --share 0.5 --rates 1e-3 --lora-rates 1e-3,1e-2 --rank 2 --micro-batch 4 --draws 8"
    folders = {"seen": "text", "unseen": "other", "run": "run"}
    given = [*budget.split(), *(word for key, name in folders.items() for word in (f"--{key}", str(tmp_path / name)))]
    assert run(lora, [str(recipe), *given, "--time-limit", "0"], monkeypatch, tmp_path / "out") == []
    assert "time is up before base" in capsys.readouterr().err
    (entry,) = run(lora, [str(recipe), *given], monkeypatch, tmp_path / "out")
    check_result(entry)
    figures = entry["figures"]
    assert set(figures["lora"]["trials"]) == {"0.001", "0.01"}
    assert figures["full"]["best"] == 1e-3
    for kind in lora.KINDS:
        assert figures[kind]["tokens"] == 1024
        assert len(figures[kind]["validation"]) == 1
    assert figures["lora_to_full"]["loss"] == lora.loss_of(figures["lora"]) / lora.loss_of(figures["full"]) - 1


@pytest.mark.slow
def test_the_engine_is_measured_in_parts_that_go_on_where_they_ended(tmp_path, monkeypatch):
    sizes = ["--clients", "1", "3", "--prompt", "3", "--new", "8", "--steps", "4", "--block", "4", "--requests", "4"]
    words = ["--device", "cpu", *sizes, "--seconds", "0.3", "--warmup", "0", "--answers", "6", "--alone", "2"]
    words += ["--records", str(tmp_path / "records")]
    assert run(serving_engine, [*words, "--time-limit", "0"], monkeypatch, tmp_path / "out") == []
    for part in serving_engine.PARTS:
        assert len(run(serving_engine, [*words, "--parts", part], monkeypatch, tmp_path / part)) == 1
    (entry,) = run(serving_engine, [*words, "--time-limit", "0"], monkeypatch, tmp_path / "out")  # from records alone
    assert [*entry["figures"]] == [*serving_engine.PARTS]
    exact = entry["figures"]["deterministic"]
    assert exact["differing_between_loads"] == exact["differing_from_alone"] == 0
    assert entry["figures"]["exact"]["3 clients"]["tokens_per_second"] > 0
    check_result(entry)


@pytest.mark.slow
def test_speculation_is_measured_beside_its_bound(tmp_path, monkeypatch):
    lm = letters_lm(seed=3)
    folder = sinkdlm.save(tmp_path / "model", lm.model, lm.tokenizer)
    (text := tmp_path / "texts.txt").write_text("tom has 3 apples\nann has 12 pears\n")
    words = ["--device", "cpu", "--checkpoint", f"one={folder}", "--text", str(text), "--texts", "2", "--prompt", "8"]
    words += ["--length", "12", "--batch", "1", "2", "--k", "2", "4", "--repeats", "1", "--policies", "confidence", "blocks"]
    (entry,) = run(speculation, words, monkeypatch, tmp_path / "out")
    check_result(entry)
    found = entry["figures"]["one"]["confidence, temperature 0.0"]
    assert 1 <= found["bound"]["argmax"] <= found["bound"]["top 2"] <= 12
    for rows in ("1 rows", "2 rows"):
        assert found[rows]["plain"]["tokens_per_forward"] == 1
        for form in ("linear 2", "linear 4", "tree 4", "tree auto"):
            assert 1 <= found[rows][form]["tokens_per_forward"] <= 8
            assert found[rows][form]["equal"] == 1
