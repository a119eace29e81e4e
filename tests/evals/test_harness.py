"""The bridge to lm-eval: its prompts from our files, its metrics on our answers, in one go or in two halves."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from benches import HUB, HUB_PATHS, lines, makers_files, plain_files, write_files, write_parquet
from evaluated import save_model, small_lm, tiny_tokenizer
from sinkdlm.cli.entry import main
from sinkdlm.errors import EvalError
from sinkdlm.evals.offline import BENCHMARKS, find_splits, load_splits
from sinkdlm.evals.requests import Response, Sheet, read_answers
from sinkdlm.evals.settings import Settings

pytest.importorskip("lm_eval")
ALL = tuple(BENCHMARKS)


@pytest.fixture(scope="session")
def harness():
    """Import late: lm-eval takes seconds to import, and warns about packages that it does not use."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sinkdlm.evals import harness as found
    return found


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    for task in ALL:
        write_files(folder, plain_files(task))
    (folder / "gsm8k_train.jsonl").write_text(lines([{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(8)]))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("harness") / "model", context_length=512)


# -- files ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "makers", "jsonl", "json", "parquet"])
@pytest.mark.parametrize("task", ALL)
def test_rows_are_the_hubs_in_every_form(tmp_path, task, form):
    split, rows = HUB[task]
    if form == "plain":
        write_files(tmp_path, plain_files(task))
    elif form == "makers":
        write_files(tmp_path, makers_files(task))
    elif form == "parquet":
        write_parquet(tmp_path / f"{HUB_PATHS[task]}.parquet", rows)
    else:
        path = tmp_path / f"{HUB_PATHS[task]}.{form}"
        path.parent.mkdir(parents=True)
        path.write_text(lines(rows) if form == "jsonl" else json.dumps(rows))
    found = load_splits(tmp_path, task)
    assert list(found) == [split]
    assert found[split] == [{name: row[name] for name in found[split][0]} for row in rows]
    assert set(rows[0]) - set(found[split][0]) == set()


def test_shards_are_read_in_order(tmp_path):
    for shard in (1, 0):
        rows = [{"question": f"{shard}{i}", "answer": "#### 1"} for i in range(2)]
        write_parquet(tmp_path / f"gsm8k/main/test-0000{shard}-of-00002.parquet", rows)
    assert [row["question"] for row in load_splits(tmp_path, "gsm8k")["test"]] == ["00", "01", "10", "11"]


def test_files_that_are_not_as_they_should_be(tmp_path):
    with pytest.raises(EvalError, match="no such folder"):
        load_splits(tmp_path / "absent", "piqa")
    with pytest.raises(EvalError, match=r"has no file for it; expected for example piqa_validation\.jsonl"):
        load_splits(tmp_path, "piqa")
    with pytest.raises(EvalError, match="not among those that --data reads: arc_easy"):
        load_splits(tmp_path, "mmlu")
    (tmp_path / "piqa_validation.jsonl").write_text('{"goal": "x"}\n')
    with pytest.raises(EvalError, match="row 1 does not fit piqa: no field 'sol1'; its fields are goal"):
        load_splits(tmp_path, "piqa")
    (tmp_path / "piqa_validation.jsonl").write_text("nonsense\n")
    with pytest.raises(EvalError, match="line 1: not JSON"):
        load_splits(tmp_path, "piqa")
    (tmp_path / "piqa_validation.jsonl").write_text("")
    with pytest.raises(EvalError, match="holds no row"):
        load_splits(tmp_path, "piqa")
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "valid.jsonl").write_text('{"goal": "x", "sol1": "a", "sol2": "b"}\n' * 2)
    with pytest.raises(EvalError, match="two sets for validation"):
        find_splits(tmp_path, "piqa")
    (tmp_path / "piqa_validation.jsonl").unlink()
    (tmp_path / "piqa" / "valid-labels.lst").write_text("1\n")
    with pytest.raises(EvalError, match="more rows than labels"):
        load_splits(tmp_path, "piqa")


# -- prompts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ALL)
def test_prompts_are_the_harnesses_own(harness, bench, task):
    """Requests from our files equal those of the harness's own task, built from its YAML on the hub's rows."""
    import datasets
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    folder = Path(harness.lm_eval.tasks.__file__).parent / BENCHMARKS[task].folder
    (config,) = [found for path in folder.glob("*.yaml") if (found := load_yaml(path)).get("task") == task]
    split, rows = HUB[task]
    absent = {key: None for key in ("training_split", "validation_split", "fewshot_split") if config.get(key) not in (None, split)}
    tables = {split: datasets.Dataset.from_list(rows)}
    with harness._quiet():
        theirs = ConfigurableTask(config={**config, **absent, "custom_dataset": lambda **_: tables})
        theirs.set_config("num_fewshot", 0)
        theirs.set_fewshot_seed(0)
        theirs.build_all_requests(rank=0, world_size=1)
    evaluation = harness.Evaluation(harness.Plan((task,), data=str(bench), num_fewshot=0))
    ours = evaluation.ask().requests
    assert len(ours) == len(theirs.instances) > 0
    for request, instance in zip(ours, theirs.instances, strict=True):
        assert (request.kind, request.doc, request.index) == (instance.request_type, instance.doc_id, instance.idx)
        said = request.continuation if request.kind == "loglikelihood" else request.generation
        assert (request.context, said) == instance.args
    for doc, row in enumerate(theirs.eval_docs):  # what options are divided by
        choices = theirs.doc_to_choice(row) if theirs.OUTPUT_TYPE == "multiple_choice" else []
        divisors = [request.divisors for request in ours if request.doc == doc]
        if "acc_norm" in theirs._metric_fn_list:
            assert divisors == [{"acc": 1.0, "acc_norm": len(choice)} for choice in choices]


def test_examples_come_from_the_train_file(harness, bench):
    evaluation = harness.Evaluation(harness.Plan(("gsm8k",), data=str(bench), limit=1))
    (request,) = evaluation.ask().requests
    assert request.context.count("Question:") == 6  # the task's own five, and the one that is asked
    assert request.context.endswith("Question: 1 + 1?\nAnswer:")
    (fewer,) = harness.Evaluation(harness.Plan(("gsm8k",), data=str(bench), limit=1, num_fewshot=2)).ask().requests
    assert fewer.context.count("Question:") == 3
    with pytest.raises(EvalError, match=r"prompts with 2 examples need a train file in .*: add one, or say --num-fewshot 0"):
        harness.Evaluation(harness.Plan(("piqa",), data=str(bench), num_fewshot=2))
    asked = harness.Evaluation(harness.Plan(("lambada",), data=str(bench), num_fewshot=1)).ask().requests
    assert asked[0].context.count("The cat sat on the") == 1  # LAMBADA has no train split: the harness takes another item
    assert asked[0].context.startswith("He said:")


def test_the_right_answers_of_a_sheet_are_the_harnesses_own(harness, bench):
    """Answers taken from the sheet get everything right."""
    tasks = ("arc_easy", "hellaswag", "piqa", "race", "social_iqa", "boolq", "gsm8k_two_stage")
    evaluation = harness.Evaluation(harness.Plan(tasks, data=str(bench), num_fewshot=0))
    sheet = evaluation.ask()
    gold = sheet.about["gold"]
    answers = {}
    for request in sheet.requests:
        right = gold[request.task][request.doc]
        texts = (right,) if isinstance(right, str) else ()
        answers[request.key] = Response(*request.key, value=-1.0 if request.index == right else -50.0, texts=texts)
    results = evaluation.judge(answers)["results"]
    shares = {task: [value for name, value in results[task].items() if name in ("acc,none", "exact_match,none")] for task in tasks}
    assert shares == {task: [1.0] for task in tasks}


def test_names_and_settings_of_tasks(harness, bench):
    plan = harness.Plan(("lambada", "siqa", "lambada_openai"), data=str(bench))
    assert plan.tasks == ("lambada_openai", "social_iqa")
    sheet = harness.Evaluation(plan).ask(changes={"draws": 16}, overrides=[("siqa.guidance", 0.25)], seed=3)
    assert (sheet.settings["social_iqa"].guidance, sheet.settings["social_iqa"].greedy) == (0.25, False)
    assert (sheet.settings["lambada_openai"].estimator, sheet.settings["lambada_openai"].greedy) == ("chain", True)
    assert (sheet.seed, sheet.about["plan"]["tasks"]) == (3, ("lambada_openai", "social_iqa"))
    with pytest.raises(EvalError, match=r"no task 'piqa' among lambada_openai, social_iqa; write TASK\.KEY=VALUE"):
        harness.Evaluation(plan).ask(overrides=[("piqa.draws", 1)])
    with pytest.raises(EvalError, match="task 'mmlu': not among those that --data reads"):
        harness.Evaluation(harness.Plan(("mmlu",), data=str(bench)))
    with pytest.raises(EvalError, match="name some"):
        harness.Plan(())
    with pytest.raises(EvalError, match="leave it out with --data"):
        harness.Plan(("piqa",), data=str(bench), use_cache=True)


def test_without_files_the_hub_is_asked(harness, monkeypatch):
    import datasets

    def absent(**_):
        raise ConnectionError("no hub here\nat all")

    monkeypatch.setattr(datasets, "load_dataset", absent)
    with pytest.raises(EvalError, match=r"piqa: the harness cannot load it: no hub here; --data DIR reads"):
        harness.Evaluation(harness.Plan(("piqa",)))


def test_the_hub_gives_the_same_requests_and_a_cache_only_if_asked(harness, bench, monkeypatch, tmp_path):
    import datasets
    from lm_eval.caching import cache

    split, rows = HUB["piqa"]
    tables = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name in (split, "train")})
    monkeypatch.setattr(datasets, "load_dataset", lambda **_: tables)
    monkeypatch.setattr(cache, "PATH", str(tmp_path))
    wanted = harness.Evaluation(harness.Plan(("piqa",), data=str(bench))).ask().requests
    for use_cache in (False, True, True):  # filled, and then read
        found = harness.Evaluation(harness.Plan(("piqa",), use_cache=use_cache)).ask().requests
        assert found == wanted
        assert bool(list(tmp_path.iterdir())) == use_cache


# -- numbers -------------------------------------------------------------------------------------------------------------------


def test_the_model_class_serves_the_harness_itself(harness, bench):
    """evaluate() with our model class gives the results of asking, answering and judging."""
    lm = small_lm(context_length=512)
    plan = harness.Plan(("arc_easy", "lambada_openai", "gsm8k"), data=str(bench), num_fewshot=0, gen_kwargs={"max_gen_toks": 8})
    evaluation = harness.Evaluation(plan)
    model = harness.HarnessLM.of(lm, seed=5, draws=8)
    with harness._quiet():
        theirs = harness.evaluate(lm=model, task_dict=evaluation._loaded, bootstrap_iters=plan.bootstrap)
    sheet = evaluation.ask(changes={"draws": 8}, seed=5)
    with harness.Journal(None, {}) as journal:
        answers = harness.answer_sheet(harness.Answerer(lm, sheet), journal, quiet=True)
    ours = evaluation.judge(answers)
    assert set(ours["results"]) == {"arc_easy", "lambada_openai", "gsm8k"}
    assert ours["results"] == theirs["results"]
    with pytest.raises(EvalError, match="not answered, one of"):
        evaluation.judge({})


def test_samples_show_the_prompts_that_were_asked(harness, bench):
    """Examples are drawn at random: judging must draw the same ones as asking."""
    evaluation = harness.Evaluation(harness.Plan(("gsm8k",), data=str(bench), num_fewshot=2, gen_kwargs={"max_gen_toks": 8}))
    sheet = evaluation.ask()
    assert [request.context for request in evaluation.ask().requests] == [request.context for request in sheet.requests]
    answers = {request.key: harness.Response(*request.key, texts=["#### 1"]) for request in sheet.requests}
    samples = evaluation.judge(answers)["samples"]["gsm8k"]
    shown = {sample["doc_id"]: sample["arguments"][0][0] for sample in samples}
    assert shown == {request.doc: request.context for request in sheet.requests}


def test_adaptive_draws_need_to_know_the_tasks(harness):
    with pytest.raises(EvalError, match="sinkdlm eval --adaptive"):
        harness.HarnessLM.of(small_lm(), adaptive=True)


def test_an_ar_parent_gets_the_harnesses_own_numbers(harness, bench, tmp_path):
    """A Llama of transformers scored by the harness's own model class, and converted and scored by us, gives the same."""
    import warnings

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.api.instance import Instance
        from lm_eval.models.huggingface import HFLM
    from sinkdlm.interop import load_any

    tokenizer = tiny_tokenizer(bos=True)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=40, **shape)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lm = load_any(tmp_path)
    plan = harness.Plan(("arc_easy", "piqa", "race", "lambada"), data=str(bench))
    evaluation = harness.Evaluation(plan)
    sheet = evaluation.ask(changes={"estimator": "causal"})
    sheet = Sheet(sheet.requests, dict.fromkeys(sheet.settings, Settings(estimator="causal")))
    with harness.Journal(None, {}) as journal:
        ours = harness.answer_sheet(harness.Answerer(lm, sheet), journal, quiet=True)
    asked = [Instance("loglikelihood", {}, (r.context, r.continuation), 0, (r.task, r.doc, 1)) for r in sheet.requests]
    with harness._quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = HFLM(pretrained=theirs, tokenizer=tokenizer, device="cpu", batch_size=1).loglikelihood(asked)
    assert any(response.truncated for response in ours.values())
    for response, (value, greedy) in zip(ours.values(), wanted, strict=True):
        assert response.value == pytest.approx(value, abs=1e-4)
        assert response.greedy == greedy


def test_chat_prompts_go_through_the_template(harness, bench):
    lm = small_lm()
    plan = harness.Plan(("piqa",), data=str(bench), limit=1, chat=True)
    with pytest.raises(EvalError, match="this tokenizer has no chat template"):
        harness.Evaluation(plan, lm.tokenizer).ask()
    lm.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
    )
    asked = harness.Evaluation(plan, lm.tokenizer).ask().requests
    assert asked[0].context == "[user] Question: boil water\nAnswer:[me]"


@pytest.fixture
def run(command_line):
    def call(*args):
        status, out, err = command_line(*args)
        assert not status, err
        return out

    return call


TASKS = "arc_easy,hellaswag,piqa,siqa,race,lambada,boolq,gsm8k_two_stage,gsm8k_one_stage"


@pytest.mark.parametrize("words", [("--gen-kwargs", "foo=3"), ("--steps", 9), ("--block", 4), ("--policy", "dream")])
def test_options_of_generated_answers_are_refused_where_none_is_asked(tmp_path, bench, command_line, harness, words):
    asked = ("eval", "--data", bench, "--limit", 1, "--write-requests", tmp_path / "q.jsonl", *words, "--tasks")
    status, out, err = command_line(*asked, "piqa,arc_easy")
    assert (status, out) == (2, "")
    assert f"sinkdlm: {words[0]}: is for generated answers, and piqa, arc_easy ask for none; leave it out\n" in err
    assert not (tmp_path / "q.jsonl").exists()
    assert words[0] == "--gen-kwargs" or command_line(*asked, "piqa,gsm8k_two_stage")[0] == 0


@pytest.mark.parametrize(("task", "words", "told"), [
    ("piqa", ("--draws", 16), "--draws: piqa is scored by chain, which draws nothing; leave it out, or give --estimator exact_k"),
    ("gsm8k", ("--gen-kwargs", "top_p=0.9"), "--gen-kwargs top_p: has no effect at temperature 0; add temperature=0.7"),
])  # fmt: skip
def test_options_that_would_do_nothing_are_refused(tmp_path, bench, command_line, harness, task, words, told):
    asked = ("eval", "--data", bench, "--limit", 1, "--write-requests", tmp_path / "q.jsonl", "--tasks", task)
    status, out, err = command_line(*asked, *words)
    assert (status, out) == (2, "")
    assert told in err
    assert not (tmp_path / "q.jsonl").exists()
    meant = {"--draws": (*words, "--estimator", "exact_k"), "--gen-kwargs": (words[0], f"{words[1]},temperature=0.7")}[words[0]]
    assert command_line(*asked, *meant)[0] == 0


def test_two_halves_are_one_go(tmp_path, checkpoint, bench, run, harness):
    precise = ("--dtype", "float64", "--device", "cpu")
    chosen = ("--tasks", TASKS, "--data", bench, "--draws", 32, "--adaptive", "--seed", 4, "--limit", 2, "--gen-kwargs", "steps=16")
    whole = json.loads(run("eval", checkpoint, *chosen, *precise, "--out", tmp_path / "whole", "--json", "--log-samples"))
    assert "requests" in run("eval", *chosen, "--write-requests", tmp_path / "q.jsonl")
    assert len(Sheet.read(tmp_path / "q.jsonl").requests) > 30
    run("score-requests", checkpoint, tmp_path / "q.jsonl", "--out", tmp_path / "r.jsonl", "--batch-tokens", 512, *precise)
    halves = json.loads(run("eval", "--responses", tmp_path / "r.jsonl", "--json"))
    assert halves["results"] == whole["results"]
    assert len(whole["results"]) == 9
    ours, theirs = (read_answers(path)[1] for path in (tmp_path / "r.jsonl", tmp_path / "whole" / "responses.jsonl"))
    assert ours.keys() == theirs.keys()
    for key, response in ours.items():
        assert response.texts == theirs[key].texts
        assert response.value == pytest.approx(theirs[key].value, abs=1e-9)
    _check_results(tmp_path / "whole", whole)
    again = json.loads(run("eval", checkpoint, *chosen, *precise, "--out", tmp_path / "whole", "--json"))
    assert again["results"] == whole["results"]
    header, *answers = (tmp_path / "r.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "r.jsonl").write_text("".join([header, *answers[1:]]))
    with pytest.raises(EvalError, match="not answered, one of 1; run score-requests again"):
        _judged(tmp_path / "r.jsonl", None)
    moved = write_files(tmp_path / "moved", {**plain_files("piqa")})
    with pytest.raises(EvalError, match="has no file for it"):
        _judged(tmp_path / "r.jsonl", moved)


def test_a_block_diffusion_model_is_evaluated(tmp_path, bench, run, harness):
    """Every kind of request, in one go and in two halves."""
    model = save_model(tmp_path / "model", context_length=512, block_size=4)
    precise = ("--dtype", "float64", "--device", "cpu")
    chosen = ("--tasks", "arc_easy,piqa,lambada,gsm8k_one_stage", "--data", bench, "--draws", 8, "--limit", 1)
    chosen += ("--num-fewshot", 0, "--gen-kwargs", "steps=64")
    whole = json.loads(run("eval", model, *chosen, *precise, "--json"))
    run("eval", *chosen, "--write-requests", tmp_path / "q.jsonl")
    run("score-requests", model, tmp_path / "q.jsonl", "--out", tmp_path / "r.jsonl", "--batch-tokens", 512, *precise)
    halves = json.loads(run("eval", "--responses", tmp_path / "r.jsonl", "--json"))
    assert halves["results"] == whole["results"]
    assert len(whole["results"]) == 4


def _judged(path, data):
    from sinkdlm.cli.evaluate import _report, _score_responses

    _score_responses(None, path, data, partial(_report, out=None, log_samples=False, paper=None, as_json=False))


def _check_results(folder, whole):
    """results.json has the harness's format and provenance; samples are written."""
    found = json.loads((folder / "results.json").read_text())
    assert {"results", "configs", "versions", "n-shot", "n-samples", "sinkdlm"} <= found.keys()
    assert found["n-samples"]["arc_easy"] == {"original": 2, "effective": 2}
    own = found["sinkdlm"]
    assert {"model", "settings", "plan", "environment", "table", "seed"} <= own.keys()
    assert own["environment"]["sinkdlm"]
    assert own["model"]["config"]["n_sinks"] == 1
    assert own["settings"]["race"]["guidance"] == 0.7
    rows = [json.loads(line) for line in (folder / "samples_gsm8k_two_stage.jsonl").read_text().splitlines()]
    assert [row["doc_id"] for row in rows] == [0, 1]
    assert len(list(folder.glob("samples_*.jsonl"))) == 9
    lines_ = {(line["task"], line["metric"]): line for line in whole["table"]}
    assert lines_["arc_easy", "acc_norm"]["items"] == 2
    assert lines_["piqa", "acc"]["value"] == whole["results"]["piqa"]["acc,none"]


def test_the_table_stands_beside_the_paper(checkpoint, bench, run, harness):
    said = run("eval", checkpoint, "--tasks", "piqa,lambada", "--data", bench, "--paper", "table1:0.5b:sink", "--device", "cpu")
    head, *rows = [line.split() for line in said.splitlines()]
    assert head == ["task", "metric", "value", "stderr", "items", "draws", "seconds", "paper"]
    assert [row[-1] for row in rows[:4] if row[1] == "acc"] == ["0.6344", "0.4524"]
    assert said.splitlines()[-1].startswith("note  guided values are scores")


# -- slow, and real ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_any_number_of_ranks_gives_the_same_numbers(tmp_path, checkpoint, bench):
    found = []
    for ranks in (1, 2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "-m",
            "sinkdlm",
            "eval",
        ]
        options = [
            "--tasks",
            TASKS,
            "--data",
            bench,
            "--draws",
            "8",
            "--dtype",
            "float64",
            "--device",
            "cpu",
            "--batch-tokens",
            "256",
        ]
        done = subprocess.run(
            [*command, str(checkpoint), *map(str, options), "--json", "--out", str(tmp_path / str(ranks))],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(json.loads(done.stdout)["results"])
    assert found[0] == found[1]
    ours, theirs = (read_answers(tmp_path / str(ranks) / "responses.jsonl")[1] for ranks in (1, 2))
    assert ours.keys() == theirs.keys()
    for key, response in ours.items():
        assert response.value == pytest.approx(theirs[key].value, abs=1e-9)
        assert response.texts == theirs[key].texts


@pytest.mark.slow
def test_a_wrong_task_name_is_said_in_one_line(checkpoint, monkeypatch, capsys, harness):
    """Under torchrun too, where only rank 0 finds the mistake."""
    monkeypatch.setattr(sys, "argv", ["sinkdlm", "eval", str(checkpoint), "--tasks", "arc_eazy", "--device", "cpu"])
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert (end.value.code, said.count("\n")) == (2, 1)
    assert "task 'arc_eazy': unknown to the harness; close to it are arc_easy" in said
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "sinkdlm", "eval"]
    done = subprocess.run(
        [*command, str(checkpoint), "--tasks", "piqa", "--data", "absent", "--device", "cpu"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode
    assert done.stderr.count("sinkdlm: --data absent: no such folder") == 1


COUNTS = {
    "arc_easy": 2376,
    "arc_challenge": 1172,
    "hellaswag": 10042,
    "piqa": 1838,
    "social_iqa": 1954,
    "race": 1045,
    "lambada_openai": 5153,
    "gsm8k": 1319,
}


@pytest.mark.skipif("SINKDLM_DATA" not in os.environ, reason="SINKDLM_DATA names no folder of benchmarks")
@pytest.mark.parametrize("task", COUNTS)
def test_real_sets_have_the_official_counts(task):
    assert len(load_splits(Path(os.environ["SINKDLM_DATA"]), task)[BENCHMARKS[task].split]) == COUNTS[task]


@pytest.mark.slow
@pytest.mark.skipif("SINKDLM_DATA" not in os.environ, reason="SINKDLM_DATA names no folder of benchmarks")
def test_real_sets_run_end_to_end(checkpoint, run, harness):
    found = json.loads(
        run(
            *(
                "eval",
                checkpoint,
                "--tasks",
                ",".join([*COUNTS, "gsm8k_two_stage"]),
                "--data",
                os.environ["SINKDLM_DATA"],
                "--limit",
                2,
            ),
            *("--draws", 8, "--num-fewshot", 0, "--gen-kwargs", "max_gen_toks=8", "--device", "cpu", "--json"),
        )
    )
    assert len(found["results"]) == 9
