"""Where in a cluster file a field stands, because `tomllib` does not tell.

In: the text of a TOML file. Out: line numbers by path, e.g. `("node", 1, "memory")` -> 9. It only looks; what is valid
is decided elsewhere. Never fails: an unknown path falls back to its nearest known parent, then to line 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

Path = tuple[str | int, ...]

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*("[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(\s*\.\s*[A-Za-z0-9_-]+)*\s*=""")


@dataclass(slots=True)
class LineIndex:
    """Line numbers of tables and keys."""

    lines: dict[Path, int] = field(default_factory=dict)

    @staticmethod
    def of(text: str) -> LineIndex:
        """Scan `text` once."""
        index = LineIndex()
        counts: dict[Path, int] = {}
        here: Path = ()
        for number, line in enumerate(text.splitlines(), start=1):
            header = _HEADER.match(line)
            if header:
                here = _table_path(header.group(2), header.group(1) == "[[", counts)
                index.lines.setdefault(here, number)
                continue
            key = _KEY.match(line)
            if key:
                name = line.split("=", 1)[0].strip()
                path = here + tuple(part.strip().strip("\"'") for part in name.split("."))
                index.lines.setdefault(path, number)
        return index

    def line(self, path: Path) -> int:
        """The line of `path`, or of the nearest parent that has one."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[:-1]
        return 1


def _table_path(name: str, is_array: bool, counts: dict[Path, int]) -> Path:
    """`node.device` after two `[[node]]` -> ("node", 1, "device", i)."""
    parts = [part.strip().strip("\"'") for part in name.split(".")]
    path: Path = ()
    for part in parts[:-1]:
        path = (*path, part)
        if path in counts:
            path = (*path, counts[path] - 1)
    path = (*path, parts[-1])
    if is_array:
        counts[path] = counts.get(path, 0) + 1
        path = (*path, counts[path] - 1)
    return path
