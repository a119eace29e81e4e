"""Packed documents and annealing: each document is computed as if alone, and annealing shows the pairs that it drew."""

import itertools
import math

import pytest
import torch
from torch.nn.attention import flex_attention as flex

import reference
from attention_inputs import LargestTensor
from sinkdlm import fast, noise
from sinkdlm.diffusion import Noisy, denoising_loss
from sinkdlm.fast.attention import block_mask
from sinkdlm.fast.runner import supports_flex
from sinkdlm.model.visibility import PADDING, Annealing, DrawnAnnealing, Visibility, pair_bits
from small_models import VARIANTS, small_config, small_model, small_tokens
from visibility_rules import random_rule

LAYOUT = [[5, 1, 7], [13], [1, 2, 3, 7]]  # tokens of each document, row by row
IDS = (4, 0, 9, 0)  # unordered, and one id occurs twice
LENGTHS = [13, 8, 6]  # whole row; a document cut; a document cut off at its start

PACKABLE = {name: flags for name, flags in VARIANTS.items() if flags.get("sink_kind") != "register"} | {
    "end-shift": {"n_sinks": 2, "sink_position": "end", "shift_logits": True},
    "end-shift-zero": {"n_sinks": 1, "sink_position": "end", "sink_value": "zero", "shift_logits": True, "n_kv_heads": 6},
}


def ids_of(layout):
    return torch.stack([torch.cat([torch.full((n,), i) for n, i in zip(row, IDS, strict=False)]) for row in layout])


def spans_of(layout, lengths=None):
    """List (row, start, end) of every document, cut at the row's length."""
    spans = []
    for row, sizes in enumerate(layout):
        limit = sum(sizes) if lengths is None else lengths[row]
        start = 0
        for size in sizes:
            if start < limit:
                spans.append((row, start, min(start + size, limit)))
            start += size
    return spans


def cotangent(tokens, model):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*tokens.shape, model.config.d_model, generator=generator, dtype=torch.float64).to(model.embed.weight.dtype)


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_same_gradients(left, right, tolerance):
    assert left.keys() == right.keys()
    assert len(left) >= 2 * 6
    for name, grad in left.items():
        assert (grad - right[name]).abs().max() <= tolerance, name


@pytest.fixture
def trainable_flex(monkeypatch):
    """torch refuses to train FlexAttention on a CPU, although its reference code can: skip the check."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


FLEX_WARNINGS = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def uses_flex(test):
    for mark in FLEX_WARNINGS:
        test = mark(test)
    return pytest.mark.usefixtures("trainable_flex")(test)


# -- documents ------------------------------------------------------------------------------------------------------------


FORM_OF = [
    *((name, "auto") for name in VARIANTS),
    ("sink-end", "naive"),
    ("logit", "naive"),
]
PACKED = [(*pair, True) for pair in FORM_OF if pair[0] in PACKABLE]
PACKED += [(name, "auto", padded) for name in ("end-shift", "end-shift-zero") for padded in (False, True)]
PACKED += [("vanilla", "auto", False), ("sinks-4", "auto", False), ("parent", "naive", False), ("logit", "auto", False)]


@pytest.mark.parametrize(("name", "form", "padded"), PACKED)
def test_packed_documents_equal_each_alone(name, form, padded):
    model, tokens = small_model(attention=form, **PACKABLE[name]), small_tokens(3, 13)
    grad, lengths = cotangent(tokens, model), LENGTHS if padded else None
    spans, alone = spans_of(LAYOUT, lengths), {}
    for row, start, end in spans:
        alone[row, start] = model(tokens[row : row + 1, start:end])[0]
        (alone[row, start] * grad[row, start:end]).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    packed = model(tokens, documents=ids_of(LAYOUT), lengths=torch.tensor(lengths) if padded else None)
    total = packed.new_zeros(())
    for row, start, end in spans:
        assert (packed[row, start:end] - alone[row, start]).abs().max() <= 1e-10
        total = total + (packed[row, start:end] * grad[row, start:end]).sum()
    total.backward()
    assert_same_gradients(gradients(model), expected, 1e-10)


def test_padding_may_hold_anything():
    model, tokens, lengths = small_model(n_sinks=1, sink_position="end"), small_tokens(3, 13), torch.tensor(LENGTHS)
    inside = torch.arange(13) < lengths[:, None]
    dirty = torch.where(inside, tokens, torch.tensor(-(10**6))), torch.where(inside, ids_of(LAYOUT), torch.arange(13))
    with torch.no_grad():
        clean = model(tokens, documents=ids_of(LAYOUT), lengths=lengths)
        assert torch.equal(model(dirty[0], documents=dirty[1], lengths=lengths)[inside], clean[inside])
    assert torch.isfinite(clean).all()


def test_one_document_is_the_whole_row(variant):
    if variant.get("sink_kind") == "register":
        pytest.skip("refused")
    model, tokens = small_model(**variant), small_tokens(3, 9)
    with torch.no_grad():
        assert (model(tokens, documents=torch.full((3, 9), -5)) - model(tokens)).abs().max() <= 1e-12


@pytest.mark.parametrize("flags", [PACKABLE["sink"], PACKABLE["end-shift"]])
def test_recomputing_and_cached_lanes_change_nothing(flags):
    tokens, ids, runs = small_tokens(3, 13), ids_of(LAYOUT), []
    for how in ("none", "selective", "full"):
        model = small_model(plan=fast.Plan(recompute=how), **flags)
        out = model(tokens, documents=ids, annealing=Annealing(0.5, 1))
        out.square().sum().backward()
        runs.append([out.detach(), *gradients(model).values()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*runs, strict=True))
    with model.inference():
        for _ in range(2):
            assert torch.equal(model(tokens, documents=ids, annealing=Annealing(0.5, 1)), runs[0][0])


@pytest.mark.parametrize("name", ["sink", "logit", "parent", "end-shift"])
def test_loss_of_packed_documents_is_the_sum_of_their_losses(name):
    model, tokens = small_model(**PACKABLE[name]), small_tokens(3, 13)
    generator = torch.Generator().manual_seed(5)
    masked = torch.rand(3, 13, generator=generator) < 0.6
    masked &= torch.arange(13) < torch.tensor(LENGTHS)[:, None]
    weight = torch.rand(3, generator=generator, dtype=torch.float64) + 0.5
    noisy = Noisy(torch.where(masked, model.config.mask_id, tokens), masked, weight, weight)
    total, n_scored = 0.0, 0
    for row, start, end in spans_of(LAYOUT, LENGTHS):
        part = (slice(row, row + 1), slice(start, end))
        loss = denoising_loss(
            model,
            tokens[part],
            Noisy(noisy.tokens[part], masked[part], weight[row : row + 1], weight[row : row + 1]),
            denominator=7.0,
        )
        total, n_scored = total + loss.total, n_scored + int(loss.scored.sum())
    total.backward()
    expected = gradients(model)
    model.zero_grad()
    packed = denoising_loss(model, tokens, noisy, denominator=7.0, lengths=torch.tensor(LENGTHS), documents=ids_of(LAYOUT))
    packed.total.backward()
    assert abs(packed.total.item() / total.item() - 1) <= 1e-12
    assert int(packed.scored.sum()) == n_scored
    assert_same_gradients(gradients(model), expected, 1e-10)


def test_loss_hands_options_to_the_model_only_where_given():
    model, tokens = small_model(), small_tokens(2, 6)
    noisy = Noisy(tokens, torch.ones(2, 6, dtype=torch.bool), torch.ones(2), torch.ones(2))

    class Plain:
        config, head_weight, seen = model.config, model.head_weight, None

        def __call__(self, tokens, *, lengths=None, select, **options):
            self.seen = options
            return model(tokens, lengths=lengths, select=select)

    plain = Plain()
    denoising_loss(plain, tokens, noisy, denominator=1.0)
    assert plain.seen == {}
    denoising_loss(plain, tokens, noisy, denominator=1.0, documents=tokens, annealing=Annealing(0.5, 0))
    assert plain.seen.keys() == {"documents", "annealing"}


# -- annealing --------------------------------------------------------------------------------------------------------------


def mix32(word):
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    word = ((word ^ (word >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return word ^ (word >> 16)


def drawn_in_python(annealing, n_tokens):
    """Compute the visible pairs with Python's integers."""

    def words(side):
        return [noise.hash_words(annealing.key, int(noise.Stream.ANNEALING), side, i) >> 32 for i in range(n_tokens)]

    rows, columns = words(0), words(1)
    limit = annealing.share * 2**32
    return torch.tensor(
        [[j <= i or ((mix32(rows[i] ^ columns[j]) + 2**31) % 2**32) < limit for j in range(n_tokens)] for i in range(n_tokens)]
    )


def opened_by_reference(model, tokens, visible, monkeypatch):
    """Run the masked reference, with hidden pairs of content added to its bias."""
    n_sinks = model.config.n_sinks if model.config.sink_kind != "logit" else 0
    extra = torch.zeros(len(visible), len(visible), dtype=torch.float64).masked_fill(~visible, -math.inf)
    front, back = (n_sinks, 0) if model.config.sink_position == "front" else (0, n_sinks)
    extra = torch.nn.functional.pad(extra, (front, back, front, back))
    plain = reference.attention
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    with monkeypatch.context() as patch:
        patch.setattr(reference, "attention", lambda w, c, name, x, p, bias, sinks: plain(w, c, name, x, p, bias + extra, sinks))
        out = torch.stack([reference.hidden_states(weights, model.config, row) for row in tokens])
    return out, weights


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize(("name", "form"), FORM_OF)
def test_opening_equals_masked_reference(name, form, share, monkeypatch):
    model, tokens, annealing = small_model(attention=form, **VARIANTS[name]), small_tokens(2, 9), Annealing(share, 77)
    visible = drawn_in_python(annealing, 9)
    assert visible.tril().sum() == 45
    assert (visible.sum() > 45) == (share > 0)
    expected, weights = opened_by_reference(model, tokens, visible, monkeypatch)
    grad = cotangent(tokens, model)
    (expected * grad).sum().backward()
    out = model(tokens, annealing=annealing)
    (out * grad).sum().backward()
    assert (out - expected).abs().max() <= 1e-10
    assert_same_gradients(gradients(model), {n: w.grad for n, w in weights.items() if w.grad is not None}, 1e-10)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("name", ["vanilla", "sinks-2-end-zero-gate", "logit", "parent"])
def test_opening_and_documents_and_lengths_combine(name, lengths, monkeypatch):
    """A document uses its own part of the draw: i and j are positions in the row."""
    model, tokens, annealing = small_model(**PACKABLE[name]), small_tokens(3, 13), Annealing(0.3, 5)
    visible = drawn_in_python(annealing, 13)
    with torch.no_grad():
        given = {"lengths": None if lengths is None else torch.tensor(lengths)}
        packed = model(tokens, documents=ids_of(LAYOUT), annealing=annealing, **given)
        for row, start, end in spans_of(LAYOUT, lengths):
            part = visible[start:end, start:end]
            alone, _ = opened_by_reference(model, tokens[row : row + 1, start:end], part, monkeypatch)
            assert (packed[row, start:end] - alone[0]).abs().max() <= 1e-10
        whole = model(tokens, annealing=annealing, **given)
        for row, length in enumerate(lengths or [13] * 3):
            alone, _ = opened_by_reference(model, tokens[row : row + 1, :length], visible[:length, :length], monkeypatch)
            assert (whole[row, :length] - alone[0]).abs().max() <= 1e-10


@pytest.mark.parametrize("name", ["register", "register-2-end-zero"])
def test_registers_see_no_padding_while_attention_opens(name):
    model, tokens, annealing = small_model(**VARIANTS[name]), small_tokens(3, 13), Annealing(0.3, 5)
    with torch.no_grad():
        together = model(tokens, annealing=annealing, lengths=torch.tensor(LENGTHS))
        for row, length in enumerate(LENGTHS):
            alone = model(tokens[row : row + 1, :length], annealing=annealing)[0]
            assert (together[row, :length] - alone).abs().max() <= 1e-12


def test_the_ends_of_the_opening(variant):
    model, tokens = small_model(dtype=torch.float32, **variant), small_tokens(2, 9)
    with torch.no_grad():
        for share in (1.0, 1, 1.5):
            assert torch.equal(model(tokens, annealing=Annealing(share, 3)), model(tokens))
        closed = model(tokens, annealing=Annealing(0.0, 3))
        for other in (Annealing(0.0, 4), Annealing(-1.0, 3)):
            assert torch.equal(model(tokens, annealing=other), closed)
        if variant.get("n_sinks", 0) == 0:  # then it is the parent's causal attention
            torch.testing.assert_close(closed, model(tokens, causal=True))


def test_an_open_opening_may_go_with_anything():
    model, tokens = small_model(n_sinks=1), small_tokens(2, 9)
    seen = []
    assert torch.equal(model(tokens, annealing=Annealing(1.0, 0), observe=lambda layer, *_: seen.append(layer)), model(tokens))
    assert seen == [0, 1, 2]


def drawn(share, key, n):
    words = noise.pair_words(key, noise.Stream.ANNEALING, n, torch.device("cpu"))
    return Visibility(torch.zeros(1, n, dtype=torch.int32), DrawnAnnealing.draw(share, words)).dense()


def test_one_draw_is_shared_by_all_rows():
    visible = drawn(0.3, 5, 64)
    assert visible.shape == (1, 1, 64, 64)
    assert torch.equal(visible[0, 0], drawn_in_python(Annealing(0.3, 5), 64))
    model, tokens = small_model(n_sinks=1), small_tokens(3, 13)
    with torch.no_grad():
        together = model(tokens, annealing=Annealing(0.3, 5))
        for row in range(3):
            assert (model(tokens[row : row + 1], annealing=Annealing(0.3, 5))[0] - together[row]).abs().max() <= 1e-12
        assert (model(tokens, annealing=Annealing(0.3, 6)) - together).abs().max() > 1e-3


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9])
def test_draws_are_as_frequent_as_the_share_and_independent(share):
    n = 512
    above = torch.ones(n, n, dtype=torch.bool).triu(1)
    first, second = (drawn(share, key, n)[0, 0].double() for key in (1, 2))

    def deviation(values, chance, count):
        return (values.sum() - chance * count).abs() / math.sqrt(chance * (1 - chance) * count)

    n_pairs = int(above.sum())
    assert deviation(first[above], share, n_pairs) < 4
    assert deviation((first == second)[above].double(), share**2 + (1 - share) ** 2, n_pairs) < 4  # two keys are independent
    corner = first[: n // 2, n // 2 :]  # so are neighbouring rows, columns and pairs
    for left, right in ((corner[1:], corner[:-1]), (corner[:, 1:], corner[:, :-1]), (corner[1:, 1:], corner[:-1, :-1])):
        assert deviation(left * right, share**2, left.numel()) < 4
    for sums in (corner.sum(0), corner.sum(1)):
        spread = sums.var() / (share * (1 - share) * (n // 2))
        assert abs(spread - 1) < 5 * math.sqrt(2 / (n // 2))


def test_what_is_seen_stays_seen_as_the_share_grows():
    masks = [drawn(share, 9, 64) for share in (0.0, 1e-9, 0.2, 0.7, 1 - 1e-12)]
    for smaller, larger in itertools.pairwise(masks):
        assert (larger | ~smaller).all()
    assert torch.equal(masks[0][0, 0], torch.ones(64, 64, dtype=torch.bool).tril())
    assert masks[-1].all()


def test_pair_bits_are_those_of_python():
    words = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 123456789], dtype=torch.int32)
    bits = pair_bits(words[:, None], words)
    assert bits.dtype == torch.int32
    for i, row in enumerate(words.tolist()):
        for j, column in enumerate(words.tolist()):
            assert bits[i, j].item() % 2**32 == mix32((row ^ column) % 2**32)


# -- blocks for the fused kernel ------------------------------------------------------------------------------------------


def listed(counts, columns):
    """Turn block lists into a boolean (B, rows, columns)."""
    chosen = torch.zeros(*columns.shape, dtype=torch.bool)
    chosen.scatter_(3, columns.long(), torch.arange(columns.shape[3]) < counts[..., None])
    return chosen[:, 0]


def computed_by(blocks):
    """Return the pairs (B, T, T + S) that a kernel computes from the lists; check that forward and backward lists agree."""
    n_queries, n_keys = blocks.seq_lengths
    batch = blocks.kv_num_blocks.shape[0]
    index = [torch.arange(n) for n in (batch, n_queries, n_keys)]
    rule = blocks.mask_mod(index[0][:, None, None], None, index[1][None, :, None], index[2][None, None])

    def spread(chosen):
        return chosen.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :n_queries, :n_keys]

    partial, whole = listed(blocks.kv_num_blocks, blocks.kv_indices), listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (partial & whole).any()
    assert torch.equal(listed(blocks.q_num_blocks, blocks.q_indices), partial.mT)
    assert torch.equal(listed(blocks.full_q_num_blocks, blocks.full_q_indices), whole.mT)
    return (spread(partial) & rule) | spread(whole), partial, whole


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("share", [None, 0.0, 0.3])
@pytest.mark.parametrize(
    ("n_tokens", "n_sinks", "n_registers"), [(512, 0, 0), (512, 1, 0), (700, 4, 0), (129, 1, 0), (5, 1, 0), (600, 0, 2)]
)
def test_blocks_compute_the_dense_rule(n_tokens, n_sinks, n_registers, share, padded):
    rule = random_rule(2, n_tokens, share, n_registers, padded)
    found, partial, whole = computed_by(block_mask(rule, 2, n_sinks))
    expected = rule.dense()[:, 0]
    assert torch.equal(found[..., : expected.shape[2]], expected)
    sinks, filling = found[..., expected.shape[2] :].split([n_sinks, found.shape[2] - expected.shape[2] - n_sinks], dim=2)
    assert sinks.all()
    assert not filling[(rule.documents != PADDING).expand(2, -1)].any()
    assert found.diagonal(dim1=1, dim2=2).all()
    if n_tokens == 512:  # hidden blocks are skipped
        assert whole.any() or padded
        assert not (partial | whole).all()


def test_one_row_of_documents_serves_a_batch():
    rule = random_rule(1, 300, 0.3)
    assert torch.equal(computed_by(block_mask(rule, 3, 1))[0][2, :, :300], rule.dense()[0, 0])


@pytest.mark.parametrize("share", [None, 0.3])
def test_blocks_hold_no_tokens_by_tokens_tensor(share):
    rule = random_rule(2, 2048, share)
    with LargestTensor() as largest:
        block_mask(rule, 2, 1)
    assert largest.numel <= 8 * 2048
    with LargestTensor() as largest:
        rule.dense()
    assert largest.numel >= 2048 * 2048


GIVEN = {
    "documents": {"documents": ids_of(LAYOUT)},
    "annealing": {"annealing": Annealing(0.3, 5)},
    "all": {"documents": ids_of(LAYOUT), "annealing": Annealing(0.3, 5), "lengths": torch.tensor(LENGTHS)},
}


@uses_flex
@pytest.mark.parametrize("form", ["auto", "flex"])
def test_compiled_blocks_take_new_documents_and_draws_without_compiling_anew(form):
    flags = {**PACKABLE["end-shift"], "n_layers": 2}
    model, plain = small_model(attention=form, **flags), small_model(**flags)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    tokens = small_tokens(3, 13)
    torch._dynamo.utils.counters.clear()
    for step in range(3):
        given = {"documents": ids_of(LAYOUT[step:] + LAYOUT[:step]), "annealing": Annealing(0.1 + 0.3 * step, step)}
        out, expected = model(tokens, **given), plain(tokens, **given)
        assert (out - expected).abs().max() <= 1e-10
        out.square().sum().backward()
        expected.square().sum().backward()
    assert_same_gradients(gradients(model), gradients(plain), 1e-9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@uses_flex
def test_whole_model_has_no_graph_break():
    explained = torch._dynamo.explain(small_model(**PACKABLE["end-shift"], n_layers=2))(small_tokens(3, 13), **GIVEN["all"])
    assert explained.graph_break_count == 0, explained.break_reasons


# -- choice and refusals --------------------------------------------------------------------------------------------------


def test_flex_takes_heads_of_a_power_of_two_on_a_gpu():
    taken = {width: supports_flex(small_config(d_model=6 * width), "cuda", torch.bfloat16) for width in (8, 16, 64, 96)}
    assert taken == {8: False, 16: True, 64: True, 96: False}
    assert not supports_flex(small_config(d_model=6 * 64), "cuda", torch.float64)
    assert not supports_flex(small_config(d_model=6 * 64), "cpu", torch.float32)


def test_what_cannot_be_is_refused():
    model, tokens, ids = small_model(n_sinks=1), small_tokens(3, 13), ids_of(LAYOUT)
    for options, given in (({"documents": ids}, "documents"), ({"annealing": Annealing(0.5, 0)}, "annealing")):
        for flag, value in (("causal", True), ("cache", object()), ("observe", lambda *_: None)):
            with pytest.raises(ValueError, match=f"{given}= and {flag}= do not go together"):
                model(tokens, **options, **{flag: value})
    for wrong in (ids[:, :5], ids[0], ids.double()):
        with pytest.raises(ValueError, match="documents: give an integer for each of the tokens"):
            model(tokens, documents=wrong)
    for name in ("register", "register-2-end-zero"):
        with pytest.raises(ValueError, match="a register attends to every document"):
            small_model(**VARIANTS[name])(tokens, documents=ids)
    with pytest.raises(ValueError, match="NaN"):
        model(tokens, annealing=Annealing(math.nan, 0))
