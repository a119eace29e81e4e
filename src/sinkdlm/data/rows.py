"""Make batches of rows from token shards: blocks of text cut across documents, and prompt-and-response examples.

Owns how a row is cut and filled, and which row of which set a sample index reads. A batch is a pure function of its sample indices,
so that resuming needs no loader state. Must not know models or devices.

Sets are interleaved by their shares: among any n samples, a set has its share to within one. Each pass over a set's rows follows
its own keyed permutation. B rows, T tokens.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinkdlm.config.recipe import DataSection
from sinkdlm.data.shards import Split, open_split
from sinkdlm.errors import DataError
from sinkdlm.noise import Stream, permute, uniform

Array = np.ndarray[Any, Any]
_BLOCK = 4096  # indices whose rows are computed together
_GRAIN = 1 << 31  # shares are fractions of this; int64 then counts 2**32 rows


@dataclass(frozen=True)
class Batch:
    """tokens (B, T) int64. samples (B,): sample indices, which key the noise. maskable (B, T): positions that may be masked and
    are trained on, None for all. lengths (B,): of rows, None for full rows. documents (B, T): ids that confine attention."""

    tokens: Tensor
    samples: Tensor
    maskable: Tensor | None = None
    lengths: Tensor | None = None
    documents: Tensor | None = None

    @classmethod
    def nothing(cls, length: int) -> "Batch":
        """One row in which nothing may be masked, for a rank that has fewer rows than the others."""
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
        """Number of positions that the loss is divided by."""
        if self.maskable is None and not shifted:
            return self.tokens.numel()
        return int(self.scored(shifted=shifted).sum())

    def rows(self, part: slice) -> "Batch":
        """Some of the rows, or the row of `nothing` where there are none."""
        if part.start >= self.tokens.shape[0]:
            return Batch.nothing(self.tokens.shape[1])
        return self._each(lambda x: x[part])._without_full_lengths()

    @property
    def n_full(self) -> int:
        """Number of full rows; they come first."""
        return self.tokens.shape[0] if self.lengths is None else int((self.lengths == self.tokens.shape[1]).sum())

    def trimmed(self) -> "Batch":
        """Drop the columns behind the longest row: nothing attends to them or scores them."""
        if self.lengths is None:
            return self
        end = int(self.lengths.max())
        return self._each(lambda x: x[:, :end] if x.dim() == 2 else x)._without_full_lengths()

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda x: x.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """In page-locked memory, from which a GPU copies while it computes."""
        return self._each(lambda x: x.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {name: None if x is None else change(x) for name, x in vars(self).items()}
        return Batch(**changed)

    def _without_full_lengths(self) -> "Batch":
        return replace(self, lengths=None) if self.lengths is not None and self.n_full == self.tokens.shape[0] else self


class TextRows:
    """Rows of T tokens cut across documents; the tail that fills no row is left out."""

    def __init__(self, split: Split, length: int, stride: int) -> None:
        self.split, self.length, self.stride = split, length, stride
        self.n_rows = max(0, (split.n_tokens - length) // stride + 1)

    def fill(self, row: int, tokens: Array, maskable: Array) -> int:
        start = row * self.stride
        tokens[:] = self.split.read(start, start + self.length)
        return self.length


class ExampleRows:
    """Rows of one example each: the prompt, which is never masked, the response, then EOS up to T."""

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


def deal(samples: Array, shares: Sequence[float]) -> tuple[Array, Array]:
    """Return (set of each sample, its index within that set), for sample indices (B,).

    The first set takes sample n where floor((n + 1) w) exceeds floor(n w). The others are renumbered without gaps and dealt to the
    next set with its share of the rest.
    """
    chosen = np.full(samples.shape, len(shares) - 1, np.int64)
    indices = samples.astype(np.int64).copy()
    open_ = np.ones(samples.shape, bool)
    left = float(sum(shares))
    for number, share in enumerate(shares[:-1]):
        part = max(1, round(_GRAIN * share / left))
        before = indices * part // _GRAIN
        taken = open_ & ((indices + 1) * part // _GRAIN > before)
        chosen[taken] = number
        indices = np.where(open_, np.where(taken, before, indices - before), indices)
        open_ &= ~taken
        left -= share
    return chosen, indices


def rows_of(indices: Array, n_rows: int, seed: int, number: int) -> Array:
    """The row of each index within set `number`: pass after pass, each in its own order."""
    blocks, places = indices // _BLOCK, indices % _BLOCK
    rows = np.empty_like(indices)
    for block in np.unique(blocks):
        here = blocks == block
        rows[here] = _block(int(block), n_rows, seed, number)[places[here]]
    return rows


@functools.lru_cache(maxsize=1024)  # 32 MB at most: several blocks of every set of a mixture
def _block(block: int, n_rows: int, seed: int, number: int) -> Array:
    """The rows of many indices, computed at once: permuting thousands of numbers takes no longer than a hundred."""
    indices = np.arange(block * _BLOCK, (block + 1) * _BLOCK)
    passes, places = torch.from_numpy(indices // n_rows), torch.from_numpy(indices % n_rows)
    return permute(places, n_rows, seed, number, passes).numpy()


class Rows:
    """The rows of one or several sets. Makes the batch of any sample indices."""

    def __init__(
        self, splits: Sequence[Split], shares: Sequence[float], section: DataSection, *, seed: int, vocab_size: int, mask_id: int
    ) -> None:
        self.splits, self.shares, self.section, self.seed = list(splits), list(shares), section, seed
        self.vocab_size, self.mask_id = vocab_size, mask_id
        self.eos = self._find_eos()
        self.sets = [self._rows_of(split) for split in splits]
        for split in splits:
            if split.highest_id is not None and split.highest_id >= vocab_size:
                raise DataError(
                    f"{split.folder}: token ids go up to {split.highest_id}, model.vocab_size is {vocab_size}: "
                    "prepare the set with this model's tokenizer, or set model.vocab_size to what `sinkdlm data info` says"
                )
        self.n_rows = sum(rows.n_rows for rows in self.sets)
        self.n_too_long = sum(rows.n_too_long for rows in self.sets if isinstance(rows, ExampleRows))
        self._of_examples = np.array([isinstance(rows, ExampleRows) for rows in self.sets])
        # Whether the number of scored positions depends on which rows a batch holds.
        self.counts_vary = bool(
            section.random_lengths or section.documents == "confined" or section.first is not None or self._of_examples.any()
        )

    def _find_eos(self) -> int | None:
        if self.section.eos is not None:
            return self.section.eos
        found = {split.eos_id for split in self.splits if split.eos_id is not None}
        if len(found) > 1:
            raise DataError(f"data.sets: documents end with different ids {sorted(found)}: sets of different tokenizers do not mix")
        return found.pop() if found else None

    def _rows_of(self, split: Split) -> TextRows | ExampleRows:
        section = self.section
        if split.kind == "examples":
            assert self.eos is not None
            examples = ExampleRows(split, section.length, self.eos, section.padding)
            if examples.n_rows == 0:
                raise DataError(
                    f"{split.folder}: all examples are longer than data.length = {section.length}; raise it, at most to the "
                    "model's context_length, or prepare shorter examples or with a tokenizer that needs fewer tokens"
                )
            return examples
        if section.documents == "confined" and self.eos is None:
            raise DataError(f"{split.folder}: does not say which id ends documents; data.documents = 'confined' needs data.eos")
        text = TextRows(split, section.length, section.stride or section.length)
        if text.n_rows == 0:
            raise DataError(f"{split.folder}: {split.n_tokens} tokens fill no row of data.length = {section.length}; lower it")
        return text

    def batch(self, samples: Array) -> Batch:
        """Return the rows of these sample indices (B,). Short rows come last, so that few forwards need their lengths."""
        length, samples = self.section.length, samples.astype(np.int64)
        if not len(samples):
            return Batch(torch.empty(0, length, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
        chosen, indices = deal(samples, self.shares)
        rows = np.empty_like(indices)
        for number in np.unique(chosen).tolist():
            here = chosen == number
            rows[here] = rows_of(indices[here], self.sets[number].n_rows, self.seed, number)
        whole = self._of_examples[chosen]
        lengths = self._random_lengths(samples, whole)
        tokens = np.empty((len(samples), length), np.int64)
        maskable = np.ones((len(samples), length), bool)
        for slot, (number, row) in enumerate(zip(chosen.tolist(), rows.tolist(), strict=True)):
            end = self.sets[number].fill(row, tokens[slot], maskable[slot])
            lengths[slot] = min(lengths[slot], end)
            maskable[slot, lengths[slot] :] = False
        if self.section.first is not None:
            tokens[~whole, 0], maskable[~whole, 0] = self.section.first, False
        self._check_ids(tokens, chosen, rows)
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

    def _random_lengths(self, samples: Array, whole: Array) -> Array:
        """Lengths of rows: random for some, as LLaDA does, keyed by the sample index; never for examples."""
        full = np.full(len(samples), self.section.length, np.int64)
        if not self.section.random_lengths:
            return full
        cut, share = (uniform(self.seed, Stream.LENGTH, torch.from_numpy(samples), draw).numpy() for draw in (0, 1))
        drawn = np.minimum(1 + (share * self.section.length).astype(np.int64), self.section.length)
        return np.where((cut < self.section.random_lengths) & ~whole, drawn, full)

    def _documents(self, tokens: Array, whole: Array) -> Tensor:
        """Document ids that step up after each EOS; the EOS belongs to the document it ends. An example is one document."""
        ends = (tokens == self.eos) & ~whole[:, None]
        return torch.from_numpy(np.cumsum(ends, axis=1) - ends)

    def _check_ids(self, tokens: Array, chosen: Array, rows: Array) -> None:
        masks = self.mask_id < self.vocab_size and bool((tokens == self.mask_id).any())
        if int(tokens.view(np.uint64).max()) < self.vocab_size and not masks:  # unsigned: negative ids are large
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
    """Open the rows of a recipe's sets, or of its validation data (None where there is none)."""
    if not section.sets:
        raise DataError("data.sets: empty; name a prepared set: --set 'data.sets={\"data/mine\"=1}'")
    if split == "validation" and section.validation is not None:
        held = open_split(section.validation, "validation")
        opened = [(held if held.n_tokens else open_split(section.validation), 1.0)]
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
    """Folder of the tokenizer that prepared these splits; None where none was kept."""
    folders = (split.folder / "tokenizer" for split in splits)
    return next((folder for folder in folders if folder.is_dir()), None)
