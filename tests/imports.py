"""Who may import whom: rooms and floors as data. `python -m tests.imports` prints the house and every breach.

A room imports rooms on lower floors only; rooms on one floor do not import each other, and no two files import each other in a
circle, not even from inside a function. The command line imports everything inside its functions, so that `--help` loads nothing.
"""

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "sinkdlm"
FLOORS = (
    ("errors", "noise", "page", "recipes"),
    ("config", "kernels", "diffusion"),
    ("model", "sampling"),
    ("fast",),
    ("checkpoint", "planning", "likelihood"),
    ("distributed", "text"),
    ("data", "analysis"),
    ("training", "evals", "serving", "interop"),
    ("demo", "lm"),
    ("reproduce",),
    ("cli",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
# The method must not import its fast forms, although kernels is on a lower floor.
NEVER = {"model": ("kernels", "fast"), "diffusion": ("kernels", "fast")}
# Packages that objective, samplers and estimators must not import: they take a denoiser.
FORBIDDEN_PACKAGES = dict.fromkeys(("diffusion", "sampling", "likelihood"), ("transformers", "tokenizers", "safetensors"))


def room_of(path: Path, package: Path) -> str:
    relative = path.relative_to(package)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@functools.cache
def imports_of(text: str, path: Path, package: Path) -> list[tuple[str, int, bool]]:
    """Return (dotted name, line, inside a function?) of every import: relative ones resolved, `from` imports name by name."""
    return list(_imports(ast.parse(text), path, package))


def _imports(tree: ast.AST, path: Path, package: Path) -> Iterator[tuple[str, int, bool]]:
    nodes = [(tree, False)]
    for node, inside in nodes:
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        nodes.extend((child, within) for child in ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, inside
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ("sinkdlm", *path.relative_to(package).parts)[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno, inside


def sources(package: Path) -> list[Path]:
    tops = (package / "__init__.py", package / "__main__.py")
    return [path for path in sorted(package.rglob("*.py")) if path not in tops]


def breaches(package: Path = PACKAGE) -> tuple[list[str], int]:
    """Return every import that breaks the table, and how many files were read."""
    found, files = [], sources(package)
    for path in files:
        room, text = room_of(path, package), path.read_text()
        if room not in FLOOR:
            found.append(f"{path.relative_to(package)}: {room} is no room: add it to a floor of tests/imports.py")
            continue
        if "import_module(" in text:
            found.append(f"{path.relative_to(package)}: {room} hides an import behind importlib")
        for name, line, inside in imports_of(text, path, package):
            where = f"{path.relative_to(package)}:{line}"
            top, *rest = name.split(".")
            if top in FORBIDDEN_PACKAGES.get(room, ()):
                found.append(f"{where}: {room} must not import {top}")
            if name == "sinkdlm":
                found.append(f"{where}: {room} imports the whole package, whose names are exported lazily: name the module")
            if top != "sinkdlm" or not rest or rest[0] in (room, "__version__"):
                continue
            target = rest[0]
            if room == "cli" and not inside and target != "errors":
                found.append(f"{where}: cli imports {target} at its top: import it inside the command")
            if target in NEVER.get(room, ()) or FLOOR.get(target, len(FLOORS)) >= FLOOR[room]:
                found.append(f"{where}: {room} must not import {target}")
    return found, len(files)


def circles(package: Path = PACKAGE) -> list[list[str]]:
    """Return files that import each other, directly or through others, at the top or inside functions."""
    names = {}
    for path in sources(package):
        parts = path.relative_to(package).with_suffix("").parts
        names[".".join(("sinkdlm", *parts)).removesuffix(".__init__")] = path
    edges = {}
    for name, path in names.items():
        wanted = set()
        for imported, _, _ in imports_of(path.read_text(), path, package):
            home = imported if imported in names else imported.rpartition(".")[0]
            if home in names and home != name:
                wanted.add(home)
        edges[name] = wanted
    while True:  # a file that imports none of the remaining ones is in no circle
        free = [name for name, wanted in edges.items() if not wanted & edges.keys()]
        if not free:
            break
        for name in free:
            del edges[name]
    found, left = [], set(edges)
    while left:
        path = [min(left)]
        while (after := min(edges[path[-1]] & edges.keys())) not in path:
            path.append(after)
        circle = path[path.index(after) :]
        if set(circle) not in map(set, found):
            found.append(circle)
        left -= set(path)
    return found


def main() -> int:
    files = sources(PACKAGE)
    for number, rooms in reversed(list(enumerate(FLOORS, start=1))):
        shown = []
        for room in rooms:
            count = [len(path.read_text().splitlines()) for path in files if room_of(path, PACKAGE) == room]
            shown.append(f"{room} ({len(count)} files, {sum(count):,} lines)")
        print(f"{number:2}  {', '.join(shown)}")  # noqa: T201
    found, count = breaches()
    found += [f"circle: {' -> '.join([*circle, circle[0]])}" for circle in circles()]
    print("\n".join(found) if found else f"{count} files, {len(FLOORS)} floors, no breach, no circle")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
