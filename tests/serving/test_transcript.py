"""The text of final tokens is the same in any pieces, and half characters or half stop strings are never shown."""

import random

import pytest

from evaluated import tiny_tokenizer
from sinkdlm.serving.transcript import Transcript, first_stop
from sites import bytes_lm


@pytest.fixture(scope="module")
def by_bytes():
    return bytes_lm().tokenizer


def in_pieces(transcript, tokens, cuts):
    shown = [transcript.read(tokens[:cut], done=False) for cut in cuts]
    return [*shown, transcript.read(tokens, done=True)]


TEXTS = ["plain", "naïve café", "日本語です", "a\U0001f9ff\U0001f468‍\U0001f469", "end \U0001f600"]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_come_whole(by_bytes, text):
    tokens = by_bytes.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text.encode())
    shown = in_pieces(Transcript(by_bytes, [], None), tokens, range(len(tokens)))
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_pieces_add_up_to_the_whole_text_for_any_tokens_and_cuts(by_bytes):
    """Random bytes: most are not valid characters."""
    draw, broken = random.Random(0), 0
    for _ in range(200):
        tokens = [draw.randrange(257) for _ in range(draw.randrange(1, 30))]  # 256 is EOS
        given = [draw.randrange(256) for _ in range(draw.randrange(12))]
        stops = [by_bytes.decode([draw.randrange(256)]) for _ in range(draw.randrange(3))]
        whole, parted = (Transcript(by_bytes, given, 256, stops) for _ in range(2))
        cuts = sorted(draw.randrange(len(tokens) + 1) for _ in range(6))
        text = whole.read(tokens, done=True)
        assert "".join(in_pieces(parted, tokens, cuts)) == text == parted.text
        assert (whole.stopped, whole.n_tokens) == (parted.stopped, parted.n_tokens)
        broken += "\ufffd" in text
    assert broken > 50


def test_eos_ends_a_text_and_is_no_part_of_it():
    tokenizer = tiny_tokenizer()
    tokens = [*tokenizer.encode("ab", add_special_tokens=False), tokenizer.eos_token_id, *tokenizer.encode("cd")]
    transcript = Transcript(tokenizer, [], tokenizer.eos_token_id)
    assert transcript.read(tokens, done=True) == "ab"
    assert transcript.stopped
    assert transcript.n_tokens == 2
    kept = Transcript(tokenizer, [], None)
    assert kept.read(tokens, done=True) == "abcd"
    assert not kept.stopped


def test_a_stop_string_is_never_shown_not_even_half():
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode("one two\n\nthree")
    transcript = Transcript(tokenizer, [], None, ["\n\n", "two!"])
    shown = in_pieces(transcript, tokens, range(1, len(tokens)))
    assert "".join(shown) == "one two"
    assert transcript.stopped
    so_far = ""
    for cut, piece in enumerate(shown[:7], start=1):
        so_far += piece
        assert so_far == {5: "one ", 6: "one ", 7: "one "}.get(cut, "one two"[:cut])


def test_the_stop_that_is_complete_first_counts():
    assert first_stop("xabcd", ["abcd", "bc"]) == 2
    assert first_stop("xabcd", ["d", "abcd"]) == 1
    assert first_stop("x", ["y"]) is None


def test_a_blank_in_front_is_kept_where_the_decoder_drops_it_from_a_text_alone():
    """As SentencePiece's do: "is" + " Paris", not "isParis"."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"<unk>": 0, "▁is": 1, "▁Paris": 2}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    assert tokenizer.decode([2]) == "Paris"
    assert Transcript(tokenizer, [1], None).read([2], done=True) == " Paris"
    assert Transcript(tokenizer, [], None).read([2], done=True) == "Paris"
