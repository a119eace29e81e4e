import pytest
import torch

from sinkdlm.noise import Stream, golden_times, hash_words, permute, random_bits, uniform


def splitmix(word):
    """The published finaliser on Python integers."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def test_mixer_is_splitmix64():
    # First outputs of SplitMix64 seeded with 0, as its authors' reference code gives them.
    assert splitmix(0) == 0xE220A8397B1DCDAF
    for word in (0, 1, 2**31, 2**63, 2**64 - 1):
        assert hash_words(word) == splitmix(splitmix(word))
        signed = word - 2**64 if word >= 2**63 else word
        assert int(hash_words(torch.tensor(signed))) % 2**64 == splitmix(splitmix(word))


def test_keys_mix_as_integers_and_as_tensors_alike():
    expected = hash_words(7, 3, 5, 11)
    for kinds in range(16):
        keys = [torch.tensor(key) if kinds >> i & 1 else key for i, key in enumerate((7, 3, 5, 11))]
        assert int(hash_words(*keys)) % 2**64 == expected
    assert len({hash_words(1, 2), hash_words(2, 1), hash_words(1), hash_words(1, 2, 0)}) == 4


def test_numbers_do_not_depend_on_batch_or_order():
    whole = uniform(3, Stream.MASK, torch.arange(50)[:, None], torch.arange(40))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(3, Stream.MASK, order[:, None], torch.arange(40)), whole[order])
    for sample, position in ((0, 0), (17, 3), (49, 39)):
        assert uniform(3, Stream.MASK, torch.tensor([sample]), torch.tensor([position])) == whole[sample, position]
        assert uniform(3, Stream.MASK, sample, position) == whole[sample, position]
    assert not torch.equal(uniform(4, Stream.MASK, torch.arange(50)), uniform(3, Stream.MASK, torch.arange(50)))
    assert not torch.equal(uniform(3, Stream.TIME, torch.arange(50)), uniform(3, Stream.MASK, torch.arange(50)))


def test_numbers_are_these_forever():
    """Golden words: a change here changes every mask of every run."""
    assert hash_words(3407, int(Stream.MASK), 12, 34) == GOLDEN_WORD
    assert uniform(3407, Stream.MASK, 12, 34).item() == GOLDEN_WORD // 2**12 / 2**52 + 2**-53
    assert golden_times(3407, torch.tensor([0, 10**15])).tolist() == GOLDEN_TIMES


GOLDEN_WORD = 0x25975C1682A1267C
GOLDEN_TIMES = [0.06916463007406726, 0.9173176299951099]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_are_uniform_and_open(dtype):
    u = uniform(0, Stream.SAMPLING, torch.arange(1000)[:, None], torch.arange(1000), dtype=dtype).double()
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.histc(u, bins=100, min=0, max=1)
    chi_square = ((counts - 1e4) ** 2 / 1e4).sum()
    assert 40 < chi_square < 180  # 99 degrees of freedom
    for axis in (0, 1):  # neighbours in either key are uncorrelated
        a, b = u.narrow(axis, 0, 999), u.narrow(axis, 1, 999)
        assert abs(((a - 0.5) * (b - 0.5)).mean() * 12) < 4 / 1e3


def test_bits_are_balanced():
    words = hash_words(1, torch.arange(200_000))
    for bit in range(64):
        assert abs(((words >> bit) & 1).double().mean() - 0.5) < 4 * 0.5 / 200_000**0.5
    assert random_bits(5, 1, torch.arange(1000)).max() < 32


@pytest.mark.parametrize("n", [1, 2, 3, 1000, 2**18 + 7])
def test_permutation_is_a_bijection(n):
    order = permute(torch.arange(n), n, 7, 1)
    assert torch.equal(order.sort().values, torch.arange(n))
    some = torch.arange(n)[:: max(1, n // 50)]
    assert torch.equal(permute(some, n, 7, 1), order[some])
    if n >= 1000:
        for other in (permute(torch.arange(n), n, 7, 2), permute(torch.arange(n), n, 8, 1)):
            assert (other == order).double().mean() < 20 / n
        moved = (order - torch.arange(n)).double() / n
        assert abs(moved.abs().mean() - 1 / 3) < 0.03  # as for a random permutation


def test_small_permutations_take_every_order():
    seen = {tuple(permute(torch.arange(3), 3, key).tolist()) for key in range(200)}
    assert len(seen) == 6


def test_permutation_refuses_what_is_outside():
    with pytest.raises(IndexError, match=r"outside 0\.\.9"):
        permute(torch.tensor([10]), 10, 0)
    with pytest.raises(ValueError, match="at least one"):
        permute(torch.tensor([0]), 0, 0)


def test_times_fill_equal_bins_in_every_window():
    for seed, start in ((0, 0), (1, 10**9), (2, 10**15)):
        t = golden_times(seed, start + torch.arange(20_000))
        assert t.min() > 0
        assert t.max() < 1
        bins = (t * 64).long().unfold(0, 64, 1)  # every run of 64 consecutive samples
        counts = torch.nn.functional.one_hot(bins, 64).sum(1)
        assert counts.max() <= 2
        assert counts.min() >= 0
        assert (counts == 1).double().mean() > 0.5


def test_keys_must_be_integers():
    with pytest.raises(TypeError, match="integers"):
        hash_words(torch.tensor([0.5]))
