"""From a flat plan of globs to the modules and parameters it names. Pure: names in, names out.

`*` stands for one component of a path (in any container: ModuleList, Sequential, ModuleDict, plain attribute), `**` for
any number of them, and `*` inside a component for part of it. Where two rules match one name, the later one counts, but a
rule without wildcard beats those with.
What can fail: a rule that matches nothing (UsageError with the nearest existing name).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import UsageError
from shardwise.tp.styles import Style, as_style


@dataclass(frozen=True)
class Match:
    """One name that a rule hit."""

    name: str
    rule: str
    style: Style


def compile_glob(pattern: str) -> re.Pattern[str]:
    """A rule's pattern as a regular expression on whole dotted names."""
    parts = []
    for component in pattern.split("."):
        if component == "**":
            parts.append(r"[^.]+(?:\.[^.]+)*")
        else:
            parts.append("[^.]+" if component == "*" else re.escape(component).replace(r"\*", "[^.]*"))
    return re.compile(r"\.".join(parts))


def generic_name(name: str) -> str:
    """`layers.3.mlp` -> `layers.*.mlp`: the shape in which plans are written."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def match_plan(plan: Mapping[str, Any], names: Iterable[str], *, strict: bool) -> tuple[list[Match], list[str]]:
    """Every name that a rule hits, in the order of `names`, and the rules that hit nothing.

    With `strict` such a rule is a UsageError that tells the nearest name; plans that come with a model class cover all its
    variants (dense and sparse layers), so they are read leniently."""
    ordered = list(names)
    styles = {rule: as_style(value, where=f"rule '{rule}'") for rule, value in plan.items()}
    found: dict[str, Match] = {}
    unused = []
    for exact in (False, True):
        for rule, style in styles.items():
            if ("*" not in rule) != exact:
                continue
            regex = compile_glob(rule)
            hits = [name for name in ordered if regex.fullmatch(name)]
            found.update({name: Match(name, rule, style) for name in hits})
            if not hits:
                unused.append(rule)
    if unused and strict:
        raise UsageError(
            f"the rule '{unused[0]}' matches no module or parameter",
            where="tensor-parallel plan",
            hint=_nearest(unused[0], ordered),
        )
    return [found[name] for name in ordered if name in found], unused


def _nearest(rule: str, names: list[str]) -> str:
    generic = list(dict.fromkeys(generic_name(name) for name in names if name))
    near = difflib.get_close_matches(generic_name(rule), generic, 1, cutoff=0.0)
    return f"the nearest name is '{near[0]}'" if near else "the module has no named part"
