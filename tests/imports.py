"""Who may import whom (docs/design.md). `breaches` reads sources and returns every import that points the wrong way."""

import ast
from pathlib import Path

LEAVES = ("interop", "evals", "analysis", "serving", "reproduce", "demo", "writer")
COMMAND_LINE = (
    "cli",
    "cli_analysis",
    "cli_data",
    "cli_evals",
    "cli_options",
    "cli_planning",
    "cli_recipes",
    "cli_reproduce",
    "cli_serving",
    "early",
    "entry",
)  # import everything else inside their subcommands
CORE = (
    "config",
    "noise",
    "attention",
    "visibility",
    "layers",
    "lane",
    "positions",
    "fusion",
    "opaque",
    "operators",
    "fused_layers",
    "rounded",
    "float8_products",
    "recompute",
    "eager",
    "graphs",
    "model",
    "observe",
    "diffusion",
    "sampling",
    "likelihood",
    "checkpoint",
)
# Module -> the modules of the package it may import. `errors` and the package itself (its version) are open to all.
ALLOWED = {
    "errors": (),
    "durable": (),
    "presets": (),
    "tables": (),
    "config": ("presets", "tables"),
    "noise": (),
    "kernels": (),
    "attention_kernels": (),
    "training_kernels": (),
    "opaque": (),
    "operators": ("opaque", "kernels", "attention_kernels", "training_kernels"),
    "float8_kernels": ("float8_operators",),
    "float8_operators": ("opaque", "float8_kernels"),
    "float8_products": ("float8_operators", "fusion"),
    "visibility": (),
    "attention": ("operators",),
    "layers": ("fused_layers", "float8_products", "fusion", "recompute", "config", "attention", "lane", "positions"),
    "fused_layers": ("operators", "attention", "positions", "rounded"),
    "rounded": (),
    "observe": ("attention",),
    "lane": (),
    "positions": ("config",),
    "fusion": ("kernels",),
    "recompute": (),
    "eager": (),
    "graphs": (),
    "model": ("layers", "visibility", "eager", "fusion", "recompute", "config", "noise", "attention", "lane", "positions"),
    "float8": ("model", "layers", "float8_products", "fusion"),
    "diffusion": ("noise", "fusion", "training_kernels"),
    "sampling": ("noise", "fusion", "graphs"),
    "likelihood": ("noise", "sampling"),
    "planning": ("config",),
    "pace": ("config", "planning"),
    "plans": ("config", "planning", "pace"),
    "messages": (),
    "data": ("config", "noise", "durable", "messages"),
    "checkpoint": (*CORE, "durable"),
    "training": (*CORE, "training_kernels", "data", "planning", "plans", "durable", "prompting"),
    "interop": CORE,
    "evals": (*CORE, "data", "durable"),
    "viewer": (),
    "analysis": (*CORE, "viewer"),
    "prompting": ("sampling",),
    "serving": (*CORE, "analysis", "prompting", "tables"),
    "reproduce": (
        *CORE,
        "data",
        "training",
        "planning",
        "pace",
        "plans",
        "interop",
        "evals",
        "analysis",
        "demo",
        "durable",
        "tables",
    ),
    "writer": ("observe", "sampling", "prompting", "checkpoint", "messages"),
    "demo": (*CORE, "data", "training", "analysis", "durable"),
}
# What the objective, the samplers and the estimators must not touch: they take a denoiser.
FORBIDDEN_PACKAGES = dict.fromkeys(("diffusion", "sampling", "likelihood"), ("transformers", "tokenizers", "safetensors"))


def part_of(path: Path, package: Path) -> str:
    relative = path.relative_to(package)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(tree: ast.AST, path: Path, package: Path):
    """(imported dotted name, line, inside a function?) of every import, relative ones resolved."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) in inner
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ("sinkdlm", *path.relative_to(package).parts)[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            if base == "sinkdlm":
                for alias in node.names:
                    yield f"sinkdlm.{alias.name}", node.lineno, id(node) in inner
            else:
                yield base, node.lineno, id(node) in inner


def breaches(package: Path) -> tuple[list[str], int]:
    found, files = [], 0
    for path in sorted(package.rglob("*.py")):
        part = part_of(path, package)
        if part in ("__init__", "__main__") or (path.parent == package and path.name == "__init__.py"):
            continue
        files += 1
        text = path.read_text()
        if "import_module(" in text:
            found.append(f"{path.relative_to(package)}: {part} hides an import behind importlib")
        for name, line, inside in imports_of(ast.parse(text), path, package):
            where = f"{path.relative_to(package)}:{line}"
            top, _, rest = name.partition(".")
            if top in FORBIDDEN_PACKAGES.get(part, ()):
                found.append(f"{where}: {part} must not import {top}")
            if name == "sinkdlm" and part not in COMMAND_LINE:
                found.append(f"{where}: {part} imports the whole package, whose names are exported lazily: name the module")
            if top != "sinkdlm" or not rest:
                continue
            target = rest.partition(".")[0]
            if target in (part, "errors", "__version__"):
                continue
            if part in COMMAND_LINE:
                if not inside and target not in COMMAND_LINE:
                    found.append(f"{where}: {part} imports {target} at its top: import it inside the subcommand")
            elif target not in ALLOWED.get(part, ()):
                found.append(f"{where}: {part} must not import {target}")
    return found, files
