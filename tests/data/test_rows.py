import json
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.kills import write_set

from sinkdlm import UserError
from sinkdlm.config.recipe import DataSection
from sinkdlm.data.rows import Rows, deal, open_rows, rows_of
from sinkdlm.data.shards import Shard, Split, open_split

IDS = {"vocab_size": 64, "mask_id": 64}


def flat_set(folder: Path, sizes: list[int], name: str = "s") -> tuple[Split, np.ndarray]:
    """A split of several shards that holds 0, 1, 2 ... modulo 50."""
    folder.mkdir(parents=True, exist_ok=True)
    stream = np.arange(sum(sizes)) % 50
    shards, start = [], 0
    for number, size in enumerate(sizes):
        path = folder / f"{name}-{number}.bin"
        stream[start : start + size].astype("<u2").tofile(path)
        shards.append(Shard(path, size, np.dtype("<u2")))
        start += size
    return Split(folder, shards, fingerprint="x", eos_id=49), stream


def rows_with(splits, shares=None, seed=0, **section) -> Rows:
    return Rows(splits, shares or [1.0] * len(splits), DataSection(**section), seed=seed, **IDS)


# -- order ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [[1.0], [1.0, 1.0], [0.7, 0.2, 0.1], [5.0, 1.0, 3.0, 1.0], [1e-3, 1.0]])
def test_sets_get_their_shares_and_every_turn_once(shares):
    samples = np.arange(20_000)
    chosen, turns = deal(samples, shares)
    total = sum(shares)
    for number, share in enumerate(shares):
        here = turns[chosen == number]
        assert np.array_equal(here, np.arange(len(here)))  # without gaps, in order
        for until in (100, 1_000, 20_000):
            count = int((chosen[:until] == number).sum())
            assert abs(count - until * share / total) <= len(shares)
    some = np.array([17_321, 3, 9_999])
    assert [array.tolist() for array in deal(some, shares)] == [chosen[some].tolist(), turns[some].tolist()]


def test_each_pass_reads_every_row_once_in_an_order_of_its_own():
    turns = np.arange(3 * 101)
    rows = rows_of(turns, 101, seed=3, number=0).reshape(3, 101)
    assert all(sorted(epoch) == list(range(101)) for epoch in rows.tolist())
    assert len({tuple(epoch) for epoch in rows.tolist()}) == 3
    assert rows_of(turns[40:50], 101, seed=3, number=0).tolist() == rows.reshape(-1)[40:50].tolist()
    assert rows_of(turns, 101, seed=4, number=0).tolist() != rows.reshape(-1).tolist()
    assert rows_of(turns, 101, seed=3, number=1).tolist() != rows.reshape(-1).tolist()


def test_a_batch_is_a_function_of_its_sample_numbers(tmp_path):
    first, _ = flat_set(tmp_path / "a", [333, 20, 501])
    second, _ = flat_set(tmp_path / "b", [400])
    rows = rows_with([first, second], [0.7, 0.3], length=16, random_lengths=0.2, documents="confined")
    whole = rows.batch(np.arange(64))
    singles = [rows.batch(np.array([n])) for n in range(64)]
    place = {int(n): slot for slot, n in enumerate(whole.samples)}
    assert sorted(place) == list(range(64))
    assert whole.lengths is not None
    short = 0
    for n, single in enumerate(singles):
        slot = place[n]
        assert torch.equal(whole.tokens[slot], single.tokens[0])
        assert torch.equal(whole.documents[slot], single.documents[0])
        length = 16 if single.lengths is None else int(single.lengths[0])
        assert int(whole.lengths[slot]) == length
        assert whole.maskable[slot].tolist() == [position < length for position in range(16)]
        short += length < 16
    assert 4 < short < 26
    assert (whole.lengths < 16).nonzero().min() == 64 - short  # short rows come last
    assert whole.rows(slice(0, 64 - short)).lengths is None


# -- rows -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[100], [33, 1, 66], [7] * 15])
def test_rows_are_cut_across_shards(tmp_path, sizes):
    split, stream = flat_set(tmp_path, sizes)
    assert split.n_tokens == len(stream)
    for start, stop in ((0, len(stream)), (30, 40), (32, 35), (5, 5), (len(stream) - 1, len(stream))):
        assert split.read(start, stop).tolist() == stream[start:stop].tolist()
    with pytest.raises(IndexError):
        split.read(0, len(stream) + 1)
    rows = rows_with([split], length=8)
    assert rows.n_rows == len(stream) // 8
    seen = {tuple(row) for row in rows.batch(np.arange(rows.n_rows)).tokens.tolist()}
    assert seen == {tuple(stream[i : i + 8].tolist()) for i in range(0, 8 * rows.n_rows, 8)}


def test_stride_skips_a_token_between_rows_as_smdm_does(tmp_path):
    split, stream = flat_set(tmp_path, [100])
    rows = rows_with([split], length=8, stride=9)
    assert rows.n_rows == (100 - 8) // 9 + 1
    starts = {tuple(row) for row in rows.batch(np.arange(rows.n_rows)).tokens.tolist()}
    assert starts == {tuple(stream[i : i + 8].tolist()) for i in range(0, 9 * rows.n_rows, 9)}


def test_documents_end_with_eos(tmp_path):
    split, _ = flat_set(tmp_path, [200])
    batch = rows_with([split], length=100, documents="confined").batch(np.arange(2))
    for tokens, ids in zip(batch.tokens, batch.documents, strict=True):
        ends = (tokens == 49).nonzero().flatten().tolist()
        assert len(ends) >= 2
        assert ids.diff().nonzero().flatten().tolist() == [end for end in ends if end < 99]
    bare = Split(split.folder, split.shards, fingerprint="x")
    with pytest.raises(UserError, match=r"needs data\.eos"):
        rows_with([bare], length=100, documents="confined")
    assert rows_with([bare], length=100, documents="confined", eos=49).eos == 49


def example_set(folder: Path) -> Split:
    """Three examples: (prompt, total) = (2, 5), (1, 4), (3, 12)."""
    folder.mkdir()
    np.arange(21).astype("<u2").tofile(folder / "train-00000.bin")
    np.array([[2, 5], [1, 4], [3, 12]], dtype="<u4").tofile(folder / "train-00000.rows")
    shard = {"file": "train-00000.bin", "tokens": 21, "documents": 3, "sha256": "?", "rows": "train-00000.rows", "rows_sha256": "?"}
    part = {"tokens": 21, "documents": 3, "highest_id": 20, "shards": [shard]}
    none = {"tokens": 0, "documents": 0, "highest_id": 0, "shards": []}
    index = {"format": "sinkdlm-tokens", "version": 1, "kind": "examples", "dtype": "uint16", "eos_id": 63, "settings": {}}
    mark = {"sha256": "t", "vocabulary_sha256": "v", "rows": 64, "source": ""}
    (folder / "index.json").write_text(json.dumps({**index, "tokenizer": mark, "splits": {"train": part, "validation": none}}))
    return open_split(folder)


@pytest.mark.parametrize("padding", ["train", "ignore"])
def test_examples_mask_the_response_alone(tmp_path, padding):
    split = example_set(tmp_path / "e")
    rows = rows_with([split], length=8, padding=padding)
    assert (rows.n_rows, rows.sets[0].n_too_long) == (2, 1)
    batch = rows.batch(np.arange(2))
    found = {tuple(tokens): maskable for tokens, maskable in zip(batch.tokens.tolist(), batch.maskable.tolist(), strict=True)}
    first, second = (0, 1, 2, 3, 4, 63, 63, 63), (5, 6, 7, 8, 63, 63, 63, 63)
    assert set(found) == {first, second}
    end = (8, 8) if padding == "train" else (5, 4)
    assert found[first] == [2 <= position < end[0] for position in range(8)]
    assert found[second] == [1 <= position < end[1] for position in range(8)]
    if padding == "train":
        assert batch.lengths is None
        assert batch.count_scored() == 6 + 7
    else:
        assert sorted(batch.lengths.tolist()) == [4, 5]
        assert batch.count_scored() == 3 + 3


def test_an_example_is_one_document_padding_and_all(tmp_path):
    text, _ = flat_set(tmp_path / "t", [200])
    examples = example_set(tmp_path / "e")
    examples.eos_id = text.eos_id = 3  # which stands inside the first example
    rows = rows_with([examples, text], length=8, documents="confined")
    batch = rows.batch(np.arange(60))
    example = batch.maskable[:, 0] == 0  # prompts are not maskable
    assert 20 < int(example.sum()) < 40
    assert int(batch.documents[example].max()) == 0
    assert int(batch.documents[~example].max()) > 0


@pytest.mark.parametrize("documents", ["joined", "confined"])
def test_a_shifted_model_is_not_asked_for_first_tokens(tmp_path, documents):
    split, _ = flat_set(tmp_path, [200])
    batch = rows_with([split], length=40, documents=documents).batch(np.arange(5))
    firsts = 5 if documents == "joined" else int((batch.documents[:, -1] + 1).sum())
    assert batch.count_scored() == 200
    assert batch.count_scored(shifted=True) == 200 - firsts


def test_a_set_may_have_more_shards_than_files_may_be_open(tmp_path):
    split, stream = flat_set(tmp_path, [10] * 400)
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    assert split.read(0, 4000).tolist() == stream.tolist()
    if before:
        assert len(list(Path("/proc/self/fd").iterdir())) - before < 100


def test_a_tiny_set_is_ordered_as_quickly_as_a_large_one():
    began = time.thread_time()  # CPU time of this thread, without other processes
    assert set(rows_of(np.arange(500), 1, seed=77, number=0).tolist()) == {0}
    small = rows_of(np.arange(500), 5, seed=77, number=0).reshape(-1, 5)
    assert time.thread_time() - began < 2
    assert all(sorted(epoch) == list(range(5)) for epoch in small.tolist())
    assert len({tuple(epoch) for epoch in small.tolist()}) > 30


def test_examples_that_do_not_fit_their_file_are_refused(tmp_path):
    split = example_set(tmp_path / "e")
    np.array([[2, 5], [1, 4], [3, 11]], dtype="<u4").tofile(tmp_path / "e" / "train-00000.rows")
    with pytest.raises(UserError, match=r"does not fit train-00000\.bin"):
        rows_with([split], length=8)


# -- formats of others --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_smdm_packed_files_are_read_as_they_are(tmp_path, code, dtype):
    for number in range(2):
        tokens = (np.arange(50) + 100 * number).astype(dtype)
        header = b"LITPKDS" + struct.pack("<Q", 1) + struct.pack("<B", code) + struct.pack("<Q", 50)
        (tmp_path / f"chunk_{number}.bin").write_bytes(header + tokens.tobytes())
    split = open_split(tmp_path)
    assert split.n_tokens == 100
    assert split.read(48, 52).tolist() == [48, 49, 100, 101]
    assert (split.eos_id, split.tokenizer, split.n_documents) == (None, None, None)
    assert open_split(tmp_path, "validation").n_tokens == 0
    (tmp_path / "chunk_0.bin").write_bytes((tmp_path / "chunk_0.bin").read_bytes()[:-1])
    with pytest.raises(UserError, match=r"chunk_0\.bin: truncated"):
        open_split(tmp_path)


@pytest.mark.parametrize("width", [2, 4])
def test_datatrove_files_are_read_as_they_are(tmp_path, width):
    tokens = np.arange(30).astype(f"<u{width}")
    tokens.tofile(tmp_path / "00000_x.ds")
    np.array([10, 30], dtype="<u8").tofile(tmp_path / "00000_x.ds.index")
    (tmp_path / "00000_x.ds.metadata").write_text(f"some/tokenizer|{width}\n30\n0.0K")
    split = open_split(tmp_path)
    assert (split.n_tokens, split.n_documents) == (30, 2)
    assert split.read(9, 12).tolist() == [9, 10, 11]
    (tmp_path / "00000_x.ds.index").unlink()
    assert open_split(tmp_path).n_tokens == 30
    (tmp_path / "00000_x.ds").write_bytes(b"123")
    with pytest.raises(UserError, match="damaged or unfinished"):
        open_split(tmp_path)


def test_checksums_are_compared(tmp_path):
    folder = write_set(tmp_path / "s", tokens=1000)
    assert list(open_split(folder).verify()) == [2000]
    content = bytearray((folder / "train-00000.bin").read_bytes())
    content[100] ^= 1
    (folder / "train-00000.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"train-00000\.bin: damaged"):
        list(open_split(folder).verify())


def test_sets_of_different_tokenizers_do_not_mix(tmp_path):
    first, second = write_set(tmp_path / "a", tokens=1000), write_set(tmp_path / "b", tokens=1000, seed=1)
    section = DataSection(sets={str(first): 1.0, str(second): 2.0}, length=16)
    with pytest.raises(UserError, match="prepared with different tokenizers"):
        open_rows(section, "train", seed=0, **IDS)
    index = json.loads((second / "index.json").read_text())
    index["tokenizer"]["sha256"] = json.loads((first / "index.json").read_text())["tokenizer"]["sha256"]
    (second / "index.json").write_text(json.dumps(index))
    assert open_rows(section, "train", seed=0, **IDS).n_rows == 2 * (1000 // 16)
    assert open_rows(section, "validation", seed=0, **IDS).n_rows == 2 * (125 // 16)


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(UserError, match="no token shards"):
        open_split(tmp_path)
    with pytest.raises(UserError, match="all examples are longer than"):
        rows_with([example_set(tmp_path / "e")], length=3)
    with pytest.raises(UserError, match="fill no row of"):
        rows_with([flat_set(tmp_path / "a", [7])[0]], length=8)
