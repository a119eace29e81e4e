"""Decoding and padding of the transformers class: as our own samplers, and each row as if alone."""

import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForMaskedLM, GenerationConfig, PreTrainedTokenizerFast, TextStreamer

import sinkdlm
from sinkdlm.errors import SamplingError
from sinkdlm.interop import SinkDLMConfig, SinkDLMForMaskedLM, convert
from sinkdlm.sampling import generate
from small_models import VARIANTS, small_config, small_model, small_tokens

MASK = 11
EOS = 3
LENGTHS = (4, 9, 1, 6)
SHAPES = {**VARIANTS, "blocks": {"n_sinks": 1, "block_size": 4}, "shifted-blocks": {**VARIANTS["parent"], "block_size": 4}}
POLICIES = {
    "llada": {"max_new_tokens": 6, "num_inference_steps": 6, "block_length": 2, "cfg_scale": 0.5},
    "drawn": {"max_new_tokens": 6, "temperature": 0.9, "top_k": 5, "top_p": 0.9, "seed": 4},
    "dream": {"max_new_tokens": 6, "policy": "dream", "alg_temp": 0.4, "temperature": 0.5},
    "ancestral": {"max_new_tokens": 7, "policy": "smdm-origin", "steps": 5},
    "remask": {"max_new_tokens": 6, "policy": "smdm-origin", "remask": "cap", "remask_rate": 0.4, "steps": 9},
    "fast": {"max_new_tokens": 6, "policy": "fast", "block_length": 2, "threshold": 0.3},
    "ends": {"max_new_tokens": 8, "temperature": 1.2, "eos_token_id": EOS, "block_length": 4},
}


def padded(lengths=LENGTHS, side: str = "left") -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Tokens (B, P), mask and the rows alone; padding holds tokens, which nobody may see."""
    width, place = max(lengths), torch.arange(max(lengths))
    counts = torch.tensor(lengths)[:, None]
    mask = place >= width - counts if side == "left" else place < counts
    tokens = small_tokens(len(lengths), width)
    return tokens, mask.long(), [row[own] for row, own in zip(tokens, mask, strict=True)]


def wrapped(**flags) -> SinkDLMForMaskedLM:
    return SinkDLMForMaskedLM.wrap(small_model(**{"n_layers": 2, **flags}))


# -- padding ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", list(SHAPES))
def test_padded_rows_equal_rows_alone(name, side):
    model = wrapped(**SHAPES[name])
    tokens, mask, rows = padded(side=side)
    with torch.no_grad():
        found = model(tokens, attention_mask=mask).logits
        for row, own, logits in zip(rows, mask.bool(), found, strict=True):
            torch.testing.assert_close(logits[own], model(row[None]).logits[0], rtol=0, atol=1e-10)


def test_gradients_of_a_left_padded_batch_are_the_rows():
    model = wrapped(n_sinks=1, gate="elementwise")
    tokens, mask, rows = padded()
    labels = torch.where(mask.bool(), tokens, -100)
    model(tokens, attention_mask=mask, labels=labels, num_items_in_batch=1).loss.backward()
    found = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    for row in rows:
        model(row[None], labels=row[None], num_items_in_batch=1).loss.backward()
    for weight, grad in zip(model.parameters(), found, strict=True):
        torch.testing.assert_close(grad, weight.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([[1, 1, 1, 1], [1, 0, 1, 1]], "row 1 is all padding, or has padding between its tokens; pad on the left or right"),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], "row 0 is all padding"),
        ([[1, 1, 1]], r"attention_mask \(1, 3\): give one value for each of the tokens \(2, 4\)"),
    ],
)
def test_other_masks_are_refused_in_one_line(mask, words):
    model, tokens = wrapped(), small_tokens(2, 4)
    for use in (model, model.diffusion_generate):
        with pytest.raises(ValueError, match=words) as caught:
            use(tokens, attention_mask=torch.tensor(mask))
        assert "\n" not in str(caught.value)


# -- config -----------------------------------------------------------------------------------------------------------------------


def test_the_config_answers_to_the_names_of_transformers(tmp_path):
    fields = small_config(n_sinks=1, context_length=48)
    config = SinkDLMConfig(**vars(fields))
    names = {
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 20,
        "max_position_embeddings": 48,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "mask_token_id": MASK,
    }
    assert {name: getattr(config, name) for name in names} == names
    assert SinkDLMConfig(vocab_size=11, n_sinks=1, **names).model_config() == fields
    config.num_hidden_layers = 2
    config.save_pretrained(tmp_path)
    again = SinkDLMConfig.from_pretrained(tmp_path)
    assert (again.n_layers, again.model_config()) == (2, fields.replace(n_layers=2))


# -- diffusion_generate -----------------------------------------------------------------------------------------------------------


def ours(model: SinkDLMForMaskedLM, prompt, options, **more) -> torch.Tensor:
    """What sinkdlm.sampling writes."""
    policy = {"config": options["policy"]} if "policy" in options else {}
    named = {name: value for name, value in options.items() if name != "policy"}
    with model.model.inference():
        return generate(model.model.denoiser(), prompt=prompt, mask_id=MASK, **policy, **named, **more)


@pytest.mark.parametrize("name", list(POLICIES))
def test_generate_equals_the_sampler(name):
    model, tokens = wrapped(n_sinks=1), small_tokens(3, 5)
    found = model.diffusion_generate(tokens, **POLICIES[name])
    assert torch.equal(found, ours(model, tokens, POLICIES[name]).tokens)
    assert torch.equal(found[:, :5], tokens)
    assert not (found == MASK).any()


@pytest.mark.parametrize("shape", ["vanilla", "register", "logit-gate", "sinks-2-end-zero-gate", "blocks", "shifted-blocks"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_written_as_if_alone(shape, side):
    model = wrapped(**{**SHAPES[shape], "mask_id": MASK} if shape != "shifted-blocks" else SHAPES[shape])
    tokens, mask, rows = padded(side=side)
    options = {"max_new_tokens": 6, "temperature": 0.8, "steps": 4, "seed": 2}
    found = model.diffusion_generate(tokens, attention_mask=mask, **options)
    assert found.shape == (4, 15)
    for number, row in enumerate(rows):
        (alone,) = model.diffusion_generate(row[None], numbers=[number], **options)
        assert torch.equal(found[number, 9 - len(row) :], alone)  # rows end together, whatever side they were padded on
        if side == "left":
            assert torch.equal(found[number, :9], tokens[number])


def test_gaps_are_filled():
    model, tokens = wrapped(n_sinks=1), small_tokens(2, 7)
    tokens[:, 2:4] = MASK
    found = model.diffusion_generate(tokens, steps=2)
    assert torch.equal(found, ours(model, tokens, {"length": 7, "steps": 2}).tokens)
    longer = model.diffusion_generate(tokens, max_new_tokens=3)
    assert torch.equal(longer, ours(model, tokens, {"length": 10}).tokens)


def test_what_a_length_is_by_default():
    model, tokens = wrapped(context_length=20), small_tokens(1, 5)
    assert model.diffusion_generate(tokens, steps=1).shape == (1, 20)
    assert model.diffusion_generate(tokens, steps=1, max_length=9).shape == (1, 9)
    assert model.diffusion_generate(tokens, max_new_tokens=2, num_return_sequences=3, do_sample=True).shape == (3, 7)


def test_a_generation_config_is_read_and_options_go_before_it():
    model, tokens = wrapped(n_sinks=1), small_tokens(2, 5)
    config = GenerationConfig(max_new_tokens=6, do_sample=True, top_k=4, steps=3, block_length=2, pad_token_id=0, eos_token_id=EOS)
    read = {"new_tokens": 6, "temperature": 1.0, "top_k": 4, "steps": 3, "block": 2, "eos_id": EOS}
    assert torch.equal(model.diffusion_generate(tokens, generation_config=config), ours(model, tokens, read).tokens)
    assert torch.equal(
        model.diffusion_generate(tokens, None, {"steps": 3, "gen_length": 6}),
        ours(model, tokens, {"length": 11, "steps": 3}).tokens,
    )
    over = model.diffusion_generate(tokens, None, config, max_length=9, temperature=0.5, num_inference_steps=2, seed=7)
    assert torch.equal(over, ours(model, tokens, {**read, "new_tokens": 4, "temperature": 0.5, "steps": 2, "seed": 7}).tokens)
    surest = model.diffusion_generate(tokens, None, config, do_sample=False, temperature=0.5)
    assert torch.equal(surest, ours(model, tokens, {"new_tokens": 6, "steps": 3, "block": 2, "eos_id": EOS}).tokens)


class Heard:
    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_streamer_hears_the_row_from_left_to_right(name):
    model, tokens, heard = wrapped(n_sinks=1), small_tokens(1, 5), Heard()
    tokens[0, 2] = MASK
    found = model.diffusion_generate(tokens, streamer=heard, **POLICIES[name])
    assert heard.parts[0] == tokens[0, :2].tolist()
    assert [token for part in heard.parts for token in part] == found[0].tolist()
    assert heard.ended
    assert all(heard.parts[1:])
    assert len(heard.parts) == 2 or name != "remask"  # whose tokens are final at its end alone
    assert len(heard.parts) > 3 or name not in ("llada", "fast")
    assert torch.equal(found, model.diffusion_generate(tokens, **POLICIES[name]))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(11)} | {"[MASK]": MASK}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="w0",
        pad_token="w1",
        mask_token="[MASK]",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def test_transformers_own_streamer_prints_the_text(capsys):
    model, tokenizer = wrapped(n_sinks=1), tiny_tokenizer()
    given = tokenizer(["w2 w5 w7"], return_tensors="pt", return_token_type_ids=False)
    found = model.diffusion_generate(**given, max_new_tokens=6, block_length=2, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == tokenizer.decode(found[0, 3:]) + "\n"


def test_steps_are_told_and_kept():
    model, (tokens, mask, _) = wrapped(n_sinks=1), padded()
    seen = []

    def callback(owner, number, left, values):
        seen.append((owner is model, number, left, values))

    given = {"max_new_tokens": 6, "num_inference_steps": 3, "attention_mask": mask}
    out = model.diffusion_generate(
        tokens, callback_on_step_end=callback, return_dict_in_generate=True, output_history=True, **given
    )
    assert torch.equal(out.sequences, model.diffusion_generate(tokens, **given))
    assert [(mine, number, left) for mine, number, left, _ in seen] == [(True, 0, 2 / 3), (True, 1, 1 / 3), (True, 2, 0.0)]
    assert (out.steps, len(out.history)) == (3, 3)
    written = torch.zeros(4, 15, dtype=torch.bool)
    for kept, (_, _, _, values) in zip(out.history, seen, strict=True):
        assert torch.equal(kept, values["sequences"])
        assert values["committed"].sum(1).tolist() == [2] * 4
        written |= values["committed"]
        assert torch.equal(~values["confidence"].isnan(), written)
        assert torch.equal(kept == MASK, ~written & (torch.arange(15) >= 9))
    assert torch.equal(out.confidence.nan_to_num(), seen[-1][3]["confidence"].nan_to_num())
    plain = model.diffusion_generate(tokens, return_dict_in_generate=True, **given)
    assert plain.history is None
    assert torch.equal(plain[0], out.sequences)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_new_token": 3}, r"option 'max_new_token': unknown; did you mean max_new_tokens\?"),
        ({"num_beams": 3}, "option 'num_beams': unknown"),
        ({"generation_config": GenerationConfig(num_beams=3)}, "option 'num_beams': unknown"),
        ({"steps": 3, "diffusion_steps": 4}, "steps = 3 and diffusion_steps = 4: two names of one option"),
        ({"max_length": 9, "max_new_tokens": 3}, "max_length leaves 4 new tokens, and 3 are asked for; give one of them"),
        ({"max_new_tokens": 90}, "rows of up to 5 tokens and 90 to write: the model reads at most 64; shorten"),
        ({"max_length": 5}, "length = 5: counts the whole canvas"),
        ({"mask_token_id": 4}, r"mask_id = 4: \[MASK\] of this model is 11; leave it out"),
        ({"policy": "best"}, "policy 'best': unknown; there are"),
        ({"top_k": 3}, "top_k = 3: has no effect at temperature 0"),
        ({"streamer": Heard()}, "streamer: takes one row, and there are 2"),
    ],
)
def test_mistakes_are_one_line(options, words):
    with pytest.raises(SamplingError, match=words) as caught:
        wrapped().diffusion_generate(small_tokens(2, 5), **options)
    assert "\n" not in str(caught.value)


# -- Trainer, accelerate, pipelines -----------------------------------------------------------------------------------------------


def examples(tokenizer) -> list[dict[str, list[int]]]:
    """Rows of several lengths that repeat one token, which their first token names; half of the rest is masked."""
    found = []
    for number in range(32):
        row = [2 + number % 4] * (3 + number % 5)
        noisy = [MASK if place and (place + number) % 2 else token for place, token in enumerate(row)]
        found.append({"input_ids": noisy, "labels": [own if seen == MASK else -100 for own, seen in zip(row, noisy, strict=True)]})
    return found


def collate(tokenizer):
    def join(rows):
        batch = tokenizer.pad([{"input_ids": row["input_ids"]} for row in rows], return_tensors="pt")
        width = batch["input_ids"].shape[1]
        batch["labels"] = torch.tensor([[-100] * (width - len(row["labels"])) + row["labels"] for row in rows])
        return batch

    return join


@pytest.mark.slow
def test_trainer_tunes_on_left_padded_rows_and_the_model_writes_what_it_learned(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    tokenizer, torch_seed = tiny_tokenizer(), {"seed": 3, "data_seed": 3}
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32, n_sinks=1, n_layers=2), tokenizer)
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "x")
    given = {"max_steps": 60, "per_device_train_batch_size": 16, "learning_rate": 1e-2, "logging_steps": 15, "save_strategy": "no"}
    given |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, **torch_seed}
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path / "out"), **given),
        train_dataset=examples(tokenizer),
        data_collator=collate(tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.2 < losses[0]
    rows = tokenizer(["w3 w3", "w5"], padding=True, return_tensors="pt", return_token_type_ids=False)
    found = trainer.model.diffusion_generate(**rows, max_new_tokens=3)
    assert found[:, 2:].tolist() == [[3] * 3, [5] * 3]
    trainer.save_model(tmp_path / "saved")
    again = sinkdlm.load(tmp_path / "saved")
    assert again.model.config == model.model.config
    assert all(map(torch.equal, again.model.parameters(), trainer.model.parameters()))


def test_accelerate_trains_and_unwraps():
    accelerate = pytest.importorskip("accelerate")
    tokenizer = tiny_tokenizer()
    model = wrapped(dtype=torch.float32, n_sinks=1)
    accelerator = accelerate.Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(examples(tokenizer), batch_size=16, collate_fn=collate(tokenizer))
    own, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    losses = []
    for _ in range(8):
        for batch in loader:
            loss = own(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert accelerator.unwrap_model(own).diffusion_generate(small_tokens(2, 3), max_new_tokens=2).shape == (2, 5)


def test_an_adapter_writes_as_its_merged_model():
    peft = pytest.importorskip("peft")
    model, tokens = wrapped(n_sinks=1, gate="elementwise"), small_tokens(2, 5)
    before = model.diffusion_generate(tokens, max_new_tokens=6)
    torch.manual_seed(0)
    targets = ["qkv", "out", "gate_up", "down"]
    lora = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).eval()
    found = lora.diffusion_generate(tokens, max_new_tokens=6)
    assert not torch.equal(found, before)
    assert torch.equal(found, lora.merge_and_unload().diffusion_generate(tokens, max_new_tokens=6))


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")
def test_parts_on_disk_write_the_same(tmp_path):
    pytest.importorskip("accelerate")
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32, n_sinks=1))
    names = ["model.embed", "model.sinks", "model.norm", "model.lm_head", *(f"model.blocks.{i}" for i in range(3))]
    places = {name: "disk" if name in ("model.embed", "model.blocks.1") else "cpu" for name in names}
    parts = AutoModelForMaskedLM.from_pretrained(tmp_path / "x", device_map=places, offload_folder=tmp_path / "off")
    whole, tokens = AutoModelForMaskedLM.from_pretrained(tmp_path / "x"), small_tokens(2, 5)
    assert torch.equal(*(model.diffusion_generate(tokens, max_new_tokens=6) for model in (parts, whole)))


def test_the_fill_mask_pipeline_takes_texts_of_several_lengths_at_once(tmp_path):
    from transformers import pipeline

    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32, n_sinks=1), tiny_tokenizer())
    convert(tmp_path / "x", tmp_path / "hf", to="hf")
    fill = pipeline("fill-mask", model=str(tmp_path / "hf"), device="cpu", top_k=2)
    texts = ["w3 [MASK] w5", "w2 w4 w6 w8 [MASK]"]
    together = fill(texts, batch_size=2)
    for text, found in zip(texts, together, strict=True):
        alone = fill(text)
        assert [one["token"] for one in found] == [one["token"] for one in alone]
        assert [one["score"] for one in found] == pytest.approx([one["score"] for one in alone], abs=1e-5)


@pytest.mark.parametrize("tokenizer", [True, False])
def test_the_code_of_the_card_runs(tmp_path, monkeypatch, capsys, tokenizer):
    sinkdlm.save(tmp_path / "x", small_model(dtype=torch.float32, n_sinks=1), tiny_tokenizer() if tokenizer else None)
    convert(tmp_path / "x", tmp_path / "mine", to="hf")
    card = (tmp_path / "mine" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "\n# mine\n" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    assert ".diffusion_generate(" in code
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()
    convert(tmp_path / "mine", tmp_path / "back")  # and the folder reads as before


# -- standalone -------------------------------------------------------------------------------------------------------------------


STANDALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sinkdlm", "pydantic"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, GenerationConfig
from safetensors.torch import load_file, save_file
given = load_file(sys.argv[2])
found = {}
for folder in sys.argv[3:]:
    trust = {"trust_remote_code": True, "dtype": torch.float64}
    model = AutoModelForMaskedLM.from_pretrained(folder, **trust)
    made = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=True), **trust)
    made.load_state_dict(model.state_dict())
    blocks = {"block_length": 2, "threshold": 0.3}
    for name, own in (("loaded", model), ("made", made)):
        found[f"{folder}-{name}-drawn"] = own.diffusion_generate(
            given["tokens"], given["mask"], GenerationConfig(max_new_tokens=6, do_sample=True), steps=4, seed=2, eos_token_id=3)
        found[f"{folder}-{name}-fast"] = own.diffusion_generate(given["tokens"], given["mask"], max_new_tokens=6, **blocks)
    try:
        model.diffusion_generate(given["tokens"], step=3)
    except Exception as failure:
        assert "did you mean steps?" in str(failure), failure
    else:
        raise AssertionError
    card = open(f"{folder}/README.md").read()
    exec(card.split("```python\\n")[1].split("```")[0], {})
save_file(found, sys.argv[1])
"""


@pytest.mark.slow
def test_a_standalone_directory_writes_the_same_without_sinkdlm(tmp_path):
    from safetensors.torch import save_file

    tokens, mask, _ = padded()
    expected, folders = {}, []
    for name in ("logit-gate", "shifted-blocks"):
        model = small_model(**SHAPES[name])
        sinkdlm.save(tmp_path / "ckpt" / name, model, tiny_tokenizer() if model.config.mask_id == MASK else None)
        convert(tmp_path / "ckpt" / name, tmp_path / name, to="hf", standalone=True)
        assert (tmp_path / name / "modeling_sinkdlm.py").stat().st_size < 220_000
        own, folder = SinkDLMForMaskedLM.wrap(model), str(tmp_path / name)
        folders.append(folder)
        drawn = own.diffusion_generate(tokens, mask, max_new_tokens=6, temperature=1.0, steps=4, seed=2, eos_id=3)
        fast = own.diffusion_generate(tokens, mask, max_new_tokens=6, block=2, threshold=0.3)
        expected |= {f"{folder}-{how}-drawn": drawn for how in ("loaded", "made")}
        expected |= {f"{folder}-{how}-fast": fast for how in ("loaded", "made")}
    save_file({"tokens": tokens, "mask": mask}, tmp_path / "given")
    run = subprocess.run(
        [sys.executable, "-c", STANDALONE, str(tmp_path / "out"), str(tmp_path / "given"), *folders],
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,  # where the card's code finds the folder by its name
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("\n") >= len(folders)
    found = load_file(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
