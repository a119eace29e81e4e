"""The words of other samplers: one table, taken by the samplers, `LM.write`, the command line and the server."""

import json

import pytest
import torch

from evaluated import small_lm
from sinkdlm import load, save
from sinkdlm.errors import SamplingError
from sinkdlm.sampling import generate, policy_of
from sinkdlm.sampling.aliases import WORDS, translate
from sinkdlm.sampling.unmasking import FIELDS
from small_models import small_model

SAID = [
    ({"num_inference_steps": 4}, {"steps": 4}),
    ({"diffusion_steps": 4, "steps": 4}, {"steps": 4}),
    ({"block_length": 5}, {"block": 5}),
    ({"cfg_scale": 0.5}, {"guidance": 0.5}),
    ({"guidance_scale": 1.5}, {"guidance": 0.5}),
    ({"remasking": "low_confidence"}, {"order": "confidence"}),
    ({"remasking": "random"}, {"order": "random"}),
    ({"alg": "maskgit_plus", "remasking": "low_confidence"}, {"order": "confidence"}),
    ({"alg": "origin", "eps": 1e-3}, {"order": "ancestral", "last_time": 1e-3}),
    ({"alg": "topk_margin", "alg_temp": 0.4}, {"order": "margin", "order_temperature": 0.4}),
    ({"alg": "entropy", "alg_temp": None, "cfg_scale": None}, {"order": "entropy"}),
    ({"suppress_tokens": [3, 5]}, {"suppressed": (3, 5)}),
    ({"eos_token_id": [7]}, {"eos_id": 7}),
]


@pytest.mark.parametrize(("words", "ours"), SAID, ids=lambda value: ",".join(value))
def test_a_policy_takes_the_words_of_others(words, ours):
    assert policy_of("llada", **words) == policy_of("llada", **ours)


def test_every_word_means_something():
    sizes = ("new_tokens", "mask_id")
    assert {name for names in WORDS.values() for name in names} <= {*FIELDS, *sizes, "max_tokens", "length"}
    assert not set(WORDS) & {*FIELDS, *sizes}
    assert {word for words, _ in SAID for word in words} | {"max_new_tokens", "gen_length", "mask_token_id"} == {*WORDS, "steps"}


def test_a_sampler_counts_new_tokens_after_each_prompt():
    model = small_model(n_sinks=1, n_layers=2)
    prompts, mask_id = [[1, 2, 3], [4]], model.config.mask_id
    ours = generate(model.denoiser(), prompt=prompts, mask_id=mask_id, length=[8, 6], steps=3)
    for word in ("max_new_tokens", "gen_length", "new_tokens"):
        found = generate(model.denoiser(), prompt=prompts, mask_token_id=mask_id, num_inference_steps=3, **{word: 5})
        assert torch.equal(found.tokens, ours.tokens)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"steps": 3, "num_inference_steps": 4},
            "steps = 3 and num_inference_steps = 4: two names of one option; give one of them",
        ),
        ({"alg": "entropy", "remasking": "random"}, "alg = 'entropy' and remasking = 'random': two names"),
        ({"block_lenght": 3}, r"option 'block_lenght': unknown; did you mean block_length\?"),
        ({"alg": "best"}, "alg = 'best': allowed: origin, maskgit_plus, topk_margin, entropy"),
        ({"remasking": ["random"]}, r"remasking = \['random'\]: allowed: low_confidence, random"),
        ({"num_inference_steps": 0}, "steps = 0: allowed is 1 or more"),
        ({"cfg_scale": "high"}, "guidance = 'high': expected a number"),
        ({"max_new_tokens": 3}, "option 'max_new_tokens': unknown"),  # of a request, not of a policy
    ],
)
def test_mistakes_are_one_line(options, words):
    with pytest.raises(SamplingError, match=words) as caught:
        policy_of("llada", **options)
    assert "\n" not in str(caught.value)


def test_sizes_that_contradict_are_refused():
    with pytest.raises(SamplingError, match="max_new_tokens = 3 and gen_length = 4: two names"):
        translate({"max_new_tokens": 3, "gen_length": 4}, ("length",))
    for bad, words in (
        ({"gen_length": 3, "length": 9}, "give one of length="),
        ({"gen_length": "3"}, "new_tokens = '3': expected"),
    ):
        with pytest.raises(SamplingError, match=words):
            generate(lambda tokens: torch.zeros(*tokens.shape, 3), prompt=[[1]], mask_id=4, **bad)
    with pytest.raises(SamplingError, match="mask_id = None: give the id"):
        generate(lambda tokens: torch.zeros(*tokens.shape, 3), prompt=[[1]], length=4)


THEIRS = {"gen_length": 6, "num_inference_steps": 3, "block_length": 2, "alg": "entropy", "temperature": 0.7, "seed": 5}
OURS = {"length": 6, "steps": 3, "block": 2, "order": "entropy", "temperature": 0.7, "seed": 5}


def test_write_and_the_command_line_take_them(tmp_path, command_line):
    made = small_lm()
    save(tmp_path / "x", made.model, made.tokenizer)
    lm = load(tmp_path / "x")
    assert lm.write("a", **THEIRS, mask_token_id=lm.config.mask_id) == lm.write("a", **OURS)
    with pytest.raises(SamplingError, match=r"mask_id = 0: \[MASK\] of this model is"):
        lm.write("a", mask_token_id=0)
    words = [word for name, value in THEIRS.items() for word in (f"--{name.replace('_', '-')}", value)]
    shown = [
        json.loads(command_line("sample", tmp_path / "x", "--prompt", "a", *given, "--json", "--device", "cpu")[1])["samples"]
        for given in (words, ["--length", 6, "--steps", 3, "--block", 2, "--set", "alg=entropy", "--temperature", 0.7, "--seed", 5])
    ]
    assert shown[0] == shown[1]
    status, _, said = command_line("sample", tmp_path / "x", "--length", 3, "--max-new-tokens", 4)
    assert (status, said) == (2, "sinkdlm: length = 3 and max_new_tokens = 4: two names of one option; give one of them\n")


def test_the_server_takes_them():
    from pydantic import ValidationError

    from sinkdlm.serving.schemas import ChatRequest, CompletionRequest

    theirs = {"num_inference_steps": 3, "block_length": 2, "alg": "entropy", "alg_temp": 0.5, "guidance_scale": 1.5}
    body = CompletionRequest(model="m", max_new_tokens=6, sinkdlm=theirs)
    assert body.max_tokens == 6
    policy = {"steps": 3, "block": 2, "order": "entropy", "order_temperature": 0.5, "guidance": 0.5}
    assert body.sinkdlm.policy_fields() == policy
    assert ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], gen_length=6).max_tokens == 6
    for wrong, words in (
        ({"sinkdlm": {"steps": 3, "diffusion_steps": 4}}, "steps = 3 and diffusion_steps = 4: two names"),
        ({"sinkdlm": {"block_lenght": 4}}, "did you mean block_length?"),
        ({"cfg_scale": 1}, "did you mean sinkdlm.cfg_scale?"),
    ):
        with pytest.raises(ValidationError) as caught:
            CompletionRequest(model="m", **wrong)
        assert words in str(caught.value)
