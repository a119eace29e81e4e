"""The scorer with a block-diffusion model, without the harness (see test_harness.py)."""

import json

import pytest
import torch

from evaluated import TEXTS, save_model, small_lm
from sinkdlm.errors import SamplingError
from sinkdlm.evals.answering import Answerer, answer_sheet
from sinkdlm.evals.encoding import TextEncoder
from sinkdlm.evals.requests import GENERATE, LOGLIKELIHOOD, ROLLING, Journal, Request, Sheet
from sinkdlm.evals.settings import Settings
from sinkdlm.likelihood import document_likelihood, is_greedy, log_likelihood
from sinkdlm.sampling import generate

PROMPT = TEXTS[0].rstrip()


def answered(lm, sheet, budget=512):
    return answer_sheet(Answerer(lm, sheet, budget=budget), Journal(None, {}), quiet=True)


def sheet_of_all(**settings):
    asked = [
        *(Request(LOGLIKELIHOOD, "word", doc, 0, TEXTS[doc].rstrip(), " " + TEXTS[doc - 1][:7]) for doc in range(4)),
        *(Request(ROLLING, "text", doc, 0, TEXTS[doc] * 2) for doc in range(2)),
        *(Request(GENERATE, "write", doc, 0, TEXTS[doc], generation={"max_gen_toks": 6}) for doc in range(2)),
    ]
    return Sheet(asked, {task: Settings(draws=8, **settings) for task in ("word", "text", "write")})


@pytest.mark.parametrize("estimator", ["exact_k", "official", "chain", "causal"])
def test_answers_do_not_depend_on_batch_or_order(estimator):
    lm, sheet = small_lm(block_size=4, context_length=64), sheet_of_all(estimator=estimator)
    whole = answered(lm, sheet, budget=4096)
    for other in (
        answered(lm, sheet, budget=64),
        answered(lm, Sheet(list(reversed(sheet.requests)), sheet.settings)),
        answered(lm, Sheet(sheet.requests[1::2], sheet.settings)),
    ):
        assert other
        for key, found in other.items():
            assert (found.texts, found.greedy, found.forwards) == (whole[key].texts, whole[key].greedy, whole[key].forwards)
            if found.value is not None:
                assert found.value == pytest.approx(whole[key].value, abs=1e-9)
                assert found.stderr == pytest.approx(whole[key].stderr, abs=1e-9)


def test_answers_are_the_estimators_and_the_samplers_own():
    lm = small_lm(block_size=4, context_length=64)
    encode, options = lm.tokenizer.encode, {"mask_id": lm.config.mask_id}
    word, text, written = answered(
        lm,
        Sheet(
            [
                Request(LOGLIKELIHOOD, "word", 0, 0, PROMPT, " and so on"),
                Request(ROLLING, "text", 0, 0, PROMPT),
                Request(GENERATE, "write", 0, 0, PROMPT, generation={"max_gen_toks": 6}),
            ],
            {task: Settings(estimator="chain") for task in ("word", "text", "write")},
        ),
    ).values()
    row, given = encode(PROMPT + " and so on"), len(encode(PROMPT))
    scored = [place >= given for place in range(len(row))]
    expected = log_likelihood(lm.model.denoiser(), [row], [scored], estimator="chain", **options)
    assert word.value == pytest.approx(float(expected.mean), abs=1e-9)
    assert word.forwards == 4  # one for each token of a block
    assert word.greedy == is_greedy(lm.model.denoiser(), [row], [scored], **options)[0]
    prefix = [lm.tokenizer.eos_token_id]
    expected = document_likelihood(lm.model.denoiser(), [encode(PROMPT)], window=64, prefix=prefix, estimator="chain", **options)
    assert text.value == pytest.approx(-float(expected.nats), abs=1e-9)
    size = given + 6
    tokens = generate(
        lm.model.denoiser(), prompt=[encode(PROMPT)], length=size, cache="none", eos_id=lm.tokenizer.eos_token_id, **options
    ).tokens[0]
    assert written.text == TextEncoder(lm.tokenizer).decode(tokens[given:].tolist())


def test_blocks_that_do_not_fit_are_refused_before_anything_is_computed():
    lm, sheet = small_lm(block_size=4), sheet_of_all(block=3)
    with pytest.raises(SamplingError, match="block = 3: must divide the model's block_size = 4"):
        next(Answerer(lm, sheet).batches(sheet.requests))
    # Six tokens are in two blocks or, after a prompt that ends inside one, in three.
    with pytest.raises(SamplingError, match="steps = 2: fewer than the 3 blocks"):
        next(Answerer(lm, sheet_of_all(steps=2)).batches(sheet.requests))
    for fits in ({"block": 2}, {"steps": 3}):
        assert next(Answerer(lm, sheet_of_all(**fits)).batches(sheet.requests))


def test_a_file_is_scored_in_blocks(tmp_path, command_line):
    """At blocks of one token, the bound is the likelihood; `lm.score` says the same."""
    import sinkdlm

    checkpoint = save_model(tmp_path / "model", block_size=1)
    (tmp_path / "text.txt").write_text(PROMPT)
    found = []
    for words in (("--draws", 8), ("--estimator", "chain")):
        asked = ("score", checkpoint, tmp_path / "text.txt", "--dtype", "float64", "--device", "cpu", "--json", *words)
        status, out, err = command_line(*asked)
        assert not status, err
        found.append(json.loads(out)["total"])
    assert found[0]["nats"] == pytest.approx(found[1]["nats"], rel=1e-12)
    assert found[0]["stderr"] == 0
    own = sinkdlm.load(checkpoint, dtype=torch.float64).score(PROMPT)
    assert own["nats"] == pytest.approx(found[0]["nats"], rel=1e-12)
