"""Block-diffusion models of other families: Fast-dLLM v2 comes in and goes out; no other form loses the blocks silently."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import sinkdlm
from plain import LLAMA_NAMES, logits
from sinkdlm import UserError
from sinkdlm.interop import convert, load_any, open_source

LAYERS, WIDTH = 2, 8  # width of a head
QWEN_VOCAB = 151936  # as wide as Qwen2.5's, whose mask id Fast-dLLM's code has built in
CONFIG = {  # the keys of the published config.json, which has no mask_token_id
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration.Fast_dLLM_QwenConfig", "AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM"},
    "bd_size": 32,
    "bos_token_id": 91,
    "eos_token_id": 92,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "layer_types": ["full_attention"] * LAYERS,
    "max_position_embeddings": 128,
    "max_window_layers": 21,
    "model_type": "Fast_dLLM_Qwen",
    "num_attention_heads": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 1,
    "pad_token_id": 92,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": QWEN_VOCAB,
}


def tensors_of(config: dict, seed: int = 0) -> dict:
    d, ff, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = WIDTH * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
    sizes = ((ff, d), (ff, d), (d, ff))
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.{name}.weight": (d,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{block}.self_attn.{part}_proj.weight": (rows, d) for part, rows in (("q", d), ("k", kv), ("v", kv), ("o", d))}
        shapes |= {f"{block}.self_attn.{part}_proj.bias": (rows,) for part, rows in (("q", d), ("k", kv), ("v", kv))}
        shapes |= {f"{block}.mlp.{part}_proj.weight": size for part, size in zip(("gate", "up", "down"), sizes, strict=True)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, d)
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.2 * torch.randn(shape, generator=generator) + ("norm" in name) for name, shape in shapes.items()}


def write_fast_dllm(folder: Path, without: tuple[str, ...] = (), **fields) -> tuple[dict, dict]:
    config = {key: value for key, value in {**CONFIG, **fields}.items() if key not in without}
    state = tensors_of(config)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return config, state


def write_parent(folder: Path, kind: str, vocab: int) -> Path:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    build = {"qwen2": (Qwen2ForCausalLM, Qwen2Config), "llama": (LlamaForCausalLM, LlamaConfig)}[kind]
    torch.manual_seed(0)
    build[0](build[1](vocab_size=vocab, tie_word_embeddings=True, **shape)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [3, 4, 32])
def test_a_clean_prefix_and_a_masked_block_compute_the_same(tmp_path, size, tied):
    """Rows of 11 tokens, the last of them masked; a block's first token is predicted by the row before it, as they decode."""
    _, state = write_fast_dllm(tmp_path / "src", bd_size=size, tie_word_embeddings=tied, vocab_size=97, mask_token_id=94)
    report = convert(tmp_path / "src", tmp_path / "x")
    assert report["found"].startswith("fast_dllm_qwen (transformers directory): 2 layers, width 16")
    lm = sinkdlm.load(tmp_path / "x")
    found = lm.config
    assert (found.block_size, found.mask_id, found.shift_logits, found.qkv_bias) == (size, 94, True, True)
    assert (found.tie_embeddings, found.context_length, found.rope_base) == (tied, 128, 1e6)
    tokens = torch.randint(0, 94, (11,), generator=torch.Generator().manual_seed(2))
    tokens[8:] = 94
    with torch.no_grad():
        ours = lm.model.head(lm.model(tokens[None]))[0]
    theirs = logits(state, LLAMA_NAMES, tokens, layers=LAYERS, width=WIDTH, base=1e6, eps=1e-6, shift=True, block=size)
    assert (ours - theirs).abs().max() <= 1e-5
    assert theirs.std() > 0.1


def test_what_their_config_leaves_out_is_what_their_code_takes(tmp_path):
    write_fast_dllm(tmp_path / "src", without=("bd_size",))
    config = open_source(tmp_path / "src").config
    assert (config.mask_id, config.block_size) == (151665, 32)


def test_fast_dllm_comes_in_and_goes_out_as_it_is(tmp_path):
    config, state = write_fast_dllm(tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "x")
    report = convert(tmp_path / "x", tmp_path / "back", to="hf")
    assert report["wrote"] == "transformers directory (fast_dllm_qwen)"
    assert report["notes"] == []
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in state)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    left_to_their_defaults = {
        "attention_dropout",
        "auto_map",
        "initializer_range",
        "layer_types",
        "max_window_layers",
        "rope_scaling",
        "sliding_window",
        "torch_dtype",
        "use_cache",
    }
    assert {key for key in config if written.get(key, "absent") != config[key]} == left_to_their_defaults
    assert set(written["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    assert open_source(tmp_path / "back").config == sinkdlm.load(tmp_path / "x").config
    sunk = load_any(tmp_path / "src", {"n_sinks": 1}).config
    assert (sunk.n_sinks, sunk.block_size) == (1, 32)


def test_a_qwen2_with_blocks_goes_out_as_fast_dllm(tmp_path):
    path = write_parent(tmp_path / "qwen2", "qwen2", QWEN_VOCAB)
    changes = {"block_size": 4, "shift_logits": True, "mask_id": 151665}
    convert(path, tmp_path / "x", changes=changes)
    report = convert(tmp_path / "x", tmp_path / "out", to="hf")
    assert report["wrote"] == "transformers directory (fast_dllm_qwen)"
    assert report["notes"] == ["blocks are of 4 tokens: give block_size=4 to their generate() and forward(), which take 32"]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["model_type"], written["bd_size"]) == ("Fast_dLLM_Qwen", 4)
    assert open_source(tmp_path / "out").config == sinkdlm.load(tmp_path / "x").config
    for n, field in enumerate(({"mask_id": 151666}, {"shift_logits": False}, {"n_sinks": 1}, {"gate": "headwise"})):
        report = convert(path, tmp_path / f"{n}", to="hf", changes={**changes, **field})
        assert report["wrote"] == "transformers directory (sinkdlm)", field  # what their code does not do


def test_no_other_form_loses_the_blocks(tmp_path):
    fields = {"tie_word_embeddings": False, "vocab_size": 97, "mask_token_id": 94}
    write_fast_dllm(tmp_path / "dream", model_type="Dream", **fields)
    for kind in ("llama", "qwen2"):
        write_parent(tmp_path / kind, kind, 97)
    tokens = torch.arange(18).reshape(2, 9)
    for kind in ("dream", "llama", "qwen2"):
        convert(tmp_path / kind, tmp_path / f"{kind}-x", changes={"block_size": 4})
        report = convert(tmp_path / f"{kind}-x", tmp_path / f"{kind}-hf", to="hf")
        assert report["wrote"] == "transformers directory (sinkdlm)"
        wrapped = AutoModelForMaskedLM.from_pretrained(tmp_path / f"{kind}-hf")
        lm = sinkdlm.load(tmp_path / f"{kind}-hf")
        assert lm.config.block_size == wrapped.model.config.block_size == 4
        with torch.no_grad():
            torch.testing.assert_close(wrapped(tokens).logits, lm.model.head(lm.model(tokens)), rtol=0, atol=1e-6)
    with pytest.raises(UserError, match="block_size = 4 is not supported there, only None"):
        convert(tmp_path / "llama-x", tmp_path / "official", to="official")


def test_a_fast_dllm_without_its_blocks_is_not_written_as_one(tmp_path):
    """As a config with another mask id, which their code would not read."""
    write_fast_dllm(tmp_path / "src", vocab_size=97, mask_token_id=94)
    for n, changes in enumerate(({"block_size": None}, {})):
        report = convert(tmp_path / "src", tmp_path / f"{n}", to="hf", changes=changes)
        assert report["wrote"] == "transformers directory (sinkdlm)"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bd_size": 0}, "block_size = 0"),
        ({"bd_size": "32"}, "block_size = '32'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        ({"mask_token_id": None}, "mask_id = 151665"),  # beyond this vocabulary
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(tmp_path, fields, words):
    write_fast_dllm(tmp_path / "src", **{"vocab_size": 97, "mask_token_id": 94, **fields})
    with pytest.raises(UserError, match=words) as failure:
        convert(tmp_path / "src", tmp_path / "x")
    assert "\n" not in str(failure.value)
