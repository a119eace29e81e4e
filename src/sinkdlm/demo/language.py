"""Make a small language of short stories and two-digit sums from the seed alone, with a tokenizer of whole words.

Sums are fine-tuning examples, of which only the answer is ever masked: with everything masked a nano model learns digits but not
addition. Stories are running text, masked everywhere. A pair of numbers is held out in both orders, so no held-out sum is a
training sum with its numbers swapped.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sinkdlm.data.inputs import Source
from sinkdlm.data.prepare import Settings, prepare_sources
from sinkdlm.noise import permute, random_bits

EOS = "<eos>"
N_NUMBERS = 100  # 00 to 99
N_PAIRS = N_NUMBERS * (N_NUMBERS + 1) // 2  # unordered
N_HELD_OUT = 500  # pairs
ANSWER = 3  # digits, padded with zeros, so that digits have fixed places
N_STORIES = 6_000
_KEY = 0x73746F726965  # "storie": the noise key of stories

_NAMES = ("tom", "ann", "ben", "eva", "max", "lily", "sam", "mia")
_PLACES = ("house", "garden", "river", "hill", "market", "forest")
COLOURS = ("red", "blue", "green", "white", "black")
THINGS = ("ball", "book", "hat", "cup", "kite", "lamp")
_MOODS = ("glad", "tired", "proud", "quiet")
_STORIES = (
    "{a} has a {c} {t} . {a} meets {b} at the {p} and gives the {t} to {b} . now {b} has the {c} {t} and {a} is {m} .",
    "{a} walks to the {p} and looks for the {c} {t} . {b} found it first . so {b} has the {c} {t} and {a} goes home {m} .",
    "the {c} {t} of {a} is lost . {b} sees it near the {p} and brings it to {a} . now {a} has the {c} {t} and {b} is {m} .",
)


class Problem(NamedTuple):
    question: str
    answer: str


def _pair(number: int) -> tuple[int, int]:
    """Pair `number` among all pairs with first <= second."""
    second = int(((8 * number + 1) ** 0.5 - 1) / 2)
    return number - second * (second + 1) // 2, second


def problems(seed: int, *, held_out: bool) -> list[Problem]:
    """The sums to train on, or the held-out ones: the last pairs of a keyed shuffle, each in both orders."""
    order = permute(torch.arange(N_PAIRS), N_PAIRS, seed).tolist()
    chosen = order[N_PAIRS - N_HELD_OUT :] if held_out else order[: N_PAIRS - N_HELD_OUT]
    found = []
    for first, second in map(_pair, chosen):
        for left, right in dict.fromkeys([(first, second), (second, first)]):
            found.append(Problem(f"{left:02d}+{right:02d}=", f"{left + right:0{ANSWER}d}"))
    return found


def story(draws: Sequence[int]) -> str:
    """A story of two people and a thing; who has it at the end follows from the story."""
    form, a, b, *others = draws
    second = a + 1 + b % (len(_NAMES) - 1)
    lists = {"c": COLOURS, "t": THINGS, "p": _PLACES, "m": _MOODS}
    words = {key: choices[draw % len(choices)] for (key, choices), draw in zip(lists.items(), others, strict=True)}
    words |= {"a": _NAMES[a % len(_NAMES)], "b": _NAMES[second % len(_NAMES)]}
    return _STORIES[form % len(_STORIES)].format(**words).replace(" .", ".")


def stories(n: int, seed: int) -> list[str]:
    return [story(row) for row in random_bits(31, seed, _KEY, torch.arange(n)[:, None], torch.arange(7)[None]).tolist()]


def openings(n: int, seed: int) -> list[str]:
    """Different first sentences, of stories that are not trained on."""
    later = stories(N_STORIES + 100 + 4 * n, seed)[N_STORIES:]
    return list(dict.fromkeys(text[: text.index(".") + 1] for text in later))[:n]


def digest(seed: int) -> str:
    """A hash of the whole language, which changes with its version."""
    made = [problems(seed, held_out=True), problems(seed, held_out=False), stories(N_STORIES, seed), vocabulary()]
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()


def vocabulary() -> list[str]:
    """Digits and signs one by one; a word alone, and with the space before it."""
    lists = (_NAMES, _PLACES, COLOURS, THINGS, _MOODS)
    forms = {word for form in _STORIES for word in form.split() if word.isalpha()}
    words = sorted({word for words in lists for word in words} | forms)
    return [*"0123456789+=. \n?", *words, *(f" {word}" for word in words), EOS]


def word_tokenizer() -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary())}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[a-z]+|[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, clean_up_tokenization_spaces=False)


def write_sets(folder: Path, seed: int) -> dict[str, str]:
    """Write the token shards of both sets; name -> folder. Resumes a set that is there, whole or in part."""
    version = digest(seed)
    rows = [{"prompt": one.question, "response": one.answer} for one in problems(seed, held_out=False)]
    texts = [{"text": text} for text in stories(N_STORIES, seed)]
    tokenizer = word_tokenizer()
    found = {}
    for name, kind, values, validation in (("sums", "sft", rows, 0.0), ("stories", "text", texts, 0.05)):
        mark = f"demo {name}, seed {seed}"
        source = Source(mark, "memory", stamp=version, rows=values)
        settings = Settings.model_validate({"kind": kind, "validation": validation})
        prepare_sources([source], [mark], tokenizer, folder / name, settings, source="words")
        found[name] = str(folder / name)
    return found
