"""Read files, folders and data sets of the Hugging Face hub as rows in a fixed order.

A row is a document's text, or a mapping that contains one. Rows of a source are numbered, so that reading can resume. At most one
row is in memory; a text file that is one document comes in pieces. Must not know tokens.
"""

import codecs
import functools
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sinkdlm.checkpoint.hub import read_name
from sinkdlm.errors import DataError, check_regular, first_line

Form = Literal["text", "jsonl", "parquet", "hub", "memory"]
_FORMS: dict[str, Form] = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".json": "jsonl"}
_PACKED = (".gz", ".zst")
_TABLES = (".csv", ".tsv", ".ndjson", ".arrow", ".xml")  # folders with these are read by the datasets package
SUPPORTED = ".txt, .md, .jsonl, .json (each also .gz or .zst), .parquet, a folder of these, or a data set of the Hugging Face hub"
EXTRA = "pip install 'sinkdlm[data]'"
_HUB_WORD = r"(?![.-])(?!.*(--|\.\.))[\w.-]+(?<![.-])"
_HUB_NAME = re.compile(rf"[\w-]+|{_HUB_WORD}/{_HUB_WORD}", re.ASCII)  # old names have no owner, and none of them has a dot
_CHUNK = 1 << 18  # bytes read at a time
_PACKED_CHUNK = 1 << 10  # and unpacked: they may become 32 MB
_PARQUET_ROWS = 64  # read at a time: a dictionary may make each of them long
_MOST_UNPACKED = 200  # times as much as is packed: texts shrink to a third or a tenth
_LINE_LIMIT = 1 << 28  # bytes of a line, which is read whole
PIECE = 1 << 20  # characters after which a long text is cut at the next line break
PIECE_LIMIT = 16 * PIECE  # without a line break up to here, it is cut at a space
_LINE_BREAK = re.compile(r"(?<=\S)\n(?=\S)")


@dataclass(frozen=True)
class Source:
    """One file, or one data set. `stamp` changes with its content, as far as that shows without reading it."""

    name: str
    form: Form
    size: int = 0  # bytes on disk, 0 where unknown
    stamp: str = ""
    rows: Sequence[Any] = ()  # of form "memory"
    split: str = "train"  # of form "hub", like config and revision
    config: str | None = None
    revision: str | None = None


class Row(NamedTuple):
    """`value`: a mapping, a text, or the pieces of a long text. `place`: the file and the line, for messages."""

    value: Any
    place: str


class Pieces(NamedTuple):
    """A long text: its digest, from a first reading, and its pieces, read one by one."""

    digest: bytes
    pieces: Iterator[str]


def text_digest(text: str | None = None) -> Any:
    """Keyed BLAKE2b digest: the same text has the same digest everywhere; the key keeps it apart from other uses."""
    digest = hashlib.blake2b(digest_size=8, key=b"sinkdlm document")
    if text is not None:
        digest.update(text.encode())
    return digest


def find_sources(names: Sequence[str], *, split: str = "train", config: str | None = None) -> list[Source]:
    """List every file behind the names, folders opened and sorted. A name that is no path is a data set of the hub."""
    found: list[Source] = []
    for name in names:
        path = Path(name)
        if name.startswith("hf://"):
            found.append(_named(name, split, config))
        elif name.startswith("hf:"):
            found.append(_hub(name.removeprefix("hf:"), split, config))
        elif path.is_dir():
            found += _folder(path, split, config)
        elif path.exists():
            found.append(_file(path))
        elif not _may_be_hub(name) or ("/" in name and path.parent.is_dir()):  # its folder exists: it means a file
            hint = f"; hf://{name} names a data set of the hub" if _may_be_hub(name) else ""
            raise DataError(f"{name}: no such file or folder{hint}")
        else:
            found.append(_hub(name, split, config))
    if not found:
        raise DataError(f"nothing to read; give {SUPPORTED}")
    seen: dict[tuple[str | None, ...], Source] = {}
    for source in found:  # through links, too
        place = str(Path(source.name).resolve()) if source.form != "hub" else source.name
        key = place, source.split, source.config, source.revision
        if seen.setdefault(key, source) is not source:
            told = f"{seen[key].name} and {source.name}" if seen[key].name != source.name else source.name
            raise DataError(f"{told}: the same file twice, whose documents would count twice; leave one out")
    return found


def _may_be_hub(name: str) -> bool:
    return form_of(Path(name)) is None and _HUB_NAME.fullmatch(name) is not None


def _ending(path: Path) -> str:
    """The ending, without that of a compression."""
    return Path(path.stem).suffix if path.suffix in _PACKED else path.suffix


def form_of(path: Path) -> Form | None:
    """Form of a file, by its ending; None if unknown."""
    return "parquet" if path.suffix == ".parquet" else _FORMS.get(_ending(path))


def _file(path: Path) -> Source:
    form = form_of(path)
    if form is None:
        raise DataError(f"{path}: unknown ending; supported: {SUPPORTED}")
    check_regular(path, DataError)
    return Source(str(path), form, path.stat().st_size, _stamp(path, path.name))


def _folder(folder: Path, split: str, config: str | None) -> list[Source]:
    if _is_stored(folder):
        return [_hub(str(folder), split, config)]
    inner = [path for path in sorted(folder.rglob("*")) if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    shards = {path.parent for path in inner if path.name in ("index.json", "progress.json") and any(path.parent.glob("*.bin*"))}
    inner = [path for path in inner if not any(parent in shards for parent in path.parents)]  # not prepared shards
    files = [path for path in inner if path.is_file() and form_of(path) is not None]
    if any(form_of(path) != "text" for path in files):  # a data set's description is not one of its documents
        files = [path for path in files if path.name.lower() != "readme.md"]
    if files:
        return [_file(path) for path in files]
    others = [path for path in inner if path.is_file()]
    if any(_ending(path) in _TABLES for path in others):
        return [_hub(str(folder), split, config)]
    raise DataError(f"{folder}: {'no file in it can be read' if others else 'an empty folder'}; supported: {SUPPORTED}")


def _hub(name: str, split: str, config: str | None) -> Source:
    stamps = [_stamp(path, path.relative_to(name)) for path in sorted(Path(name).rglob("*")) if path.is_file()]
    return Source(name, "hub", stamp="\n".join([name, split, str(config), *stamps]), split=split, config=config)


def _named(name: str, split: str, config: str | None) -> Source:
    """A data set named as models are: `hf://owner/name[@revision]`."""
    named = read_name(name)
    if named is None or named.file is not None:
        raise DataError(
            f"{name}: names a file; a data set is hf://owner/name or hf://owner/name@REVISION, with --split and --subset"
        )
    stamp = "\n".join([str(named), split, str(config)])
    return Source(named.repo, "hub", stamp=stamp, split=split, config=config, revision=named.revision)


def _is_stored(folder: Path) -> bool:
    """Whether the datasets package's save_to_disk wrote this folder."""
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def _stamp(path: Path, name: object) -> str:
    return f"{name} {path.stat().st_size} {path.stat().st_mtime_ns}"


class Reader:
    """Reads the rows of sources one after the other, from a position on: (source, rows of it already taken)."""

    def __init__(self, sources: Sequence[Source], *, documents: str = "file", start: tuple[int, int] = (0, 0)) -> None:
        self.sources = sources
        self.documents = documents
        self.start = start
        self.bytes_done = sum(source.size for source in sources[: start[0]])  # bytes on disk, compressed or not

    def rows(self, fields: Sequence[str] | None = None) -> Iterator[tuple[int, int, Row]]:
        """Yield (source, rows taken with this one, row). fields: those that are needed; some formats can skip the others."""
        first, skip = self.start
        for index in range(first, len(self.sources)):
            source = self.sources[index]
            before = self.bytes_done
            taken = skip if index == first else 0
            for row in self._rows_of(source, taken, fields):
                taken += 1
                yield index, taken, row
            self.bytes_done = before + source.size

    def _rows_of(self, source: Source, skip: int, fields: Sequence[str] | None) -> Iterator[Row]:
        if source.form == "memory":
            return (Row(value, f"{source.name}: row {n}") for n, value in enumerate(source.rows[skip:], start=skip + 1))
        if source.form == "hub":
            return _hub_rows(source, skip)
        if source.form == "parquet":
            return self._parquet_rows(source, skip, fields)
        if source.form == "jsonl":
            return self._json_rows(source, skip)
        if self.documents == "file":
            return iter(()) if skip else self._whole_file(source)
        return itertools.islice(self._text_rows(source), skip, None)

    def _chunks(self, source: Source) -> Iterator[bytes]:
        """Yield the bytes of a file, decompressed."""
        path, before = Path(source.name), self.bytes_done
        try:
            with path.open("rb") as file:
                size = 0
                for unpacked in _unpacked(path, iter(lambda: file.read(_CHUNK), b"")):
                    self.bytes_done = before + file.tell()
                    size += len(unpacked)
                    _check_unpacked(source.name, size, file.tell())
                    yield unpacked
        except OSError as failure:
            raise DataError(f"{path}: cannot be read: {failure.strerror or failure}") from None
        except Exception as failure:  # zlib.error and ZstdError share no base class
            if isinstance(failure, zlib.error) or type(failure).__name__ == "ZstdError":
                raise DataError(f"{path}: damaged: {failure}") from None
            raise

    def _json_rows(self, source: Source, skip: int) -> Iterator[Row]:
        numbered = ((n, line) for n, line in enumerate(_lines(self._chunks(source), source.name), start=1) if line.strip())
        for number, line in itertools.islice(numbered, skip, None):
            place = f"{source.name}: line {number}"
            yield Row(_parse(place, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, number), place)

    def _text_rows(self, source: Source) -> Iterator[Row]:
        """Yield lines, or paragraphs (lines up to a blank one). Only "line-with-break" keeps the break at the end."""
        held: list[bytes] = []
        start = 1
        for number, line in enumerate(itertools.chain(_lines(self._chunks(source), source.name), [b""]), start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                start = start if held else number
                held.append(line)
            if held and (not line.strip() or self.documents != "paragraph"):
                place = f"{source.name}: line {start}"
                try:
                    text = b"".join(held).decode()
                except UnicodeDecodeError:
                    raise _not_utf8(place) from None
                kept = text if self.documents == "line-with-break" else text.removesuffix("\n").removesuffix("\r")
                yield Row(kept, place)
                held = []

    def _whole_file(self, source: Source) -> Iterator[Row]:
        place, begun = f"{source.name}: line 1", self.bytes_done
        pieces = cut(self._decoded(source))
        head = list(itertools.islice(pieces, 2))
        if len(head) < 2:
            yield Row("".join(head), place)
            return
        digest = text_digest()
        done, self.bytes_done = self.bytes_done, begun
        for text in self._decoded(source):
            digest.update(text.encode())
        self.bytes_done = done
        yield Row(Pieces(digest.digest(), itertools.chain(head, pieces)), place)

    def _decoded(self, source: Source) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        before = 0
        try:
            for chunk in self._chunks(source):
                yield decoder.decode(chunk)
                before += len(chunk)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as failure:
            raise _not_utf8(f"{source.name}: byte {before + failure.start}") from None

    def _parquet_rows(self, source: Source, skip: int, fields: Sequence[str] | None) -> Iterator[Row]:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise DataError(f"{source.name}: reading parquet needs: {EXTRA}") from None
        before, number, n_unpacked = self.bytes_done, 0, 0
        try:
            with pyarrow.parquet.ParquetFile(source.name) as file:
                columns = None if fields is None else [name for name in file.schema_arrow.names if name in fields]
                if fields is not None and not columns:
                    raise DataError(missing_field(f"{source.name}", fields, file.schema_arrow.names))
                sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
                for group, size in enumerate(sizes):
                    if number + size <= skip:
                        number += size
                        continue
                    for batch in file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[group], columns=columns):
                        whole = (one.dictionary_decode() if pyarrow.types.is_dictionary(one.type) else one for one in batch.columns)
                        n_unpacked += sum(one.nbytes for one in whole)
                        _check_unpacked(source.name, n_unpacked, source.size)
                        for value in batch.to_pylist():
                            number += 1
                            if number > skip:
                                yield Row(value, f"{source.name}: row {number}")
                        self.bytes_done = before + source.size * number // max(1, sum(sizes))
        except (pyarrow.ArrowException, OSError) as failure:
            raise DataError(f"{source.name}: cannot be read as parquet: {first_line(failure)}") from None


def cut(texts: Iterable[str]) -> Iterator[str]:
    """Cut a text into pieces, so that it is never whole in memory. A piece ends after PIECE characters, at the next line break
    between two characters that are not spaces; if there is none up to PIECE_LIMIT, before a space. The cuts depend on the text
    alone, not on how it arrives. A short text is one piece."""
    held, searched = "", 0
    for text in texts:
        held, begin = held + text if held else text, 0
        while len(held) - begin > PIECE:
            found = _LINE_BREAK.search(held, max(searched, begin + PIECE - 1), begin + PIECE_LIMIT + 1)
            if found:
                end = found.end()
            elif len(held) - begin > PIECE_LIMIT + 1:
                space = held.rfind(" ", begin + PIECE, begin + PIECE_LIMIT)
                end = space if space > 0 else begin + PIECE_LIMIT
            else:
                break
            yield held[begin:end]
            begin = end
        held = held[begin:]
        searched = max(0, len(held) - 1)
    if held:
        yield held


def _check_unpacked(name: str, size: int, packed: int) -> None:
    if size > _MOST_UNPACKED * packed + 256 * _CHUNK:
        told = f"{size} bytes come out of {packed}, more than of any text"
        raise DataError(f"{name}: {told}; if it is one all the same, unpack it first")


def _unpacked(path: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress a .gz or .zst file, which may hold several compressed streams in a row."""
    make: Callable[[], Any]
    if path.suffix == ".gz":
        make = functools.partial(zlib.decompressobj, wbits=31)
    elif path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise DataError(f"{path}: reading .zst needs: {EXTRA}") from None
        make = zstandard.ZstdDecompressor().decompressobj
    else:
        yield from chunks
        return
    unpacker, ready = None, bytearray()
    for chunk in (whole[begin : begin + _PACKED_CHUNK] for whole in chunks for begin in range(0, len(whole), _PACKED_CHUNK)):
        while chunk:
            unpacker = unpacker or make()
            ready += unpacker.decompress(chunk)
            chunk, unpacker = (unpacker.unused_data, None) if unpacker.eof else (b"", unpacker)
        if len(ready) >= _CHUNK:
            yield bytes(ready)
            ready.clear()
    yield bytes(ready)
    if unpacker:
        raise DataError(f"{path}: ends in the middle of its compressed data: truncated")


def _lines(chunks: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Yield lines with their line breaks. A line over many chunks is joined once."""
    held: list[bytes] = []
    n_held = 0
    for chunk in chunks:
        parts = chunk.split(b"\n")
        held.append(parts[0])
        n_held = n_held + len(chunk) if len(parts) == 1 else len(parts[-1])
        if n_held > _LINE_LIMIT:
            raise DataError(f"{name}: a line of more than {_LINE_LIMIT >> 20} MB; --documents file reads a .txt in pieces")
        if len(parts) > 1:
            yield b"".join([*held, b"\n"])
            for part in parts[1:-1]:
                yield part + b"\n"
            held = [parts[-1]]
    if last := b"".join(held):
        yield last


def _parse(place: str, line: bytes, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        raise _not_utf8(place) from None
    except (ValueError, RecursionError) as failure:
        hint = "; a list over many lines becomes lines with: jq -c '.[]'" if number == 1 and line.lstrip()[:1] == b"[" else ""
        reason = failure.msg if isinstance(failure, json.JSONDecodeError) else failure
        raise DataError(f"{place}: not JSON: {reason}; expected one object a line{hint}") from None
    if not isinstance(value, dict):
        hint = "; a list becomes lines with: jq -c '.[]'" if isinstance(value, list) else ""
        raise DataError(f"{place}: {type(value).__name__}, expected a JSON object{hint}")
    return value


def _not_utf8(place: str) -> DataError:
    return DataError(f"{place}: not UTF-8; convert the file first, for example: iconv -f latin1 -t utf-8")


def missing_field(place: str, wanted: Sequence[str], there: Iterable[str], cure: str = "; --field names another") -> str:
    return f"{place}: no field {' or '.join(wanted)}; the fields are {', '.join(sorted(there)) or 'none'}{cure}"


def count_bytes(text: str, place: str) -> int:
    try:
        return len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        raise DataError(f"{place}: half of a surrogate pair, which is not text; repair the row or remove it") from None


def text_of(row: Row, field: str) -> str | Pieces | None:
    """Return a row's text; None where it has none and is left out."""
    value = row.value
    if isinstance(value, Mapping):
        if field not in value:
            raise DataError(missing_field(row.place, [field], value))
        value = value[field]
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, str | Pieces):
        raise DataError(f"{row.place}: field {field} is {type(value).__name__}, expected text")
    return value


def whole_text_of(row: Row, field: str) -> str | None:
    text = text_of(row, field)
    return "".join(text.pieces) if isinstance(text, Pieces) else text


def _hub_rows(source: Source, skip: int) -> Iterator[Row]:
    data = open_hub(source)
    try:
        for number, value in enumerate(data.skip(skip) if skip else data, start=skip + 1):
            yield Row(value, f"{source.name}: row {number}")
    except DataError:
        raise
    except Exception as failure:  # whatever the data set's own reader and the network raise
        raise DataError(f"{source.name}: reading row {skip + 1} or later failed: {first_line(failure)}") from failure


def open_hub(source: Source) -> Any:
    """Open a data set as a stream: nothing is copied to disk first, so it may be larger than the disk."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"{source.name}: not found here; reading it from the Hugging Face hub needs: {EXTRA}") from None
    try:
        if _is_stored(Path(source.name)):
            stored = datasets.load_from_disk(source.name)
            return stored[source.split] if isinstance(stored, datasets.DatasetDict) else stored
        named: dict[str, Any] = {"split": source.split, "revision": source.revision}
        return datasets.load_dataset(source.name, source.config, streaming=True, **named)
    except Exception as failure:  # whatever the builders and the network raise
        where = "" if Path(source.name).exists() else "neither a file here nor a data set that can be opened: "
        cure = "--split and --subset choose within it"
        raise DataError(f"{source.name}: {where}{first_line(failure)}; {cure}") from failure
