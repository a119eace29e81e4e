"""The inference kernels against plain operations: on a GPU, or by Triton's interpreter."""

import pytest
import torch

from comparing import DEVICE, assert_rounded_alike, random
from sinkdlm.fast import Plan, runner
from sinkdlm.fast import quantized as float8
from sinkdlm.kernels import draw
from sinkdlm.kernels import inference as kernels
from sinkdlm.kernels import sampling as sampling_kernels
from sinkdlm.kernels.span_attention import attend_to_ends
from sinkdlm.model.attention import attend
from sinkdlm.model.lane import Lane
from sinkdlm.model.positions import Rotation
from sinkdlm.noise import Stream, counter, hash_words
from sinkdlm.sampling import drawing, generate, policy_of
from sinkdlm.sampling.prefix_cache import BlockCache
from small_models import VARIANTS, small_config, small_model, small_tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),  # the interpreter's log of 0
]

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no matrices in bfloat16


@pytest.fixture
def fused(monkeypatch):
    """Switch between kernels and plain operations, on any device."""

    def switch(on):
        monkeypatch.setattr(runner, "load_kernels", lambda: kernels if on else None)
        monkeypatch.setattr(float8, "find_kernels", lambda _: kernels if on else None)
        monkeypatch.setattr(sampling_kernels, "find_kernels", lambda _: kernels if on else None)

    return switch


@pytest.mark.parametrize(
    ("n_heads", "n_kv", "width", "n_sinks", "batch", "n_tokens", "by_row"),
    [(3, 3, 16, 1, 2, 5, False), (4, 2, 24, 0, 3, 7, False), (9, 3, 64, 2, 2, 4, True)],
)
@pytest.mark.parametrize("moved", [False, True])
def test_heads_are_split_rotated_and_placed(n_heads, n_kv, width, n_sinks, batch, n_tokens, by_row, moved):
    config = small_config(n_heads=n_heads, n_kv_heads=n_kv, d_model=n_heads * width)
    heads = random(batch, n_tokens, n_heads + 2 * n_kv, width)
    positions, sinks = torch.arange(n_tokens, device=DEVICE) + n_sinks, torch.arange(n_sinks, device=DEVICE)
    if by_row:
        rows = torch.arange(batch, device=DEVICE)[:, None]
        positions, sinks = positions + rows, sinks + rows + n_tokens
    rotation, sink_rotation = (Rotation.at(at, config, torch.float32) for at in (positions, sinks))
    lane = Lane(random(1, n_sinks, n_kv, width, seed=1), random(1, n_sinks, n_kv, width, seed=2)) if n_sinks else None
    q, k, v = heads.split([n_heads, n_kv, n_kv], dim=-2)
    q, k, v = rotation.apply(q).transpose(1, 2), rotation.apply(k).transpose(1, 2), v.transpose(1, 2)
    if not moved:
        into, start = None, None
    else:
        into = tuple(torch.full((batch, n_kv, n_sinks + n_tokens + 6, width), 7.0, device=DEVICE) for _ in range(2))
        start = torch.tensor(2, device=DEVICE)
    found_q, *found = kernels.place_heads(heads, n_heads, rotation, lane, sink_rotation if n_sinks else None, into, start)
    torch.testing.assert_close(found_q, q)
    first = n_sinks + 2 * moved
    for mine, content in zip(found, (k, v), strict=True):
        torch.testing.assert_close(mine[:, :, first : first + n_tokens], content)
        if moved:
            assert (mine[:, :, n_sinks:first] == 7).all()
            assert (mine[:, :, first + n_tokens :] == 7).all()
    if lane is not None:
        torch.testing.assert_close(found[0][:, :, :n_sinks], sink_rotation.apply(lane.k).transpose(1, 2).expand(batch, -1, -1, -1))
        torch.testing.assert_close(found[1][:, :, :n_sinks], lane.v.transpose(1, 2).expand(batch, -1, -1, -1))


@pytest.mark.parametrize(
    ("heads", "n_kv", "width", "n_tokens", "length", "has_logit", "dtype"),
    [(2, 2, 16, 5, 70, False, torch.float32), (6, 2, 24, 7, 131, True, torch.float32), (4, 1, 16, 17, 40, False, HALF)],
)
def test_a_span_attends_to_the_keys_before_its_ends(heads, n_kv, width, n_tokens, length, has_logit, dtype):
    """One end for all, one a row, one a query; in buffers longer than what is seen, with garbage behind; alone as among others."""
    batch, beyond = 3, 9
    q = random(batch, heads, n_tokens, width, dtype=dtype)
    k, v = (random(batch, n_kv, length + beyond, width, dtype=dtype) for _ in range(2))
    k[:, :, length:] = v[:, :, length:] = torch.nan
    logit = random(heads) if has_logit else None
    of_queries = 1 + torch.arange(batch * n_tokens, device=DEVICE).view(batch, 1, n_tokens, 1) * 5 % length
    for ends in (torch.full((1, 1, 1, 1), length, device=DEVICE), of_queries[:, :, :1], of_queries):
        found = attend_to_ends(q, k[:, :, :length], v[:, :, :length], ends, logit)
        given = (part[:, :, :length].float().repeat_interleave(heads // n_kv, dim=1) for part in (k, v))
        wanted = attend(q.float(), *given, sink_logit=logit, visible=torch.arange(length, device=DEVICE) < ends)
        rounding = {} if dtype == torch.float32 else {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps}
        torch.testing.assert_close(found.float(), wanted, **rounding)
        own = ends[1:2] if ends.shape[0] > 1 else ends
        assert torch.equal(attend_to_ends(q[1:2], k[1:2], v[1:2], own, logit), found[1:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(dtype):
    gate_up = 3 * random(2, 2, 2 * 1100, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(kernels.swiglu(gate_up), torch.nn.functional.silu(gate) * up)


def test_rows_in_float8_are_those_of_plain_operations(fused):
    x = 10 * random(3, 2100, dtype=torch.bfloat16)
    x[2] = 0
    fused(False)
    expected, scale = float8.round_rows(x)
    found, found_scale = kernels.to_float8(x, float8.DTYPE)
    torch.testing.assert_close(found_scale, scale)
    assert_rounded_alike(found, expected)


@pytest.mark.parametrize(("rows", "vocab", "dtype"), [(5, 7, torch.float32), (5, 2100, torch.float32), (4, 1500, torch.bfloat16)])
@pytest.mark.parametrize(("temperature", "tempered"), [(0.0, False), (1.0, False), (0.1, False), (0.7, True)])
def test_tokens_are_chosen_as_by_plain_operations(rows, vocab, dtype, temperature, tempered):
    logits = 3 * random(rows, vocab, dtype=dtype)
    logits[:, 2] = -torch.inf
    keys = hash_words(1, int(Stream.SAMPLING), torch.arange(rows, device=DEVICE)) if temperature else None
    tokens, odds = draw.choose(logits, keys, temperature, tempered)
    judged = logits.float()
    drawn = judged / temperature if temperature else judged
    noisy = drawing.add_noise(drawn, keys, counter(vocab, logits.device)) if temperature else drawn
    expected = noisy.argmax(-1)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(odds, drawing.log_odds_(drawn if tempered else judged, expected))


def test_one_possible_token_is_certain():
    logits = torch.full((2, 1100), -torch.inf, device=DEVICE)
    logits[:, 1030] = 1.0
    tokens, odds = draw.choose(logits, None, 0.0, False)
    assert tokens.tolist() == [1030, 1030]
    assert (odds == torch.inf).all()


def test_equal_logits_go_to_the_first():
    logits = torch.zeros(2, 1100, device=DEVICE)
    logits[1, [3, 1050]] = 1.0
    assert draw.choose(logits, None, 0.0, False)[0].tolist() == [0, 3]


def forced_model(**flags):
    """A model that runs by kernels on any device."""
    model = small_model(dtype=torch.float32, **flags).to(DEVICE)
    model.runner = runner.FastRunner(Plan(), force="inference")
    return model


# With sinks, without, with a logit for one, and with biases: the others differ in nothing that a kernel sees.
SEEN = ["sinks-2-end-zero-gate", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vanilla", "logit-gate", "parent"))]


@pytest.mark.parametrize("name", SEEN)
def test_a_model_with_kernels_is_the_model(name, fused):
    """Whole rows, rows of different lengths, selected positions, and spans of cached rows, which begin and end alike or not."""
    model, tokens = forced_model(n_layers=2, **VARIANTS[name]), small_tokens(2, 9).to(DEVICE)
    lengths, wanted = torch.tensor([9, 6], device=DEVICE), torch.tensor([[0, 4], [5, 1]], device=DEVICE)
    changed = tokens.clone()
    changed[:, 3:7] = 1

    def outputs(on):
        fused(on)
        cache = BlockCache(9)
        with model.inference():
            found = [model(tokens), model(tokens, lengths=lengths)[1, :6], model(tokens, select=wanted), model(tokens, cache=cache)]
            cache.start = torch.tensor(2, device=DEVICE)
            found.append(model(changed[:, 2:7], cache=cache))
            cache.place(*(torch.tensor(places, device=DEVICE)[:, None] for places in ([2, 4], [3, 4], [6, 9])))
            return [*found, model(changed[:, 1:6], cache=cache), *(cache.read(layer)[0] for layer in range(2))]

    for mine, plain in zip(outputs(True), outputs(False), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_samples_are_the_same_with_kernels(fused):
    model, prompt = forced_model(n_sinks=1), small_tokens(2, 3).to(DEVICE)
    drawn_order = {"order_temperature": 0.2, "last_ids": [3]}
    for options in ({"temperature": 0.7}, {"config": "fast", "block": 4}, {"guidance": 0.5}, drawn_order):
        found = []
        for on in (True, False):
            fused(on)
            with model.inference():
                found.append(generate(model.denoiser(), prompt=prompt, length=8, mask_id=11, **options))
        assert torch.equal(found[0].tokens, found[1].tokens), options


@pytest.mark.parametrize("options", [{"order": "entropy"}, {"top_k": 3, "temperature": 1.0}])
def test_what_the_kernel_does_not_know_is_left_to_plain_operations(options, fused):
    fused(True)
    logits = random(2, 3, 50)
    keys = hash_words(1, torch.arange(6, device=DEVICE).view(2, 3)) if "temperature" in options else None
    expected = drawing.score_candidates(policy_of("llada", **options), logits.double(), keys)
    for mine, plain in zip(drawing.score_candidates(policy_of("llada", **options), logits, keys), expected, strict=True):
        torch.testing.assert_close(mine.double(), plain.double(), rtol=1e-4, atol=1e-4)
