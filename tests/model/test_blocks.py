"""Block diffusion in the model: each block of the noised copy sees itself and the clean blocks before it."""

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch

import plain_blocks
from sinkdlm import ModelConfig
from sinkdlm.diffusion import Noisy, Schedule, corrupt, denoising_loss, number_blocks
from sinkdlm.errors import ConfigError
from sinkdlm.model.visibility import PADDING, Visibility, block_codes
from small_models import VARIANTS, small_model, small_tokens

# Sinks at the end and registers do not go with blocks.
BLOCKED = {name: flags for name, flags in VARIANTS.items() if "end" not in name and "register" not in name}
LAYOUTS = [(8, 2), (6, 1), (5, 4), (4, 4), (3, 8)]  # tokens, block size; (7, 3) has every variant


def blocked_model(name: str, size: int, **how):
    return small_model(**BLOCKED[name], block_size=size, **how)


def noised(tokens, mask_id, seed=0):
    masked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    return torch.where(masked, mask_id, tokens), masked


def test_who_sees_whom_is_the_literal_table():
    """T = 8, blocks of 2: noised tokens, then clean ones."""
    own = ["11000000", "11000000", "00110000", "00110000", "00001100", "00001100", "00000011", "00000011"]
    before = ["00000000", "00000000", "11000000", "11000000", "11110000", "11110000", "11111100", "11111100"]
    causal = ["11000000", "11000000", "11110000", "11110000", "11111100", "11111100", "11111111", "11111111"]
    rows = [a + b for a, b in zip(own, before, strict=True)] + ["0" * 8 + row for row in causal]
    table = torch.tensor([[bit == "1" for bit in row] for row in rows])
    blocks = number_blocks(8, 2)
    codes = torch.cat([block_codes(blocks, noised=True), block_codes(blocks, noised=False)], dim=1)
    assert torch.equal(Visibility(torch.zeros(1, 16, dtype=torch.int32), blocks=codes).dense()[0, 0], table)
    assert torch.equal(plain_blocks.mask_of(2, 8), table)


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, (7, 3)) for name in BLOCKED), *((name, layout) for name in ("sinks-4", "parent") for layout in LAYOUTS)],
)
def test_two_copies_are_the_plain_model(name, layout):
    n_tokens, size = layout
    model, tokens = blocked_model(name, size), small_tokens(3, n_tokens)
    noisy, _ = noised(tokens, model.config.mask_id)
    found = model(noisy, clean=tokens)
    weights = dict(model.named_parameters())
    for row in range(3):
        expected = plain_blocks.hidden_states(weights, model.config, noisy[row], tokens[row], size)
        assert (found[row] - expected).abs().max() < 1e-10
    generator = torch.Generator().manual_seed(1)
    upward = torch.randn(found.shape, generator=generator, dtype=found.dtype)
    mine = torch.autograd.grad((found * upward).sum(), list(model.parameters()), allow_unused=True)
    total = sum(
        (plain_blocks.hidden_states(weights, model.config, noisy[row], tokens[row], size) * upward[row]).sum() for row in range(3)
    )
    theirs = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None or not a.any()) if b is None else (a - b).abs().max() < 1e-10 * max(1, float(b.abs().max()))


@pytest.mark.parametrize("name", BLOCKED)
def test_two_copies_are_separate_forwards(name):
    """Block by block: the noised block after its clean prefix, in one copy."""
    n_tokens, size = 10, 4
    model, tokens = blocked_model(name, size), small_tokens(2, n_tokens, seed=3)
    noisy, _ = noised(tokens, model.config.mask_id)
    found = model(noisy, clean=tokens)
    for start in range(0, n_tokens, size):
        stop = min(start + size, n_tokens)
        alone = model(torch.cat([tokens[:, :start], noisy[:, start:stop]], dim=1))
        assert (found[:, start:stop] - alone[:, start:stop]).abs().max() < 1e-10


@pytest.mark.parametrize("name", BLOCKED)
def test_later_blocks_change_nothing(name):
    model, tokens = blocked_model(name, 3), small_tokens(2, 9)
    other = torch.cat([tokens[:, :6], (tokens[:, 6:] + 1) % 10], dim=1)
    assert torch.equal(model(tokens)[:, :6], model(other)[:, :6])
    assert not torch.equal(model(tokens)[:, 6:], model(other)[:, 6:])


@pytest.mark.parametrize("name", BLOCKED)
def test_one_block_is_full_attention(name):
    """Bit for bit where the clean copy is left out; forced through two copies, up to rounding."""
    full, tokens = small_model(**BLOCKED[name]), small_tokens(4, 8)
    config = full.config
    blocked = blocked_model(name, 8)
    samples = torch.arange(4) + 5
    given = {"seed": 3, "mask_id": config.mask_id}
    one, other = corrupt(tokens, samples, **given), corrupt(tokens, samples, **given, block_size=8)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    losses = [denoising_loss(model, tokens, one, denominator=7.0) for model in (full, blocked)]
    assert torch.equal(losses[0].total, losses[1].total)
    assert torch.equal(losses[0].nll, losses[1].nll)
    forced = denoising_loss(blocked, tokens, one, denominator=7.0, two_copies=True)
    assert abs(forced.total - losses[0].total) < 1e-12 * abs(losses[0].total)


def test_blocks_of_one_token_with_a_shift_are_the_parent():
    model = small_model(qkv_bias=True, shift_logits=True, block_size=1)
    tokens = small_tokens(3, 7)
    masked = torch.full_like(tokens, model.config.mask_id)
    found, parent = model(masked, clean=tokens), model(tokens, causal=True)
    assert (found[:, 1:] - parent[:, :-1]).abs().max() < 1e-12


@pytest.mark.parametrize("name", BLOCKED)
def test_packed_documents_are_computed_as_if_alone(name):
    model, tokens = blocked_model(name, 2), small_tokens(2, 9)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 4, 4, 4, 4, 4, 3, 3, 3]])
    noisy, _ = noised(tokens, model.config.mask_id)
    found = model(noisy, clean=tokens, documents=documents)
    for row in range(2):
        for number in set(documents[row].tolist()):
            inside = documents[row] == number
            alone = model(noisy[row : row + 1, inside], clean=tokens[row : row + 1, inside])
            assert (found[row, inside] - alone[0]).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["vanilla", "sink", "logit-gate", "parent"])
def test_padding_changes_nothing(name):
    model, tokens = blocked_model(name, 4), small_tokens(2, 10)
    noisy, _ = noised(tokens, model.config.mask_id)
    lengths = torch.tensor([10, 6])
    for given in ({"clean": tokens}, {}):
        found = model(noisy, lengths=lengths, **given)
        alone = model(noisy[1:, :6], **{key: value[1:, :6] for key, value in given.items()})
        assert (found[1, :6] - alone[0]).abs().max() < 1e-10
        assert found.isfinite().all()


@pytest.mark.parametrize("name", BLOCKED)
def test_selected_positions_are_those_of_the_whole(name):
    model, tokens = blocked_model(name, 3), small_tokens(3, 8)
    noisy, masked = noised(tokens, model.config.mask_id)
    for given in ({"clean": tokens}, {}):
        whole = model(noisy, **given)
        index = torch.nonzero(masked.flatten())[:, 0]
        assert (model(noisy, select=index, **given) - whole.flatten(0, 1)[index]).abs().max() < 1e-12
        places = torch.tensor([[0, 3], [7, 2], [6, 5]])
        found = model(noisy, select=places, **given)
        assert (found - whole.take_along_dim(places[..., None], 1)).abs().max() < 1e-12


# -- noise ------------------------------------------------------------------------------------------------------------------


def times(samples, n_tokens, size, **how):
    tokens = torch.zeros(len(samples), n_tokens, dtype=torch.int64)
    return corrupt(tokens, samples, seed=5, mask_id=1, block_size=size, **how)


def test_times_of_a_sample_fill_equal_parts():
    noisy = times(torch.arange(500), 24, 4)
    per_block = noisy.t[:, ::4]
    assert torch.equal(noisy.t, per_block.repeat_interleave(4, dim=1))
    assert torch.equal((per_block * 6).long().sort(1).values, torch.arange(6).expand(500, -1))
    # Every block meets every part, and the time within it is the sample's own.
    first = (per_block * 6).long()
    counts = torch.stack([(first == part).sum(0) for part in range(6)])
    assert (counts > 500 / 6 * 0.6).all()
    alone = corrupt(torch.zeros(500, 4, dtype=torch.int64), torch.arange(500), seed=5, mask_id=1).t
    assert torch.allclose((per_block * 6).frac(), alone[:, None].expand(-1, 6))


def test_noise_ignores_how_the_batch_is_cut_and_padded():
    samples, lengths = torch.arange(40), torch.arange(40) % 17 + 4
    inside = torch.arange(20) < lengths[:, None]
    whole = times(samples, 20, 3, maskable=inside)
    for row in range(40):
        n = int(lengths[row])
        alone = times(samples[row : row + 1], n, 3)
        assert torch.equal(whole.masked[row, :n], alone.masked[0])
        assert torch.equal(whole.t[row, :n], alone.t[0] if alone.t.dim() == 2 else alone.t.expand(n))
    assert not (whole.masked & ~inside).any()


def test_only_blocks_that_can_be_masked_share_the_times():
    maskable = torch.zeros(30, 20, dtype=torch.bool)
    maskable[:, 9:17] = True  # blocks 2, 3 and 4 of 4 tokens
    noisy = times(torch.arange(30), 20, 4, maskable=maskable)
    assert torch.equal((noisy.t[:, 8::4] * 3).long().sort(1).values, torch.arange(3).expand(30, -1))


def test_documents_have_blocks_of_their_own():
    documents = torch.tensor([[0] * 5 + [1] * 7, [3] * 12])
    assert number_blocks(12, 4, documents).tolist() == [[0] * 4 + [1] + [2] * 4 + [3] * 3, [0] * 4 + [1] * 4 + [2] * 4]
    noisy = times(torch.arange(2), 12, 4, documents=documents)
    assert len(noisy.t[0].unique()) == 4


def test_a_range_of_times_narrows_the_masked_share():
    noisy = times(torch.arange(200), 32, 4, t_range=(0.45, 0.95))
    assert noisy.t.min() >= 0.45
    assert noisy.t.max() <= 0.95
    full = times(torch.arange(200), 32, 4)
    assert torch.allclose(noisy.t, 0.45 + 0.5 * full.t)
    assert torch.equal(noisy.weight, Schedule().weight(noisy.t))


# -- the bound --------------------------------------------------------------------------------------------------------------

VOCAB, LENGTH = 3, 4


def nll_table(model, tokens, size):
    """Mask of one block, in the place of the block -> sum of the NLL of its masked tokens, given the clean blocks before it."""
    table = {}
    for start in range(0, LENGTH, size):
        for bits in itertools.product([False, True], repeat=size):
            masked = torch.zeros(1, LENGTH, dtype=torch.bool)
            masked[0, start : start + size] = torch.tensor(bits)
            logits = model.head(model(torch.where(masked, VOCAB, tokens)[:, : start + size]))[0]
            nll = torch.nn.functional.cross_entropy(logits, tokens[0, : start + size], reduction="none")
            table[start, bits] = float(nll[masked[0, : start + size]].sum())
    return table


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_loss_expects_the_exact_block_bound(size):
    """Masks enumerated, quadrature in t: blocks are independent, so each has an integral of its own."""
    model, tokens = small_model(vocab_size=VOCAB, mask_id=VOCAB, n_sinks=1, block_size=size), torch.tensor([[2, 0, 1, 2]])
    table, schedule = nll_table(model, tokens, size), Schedule("linear", 0.0)
    exact = sum(value / (sum(bits) * math.comb(size, sum(bits))) for (_, bits), value in table.items() if any(bits))
    x, w = np.polynomial.legendre.leggauss(40)
    expected, unit = 0.0, torch.ones(1, LENGTH, dtype=torch.float64)
    losses = {}
    for bits in itertools.product([False, True], repeat=LENGTH):
        masked = torch.tensor([bits])
        loss = denoising_loss(model, tokens, Noisy(torch.where(masked, VOCAB, tokens), masked, unit, unit), denominator=1.0)
        losses[bits] = torch.zeros(LENGTH, dtype=torch.float64).masked_scatter_(masked[0], loss.nll.double())
    for start in range(0, LENGTH, size):
        here = slice(start, start + size)
        for t, dt in zip((x + 1) / 2, w / 2, strict=True):
            p = float(schedule.probability(torch.tensor(t, dtype=torch.float64)))
            weight = float(schedule.weight(torch.tensor(t, dtype=torch.float64)))
            for bits, nll in losses.items():
                if any(bits[:start] + bits[start + size :]):
                    continue  # what is masked elsewhere changes nothing: below
                n = sum(bits)
                expected += dt * weight * p**n * (1 - p) ** (size - n) * float(nll[here].sum())
    assert abs(expected - exact) < 1e-9
    for bits, nll in losses.items():
        parts = sum(table[start, bits[start : start + size]] for start in range(0, LENGTH, size))
        assert abs(float(nll.sum()) - parts) < 1e-10


@torch.no_grad()
def test_sampled_losses_average_to_the_exact_bound():
    size, n = 2, 4000
    model, tokens = small_model(vocab_size=VOCAB, mask_id=VOCAB, n_sinks=1, block_size=size), torch.tensor([[2, 0, 1, 2]])
    exact = sum(v / (sum(b) * math.comb(size, sum(b))) for (_, b), v in nll_table(model, tokens, size).items() if any(b))
    rows = tokens.expand(n, -1)
    noisy = corrupt(rows, torch.arange(n), seed=0, mask_id=VOCAB, schedule=Schedule("linear", 0.0), block_size=size)
    loss = denoising_loss(model, rows, noisy, denominator=1.0)
    per_row = torch.zeros(n, dtype=torch.float64).index_add_(0, loss.rows, loss.nll * noisy.weight[noisy.masked])
    assert abs(float(loss.total) - float(per_row.sum())) < 1e-8 * n
    assert abs(per_row.mean() - exact) < 4 * per_row.std() / math.sqrt(n)


@torch.no_grad()
def test_all_texts_have_probability_one_at_blocks_of_one():
    model = small_model(vocab_size=VOCAB, mask_id=VOCAB, n_sinks=1, block_size=1)
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    everything = torch.ones_like(texts, dtype=torch.bool)
    ones = torch.ones(texts.shape, dtype=torch.float64)
    loss = denoising_loss(model, texts, Noisy(torch.full_like(texts, VOCAB), everything, ones, ones), denominator=1.0)
    log_p = -loss.nll.view(len(texts), LENGTH).sum(1)
    assert len(texts) == 81
    assert abs(float(log_p.exp().sum()) - 1) < 1e-10


# -- refusals, copies, the fast runner ----------------------------------------------------------------------------------------


def test_variants_that_cannot_have_blocks_are_refused():
    shape = {"vocab_size": 11, "n_layers": 1, "n_heads": 2, "d_model": 8, "d_ff": 8}
    for flags, word in (({"sink_kind": "register"}, "register"), ({"sink_position": "end"}, "sink_position")):
        with pytest.raises(ConfigError, match=word) as failure:
            ModelConfig(**shape, n_sinks=1, block_size=4, **flags)
        assert "\n" not in str(failure.value)
    with pytest.raises(ConfigError, match="block_size"):
        ModelConfig(**shape, block_size=0)
    assert ModelConfig(**shape, sink_position="end", block_size=4).block_size == 4  # without a sink, its position is nothing


def test_what_does_not_go_together_is_refused():
    model, tokens = small_model(n_sinks=1, block_size=2), small_tokens(1, 4)
    with pytest.raises(ValueError, match="clean="):
        small_model()(tokens, clean=tokens)
    with pytest.raises(ValueError, match="clean="):
        model(tokens, clean=tokens[:, :3])
    with pytest.raises(ValueError, match="block_size"):
        small_model(n_sinks=1, sink_position="end")(tokens, block_size=2)


@pytest.mark.filterwarnings("ignore:flex_attention called")
@pytest.mark.parametrize(
    ("name", "path"), [*((name, None) for name in BLOCKED), *((name, "flex") for name in ("vanilla", "sinks-4", "logit-gate"))]
)
def test_the_fast_runner_is_the_plain_one(name, path):
    """Outputs, and gradients where torch has them; with packed documents and padding, across FlexAttention's blocks of 128."""
    from sinkdlm.fast.runner import FastRunner, Plan

    plain = small_model(**BLOCKED[name], n_layers=2, block_size=24, plan=None)
    fast = small_model(**BLOCKED[name], n_layers=2, block_size=24)
    fast.runner = FastRunner(Plan(), force=path)
    context = torch.no_grad() if path == "flex" else contextlib.nullcontext()
    tokens = small_tokens(2, 150)
    noisy, masked = noised(tokens, plain.config.mask_id)
    documents = torch.cat([torch.zeros(2, 70), torch.ones(2, 80)], dim=1).long()
    index = torch.nonzero(masked.flatten())[:, 0]
    for given in ({"documents": documents}, {"lengths": torch.tensor([150, 131])}):
        with context:
            found = [model(noisy, clean=tokens, select=index, **given) for model in (plain, fast)]
        inside = torch.ones(2, 150, dtype=torch.bool) if "lengths" not in given else torch.arange(150) < given["lengths"][:, None]
        kept = inside.flatten()[index]
        assert (found[0] - found[1])[kept].abs().max() < 1e-12
        with torch.no_grad():
            assert (plain(noisy, **given)[inside] - fast(noisy, **given)[inside]).abs().max() < 1e-12
        if path == "flex":  # torch has no backward of it on a CPU; tests/fast/test_gpu.py has it
            continue
        grads = [
            torch.autograd.grad(states[kept].square().sum(), list(model.parameters()), allow_unused=True)
            for states, model in zip(found, (plain, fast), strict=True)
        ]
        for a, b in zip(*grads, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a - b).abs().max() <= 1e-12 * max(1, float(a.abs().max()))


def test_tables_of_blocks_hide_nothing_that_is_seen():
    """FlexAttention's tables against the dense mask: a skipped tile holds no visible pair, a whole one no hidden pair."""
    from sinkdlm.fast.attention import block_mask

    for n_tokens, size, documents in ((256, 32, None), (300, 24, 3), (384, 160, None), (200, 1, 2)):
        numbers = torch.zeros(1, n_tokens, dtype=torch.int64)
        if documents:
            numbers = (torch.arange(n_tokens) * documents // n_tokens)[None]
        blocks = number_blocks(n_tokens, size, numbers)
        codes = torch.cat([block_codes(blocks, noised=True), block_codes(blocks, noised=False)], dim=1)
        padded = numbers.to(torch.int32)
        padded[:, -5:] = PADDING
        rule = Visibility(torch.cat([padded, padded], dim=1), blocks=codes)
        dense, mask = rule.dense()[0, 0], block_mask(rule, 1, 2)
        partial = mask.to_dense()[0, 0]
        full_counts, full_index = mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0]
        whole = torch.zeros_like(partial)
        for row, count in enumerate(full_counts.tolist()):
            whole[row, full_index[row, :count].long()] = 1
        n_rows, n_columns = partial.shape
        for row, column in itertools.product(range(n_rows), range(n_columns)):
            tile = dense[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
            if not partial[row, column]:
                assert not tile.any()
            if whole[row, column]:
                assert tile.all()
                assert tile.shape == (128, 128)
        seen = sum(
            bool(dense[r * 128 : (r + 1) * 128, c * 128 : (c + 1) * 128].any()) for r in range(n_rows) for c in range(n_columns)
        )
        if n_tokens % 128 == 0:  # no tile holds two documents or both copies
            assert int(partial.sum()) <= seen + n_rows + 2  # the sinks' tiles, and little more
