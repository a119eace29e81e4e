from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from evaluated import LETTERS, tiny_tokenizer
from sinkdlm.analysis.figures import shown
from sinkdlm.analysis.kinds import KINDS, classify, labels, texts_of
from sinkdlm.interop.tokenizer import read_tokenizer_at

ROOT = Path(__file__).parents[2]
FOLDERS = [folder / "shared" / "data" / "tokenizers" for folder in (ROOT, ROOT.parent)]  # in a checkout, or beside it
TEXT = "The cat, on a mat;  it\tsat.\n\nNaïve 东 … 12 + 34 = 46!\r\n\x07"


def byte_level():
    """Byte-level BPE with every byte, a marker that is not called special, and a run of spaces added to the vocabulary."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    backend.add_tokens([AddedToken("<|fill|>", special=False), AddedToken("        ", normalized=False), AddedToken("cafés")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def sentencepiece():
    """As SentencePiece models with byte fallback come out of transformers."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "the", ".", "▁.", "▁(", "...", "▁2", "é", "▁été", "t", "h", "e", "th", "▁t", "…", "+", "\n"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"), vocabulary


def named(tokenizer, *ids, n_ids=None, mask_id=None):
    n_ids = n_ids or max(tokenizer.get_vocab().values()) + 2
    kinds = classify(tokenizer, n_ids, n_ids - 1 if mask_id is None else mask_id)
    assert kinds.shape == (n_ids,)
    return [KINDS[kinds[index]] for index in ids]


def test_byte_level_tokens_are_judged_by_the_bytes_they_stand_for():
    tokenizer = byte_level()
    vocabulary = tokenizer.get_vocab()
    expected = {
        "Ġ": "space",
        "Ċ": "space",
        "ĉ": "space",
        "č": "space",
        "        ": "space",
        ".": "punctuation",
        "+": "punctuation",
        "Ġ=": "punctuation",
        "Ġ+": "punctuation",
        "a": "word",
        "7": "word",
        "Ġ12": "word",
        "The": "word",
        "Ã": "word",  # half of é
        "ä": "word",  # a third of 东
        "ć": "special",  # a bell
        "Ā": "special",  # a null
        "<|end|>": "special",
        "<|fill|>": "special",
        "cafés": "word",
    }
    assert dict(zip(expected, named(tokenizer, *(vocabulary[token] for token in expected)), strict=True)) == expected
    assert texts_of(tokenizer, [vocabulary["cafés"], vocabulary["Ġ12"]]) == ["cafés".encode(), b" 12"]


def test_sentencepiece_tokens_and_byte_fallback():
    tokenizer, vocabulary = sentencepiece()
    expected = {
        "<unk>": "special",
        "<s>": "special",
        "▁": "space",
        "▁▁": "space",
        "\n": "space",
        "<0x0A>": "space",
        "<0x20>": "space",
        "<0x2E>": "punctuation",
        "<0x41>": "word",
        "<0xC3>": "word",
        "<0x00>": "special",
        "▁.": "punctuation",
        "▁(": "punctuation",
        "...": "punctuation",
        "…": "punctuation",
        "+": "punctuation",
        "▁the": "word",
        "▁2": "word",
        "é": "word",
        "▁été": "word",
    }
    assert dict(zip(expected, named(tokenizer, *(vocabulary[token] for token in expected)), strict=True)) == expected


def test_a_vocabulary_of_plain_letters_is_read_plainly():
    """A letter that another vocabulary would use for a space is itself here."""
    tokenizer = tiny_tokenizer(bos=True)
    ids = tokenizer.convert_tokens_to_ids([" ", "\n", "a", "Z", "0", ".", "_", "<", "</s>", "<s>"])
    expected = ["space", "space", "word", "word", "word", "punctuation", "punctuation", "punctuation", "special", "special"]
    assert named(tokenizer, *ids) == expected
    assert len(set(named(tokenizer, *range(len(LETTERS) + 3)))) == 4
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"Ġ": 0, "▁": 1, "<0x0A>": 2}, unk_token="Ġ")))
    assert texts_of(words, [0, 1, 2]) == ["Ġ".encode(), "▁".encode(), b"<0x0A>"]


def test_mask_is_a_mask_wherever_its_row_is_and_rows_without_a_token_are_special():
    tokenizer = tiny_tokenizer()
    n = len(tokenizer)
    letter = tokenizer.convert_tokens_to_ids("a")
    assert named(tokenizer, letter, n, n + 1, n + 2, n_ids=n + 3, mask_id=n + 1) == ["word", "special", "mask", "special"]
    assert named(tokenizer, letter, n, n_ids=n + 1, mask_id=letter) == ["mask", "special"]


@pytest.mark.parametrize("make", [byte_level, lambda: sentencepiece()[0]], ids=["byte-level", "sentencepiece"])
def test_the_texts_of_tokens_join_to_the_text(make):
    tokenizer = make()
    joined = b"".join(texts_of(tokenizer, tokenizer.encode(TEXT, add_special_tokens=False))).decode()
    assert joined.removeprefix(" ") == TEXT


def test_labels_are_texts_and_figures_show_each_short_and_printable():
    pytest.importorskip("matplotlib")
    tokenizer = byte_level()
    vocabulary = tokenizer.get_vocab()
    n = max(vocabulary.values()) + 1
    tokens = ["Ġ", "Ċ", "Ġ12", "Ã", "<|end|>"]
    found = labels(tokenizer, [*(vocabulary[token] for token in tokens), n, n + 1], n)
    assert found == [" ", "\n", " 12", "\N{REPLACEMENT CHARACTER}", "<|end|>", "[M]", f"#{n + 1}"]
    for label in [*labels(tokenizer, range(n), n), "internationalization", "\u200b\xa0", "\x07"]:
        assert shown(label).isprintable()
        assert 0 < len(shown(label)) <= 14
    assert shown("internationalization") == "interna…zation"


# -- the tokenizers of published models -------------------------------------------------------------------------------------------

COMMON = {" the": "word", ".": "punctuation", " ,": "punctuation", "\n": "space", "  ": "space"}
PUBLISHED = {
    "smollm2": {**COMMON, "\n\n": "space", "<|im_start|>": "special", "<file_sep>": "special"},
    "qwen2.5": {**COMMON, "();\n": "punctuation", "<|fim_pad|>": "special", "</tool_call>": "special", "<s>": "word", "东": "word"},
    "llama2": {**COMMON, "<s>": "special", "</s>": "special", "东": "word"},  # <s> is a tag of HTML for others
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokenizers(name):
    folder = next((place / name for place in FOLDERS if (place / name).is_dir()), None)
    if folder is None:
        pytest.skip("needs the tokenizers of published models in shared/data/tokenizers")
    if name == "llama2":
        pytest.importorskip("sentencepiece")
    tokenizer = read_tokenizer_at(folder)
    n = len(tokenizer)
    kinds, texts = classify(tokenizer, n + 2, n + 1), texts_of(tokenizer, range(n))
    assert kinds[n] == KINDS.index("special")
    assert kinds[n + 1] == KINDS.index("mask")
    by_text = {text.decode(errors="replace"): KINDS[kind] for text, kind in zip(texts, kinds[:n], strict=True)}
    assert {text: by_text.get(text) for text in PUBLISHED[name]} == PUBLISHED[name]
    counts = np.bincount(kinds, minlength=len(KINDS)) / len(kinds)
    assert counts[KINDS.index("word")] > 0.8
    assert 0 < counts[KINDS.index("space")] < 0.03
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(texts_of(tokenizer, ids)).decode().removeprefix(" ") == TEXT
