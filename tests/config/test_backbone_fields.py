"""Fields that Qwen3 and Llama 3 brought: head_dim, qk_norm, rotary scaling."""

import pytest
import torch

from sinkdlm import DiffusionLM, ModelConfig
from sinkdlm.config.model import preset_fields
from sinkdlm.errors import ConfigError
from sinkdlm.model.positions import Rotation
from sinkdlm.planning.formulas import kept_by_block, training_flops
from small_models import BACKBONE, SMALL, VARIANTS, small_config


def test_a_config_of_before_gets_the_width_that_it_had():
    assert "head_dim" not in SMALL
    assert ModelConfig(**SMALL).head_dim == 4


def test_head_dim_follows_its_sources_until_it_is_set():
    config = small_config()
    assert config.replace(n_heads=2).head_dim == 12
    assert config.replace(d_model=48).head_dim == 8
    assert config.replace(n_heads=2, head_dim=6).head_dim == 6
    assert small_config(head_dim=32).replace(n_heads=2).head_dim == 32
    assert small_config(d_model=25, head_dim=6).d_model == 25  # needs no division


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"head_dim": 7}, ["head_dim = 7", "even"]),
        ({"head_dim": 0}, ["head_dim = 0"]),
        ({"n_heads": 5, "n_kv_heads": 5}, ["n_heads = 5", "d_model = 24", "head_dim"]),
        ({"d_model": 18}, ["n_heads = 6", "d_model = 18"]),
        ({"n_heads": 0}, ["n_heads = 0"]),
        ({"d_model": 0}, ["d_model = 0"]),
        ({"rope_factor": 0.5}, ["rope_factor = 0.5"]),
        ({"rope_high_freq_factor": 1.0}, ["rope_high_freq_factor = 1.0", "rope_low_freq_factor = 1.0"]),
        ({"rope_original_context": 0}, ["rope_original_context = 0"]),
        ({"qk_norm": 1}, ["qk_norm = 1"]),
    ],
)
def test_bad_values_are_named(flags, words):
    with pytest.raises(ConfigError) as failure:
        small_config(**flags)
    assert all(word in str(failure.value) for word in words)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("flags", [VARIANTS["backbone"], {"head_dim": 8, "gate": "headwise", "qkv_bias": True}, {"qk_norm": True}])
def test_parameters_are_counted_exactly(flags):
    config = small_config(**flags)
    with torch.device("meta"):
        model = DiffusionLM(config)
    assert config.count_parameters().total == sum(weight.numel() for weight in model.parameters())
    assert config.gate_width == (0 if model.blocks[0].attention.gate is None else model.blocks[0].attention.gate.out_features)


def test_plans_follow_the_width_of_heads():
    narrow, wide = small_config(), small_config(head_dim=8)
    more = 6 * (wide.count_parameters().non_embedding - narrow.count_parameters().non_embedding)
    assert training_flops(wide, 16) - training_flops(narrow, 16) == more + 12 * 3 * (6 * 4) * 16
    assert kept_by_block(wide, 4, compiled=True)["none"] - kept_by_block(narrow, 4, compiled=True)["none"] == 4 * (3 * 24 + 3 * 8)
    normed = kept_by_block(wide.replace(qk_norm=True), 4, compiled=True)
    assert normed["none"] - kept_by_block(wide, 4, compiled=True)["none"] == 4 * (48 + 16)


def test_scaling_by_one_is_none():
    plain, scaled = (small_config(**BACKBONE, gate="none").replace(rope_factor=factor) for factor in (1.0, 8.0))
    positions = torch.arange(9)
    one, other = (Rotation.at(positions, config, torch.float64) for config in (plain, scaled))
    kept = (one.cos == other.cos).all(1).flatten()
    assert 0 < kept.sum() < len(kept)
    assert kept[0]  # the fastest angle
    assert torch.equal(Rotation.at(positions, plain.replace(rope_original_context=9), torch.float64).cos, one.cos)


def test_presets_without_the_fields_have_their_defaults():
    fields = preset_fields("qwen2.5-1.5b")
    assert (fields["head_dim"], fields["qk_norm"], fields["rope_factor"]) == (128, False, 1.0)
