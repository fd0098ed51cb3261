"""Plans on disk: the JSON of `plan --json`, read back strictly.

Fails with `UsageError` when the file cannot be read or written or is no plan.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.errors import UsageError
from shardwise.planner.types import Plan
from shardwise.records import from_json, to_json


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan, at once."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_bytes(to_json(plan, indent=2))
        os.replace(partial, target)
    except OSError as error:
        raise UsageError(f"cannot write the plan: {error.strerror or error}", where=str(path)) from error


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that `write_plan` or `plan --json` wrote."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read the plan: {error.strerror or error}", where=str(path), hint="made by 'shardwise plan --out FILE'"
        ) from error
    return from_json(data, Plan, where=str(path))
