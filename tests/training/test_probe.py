"""Probes of attention during a run, as `metrics.jsonl` has them: which positions count as sinks, and which as rows."""

from contextlib import nullcontext

import pytest
import torch

from sinkdlm.data.rows import Batch
from sinkdlm.diffusion import Noisy, Schedule
from sinkdlm.model.attention import attend_naive
from sinkdlm.training import evaluate
from sinkdlm.training.evaluate import probe
from small_models import small_model, small_tokens


class Given:
    """The given rows, with nothing masked."""

    def __init__(self, tokens, lengths=None):
        self.tokens, self.lengths = tokens, lengths

    def batch(self, numbers):
        n = len(numbers)
        maskable = torch.zeros_like(self.tokens[:n], dtype=torch.bool)
        return Batch(self.tokens[:n], torch.arange(n), maskable, None if self.lengths is None else self.lengths[:n])


def look(model, tokens, lengths=None):
    return probe(model, Given(tokens, lengths), len(tokens), Schedule(), nullcontext, torch.device("cpu"))


@pytest.mark.parametrize("position", ["front", "end"])
def test_a_register_is_a_sink_and_no_content(position):
    model = small_model(n_sinks=1, sink_kind="register", sink_position=position)
    found = look(model, small_tokens(2, 7))
    assert all({"sink_share", "sink_value_norm"} <= set(layer) for layer in found)
    weights = []

    def keep(layer, q, k, v, sink_k, sink_v):
        group = q.shape[1] // k.shape[1]
        scores = q[:, :, 1:] @ k.repeat_interleave(group, dim=1).transpose(2, 3) / q.shape[-1] ** 0.5
        weights.append(scores.softmax(-1))

    with torch.no_grad():
        model(small_tokens(2, 7), observe=keep)
    for layer, weight in zip(found, weights, strict=True):
        received = weight.mean(2)  # (B, H, 1 + T): the register lies in front of the tokens
        assert layer["sink_share"] == pytest.approx(float(received[..., 0].mean()))
        assert layer["top_content_share"] == pytest.approx(float(received[..., 1:].mean(1).amax(-1).mean()))


def test_blocks_are_noised_behind_clean_ones(monkeypatch):
    """As they are trained and written: with everything masked, a block still sees the text before it."""
    model, tokens = small_model(n_sinks=1, block_size=4), small_tokens(2, 11)

    def mask_all(tokens, samples, *, mask_id, **_):
        masked = torch.ones_like(tokens, dtype=torch.bool)
        return Noisy(torch.full_like(tokens, mask_id), masked, torch.ones(len(tokens)), torch.ones(len(tokens)))

    monkeypatch.setattr(evaluate, "corrupt", mask_all)
    found = look(model, tokens)
    sums = torch.zeros(3, dtype=torch.float64)

    def add(layer, *given):
        sums[layer] += attend_naive(*given)[1][:, :, start:, :1].sum(2).mean()  # the last block sees all

    for start in (0, 4, 8):
        with torch.no_grad():
            model(torch.cat([tokens[:, :start], torch.full_like(tokens, 11)[:, start : start + 4]], dim=1), observe=add)
    assert [layer["sink_share"] for layer in found] == pytest.approx((sums / 11).tolist())


@pytest.mark.parametrize("sinks", [{}, {"n_sinks": 1}, {"n_sinks": 1, "sink_kind": "register"}], ids=str)
def test_padding_is_out_of_sight(sinks):
    """Short rows are measured as if alone, whatever lies behind their end."""
    model, tokens = small_model(**sinks), small_tokens(2, 9)
    lengths = torch.tensor([6, 6])
    for layer, alone in zip(look(model, tokens, lengths), look(model, tokens[:, :6]), strict=True):
        assert layer == pytest.approx(alone)
