"""From token shards to batches of rows: blocks of text cut across documents, and prompt-and-response examples.

Owns how a row is cut and filled. A batch is a pure function of its sample numbers. Knows nothing of models or devices.

B rows, T tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sinkdlm.config.recipe import DataSection
from sinkdlm.data.order import Array, deal, rows_of
from sinkdlm.data.shards import Split, open_split
from sinkdlm.errors import DataError
from sinkdlm.noise import Stream, uniform


@dataclass(frozen=True)
class Batch:
    """tokens (B, T) int64. samples (B,): the number that keys each row's noise. maskable (B, T): positions that may be masked and
    are trained on, None for all. lengths (B,): rows end there, None for full rows. documents (B, T): confines of attention."""

    tokens: Tensor
    samples: Tensor
    maskable: Tensor | None = None
    lengths: Tensor | None = None
    documents: Tensor | None = None

    @classmethod
    def nothing(cls, length: int) -> "Batch":
        """One row in which nothing may be masked: what a rank computes when the others have more rows than it has."""
        maskable = torch.zeros(1, length, dtype=torch.bool)
        return cls(torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), maskable)

    def scored(self, *, shifted: bool = False) -> Tensor:
        """(B, T): positions that may be masked and scored. A shifted model cannot predict the first token of a row or document."""
        scored = torch.ones_like(self.tokens, dtype=torch.bool) if self.maskable is None else self.maskable
        if shifted:
            scored = scored.clone()
            scored[:, 0] = False
            if self.documents is not None:
                scored[:, 1:] &= self.documents[:, 1:] == self.documents[:, :-1]
        return scored

    def count_scored(self, *, shifted: bool = False) -> int:
        """Positions that the loss is divided by."""
        if self.maskable is None and not shifted:
            return self.tokens.numel()
        return int(self.scored(shifted=shifted).sum())

    def rows(self, part: slice) -> "Batch":
        """Some of the rows, or nothing's row where there are none; lengths are dropped where those rows are full."""
        if part.start >= self.tokens.shape[0]:
            return Batch.nothing(self.tokens.shape[1])
        lengths = None if self.lengths is None else self.lengths[part]
        if lengths is not None and bool((lengths == self.tokens.shape[1]).all()):
            lengths = None
        return Batch(self.tokens[part], self.samples[part], _cut(self.maskable, part), lengths, _cut(self.documents, part))

    @property
    def n_full(self) -> int:
        """Rows that reach the end; they come first."""
        return self.tokens.shape[0] if self.lengths is None else int((self.lengths == self.tokens.shape[1]).sum())

    def trimmed(self) -> "Batch":
        """Without the columns behind the end of every row, which nobody attends to and nothing scores."""
        if self.lengths is None:
            return self
        end = int(self.lengths.max())
        maskable, documents = (None if part is None else part[:, :end] for part in (self.maskable, self.documents))
        lengths = None if bool((self.lengths == end).all()) else self.lengths
        return Batch(self.tokens[:, :end], self.samples, maskable, lengths, documents)

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda part: part.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """In page-locked memory, from which a GPU copies while it computes."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        optional = (None if part is None else change(part) for part in (self.maskable, self.lengths, self.documents))
        return Batch(change(self.tokens), change(self.samples), *optional)


def _cut(x: Tensor | None, part: slice) -> Tensor | None:
    return None if x is None else x[part]


class TextRows:
    """Rows of T tokens cut across documents; the tail that fills no row is left out."""

    def __init__(self, split: Split, length: int, stride: int) -> None:
        self.split, self.length, self.stride = split, length, stride
        self.n_rows = max(0, (split.n_tokens - length) // stride + 1) if split.n_tokens >= length else 0

    def fill(self, row: int, tokens: Array, maskable: Array) -> int:
        start = row * self.stride
        tokens[:] = self.split.read(start, start + self.length)
        return self.length


class ExampleRows:
    """One example a row: the prompt, which is never masked, the response, and EOS up to T."""

    def __init__(self, split: Split, length: int, eos: int, padding: str) -> None:
        self.split, self.length, self.eos, self.trains_padding = split, length, eos, padding == "train"
        self._rows = split.example_rows()
        fits = self._rows[:, 2] <= length
        self.n_too_long = int((~fits).sum())
        self._rows = self._rows[fits]
        self.n_rows = len(self._rows)

    def fill(self, row: int, tokens: Array, maskable: Array) -> int:
        start, prompt, total = (int(value) for value in self._rows[row])
        tokens[:total] = self.split.read(start, start + total)
        tokens[total:] = self.eos
        end = self.length if self.trains_padding else total
        maskable[:prompt] = False
        maskable[end:] = False
        return end


class Rows:
    """The rows of one or several sets, and the batch that any sample numbers read."""

    def __init__(
        self,
        splits: Sequence[Split],
        shares: Sequence[float],
        section: DataSection,
        *,
        seed: int,
        vocab_size: int,
        mask_id: int,
    ) -> None:
        self.splits, self.shares, self.section, self.seed = list(splits), list(shares), section, seed
        self.vocab_size, self.mask_id = vocab_size, mask_id
        self.eos = self._find_eos()
        self.sets = [self._rows_of(split) for split in splits]
        for split, rows in zip(splits, self.sets, strict=True):
            if rows.n_rows == 0:
                if split.kind == "examples":
                    raise DataError(
                        f"{split.folder}: all examples are longer than data.length = {section.length}; raise it, at most to the "
                        "model's context_length, or prepare shorter examples or with a tokenizer that needs fewer tokens"
                    )
                raise DataError(f"{split.folder}: {split.n_tokens} tokens make no row of data.length = {section.length}; lower it")
            if split.highest_id is not None and split.highest_id >= vocab_size:
                raise DataError(
                    f"{split.folder}: token ids go up to {split.highest_id}, model.vocab_size is {vocab_size}: "
                    "prepare the set with this model's tokenizer, or set model.vocab_size to what `sinkdlm data info` says"
                )
        self.n_rows = sum(rows.n_rows for rows in self.sets)
        # Whether the positions that a batch is scored on depend on which rows it holds.
        self.counts_vary = bool(
            section.random_lengths
            or section.documents == "confined"
            or section.first is not None
            or any(isinstance(rows, ExampleRows) for rows in self.sets)
        )
        self.n_too_long = sum(rows.n_too_long for rows in self.sets if isinstance(rows, ExampleRows))

    def _find_eos(self) -> int | None:
        found = {split.eos_id for split in self.splits if split.eos_id is not None}
        if self.section.eos is not None:
            return self.section.eos
        if len(found) > 1:
            raise DataError(f"data.sets: documents end with different ids {sorted(found)}: sets of different tokenizers do not mix")
        return found.pop() if found else None

    def _rows_of(self, split: Split) -> TextRows | ExampleRows:
        section = self.section
        if split.kind == "examples":
            assert self.eos is not None
            return ExampleRows(split, section.length, self.eos, section.padding)
        if section.documents == "confined" and self.eos is None:
            raise DataError(f"{split.folder}: does not say which id ends documents; data.documents = 'confined' needs data.eos")
        return TextRows(split, section.length, section.stride or section.length)

    def batch(self, samples: Array) -> Batch:
        """The rows that these sample numbers (B,) read. Rows cut short come last, so that few forwards need to look at lengths."""
        if not len(samples):
            return Batch(torch.empty(0, self.section.length, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        chosen, turns = deal(samples, self.shares)
        rows = np.empty_like(turns)
        for number, held in enumerate(self.sets):
            here = chosen == number
            if here.any():
                rows[here] = rows_of(turns[here], held.n_rows, self.seed, number)
        lengths = self._random_lengths(samples, chosen)
        length = self.section.length
        tokens = np.empty((len(samples), length), np.int64)
        maskable = np.ones((len(samples), length), bool)
        for slot, (number, row) in enumerate(zip(chosen.tolist(), rows.tolist(), strict=True)):
            end = self.sets[number].fill(row, tokens[slot], maskable[slot])
            lengths[slot] = min(lengths[slot], end)
            maskable[slot, lengths[slot] :] = False
        whole = np.array([isinstance(held, ExampleRows) for held in self.sets])[chosen]
        if self.section.first is not None:
            tokens[~whole, 0], maskable[~whole, 0] = self.section.first, False
        self._check_ids(tokens, chosen, rows)
        samples = samples.astype(np.int64)
        full = bool((lengths == length).all())
        if not full:
            order = np.argsort(lengths < length, kind="stable")
            tokens, samples, maskable, lengths, whole = (x[order] for x in (tokens, samples, maskable, lengths, whole))
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(samples),
            None if bool(maskable.all()) else torch.from_numpy(maskable),
            None if full else torch.from_numpy(lengths),
            self._documents(tokens, whole) if self.section.documents == "confined" else None,
        )

    def _random_lengths(self, samples: Array, chosen: Array) -> Array:
        """LLaDA's rows of random length, keyed by the sample; never of examples."""
        lengths = np.full(len(samples), self.section.length, np.int64)
        if self.section.random_lengths:
            numbers = torch.from_numpy(samples.astype(np.int64))
            short = uniform(self.seed, Stream.LENGTH, numbers, 0).numpy() < self.section.random_lengths
            drawn = 1 + (uniform(self.seed, Stream.LENGTH, numbers, 1).numpy() * self.section.length).astype(np.int64)
            text = np.array([isinstance(held, TextRows) for held in self.sets])[chosen]
            lengths = np.where(short & text, np.minimum(drawn, self.section.length), lengths)
        return lengths

    def _documents(self, tokens: Array, whole: Array) -> Tensor:
        """Ids that step up after each EOS, which belongs to the document it ends. An example is one document, EOS and all."""
        ends = (tokens == self.eos) & ~whole[:, None]
        return torch.from_numpy(np.cumsum(ends, axis=1) - ends)

    def _check_ids(self, tokens: Array, chosen: Array, rows: Array) -> None:
        masks = self.mask_id < self.vocab_size and bool((tokens == self.mask_id).any())
        if int(tokens.view(np.uint64).max()) < self.vocab_size and not masks:  # a negative id is a large one
            return
        bad = (tokens < 0) | (tokens >= self.vocab_size) | (tokens == self.mask_id)
        slot, position = (int(value) for value in np.argwhere(bad)[0])
        token = int(tokens[slot, position])
        # [MASK] cannot be predicted: its loss would be infinite.
        what = "is [MASK]" if token == self.mask_id < self.vocab_size else f"is beyond model.vocab_size = {self.vocab_size}"
        raise DataError(
            f"{self.splits[int(chosen[slot])].folder}: token id {token} at position {position} of row {int(rows[slot])} {what}: "
            "the set was prepared with another tokenizer, or is damaged (sinkdlm data info)"
        )


def open_rows(section: DataSection, split: str, *, seed: int, vocab_size: int, mask_id: int) -> Rows | None:
    """The rows of a recipe's sets, or of what it validates on (None where there is nothing to validate on)."""
    if not section.sets:
        raise DataError("data.sets: empty; name a prepared set: --set 'data.sets={\"data/mine\"=1}'")
    if split == "validation" and section.validation is not None:
        held = open_split(section.validation, "validation")
        splits = [held if held.n_tokens else open_split(section.validation)]
        shares = [1.0]
    else:
        opened = [(open_split(folder, split), share) for folder, share in section.sets.items()]
        if split == "validation":
            opened = [(part, share) for part, share in opened if part.n_tokens >= (section.length if part.kind == "text" else 1)]
        if not opened:
            return None
        splits, shares = [part for part, _ in opened], [share for _, share in opened]
    _check_one_tokenizer(splits)
    plain = section.model_copy(update={"random_lengths": 0.0}) if split == "validation" else section
    return Rows(splits, shares, plain, seed=seed, vocab_size=vocab_size, mask_id=mask_id)


def _check_one_tokenizer(splits: Sequence[Split]) -> None:
    marks = {split.tokenizer["sha256"]: split.folder for split in splits if split.tokenizer is not None}
    if len(marks) > 1:
        first, second = list(marks.values())[:2]
        raise DataError(f"{first} and {second}: prepared with different tokenizers; prepare both with the same one")


def tokenizer_folder(splits: Sequence[Split]) -> Path | None:
    """Where a prepared set keeps the tokenizer that made it."""
    for split in splits:
        if (split.folder / "tokenizer").is_dir():
            return split.folder / "tokenizer"
    return None
