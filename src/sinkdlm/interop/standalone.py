"""A modelling file that needs transformers and torch alone, generated from this package's own sources.

`trust_remote_code=True` loads it where sinkdlm is not installed. It is the same code: noise, the room model/ and the transformers
classes, with the package's imports taken out and a plain dataclass in place of the validated config.
"""

import ast
import inspect
import json
from pathlib import Path
from typing import Any

from sinkdlm import noise
from sinkdlm.checkpoint.directory import CONFIG, PROVENANCE
from sinkdlm.config.model import ModelConfig
from sinkdlm.interop import hf, hf_config
from sinkdlm.model import attention, context, lane, model, positions, visibility

MODULE = "modeling_sinkdlm"
_PROPERTIES = ("head_dim", "embedding_rows", "n_lane", "n_registers", "has_sink_logit")
_DROPPED = {"stamp", "MODEL_FIELDS", "register", "register_models", "__new__"}
# Without the package there is nobody to compute fingerprints: those of the weights that were there go.
_STAMP = """def stamp(folder, config):
    (folder / "provenance.json").unlink(missing_ok=True)
"""


def make_standalone(folder: Path) -> None:
    """Adds the modelling file to a directory that SinkDLMForMaskedLM.save_pretrained wrote, and points config.json at it."""
    (folder / f"{MODULE}.py").write_text(source_text())
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    classes = {"AutoConfig": "SinkDLMConfig", "AutoModel": "SinkDLMForMaskedLM", "AutoModelForMaskedLM": "SinkDLMForMaskedLM"}
    config["auto_map"] = {auto: f"{MODULE}.{name}" for auto, name in classes.items()}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    assert (folder / PROVENANCE).exists()


def source_text() -> str:
    parts = ['"""sinkdlm, self-contained: generated from the sources of the package sinkdlm. Apache-2.0."""', ""]
    bodies, imports = [], {"import dataclasses"}
    for module in (noise, visibility, attention, lane, positions, context, model, hf_config, hf):
        found, body = _split_imports(inspect.getsource(module))
        imports |= found
        bodies.append(body)
    bodies.insert(0, _config_source())
    bodies.append(_STAMP)
    return "\n".join([*parts, *sorted(imports), "", "", *bodies])


def _split_imports(text: str) -> tuple[set[str], str]:
    """(top-level imports of other packages, the rest without docstring, package imports and what needs the package)."""
    tree = ast.parse(text)
    imports, body, fast = set(), [], set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sinkdlm.fast"):
                fast |= {alias.name for alias in node.names}  # speed, which stays with the package
            if not ast.unparse(node).startswith(("from sinkdlm", "import sinkdlm")):
                imports.add(ast.unparse(node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        elif _name_of(node) not in _DROPPED:
            if isinstance(node, ast.ClassDef):
                node.body = [inner for inner in node.body if _name_of(inner) not in _DROPPED]
            body.append(ast.unparse(_Without(fast).visit(node)))
    return imports, "\n\n\n".join(body) + "\n\n"


class _Without(ast.NodeTransformer):
    """Leaves out statements that call one of these names."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        called = node.value.func if isinstance(node.value, ast.Call) else None
        return None if isinstance(called, ast.Name) and called.id in self._names else node


def _name_of(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
    if isinstance(target, ast.Name):
        return target.id
    return ""


def _config_source() -> str:
    lines = ["@dataclasses.dataclass(frozen=True)", "class ModelConfig:"]
    for name, field in ModelConfig.model_fields.items():
        default = "" if field.is_required() else f" = {field.default!r}"
        lines.append(f"    {name}: object{default}")
    lines += ["", "    def model_dump(self):", "        return dataclasses.asdict(self)"]
    for name in _PROPERTIES:
        text = inspect.getsource(getattr(ModelConfig, name).fget)
        lines += ["", text.rstrip()]
    lines += ["", "", "MODEL_FIELDS = tuple(field.name for field in dataclasses.fields(ModelConfig))", "", ""]
    return "\n".join(lines)
