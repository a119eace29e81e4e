"""Turn texts into token shards: read, tokenise on all cores, split by document and write, in parallel and in a fixed order.

Owns the settings of a preparation and the order of its steps. The result depends only on the inputs, the tokenizer and the
settings: not on batch sizes, timing or interruptions.
"""

import hashlib
import itertools
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from sinkdlm.checkpoint.durable import held
from sinkdlm.config.model import Frozen
from sinkdlm.data import examples
from sinkdlm.data.display import ByteBar
from sinkdlm.data.encoding import Encoder, mark_tokenizer
from sinkdlm.data.inputs import Pieces, Reader, Row, Source, count_bytes, cut, find_sources, text_digest, text_of
from sinkdlm.data.shards import INDEX, SPLITS
from sinkdlm.data.writing import Array, Store, compare, read_json
from sinkdlm.errors import ConfigError, DataError

_BATCH_BYTES, _BATCH_UNITS = 4_000_000, 20_000
_WAITING = 3  # batches read and encoded ahead
_NOTE_SECONDS = 30.0


class Settings(Frozen):
    """How texts become tokens. The index records it, and a folder can be resumed only with the same settings."""

    kind: Literal["text", "sft", "gsm8k-two-stage", "gsm8k-one-stage"] = "text"
    field: str = "text"
    documents: Literal["file", "line", "paragraph"] = "file"  # what is a document in a .txt or .md file
    validation: float = Field(default=0.01, ge=0, lt=1)  # share of documents
    shard_tokens: int = Field(default=100_000_000, ge=1)
    length: int | None = Field(default=None, ge=2)  # longest example
    eos_id: int | None = None  # None: the tokenizer's own
    bos: bool | None = None  # BOS before the segments of examples; None: as the tokenizer does
    split: str = "train"  # of a data set of the hub
    config: str | None = None

    @model_validator(mode="after")
    def _examples_only(self) -> Self:
        for name in ("length", "bos"):
            if self.kind == "text" and getattr(self, name) is not None:
                raise ConfigError(f"{name} = {getattr(self, name)}: for examples only (--kind {' or '.join(examples.KINDS)})")
        return self


class Unit(NamedTuple):
    """A row, or a piece of a long one, on its way to the encoder. position: (source, rows taken) once it is done."""

    content: Any  # a piece of text, the drafts of a row, or None for a row without text
    split: str
    first: bool
    last: bool
    position: tuple[int, int]
    place: str
    n_bytes: int


class Encoded(NamedTuple):
    """A unit as ids. rows: (prompt tokens, all tokens) of each example."""

    tokens: Array
    rows: Array | None
    n_documents: int
    counts: dict[str, int]


def prepare(
    names: Sequence[str], tokenizer: Any, out: str | Path, settings: Settings | None = None, *, source: str | None = None
) -> dict[str, Any]:
    """Turn texts in files, folders or data sets of the hub into token shards in `out`. Call it again to resume after a stop.

    tokenizer: a transformers tokenizer; source: where it came from, for the record. Returns a summary.
    """
    settings = settings or Settings()
    sources = find_sources(names, split=settings.split, config=settings.config)
    return prepare_sources(sources, names, tokenizer, out, settings, source)


def prepare_sources(
    sources: Sequence[Source], names: Sequence[str], tokenizer: Any, out: str | Path, settings: Settings, source: str | None = None
) -> dict[str, Any]:
    folder = Path(out)
    encoder = Encoder(tokenizer, settings.eos_id, settings.bos)
    mark = mark_tokenizer(tokenizer, source)
    inputs = {
        "names": list(names),
        "sources": len(sources),
        "bytes": sum(one.size for one in sources),
        "sha256": hashlib.sha256("\n\n".join(one.stamp for one in sources).encode()).hexdigest(),
    }
    recorded = {**settings.to_dict(), "eos_id": encoder.eos_id, "tokenizer": mark["sha256"], "inputs": inputs}
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX)
        compare(folder, index.get("settings", {}), recorded, "prepared")
        return {**_summary(folder, index), "notes": [], "already": True}
    try:
        with held(folder, "preparation"):
            store = Store(folder, recorded, encoder.dtype)
            return _Run(sources, settings, tokenizer, encoder, store).fill(mark)
    except OSError as failure:
        where, why = failure.filename or folder, failure.strerror or failure
        raise DataError(f"{where}: {why}; what is finished is safe: the same command goes on from there") from failure


def _summary(folder: Path, index: dict[str, Any]) -> dict[str, Any]:
    splits = {
        split: {"tokens": part["tokens"], "documents": part["documents"], "shards": len(part["shards"])}
        for split, part in index["splits"].items()
    }
    return {"out": str(folder), **{key: index[key] for key in ("kind", "dtype", "eos_id")}, "splits": splits}


def _finer(settings: Settings) -> str | None:
    """The option that cuts text files into more documents, if there is one."""
    ways = {"file": "--documents line or paragraph splits text files", "paragraph": "--documents line splits text files further"}
    return ways.get(settings.documents) if settings.kind == "text" else None


def _settle(store: Store, settings: Settings) -> list[str]:
    """Check at the end that there is data and a validation split; return notes on what was moved or left out."""
    train, validation = (store.splits[split] for split in SPLITS)
    counts, n_rows = store.counts, store.counts["rows"]
    if train.total("documents") + validation.total("documents") == 0:
        what = "documents" if settings.kind == "text" else "examples"
        dropped = counts["too_long"]
        why = f"all {dropped} examples are longer than --length {settings.length}" if dropped else "every one is empty"
        raise DataError(f"{', '.join(store.settings['inputs']['names'])}: no {what}: {why}")
    notes = []
    if train.total("documents") == 0:
        store.move_last("validation", "train")
        if n_rows > 1:
            notes.append(f"all {n_rows} rows fell into the validation split by their digests; the last one was put into training")
    if settings.validation > 0 and validation.total("documents") == 0:
        if n_rows > 1:
            store.move_last("train", "validation")
            notes.append(f"none of {n_rows} rows fell into the validation split by its digest; the last one was put there")
        elif settings.kind == "text" and (end := round(settings.validation * (train.total("tokens") - 1))) > 1:
            store.hold_out_end(end)
            cure = _finer(settings) or "more documents make one of whole documents"
            notes.append(f"one document only: its last {end:,} tokens are the validation split; {cure}")
        else:
            notes.append(f"one row only: there is no validation split; {_finer(settings) or 'give more rows'}")
    held = validation.total("tokens")
    total = held + train.total("tokens")
    if settings.validation > 0 and held > max(0.1, 3 * settings.validation) * total and n_rows > 1:
        notes.append(f"validation holds {held / total:.0%} of the tokens: {_finer(settings) or 'more rows even it out'}")
    lost = f"tokens ({counts['unknown'] / total:.1%}) stand for characters that the tokenizer does not have; these are lost"
    said = {
        "too_long": f"examples longer than {settings.length} tokens were left out",
        "empty": "rows without text were left out",
        "marks": "lines with more than one || or #### were left out, as by the official code",
        "eos_spelled": "times a text gave the end-of-document id, which was removed",
        "unknown": lost,
    }
    return notes + [f"{counts[name]} {text}" for name, text in said.items() if counts[name]]


class _Run:
    """One pass: one thread reads, two encode in turn (one fills the cores while the other hands over), this one writes."""

    def __init__(self, sources: Sequence[Source], settings: Settings, tokenizer: Any, encoder: Encoder, store: Store) -> None:
        self.settings, self.tokenizer, self.encoder, self.store = settings, tokenizer, encoder, store
        documents = settings.documents if settings.kind == "text" else "line-with-break"
        self.reader = Reader(sources, documents=documents, start=store.position)
        self.total = 0 if any(source.form == "hub" for source in sources) else sum(source.size for source in sources)
        self.n_bytes, self.n_tokens = 0, 0
        text = settings.kind == "text"
        self._units_of, self._encode = (
            (self._text_units, self._encode_texts) if text else (self._example_units, self._encode_examples)
        )
        self._fields = (settings.field,) if text else examples.FIELDS[settings.kind]
        self._stopped = False

    def fill(self, mark: dict[str, Any]) -> dict[str, Any]:
        """Do all that is left, write the index, and return a summary. mark: identifies the tokenizer."""
        store, encoder, kind = self.store, self.encoder, self.settings.kind
        try:
            if kind.startswith("gsm8k") and encoder.count_unknown(encoder.encode([examples.MARK])[0]):
                told = f"answers begin with {examples.MARK}, which the tokenizer cannot encode; choose another --tokenizer"
                raise DataError(f"--kind {kind}: {told}")
            seconds = self._run()
            notes = _settle(store, self.settings)
            facts = {"kind": "text" if kind == "text" else "examples", "dtype": encoder.dtype.name}
            index = store.finish({**facts, "eos_id": encoder.eos_id, "tokenizer": mark}, self.tokenizer)
        except DataError:
            if not store.noted:  # nothing to resume: the next attempt may use other settings
                store.abandon()
            raise
        finally:
            store.close()
        speed = {"seconds": seconds, "bytes": self.n_bytes, "tokens_per_second": self.n_tokens / seconds}
        return {**_summary(store.folder, index), "notes": notes, "already": False, **speed, "resumed": store.resumed}

    def _run(self) -> float:
        """Read, encode and write; return the seconds that it took."""
        noted = time.monotonic()
        with ByteBar("preparing", self.total, self.reader.bytes_done) as display, closing(self._encoded()) as found:
            for units, bytes_done, encoded in found:
                if self._write(units, encoded, time.monotonic() - noted > _NOTE_SECONDS):
                    noted = time.monotonic()
                display.update(bytes_done, self.n_bytes, self.n_tokens)
            return display.seconds

    def _encoded(self) -> Generator[tuple[list[Unit], int, list[Encoded]]]:
        """Yield batches in order. A reading failure is raised after everything that was read before it."""
        batches = self._batches()

        def encode(read: Future[tuple[list[Unit], int] | None]) -> tuple[list[Unit], int, list[Encoded]] | None:
            batch = read.result()
            return None if batch is None else (*batch, self._encode(batch[0]))

        with ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(2) as encoding:
            waiting = deque(encoding.submit(encode, reading.submit(next, batches, None)) for _ in range(_WAITING))
            try:
                while (found := waiting.popleft().result()) is not None:
                    waiting.append(encoding.submit(encode, reading.submit(next, batches, None)))
                    yield found
            finally:
                self._stopped = True

    def _batches(self) -> Iterator[tuple[list[Unit], int]]:
        """Yield batches of units, and the bytes on disk read so far."""
        units: list[Unit] = []
        size = 0
        for unit in self._units():
            if self._stopped:
                return
            units.append(unit)
            size += unit.n_bytes
            if size >= _BATCH_BYTES or len(units) >= _BATCH_UNITS:
                yield units, self.reader.bytes_done
                units, size = [], 0
        yield units, self.reader.bytes_done

    def _units(self) -> Iterator[Unit]:
        for index, taken, row in self.reader.rows(self._fields):
            yield from self._units_of(row, (index, taken))

    def _text_units(self, row: Row, position: tuple[int, int]) -> Iterator[Unit]:
        value = text_of(row, self.settings.field)
        if value is None:
            yield Unit(None, "train", True, True, position, row.place, 0)
            return
        if isinstance(value, str):
            count_bytes(value, row.place)
            value = Pieces(text_digest(value).digest(), cut([value]))
        split, first = self._split(value.digest), True
        for piece, following in itertools.pairwise(itertools.chain(value.pieces, [None])):
            n_bytes = count_bytes(str(piece), row.place)
            yield Unit(piece, split, first, following is None, position, row.place, n_bytes)
            first = False

    def _example_units(self, row: Row, position: tuple[int, int]) -> Iterator[Unit]:
        drafts = examples.drafts_of(self.settings.kind, row.value, self.tokenizer, row.place)
        if not drafts:
            yield Unit([], "train", True, True, position, row.place, 0)
            return
        size = sum(count_bytes(text, row.place) for draft in drafts for text in (*draft.prompt, draft.rest))
        # By the question: rows with several answers to it fall into the same split.
        split = self._split(text_digest("".join(drafts[0].prompt)).digest())
        yield Unit(drafts, split, True, True, position, row.place, size)

    def _split(self, digest: bytes) -> str:
        return "validation" if int.from_bytes(digest, "big") < self.settings.validation * 2.0**64 else "train"

    def _encode_texts(self, units: list[Unit]) -> list[Encoded]:
        end = np.array([self.encoder.eos_id], self.encoder.dtype)
        pieces = [(unit.content, unit.first) for unit in units if unit.content is not None]
        found = iter(self.encoder.encode_pieces(pieces))
        encoded = []
        for unit in units:
            if unit.content is None:
                encoded.append(Encoded(np.zeros(0, self.encoder.dtype), None, 0, {"empty": 1}))
                continue
            ids = next(found)
            tokens = np.array(ids, self.encoder.dtype)
            kept = tokens[tokens != end]
            counts = {"eos_spelled": len(tokens) - len(kept), "unknown": self.encoder.count_unknown(tokens)}
            encoded.append(Encoded(np.concatenate([kept, end]) if unit.last else kept, None, int(unit.last), counts))
        return encoded

    def _encode_examples(self, units: list[Unit]) -> list[Encoded]:
        drafts = [draft for unit in units for draft in unit.content]
        places = [unit.place for unit in units for _ in unit.content]
        found = iter(examples.encode_drafts(self.encoder, drafts, places.__getitem__))
        encoded = []
        for unit in units:
            whole = [next(found) for _ in unit.content]
            kept = [pair for pair in whole if self.settings.length is None or len(pair[0]) + len(pair[1]) <= self.settings.length]
            if self.settings.kind == "gsm8k-two-stage" and len(kept) < len(whole):
                kept = []  # both stages or neither
            tokens = np.array([token for prompt, rest in kept for token in (*prompt, *rest)], self.encoder.dtype)
            rows = np.array([(len(prompt), len(prompt) + len(rest)) for prompt, rest in kept], np.int64).reshape(-1, 2)
            unknown = sum(self.encoder.count_unknown(part) for pair in kept for part in pair)
            counts = {"too_long": len(whole) - len(kept), "unknown": unknown, "marks": int(not whole)}
            encoded.append(Encoded(tokens, rows, len(kept), counts))
        return encoded

    def _write(self, units: list[Unit], encoded: list[Encoded], due: bool) -> bool:
        """Write units; return whether progress was saved. Counts grow row by row, so that saved counts fit the saved position."""
        store, noted = self.store, False
        for unit, found in zip(units, encoded, strict=True):
            noted |= store.write(unit.split, found.tokens, found.rows, found.n_documents, first=unit.first)
            store.counts.update(found.counts)
            if unit.last:
                store.counts["rows"] += found.n_documents > 0
                store.position = unit.position
            self.n_bytes += unit.n_bytes
            self.n_tokens += len(found.tokens)
            if due and unit.last:
                store.note()
                noted, due = True, False
        return noted
