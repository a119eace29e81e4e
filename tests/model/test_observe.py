import functools
import math

import pytest
import torch

from attention_inputs import RATIOS, LargestTensor, random_inputs
from sinkdlm.fast import compile_blocks
from sinkdlm.model import observe
from sinkdlm.model.attention import attend_naive
from sinkdlm.model.observe import Watcher, summarize
from sinkdlm.sampling import generate
from small_models import VARIANTS, small_model, small_tokens


def from_full_maps(q, k, v, sink_k, sink_v, lengths=None, sink_logit=None):
    """Compute the definitions from the whole attention map, row by row and head by head."""
    batch, heads, _, _ = q.shape
    rows = []
    for b in range(batch):
        n = q.shape[2] if lengths is None else int(lengths[b])
        own_sinks = [None if x is None else x[b : b + 1] if x.shape[0] > 1 else x for x in (sink_k, sink_v)]
        out, weights = attend_naive(
            q[b : b + 1, :, :n], k[b : b + 1, :, :n], v[b : b + 1, :, :n], *own_sinks, sink_logit=sink_logit
        )
        values = v[b : b + 1, :, :n] if sink_v is None else torch.cat([own_sinks[1], v[b : b + 1, :, :n]], dim=2)
        norms = values[0].norm(dim=-1).repeat_interleave(heads // v.shape[1], dim=0)  # (H, S + n)
        column = 1 - weights[0].sum(-1)
        entropy = torch.special.entr(weights[0]).sum(-1) + (torch.special.entr(column) if sink_logit is not None else 0)
        rows.append(
            {
                "received": weights[0].mean(1),
                "entropy": entropy.mean(1),
                "value_norm": norms.mean(0),
                "output_norm": out[0].norm(dim=-1).mean(1),
                "bound": (weights[0] * norms[:, None]).sum(-1).mean(1),
                "outside": column.mean(1),
            }
        )
    return rows


@pytest.mark.parametrize("chunk", [1, 10**4, 1 << 24])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("n_sinks", [0, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), RATIOS)
def test_statistics_equal_those_of_full_maps(heads, kv_heads, n_sinks, padded, chunk, monkeypatch):
    monkeypatch.setattr(observe, "_CHUNK_WEIGHTS", chunk)
    q, k, v, sink_k, sink_v = (x.detach() for x in random_inputs(heads, kv_heads, max(1, n_sinks)))
    if not n_sinks:
        sink_k = sink_v = None
    lengths = torch.tensor([33, 20, 1]) if padded else None
    found = summarize(q, k, v, sink_k, sink_v, lengths=lengths)
    for b, expected in enumerate(from_full_maps(q, k, v, sink_k, sink_v, lengths)):
        n = 33 if lengths is None else int(lengths[b])
        torch.testing.assert_close(found.received[b, :, :n], expected["received"][:, n_sinks:])
        assert not found.received[b, :, n:].any()
        torch.testing.assert_close(found.sink_received[b], expected["received"][:, :n_sinks])
        torch.testing.assert_close(found.value_norm[b, :n], expected["value_norm"][n_sinks:])
        torch.testing.assert_close(found.sink_value_norm[b], expected["value_norm"][:n_sinks])
        for name in ("entropy", "output_norm", "bound"):
            torch.testing.assert_close(getattr(found, name)[b], expected[name])
    torch.testing.assert_close(found.received.sum(-1) + found.sink_share, torch.ones(3, heads, dtype=torch.float64))
    assert (found.output_norm <= found.bound + 1e-12).all()  # eq. 20


def test_a_sink_logit_counts_as_a_sink():
    q, k, v, _, _ = (x.detach() for x in random_inputs(6, 2, 1))
    logit = torch.linspace(-2, 3, 6, dtype=torch.float64)
    found = summarize(q, k, v, sink_logit=logit)
    for b, expected in enumerate(from_full_maps(q, k, v, None, None, sink_logit=logit)):
        torch.testing.assert_close(found.sink_share[b], expected["outside"])
        torch.testing.assert_close(found.entropy[b], expected["entropy"])


def test_planted_attention_is_reported():
    """One head attends to key 5 alone, the other to all keys equally."""
    q = torch.zeros(1, 2, 16, 8)
    k, v = torch.zeros(1, 2, 16, 8), torch.ones(1, 2, 16, 8)
    q[0, 0, :, 0], k[0, 0, 5, 0] = 100.0, 100.0
    v[0, :, 5] = 0.25
    found = summarize(q, k, v)
    assert found.received[0, 0].argmax() == 5
    assert found.received[0, 0, 5] > 0.999
    assert found.entropy[0, 0] < 1e-3
    torch.testing.assert_close(found.received[0, 1], torch.full((16,), 1 / 16))
    torch.testing.assert_close(found.entropy[0, 1], torch.tensor(math.log(16)))
    torch.testing.assert_close(found.value_norm[0, 5] * 4, found.value_norm[0, 4])


def test_no_map_of_all_queries_and_keys_is_held(monkeypatch):
    monkeypatch.setattr(observe, "_CHUNK_WEIGHTS", 1 << 14)
    inputs = [x.detach() for x in random_inputs(2, 2, 1, tokens=512, batch=1, width=4)]
    with LargestTensor() as largest:
        summarize(*inputs)
    assert largest.numel < 2 * 512 * 512 / 8


def test_a_watcher_sees_every_layer_and_changes_nothing(variant):
    model, tokens = small_model(**variant), small_tokens(3, 9)
    lengths = torch.tensor([9, 5, 2])
    logits = [block.attention.sink_logit for block in model.blocks] if model.config.has_sink_logit else None
    watcher = Watcher(lengths, logits, n_registers=model.config.n_registers)
    with torch.no_grad():
        plain = model(tokens, lengths=lengths)
        assert torch.equal(model(tokens, lengths=lengths, observe=watcher), plain)
    assert len(watcher.layers) == 3
    for layer in watcher.layers:
        assert layer.received.shape == (3, 6, 9)
        assert layer.sink_received.shape[-1] == model.config.n_lane + model.config.n_registers + model.config.has_sink_logit
        torch.testing.assert_close(layer.received.sum(-1) + layer.sink_share, torch.ones(3, 6, dtype=torch.float64))
        if model.config.sink_value == "zero" and model.config.n_lane + model.config.n_registers:
            assert not layer.sink_value_norm.any()


def test_a_watched_forward_of_compiled_blocks_runs_as_it_is_written(monkeypatch):
    graphs, tokens, model = [], small_tokens(1, 5), small_model(n_sinks=1)
    compiler = functools.partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    monkeypatch.setattr(torch, "compile", compiler)
    compile_blocks(model)
    with torch.no_grad():
        watcher = Watcher()
        watched = model(tokens, observe=watcher)
        assert len(watcher.layers) == 3
        assert not graphs
        assert torch.equal(model(tokens), watched)
    assert graphs


def test_an_exact_cache_compiles_nothing(monkeypatch):
    """Its forwards have another shape, mask and start at every block."""
    graphs, model = [], small_model(n_sinks=1, block_size=4, n_layers=1)
    given = {"prompt": [[1, 2], [3] * 6], "mask_id": 11, "length": 15}
    expected = generate(model.denoiser(), **given).tokens
    compiler = functools.partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    monkeypatch.setattr(torch, "compile", compiler)
    compile_blocks(model)
    assert torch.equal(generate(model.denoiser(), **given).tokens, expected)
    assert not graphs
    assert torch.equal(generate(model.denoiser(), **given, cache="none").tokens, expected)
    assert graphs


@pytest.mark.parametrize("chunk", [1, 1 << 24])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["vanilla", "sink", "sinks-4", "sink-zero", "logit", "parent"])
def test_blocks_are_seen_as_the_model_sees_them(name, padded, chunk, monkeypatch):
    """Against whole maps under the model's own mask; what a key receives is the mean over the queries that see it."""
    monkeypatch.setattr(observe, "_CHUNK_WEIGHTS", chunk)
    model = small_model(**VARIANTS[name], block_size=4)
    lengths = torch.tensor([11, 7, 4]) if padded else None
    seen = []
    logits = [block.attention.sink_logit for block in model.blocks] if model.config.has_sink_logit else None
    watcher = Watcher(lengths, logits, block_size=4)
    with torch.no_grad():
        model(small_tokens(3, 11), lengths=lengths, observe=watcher, intervene=lambda _, one: seen.append(one) or one)
    assert len(seen) == len(watcher.layers) == 3
    for found, one in zip(watcher.layers, seen, strict=True):
        out, weights = attend_naive(*one[:5], sink_logit=one.sink_logit, visible=one.visible)
        visible = one.visible.expand(3, 1, 11, 11)[:, 0]
        for row in range(3):
            n = 11 if lengths is None else int(lengths[row])
            maps = weights[row, :, :n]
            n_sinks = maps.shape[-1] - 11
            for key in range(n):
                chosen = visible[row, :n, key]
                torch.testing.assert_close(found.received[row, :, key], maps[:, chosen, n_sinks + key].mean(1))
                assert chosen.tolist() == [query // 4 >= key // 4 for query in range(n)]
            assert not found.received[row, :, n:].any()
            outside = 1 - maps.sum(-1)
            expected = outside.mean(1)[:, None] if logits else maps[..., :n_sinks].mean(1)
            torch.testing.assert_close(found.sink_received[row], expected)
            entropy = torch.special.entr(maps).sum(-1) + (torch.special.entr(outside) if logits else 0)
            torch.testing.assert_close(found.entropy[row], entropy.mean(1))
            torch.testing.assert_close(found.output_norm[row], out[row, :, :n].norm(dim=-1).mean(1))
