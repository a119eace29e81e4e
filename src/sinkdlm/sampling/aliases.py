"""The words that LLaDA, Dream and transformers have for our samplers' options, in one table.

Knows names and values alone: no policy, request or model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sinkdlm.config.toml import suggest
from sinkdlm.errors import SamplingError

# Word: our names for it, of which a caller takes the first that it has.
WORDS: dict[str, tuple[str, ...]] = {
    "max_new_tokens": ("new_tokens", "max_tokens", "length"),
    "gen_length": ("new_tokens", "max_tokens", "length"),
    "num_inference_steps": ("steps",),
    "diffusion_steps": ("steps",),
    "block_length": ("block",),
    "remasking": ("order",),
    "alg": ("order",),
    "alg_temp": ("order_temperature",),
    "eps": ("last_time",),
    "cfg_scale": ("guidance",),
    "guidance_scale": ("guidance",),
    "suppress_tokens": ("suppressed",),
    "mask_token_id": ("mask_id",),
    "eos_token_id": ("eos_id",),
}
# Words whose values have other names too.
_VALUES: dict[str, dict[str, str]] = {
    "remasking": {"low_confidence": "confidence", "random": "random"},
    "alg": {"origin": "ancestral", "maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "entropy"},
}


def words_for(allowed: Sequence[str]) -> dict[str, str]:
    """Return each word that names one of the allowed options, and the option."""
    found = {word: next((name for name in names if name in allowed), "") for word, names in WORDS.items() if word not in allowed}
    return {word: name for word, name in found.items() if name}


def translate(given: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, Any]:
    """Return options under our names. A word of others that is None says nothing, as in transformers."""
    words = words_for(allowed)
    found: dict[str, Any] = {}
    told: dict[str, str] = {}
    for word, value in given.items():
        if word not in allowed and word not in words:
            raise SamplingError(f"option {word!r}: unknown; {suggest(word, [*allowed, *words])}")
        if word in words and value is None:
            continue
        name, ours = words.get(word, word), _value(word, value) if word in words else value
        said = f"{word} = {value!r}"
        if name in found and found[name] != ours:
            raise SamplingError(f"{told[name]} and {said}: two names of one option; give one of them")
        found[name], told[name] = ours, said
    return found


def _value(word: str, value: Any) -> Any:
    if word in _VALUES:
        if not isinstance(value, str) or value not in _VALUES[word]:
            raise SamplingError(f"{word} = {value!r}: allowed: {', '.join(_VALUES[word])}")
        return _VALUES[word][value]
    if word == "guidance_scale" and isinstance(value, int | float):
        return value - 1  # un + s (cond - un)
    if word == "eos_token_id" and isinstance(value, list | tuple) and len(value) == 1:
        return value[0]
    return value
