"""--dtype int8, nf4 and int4: commands compute with the rounded weights, and say what that costs."""

import json

import pytest
import torch

import sinkdlm
from evaluated import save_model
from sinkdlm.cli.loading import load_model
from sinkdlm.fast.weight_only import quantize_blocks

ON_CPU = ("--device", "cpu", "--json")


@pytest.mark.parametrize("kind", ["int8", "nf4", "int4"])
def test_commands_compute_with_the_rounded_weights(tmp_path, command_line, kind):
    """As on a checkpoint that holds these, and not as on the original."""
    path = save_model(tmp_path / "model", n_sinks=1)
    lm = sinkdlm.load(path)
    model = sinkdlm.load(path).model
    with torch.no_grad():
        for name, layer in quantize_blocks(model, kind).items():
            lm.model.get_submodule(name).weight.copy_(layer.dequantize(torch.float32))
    rounded = sinkdlm.save(tmp_path / "rounded", lm.model, lm.tokenizer)
    (tmp_path / "text.txt").write_text("the cat sat on the mat")
    asked = (
        ("sample", (), ("--prompt", "the cat ", "--length", 12, "--temperature", 1, *ON_CPU)),
        ("score", (tmp_path / "text.txt",), ("--draws", 8, *ON_CPU)),
    )
    for command, words, options in asked:
        status, out, err = command_line(command, path, *words, *options, "--dtype", kind)
        assert status == 0
        assert err.count("\n") == (kind != "int8")  # which loses nothing that was found
        assert f"--dtype {kind} rounds weights to 4 bits" in err or kind == "int8"
        found = json.loads(out)
        _, same, _ = command_line(command, rounded, *words, *options)
        if command == "sample":
            assert found["samples"] == json.loads(same)["samples"]
        else:
            _, other, _ = command_line(command, path, *words, *options)
            nats, expected, exact = (one["total"]["nats"] for one in (found, json.loads(same), json.loads(other)))
            assert nats == pytest.approx(expected, rel=1e-6)
            assert nats != pytest.approx(exact, rel=1e-6)


def test_results_name_it_and_it_is_not_saved(tmp_path):
    path = save_model(tmp_path / "model")
    lm = load_model(str(path), torch.device("cpu"), "nf4")
    assert lm.dtype == "nf4"
    assert lm.model.embed.weight.dtype == torch.float32
    with pytest.raises(sinkdlm.UserError, match="does not fit its config"):
        sinkdlm.save(tmp_path / "other", lm.model, lm.tokenizer)
