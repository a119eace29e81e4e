"""Requests, responses, and the scorer between them, without the harness (see test_harness.py)."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from tokenizers import processors

from evaluated import TEXTS, save_model, small_lm, tiny_tokenizer
from sinkdlm.checkpoint.directory import save
from sinkdlm.data import display
from sinkdlm.data.encoding import Encoder
from sinkdlm.distributed.world import World
from sinkdlm.errors import EvalError, UserError
from sinkdlm.evals import gsm8k
from sinkdlm.evals.answering import Answerer, CausalDenoiser, answer_sheet, fingerprint, forward_tokens, tokenizer_fingerprint
from sinkdlm.evals.documents import read_documents
from sinkdlm.evals.encoding import TextEncoder, cut_at
from sinkdlm.evals.generating import Manner
from sinkdlm.evals.paper import PAPER_ROWS, paper_row
from sinkdlm.evals.report import draw_table, notes_on
from sinkdlm.evals.requests import GENERATE, LOGLIKELIHOOD, ROLLING, Journal, Request, Response, Sheet, header_of, read_answers
from sinkdlm.evals.settings import OFFICIAL, Settings, settings_for
from sinkdlm.likelihood import document_likelihood, log_likelihood
from sinkdlm.sampling import NAMED

DRAWS = 8


def questions(n=6, options=3, task="quiz"):
    found = []
    for doc in range(n):
        for index in range(options):
            ending = " " + TEXTS[(doc + index) % len(TEXTS)][: 3 + 2 * index + doc % 3]
            given = {"acc": 1.0, "acc_norm": float(len(ending) - 1)}
            found.append(Request(LOGLIKELIHOOD, task, doc, index, TEXTS[doc % len(TEXTS)][: 10 + 3 * doc], ending, divisors=given))
    return found


def mixed_sheet(seed=0, **changes):
    """Requests of every kind, all with noise."""
    generation = {"do_sample": True, "temperature": 0.8, "max_gen_toks": 6, "until": ["zq"]}
    asked = [
        *questions(),
        *(Request(LOGLIKELIHOOD, "word", doc, 0, TEXTS[doc], " " + TEXTS[doc][:4]) for doc in range(4)),
        *(Request(ROLLING, "text", doc, 0, TEXTS[doc] * (doc + 1)) for doc in range(3)),
        *(Request(GENERATE, "write", doc, 0, TEXTS[doc], generation=generation) for doc in range(4)),
    ]
    options = {"draws": DRAWS, **changes}
    settings = {
        "quiz": Settings(guidance=0.5, greedy=False, **options),
        "word": Settings(estimator="chain"),
        "text": Settings(greedy=False, **options),
        "write": Settings(),
    }
    return Sheet(asked, settings, seed)


@pytest.mark.parametrize(
    ("gigabytes", "vocab", "tokens"),
    [(141, 49_152, 1 << 16), (141, 151_936, 1 << 15), (24, 49_152, 1 << 14), (8, 151_936, 1 << 12)],
)
def test_forwards_are_as_large_as_memory_has_room_for_their_logits(monkeypatch, gigabytes, vocab, tokens):
    memory = gigabytes * 10**9
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
    assert forward_tokens(torch.device("cuda"), vocab) == tokens
    assert tokens == 1 << 12 or tokens // 4 * vocab * (2 + 4 + 4) <= memory / 8
    assert forward_tokens(torch.device("cpu"), vocab) == 1 << 11


def answered(lm, sheet, *, budget=256, world=None, path=None):
    with Journal(path, header_of(sheet, fingerprint(lm.model), "tokenizer", "float64", {})) as journal:
        return answer_sheet(Answerer(lm, sheet, budget=budget), journal, world=world, quiet=True)


def values(responses):
    return {key: (found.value, found.stderr, found.greedy, tuple(found.texts)) for key, found in responses.items()}


def close(ours, theirs, tolerance=1e-9):
    assert ours.keys() == theirs.keys()
    for key, (value, error, greedy, texts) in ours.items():
        other = theirs[key]
        assert (greedy, texts) == other[2:], key
        if value is not None:
            assert value == pytest.approx(other[0], abs=tolerance)
            assert error == pytest.approx(other[1], abs=tolerance)


# -- laws of the scorer ---------------------------------------------------------------------------------------------------------


def test_answers_do_not_depend_on_batch_or_order():
    lm, sheet = small_lm(), mixed_sheet()
    whole = values(answered(lm, sheet, budget=4096))
    assert len(whole) == len(sheet.requests) == 29
    close(values(answered(lm, sheet, budget=64)), whole)
    turned = Sheet(list(reversed(sheet.requests)), sheet.settings, sheet.seed)
    close(values(answered(lm, turned, budget=512)), whole)
    part = Sheet([request for request in sheet.requests if request.doc == 1], sheet.settings, sheet.seed)
    close(values(answered(lm, part)), {key: value for key, value in whole.items() if key.doc == 1})


def test_another_seed_draws_other_noise():
    lm = small_lm()
    ours, theirs = (values(answered(lm, mixed_sheet(seed))) for seed in (0, 1))
    differs = {key.task for key in ours if ours[key] != theirs[key]}
    assert differs == {"quiz", "text", "write"}  # the chain rule draws nothing


class Ranks(World):
    """One of several ranks; the answers of the others were computed before."""

    def __init__(self, rank, size, others):
        self.rank, self.size, self._others, self.mine = rank, size, others, []

    def from_first(self, make):
        return make()

    def gather(self, value):
        self.mine.append(value)
        turn = len(self.mine) - 1
        parts = [other[turn] for other in self._others]
        return [*parts[: self.rank], value, *parts[self.rank :]]


def test_ranks_share_the_batches_and_all_know_all():
    lm, sheet = small_lm(), mixed_sheet()
    whole = values(answered(lm, sheet, budget=64))
    batches = len(list(Answerer(lm, sheet, budget=64).batches(sheet.requests)))
    assert batches > 6
    assert batches % 2 == 1 or batches % 3, "some rank should go without in the last turn"
    turns = -(-batches // 2)
    lonely = [Ranks(rank, 2, [[[]] * turns]) for rank in range(2)]
    for rank in lonely:
        with pytest.raises(KeyError):  # each rank alone has half
            answered(lm, sheet, budget=64, world=rank)
    for rank in range(2):
        found = answered(lm, sheet, budget=64, world=Ranks(rank, 2, [lonely[1 - rank].mine]))
        assert values(found) == whole
    assert sum(len(part) for rank in lonely for part in rank.mine) == len(sheet.requests)


def test_a_value_is_the_estimators_own():
    """Scores equal those of rows tokenised by hand; the options of a question share noise."""
    lm, sheet = small_lm(), Sheet(questions(2), {"quiz": Settings(draws=64, greedy=True)})
    found = answered(lm, sheet)
    encode = lm.tokenizer.encode
    for request in sheet.requests:
        given, whole = encode(request.context), encode(request.context + request.continuation)
        response = found[request.key]
        exact = log_likelihood(
            lm.model.denoiser(), [whole], [[i >= len(given) for i in range(len(whole))]], mask_id=lm.config.mask_id, draws=4096
        )
        assert response.kind == "bound"
        assert abs(response.value - float(exact.mean)) < 6 * math.hypot(response.stderr, float(exact.stderr)) + 1e-9
        assert response.n_tokens == len(whole) - len(given)
        assert response.greedy is not None


def test_an_ar_parent_is_scored_and_continued_by_itself():
    lm, prompt = small_lm(context_length=64), TEXTS[0].rstrip()
    sheet = Sheet(
        [
            Request(LOGLIKELIHOOD, "word", 0, 0, prompt, TEXTS[1][:3]),
            Request(GENERATE, "write", 0, 0, prompt, generation={"max_gen_toks": 5}),
        ],
        {task: Settings(estimator="causal") for task in ("word", "write")},
    )
    found = answered(lm, sheet)
    rows = lm.tokenizer.encode(prompt + TEXTS[1][:3])
    logits = lm.model.head(lm.model(torch.tensor([rows]), causal=True))[0].detach()
    targets = range(len(rows) - 3, len(rows))
    log_p = logits.log_softmax(-1)
    first, second = found.values()
    assert first.value == pytest.approx(sum(float(log_p[i - 1, rows[i]]) for i in targets), abs=1e-9)
    assert first.kind == "likelihood"
    assert first.greedy == all(int(logits[i - 1].argmax()) == rows[i] for i in targets)
    tokens = lm.tokenizer.encode(prompt)
    for _ in range(5):  # plain greedy decoding
        following = lm.model.head(lm.model(torch.tensor([tokens]), causal=True))[0, -1].detach()
        following[lm.config.mask_id :] = -math.inf
        tokens.append(int(following.argmax()))
        if tokens[-1] == lm.tokenizer.eos_token_id:
            break
    assert second.text == TextEncoder(lm.tokenizer).decode(tokens[len(prompt) :])


def test_greedy_of_an_ar_parent_knows_its_own_words():
    lm = small_lm()
    tokens = lm.tokenizer.encode(TEXTS[0])
    given = len(tokens)
    for _ in range(3):
        tokens.append(int(CausalDenoiser(lm.model)(torch.tensor([tokens]))[0, -1, : lm.config.mask_id].argmax()))
    from sinkdlm.likelihood import is_greedy

    scored = [[i >= given for i in range(len(tokens))]]
    options = {"mask_id": lm.config.mask_id, "causal": True}
    assert is_greedy(CausalDenoiser(lm.model), [tokens], scored, **options) == [True]
    tokens[-2] = (tokens[-2] + 1) % lm.config.mask_id
    assert is_greedy(CausalDenoiser(lm.model), [tokens], scored, **options) == [False]


def test_adaptive_draws_go_where_a_ranking_is_open():
    lm = small_lm()
    full = Sheet(questions(6), {"quiz": Settings(draws=128, greedy=False)})
    quick = Sheet(full.requests, {"quiz": full.settings["quiz"].replace(adaptive=True)})
    ours, theirs = answered(lm, quick), answered(lm, full)
    assert sum(found.draws for found in ours.values()) < sum(found.full_draws for found in ours.values())
    assert any("adaptive draws saved" in note for note in notes_on(ours))
    for divide in (lambda request: 1.0, lambda request: request.divisors["acc_norm"]):
        agree = 0
        for doc in range(6):
            options = [request for request in full.requests if request.doc == doc]
            best = [max(options, key=lambda one: found[one.key].value / divide(one)).index for found in (ours, theirs)]
            agree += best[0] == best[1]
        assert agree >= 5
    close(values(answered(lm, quick, budget=64)), values(ours))


def test_adaptive_draws_do_not_depend_on_the_other_tasks():
    """Two tasks with equal settings but other metrics: a stopping test at half the error would end later."""
    lm = small_lm()
    pairs = [(doc, option) for doc in range(8) for option in range(3)]
    endings = {(doc, option): " " + TEXTS[(doc + option) % len(TEXTS)][doc : doc + 4] for doc, option in pairs}  # close calls
    alone = [
        Request(LOGLIKELIHOOD, "plain", *pair, TEXTS[pair[0] % len(TEXTS)], endings[pair], divisors={"acc": 1.0}) for pair in pairs
    ]
    settings = Settings(draws=128, greedy=False, adaptive=True)
    ours = answered(lm, Sheet(alone, {"plain": settings}), budget=4096)
    both = answered(lm, Sheet([*alone, *questions(8)], {"plain": settings, "quiz": settings}), budget=4096)
    assert {key: both[key].draws for key in ours} == {key: found.draws for key, found in ours.items()}
    assert len({found.draws for found in ours.values()}) > 1


# -- tokens ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [False, True])
def test_pairs_are_tokenised_as_the_harness_does(bos):
    template = pytest.importorskip("lm_eval.api.model").TemplateLM
    tokenizer = tiny_tokenizer(bos=bos)

    class Plain(template):
        eot_token_id = tokenizer.eos_token_id
        prefix_token_id = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id

        def tok_encode(self, string, add_special_tokens=None, **_):
            return tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

        def _loglikelihood_tokens(self, requests, **_):
            return [(context, continuation) for _, context, continuation in requests]

        loglikelihood_rolling = generate_until = None

    class Asked:
        def __init__(self, *args):
            self.args = args

    pairs = [("a cat", " sat"), ("a cat ", "sat"), ("a cat \n", "sat on"), ("", "sat"), ("a", "b")]
    wanted = Plain().loglikelihood([Asked(*pair) for pair in pairs], disable_tqdm=True)
    rows = TextEncoder(tokenizer).pairs([Request(LOGLIKELIHOOD, "t", i, 0, *pair) for i, pair in enumerate(pairs)], 64)
    assert [(row.tokens[: row.n_given], row.tokens[row.n_given :]) for row in rows] == wanted
    if bos:
        assert all(row.tokens[0] == tokenizer.bos_token_id for row in rows)


def test_bos_is_as_asked():
    asked = [Request(LOGLIKELIHOOD, "t", 0, 0, "a cat", " sat")]
    for own in (False, True):
        tokenizer = tiny_tokenizer(bos=True)
        if not own:  # it has a BOS, and does not add it
            tokenizer.backend_tokenizer.post_processor = tiny_tokenizer().backend_tokenizer.post_processor
        for bos in (None, False, True):
            (row,) = TextEncoder(tokenizer, bos).pairs(asked, 64)
            assert (row.tokens[0] == tokenizer.bos_token_id) == (own if bos is None else bos)
            assert tokenizer.decode(row.tokens[row.n_given :]) == " sat"
    closing = tiny_tokenizer(bos=True)
    frame = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 1)])
    closing.backend_tokenizer.post_processor = frame  # its EOS would stand between prompt and continuation
    assert TextEncoder(closing).pairs(asked, 64) == TextEncoder(tiny_tokenizer(bos=True)).pairs(asked, 64)
    (row,) = TextEncoder(tiny_tokenizer()).pairs([replace(asked[0], context="a cat</s>")], 64)
    assert row.tokens[row.n_given - 1] == tiny_tokenizer().eos_token_id  # one that the text itself has stays
    with pytest.raises(EvalError, match="no beginning-of-sequence token"):
        TextEncoder(tiny_tokenizer(), True)


def test_options_of_a_question_share_their_noise():
    lm = small_lm()
    same = [Request(LOGLIKELIHOOD, "quiz", doc, index, TEXTS[0], " sat on it") for doc in range(2) for index in range(2)]
    found = [response.value for response in answered(lm, Sheet(same, {"quiz": Settings(draws=8)})).values()]
    assert found[0] == found[1] != found[2] == found[3]


def test_what_is_too_long_loses_its_left_and_is_counted():
    lm = small_lm(context_length=16)
    long = Request(LOGLIKELIHOOD, "quiz", 0, 0, TEXTS[0] * 4, " word")
    short = replace(long, doc=1, context=(TEXTS[0] * 4)[-(16 - 5) :])
    sheet = Sheet([long, short], {"quiz": Settings(estimator="chain")})
    found = list(answered(lm, sheet).values())
    assert found[0].truncated == len(TEXTS[0]) * 4 - 11
    assert found[1].truncated == 0
    assert found[0].value == pytest.approx(found[1].value, abs=1e-12)
    assert notes_on({response.key: response for response in found})[0].startswith("1 of 2 requests were longer than the model")
    with pytest.raises(EvalError, match="a continuation of 41 tokens: the model reads 16"):
        answered(lm, Sheet([replace(long, continuation="a" * 40)], sheet.settings))


def test_an_ar_parent_does_not_read_the_last_token():
    """An AR model does not read the last token, so a row may have one more, as in the harness."""
    lm = small_lm(context_length=16)
    asked = Request(LOGLIKELIHOOD, "quiz", 0, 0, "a" * 13, " sat")
    for settings, cut in ((Settings(estimator="causal"), 0), (Settings(estimator="chain"), 1)):
        assert answered(lm, Sheet([asked], {"quiz": settings}))[asked.key].truncated == cut


def test_every_request_draws_text_of_its_own():
    lm = small_lm()
    generation = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8}
    asked = [
        Request(GENERATE, "write", doc, 0, TEXTS[0], repeat=repeat, generation=generation) for doc in (0, 1) for repeat in (0, 1)
    ]
    found = answered(lm, Sheet(asked, {"write": Settings()}))
    assert len({response.text for response in found.values()}) == 4


def test_cuts_of_a_task_that_does_not_sample_change_nothing():
    asked = Request(GENERATE, "write", 0, 0, TEXTS[0], generation={"max_gen_toks": 4, "do_sample": False, "top_p": 0.5, "top_k": 2})
    assert (
        Manner.of(asked, Settings(), None).policy
        == Manner.of(replace(asked, generation={"max_gen_toks": 4}), Settings(), None).policy
    )
    drawn = Manner.of(replace(asked, generation={"temperature": 0.5, "top_p": 0.5, "top_k": 2}), Settings(), None).policy
    assert (drawn.temperature, drawn.top_p, drawn.top_k) == (0.5, 0.5, 2)


def test_a_prompt_loses_its_left_to_make_room_for_the_answer():
    lm = small_lm(context_length=32)
    asked = Request(GENERATE, "write", 0, 0, TEXTS[0] * 3, generation={"max_gen_toks": 8})
    found = answered(lm, Sheet([asked], {"write": Settings()}))[asked.key]
    assert (found.truncated, found.unknown) == (3 * len(TEXTS[0]) - 24, 0)
    other = replace(asked, context=TEXTS[0][:10] + "\u6f22")
    assert answered(lm, Sheet([other], {"write": Settings()}))[other.key].unknown == 1
    with pytest.raises(EvalError, match="40 tokens to write: the model reads 32"):
        answered(lm, Sheet([replace(asked, generation={"max_gen_toks": 40})], {"write": Settings()}))


def test_an_answer_that_cannot_fit_is_said_before_anything_is_computed(tmp_path):
    late = Request(GENERATE, "write", 0, 0, TEXTS[0], generation={"max_gen_toks": 40})
    with pytest.raises(EvalError, match=r"40 tokens to write.*--gen-kwargs max_gen_toks"):
        answered(
            small_lm(context_length=32),
            Sheet([*questions(1), late], {"quiz": Settings(draws=8), "write": Settings()}),
            path=tmp_path / "r",
        )
    assert not (tmp_path / "r").exists()  # the next run may have other settings


def test_generation_ends_at_stop_strings_and_eos():
    assert cut_at("one\ntwo Question: three", ["Question:", "\n"]) == "one"
    lm = small_lm()
    asked = Request(GENERATE, "write", 0, 0, TEXTS[0], generation={"max_gen_toks": 12})
    text = answered(lm, Sheet([asked], {"write": Settings(block=4)}))[asked.key].text
    assert len(text) >= 3
    stopped = answered(lm, Sheet([replace(asked, generation={"max_gen_toks": 12, "until": text[1]})], {"write": Settings(block=4)}))
    found = stopped[asked.key]
    assert found.text == text[: text.index(text[1])]
    assert found.forwards < 12  # later blocks were not written
    tokenizer = lm.tokenizer
    assert TextEncoder(tokenizer).decode([5, 6, tokenizer.eos_token_id, 7]) == tokenizer.decode([5, 6])


def test_a_stop_string_may_be_a_special_token():
    tokenizer = tiny_tokenizer(bos=True)
    encoder = TextEncoder(tokenizer)
    tokens = [5, 6, tokenizer.bos_token_id, 7]
    assert encoder.decode(tokens) == tokenizer.decode([5, 6, 7])
    assert encoder.decode(tokens, ["<s>"]) == tokenizer.decode([5, 6])
    assert encoder.stops(tokens, ["<s>"])
    assert not encoder.stops(tokens[:2], ["<s>"])


@pytest.mark.parametrize("policy", sorted(NAMED))
def test_every_policy_can_write_answers(policy):
    asked = Request(GENERATE, "write", 0, 0, "q", generation={})
    greedy = replace(NAMED[policy], eos_id=1, temperature=0.0)  # the harness says the temperature: 0 unless a task samples
    assert Manner.of(asked, Settings(policy=policy), 1).policy == greedy


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ({"max_gen_toks": "abc"}, "max_gen_toks = 'abc': expected a whole number"),
        ({"until": 5}, "until = 5: expected a string"),
        ({"canvas": "abc"}, "canvas = 'abc'"),
        ({"steps": 1.5}, "steps = 1.5: expected a whole number"),
        ({"temperature": "hot", "do_sample": False}, "temperature = 'hot': expected a number"),
        ({"stages": 0}, "stages = 0"),
    ],
)
def test_wrong_generation_settings_say_so(generation, said):
    with pytest.raises(UserError, match=re.escape(said)):
        Manner.of(Request(GENERATE, "write", 0, 0, "q", generation=generation), Settings(), 1)


def test_stages_continue_what_was_written():
    lm = small_lm(context_length=128)
    generation = {"canvas": 64, "steps": 16, "stages": 2, "policy": "smdm-greedy"}
    asked = Request(GENERATE, "gsm", 0, 0, "Question: q", generation=generation)
    found = answered(lm, Sheet([asked], {"gsm": Settings()}))[asked.key]
    assert len(found.texts) == 2
    alone = replace(asked, context=f"Question: q {found.texts[0]}", generation={**generation, "stages": 1})
    assert answered(lm, Sheet([alone], {"gsm": Settings()}))[asked.key].texts == [found.texts[1]]


@pytest.mark.parametrize(
    ("given", "temperature", "n_tokens"),
    [
        ({"do_sample": False, "temperature": 0.7}, 0.0, 256),
        ({"temperature": 0.7, "max_new_tokens": 3}, 0.7, 3),
        ({"do_sample": True}, 1.0, 256),
        ({"until": "x", "max_gen_toks": 5}, 0.0, 5),
    ],
)
def test_generation_settings_mean_what_the_harness_says(given, temperature, n_tokens):
    manner = Manner.of(Request(GENERATE, "t", 0, 0, "q", generation=given), Settings(), 1)
    assert (manner.policy.temperature, manner.n_tokens) == (temperature, n_tokens)
    with pytest.raises(EvalError, match="'num_beams' is not supported"):
        Manner.of(Request(GENERATE, "t", 0, 0, "q", generation={"num_beams": 4}), Settings(), 1)


# -- files ------------------------------------------------------------------------------------------------------------------------


def test_a_sheet_comes_back_from_its_file(tmp_path):
    sheet = Sheet(
        [*mixed_sheet().requests, Request(ROLLING, "text", 9, 0, "a\u2028b\r\nc \U0001f600")], mixed_sheet().settings, 3, {"x": 1}
    )
    sheet.write(tmp_path / "deep" / "r.jsonl")
    back = Sheet.read(tmp_path / "deep" / "r.jsonl")
    assert back == sheet
    assert back.digest == sheet.digest
    others = [
        Sheet(sheet.requests[1:], sheet.settings, 3),
        Sheet(sheet.requests, sheet.settings, 4),
        Sheet(sheet.requests, {**sheet.settings, "word": Settings()}, 3),
        Sheet([replace(sheet.requests[0], context="x"), *sheet.requests[1:]], sheet.settings, 3),
    ]
    assert len({sheet.digest, *(other.digest for other in others)}) == 5
    assert Sheet(sheet.requests, sheet.settings, 3, {"x": 2}).digest == sheet.digest  # `about` decides no answer


class PowerCutError(Exception):
    pass


def test_what_is_answered_is_not_asked_again(tmp_path):
    lm, sheet, path = small_lm(), mixed_sheet(), tmp_path / "r.jsonl"
    whole = answered(lm, sheet, budget=64)
    asked = []

    class Broken(Answerer):
        left = 3

        def answer(self, batch):
            if self.left == 0:
                raise PowerCutError
            self.left -= 1
            asked.append([request.key for request in batch])
            return super().answer(batch)

    header = header_of(sheet, fingerprint(lm.model), "tokenizer", "float64", {})
    with Journal(path, header) as journal, pytest.raises(PowerCutError):
        answer_sheet(Broken(lm, sheet, budget=64), journal, quiet=True)
    assert len(read_answers(path)[1]) == sum(map(len, asked))
    with path.open("ab") as file:  # a write that a kill cut off
        file.write(b'{"task": "quiz", "do')
    Broken.left = 10**6
    with Journal(path, header) as journal:
        found = answer_sheet(Broken(lm, sheet, budget=64), journal, quiet=True)
    assert sorted(key for batch in asked for key in batch) == sorted(request.key for request in sheet.requests)  # each once
    close(values(found), values(whole))
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + len(sheet.requests)
    for line in lines:
        json.loads(line)


def test_a_run_that_is_refused_leaves_no_file(tmp_path):
    """Its header would bind the next run with the same --out to settings that were refused."""
    sheet, path = mixed_sheet(), tmp_path / "r.jsonl"
    header = header_of(sheet, "weights", "tokenizer", "float32", {})
    with pytest.raises(EvalError, match="refused"), Journal(path, header):
        raise EvalError("refused")
    assert not path.exists()
    with Journal(path, header) as journal:
        journal.append([Response(*sheet.requests[0].key, value=-1.0)])
    with pytest.raises(EvalError, match="later"), Journal(path, header):
        raise EvalError("later")
    assert len(path.read_text().splitlines()) == 2  # an answer is kept
    with Journal(path, header) as journal:
        assert list(journal.done) == [sheet.requests[0].key]


def test_other_answers_are_not_gone_on_with(tmp_path):
    lm, sheet, path = small_lm(), mixed_sheet(), tmp_path / "r.jsonl"
    part = Sheet(sheet.requests[:3], sheet.settings)
    header = header_of(part, "weights", "tokenizer", "float32", {})
    Journal(path, header).close()
    for name, said in (
        ("requests", "other requests or settings"),
        ("checkpoint", "another model"),
        ("arithmetic", "another precision"),
        ("tokenizer", "another tokenizer"),
    ):
        with pytest.raises(EvalError, match=f"{said}; choose another --out"):
            Journal(path, {**header, name: "other"})
    with Journal(path, header), pytest.raises(EvalError, match="another run is writing it"):
        Journal(path, header)
    path.write_text("[1]\n")
    with pytest.raises(EvalError, match="line 1 is not a JSON object"):
        Journal(path, header)
    for foreign in ('{"text": "mine"}', '{"text": "mine"}\n{"text": "cut', "notes\nof mine", '{"sinkdlm": "responses"}'):
        path.write_text(foreign)
        with pytest.raises(EvalError):
            Journal(path, header)
        assert path.read_text() == foreign  # a foreign file is left as it is
    path.write_text(json.dumps(header, ensure_ascii=False)[:20])  # a run that ended while it wrote its first line
    Journal(path, header).close()
    assert read_answers(path)[0] == header
    path.write_text('{"a": 1}\n')
    with pytest.raises(EvalError, match="not a file of responses"):
        read_answers(path)
    with pytest.raises(EvalError, match="cannot be read"):
        read_answers(tmp_path / "absent")
    with pytest.raises(EvalError, match="cannot be written"):
        Journal(Path("/proc/none/r.jsonl"), header)
    assert fingerprint(lm.model) != fingerprint(small_lm(seed=1).model)
    assert fingerprint(lm.model) != fingerprint(small_lm(n_sinks=2).model)
    turned = small_lm().model
    assert fingerprint(lm.model) == fingerprint(turned)
    with torch.no_grad():
        turned.embed.weight.copy_(turned.embed.weight.flip(0))
    assert fingerprint(lm.model) != fingerprint(turned)
    assert tokenizer_fingerprint(tiny_tokenizer()) == tokenizer_fingerprint(tiny_tokenizer())
    assert tokenizer_fingerprint(tiny_tokenizer()) != tokenizer_fingerprint(tiny_tokenizer(bos=True))


def test_wrong_requests_say_so(tmp_path):
    for given, said in (
        ({"kind": "magic"}, "kind = 'magic': allowed"),
        ({"continuation": ""}, "the continuation is empty: there is nothing to score"),
        ({"kind": ROLLING, "context": ""}, "the text is empty"),
    ):
        with pytest.raises(EvalError, match=said):
            replace(questions(1)[0], **given)
    one = questions(1)[0]
    for requests, settings, said in (
        ([], {}, "there is no request"),
        ([one, one], {"quiz": Settings()}, "asked twice"),
        ([one], {}, "no settings for this task"),
    ):
        with pytest.raises(EvalError, match=said):
            Sheet(requests, settings)
    path = tmp_path / "r.jsonl"
    for text, said in (
        ("", "not a file of requests"),
        ("{}\n", "not a file of requests"),
        ("nonsense\n", "line 1 is not JSON"),
        ('{"sinkdlm": "requests", "version": 9}\n', "requests of version 9"),
        ('{"sinkdlm": "requests", "version": 1}\n', "write it again with --write-requests"),
        ('{"sinkdlm": "requests", "version": 1, "seed": 0, "about": {}, "settings": {"t": {"drows": 1}}}\n', "drows = 1: unknown"),
    ):
        path.write_text(text)
        with pytest.raises(EvalError, match=said) as caught:
            Sheet.read(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(EvalError, match="cannot be read"):
        Sheet.read(tmp_path / "absent.jsonl")
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.bos_token = None
    with pytest.raises(EvalError, match="neither BOS nor EOS to stand for it; name one as eos_token"):
        TextEncoder(tokenizer).pairs([Request(LOGLIKELIHOOD, "t", 0, 0, "", "a")], 8)
    tokenizer = tiny_tokenizer(bos=True)
    tokenizer.eos_token = None
    with pytest.raises(EvalError, match=r"no EOS \(and BOS is left out\) to stand for it; say --bos"):
        TextEncoder(tokenizer, False).pairs([Request(LOGLIKELIHOOD, "t", 0, 0, "", "a")], 8)
    with pytest.raises(EvalError, match="has no token of its own"):
        TextEncoder(tiny_tokenizer(bos=True)).pairs([Request(LOGLIKELIHOOD, "t", 0, 0, "", "<s>")], 8)


# -- settings, paper, GSM8K -------------------------------------------------------------------------------------------------------


def test_tasks_have_the_official_settings():
    assert len(OFFICIAL) == 12
    assert settings_for("gsm8k_two_stage", {"steps": 3}) == Settings(policy="smdm-greedy", steps=3)
    assert settings_for("arc_easy", {}, {"estimator": "causal"}) == Settings(estimator="causal")
    assert settings_for("piqa", {}) == Settings(estimator="chain", guidance=0.6)
    assert settings_for("hellaswag", {"draws": 32}, {"guidance": 0.0}) == Settings(draws=32)
    assert settings_for("arc_easy", {"estimator": "causal"}) == Settings(estimator="causal")
    assert settings_for("whatever", {}) == Settings()
    for values_, said in (
        ({"estimator": "magic"}, "allowed: exact_k"),
        ({"draws": 0}, "draws = 0"),
        ({"guidance": -2.0}, "guidance = -2.0"),
        ({"estimator": "causal", "guidance": 1.0}, "an AR parent has no"),
        ({"policy": "magic"}, "policy 'magic'"),
        ({"drows": 1}, "drows = 1: unknown"),
        ({"bos": "maybe"}, "bos = 'maybe': allowed is a valid boolean"),
        ({"adaptive": "maybe"}, "adaptive = 'maybe'"),
        ({"adaptive": True, "draws": 16}, "the 32 draw sets of --adaptive"),
        ({"error": 2}, "error = 2: allowed is less than 1"),
        ({"tolerance": 1}, "tolerance = 1: allowed is less than 1"),
        ({"steps": "abc"}, "steps = 'abc': allowed is a valid integer"),
    ):
        with pytest.raises(UserError, match=said):
            settings_for("t", values_)


def test_paper_rows_are_there():
    assert len(PAPER_ROWS) == 17
    row = paper_row("table1:0.5b:sink")
    assert (row["arc_easy"], row["gsm8k"], len(row)) == (0.5547, 0.4920, 8)
    assert paper_row("table5:zero")["piqa"] == 0.6409
    assert paper_row("table3:front") == paper_row("table4:1") == paper_row("table5:learned")
    assert {task: row[task] for task in paper_row("table3:front")} == paper_row("table3:front")
    with pytest.raises(EvalError, match="no such row; there are table1"):
        paper_row("table9")
    line = {
        "task": "gsm8k_two_stage",
        "metric": "exact_match",
        "value": 0.5,
        "stderr": None,
        "items": 2,
        "draws": 0.0,
        "seconds": 1.0,
    }
    assert draw_table([line], row).splitlines()[1].split() == [
        "gsm8k_two_stage",
        "exact_match",
        "0.5000",
        "2",
        "0.0",
        "1.0",
        "0.4920",
    ]
    for task in ("lambada_openai", "lambada_standard"):
        assert draw_table([line | {"task": task, "metric": "acc"}], row).splitlines()[1].split()[-1] == "0.4524"


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("18", "18", True),
        ("18", "18.0", True),
        ("18", " $18. ", True),
        ("1,250", "1250", True),
        ("0.5", "1/2", True),
        ("0.5", "50%", True),
        ("18", "18%", True),
        ("18", r"18\%", True),
        ("18", "€18", True),
        ("12", "1 2", False),
        ("18", "19", False),
        ("18", "", False),
        ("18", "181", False),
        ("-3", "3", False),
        ("0.5", r"\frac{1}{2}", True),
        ("4", r"2 \cdot 2", True),
        ("4", r"\sqrt{17}", False),
        ("1/0", "7", False),
        ("7", "7" * 5000, False),
        ("18", "18 dollars", True),
        ("18", "18 points.", True),
        ("18", "18 apples", True),
        ("1250", "$1,250 square feet", True),
        ("0.5", "1/2 cup", True),
        ("18", "x = 18 hours", True),
        ("18", "19 dollars", False),
        ("18", "18 or 19", False),
        ("3", "3 hundred", False),
        ("18", "dollars", False),
    ],
)
def test_answers_are_compared_as_numbers_and_as_algebra(gold, answer, same):
    pytest.importorskip("math_verify")
    assert gsm8k.is_same_answer(gold, answer) is same


def test_no_answer_is_ever_run(tmp_path):
    pytest.importorskip("math_verify")
    mark = tmp_path / "mark"
    for text in (f"__import__('os').system('touch {mark}')", f"open('{mark}', 'w')", rf"\text{{open('{mark}', 'w')}}"):
        assert not gsm8k.is_same_answer("3", text)
    assert not mark.exists()


def test_the_answer_follows_the_last_mark():
    assert gsm8k.extract_answer("Answer: 3 #### 4 #### 5 ") == "5"
    assert gsm8k.extract_answer("Answer: 3") == ""
    assert gsm8k.process_results({"answer": "so 1 + 1 = <<1+1=2>>2\n#### 2"}, ["Answer: two #### 2\n"]) == {"exact_match": 1.0}
    assert gsm8k.process_results({"answer": "#### 2"}, ["two"]) == {"exact_match": 0.0}


# -- the command line -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(command_line):
    return lambda *args: Said(*command_line(*args))


class Said(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("evals") / "model")


def test_requests_are_answered_without_the_harness(tmp_path, checkpoint):
    """The numbers equal those of a call in this process."""
    sheet = mixed_sheet()
    sheet.write(tmp_path / "q.jsonl")
    script = (
        "import sys; from sinkdlm.cli.entry import main\n"
        f"sys.argv = ['sinkdlm', 'score-requests', {str(checkpoint)!r}, {str(tmp_path / 'q.jsonl')!r}, '--out', "
        f"{str(tmp_path / 'r.jsonl')!r}, '--dtype', 'float64', '--device', 'cpu', '--json']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "for name in ('lm_eval', 'datasets', 'math_verify', 'sympy.parsing.latex'): assert name not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["responses"] == 29
    header, found = read_answers(tmp_path / "r.jsonl")
    assert header["model"]["config"]["n_sinks"] == 1
    close(values(found), values(answered(small_lm(), sheet)))


@pytest.mark.slow
def test_a_killed_run_loses_at_most_a_batch(tmp_path, checkpoint, run):
    asked = Sheet(questions(36), {"quiz": Settings(draws=64, greedy=False)})
    asked.write(tmp_path / "q.jsonl")
    command = ["score-requests", checkpoint, tmp_path / "q.jsonl", "--dtype", "float64", "--device", "cpu", "--batch-tokens", "256"]
    kept, killed = [tmp_path / name for name in ("whole.jsonl", "killed.jsonl")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "sinkdlm", *map(str, command), "--out", str(killed)], env=environment, stderr=subprocess.PIPE
    )
    end = time.monotonic() + 120
    while not (killed.exists() and killed.read_bytes().count(b"\n") > 20):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    before = read_answers(killed)[1]
    assert 20 <= len(before) < 108
    assert run(*command, "--out", killed).status == 0
    lines = killed.read_text().splitlines()
    assert len(lines) - 1 - 108 < 3, "more than the question that the kill cut in two was answered twice"
    assert run(*command, "--out", kept).status == 0
    close(values(read_answers(killed)[1]), values(read_answers(kept)[1]))
    written = kept.read_bytes()
    assert run(*command, "--out", kept).status == 0
    assert kept.read_bytes() == written  # there was nothing left to do
    other = run(*command[:3], "--out", kept, "--dtype", "float32", "--device", "cpu")
    assert (other.status, other.err.count("\n")) == (2, 1)
    assert "answers in another precision" in other.err


def test_documents_are_scored(tmp_path, checkpoint, run):
    texts = [TEXTS[0] * 3, TEXTS[1]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    (tmp_path / "a.txt").write_text("\n".join(texts) + "\n")
    options = ("--draws", "32", "--dtype", "float64", "--device", "cpu")
    said = run("score", checkpoint, tmp_path / "a.jsonl", "--field", "body", "--json", *options)
    assert said.status == 0, said.err
    found = json.loads(said.out)
    assert found["kind"] == "bound"
    assert [row["bytes"] for row in found["documents"]] == [len(text.encode()) for text in texts]
    for row in [*found["documents"], found["total"]]:
        assert row["bits_per_byte"] == pytest.approx(row["nats"] / row["bytes"] / math.log(2))
        assert row["perplexity"] == pytest.approx(math.exp(row["nats"] / row["tokens"]))
    assert found["total"]["nats"] == pytest.approx(sum(row["nats"] for row in found["documents"]))
    lines = run("score", checkpoint, tmp_path / "a.txt", "--documents", "line", *options).out.splitlines()
    assert [line.split()[0] for line in lines] == ["document", "0", "1", "total", "note"]
    assert float(lines[-2].split()[1]) == pytest.approx(found["total"]["nats"], abs=1e-3)
    assert lines[0].split()[-1] == "draws"
    assert [int(line.split()[-1]) for line in lines[1:-1]] == [32, 32, 64]
    for exact in (("--causal",), ("--estimator", "chain")):
        found = json.loads(run("score", checkpoint, tmp_path / "a.jsonl", "--field", "body", "--json", *exact, *options[2:]).out)
        assert found["kind"] == "likelihood"
        assert found["total"]["stderr"] == 0
        lines = run("score", checkpoint, tmp_path / "a.txt", "--documents", "line", *exact, *options[2:]).out.splitlines()
        assert lines[0].split()[-1] == "tokens"  # nothing is drawn, so there is no column of draws
        assert int(lines[-1].split()[-1]) == found["total"]["tokens"]


def test_a_document_that_spells_a_special_token_is_scored_letter_by_letter(tmp_path, checkpoint, run):
    """As `data prepare` reads it for training: a text that speaks of </s> does not end there, and [MASK] is no outcome."""
    text = "a </s> cat [MASK] sat </s>"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "end.txt").write_text("</s>")
    tokenizer = tiny_tokenizer()
    for name, of in (("a.txt", text), ("end.txt", "</s>")):
        said = run("score", checkpoint, tmp_path / name, "--json", "--draws", "8", "--dtype", "float64", "--device", "cpu")
        assert said.status == 0, said.err
        ids = Encoder(tokenizer).encode([of])[0]
        assert json.loads(said.out)["total"]["tokens"] == len(ids) > len(tokenizer.encode(of))


def test_documents_begin_as_prompts_of_sample_do(tmp_path, run):
    """BOS where the tokenizer puts it, or as asked; else EOS, as in running text. Neither is scored."""
    text = TEXTS[0] * 20  # longer than a window; only the first begins with BOS
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "spelled.txt").write_text(f"<s>{text}")
    lm, silent = small_lm(bos=True), tiny_tokenizer(bos=True)
    silent.backend_tokenizer.post_processor = None  # it has a BOS, but does not add it
    places = {name: save(tmp_path / name, lm.model, tokenizer) for name, tokenizer in (("puts", lm.tokenizer), ("silent", silent))}
    ids = lm.tokenizer.encode(text, add_special_tokens=False)
    options = {"mask_id": lm.config.mask_id, "estimator": "causal"}
    for causal in (True, False):
        flags = ("--causal",) if causal else ("--draws", "8")

        def nats(model, *more, file="a.txt", flags=flags):
            said = run("score", places[model], tmp_path / file, "--json", "--dtype", "float64", "--device", "cpu", *flags, *more)
            assert said.status == 0, said.err
            return json.loads(said.out)["total"]["nats"]

        found = {more: [nats(model, *more) for model in places] for more in ((), ("--bos",), ("--no-bos",))}
        assert found["--bos",][0] == found["--bos",][1] == found[()][0]
        assert found["--no-bos",][0] == found["--no-bos",][1] == found[()][1] != found[()][0]
        assert nats("puts", file="spelled.txt") == found[()][0]  # never two
        if causal:
            for more, prefix in ((("--bos",), lm.tokenizer.bos_token_id), (("--no-bos",), lm.tokenizer.eos_token_id)):
                window = lm.config.context_length + 1
                expected = document_likelihood(CausalDenoiser(lm.model), [ids], window=window, prefix=[prefix], **options)
                assert found[more][0] == pytest.approx(-float(expected.estimates.mean[0]))
    without = run("score", save_model(tmp_path / "without"), tmp_path / "a.txt", "--draws", "8", "--device", "cpu", "--bos")
    assert (without.status, without.err.count("\n")) == (2, 1)
    assert "--bos: the tokenizer has no beginning-of-sequence token; leave it out" in without.err
    silent.eos_token = None  # then nothing can precede a document, as a causal model needs
    where = (save(tmp_path / "bare", lm.model, silent), tmp_path / "a.txt", "--causal", "--device", "cpu")
    bare = run("score", *where)
    assert bare.status == 2
    assert "no EOS (and BOS is left out) to stand for it; say --bos" in bare.err  # nobody had said --no-bos
    assert run("score", *where, "--bos").status == 0


def test_what_the_tokenizer_does_not_have_is_told(tmp_path, checkpoint, run):
    """Texts that differ only in unknown letters score alike, so no value is a bound, and no note calls it one."""
    options = ("--draws", "16", "--dtype", "float64", "--device", "cpu")
    values = []
    for name, text in (("one", "the cat \u6f22\u5b57"), ("two", "the cat \u00c4\u00d6")):
        (tmp_path / f"{name}.txt").write_text(text)
        found = json.loads(run("score", checkpoint, tmp_path / f"{name}.txt", "--json", *options).out)
        assert found["total"]["unknown"] == 2
        values.append(found["total"]["nats"])
    assert values[0] == values[1]
    said = run("score", checkpoint, tmp_path / "one.txt", *options).out
    assert "2 of 10 tokens stand for characters that the tokenizer does not have" in said
    assert "upper bounds" not in said
    responses = [Response("piqa", 0, 0, unknown=3), Response("piqa", 1, 0), Response("piqa", 2, 0, unknown=1)]
    notes = notes_on({one.key: one for one in responses})
    assert notes == ["2 of 3 requests have characters that the tokenizer does not have (4 in all); these are lost"]


def test_rows_without_text_are_left_out_and_counted(tmp_path, checkpoint, run):
    """Forms of input are read as `data prepare` reads them."""
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "abc"}\n{"text": " "}\n')
    said = run("score", checkpoint, tmp_path / "a.jsonl", "--draws", "8", "--device", "cpu")
    assert [line.split()[0] for line in said.out.splitlines()] == ["document", "0", "total", "note", "note"]
    assert said.out.endswith("note  2 rows without text were left out\n")
    found = run("score", checkpoint, tmp_path / "a.jsonl", "--draws", "8", "--device", "cpu", "--json")
    assert json.loads(found.out)["left_out"] == 2


def test_half_a_character_is_no_text_to_score(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}\n{"text": "a\\ud800"}\n')
    with pytest.raises(UserError, match=r"a.jsonl: line 2: half of a surrogate pair"):
        read_documents(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("score", "CKPT", "absent.txt"), "no such file"),
        (("score", "CKPT", "EMPTY"), "holds no text"),
        (("score", "CKPT", "BODY"), "body.jsonl: line 1: no field text; the fields are body, n"),
        (("score", "CKPT", "BODY", "--field", "n"), "body.jsonl: line 1: field n is int, expected text"),
        (("score", "CKPT", "SETTINGS"), "settings: no file in it can be read; supported: .txt"),
        (("score", "absent", "BODY", "--field", "body"), "absent"),
        (("score", "CKPT", "BODY", "--estimator", "magic"), "allowed: exact_k"),
        (("score", "CKPT", "BODY", "--field", "body", "--draws", "2"), "needs at least one for each of the 8 draw sets"),
        (("score", "CKPT", "BODY", "--causal", "--estimator", "official"), "leave one of the two out"),
        (("score", "CKPT", "BODY", "--causal", "--draws", "128"), "--draws: estimator causal is exact"),
        (("score", "CKPT", "BODY", "--estimator", "chain", "--draws", "128"), "--draws: estimator chain is exact"),
        (("eval", "CKPT", "--tasks", "piqa", "--causal", "--draws", "128"), "--draws: estimator causal is exact"),
        (("score-requests", "CKPT", "absent.jsonl", "--out", "r"), "cannot be read"),
        (("score-requests", "CKPT", "BODY", "--out", "r"), "not a file of requests"),
        (("eval", "CKPT", "--paper", "table9"), "no such row"),
        (("eval", "CKPT", "--responses", "absent"), "cannot be read"),
        (("eval", "CKPT", "--responses", "r", "--tasks", "piqa"), "its file fixes requests and settings"),
        (("eval", "CKPT", "--responses", "r", "--draws", "9"), "its file fixes requests and settings"),
        (("eval", "CKPT", "--tasks", "piqa", "--causal", "--estimator", "chain"), "leave one of the two out"),
        (("eval", "CKPT", "--tasks", "piqa", "--adaptive", "--estimator", "chain"), "goes with estimator exact_k"),
        (("eval", "CKPT", "--tasks", "piqa", "--adaptive", "--causal"), "goes with estimator exact_k, not causal"),
        (("eval", "CKPT", "--tasks", "piqa", "--tolerance", "0.1"), "--tolerance: goes with --adaptive"),
        (("eval", "CKPT", "--tasks", "piqa", "--error", "0.1"), "--error: goes with --adaptive"),
        (("eval", "CKPT", "--tasks", "piqa", "--log-samples"), "needs a folder; add --out"),
        (("eval", "CKPT", "--tasks", "gsm8k", "--gen-kwargs", "foo"), "expected key=value pairs"),
        (("eval", "CKPT", "--tasks", "gsm8k", "--seed", "99999999999999999999"), "less than or equal to 9223372036854775807"),
        (("eval", "--tasks", "piqa"), "CKPT: missing; name a model"),
        (("eval", "CKPT", "--tasks", "piqa", "--guidance", "1", "--causal"), "an AR parent has no [MASK]"),
    ],
)
def test_mistakes_get_one_line(tmp_path, checkpoint, run, args, said):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "body.jsonl").write_text('{"body": "abc", "n": 3}\n')
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "a.toml").write_text("a = 1\n")
    places = {
        "CKPT": checkpoint,
        "EMPTY": tmp_path / "empty.txt",
        "BODY": tmp_path / "body.jsonl",
        "SETTINGS": tmp_path / "settings",
    }
    found = run(*(places.get(arg, arg) for arg in args))
    assert found.status == 2
    assert found.err.count("\n") == 1, found.err
    assert said in found.err


def test_progress_is_plain_lines_off_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(display, "_EVERY", 0.0)
    with display.ItemBar("requests", 10, 4) as shown:
        shown.update(7)
    with display.ItemBar("requests", 10, shown=False) as hidden:
        hidden.update(10)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("7 of 10 requests  ")
    assert said.err.count("\n") == 1


def test_a_document_that_takes_long_is_seen_to_go_on(tmp_path, checkpoint, run, monkeypatch):
    """One long document: progress counts its forwards and ends close to the whole."""
    monkeypatch.setattr(display, "_EVERY", 0.0)
    (tmp_path / "a.txt").write_text(TEXTS[0] * 20)
    said = run("score", checkpoint, tmp_path / "a.txt", "--draws", "32", "--device", "cpu")
    assert said.status == 0, said.err
    shares = [int(found) for found in re.findall(r"^0 of 1 requests, (\d+)% of the next  ", said.err, re.MULTILINE)]
    assert shares == sorted(shares)
    assert len(shares) >= 3
    assert 0 < shares[0] < 50
    assert shares[-1] >= 90
    assert "\n1 of 1 requests  " in said.err


def test_responses_hold_what_they_are_given():
    response = Response("t", 1, 2, texts=["a", "b"])
    assert (response.key, response.text) == (("t", 1, 2, 0), "b")


def test_slow_work_is_told_in_seconds_each(monkeypatch):
    shown = []
    slow = display.ItemBar("requests", 2)
    monkeypatch.setattr(slow, "show", lambda done, rates, line: shown.append(line))
    slow._began -= 100
    slow.update(1)
    slow._began += 99.5
    slow.update(1)
    assert shown[0] == "1 of 2 requests  100 s each"
    assert shown[1].endswith("/s")
    slow.update(1, 0.25, 1)
    slow.update(0, 0.25, 2)
    assert shown[2].startswith("1 of 2 requests, 25% of the next  ")
    assert shown[3].startswith("0 of 2 requests, 25% of the next 2  ")
