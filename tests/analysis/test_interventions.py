"""Interventions: each equals the model that it stands for, and an empty change changes nothing."""

import numpy as np
import pytest
import torch

from sinkdlm import DiffusionLM
from sinkdlm.analysis.capture import Rules, noisy
from sinkdlm.analysis.interventions import Ground, find_changes, measure_changes
from sinkdlm.model.attention import attend_naive
from sinkdlm.sampling import requests_of
from small_models import VARIANTS, small_model, small_tokens

TOKENS, LENGTHS = small_tokens(3, 9), torch.tensor([9, 6, 2])


def twin(model: DiffusionLM, **flags) -> DiffusionLM:
    """The same weights under other flags, as far as they share them."""
    other = DiffusionLM(model.config.replace(**flags)).double()
    missing = other.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing
    return other


def change(model: DiffusionLM, name: str, **rules):
    return next(one.intervene for one in find_changes(model, Rules(**rules))[0] if one.name == name)


def same_logits(model: DiffusionLM, intervene, other: DiffusionLM) -> None:
    for lengths in (None, LENGTHS):
        found = model.denoiser()(TOKENS, lengths=lengths, intervene=intervene)
        expected = other.denoiser()(TOKENS, lengths=lengths)
        inside = torch.ones_like(TOKENS, dtype=torch.bool) if lengths is None else torch.arange(9) < lengths[:, None]
        torch.testing.assert_close(found[inside], expected[inside], rtol=1e-9, atol=1e-9)
        assert not torch.allclose(model.denoiser()(TOKENS, lengths=lengths)[inside], expected[inside], atol=1e-3)


WITH_SINKS = [name for name, flags in VARIANTS.items() if flags.get("n_sinks")]


@pytest.mark.parametrize("name", WITH_SINKS)
def test_a_model_without_its_sink_is_the_vanilla_twin(name):
    assert len(WITH_SINKS) == 12
    model = small_model(**VARIANTS[name])
    same_logits(
        model, change(model, "remove"), twin(model, n_sinks=0, sink_kind="isolated", sink_position="front", sink_value="learned")
    )


@pytest.mark.parametrize("flags", [{"n_sinks": 1}, {"n_sinks": 2, "sink_kind": "register"}, {"n_sinks": 2, "sink_position": "end"}])
def test_a_sink_without_value_is_the_zero_value_twin(flags):
    """Of one layer: the twin's later sinks also grow out of the zero."""
    model = small_model(n_layers=1, **flags)
    same_logits(model, change(model, "zero"), twin(model, sink_value="zero"))


@pytest.mark.parametrize("flags", [{}, {"n_sinks": 3}, {"sink_position": "end", "sink_value": "zero"}, VARIANTS["parent"]])
def test_a_sink_that_is_moved_is_the_twin_that_has_it_there(flags):
    model = small_model(**{"n_sinks": 1, **flags})
    far = "end" if model.config.sink_position == "front" else "front"
    same_logits(model, change(model, f"move-{far}"), twin(model, sink_position=far))


def test_a_sink_in_the_middle_is_between_the_tokens():
    """Seen from the tokens: half of them stand before it. Rotary angles are distances, so a shifted key says where it is."""
    model = small_model(n_sinks=1)
    moved = change(model, "move-middle")
    ends = {name: [] for name in ("plain", "moved", "end")}
    for name, intervene in (("plain", None), ("moved", moved), ("end", change(model, "move-end"))):
        model.denoiser()(TOKENS, intervene=intervene, observe=lambda *seen, name=name: ends[name].append(seen[4]))
    for plain, middle, end in zip(*ends.values(), strict=True):
        width = plain.shape[-1] // 2
        angle = [
            torch.atan2(x[..., width], x[..., 0])[0] for x in (plain, middle, end)
        ]  # of the fastest pair: one radian a position
        for found, by in ((angle[1] - angle[0], 1 + 9 // 2), (angle[2] - angle[0], 1 + 9)):
            torch.testing.assert_close(torch.cos(found - by), torch.ones_like(found))


@pytest.mark.parametrize("name", ["vanilla", "sink", "register", "logit", "gate"])
def test_banned_tokens_are_seen_by_nobody(name):
    model = small_model(**VARIANTS[name])
    n = model.config.n_registers
    before, after = [], []
    ban = change(model, "ban", threshold=0.2)

    def watched(layer, seen):
        out = ban(layer, seen)
        for kept, one in ((before, seen), (after, out)):
            kept.append(attend_naive(*one[:5], sink_logit=one.sink_logit, visible=one.visible)[1][:, :, n:])
        return out

    model.denoiser()(TOKENS, lengths=LENGTHS, intervene=watched)
    banned = 0
    for old, new in zip(before, after, strict=True):
        n_sinks = old.shape[-1] - 9
        for row, length in enumerate(LENGTHS.tolist()):
            for head in range(6):
                received = old[row, head, :length].mean(0)[n_sinks:]
                top = int(received.argmax())
                gone = new[row, head, :length].mean(0)[n_sinks:] == 0
                expected = torch.zeros(9, dtype=torch.bool)
                expected[length:] = True
                expected[top] |= bool(received[top] > 0.2)
                assert gone.tolist() == expected.tolist()
                banned += bool(received[top] > 0.2)
                rest = old[row, head, :length].clone()
                rest[:, n_sinks + top] *= 0 if received[top] > 0.2 else 1
                total = 1 - (old[row, head, :length].sum(-1) - rest.sum(-1))
                torch.testing.assert_close(new[row, head, :length], rest / total[:, None])
    assert banned > 5


def test_nothing_is_banned_below_the_threshold():
    model = small_model(n_sinks=1)
    with torch.no_grad():
        plain = model(TOKENS, lengths=LENGTHS)
        assert torch.equal(model(TOKENS, lengths=LENGTHS, intervene=change(model, "ban", threshold=1.0)), plain)
    lonely = torch.tensor([[3]])
    assert small_model().denoiser()(lonely, intervene=change(small_model(), "ban", threshold=0.0)).isfinite().all()


@pytest.mark.parametrize("name", ["vanilla", "sink", "register", "logit"])
def test_banning_does_not_depend_on_what_a_row_is_padded_to(name):
    """A lonely token has nothing else to attend to, also where it stands beside longer rows."""
    model = small_model(**VARIANTS[name])
    ban = change(model, "ban", threshold=0.1)
    lengths = torch.tensor([9, 1, 2])
    together = model.denoiser()(TOKENS, lengths=lengths, intervene=ban)
    for row, length in enumerate(lengths.tolist()):
        alone = model.denoiser()(TOKENS[row : row + 1, :length], intervene=ban)[0]
        torch.testing.assert_close(together[row, :length], alone, rtol=1e-9, atol=1e-9)


def test_divergence_is_that_of_masked_positions():
    model = small_model(n_sinks=1)
    vanilla, mask_id = twin(model, n_sinks=0), model.config.mask_id
    text = TOKENS[0].tolist()
    (row, *_), _ = measure_changes(model, Ground([text], []))
    terms = []
    for tokens, masked in zip(*noisy([text], (0.25, 0.5, 0.75), mask_id, 0, numbers=[0], device=torch.device("cpu")), strict=True):
        old, new = (one.denoiser()(tokens)[masked][:, :mask_id].log_softmax(-1) for one in (model, vanilla))
        terms.append((old.exp() * (old - new)).sum(-1))
    assert row["kl"]["mean"] == pytest.approx(torch.cat(terms).mean().item(), rel=1e-4)
    assert row["kl"]["n"] == 1


def test_what_makes_no_sense_is_left_out_with_a_reason():
    names = {}
    for name in ("vanilla", "sink", "register", "logit"):
        found, omitted = find_changes(small_model(**VARIANTS[name]))
        names[name] = [one.name for one in found]
        assert not set(names[name]) & set(omitted)
        assert all(omitted.values())
    assert names["vanilla"] == ["ban"]
    assert names["sink"] == ["remove", "zero", "move-end", "move-middle", "ban"]
    assert names["register"] == ["remove", "zero", "ban"]
    assert names["logit"] == ["remove", "ban"]


def test_effects_are_those_of_the_twin():
    """NELBO, predictions and samples against a second model, measured by hand with the same noise."""
    from sinkdlm.likelihood import log_likelihood
    from sinkdlm.sampling import generate

    model = small_model(n_sinks=1)
    vanilla = twin(model, n_sinks=0)
    texts = [small_tokens(1, length, seed=length)[0].tolist() for length in (4, 6, 9, 5, 7, 8)]
    options = {"prompt": [text[:2] for text in texts], "mask_id": model.config.mask_id, "length": 8, "steps": 3}
    rows, omitted = measure_changes(model, Ground(texts, requests_of(**options), draws=32, batch=4))
    assert omitted == {}
    row = rows[0]
    assert row["name"] == "remove"
    nelbo, written = [], []
    for one in (model, vanilla):
        given = {"estimator": "exact_k", "draws": 32, "mask_id": one.config.mask_id, "seed": 0}
        found = log_likelihood(one.denoiser(), texts, [[True] * len(text) for text in texts], **given)
        nelbo.append(-np.asarray(found.mean) / [len(text) for text in texts])
        written.append(generate(one.denoiser(), **options).tokens[:, 2:])
    assert row["nelbo"]["before"] == pytest.approx(nelbo[0].mean())
    assert row["nelbo"]["after"] == pytest.approx(nelbo[1].mean())
    assert row["nelbo"]["change"] == pytest.approx((nelbo[1] - nelbo[0]).mean())
    assert row["nelbo"]["low"] < row["nelbo"]["change"] < row["nelbo"]["high"]
    assert row["nelbo"]["n"] == 6
    assert row["changed"]["mean"] == pytest.approx((written[0] != written[1]).double().mean().item())
    assert 0 < row["changed"]["mean"] <= 1
    assert row["kl"]["mean"] > 0.01
