"""A header that was read before is read again only where its bytes have changed: whatever size and times say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.errors import MalformedModelError
from shardwise.model import gguf_header, read_gguf_header
from tests.model.gguf_bytes import small_llama


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_llama().build())
    return path


def change(path: Path, old: bytes, new: bytes) -> None:
    """In place; size and times stay what they were."""
    stat, data = path.stat(), path.read_bytes()
    assert len(old) == len(new)
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_the_same_bytes_are_not_walked_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_gguf_header(path)
    monkeypatch.setattr(gguf_header, "_read_metadata", None)
    assert read_gguf_header(path) == first


def test_other_bytes_of_the_same_size_and_time_are(path: Path) -> None:
    assert read_gguf_header(path).text("general.architecture") == "llama"
    change(path, b"llama", b"qwen2")
    assert read_gguf_header(path).text("general.architecture") == "qwen2"


def test_a_header_that_is_broken_now_is_refused(path: Path) -> None:
    read_gguf_header(path)
    change(path, b"GGUF", b"FGUG")
    with pytest.raises(MalformedModelError):
        read_gguf_header(path)


def test_no_more_than_a_few_are_kept(tmp_path: Path) -> None:
    for number in range(gguf_header.MAX_KNOWN + 3):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(small_llama().build())
        read_gguf_header(path)
    assert len(gguf_header._known) == gguf_header.MAX_KNOWN
