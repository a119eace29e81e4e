"""Servers for tests: small models behind a real socket on the loopback, in a thread of this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from evaluated import small_lm
from sinkdlm import DiffusionLM, ModelConfig
from sinkdlm.checkpoint.directory import Loaded
from sinkdlm.serving.engine import Capacity
from sinkdlm.serving.served import Limits
from sinkdlm.serving.server import Server, address_of, bind, make_site
from sinkdlm.serving.site import Settings, Site

SECONDS = 120  # generous, so that a busy machine fails no test
PROMPT = "the cat "
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def letters_lm(seed: int = 0, **flags) -> Loaded:
    """A model with a token for each letter; float64, so that a batch changes no answer."""
    lm = small_lm(seed, **flags)
    lm.tokenizer.chat_template = TEMPLATE
    return lm


def sharp_lm(seed: int = 9, **flags) -> Loaded:
    """`letters_lm` with sharp attention: some tokens are sinks, and move."""
    lm = letters_lm(seed, **flags)
    with torch.no_grad():
        for block in lm.model.blocks:
            block.attention.qkv.weight.mul_(6**0.5)
    return lm


NASTY = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\x00",
    "\x1b[31m",
    "\u202e",
    "&lt;",
    "\n",
    " ",
    "javascript:",
    "'\"`",
]


def nasty_lm(seed: int = 0) -> Loaded:
    """A model whose tokens are all text that a page must show and never run."""
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["<unk>", *NASTY])}, unk_token="<unk>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("|", "removed"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    vocab = len(tokenizer)
    config = ModelConfig(vocab_size=vocab, mask_id=vocab, n_layers=1, n_heads=2, d_model=16, d_ff=24, context_length=64)
    model = DiffusionLM(config, seed=seed).to(torch.float64)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # any token is as likely as any other
    return Loaded(model, tokenizer, config)


def bytes_lm(seed: int = 0) -> Loaded:
    """A token for each byte: a character may need several, and random weights write broken ones."""
    names = {name: number for number, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(names, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    vocab = len(tokenizer)
    config = ModelConfig(vocab_size=vocab, mask_id=vocab, n_layers=1, n_heads=2, d_model=16, d_ff=24, context_length=64)
    return Loaded(DiffusionLM(config, seed=seed).to(torch.float64), tokenizer, config)


class Running:
    def __init__(self, site: Site, url: str, server: Server) -> None:
        self.site, self.url, self.server = site, url, server


@contextmanager
def serving(
    lms: dict[str, Loaded],
    *,
    capacity: Capacity | None = None,
    limits: Limits | None = None,
    bos: bool | None = None,
    **settings,
) -> Iterator[Running]:
    site = make_site(lms, capacity or Capacity(), limits or Limits(), Settings(**settings), bos=bos)
    bound, ready = bind("127.0.0.1", 0), threading.Event()
    server = Server(site, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        assert ready.wait(SECONDS)
        yield Running(site, address_of(bound), server)
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        bound.close()
        closed = [served.engine.close(SECONDS) for served in site.models.values()]
        assert not thread.is_alive()
        assert all(closed)


def complete(client, prompt=PROMPT, *, model="letters", max_tokens=12, **more):
    return client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, **more)


def ours(**fields):
    return {"extra_body": {"sinkdlm": fields}}
