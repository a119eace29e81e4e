"""Analysis of block-diffusion models: statistics of the blocks up to the current one, and interventions under the block mask."""

import numpy as np
import pytest
import torch

from sinkdlm import DiffusionLM
from sinkdlm.analysis.capture import Rules, Watched, attention_maps, capture, capture_noise
from sinkdlm.analysis.interventions import Ground, find_changes, measure_changes
from sinkdlm.analysis.recording import look_at
from sinkdlm.model.attention import attend_naive
from sinkdlm.sampling import generate, requests_of
from small_models import VARIANTS, small_model, small_tokens

SIZE, PROMPT, LENGTH = 4, [1, 2, 3, 4, 5, 6], 15
NAMES = ["vanilla", "sink", "logit", "parent"]


POLICIES = [{}, {"block": 2}, {"cache": "exact"}, {"order": "ancestral", "remask": "cap", "steps": 12}]


@pytest.mark.parametrize(("name", "policy"), [*((NAMES[0], policy) for policy in POLICIES), *((name, {}) for name in NAMES[1:])])
def test_a_trajectory_is_of_the_blocks_so_far(name, policy):
    """Each step equals a look at the row cut where its block ends. Rows of a batch are at different blocks."""
    model = small_model(**VARIANTS[name], block_size=SIZE, n_layers=2)
    mask_id, rules = model.config.mask_id, Rules(0.2, 0.5)
    given = {"prompt": [PROMPT, [7], []], "mask_id": mask_id, "length": LENGTH, "seed": 3, "temperature": 1.0, **policy}
    found = list(capture(model, requests_of(**given, block_size=SIZE), rules=rules))
    assert [one.final.tolist() for one in found] == generate(model.denoiser(), **given).rows
    for one in found:
        for step in range(one.n_steps):
            tokens = one.tokens[step].tolist()
            stop = min(LENGTH, (tokens.index(mask_id) // SIZE + 1) * SIZE)
            cut = Watched(model, rules)
            cut(torch.tensor([tokens[:stop]]))
            for key, expected in cut.last[0].items():
                value = getattr(one, key)[step]
                if key != "tokens" and expected.shape[-1:] == (stop,):
                    behind, value = value[..., stop:], value[..., :stop]
                    assert not behind.any() if value.dtype == bool else np.isnan(behind).all()
                np.testing.assert_allclose(value[..., :stop] if key == "tokens" else value, expected, atol=1e-9, err_msg=key)


def test_a_look_is_of_the_blocks_so_far_and_a_map_has_no_later_block():
    model = small_model(n_sinks=1, block_size=SIZE)
    tokens = [1, 2, 3, 4, 5, model.config.mask_id, 6, *[model.config.mask_id] * 5]
    found, cut = look_at(model, tokens), look_at(model, tokens[:8])
    np.testing.assert_allclose(found.received[..., :9], cut.received, atol=1e-12)
    assert not found.received[..., 9:].any()
    maps = attention_maps(model, tokens, [(0, 0), (2, 5)])
    blocks = torch.arange(12) // SIZE
    for (layer, head), one in maps.items():
        torch.testing.assert_close(one.sum(1), torch.ones(12, dtype=one.dtype))
        assert ((one[:, 1:] == 0) == (blocks > blocks[:, None])).all()
        torch.testing.assert_close(attention_maps(model, tokens, [(layer, head)], query=6)[layer, head][0], one[6])


@pytest.mark.parametrize("name", NAMES)
def test_of_a_noised_text_each_block_sees_the_clean_ones_before_it(name):
    """Maps put together from a forward for each block; statistics from these maps; texts of several lengths."""
    model, texts = small_model(**VARIANTS[name], block_size=SIZE), [small_tokens(1, n, seed=n)[0].tolist() for n in (11, 6, 3)]
    mask_id, places = model.config.mask_id, list(np.ndindex(3, 6))
    for one in capture_noise(model, texts, [0.5]):
        text, noised = one.final.tolist(), one.tokens[0].tolist()
        assert mask_id in noised
        n_tokens, parts = len(text), []
        for start in range(0, n_tokens, SIZE):
            maps = attention_maps(model, [*text[:start], *noised[start : start + SIZE]], places)
            rows = torch.stack([maps[place][start:] for place in places])
            parts.append(torch.nn.functional.pad(rows, (0, max(0, n_tokens - start - SIZE))))
        whole = torch.cat(parts, dim=1).unflatten(0, (3, 6))  # (E, H, T, S + T)
        found = attention_maps(model, noised, places, clean=text)
        torch.testing.assert_close(torch.stack([found[place] for place in places]), whole.flatten(0, 1))
        torch.testing.assert_close(attention_maps(model, noised, [(1, 2)], query=2, clean=text)[1, 2], found[1, 2][2:3])
        blocks, content = torch.arange(n_tokens) // SIZE, whole[..., whole.shape[-1] - n_tokens :]
        received = content.sum(2) / (blocks[:, None] >= blocks).sum(0)
        np.testing.assert_allclose(one.received[0], received.mean(1), atol=1e-9)
        np.testing.assert_allclose(one.absolute[0], received > 0.3)
        outside = 1 - content.sum(-1)
        np.testing.assert_allclose(one.sink_received[0].sum(-1), outside.mean(2), atol=1e-9)
        resting = torch.einsum("ehqk,ehk->eq", content, (received > 0.3).to(content.dtype)) / 6 + outside.mean(1)
        np.testing.assert_allclose(one.resting[0], resting, atol=1e-9)
        assert one.value_norm[0].shape == one.update_ratio[0].shape == (3, n_tokens)
        looked = look_at(model, noised, clean=text).received[..., model.config.n_sinks :]
        np.testing.assert_allclose(looked, received, atol=1e-9)


def change(model: DiffusionLM, name: str, **rules):
    return next(one.intervene for one in find_changes(model, Rules(**rules))[0] if one.name == name)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("change_name", ["ban", "move-end", "move-middle"])
@pytest.mark.parametrize("name", ["vanilla", "sink", "logit"])
def test_a_change_does_not_depend_on_what_a_row_is_padded_to(name, change_name, copies):
    for size in (1, SIZE):
        model = small_model(**VARIANTS[name], block_size=size)
        if change_name not in [one.name for one in find_changes(model)[0]]:
            return
        intervene, tokens, lengths = change(model, change_name, threshold=0.1), small_tokens(3, 11), torch.tensor([11, 6, 2])
        noised = tokens.masked_fill(torch.arange(11) % 3 == 0, model.config.mask_id)
        clean = {"clean": tokens} if copies == 2 else {}
        together = model.denoiser()(noised, lengths=lengths, intervene=intervene, **clean)
        plain = model.denoiser()(noised, lengths=lengths, **clean)
        for row, length in enumerate(lengths.tolist()):
            own = {key: value[row : row + 1, :length] for key, value in clean.items()}
            alone = model.denoiser()(noised[row : row + 1, :length], intervene=intervene, **own)[0]
            torch.testing.assert_close(together[row, :length], alone, rtol=1e-9, atol=1e-9)
        assert together[0].isfinite().all()
        assert not torch.allclose(together[0], plain[0])


def test_a_ban_hides_from_each_block_the_token_that_receives_most_from_it():
    model, banned = small_model(n_sinks=1, block_size=SIZE), 0
    ban = change(model, "ban", threshold=0.2)

    def watched(layer, seen):
        nonlocal banned
        out = ban(layer, seen)
        old, new = (attend_naive(*one[:5], visible=one.visible)[1][0, :, :, 1:] for one in (seen, out))
        for start in range(0, 11, SIZE):
            for head in range(6):
                received, after = (maps[head, start : start + SIZE].mean(0) for maps in (old, new))
                top, gone = int(received.argmax()), ((after == 0) & (received > 0)).nonzero().flatten().tolist()
                assert gone == ([top] if received[top] > 0.2 else [])
                banned += len(gone)
        return out

    model.denoiser()(small_tokens(1, 11), intervene=watched)
    assert banned > 10


def test_effects_are_measured_and_removing_the_sink_is_the_vanilla_twin():
    model = small_model(n_sinks=1, block_size=SIZE)
    vanilla = DiffusionLM(model.config.replace(n_sinks=0)).double()
    vanilla.load_state_dict(model.state_dict(), strict=False)
    tokens = small_tokens(2, 11)
    noised = torch.where(torch.arange(11) % 3 == 0, model.config.mask_id, tokens)
    removed = model.denoiser()(noised, clean=tokens, intervene=change(model, "remove"))
    torch.testing.assert_close(removed, vanilla.denoiser()(noised, clean=tokens))
    texts = [small_tokens(1, n, seed=n)[0].tolist() for n in (4, 9, 11)]
    asked = {"prompt": [[1, 2]], "mask_id": model.config.mask_id, "length": 9}
    rows, omitted = measure_changes(model, Ground(texts, requests_of(**asked, block_size=SIZE)))
    assert not omitted
    assert [row["name"] for row in rows] == ["remove", "zero", "move-end", "move-middle", "ban"]
    one, other = (generate(twin.denoiser(), **asked).tokens[0, 2:] for twin in (model, vanilla))
    differ = (one != other).double().mean().item()
    assert rows[0]["changed"]["mean"] == pytest.approx(differ)
