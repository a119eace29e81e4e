"""Count benchmark documents that share 13-grams of words with the corpus.

Words are runs of letters and digits, in lower case. A benchmark's document is its prompt with every option; one of fewer than 13
words has no gram and is counted apart. The corpus streams by, on the CPU. A word is a 64-bit hash and a gram a polynomial of its
words' hashes: a chance match is rarer than one in a thousand for corpora of this size.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sinkdlm.checkpoint.tokenizer import read_tokenizer
from sinkdlm.data.inputs import Reader, find_sources
from sinkdlm.data.shards import INDEX, open_split
from sinkdlm.errors import ReproduceError
from sinkdlm.evals.requests import Request, by_question
from sinkdlm.reproduce.inputs import Asked, documents_of
from sinkdlm.reproduce.markdown import table
from studies.asking import questions, run_study, write_beside

GRAM = 13  # words
NAME = "overlap"
_WORD = re.compile(r"[a-z0-9]+")
_BASE = np.uint64(0x9E3779B97F4A7C15)


@cache
def _number(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def grams_of(text: str) -> np.ndarray:
    """The number of each window of words: the sum of its words' numbers times powers of the base, in wrapping arithmetic."""
    words = _WORD.findall(text.lower())
    numbers = np.fromiter(map(_number, words), np.uint64, len(words))
    total = np.zeros(max(0, len(numbers) - GRAM + 1), np.uint64)
    with np.errstate(over="ignore"):
        for place in range(GRAM):
            total = total * _BASE + numbers[place : place + len(total)]
    return total


def overlap(corpus: Iterator[str], tasks: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """For each task: documents, those too short for a gram, those that share one with the corpus, or half of theirs."""
    own = {task: [np.unique(grams_of(text)) for text in texts] for task, texts in tasks.items()}
    wanted = np.unique(np.concatenate([one for documents in own.values() for one in documents]))
    seen = np.zeros(len(wanted), bool)
    documents, words = 0, 0
    for text in corpus:
        found = grams_of(text)
        documents, words = documents + 1, words + len(found)
        places = np.minimum(np.searchsorted(wanted, found), len(wanted) - 1)
        if len(wanted):
            seen[places[wanted[places] == found]] = True
    counted = {task: _count(parts, wanted[seen]) for task, parts in own.items()}
    return {"gram": f"{GRAM} words", "corpus": {"documents": documents, "grams": words}, "tasks": counted}


def _count(parts: Sequence[np.ndarray], hit: np.ndarray) -> dict[str, Any]:
    shares = [float(np.isin(grams, hit, assume_unique=True).mean()) for grams in parts if len(grams)]
    return {
        "documents": len(parts),
        "short": len(parts) - len(shares),
        "documents_hit": sum(share > 0 for share in shares),
        "documents_half": sum(share >= 0.5 for share in shares),
        "grams": int(sum(map(len, parts))),
    }


def corpus_texts(names: Sequence[str]) -> Iterator[str]:
    """Documents of files or folders (their field `text`), or a prepared set's tokens as text again."""
    first = Path(names[0])
    if len(names) == 1 and (first / INDEX).exists():
        tokenizer, split = read_tokenizer(first / "tokenizer"), open_split(first, "train")
        yield from (tokenizer.decode(document.tolist()) for document in documents_of(split, split.eos_id))
        return
    for _, _, row in Reader(find_sources(list(names))).rows(["text"]):
        value = row.value
        if isinstance(value, Mapping):
            yield str(value.get("text", ""))
        else:
            yield value if isinstance(value, str) else "".join(value.pieces)


def texts_of(requests: Sequence[Request]) -> dict[str, list[str]]:
    """Task -> one text a document: its prompt and every option."""
    found: dict[str, list[str]] = {}
    for question in by_question(requests):
        text = " ".join([question[0].context, *(request.continuation for request in question)])
        found.setdefault(question[0].task, []).append(text)
    return found


def count_overlap(asked: Asked) -> dict[str, Any]:
    if not asked.corpus:
        raise ReproduceError("--corpus: which text? give files or folders of texts, or a prepared set")
    texts = texts_of(questions(asked).requests)
    return write_beside(asked, NAME, overlap(corpus_texts(asked.corpus), texts))


def overlap_blocks(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return ["Not counted yet."]
    corpus, shown = found["corpus"], ("documents", "short", "documents_hit", "documents_half")
    told = f"The corpus has {corpus['documents']:,} documents with {corpus['grams']:,} grams of {found['gram']}:"
    rows = [[task, *(f"{row[name]:,}" for name in shown)] for task, row in found["tasks"].items()]
    head = ["benchmark", "its documents", "too short for a gram", "with a gram of the corpus", "with half of their grams"]
    return [told, table(head, rows)]


def main(words: Sequence[str] | None = None) -> None:
    run_study(__doc__ or "", count_overlap, lambda _, found: overlap_blocks(found), words)


if __name__ == "__main__":
    main()
