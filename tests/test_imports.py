import ast
import json
import re
import subprocess
import sys

import pytest
from tests.imports import FLOOR, FLOORS, PACKAGE, breaches, circles


def test_imports_point_one_way():
    found, files = breaches()
    assert files == len(list(PACKAGE.rglob("*.py"))) - 2  # less the package's own __init__ and __main__
    assert files > 150
    assert not found, "\n".join(found)
    assert not circles()


def test_the_house_is_small():
    assert len(FLOORS) <= 12
    assert len(list(PACKAGE.glob("*.py"))) <= 6
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    rooms |= {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert sorted(FLOOR) == sorted(rooms)  # each on one floor


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("diffusion.py", "from sinkdlm.model.model import DiffusionLM", "diffusion must not import model"),
        ("noise.py", "from sinkdlm import config", "noise must not import config"),
        ("model/lane.py", "from ..checkpoint import directory", "model must not import checkpoint"),
        ("fast/runner.py", "def f():\n    from sinkdlm.training.loop import train", "fast must not import training"),
        ("interop/sources.py", "from ..evals import x", "interop must not import evals"),
        ("model/novel.py", "from sinkdlm.sampling.policies import Policy", "model must not import sampling"),
        ("model/model.py", "from sinkdlm.kernels import ops", "model must not import kernels"),
        ("model/attention.py", "from ..fast import accelerate", "model must not import fast"),
        ("diffusion.py", "def f():\n    import sinkdlm.fast.runner", "diffusion must not import fast"),
        ("diffusion.py", "import transformers", "diffusion must not import transformers"),
        ("likelihood/novel.py", "from safetensors import safe_open", "likelihood must not import safetensors"),
        ("cli/plan.py", "from sinkdlm.config.recipe import Recipe", "import it inside the command"),
        ("diffusion.py", "import sinkdlm", "imports the whole package"),
        ("noise.py", "x = importlib.import_module('sinkdlm.model.model')", "behind importlib"),
        ("novel/loop.py", "import math", "novel is no room"),
    ],
)
def test_a_planted_import_is_caught(tmp_path, file, line, complaint):
    """Files are judged one by one, so a package of that file alone shows it."""
    path, there = tmp_path / "sinkdlm" / file, PACKAGE / file
    assert there.exists() or path.parent.name == "novel" or path.stem == "novel"
    path.parent.mkdir(parents=True)
    path.write_text((there.read_text() if there.exists() else "") + f"\n{line}\n")
    found, files = breaches(tmp_path / "sinkdlm")
    assert files == 1
    assert len(found) == 1
    assert complaint in found[0]


def test_a_planted_circle_is_caught(tmp_path):
    lines = {
        "a": "from sinkdlm.data.b import x",
        "b": "def f():\n    from . import c",
        "c": "import sinkdlm.data.a",
        "d": "from .a import x",
    }
    (tmp_path / "data").mkdir()
    for name, line in lines.items():
        (tmp_path / "data" / f"{name}.py").write_text(line)
    assert circles(tmp_path) == [["sinkdlm.data.a", "sinkdlm.data.b", "sinkdlm.data.c"]]
    (tmp_path / "data" / "c.py").write_text("import sinkdlm.data.absent")
    assert circles(tmp_path) == []


SPEED = re.compile(r"\b(float8\w*|fused|triton|(re)?compil\w*|(is_)?cuda|cuda_?graphs?)\b", re.IGNORECASE)


def test_the_model_does_not_mention_speed():
    """Its code, docstrings and comments say the method; fast/ and kernels/ say the rest."""
    files = [*(PACKAGE / "model").glob("*.py"), PACKAGE / "diffusion.py"]
    assert len(files) > 6
    found = [f"{path.name}: {word[0]}" for path in files for word in SPEED.finditer(path.read_text())]
    assert not found
    assert all(SPEED.search(words) for words in ("a CUDA graph", "x.is_cuda", "torch.compile(f)", "float8_ops", "recompiled"))


def test_the_model_can_be_read_in_one_sitting():
    source = (PACKAGE / "model" / "model.py").read_text()
    assert source.count("\n") <= 350
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "DiffusionLM"]
    forward = next(node for node in classes[0].body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    assert forward.end_lineno - forward.lineno < 50


def idle_names(sources):
    """Private functions and classes that no module names: written, and never put to use. A decorator puts to use."""
    parts = [part for source in sources for part in ast.parse(source).body]
    named = [(part, names_in(part)) for part in parts]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    made = [part for part in parts if isinstance(part, kinds) and not part.decorator_list and re.match("_[^_]", part.name)]
    return [one.name for one in made if not any(one.name in names for part, names in named if part is not one)]


def names_in(part):
    nodes = list(ast.walk(part))
    found = {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }
    return found | {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_private_functions_are_put_to_use():
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    assert len(sources) > 100
    assert not idle_names(sources)
    made = "def _used(): ...\ndef _idle(): ...\n@app\ndef _root(): ...\ndef _again(): _again()\n"
    assert idle_names([made, "class Kept:\n    x = _used()\n"]) == ["_idle", "_again"]


HEAVY = ["torch", "numpy", "pydantic", "rich", "transformers", "safetensors", "tokenizers", "huggingface_hub", "matplotlib"]


@pytest.mark.parametrize(
    "code", ["import sinkdlm", "from sinkdlm.cli.app import app", "import sinkdlm; sinkdlm.__version__; dir(sinkdlm)"]
)
def test_import_is_light(code):
    script = f"import json, sys\n{code}\nprint(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []


# What the commands below have no use for; and what only training uses, for ranks and states.
UNUSED = [
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "torch._dynamo",
    "datasets",
    "matplotlib",
    "pandas",
    "scipy",
    "sklearn",
]
SINGLE = ["torch.distributed.tensor", "torch.distributed.checkpoint"]
COMMANDS = """
import gc
gc.disable()  # saves a tenth of the time
import io, json, sys
from contextlib import redirect_stdout
from sinkdlm.cli.app import app
def loaded(*args):
    if args == ("serve",):  # it would not end
        import sinkdlm.serving.server
    else:
        with redirect_stdout(io.StringIO()):
            app(list(args), standalone_mode=False)
    return [name for name in json.loads(sys.argv[1]) if name in sys.modules]
def use():  # as a library: a model is made and watched, and makes a step
    import torch, sinkdlm, sinkdlm.sampling
    from sinkdlm.training.optimizer import Optimizer
    model = sinkdlm.DiffusionLM(sinkdlm.ModelConfig.preset("nano", n_sinks=1))
    model(torch.zeros(1, 2, dtype=torch.int64), observe=lambda *seen: None).sum().backward()
    Optimizer(dict(model.named_parameters()), sinkdlm.config.recipe.TrainSection(steps=1, batch=1)).step(0.1)
    return [name for name in json.loads(sys.argv[1]) if name in sys.modules]
short = ["--length", "4", "--steps", "1"]
found = {
    "library": use(),
    "sample": loaded("sample", "model", "--prompt", "a", *short),
    "score": loaded("score", "model", "texts.txt", "--draws", "8"),
    "analyze": loaded("analyze", "model", "--out", "a", "--trajectories", "1", "--no-interventions", "--capture-only", *short),
    "convert": loaded("convert", "model", "b", "--set", "shift_logits=true"),
    "official": loaded("convert", "model", "c", "--to", "official"),
    "prepare": loaded("data", "prepare", "texts.txt", "--tokenizer", "model", "--out", "data", "--documents", "line"),
    "serve": loaded("serve"),
}
from sinkdlm.training.loop import Trainer  # which the commands load as they need it
found["loop"] = use()
save = Trainer._save_state
def watched(self, **given):
    found.setdefault("steps", [name for name in json.loads(sys.argv[1]) if name in sys.modules])
    save(self, **given)
Trainer._save_state = watched
found["train"] = loaded("train", "recipe.toml", "--out", "run")
print(json.dumps(found))
"""
RECIPE = """
model = {preset = "nano", n_sinks = 1}
init = {from = "model"}
data = {length = 8, sets = {data = 1}}
train = {steps = 1, batch = 1, lr = 1e-3}
"""


def test_commands_load_what_they_use(tmp_path):
    """Models of transformers take seconds to load, and torch's compiler more than one. A checkpoint and its tokenizer are read, and
    written, without the former; nobody who does not compile loads the latter. A run alone loads torch's packages for shards and
    states when it writes one."""
    import sinkdlm
    from sinkdlm.data.synthetic import character_tokenizer

    model = sinkdlm.DiffusionLM(sinkdlm.ModelConfig.preset("nano", n_sinks=1))
    sinkdlm.save(tmp_path / "model", model, character_tokenizer())
    (tmp_path / "texts.txt").write_text("a b c d e f\n" * 20)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    script = [sys.executable, "-c", COMMANDS, json.dumps(UNUSED + SINGLE)]
    run = subprocess.run(script, capture_output=True, text=True, check=True, cwd=tmp_path)
    found = json.loads(run.stdout)
    assert found.pop("train") == SINGLE
    assert list(found) == ["library", "sample", "score", "analyze", "convert", "official", "prepare", "serve", "loop", "steps"]
    assert not any(found.values()), found


FIRST_STEP = """
import gc
gc.disable()
import sys
from sinkdlm.cli.app import app
from sinkdlm.training import loop
made = loop.Trainer._make_steps
def watched(self, signals):
    self.optimizer.step, step = lambda *given: print("transformers" in sys.modules) or step(*given), self.optimizer.step
    made(self, signals)
loop.Trainer._make_steps = watched
app(["train", "recipe.toml", "--out", "run"], standalone_mode=False)
"""


def test_a_run_makes_its_steps_without_transformers(tmp_path):
    """Which takes more than a second to load, for a tokenizer that is not needed until the end."""
    from typer.testing import CliRunner

    from sinkdlm.checkpoint.tokenizer import write_tokenizer
    from sinkdlm.cli.app import app
    from sinkdlm.data.synthetic import character_tokenizer

    write_tokenizer(tmp_path / "tokenizer", character_tokenizer())
    (tmp_path / "texts.txt").write_text("a b c d e f\n" * 20)
    given = ["data", "prepare", str(tmp_path / "texts.txt"), "--tokenizer", str(tmp_path / "tokenizer"), "--documents", "line"]
    CliRunner().invoke(app, [*given, "--out", str(tmp_path / "data")], catch_exceptions=False)
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('init = {from = "model"}', ""))
    script = [sys.executable, "-c", FIRST_STEP]
    said = subprocess.run(script, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.splitlines()
    assert "False" in said
    assert "True" not in said
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()


def test_every_public_name_is_there():
    import sinkdlm

    assert len(sinkdlm.__all__) == 13
    for name in sinkdlm.__all__:
        assert getattr(sinkdlm, name) is not None
        assert name in dir(sinkdlm)
    with pytest.raises(AttributeError, match="nothing"):
        _ = sinkdlm.nothing
