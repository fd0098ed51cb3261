"""The parts of a split GGUF model: `name-00001-of-00003.gguf` and its siblings, in order.

Fails when: a part is missing, or the parts do not belong together (`ModelError` naming the part).
"""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.errors import MalformedModelError, ModelError
from shardwise.model.gguf_header import GgufHeader

PART_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
MAX_PARTS = 4096


def part_names(name: str) -> list[str]:
    """Names of all parts of the model that `name` belongs to; `[name]` where it is not split."""
    match = PART_NAME.match(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        raise ModelError(f"'{name}' is no possible part of a split model", hint=f"at most {MAX_PARTS} parts, counted from 1")
    return [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def part_paths(path: str | Path) -> list[Path]:
    """All parts on disk, whichever of them was named."""
    path = Path(path)
    paths = [path.with_name(name) for name in part_names(path.name)] if path.name else [path]
    if len(paths) > 1:
        missing = [part for part in paths if not part.is_file()]
        if missing:
            message = f"{len(missing)} of {len(paths)} parts of this split model are missing, first {missing[0].name}"
            raise ModelError(message, where=str(path.parent), hint="download all parts into one folder")
    return paths


def check_parts(headers: list[GgufHeader]) -> None:
    """Do these headers belong to one model, in this order?"""
    first = headers[0]
    claimed = first.integer("split.count", 0) or 1
    if claimed != len(headers):
        message = f"the header says that the model has {claimed} parts, but there are {len(headers)}"
        hint = "keep the names that end in -00001-of-0000N.gguf, all parts in one folder"
        raise ModelError(message, where=first.source.name, hint=hint)
    if len(headers) == 1:
        return
    for index, header in enumerate(headers):
        if (header.integer("split.no"), header.integer("split.count")) != (index, claimed):
            raise MalformedModelError(f"this is not part {index + 1} of {claimed}", where=header.source.name)
    expected = first.integer("split.tensors.count", 0)
    found = sum(len(header.tensors) for header in headers)
    if expected and expected != found:
        raise MalformedModelError(f"the parts hold {found} tensors, but should hold {expected}", where=first.source.name)
