"""Log-probabilities of committed tokens: against the model's own distribution at each step, alone and among others."""

import math
from dataclasses import replace

import pytest
import torch

from sinkdlm.sampling import Request, policy_of, start, step
from sinkdlm.sampling.batch import Batch
from small_models import small_model, small_tokens

POLICIES = {
    "greedy": {},
    "drawn": {"temperature": 1.4, "top_k": 5, "min_p": 0.05, "repetition_penalty": 1.5, "suppressed": (4,)},
    "blocks": {"block": 4, "threshold": 0.2, "temperature": 0.8, "eos_id": 3},
    "tempered": {"config": "dream", "temperature": 0.6},
    "guided": {"guidance": 1.5, "steps": 5},
    "remask": {"order": "ancestral", "remask": "rescale", "remask_rate": 0.5, "steps": 9, "temperature": 1.0},
    "dual": {"block": 5, "cache": "dual"},
}
K = 3


def requests_for(model, name, n=4):
    mask_id, options = model.config.mask_id, POLICIES[name]
    prompts = [small_tokens(1, 2 + number, seed=number)[0].tolist() for number in range(n)]
    policy = policy_of(**options)
    return [Request([*prompt, *[mask_id] * 9], policy, mask_id, 5, number, logprobs=K) for number, prompt in enumerate(prompts)]


def run(model, states):
    while not all(state.done for state in states):
        step(states, model.denoiser(), together=True)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "dual"])
def test_they_are_the_models_own_at_the_step_that_committed(name):
    """After guidance and without [MASK] and suppressed ids; before penalty, temperature and cuts."""
    model = small_model(n_sinks=1, n_layers=2, mask_id=10)
    (request,) = requests_for(model, name, 1)
    (state,) = start([request])
    policy, expected = request.policy, {}
    with torch.no_grad():
        while not state.done:
            before = state.tokens.clone()
            step([state], model.denoiser())
            logits = model.denoiser()(before[None])[0]
            if policy.guidance:
                away = model.denoiser()(torch.cat([torch.tensor([10, 10]), before[2:]])[None])[0]
                logits = away + (policy.guidance + 1) * (logits - away)
            logits[:, [10, *policy.suppressed]] = -math.inf
            table = logits.log_softmax(-1)
            for place in state.committed.nonzero().flatten().tolist():
                best = table[place].topk(K)
                expected[place] = (table[place, state.tokens[place]], best.values, best.indices)
    own, values, ids = state.logprobs
    assert len(expected) > 4
    assert own[:2].isnan().all()
    end = state.tokens.tolist().index(3) if policy.eos_id == 3 and 3 in state.tokens else len(own)  # what follows becomes EOS
    for place, (chosen, best, best_ids) in ((place, found) for place, found in expected.items() if place <= end):
        assert float(own[place]) == pytest.approx(float(chosen), abs=1e-5)
        assert values[place].tolist() == pytest.approx(best.tolist(), abs=1e-5)
        assert ids[place].tolist() == best_ids.tolist()


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_alone_and_among_others(name):
    """Others may ask for more of them, or for none, and join later; tokens do not change by asking."""
    model = small_model(n_sinks=1, n_layers=2)
    requests = requests_for(model, name)
    asked = [replace(request, logprobs=k) for request, k in zip(requests, (K, None, 0, 5), strict=True)]
    with model.inference():
        alone = start(requests)
        for state in alone:
            run(model, [state])
        mixed = start(asked)
        step(mixed[:2], model.denoiser(), together=True)
        step(mixed[:3], model.denoiser(), together=True)
        run(model, mixed)
    for one, other in zip(alone, mixed, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        if (k := other.request.logprobs) is not None:
            found = other.logprobs
            assert torch.allclose(found.tokens, one.logprobs.tokens, equal_nan=True)
            assert torch.equal(found.ids[:, : min(k, K)], one.logprobs.ids[:, :k])
            assert found.ids.shape[1] == k


def test_nothing_is_kept_where_nobody_asks():
    model = small_model(n_sinks=1, n_layers=2)
    states = start([replace(request, logprobs=None) for request in requests_for(model, "greedy")])
    with model.inference():
        batch = Batch.of(states, torch.device("cpu"))
        run(model, states)
    assert batch.logprobs is None
    assert len(batch.groups) == 1
