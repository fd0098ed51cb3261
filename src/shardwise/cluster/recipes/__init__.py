"""Files for service managers and for clusters that are there already; `shardwise cluster recipe NAME` prints them.

Package data flows out with this machine's own paths filled in. **Fails with** `UsageError` for an unknown name.
"""

from __future__ import annotations

import importlib.resources
import platform
import shutil
import string
import sys
from pathlib import Path

from shardwise.cluster.state import StateDir
from shardwise.errors import UsageError
from shardwise.records import Record


class Recipe(Record):
    """One file."""

    name: str
    file: str
    use: str


RECIPES = (
    Recipe(name="systemd", file="shardwise.service", use="a Linux machine that is in the cluster from boot on"),
    Recipe(name="systemd-sleep", file="shardwise-sleep.service", use="Linux: tell the cluster before this machine sleeps"),
    Recipe(name="launchd", file="dev.shardwise.cluster.plist", use="the same on macOS"),
    Recipe(name="windows", file="windows.ps1", use="the same on Windows, as a scheduled task"),
    Recipe(name="kuberay", file="kuberay.yaml", use="a Kubernetes cluster with the KubeRay operator"),
    Recipe(name="slurm", file="slurm.sbatch", use="nodes that Slurm hands out"),
    Recipe(name="container", file="Containerfile", use="an image with everything in it"),
)


def recipe(name: str, state: StateDir | None = None) -> str:
    """The file's text for this machine."""
    found = next((r for r in RECIPES if r.name == name), None)
    if found is None:
        known = ", ".join(r.name for r in RECIPES)
        raise UsageError(f"no recipe '{name}'", where="cluster recipe", hint=f"there are: {known}")
    text = importlib.resources.files(__package__).joinpath(found.file).read_text(encoding="utf-8")
    return string.Template(text).safe_substitute(_values(state or StateDir()))


def _values(state: StateDir) -> dict[str, str]:
    program = shutil.which("shardwise") or str(Path(sys.executable).with_name("shardwise"))
    return {
        "SHARDWISE": program,
        "STATE": str(state.folder),
        "PYTHON": ".".join(platform.python_version_tuple()[:2]),
        "USER": Path.home().name,
    }
