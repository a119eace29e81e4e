"""The documentation: commands exist, code runs, links lead somewhere, tutorials work as written, pages fit a phone."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest
import typer.main
from typer.testing import CliRunner

from browsers import BROWSER, BROWSER_FLAGS, BROWSER_WAIT
from sinkdlm import DiffusionLM, ModelConfig, Recipe, load, save
from sinkdlm.cli.app import app
from sinkdlm.data.synthetic import character_tokenizer, corpus

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def blocks(page: Path, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.S)


def commands(page: Path) -> list[list[str]]:
    """Every sinkdlm command of a page's shell blocks, comments cut off, and of its inline code where that is whole."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    lines += re.findall(r"`((?:torchrun [^`]*-m )?sinkdlm [^`]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
    found = []
    for line in lines:
        start = re.search(r"(?:^|\s|/)sinkdlm (.*)", line)
        if start is None or line.lstrip().startswith("#") or re.search(r"\.\.\.|…|\[--|<", line):
            continue  # prose, and forms with places to fill in
        words = shlex.split(start[1].split(" > ")[0].split(" | ")[0], comments=True)
        if words and not words[-1].endswith("\\"):
            found.append(words)
    return found


def parse(words: list[str]) -> None:
    """As the command line would, up to the point where it would act."""
    command = typer.main.get_command(app)
    words = ["nano-sink" if word == "RECIPE" or word.endswith(".toml") else word for word in words]  # a reader's own
    path = []
    while words and (found := getattr(command, "get_command", lambda *_: None)(None, words[0])):
        path.append(words[0])
        command, words = found, words[1:]
    assert path, f"no such command: {words}"
    if "--help" not in words and (words or not hasattr(command, "commands")):
        command.make_context(" ".join(path), list(words))


def whole(words: list[str]) -> bool:
    """More than the name of a command in a sentence."""
    return len(words) > 1 and (len(words) > 2 or words[0] not in ("data", "recipe"))


def test_every_command_of_the_documentation_is_one_of_ours():
    found = {page: [words for words in commands(page) if whole(words)] for page in TEXTS}
    assert sum(map(len, found.values())) > 80
    for page, listed in found.items():
        for words in listed:
            try:
                parse(words)
            except Exception as failure:
                message = getattr(failure, "message", str(failure))
                pytest.fail(f"{page.relative_to(ROOT)}: sinkdlm {shlex.join(words)}: {message}", pytrace=False)


def test_every_option_of_reproduce_is_documented():
    text = (DOCS / "howto" / "reproduce.md").read_text()
    command = typer.main.get_command(app).get_command(None, "reproduce")
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    assert len(options) > 15
    assert [option for option in options if not re.search(rf"`{option}\b", text)] == ["--help"][: "--help" in options]


def test_the_authors_commands_have_ours_beside_them():
    text = (DOCS / "official.md").read_text()
    commands_there, differences, defects = re.split(r"^## (?:What differs|Defects of the release).*$", text, flags=re.M)
    variants = ("", "_gate", "_extratoken")
    theirs = [f"pretrain/train_mdm{kind}.py" for kind in variants] + [f"eval_mdm{kind}.sh" for kind in variants]
    theirs += [f"{script}{kind}.py" for script in ("sft/finetune_mdm_gsm8k", "evaluate_gsm8k") for kind in variants]
    assert len(theirs) == 12
    for script in theirs:
        assert script in commands_there
    recipes = set(re.findall(r"sinkdlm train ([\w.-]+)", text))
    assert len(recipes) == 6
    for recipe in recipes:
        Recipe.load(recipe)
    scored = re.findall(r"`(sinkdlm (?:eval|data prepare train.txt) [^`]*)`", commands_there)
    assert len(scored) == 4
    for command in scored:
        assert " --bos" in command, command
    assert "--validation 0" in next(command for command in scored if "train.txt" in command)  # theirs holds nothing out
    for word in ("rotary", "bf16", "warm-up", "seeded with 3407"):
        assert word in differences
    for word in ("eval_mdm.sh", "Diff_LLaMA_1028M", "lit_gpt.diffmodel_extratoken", "num_of_devices", "mdm_gate-472M"):
        assert word in defects


def test_the_comparison_says_only_what_was_read():
    text = (DOCS / "compare.md").read_text()
    assert "not checked" not in text.lower()
    tables = re.findall(r"(?:^\|.*\n)+", text, re.M)
    assert len(tables) == 8
    for table in tables[:-1]:
        rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
        assert all(len(row) == len(rows[0]) for row in rows)
    sources = re.findall(r"^\| [^|]*\w/\w[^|]* \| ([^|]*) \|", tables[-1], re.M)
    assert len(sources) == 11
    for source in sources:
        assert re.search(r"`[0-9a-f]{7}`", source), source


def test_every_recipe_and_source_file_that_is_named_exists():
    named = {
        name for page in TEXTS for name in re.findall(r"\b(?:recipes|src|tests|benchmarks|launch)/[\w./-]*\w", page.read_text())
    }
    assert len(named) > 20
    named = {f"src/sinkdlm/{name}" if name.startswith("recipes/") else name for name in named}
    missing = [name for name in named if not (ROOT / name).exists() and not any(ROOT.glob(f"{name}*"))]
    assert not missing


def test_every_key_of_a_recipe_is_documented_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+\.\w+)` \| (?:`(.*?)`)? *\|", (DOCS / "recipes.md").read_text(), re.M))
    sections = {name: field.annotation for name, field in Recipe.model_fields.items() if name != "model"}
    defaults = {f"{name}.{key}": value for name, section in sections.items() for key, value in section().to_dict().items()}
    assert len(defaults) > 50
    assert list(rows) == list(defaults)
    for key, text in rows.items():
        told = tomllib.loads(f"key = {text}")["key"] if text else None
        assert told == (list(defaults[key]) if isinstance(defaults[key], tuple) else defaults[key]), key
    model = (DOCS / "model.md").read_text()
    assert [key for key in ModelConfig.model_fields if f"`{key}`" not in model] == []


def test_the_api_reference_has_every_field_of_a_model():
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (?:`([^`]*)`)? *\|", (DOCS / "api.md").read_text(), re.M)
    assert rows == model_fields()


def model_fields() -> list[tuple[str, str, str]]:
    """Name, type and default of the fields of ModelConfig."""
    found = []
    for name, field in ModelConfig.model_fields.items():
        choices = getattr(field.annotation, "__args__", None)
        names = ["None" if one is type(None) else getattr(one, "__name__", repr(one)) for one in choices or [field.annotation]]
        kind = " or ".join(names)
        derived = {"mask_id": "vocab_size", "n_kv_heads": "n_heads", "head_dim": "d_model / n_heads"}.get(name, "")
        found.append((name, kind, derived if field.is_required() else repr(field.default)))
    return found


def test_links_of_the_readme_lead_somewhere():
    """Those between pages are checked by the strict build in `make lint`."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize(
    "name",
    [
        "concepts/masked-diffusion",
        "concepts/block-diffusion",
        "concepts/lane",
        "concepts/noise",
        "howto/add-a-policy",
        "howto/add-a-backbone",
    ],
)
def test_code_of_a_page_runs(name, capsys):
    found = blocks(DOCS / f"{name}.md", "python")
    assert found
    exec(compile("\n".join(found), name, "exec"), {})


# -- tutorials ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    (tmp_path / "prompts.txt").write_text("\n".join(text.split("\n")[0][:24] for text in corpus(40, seed=5)) + "\n")
    texts = tmp_path / "my-texts"
    texts.mkdir()
    for number, text in enumerate(corpus(120, seed=1)):
        (texts / f"{number}.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def follow(page: Path, *, extra: dict[str, list[str]]) -> int:
    """Runs a page's commands as they stand. extra: options that make a command small."""
    for name, text in re.findall(r"```toml\n# (\w+\.toml)(.*?)```", page.read_text(), re.S):
        Path(name).write_text(text)
    found = [shlex.split(line, comments=True) for block in blocks(page, "sh") for line in block.splitlines()]
    for words in found:
        done = CliRunner().invoke(app, [*words[1:], *extra.get(words[1], [])], catch_exceptions=False)
        assert done.exit_code == 0, (words, done.output)
    return len(found)


@pytest.mark.slow
def test_the_tutorial_on_adapting_runs_as_it_is_written(home):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, rms_norm_eps=1e-5, **shape)).save_pretrained(
        home / "my-llama"
    )
    character_tokenizer().save_pretrained(home / "my-llama")
    less = [f"--set={change}" for change in ("data.length=32", "train.tokens=4096", "train.batch=8", "eval.draws=4")]
    assert follow(DOCS / "tutorials" / "adapt.md", extra={"train": less, "analyze": ["--no-interventions"]}) == 8
    adapted, vanilla = load("runs/adapt/model"), load("runs/adapt-vanilla/model")
    assert (adapted.config.n_sinks, vanilla.config.n_sinks) == (1, 0)
    assert adapted.provenance["parent"]["path"].endswith("my-llama")
    assert Path("report/report.html").exists()


@pytest.mark.slow
def test_the_tutorial_on_inspecting_runs_as_it_is_written(home):
    save("my-dlm", DiffusionLM(ModelConfig.preset("nano"), seed=0), character_tokenizer())
    assert follow(DOCS / "tutorials" / "inspect.md", extra={"analyze": ["--no-interventions"]}) == 7
    assert all(Path(name, "report.html").exists() for name in ("report", "report-noise", "report-both", "home"))


@pytest.mark.slow
def test_the_tutorial_on_gsm8k_runs_as_it_is_written(home):
    save("runs/nano-sink/model", DiffusionLM(ModelConfig.preset("nano", n_sinks=1), seed=0), character_tokenizer())
    rows = [(f"tom has {n} eggs and gets 2.", f"{n}+2={n + 2}", n + 2) for n in range(3, 60)]
    Path("train.txt").write_text("".join(f"{question}||{thought} #### {answer}\n" for question, thought, answer in rows))
    Path("bench").mkdir()
    lines = [{"question": question, "answer": f"{thought} #### {answer}"} for question, thought, answer in rows[:4]]
    Path("bench/gsm8k_test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = ["--set", "train.steps=3", "--set", "train.batch=4", "--set", "eval.every=0", "--set", "log.probe_every=0"]
    assert follow(DOCS / "tutorials" / "gsm8k.md", extra={"train": small}) == 4
    assert len(Path("runs/gsm8k/eval/samples_gsm8k_two_stage.jsonl").read_text().splitlines()) == 4


def _is_missing(request) -> bool:
    return request.failure != "net::ERR_ABORTED"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_every_page_opens_and_fits_a_phone(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--no-directory-urls", "--site-dir", tmp_path]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    pages = sorted(path for path in tmp_path.rglob("*.html") if path.name != "404.html")
    assert len(pages) == len(PAGES)
    said: list[str] = []
    links: dict[str, set[str]] = {}  # of a page, to places of this site
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=BROWSER_FLAGS, timeout=BROWSER_WAIT)
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.set_default_timeout(BROWSER_WAIT)
        page.on("pageerror", lambda failure: said.append(f"{page.url}: {failure}"))
        page.on("console", lambda message: said.append(f"{page.url}: {message.text}") if message.type == "error" else None)
        # Going on to the next page aborts an icon that is still on its way; what is not there fails otherwise.
        page.on("requestfailed", lambda request: said.append(f"{page.url}: no {request.url}") if _is_missing(request) else None)
        for path in pages:
            page.goto(path.as_uri())
            assert page.locator("h1").count() == 1, path
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
            # A table wider than the page must scroll within itself.
            assert page.evaluate(
                """[...document.querySelectorAll('article table')].every(table => {
                  const box = table.closest('.md-typeset__scrollwrap') || table.parentElement;
                  return table.getBoundingClientRect().right <= innerWidth || getComputedStyle(box).overflowX === 'auto';
                })"""
            ), path
            assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)"), path
            links[path.as_uri()] = set(
                page.evaluate("[...document.querySelectorAll('article a[href], nav a[href]')].map(a => a.href)")
            )
        axe = pytest.importorskip("axe_playwright_python")
        page.goto((tmp_path / "index.html").as_uri())
        page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
        faults = page.evaluate("axe.run(document, {preload: false}).then(found => found.violations.map(one => one.id))")
        browser.close()
    assert said == []
    assert faults == []
    assert sum(map(len, links.values())) > 1000
    ids = {path.as_uri(): set(re.findall(r'\bid="([^"]+)"', path.read_text())) for path in pages}
    for place, found in links.items():
        for link in found:
            target, _, name = link.partition("#")
            if target.startswith("file:"):
                file = Path(unquote(target.removeprefix("file://")))  # a notebook is no page: mkdocs copies it
                assert target in ids or (file.suffix == ".ipynb" and file.exists()), f"{place}: {link}"
                assert not name or unquote(name) in ids[target], f"{place}: {link}"
