"""Cures that are shown work where they are shown: in a checkout, where pip knows no shardwise and `.venv` is not on PATH."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise import errors
from shardwise.cluster.ray_engine.settings import OLDEST_RAY
from shardwise.errors import MissingExtraError, install_command, pip_command
from shardwise.probe.doctor import Facts, examine

ROOT = Path(__file__).resolve().parents[2]


def without(package: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The program where a package is not installed: nothing finds it."""
    code = (
        "import sys, importlib.abc, importlib.metadata as m\n"
        "class Gone(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {package!r}: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Gone())\n"
        "before = m.version\n"
        "def version(name):\n"
        f"    if name == {package!r}: raise m.PackageNotFoundError(name)\n"
        "    return before(name)\n"
        "m.version = version\n"
        "from shardwise.cli.main import run\n"
        f"sys.exit(run({list(arguments)!r}))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "SHARDWISE_STATE": str(cwd / "state")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [("uvicorn", ["serve", "sample"], "server"), ("fastapi", ["serve", "sample"], "server"), ("ray", ["cluster", "up"], "ray")],
)
def test_the_cure_for_a_missing_extra_is_a_command_that_is_there(
    package: str, command: list[str], extra: str, tmp_path: Path
) -> None:
    done = without(package, *command, cwd=tmp_path)
    assert done.returncode == 2
    found = re.search(r"; python3 (\S+) (\w+)\n$", done.stderr)
    assert found, done.stderr
    assert Path(found[1]) == ROOT / "tools" / "bootstrap.py"
    assert found[2] == extra


def test_the_doctor_names_it_too(tmp_path: Path) -> None:
    done = without("ray", "doctor", cwd=tmp_path)
    assert f"-> python3 {ROOT}/tools/bootstrap.py ray to join a cluster" in done.stdout.replace("\n", "")


def test_in_the_checkout_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("ray") == "python3 tools/bootstrap.py ray"


def test_elsewhere_it_is_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "bootstrap_tool", lambda: None)
    assert MissingExtraError.for_extra("ray", "it").hint == "pip install 'shardwise[ray]'"


def test_pip_is_that_of_the_python_that_runs() -> None:
    """`pip` alone may be another Python's, or not on the path at all."""
    program = shlex.split(pip_command("nothing"))
    assert program[-2:] == ["install", "nothing"]
    asked = subprocess.run([*program[:-2], "--version"], capture_output=True, text=True, timeout=60, check=False)
    assert asked.returncode == 0
    assert sys.prefix in asked.stdout


def test_no_cure_of_the_doctor_relies_on_the_path() -> None:
    old = f"{OLDEST_RAY[0]}.{OLDEST_RAY[1] - 1}.0"
    for ray in ("", old, "99.0.0"):
        facts = Facts(system="Linux", python="3.11.7", ray=ray, llama_problem="broken", gpu_seen="an NVIDIA GPU")
        whole = Facts(system="Linux", python="3.11.7", ray=ray, gpu_seen="an NVIDIA GPU")
        for finding in (*examine(facts), *examine(whole)):
            for word in re.findall(r"(\S+ \S+ )?pip install", finding.cure):
                assert word.endswith("-m "), finding.cure


def test_the_readme_installs_before_it_uses() -> None:
    """Each command of it comes after the line that brings what it needs; files that it names are there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.split("## What you see")[0].splitlines()
    first = {name: next(i for i, line in enumerate(lines) if line.strip().startswith(name)) for name in ("make demo", "python3")}
    for command in ("shardwise serve", "shardwise cluster up"):
        used = next(i for i, line in enumerate(lines) if command in line)
        assert first["python3"] < used, command
    tool = lines[first["python3"]].split("#")[0].split()
    assert tool[:2] == ["python3", "tools/bootstrap.py"]
    assert {"ray", "server"} <= set(tool[2:])
    for file in re.findall(r"--cluster (\S+)", text):
        assert (ROOT / file).is_file(), file
    assert "pip install shardwise" not in text
    assert "pip install 'shardwise" not in text


def test_the_readmes_python_runs_and_answers() -> None:
    """As it stands, in a process of its own."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.split("From Python:\n\n")[1].split("\n\n")[0]
    code = "\n".join(line[4:] for line in block.splitlines())
    assert "import shardwise" in code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
