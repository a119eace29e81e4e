"""Qwen3, Llama 3 and Mistral: tiny models that transformers itself wrote compute the same here, and go back as they came. SDAR,
which is Qwen3 with attention over blocks, against a plain form."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import sinkdlm
from plain import QWEN3_NAMES, logits
from reference import frequencies, hidden_states
from sinkdlm import ModelConfig, UserError
from sinkdlm.interop import convert, load_any, open_source
from sinkdlm.interop.adapt import choose_mask

VOCAB, HEAD = 97, 16
SHAPE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
SHAPE |= {"vocab_size": VOCAB, "head_dim": HEAD, "max_position_embeddings": 128}
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 64}
BUILD = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(rope_theta=1e6, tie_word_embeddings=True, **SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(rope_theta=5e3, rope_scaling={**SCALING}, **SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=None, **SHAPE)),
}


@pytest.fixture(scope="module")
def parents(tmp_path_factory) -> dict:
    folder, found = tmp_path_factory.mktemp("parents"), {}
    for kind, build in BUILD.items():
        torch.manual_seed(1)
        model = build().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * torch.randn_like(weight)
        model.save_pretrained(folder / kind)
        found[kind] = (folder / kind, model)
    return found


def altered(source: Path, to: Path, without: tuple[str, ...] = (), **fields) -> Path:
    """The same weights under another config.json."""
    config = {**json.loads((source / "config.json").read_text()), **fields}
    to.mkdir()
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in without}))
    (to / "model.safetensors").symlink_to(source / "model.safetensors")
    return to


def causal_difference(path: Path, parent) -> float:
    model = load_any(path).model
    tokens = torch.randint(0, VOCAB, (3, 90), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = model.head(model(tokens, causal=True)), parent(tokens).logits
    assert theirs.std() > 0.1
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("kind", BUILD)
def test_causal_logits_equal_the_parents(parents, kind):
    """Rows longer than the original context of the scaling."""
    path, parent = parents[kind]
    assert causal_difference(path, parent) <= 1e-5
    config = open_source(path).config
    assert (config.head_dim, config.qk_norm, config.qkv_bias) == (HEAD, kind == "qwen3", False)
    assert config.rope_factor == (8.0 if kind == "llama" else 1.0)


@pytest.mark.parametrize("kind", BUILD)
def test_both_forms_of_a_config_are_read(parents, tmp_path, kind):
    """transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters."""
    path, parent = parents[kind]
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"} if kind == "llama" else None
    old = altered(path, tmp_path / "old", ("rope_parameters",), rope_theta=rope["rope_theta"], rope_scaling=scaling)
    assert open_source(old).config == open_source(path).config
    assert causal_difference(old, parent) <= 1e-5


@pytest.mark.parametrize("kind", BUILD)
def test_export_as_the_parents_architecture_is_bit_equal(parents, tmp_path, kind):
    path, parent = parents[kind]
    convert(path, tmp_path / "x", changes={"mask_id": 96})
    report = convert(tmp_path / "x", tmp_path / "back", to="hf")
    assert report["wrote"] == f"transformers directory ({kind})"
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(parent)
    state = back.state_dict()
    assert set(state) == set(parent.state_dict())
    assert all(torch.equal(weight, state[name]) for name, weight in parent.state_dict().items())
    for key in (
        "rope_parameters",
        "rms_norm_eps",
        "tie_word_embeddings",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ):
        assert getattr(back.config, key) == getattr(parent.config, key), key
    assert getattr(back.config, "sliding_window", None) is None
    tokens = torch.arange(90)[None]
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, parent(tokens).logits)
    assert open_source(tmp_path / "back").config == sinkdlm.load(tmp_path / "x").config


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize(
    "flags",
    [
        {"n_sinks": 2, "gate": "elementwise"},
        {"n_sinks": 1, "sink_position": "end", "sink_value": "zero", "gate": "headwise"},
        {"n_sinks": 1, "sink_kind": "register", "shift_logits": True},
        {"n_sinks": 1, "sink_kind": "logit"},
    ],
)
def test_sinks_and_gates_go_on_every_parent(parents, kind, flags):
    """They compute what the masked form of the paper does with the same weights."""
    path, parent = parents[kind]
    loaded = load_any(path, {"mask_id": 96, **flags}, dtype=torch.float64)
    weights = loaded.model.state_dict()
    assert torch.equal(weights["embed.weight"], parent.get_input_embeddings().weight.double())
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = loaded.model(tokens)
    for row, ours in zip(tokens, found, strict=True):
        assert (ours - hidden_states(weights, loaded.config, row)).abs().max() <= 1e-10
    assert loaded.config.gate_width in (0, 6, 6 * HEAD)


@pytest.mark.parametrize("kind", BUILD)
def test_blocks_caches_and_own_checkpoints(parents, tmp_path, kind):
    path, _ = parents[kind]
    convert(path, tmp_path / "x", changes={"mask_id": 96, "n_sinks": 1, "block_size": 4})
    lm = sinkdlm.load(tmp_path / "x", dtype=torch.float64)
    given = {"prompt": [[1, 2, 3, 4, 5], [6]], "mask_id": 96, "length": 14, "seed": 0}
    with lm.model.inference():
        cached, plain = (sinkdlm.sampling.generate(lm.model.denoiser(), cache=cache, **given) for cache in ("exact", "none"))
    assert torch.equal(cached.tokens, plain.tokens)
    assert convert(tmp_path / "x", tmp_path / "hf", to="hf")["wrote"] == "transformers directory (sinkdlm)"
    assert sinkdlm.load(tmp_path / "hf").config == lm.config


def test_the_official_form_has_no_place_for_them(parents, tmp_path):
    for kind, word in {"qwen3": "qk_norm = True", "llama": "rope_factor = 8.0", "mistral": "head_dim = 16"}.items():
        with pytest.raises(UserError, match=word):
            convert(parents[kind][0], tmp_path / "official", to="official")


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 32}, "use_sliding_window = True"),
        ("qwen3", {"head_dim": 7}, "head_dim = 7: must be even"),
        ("qwen3", {"head_dim": "wide"}, "head_dim = 'wide'"),
        ("qwen3", {"head_dim": 8}, r"q_proj.weight has shape \(96, 48\), expected \(48, 48\)"),
        ("llama", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("llama", {"rope_parameters": {**SCALING, "rope_type": "yarn"}}, "rotary scaling 'yarn' is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' has no low_freq_factor"),
        ("llama", {"rope_parameters": {**SCALING, "factor": "8"}}, "rope_factor = '8'"),
        ("llama", {"rope_parameters": {**SCALING, "high_freq_factor": 1.0}}, "rope_high_freq_factor = 1.0: must be more"),
        ("llama", {"rope_parameters": {**SCALING, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved = True"),
        ("mistral", {"sliding_window": 64}, "sliding_window = 64 is not supported; .* set max_position_embeddings = 64"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(parents, tmp_path, kind, fields, words):
    altered(parents[kind][0], tmp_path / "src", **fields)
    with pytest.raises(UserError, match=words) as failure:
        convert(tmp_path / "src", tmp_path / "x")
    assert "\n" not in str(failure.value)
    assert not (tmp_path / "x").exists()


def test_a_window_that_cuts_nothing_is_none(parents, tmp_path):
    path, parent = parents["mistral"]
    assert causal_difference(altered(path, tmp_path / "wide", sliding_window=128), parent) <= 1e-5
    default = altered(path, tmp_path / "default", ("sliding_window",))  # theirs: 4096
    assert open_source(default).config == open_source(path).config


def test_a_qwen3_without_a_head_dim_has_theirs(parents, tmp_path):
    path = altered(parents["qwen3"][0], tmp_path / "src", ("head_dim",))
    assert json.loads((path / "config.json").read_text()).get("head_dim") is None
    with pytest.raises(UserError, match=r"expected \(768, 48\)"):  # 6 heads of 128
        load_any(path)


def test_mask_is_what_the_tokenizer_names_or_sdars():
    qwen3 = SimpleNamespace(kind="qwen3", config=ModelConfig.preset("qwen3-0.6b"))
    assert choose_mask(qwen3, None)[0] == 151669 == qwen3.config.mask_id


def write_gguf(path: Path, kind: str, model, rope_freqs: list[float] | None = None) -> None:
    """A GGUF file as the common converters write it: query and key rows permuted for llama."""
    gguf = pytest.importorskip("gguf")
    writer, config = gguf.GGUFWriter(path, kind), model.config
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{i}" for i in range(VOCAB)])
    writer.add_token_merges(["w 1"])
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk"}
    names |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
    names |= {"self_attn.": "attn_", "mlp.": "ffn_", "_proj": ""}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            values = weight.unflatten(0, (-1, 2, HEAD // 2)).transpose(1, 2).flatten(0, 2)
        for theirs, its in names.items():
            name = name.replace(theirs, its)
        writer.add_tensor(name, values.contiguous().numpy())
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", torch.tensor(rope_freqs).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", BUILD)
def test_gguf_files_compute_the_same(parents, tmp_path, kind, monkeypatch):
    _, parent = parents[kind]
    slowdown = None
    if kind == "llama":  # of Llama 3's own context: the tensor tells only the result
        shape = {**SHAPE, "max_position_embeddings": 16384}
        config = LlamaConfig(rope_theta=5e5, rope_scaling={**SCALING, "original_max_position_embeddings": 8192}, **shape)
        scaled = LlamaForCausalLM(config).eval()
        scaled.load_state_dict(parent.state_dict())
        parent = scaled
        slowdown = [a / b for a, b in zip(frequencies(5e5, HEAD), frequencies(5e5, HEAD, factor=8.0), strict=True)]
        assert 1 == slowdown[0] < slowdown[-1] == 8
    write_gguf(tmp_path / "m.gguf", "llama" if kind == "mistral" else kind, parent, slowdown)
    from sinkdlm.interop import adapt

    monkeypatch.setattr(adapt, "tokenizer_of", lambda source: None)  # a made-up vocabulary
    assert causal_difference(tmp_path / "m.gguf", parent) <= 1e-5
    assert open_source(tmp_path / "m.gguf").config.rope_factor == (8.0 if kind == "llama" else 1.0)


@pytest.mark.parametrize("slowdown", [[1.0, 1.0, 2.0, 3.0, 8.0, 8.0, 8.0, 8.0], [1.0, 8.0], [float("nan")] * 8, [0.5] * 8])
def test_gguf_scaling_of_another_kind_is_refused(parents, tmp_path, slowdown):
    write_gguf(tmp_path / "m.gguf", "llama", parents["llama"][1], slowdown)
    with pytest.raises(UserError, match=r"rope_freqs.weight is rotary scaling .* only Llama 3's; convert") as failure:
        open_source(tmp_path / "m.gguf")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("qwen3-0.6b", 596.04992),
        ("qwen3-1.7b", 1720.574976),
        ("llama3.2-1b", 1235.8144),
        ("smollm2-360m", 361.82112),
        ("smollm2-1.7b", 1711.376384),
    ],
)
def test_presets_have_as_many_parameters_as_published(name, millions):
    config = ModelConfig.preset(name)
    new_row = config.d_model * (config.embedding_rows - config.vocab_size)
    assert config.count_parameters().total - new_row == round(millions * 1e6)


# -- SDAR -------------------------------------------------------------------------------------------------------------------------

SDAR = {  # the keys of the published config.json of SDAR-1.7B-Chat
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_sdar.SDARConfig", "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM"},
    "block_size": 4,
    "bos_token_id": 91,
    "eos_token_id": 91,
    "fuse_cross_entropy": True,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "mask_token_id": 94,
    "max_position_embeddings": 128,
    "max_window_layers": 28,
    "model_type": "sdar",
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}


def write_sdar(folder: Path, qwen3: dict, without: tuple[str, ...] = (), **fields) -> dict:
    """Its tensors have Qwen3's names."""
    state = {name: weight.clone() for name, weight in qwen3.items()}
    state["lm_head.weight"] = state["lm_head.weight"].flip(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({key: value for key, value in {**SDAR, **fields}.items() if key not in without}))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return state


@pytest.mark.parametrize("size", [3, 4, 32])
def test_sdar_computes_the_same(parents, tmp_path, size):
    """Rows of 11 tokens, the last three of them masked: each is predicted at its own place, as they decode."""
    state = write_sdar(tmp_path / "src", parents["qwen3"][1].state_dict(), block_size=size)
    report = convert(tmp_path / "src", tmp_path / "x")
    assert report["found"].startswith("sdar (transformers directory): 2 layers, width 48")
    lm = sinkdlm.load(tmp_path / "x")
    found = lm.config
    assert (found.block_size, found.mask_id, found.shift_logits, found.qk_norm) == (size, 94, False, True)
    tokens = torch.randint(0, 94, (11,), generator=torch.Generator().manual_seed(2))
    tokens[8:] = 94
    with torch.no_grad():
        ours = lm.model.head(lm.model(tokens[None]))[0]
    theirs = logits(state, QWEN3_NAMES, tokens, layers=2, width=HEAD, base=1e6, eps=1e-6, shift=False, block=size)
    assert (ours - theirs).abs().max() <= 1e-5
    assert theirs.std() > 0.1


def test_sdar_comes_in_and_goes_out_as_it_is(parents, tmp_path):
    state = write_sdar(tmp_path / "src", parents["qwen3"][1].state_dict())
    convert(tmp_path / "src", tmp_path / "x")
    report = convert(tmp_path / "x", tmp_path / "back", to="hf")
    assert (report["wrote"], report["notes"]) == ("transformers directory (sdar)", [])
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in state)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    defaults = {"attention_bias", "auto_map", "max_window_layers", "rope_scaling", "sliding_window", "torch_dtype"}
    assert {key for key in SDAR if written.get(key, "absent") != SDAR[key]} == defaults
    assert written["auto_map"] == {**SDAR["auto_map"], "AutoModel": "modeling_sdar.SDARModel"}
    assert open_source(tmp_path / "back").config == sinkdlm.load(tmp_path / "x").config
    sunk = load_any(tmp_path / "src", {"n_sinks": 1, "block_size": 8}).config
    assert (sunk.n_sinks, sunk.block_size) == (1, 8)


def test_what_sdars_config_leaves_out_is_what_their_code_takes(parents, tmp_path):
    write_sdar(tmp_path / "a", parents["qwen3"][1].state_dict(), without=("block_size",))
    found = open_source(tmp_path / "a")
    assert found.config.block_size == 4
    assert "--set block_size=N" in found.notes[0]
    write_sdar(tmp_path / "b", parents["qwen3"][1].state_dict(), without=("mask_token_id",))
    with pytest.raises(UserError, match="mask_id = 151669"):  # beyond this vocabulary
        open_source(tmp_path / "b")


def test_a_qwen3_with_blocks_goes_out_as_sdar(parents, tmp_path):
    changes = {"block_size": 8, "mask_id": 96}
    report = convert(parents["qwen3"][0], tmp_path / "x", to="hf", changes=changes)
    assert report["wrote"] == "transformers directory (sdar)"
    assert report["notes"] == ["blocks are of 8 tokens: give --block_length 8 to their generate.py, which takes 4"]
    config = open_source(tmp_path / "x").config
    assert (config.block_size, config.mask_id, config.tie_embeddings) == (8, 96, True)
    for n, field in enumerate(({"shift_logits": True}, {"n_sinks": 1}, {"gate": "headwise"})):
        report = convert(parents["qwen3"][0], tmp_path / f"{n}", to="hf", changes={**changes, **field})
        assert report["wrote"] == "transformers directory (sinkdlm)", field  # what their code does not do


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_size": 0}, "block_size = 0"),
        ({"block_size": "4"}, "block_size = '4'"),
        ({"mask_token_id": 1000}, "mask_id = 1000"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"model_type": "sdar_moe"}, "model_type 'sdar_moe' is not supported; supported: .*SDAR"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported"),
    ],
)
def test_an_sdar_that_is_not_supported_is_refused_in_one_line(parents, tmp_path, fields, words):
    write_sdar(tmp_path / "src", parents["qwen3"][1].state_dict(), **fields)
    with pytest.raises(UserError, match=words) as failure:
        convert(tmp_path / "src", tmp_path / "x")
    assert "\n" not in str(failure.value)


def test_a_mask_that_the_tokenizer_names_is_taken(parents, tmp_path):
    """As DiffuLLaMA's, a token that text could use; its logits are shifted, which no file of it tells."""
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", mask_token="w81").save_pretrained(tmp_path / "t")
    path, parent = parents["llama"]
    loaded = load_any(path, {"shift_logits": True}, tokenizer=tmp_path / "t")
    assert (loaded.config.mask_id, loaded.config.shift_logits) == (81, True)
    assert "[MASK] is id 81: the tokenizer names it so" in loaded.provenance["notes"]
    assert load_any(path, {"mask_id": 81}, tokenizer=tmp_path / "t").config.mask_id == 81
    tokens = torch.full((1, 9), 81)
    tokens[0, :4] = torch.arange(4)
    with torch.no_grad():
        ours = loaded.model.head(loaded.model(tokens))[0]
        full = torch.zeros(1, 1, 9, 9)
        theirs = parent(tokens, attention_mask=full).logits[0]
    assert (ours[1:] - theirs[:-1]).abs().max() <= 1e-5
