"""Where weights are read from, slice by slice: several safetensors files, or the shards that another split saved.

Data flow: `(name, dim, start, stop)` -> one tensor of just these indices. Nothing is held: files are mapped, and a slice is
copied out of the map only when it is asked for.
What can fail: a name that no file has, a file that is not safetensors, an index that names a missing file, a shard of another
layout than the folder says (UsageError, CorruptWeightsError).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.errors import CorruptWeightsError, MissingExtraError, UsageError
from shardwise.tp.layout import ShardLayout

LAYOUT_FILE = "tp_layout.json"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


class WeightSource(Protocol):
    """Named tensors that can be read in slices."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor: ...


class SafetensorsSource:
    """One model in one or more safetensors files, or a folder with them (and their index)."""

    def __init__(self, where: str | Path | Sequence[str | Path]) -> None:
        self.files = _files(where)
        self._handles: dict[str, Any] = {}
        for path in self.files:
            handle = _opened(path)
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                self._handles[name] = handle

    def names(self) -> list[str]:
        return list(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._slice(name).get_dtype()]

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        return self.read_box(name, {dim: (start, stop)})

    def read_box(self, name: str, box: dict[int, tuple[int, int]]) -> torch.Tensor:
        """The part of a tensor between bounds on several dimensions."""
        view = self._slice(name)
        rank = len(view.get_shape())
        if rank == 0:
            return self._handles[name].get_tensor(name)
        return view[tuple(slice(*box[axis]) if axis in box else slice(None) for axis in range(rank))]

    def _slice(self, name: str) -> Any:
        if name not in self._handles:
            raise UsageError(f"no file has the tensor '{name}'", where=", ".join(path.name for path in self.files))
        return self._handles[name].get_slice(name)


class ShardedSource:
    """The shards of a split over any number of ranks (`save_sharded`), read as if they were one model.

    A slice is put together from the ranks that hold it; indices held by several are taken from the first."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / LAYOUT_FILE
        try:
            record = json.loads(path.read_text())
            self.layouts = {name: ShardLayout.from_dict(entry) for name, entry in record["tensors"].items()}
            self.degree = int(record["degree"])
            self._ties: dict[str, str] = record.get("ties", {})
        except FileNotFoundError as error:
            raise UsageError("the folder has no layout file", where=str(path), hint="save_sharded writes one") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptWeightsError(f"the layout file cannot be read: {error}", where=str(path)) from error
        self._shards = [SafetensorsSource([Path(folder) / shard_file(rank, self.degree)]) for rank in range(self.degree)]
        self._where = _owners(self.layouts)

    def names(self) -> list[str]:
        return [*self.layouts, *self._ties]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._layout(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._shards[0].dtype(self._ties.get(name, name))

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        name = self._ties.get(name, name)
        layout = self._layout(name)
        if layout.dim is None:
            return self._shards[0].read(name, dim, start, stop)
        same = layout.dim == dim
        first, last = (start, stop) if same else (0, layout.shape[layout.dim])
        other = {} if same else {dim: (start, stop)}
        pieces = [
            self._shards[rank].read_box(name, other | {layout.dim: (local, local + length)})
            for rank, local, length in _covering(self._where[name], first, last)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, layout.dim)

    def _layout(self, name: str) -> ShardLayout:
        found = self.layouts.get(self._ties.get(name, name))
        if found is None:
            raise UsageError(f"the shards have no tensor '{name}'")
        return found


Owner = tuple[int, int, int, int]
"""(global start, length, rank, local start)"""


def _owners(layouts: dict[str, ShardLayout]) -> dict[str, list[Owner]]:
    """For each cut tensor the runs of indices, ascending, each with one rank that holds it."""
    out: dict[str, list[Owner]] = {}
    for name, layout in layouts.items():
        runs: list[Owner] = []
        for rank, part in enumerate(layout.partition.parts if layout.partition else ()):
            local = 0
            for piece in part:
                if piece.start >= 0:
                    runs.append((piece.start, piece.length, rank, local))
                local += piece.length
        out[name] = sorted(runs)
    return out


def _covering(owners: list[Owner], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """(rank, local start, length) that together give the indices [start, stop) in order."""
    position = start
    while position < stop:
        run = next((o for o in owners if o[0] <= position < o[0] + o[1]), None)
        if run is None:
            raise CorruptWeightsError(f"no shard holds index {position}")
        length = min(run[0] + run[1], stop) - position
        yield run[2], run[3] + position - run[0], length
        position += length


def shard_file(rank: int, degree: int) -> str:
    return f"tp-rank-{rank:02d}-of-{degree:02d}.safetensors"


def _files(where: str | Path | Sequence[str | Path]) -> list[Path]:
    if not isinstance(where, str | Path):
        return [Path(path) for path in where]
    path = Path(where)
    if path.is_file():
        return [path]
    index = path / INDEX_FILE
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [path / name for name in names]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise UsageError("no safetensors file here", where=str(path), hint="only safetensors can be read slice by slice")
    return found


def _opened(path: Path) -> Any:
    if path.suffix != ".safetensors":
        raise UsageError("not a safetensors file", where=str(path), hint="only safetensors can be read slice by slice")
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise MissingExtraError.for_extra("torch", "reading safetensors") from error
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise UsageError("the file does not exist", where=str(path)) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptWeightsError(f"not a readable safetensors file: {error}", where=str(path)) from error
