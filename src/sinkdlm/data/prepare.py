"""From texts to token shards: reads, tokenises on all cores, splits by document, and writes, all at once and in a fixed order.

Owns the settings of a preparation and the order of its steps. What comes out depends on the inputs, the tokenizer and the settings
alone: not on batch sizes, timing, or how often the work was interrupted.
"""

import dataclasses
import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sinkdlm.data import examples
from sinkdlm.data.display import Display
from sinkdlm.data.encoding import Encoder, mark_tokenizer
from sinkdlm.data.inputs import Reader, Row, Source, count_bytes, cut, find_sources, place_of, text_digest, text_of
from sinkdlm.data.shards import INDEX, SPLITS
from sinkdlm.data.writing import Array, Store, compare, locked, read_json
from sinkdlm.errors import DataError

KINDS = ("text", *examples.KINDS)
DOCUMENTS = ("file", "line", "paragraph")
_BATCH_BYTES, _BATCH_UNITS = 4_000_000, 20_000
_WAITING = 3  # batches read ahead, and batches in the encoder
_NOTE_SECONDS = 30.0


@dataclass(frozen=True)
class Settings:
    """How texts become tokens. Recorded in the index; a folder is only ever continued with the same."""

    kind: str = "text"
    field: str = "text"
    documents: str = "file"  # what is a document in a .txt or .md file
    validation: float = 0.01  # share of documents
    shard_tokens: int = 100_000_000
    length: int | None = None  # longest example
    eos_id: int | None = None  # the tokenizer's own
    bos: bool | None = None  # before the segments of examples; None: as the tokenizer does by itself
    split: str = "train"  # of a data set of the hub
    config: str | None = None

    def __post_init__(self) -> None:
        for key, allowed in (("kind", KINDS), ("documents", DOCUMENTS)):
            if getattr(self, key) not in allowed:
                raise DataError(f"{key} = {getattr(self, key)!r}: allowed are {', '.join(allowed)}")
        if not 0 <= self.validation < 1:
            raise DataError(f"validation = {self.validation}: allowed is a share from 0 to below 1")
        if self.shard_tokens < 1:
            raise DataError(f"shard_tokens = {self.shard_tokens}: allowed is 1 and more")
        if self.length is not None and (self.kind == "text" or self.length < 2):
            raise DataError(f"length = {self.length}: for examples only (--kind {' or '.join(examples.KINDS)}), at least 2")
        if self.bos is not None and self.kind == "text":
            raise DataError(f"bos = {self.bos}: for examples only; documents of running text have no BOS")


class Unit(NamedTuple):
    """A row, or a piece of a long one, on its way to the encoder. position: rows taken when it is done."""

    content: Any  # a piece of text, the drafts of a row, or None for a row without text
    split: str
    first: bool
    last: bool
    position: tuple[int, int]
    place: str
    n_bytes: int


class Batch(NamedTuple):
    units: list[Unit]
    bytes_done: int


class Encoded(NamedTuple):
    """A unit in ids. rows: prompt tokens and tokens in all of each example."""

    tokens: Array
    rows: Array | None
    n_documents: int
    counts: dict[str, int]


def prepare(
    names: Sequence[str], tokenizer: Any, out: str | Path, settings: Settings | None = None, *, source: str | None = None
) -> dict[str, Any]:
    """Texts in files, folders or data sets of the hub to token shards in `out`. Run again after an interruption, it goes on.

    tokenizer: a transformers tokenizer; source: where it came from, for the record. Returns a summary.
    """
    settings = settings or Settings()
    return prepare_sources(
        find_sources(names, split=settings.split, config=settings.config), names, tokenizer, out, settings, source
    )


def prepare_sources(
    sources: Sequence[Source], names: Sequence[str], tokenizer: Any, out: str | Path, settings: Settings, source: str | None = None
) -> dict[str, Any]:
    folder = Path(out)
    encoder = Encoder(tokenizer, settings.eos_id, settings.bos)
    mark = mark_tokenizer(tokenizer, source)
    recorded = {
        **dataclasses.asdict(settings),
        "eos_id": encoder.eos_id,
        "tokenizer": mark["sha256"],
        "inputs": {
            "names": list(names),
            "sources": len(sources),
            "bytes": sum(one.size for one in sources),
            "sha256": hashlib.sha256("\n\n".join(one.stamp for one in sources).encode()).hexdigest(),
        },
    }
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        compare(folder, index.get("settings", {}), recorded, "prepared")
        return {**_summary(folder, index, []), "already": True}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise DataError(f"{folder}: cannot write there: {failure.strerror}; choose another --out") from None
    try:
        with locked(folder):
            return _fill(Store(folder, recorded, encoder.dtype), sources, settings, tokenizer, encoder, mark)
    except OSError as failure:
        where, why = failure.filename or folder, failure.strerror or failure
        raise DataError(f"{where}: {why}; what is finished is safe: the same command goes on from there") from failure


def _fill(
    store: Store, sources: Sequence[Source], settings: Settings, tokenizer: Any, encoder: Encoder, mark: dict[str, Any]
) -> dict[str, Any]:
    try:
        _check_marks(encoder, settings.kind)
        run = _Run(sources, settings, tokenizer, encoder, store)
        run.run()
        notes = _settle(store, settings)
        name = {2: "uint16", 4: "uint32"}[encoder.dtype.itemsize]
        kind = "text" if settings.kind == "text" else "examples"
        index = store.finish({"kind": kind, "dtype": name, "eos_id": encoder.eos_id, "tokenizer": mark}, tokenizer)
    except DataError:
        if not store.noted:  # nothing to go on with, so the next attempt may use other settings
            store.abandon()
        raise
    finally:
        store.close()
    speed = {"seconds": run.seconds, "bytes": run.n_bytes, "tokens_per_second": run.n_tokens / run.seconds}
    return {**_summary(store.folder, index, notes), **speed, "resumed": store.resumed}


def _check_marks(encoder: Encoder, kind: str) -> None:
    if kind.startswith("gsm8k") and encoder.count_unknown(encoder.encode([examples.MARK])[0]):
        raise DataError(f"--kind {kind}: answers begin with {examples.MARK}, which the tokenizer cannot write; take another one")


def _summary(folder: Path, index: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    splits = {
        split: {"tokens": part["tokens"], "documents": part["documents"], "shards": len(part["shards"])}
        for split, part in index["splits"].items()
    }
    facts = {key: index[key] for key in ("kind", "dtype", "eos_id")}
    return {"out": str(folder), **facts, "splits": splits, "notes": notes, "already": False}


def _finer(settings: Settings) -> str | None:
    """How text files are cut into more documents than they were."""
    ways = {"file": "--documents line or paragraph splits text files", "paragraph": "--documents line splits text files further"}
    return ways.get(settings.documents) if settings.kind == "text" else None


def _settle(store: Store, settings: Settings) -> list[str]:
    """What can only be said at the end: is there anything, is there a validation split, what was left out."""
    what = "documents" if settings.kind == "text" else "examples"
    n_train, n_validation = (store.splits[split].n_documents for split in SPLITS)
    n_rows = store.counts.get("rows", 0)
    dropped, empty = store.counts.get("too_long", 0), store.counts.get("empty", 0)
    if n_train + n_validation == 0:
        why = f"all {dropped} examples are longer than --length {settings.length}" if dropped else "every one is empty"
        raise DataError(f"{', '.join(store.settings['inputs']['names'])}: no {what}: {why}")
    notes = []
    if n_train == 0:
        store.move_last("validation", "train")
        n_validation = store.splits["validation"].n_documents
        if n_rows > 1:
            notes.append(f"all {n_rows} rows fell into the validation split by their digests; the last one was put into training")
    if settings.validation > 0 and n_validation == 0:
        if n_rows > 1:
            store.move_last("train", "validation")
            notes.append(f"none of {n_rows} rows fell into the validation split by its digest; the last one was put there")
        else:
            notes.append(f"one row only: there is no validation split; {_finer(settings) or 'give more rows'}")
    held, total = store.splits["validation"].n_tokens, sum(store.splits[split].n_tokens for split in SPLITS)
    if settings.validation > 0 and held > max(0.1, 3 * settings.validation) * total and n_rows > 1:
        notes.append(f"validation holds {held / total:.0%} of the tokens: {_finer(settings) or 'more rows even it out'}")
    if dropped:
        notes.append(f"{dropped} examples longer than {settings.length} tokens were left out")
    if empty:
        notes.append(f"{empty} rows without text were left out")
    if spelled := store.counts.get("eos_spelled", 0):
        notes.append(f"{spelled} times a text gave the end-of-document id, which was taken out")
    if unknown := store.counts.get("unknown", 0):
        notes.append(
            f"{unknown} tokens ({unknown / total:.1%}) stand for characters that the tokenizer does not have; these are lost"
        )
    return notes


class _Run:
    """One pass: a thread reads, two threads encode in turn (one fills the cores while the other hands over), this one writes."""

    def __init__(self, sources: Sequence[Source], settings: Settings, tokenizer: Any, encoder: Encoder, store: Store) -> None:
        self.settings, self.tokenizer, self.encoder, self.store = settings, tokenizer, encoder, store
        documents = settings.documents if settings.kind == "text" else "line-with-break"
        self.reader = Reader(sources, documents=documents, start=store.position)
        self.total = 0 if any(source.form == "hub" for source in sources) else sum(source.size for source in sources)
        self.seconds, self.n_bytes, self.n_tokens = 0.0, 0, 0

    def run(self) -> None:
        batches: queue.Queue[Batch | Exception | None] = queue.Queue(maxsize=_WAITING)
        stop = threading.Event()
        thread = threading.Thread(target=self._read, args=(batches, stop), daemon=True)
        waiting: deque[tuple[Batch, Future[list[Encoded]]]] = deque()
        noted = time.monotonic()
        display = Display("preparing", self.total, self.reader.bytes_done)
        with display, ThreadPoolExecutor(2) as pool:
            thread.start()
            try:
                more = True
                while more or waiting:
                    while more and len(waiting) < _WAITING:
                        batch = batches.get()
                        if isinstance(batch, Exception):
                            raise batch
                        more = batch is not None
                        if batch is not None:
                            waiting.append((batch, pool.submit(self._encode, batch)))
                    if waiting:
                        batch, encoded = waiting.popleft()
                        if self._write(batch, encoded.result(), time.monotonic() - noted > _NOTE_SECONDS):
                            noted = time.monotonic()
                        display.update(batch.bytes_done, self.n_bytes, self.n_tokens)
            finally:
                stop.set()
                self.seconds = display.seconds

    # -- reading ----------------------------------------------------------------------------------------------------------

    def _read(self, batches: "queue.Queue[Batch | Exception | None]", stop: threading.Event) -> None:
        def put(item: Batch | Exception | None) -> None:
            while not stop.is_set():
                with suppress(queue.Full):
                    batches.put(item, timeout=0.1)
                    break

        try:
            units: list[Unit] = []
            size = 0
            for unit in self._units():
                units.append(unit)
                size += unit.n_bytes
                if size >= _BATCH_BYTES or len(units) >= _BATCH_UNITS:
                    put(Batch(units, self.reader.bytes_done))
                    units, size = [], 0
                if stop.is_set():
                    return
            put(Batch(units, self.reader.bytes_done))
            put(None)
        except Exception as failure:  # handed over, to be raised where the work is waited for
            put(failure)

    def _units(self) -> Iterator[Unit]:
        settings = self.settings
        fields = (settings.field,) if settings.kind == "text" else examples.FIELDS[settings.kind]
        for index, taken, row in self.reader.rows(fields):
            make = self._text_units if settings.kind == "text" else self._example_units
            yield from make(row, (index, taken), place_of(self.reader.sources[index], row))

    def _text_units(self, row: Row, position: tuple[int, int], place: str) -> Iterator[Unit]:
        value = text_of(row, self.settings.field, place)
        if value is None:
            yield Unit(None, "train", True, True, position, place, 0)
            return
        if isinstance(value, str):
            count_bytes(value, place)
            split, pieces = self._split(text_digest(value).digest()), cut([value])
        else:
            split, pieces = self._split(value.digest), value.pieces
        held, first = next(pieces), True
        for piece in pieces:
            yield Unit(held, split, first, False, position, place, count_bytes(held, place))
            held, first = piece, False
        yield Unit(held, split, first, True, position, place, count_bytes(held, place))

    def _example_units(self, row: Row, position: tuple[int, int], place: str) -> Iterator[Unit]:
        drafts = examples.drafts_of(self.settings.kind, row.value, self.tokenizer, place)
        size = sum(count_bytes(text, place) for draft in drafts for text in (draft.prompt, draft.rest))
        # By what is asked: rows that answer one question in several ways fall on the same side.
        split = self._split(text_digest(drafts[0].prompt).digest())
        yield Unit(drafts, split, True, True, position, place, size)

    def _split(self, digest: bytes) -> str:
        return "validation" if int.from_bytes(digest, "big") < self.settings.validation * 2.0**64 else "train"

    # -- encoding ---------------------------------------------------------------------------------------------------------

    def _encode(self, batch: Batch) -> list[Encoded]:
        return self._encode_texts(batch) if self.settings.kind == "text" else self._encode_examples(batch)

    def _encode_texts(self, batch: Batch) -> list[Encoded]:
        eos = self.encoder.eos_id
        encoded = []
        found = iter(self.encoder.encode_pieces([(unit.content, unit.first) for unit in batch.units if unit.content is not None]))
        for unit in batch.units:
            if unit.content is None:
                encoded.append(Encoded(np.zeros(0, self.encoder.dtype), None, 0, {"empty": 1}))
                continue
            ids = next(found)
            unknown = self.encoder.count_unknown(ids)
            if unit.last:
                ids.append(eos)
            tokens = np.array(ids, self.encoder.dtype)
            spelled = int((tokens == eos).sum()) - unit.last
            if spelled:
                inner = tokens[: len(tokens) - unit.last]
                tokens = np.concatenate([inner[inner != eos], tokens[len(inner) :]])
            encoded.append(Encoded(tokens, None, int(unit.last), {"eos_spelled": spelled, "unknown": unknown}))
        return encoded

    def _encode_examples(self, batch: Batch) -> list[Encoded]:
        drafts = [draft for unit in batch.units for draft in unit.content]
        places = [unit.place for unit in batch.units for _ in unit.content]
        found = iter(examples.encode_drafts(self.encoder, drafts, places.__getitem__))
        encoded = []
        for unit in batch.units:
            whole = [next(found) for _ in unit.content]
            kept = [pair for pair in whole if self.settings.length is None or len(pair[0]) + len(pair[1]) <= self.settings.length]
            tokens = np.array([token for prompt, rest in kept for token in (*prompt, *rest)], self.encoder.dtype)
            rows = np.array([(len(prompt), len(prompt) + len(rest)) for prompt, rest in kept], np.int64).reshape(-1, 2)
            unknown = sum(self.encoder.count_unknown(part) for pair in kept for part in pair)
            counts = {"too_long": len(whole) - len(kept), "unknown": unknown}
            encoded.append(Encoded(tokens, rows, len(kept), counts))
        return encoded

    # -- writing ----------------------------------------------------------------------------------------------------------

    def _write(self, batch: Batch, encoded: list[Encoded], due: bool) -> bool:
        """Was progress noted on disk? Counts are added row by row, so that what is noted fits the row it is noted at."""
        counts, noted = self.store.counts, False
        for unit, found in zip(batch.units, encoded, strict=True):
            noted |= self.store.write(
                unit.split, found.tokens, found.rows, found.n_documents, first=unit.first, last=unit.last, position=unit.position
            )
            for key, value in found.counts.items():
                if value:
                    counts[key] = counts.get(key, 0) + value
            if unit.last:
                counts["rows"] = counts.get("rows", 0) + (found.n_documents > 0)
            self.n_bytes += unit.n_bytes
            self.n_tokens += len(found.tokens)
            if due and unit.last:
                self.store.note()
                noted, due = True, False
        return noted
