"""A small model with a tokenizer for the evaluation tests: random weights, letters for tokens."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sinkdlm import DiffusionLM, ModelConfig, save
from sinkdlm.checkpoint.directory import Loaded

LETTERS = " \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;?!'\"#$%()-+=/<>_"
TEXTS = ["the cat sat on the mat. ", "a dog ran home, fast. ", "why is it so cold? ", "count: 1 2 3 and 4. "]


def tiny_tokenizer(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """A token for each letter; with bos, texts begin with that token, as Llama-2's do."""
    special = ["<unk>", "</s>", "<s>"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *LETTERS])}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(special)
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    names = {"unk_token": "<unk>", "eos_token": "</s>", **({"bos_token": "<s>"} if bos else {})}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def small_lm(seed: int = 0, *, bos: bool = False, **flags) -> Loaded:
    """A float64 model with weights so large that every term matters."""
    tokenizer = tiny_tokenizer(bos=bos)
    vocab = len(tokenizer)
    shape = {"n_layers": 2, "n_heads": 2, "d_model": 16, "d_ff": 24, "context_length": 256, "n_sinks": 1}
    config = ModelConfig(vocab_size=vocab, mask_id=vocab, **{**shape, **flags})
    model = DiffusionLM(config, seed=seed).to(torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return Loaded(model, tokenizer, config)


def padded_lm(seed: int = 0, *, rows: int = 8, **flags) -> Loaded:
    """A model whose head has rows without a token, and predicts them far above all others."""
    lm = small_lm(seed)
    vocab = lm.config.vocab_size + rows
    config = lm.config.replace(vocab_size=vocab, mask_id=vocab, **flags)
    model = DiffusionLM(config, seed=seed).to(torch.float64)
    with torch.no_grad():
        model.lm_head.weight[-rows:] *= 100
    return Loaded(model, lm.tokenizer, config)


def save_model(path: Path, **flags) -> Path:
    lm = small_lm(**flags)
    return save(path, lm.model, lm.tokenizer)
