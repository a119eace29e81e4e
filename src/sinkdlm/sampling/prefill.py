"""Compute the finished blocks in front of rows of block diffusion, in parts, and share them between rows.

Only whole blocks are shared: a token sees its whole block. Takes a denoiser adapter; knows no model.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sinkdlm.sampling.prefix_cache import PrefixCache
from sinkdlm.sampling.requests import State

_PART = 1024  # tokens of a row in one forward, so that its mask stays small

Tokens = tuple[int, ...]


class PrefixStore:
    """Finished blocks of earlier rows, within so many bytes; those not used for longest leave first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.n_bytes = most_bytes, 0
        self._rows: OrderedDict[bytes, PrefixCache] = OrderedDict()  # by the last of a row's digests
        self._places: dict[bytes, bytes] = {}  # of each digest, the newest row that begins with those blocks

    @staticmethod
    def _digests(tokens: Tokens, size: int) -> list[bytes]:
        """A digest of each beginning of a text that ends with a block."""
        found, last = [], b""
        for start in range(0, len(tokens), size):
            last = hashlib.blake2b(last + array("q", tokens[start : start + size]).tobytes(), digest_size=16).digest()
            found.append(last)
        return found

    def find(self, tokens: Tokens, size: int) -> tuple[int, PrefixCache | None]:
        """The longest known beginning of a text: how many tokens, and the row that holds them."""
        digests = self._digests(tokens, size)
        for count in range(len(digests), 0, -1):
            if (place := self._places.get(digests[count - 1])) is not None:
                self._rows.move_to_end(place)
                return count * size, self._rows[place]
        return 0, None

    def add(self, tokens: Tokens, cache: PrefixCache, row: int) -> None:
        digests = self._digests(tokens, cache.block_size)
        if digests[-1] in self._places:
            return
        own = PrefixCache(len(tokens), 1, cache.block_size)
        own.take([0], cache, [row])
        self._rows[digests[-1]] = own
        self._places |= dict.fromkeys(digests, digests[-1])
        self.n_bytes += own.n_bytes
        while self.n_bytes > self.most_bytes:
            oldest, gone = self._rows.popitem(last=False)
            self.n_bytes -= gone.n_bytes
            self._places = {digest: place for digest, place in self._places.items() if place != oldest}


def extend(adapter: Any, cache: PrefixCache, tokens: Tensor, most: int = _PART) -> int:
    """Compute the next whole blocks of rows (B, T), at most `most` tokens of each or one block; return how many tokens."""
    begin, size = cache.kept[0], cache.block_size
    stop = min(tokens.shape[1], begin + max(size, most - most % size))
    cache.open([(stop, stop)] * len(tokens), stop - begin)
    last = torch.full((len(tokens), 1), stop - begin - 1, device=tokens.device)
    adapter.logits(tokens[:, begin:stop], last, None, cache)
    cache.keep()
    return stop - begin


def open_prefixes(adapter: Any, texts: Sequence[Tokens], size: int) -> list[tuple[PrefixCache, list[Tokens]]]:
    """Open caches for different texts of one length, with what is known of them. All of a cache's rows are equally far."""
    found: dict[int, list[Tokens]] = {}
    known = {text: adapter.prefixes.find(text, size) if adapter.prefixes else (0, None) for text in texts}
    for text, (count, row) in known.items():
        # A shifted model also needs the state of the last token, which a row keeps of its own end.
        at_end = count == len(text) and row is not None and row.kept[0] > count and row.needs_state
        found.setdefault(count - size if at_end else count, []).append(text)
    caches = []
    for count, group in found.items():
        cache = PrefixCache(len(group[0]), len(group), size)
        for number, text in enumerate(group):
            if count and (row := known[text][1]) is not None:
                cache.take([number], row, [0])
        cache.kept = [count] * len(group)
        caches.append((cache, group))
    return caches


def compute_prefixes(
    adapter: Any, texts: Sequence[Tokens], size: int, device: torch.device
) -> dict[Tokens, tuple[PrefixCache, int]]:
    """The cache and row of each text, all of one length; equal texts are computed once."""
    found = {}
    for cache, group in open_prefixes(adapter, list(dict.fromkeys(texts)), size):
        tokens = torch.tensor(group).to(device)
        while cache.kept[0] < tokens.shape[1]:
            extend(adapter, cache, tokens)
        for number, text in enumerate(group):
            found[text] = (cache, number)
            if adapter.prefixes:
                adapter.prefixes.add(text, cache, number)
    return found


def missing_prefix(state: State) -> int:
    """Tokens in front of a row that are computed before or in its first step."""
    if state.policy.cache != "exact" or state.batch is not None:
        return 0
    begin, _ = state.request.model_block(state.plan.start)
    return begin - min((cache.kept[0] for cache in state.caches), default=0)


@torch.no_grad()
def prefill(state: State, adapter: Any, device: torch.device, most: int) -> None:
    """Compute at most `most` tokens of a row's finished blocks, or one block, ahead of its first step."""
    begin, _ = state.request.model_block(state.plan.start)
    size, mask_id = state.request.block_size or 1, state.request.mask_id
    texts = [tuple(state.request.canvas[:begin])]
    if state.policy.guidance:
        texts.append((mask_id,) * begin)  # the branch without the prompt
    if not state.caches:
        state.caches = [open_prefixes(adapter, [text], size)[0][0] for text in texts]
    for cache, text in zip(state.caches, texts, strict=True):
        while most > 0 and cache.kept[0] < begin:
            most -= extend(adapter, cache, torch.tensor([text]).to(device), most)
            if cache.kept[0] == begin and adapter.prefixes:
                adapter.prefixes.add(text, cache, 0)
