"""What a start does not load, because every start would wait for it: kept as lists of modules, not as times (ADR 0045)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwise.partial_import import import_alone

# Each costs a process 5 to 100 ms.
NOBODY = ("asyncio", "yaml", "jinja2", "diskcache", "email", "importlib.metadata", "psutil", "ortools", "scipy", "torch", "ray")
PLANNING = ("shardwise.planner", "shardwise.machines", "shardwise.cluster.reconcile", "shardwise.deploy.following")
LAUNCH = "from shardwise.deploy import launch_local; import shardwise.deploy.bring_up"
FRONT = "from shardwise.deploy import launch_local"
WORKER = "import shardwise.stage.serve"
LIBRARY = "from shardwise.stage.llama import library; api = library.load(); library.build_identity(); library.describe()"
CHILD = "import shardwise.cluster.child"


def run(code: str) -> str:
    """The last line that a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        (LAUNCH, (*NOBODY, *PLANNING, "numpy", "gguf", "llama_cpp")),
        (
            FRONT,
            (
                *NOBODY,
                *PLANNING,
                "zmq",
                "msgspec",
                "shardwise.model",
                "shardwise.shards",
                "shardwise.session",
                "shardwise.records",
            ),
        ),
        (WORKER, (*NOBODY, *PLANNING, "gguf", "shardwise.model", "shardwise.shards.slicing", "shardwise.shards.store")),
        (LIBRARY, NOBODY),
        (CHILD, (*NOBODY, *PLANNING, "msgspec", "zmq", "shardwise.cluster.engine")),
        ("from shardwise.model.quantization import ggml_types; ggml_types()", (*NOBODY, "numpy", "gguf.vocab")),
    ],
    ids=["launch", "before the first process", "worker", "library", "child", "quantizations"],
)
def test_what_is_not_loaded(code: str, unwanted: tuple[str, ...]) -> None:
    assert run(f"{code}\nimport sys\nprint([m for m in {unwanted!r} if m in sys.modules])") == "[]"


@pytest.mark.parametrize("name", ["llama_cpp", "gguf"])
def test_a_package_is_whole_for_others(name: str) -> None:
    """A module of it that was imported alone is the one that the package then has."""
    module, other = {"llama_cpp": ("llama_cpp", "Llama"), "gguf": ("constants", "GGUFReader")}[name]
    code = f"""
import sys
from shardwise.partial_import import import_alone
alone = import_alone({name!r}, {module!r})
import {name} as package
assert "jinja2" not in sys.modules and "numpy" not in sys.modules
from {name} import {other}
from {name} import {module} as inner
import {name}.{module} as again
assert package is sys.modules[{name!r}]
assert again is inner is alone is package.{module}
assert package.{other} is {other} and import_alone({name!r}, {module!r}) is alone
assert not hasattr(package, "no_such_name")
print("whole")
"""
    assert run(code) == "whole"


def test_a_package_that_is_not_there() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        import_alone("no_such_package", "x")
