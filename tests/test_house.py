"""Habits that a machine can check: file and function sizes, no pickle, light imports."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "shardwise"
FILES = sorted(SOURCE.rglob("*.py"))
HEAVY = ("torch", "llama_cpp", "ray", "transformers", "diffusers", "fastapi", "ortools")


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body; a signature with one flag a line does not count."""
    assert node.end_lineno is not None
    return node.end_lineno - node.body[0].lineno + 1


def test_files_are_short() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {str(p.relative_to(SOURCE)): n for p, n in sizes.items() if n > 500}
    assert statistics.median(sizes.values()) <= 150


def test_functions_are_short() -> None:
    sizes = {f"{path.relative_to(SOURCE)}:{f.name}": lines_of(f) for path in FILES for f in functions(path)}
    assert not {name: n for name, n in sizes.items() if n >= 80}
    assert statistics.mean(n <= 20 for n in sizes.values()) > 0.5


def test_every_module_says_what_it_is() -> None:
    bare = [
        p
        for p in FILES
        if p.read_text(encoding="utf-8").strip() and not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))
    ]
    assert not bare


def test_nothing_is_unpickled() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names.append(node.module)
            assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve"} & {n.split(".")[0] for n in names}, path


@pytest.mark.parametrize(
    "code",
    ["import shardwise", "from shardwise.cli.main import run; run(['--help'])", "from shardwise.deploy import launch_local"],
)
def test_light_start(code: str) -> None:
    """Neither importing shardwise nor asking for help loads a heavy library."""
    probe = f"{code}\nimport sys\nprint('LOADED', [m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip().splitlines()[-1] == "LOADED []"
