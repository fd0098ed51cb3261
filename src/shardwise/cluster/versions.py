"""Which differences between machines a cluster allows, and the cure for the others. Pure.

Python's minor version and Ray's version must be equal because Ray refuses anything else, late and with a traceback;
shardwise's and llama.cpp's because their numbers and protocols must be.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform

import shardwise
from shardwise.cluster.control import CONTROL_VERSION, NodeCard
from shardwise.errors import CompatibilityError, bootstrap_tool
from shardwise.records import Record


class Difference(Record):
    """One thing that differs."""

    what: str
    here: str  # the coordinator's
    there: str  # the joiner's
    cure: str


@functools.cache
def own_versions() -> dict[str, str]:
    """The fields of `NodeCard` that concern software."""
    return {
        "python": platform.python_version(),
        "ray": _installed("ray"),
        "shardwise": shardwise.__version__,
        "llama": _installed("llama-cpp-python"),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def differences(here: NodeCard, there: NodeCard) -> list[Difference]:
    """Everything that stands between two machines."""
    found = []
    pairs = (
        ("Python", _minor(here.python), _minor(there.python), f"install Python {_minor(here.python)} on {there.name}"),
        ("Ray", here.ray, there.ray, _cure("ray", here.ray, there)),
        ("shardwise", here.shardwise, there.shardwise, _cure("shardwise", here.shardwise, there)),
        ("llama-cpp-python", here.llama, there.llama, _cure("llama-cpp-python", here.llama, there)),
    )
    for what, mine, theirs, cure in pairs:
        if mine != theirs:
            found.append(Difference(what=what, here=mine or "missing", there=theirs or "missing", cure=cure))
    return found


def require_same_versions(here: NodeCard, there: NodeCard, *, control_version: int = CONTROL_VERSION) -> None:
    """Raise `CompatibilityError` with every difference and the first cure."""
    found = differences(here, there)
    if control_version != CONTROL_VERSION:
        cure = _cure("shardwise", here.shardwise, there)
        found.insert(0, Difference(what="control protocol", here=str(CONTROL_VERSION), there=str(control_version), cure=cure))
    if found:
        text = "; ".join(f"{d.what} is {d.there} on {there.name} and {d.here} in the cluster" for d in found)
        raise CompatibilityError(text, where=there.name, hint="; ".join(dict.fromkeys(d.cure for d in found)))


def _cure(package: str, version: str, there: NodeCard) -> str:
    """On the other machine; where this one runs from a checkout, so does that one, and pip finds no shardwise."""
    if bootstrap_tool() is None:
        return f"pip install '{package}=={version}' on {there.name}"
    if package == "ray":
        return f".venv/bin/python -m pip install '{package}=={version}' on {there.name}"
    return f"check out the same commit on {there.name}, and there 'python3 tools/bootstrap.py sample ray server'"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
