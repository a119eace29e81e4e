"""Where tests lie: folders mirror the package's rooms, and what several tests share lies in conftest.py or support/."""

import ast
import re
from pathlib import Path

import pytest
from tests.imports import FLOOR

TESTS = Path(__file__).parent
OTHERS = {"support", "benchmarks", "docs", "studies", "types"}


def complaints(tests: Path) -> tuple[list[str], int]:
    """What lies or imports wrongly, and how many test files were read."""
    found, n_files = [], 0
    for folder in filter(Path.is_dir, tests.iterdir()):
        if folder.name not in OTHERS | set(FLOOR) and folder.name != "__pycache__":
            found.append(f"{folder.name}/: no room of src/sinkdlm, nor one of {', '.join(sorted(OTHERS))}")
    for path in sorted(tests.rglob("*.py")):
        where, tree = path.relative_to(tests), ast.parse(path.read_text())
        n_files += path.name.startswith("test_")
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(part.startswith("test_") for name in names for part in name.split(".")):
                found.append(f"{where}:{node.lineno}: imports from a test file; share by conftest.py or tests/support")
        if where.parts[0] == "support" and path.name.startswith("test_"):
            found.append(f"{where}: a test among what tests share")
        if where.parts[0] != "support" and not path.name.startswith("test_") and str(where) not in ("conftest.py", "imports.py"):
            found.append(f"{where}: no test; what several tests share lies in tests/support")
    return found, n_files


def test_tests_mirror_the_package_and_share_in_one_place():
    found, n_files = complaints(TESTS)
    assert n_files > 50
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("model/test_a.py", "from test_b import help", "imports from a test file"),
        ("model/test_a.py", "def test_x():\n    import tests.model.test_b", "imports from a test file"),
        ("model/test_a.py", "from tests.model import test_b", "imports from a test file"),
        ("attic/test_a.py", "", "attic/: no room"),
        ("model/shapes.py", "", "no test; what several tests share"),
        ("support/test_a.py", "", "a test among what tests share"),
    ],
)
def test_a_planted_breach_is_caught(tmp_path, file, text, complaint):
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text)
    found, _ = complaints(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]


def test_the_lock_with_hashes_has_the_versions_of_the_other():
    """But for the CUDA packages that torch's build for GPUs brings along."""
    pinned, hashed = (TESTS.parent / name for name in ("requirements.lock", "requirements-hashes.lock"))
    versions = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", pinned.read_text(), re.M))
    entries = re.findall(r"^([\w.-]+)==(\S+)[^\n]*((?:\n    --hash=sha256:[0-9a-f]{64}[ \\]*)+)", hashed.read_text(), re.M)
    names = re.findall(r"^[\w.-]+(?===)", hashed.read_text(), re.M)
    assert [name for name, _, _ in entries] == names
    assert len(names) > 100
    extra = [name for name in names if name not in versions]
    assert all(name.startswith(("cuda-", "nvidia-")) for name in extra)
    assert {name: version for name, version, _ in entries if name in versions}.items() <= versions.items()
