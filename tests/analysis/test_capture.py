"""Capture changes no output, agrees with full attention maps, and finds sinks planted in a model."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sinkdlm import DiffusionLM, ModelConfig, UserError
from sinkdlm.analysis.capture import Rules, Watched, attention_maps, capture, capture_noise, noisy, sink_logit_of
from sinkdlm.analysis.metrics import measure, summarize
from sinkdlm.model.attention import attend_naive
from sinkdlm.sampling import Policy, generate, requests_of
from small_models import VARIANTS, small_model, small_tokens

SOFT = Rules(threshold=0.15, margin=0.5)  # small random models spread their attention: so that there are sinks to find


def canvas_tokens(model: DiffusionLM, batch: int = 3, length: int = 9) -> torch.Tensor:
    tokens = small_tokens(batch, length)
    tokens[:, 4:7] = model.config.mask_id
    return tokens


DTYPES = itertools.cycle([torch.float32, torch.float64])


@pytest.mark.parametrize(("name", "dtype"), list(zip(VARIANTS, DTYPES, strict=False)))
def test_capture_changes_no_output(name, dtype):
    model = small_model(dtype=dtype, **VARIANTS[name])
    tokens, lengths = canvas_tokens(model), torch.tensor([9, 8, 7])
    where = torch.tensor([[4, 6], [5, 6], [4, 5]])
    with model.inference():
        for given in ({}, {"lengths": lengths}, {"where": where}, {"lengths": lengths, "where": where}):
            watched = Watched(model)
            assert torch.equal(watched(tokens, **given), model.denoiser()(tokens, **given))
            assert len(watched.last) == 3
    options = {"prompt": [[1, 2], [3]], "mask_id": model.config.mask_id, "length": [8, 6], "steps": 4}
    with model.inference():
        plain = generate(model.denoiser(), **options)
    found = list(capture(model, requests_of(**options)))
    assert [trajectory.final.tolist() for trajectory in found] == plain.rows
    assert not any(block._forward_pre_hooks or block.attention._forward_hooks for block in model.blocks)


def reference(model: DiffusionLM, tokens: torch.Tensor, rules: Rules) -> dict[str, np.ndarray]:
    """One row without padding, layer by layer, from whole maps and the residual stream written out."""
    seen = []
    with torch.no_grad():
        model(tokens[None], observe=lambda layer, *rest: seen.append(rest))
        n = model.config.n_registers
        stream = model.embed(tokens[None])
        if n:
            stream = torch.cat([model.sinks[None], stream], dim=1)
        found: dict[str, list] = {}
        for layer, (block, given) in enumerate(zip(model.blocks, seen, strict=True)):
            out, weights = attend_naive(*given, sink_logit=sink_logit_of(model, layer))
            update = block.attention.finish(block.attention_norm(stream), out.transpose(1, 2))
            ratio = (update.norm(dim=-1) / stream.norm(dim=-1))[0, n:]
            stream = stream + update
            stream = stream + block.mlp(block.mlp_norm(stream))
            n_sinks = weights.shape[-1] - out.shape[2] + n
            maps, v, sink_v = weights[0, :, n:], given[2][0], given[4]
            values = v if sink_v is None else torch.cat([sink_v[0], v], dim=1)
            norms = values.norm(dim=-1)  # (K, S + T)
            received = maps.mean(1)
            column = 1 - maps.sum(-1) if model.config.has_sink_logit else torch.zeros_like(maps[..., 0])
            content = received[:, n_sinks:]
            n_tokens = content.shape[1]
            sums = content * n_tokens
            absolute = content > rules.threshold
            spread = norms.repeat_interleave(maps.shape[0] // norms.shape[0], dim=0)
            layer_found = {
                "received": content.mean(0),
                "absolute": absolute,
                "relative": torch.stack(
                    [sums[:, j] - (sums.sum(1) - sums[:, j]) / (n_tokens - 1) > rules.margin for j in range(n_tokens)], dim=1
                ),
                "top": content.argmax(1),
                "top_received": content.amax(1),
                "sink_received": column.mean(1)[:, None] if model.config.has_sink_logit else received[:, :n_sinks],
                "entropy": (torch.special.entr(maps).sum(-1) + torch.special.entr(column.clamp_min(0))).mean(1),
                "value_norm": norms.mean(0)[n_sinks:],
                "sink_value_norm": norms.mean(0)[:n_sinks],
                "output_norm": out[0, :, n:].norm(dim=-1).mean(1),
                "bound": (maps * spread[:, None]).sum(-1).mean(1),
                "resting": ((maps[..., n_sinks:] * absolute[:, None]).sum(-1) + maps[..., :n_sinks].sum(-1) + column).mean(0),
                "update_ratio": ratio,
            }
            for name, value in layer_found.items():
                found.setdefault(name, []).append(value.numpy())
    return {name: np.stack(values) for name, values in found.items()}


# 6 heads share 2 pairs of keys and values, or have 6.
@pytest.mark.parametrize(("heads", "dtype"), [({}, torch.float64), ({"n_kv_heads": 6}, torch.float32)])
def test_statistics_are_those_of_full_maps(variant, heads, dtype):
    model = small_model(dtype=dtype, **{**variant, **heads})
    tokens, lengths = canvas_tokens(model), torch.tensor([9, 7, 3])
    with model.inference():
        watched = Watched(model, SOFT)
        watched(tokens, lengths=lengths)
    tolerance = 1e-5 if dtype is torch.float32 else 1e-10
    sinks = 0
    for row, length in enumerate(lengths.tolist()):
        expected = reference(model, tokens[row, :length], SOFT)
        found = watched.last[row]
        assert sorted(found) == sorted([*expected, "tokens"])
        assert found["tokens"].tolist() == tokens[row, :length].tolist()
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
        sinks += int(found["absolute"].sum()) + int(found["relative"].sum())
    assert sinks > 10  # the rules had something to find


def test_updates_of_all_tokens_are_seen_whatever_was_asked_for(variant):
    model = small_model(**variant)
    tokens = canvas_tokens(model, batch=2)
    with model.inference():
        watched = Watched(model)
        watched(tokens)
        whole = [row["update_ratio"] for row in watched.last]
        watched(tokens, where=torch.tensor([[4, 6], [5, 5]]))
    for row, expected in zip(watched.last, whole, strict=True):
        np.testing.assert_allclose(row["update_ratio"], expected, rtol=1e-12)
        assert not np.isnan(expected).any()


@pytest.mark.parametrize("name", ["vanilla", "sink", "parent", "logit", "register-2-end-zero"])
def test_nothing_depends_on_the_batch(name):
    model = small_model(**VARIANTS[name])
    # Of nothing but [MASK] tokens, with no sink that stands somewhere, all are alike: which is surest is for rounding to say.
    least = [10] if name in ("vanilla", "logit") else []
    prompts = [[1, 2, 3], [4], [5, 6], least, [7, 8, 9, 1]]
    options = {"prompt": prompts, "mask_id": model.config.mask_id, "length": [9, 5, 8, 4, 9], "temperature": 1.0, "seed": 3}
    requests = requests_of(**options, steps=4)
    alone, together = (list(capture(model, requests, rules=SOFT, batch=batch)) for batch in (1, 5))
    for one, other in zip(alone, together, strict=True):
        for field in one.__dataclass_fields__:
            np.testing.assert_allclose(getattr(one, field), getattr(other, field), rtol=1e-10, atol=1e-12, err_msg=field)
    kinds = np.zeros(model.config.embedding_rows + 1, dtype=np.uint8)
    told = [summarize([measure(one, kinds) for one in some]) for some in (alone, together)]
    for quantity, found in told[0]["quantities"].items():
        means = [found["total"]["mean"], told[1]["quantities"][quantity]["total"]["mean"]]
        assert means[0] == (means[1] if means[1] is None else pytest.approx(means[1], rel=1e-9)), quantity


# -- planted truth ----------------------------------------------------------------------------------------------------------------

N_IDS, ANCHOR = 12, 11  # tokens 0..10 count upwards, token 11 is what head 0 looks at
FIXED, MOVING, UNIFORM = range(3)


def planted() -> DiffusionLM:
    """Head 0 looks at the token ANCHOR wherever it stands; head 1 at the greatest of the others, which the model continues: it
    writes the next number, so that the target moves on by one each step; head 2 looks everywhere alike."""
    width = 16
    config = ModelConfig(
        vocab_size=N_IDS,
        mask_id=N_IDS,
        n_layers=1,
        n_heads=3,
        n_kv_heads=3,
        d_model=3 * width,
        d_ff=8,
        context_length=64,
        rope_base=1e12,
    )
    model = DiffusionLM(config).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.blocks[0].attention_norm.weight.fill_(1.0)
        model.norm.weight.fill_(1.0)
        one, slot = N_IDS + 1, 24  # a coordinate that every token has; where a head's answer goes
        model.embed.weight[: N_IDS + 1, : N_IDS + 1] = torch.eye(N_IDS + 1, dtype=torch.float64)
        model.embed.weight[:, one] = 1.0
        slow = width // 2 - 1  # the pair that rotary hardly turns
        attention = model.blocks[0].attention
        q, k, v = attention.qkv.weight.unflatten(0, (3, 3, width))
        for head in (FIXED, MOVING):
            q[head, slow, one] = 40.0
        k[FIXED, slow, ANCHOR] = 40.0
        k[MOVING, slow, :ANCHOR] = 4.0 * torch.arange(1, ANCHOR + 1, dtype=torch.float64)
        v[:, :N_IDS, :N_IDS] = torch.eye(N_IDS, dtype=torch.float64)
        v[FIXED, :, ANCHOR] *= 0.25  # a sink of low norm
        for number in range(ANCHOR):
            attention.out.weight[slot + number, MOVING * width + number] = 1.0
            model.lm_head.weight[(number + 1) % ANCHOR, slot + number] = 50.0
    return model


def test_what_is_planted_is_found():
    model = planted()
    n_new = 6
    requests = requests_of(prompt=[[ANCHOR, 2], [0, 3, ANCHOR, 1]], mask_id=N_IDS, length=[2 + n_new, 4 + n_new], block=1)
    found = list(capture(model, requests))
    spots = []
    for trajectory, (anchor_at, first_at, first) in zip(found, [(0, 1, 2), (2, 1, 3)], strict=True):
        n_tokens = trajectory.tokens.shape[1]
        written = [*range(first + 1, first + 1 + n_new)]
        assert trajectory.final.tolist()[-n_new:] == written
        assert (trajectory.top[:, 0, FIXED] == anchor_at).all()
        spots.append([first_at, *range(n_tokens - n_new, n_tokens - 1)])
        assert trajectory.top[:, 0, MOVING].tolist() == spots[-1]
        for head, where in ((FIXED, [anchor_at] * n_new), (MOVING, spots[-1])):
            expected = np.eye(n_tokens, dtype=bool)[where]
            assert (trajectory.absolute[:, 0, head] == expected).all()
            assert (trajectory.relative[:, 0, head] == expected).all()
            np.testing.assert_allclose(trajectory.top_received[:, 0, head], 1.0, atol=1e-9)
            np.testing.assert_allclose(trajectory.entropy[:, 0, head], 0.0, atol=1e-7)
        assert not trajectory.absolute[:, 0, UNIFORM].any()
        assert not trajectory.relative[:, 0, UNIFORM].any()
        np.testing.assert_allclose(trajectory.entropy[:, 0, UNIFORM], math.log(n_tokens))
        # A token is two ones among 48 coordinates, so its norm scales each to this; its value is one of them, a quarter in head 0.
        unit = 1 / math.sqrt(2 / 48 + model.config.norm_eps)
        masked = trajectory.tokens == N_IDS
        norms = np.where(masked, 0.0, unit)
        norms[trajectory.tokens == ANCHOR] = unit * 2.25 / 3
        np.testing.assert_allclose(trajectory.value_norm[:, 0], norms, atol=1e-9)
        np.testing.assert_allclose(trajectory.output_norm[:, 0, FIXED], unit / 4)
        np.testing.assert_allclose(trajectory.bound[:, 0, FIXED], unit / 4)
        np.testing.assert_allclose(trajectory.bound[:, 0, UNIFORM], (~masked).sum(1) * unit / n_tokens)
        np.testing.assert_allclose(trajectory.resting[:, 0], (1 + 1 + 0) / 3, atol=1e-9)
    kinds = np.zeros(N_IDS + 1, dtype=np.uint8)
    summary = summarize([measure(trajectory, kinds) for trajectory in found])
    told = {name: quantity["layers"][0]["mean"] for name, quantity in summary["quantities"].items()}
    assert told["content_sinks"] == pytest.approx(2 / 3)
    assert told["sink_heads"] == pytest.approx(2 / 3)
    assert told["turnover"] == pytest.approx(0.5)  # one head always, the other never
    assert told["turnover_null"] == pytest.approx(0.5)
    assert told["anchored"] == pytest.approx(1 / 3)
    assert told["move_rate"] == pytest.approx(0.5)
    steps = [np.abs(np.diff(spot)).mean() for spot in spots]
    assert told["moved"] == pytest.approx(np.mean(steps) / 2)
    assert told["lifetime"] == pytest.approx((n_new + n_new) / (1 + n_new))  # runs: one of all steps, one for each step
    assert told["sink_mass"] == 0


def test_single_maps_are_those_of_attention(variant):
    model = small_model(**variant)
    tokens = canvas_tokens(model, batch=1)[0]
    seen = []
    with torch.no_grad():
        model(tokens[None], observe=lambda layer, *rest: seen.append(rest))
    places = [(0, 0), (2, 5), (2, 1)]
    found = attention_maps(model, tokens.tolist(), places)
    assert sorted(found) == sorted(places)
    for layer, head in places:
        _, weights = attend_naive(*seen[layer], sink_logit=sink_logit_of(model, layer))
        torch.testing.assert_close(found[layer, head], weights[0, head, model.config.n_registers :])
    with pytest.raises(UserError, match=r"layer 3, head 0: .* to 2, 5"):
        attention_maps(model, tokens.tolist(), [(3, 0)])


def test_a_text_under_noise_only_clears_up():
    model = small_model(n_sinks=1)
    rows = [small_tokens(1, 9)[0].tolist(), [3], small_tokens(1, 6)[0].tolist()]
    shares = [0.2, 1.0, 0.6, 0.0]
    found = list(capture_noise(model, rows, shares, seed=4, batch=2))
    again = list(capture_noise(model, rows, shares, seed=4, batch=3))
    mask_id = model.config.mask_id
    for trajectory, other, row in zip(found, again, rows, strict=True):
        assert trajectory.n_steps == 4
        masked = trajectory.tokens == mask_id
        assert masked[0].all()
        assert not masked[3].any()
        assert (masked[1:] <= masked[:-1]).all()
        assert trajectory.tokens[3].tolist() == trajectory.final.tolist() == row
        assert (trajectory.tokens == other.tokens).all()
        np.testing.assert_allclose(trajectory.received, other.received, atol=1e-12)
    many, masked = noisy([[1] * 4000], [0.25], mask_id, 0, numbers=[0], device=torch.device("cpu"))
    assert masked[0].double().mean() == pytest.approx(0.25, abs=0.03)
    assert ((many[0] == mask_id) == masked[0]).all()
    with pytest.raises(UserError, match="from 0 to 1"):
        next(capture_noise(model, rows, [1.5]))


def test_a_model_that_gives_no_numbers_is_not_measured():
    model = small_model(n_sinks=1)
    with torch.no_grad():
        model.blocks[0].mlp.down.weight[0, 0] = float("nan")
    with pytest.raises(UserError, match="no numbers"):
        next(capture_noise(model, [small_tokens(1, 9)[0].tolist()], [0.5]))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"guidance": 0.5}, "guidance"),
        ({"cache": "prefix", "block": 2}, "cache"),
        ({"limit": 8, "length": None, "block": 2, "eos_id": 1}, "open end"),
    ],
)
def test_what_cannot_be_watched_is_said(options, word):
    model = small_model()
    requests = requests_of(**{"prompt": [[1, 2]], "mask_id": model.config.mask_id, "length": 6, **options})
    with pytest.raises(UserError, match=word):
        next(capture(model, requests))


def test_every_policy_can_be_watched():
    model = small_model(n_sinks=1)
    policies = [Policy(threshold=0.3), Policy(order="ancestral", steps=6), Policy(remask="cap", order="ancestral", steps=6)]
    for policy in (*policies, Policy(order="entropy", block=3)):
        (found,) = capture(model, requests_of(prompt=[[1]], mask_id=model.config.mask_id, length=9, config=policy))
        assert 1 <= found.n_steps <= 9
        assert not (found.final == model.config.mask_id).any()
        assert found.n_prompt == 1


def test_a_row_that_speculates_is_watched_step_by_step():
    model = small_model(n_sinks=1)
    given = {"prompt": [[3]], "mask_id": model.config.mask_id, "length": 9}
    (plain,), (guessing,) = (list(capture(model, requests_of(**given, speculate=k))) for k in (None, 4))
    assert np.array_equal(plain.tokens, guessing.tokens)


@pytest.mark.parametrize("remask", ["cap", "loop", "conf"])
def test_rows_that_only_mask_again_have_no_forward_whatever_is_beside_them(remask):
    model = small_model(n_sinks=1)
    policy = Policy(remask=remask, order="ancestral", steps=20, remask_rate=0.3)
    prompts = [[1] * n for n in (1, 2, 3, 1, 2, 3)]
    requests = requests_of(prompts, mask_id=model.config.mask_id, length=[len(p) + 4 for p in prompts], config=policy)
    alone, together = (list(capture(model, requests, batch=batch)) for batch in (1, 6))
    for one, other in zip(alone, together, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
    assert len({one.n_steps for one in alone}) > 1


MEMORY = """
import sys, torch
import sinkdlm
from sinkdlm.analysis.capture import Watched
torch.set_num_threads(1)
config = sinkdlm.ModelConfig.preset("smollm2-135m", n_sinks=1, context_length=2048, n_layers=12)
model = sinkdlm.DiffusionLM(config)
tokens = torch.full((1, 2048), config.mask_id)
tokens[:, ::2] = torch.arange(1024) % 1000
read = lambda name: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
def run(tokens):
    with model.inference():
        if sys.argv[1] == "plain":
            model(tokens)
        else:
            Watched(model)(tokens, where=torch.arange(8)[None])
run(tokens[:, :16])  # libraries are loaded, and have their own buffers
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = read("VmRSS")
run(tokens)
print(read("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs a resettable peak of memory: Linux")
def test_watching_2048_tokens_takes_at_most_twice_the_memory_of_a_forward():
    """Beyond the weights, which are there either way: what a forward itself holds. 12 of the model's 30 layers: what a layer would
    keep to make 1.4 times the memory of them makes twice that of 30."""
    peaks = {}
    for kind in ("plain", "watched"):
        command = [sys.executable, "-c", MEMORY, kind]
        # What is let go goes back at once: else the peak is that of malloc's own habits, which differ between machines.
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "MALLOC_MMAP_THRESHOLD_": "65536"}
        peaks[kind] = int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)
    assert peaks["plain"] > 20_000  # kB: the residual stream and one layer's products are some tens of MB
    assert peaks["watched"] <= 1.4 * peaks["plain"]
