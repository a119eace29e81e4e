"""`diffusion_generate`: our samplers on the transformers class, in the words of transformers, LLaDA and Dream.

Goes into the standalone modelling file, as hf.py does, with the samplers. Knows no tokenizer: a text's end is given by its id.

B rows, P their width with padding, T with what is written.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from sinkdlm.errors import SamplingError
from sinkdlm.sampling.aliases import translate
from sinkdlm.sampling.loop import gather, requests_of, step, stream
from sinkdlm.sampling.requests import State, start
from sinkdlm.sampling.unmasking import FIELDS

_NEW_TOKENS = 64  # by default, or as many as fit
_OPTIONS = ("policy", "new_tokens", "mask_id", "seed", "numbers", "deterministic", *FIELDS)
_OURS = ("max_length", "do_sample", "num_return_sequences", "return_dict_in_generate", "output_history")
_NEUTRAL = ("transformers_version", "_from_model_config", "bos_token_id", "pad_token_id", "use_cache")  # of a GenerationConfig


@dataclass
class DiffusionOutput(ModelOutput):
    """sequences (B, T); confidence (B, T): probability of each written token when it was committed, NaN elsewhere; steps: of the
    row that took most; history: sequences after each step."""

    sequences: Tensor | None = None
    confidence: Tensor | None = None
    steps: int | None = None
    history: tuple[Tensor, ...] | None = None


def check_padding(attention_mask: Tensor, input_ids: Tensor) -> Tensor:
    """Return the mask as booleans, (B, P). Rows are padded on the left or on the right, not between their tokens."""
    mask = attention_mask.bool()
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {tuple(mask.shape)}: give one value for each of the tokens {tuple(input_ids.shape)}")
    begins = mask[:, 0].int() + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
    if not bool((begins == 1).all()):
        row = int((begins != 1).nonzero()[0])
        raise ValueError(f"attention_mask: row {row} is all padding, or has padding between its tokens; pad on the left or right")
    return mask


class DiffusionGeneration:
    """Decoding for a transformers class that holds a DiffusionLM as `model`."""

    model: Any

    @torch.no_grad()
    def diffusion_generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        generation_config: Any = None,
        streamer: Any = None,
        callback_on_step_end: Callable[[Any, int, float, dict[str, Tensor]], Any] | None = None,
        **options: Any,
    ) -> Tensor | DiffusionOutput:
        """Write after each row, and into its gaps ([MASK] in input_ids): (B, P) -> (B, P + new tokens), padded on the left.

        attention_mask: rows may be padded on either side; a row is written as if alone.
        generation_config: transformers' GenerationConfig, or a dictionary; options go before it.
        options: max_new_tokens (by default 64, or none where rows have gaps) or max_length, policy, seed, and the policy's fields,
            under our names or those of LLaDA, Dream and transformers. do_sample=True: at temperature 1 unless one is given; False:
            the likeliest token. num_return_sequences; return_dict_in_generate and output_history as in transformers and Dream.
            numbers: sample indices of the rows, which key their noise with the seed.
        streamer: gets one row's tokens from left to right, each once all before it are written.
        callback_on_step_end(model, step, share still masked, {sequences, committed, confidence}) is called after each step.
        """
        given = _read(generation_config, options)
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            mask = check_padding(attention_mask, input_ids)
        copies = given.pop("num_return_sequences", 1)
        input_ids, mask = input_ids.repeat_interleave(copies, dim=0), mask.repeat_interleave(copies, dim=0)
        if streamer is not None and len(input_ids) > 1:
            raise SamplingError(
                f"streamer: takes one row, and there are {len(input_ids)}; leave it out, or give callback_on_step_end"
            )
        as_dict, keeps = given.pop("return_dict_in_generate", False), given.pop("output_history", False)
        rows = [row[own].tolist() for row, own in zip(input_ids, mask, strict=True)]
        how = {"device": input_ids.device, "deterministic": given.pop("deterministic", False)}
        states = self._start(rows, input_ids.shape[1], given)

        padding = input_ids.gather(1, mask.to(torch.int8).argsort(dim=1, descending=True, stable=True))  # behind the tokens
        nothing = torch.full(padding.shape, torch.nan, device=padding.device)

        def lay_out(values: Iterable[Tensor], front: Tensor) -> Tensor:
            parts = zip(front, rows, states, values, strict=True)
            return torch.stack([torch.cat([pad[len(row) :], value[: state.length].to(pad)]) for pad, row, state, value in parts])

        def sequences() -> Tensor:
            return lay_out([state.tokens for state in states], padding)

        def confidence() -> Tensor:
            return lay_out([state.confidence for state in states], nothing)

        history = []
        # A scope caches the lane from the weights in place: not where accelerate brings parts of the model when they run.
        whole = {weight.device for weight in self.model.parameters()} == {input_ids.device}
        with self.model.inference() if whole else nullcontext():
            denoiser = self.model.denoiser()
            if streamer is None and callback_on_step_end is None and not keeps:
                while step(states, denoiser, together=True, **how):
                    pass
            else:
                told = _Told(streamer, states[0])
                n_open = sum(state.request.canvas.count(state.request.mask_id) for state in states)
                for number, taken in enumerate(stream(denoiser, states, **how)):
                    history += [sequences()] if keeps else []
                    told.tell()
                    if callback_on_step_end is not None:
                        left = sum(int((state.tokens == state.request.mask_id).sum()) for state in states) / n_open
                        committed = lay_out(taken.committed, torch.zeros_like(mask))
                        values = {"sequences": sequences(), "committed": committed, "confidence": confidence()}
                        callback_on_step_end(self, number, left, values)
                told.end()
        if not as_dict and not keeps:
            return sequences()
        return DiffusionOutput(sequences(), confidence(), gather(states).steps, tuple(history) if keeps else None)

    def _start(self, rows: list[list[int]], width: int, given: dict[str, Any]) -> list[State]:
        config = self.model.config
        if given.setdefault("mask_id", config.mask_id) != config.mask_id:
            raise SamplingError(f"mask_id = {given['mask_id']}: [MASK] of this model is {config.mask_id}; leave it out")
        longest = max(map(len, rows))
        if "max_length" in given:
            new = given.pop("max_length") - width
            if given.setdefault("new_tokens", new) != new:
                raise SamplingError(
                    f"max_length leaves {new} new tokens, and {given['new_tokens']} are asked for; give one of them"
                )
        if "new_tokens" not in given:
            has_gaps = any(config.mask_id in row for row in rows)
            given["new_tokens"] = 0 if has_gaps else max(1, min(_NEW_TOKENS, config.context_length - longest))
        new = given["new_tokens"]
        if isinstance(new, int) and longest + new > config.context_length:
            room = f"the model reads at most {config.context_length}; shorten the rows or max_new_tokens"
            raise SamplingError(f"rows of up to {longest} tokens and {new} to write: {room}")
        named = {"config": given.pop("policy")} if "policy" in given else {}
        return start(requests_of(rows, block_size=config.block_size, **named, **given))


class _Told:
    """A streamer of one row, and how much of the row it has got."""

    def __init__(self, streamer: Any, state: State) -> None:
        self._streamer, self._state = streamer, state
        self._n = state.request.canvas.index(state.request.mask_id)
        if streamer is not None:
            streamer.put(torch.tensor([state.request.canvas[: self._n]]))  # the prompt, which streamers may skip

    def tell(self) -> None:
        state = self._state
        if self._streamer is None or (state.policy.remask != "none" and not state.done):
            return
        tokens = state.tokens.tolist()
        end = tokens.index(state.request.mask_id) if state.request.mask_id in tokens else len(tokens)
        if end > self._n:
            self._streamer.put(torch.tensor(tokens[self._n : end]))
            self._n = end

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


def _read(config: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Join a generation config and options under our names. None says nothing."""
    told = config if isinstance(config, Mapping | None) else config.to_diff_dict()
    told = {name: value for name, value in (told or {}).items() if name not in _NEUTRAL}
    found: dict[str, Any] = {}
    for words in (told, options):
        own = translate({word: value for word, value in words.items() if value is not None}, (*_OPTIONS, *_OURS))
        if "new_tokens" in own or "max_length" in own:
            found = {name: value for name, value in found.items() if name not in ("new_tokens", "max_length")}
        found |= own
    draws = found.pop("do_sample", None)
    if draws:
        found.setdefault("temperature", 1.0)
    elif draws is not None:  # as in transformers, whatever stands beside it
        found = {name: value for name, value in found.items() if name not in ("top_k", "top_p", "min_p")} | {"temperature": 0.0}
    return found
