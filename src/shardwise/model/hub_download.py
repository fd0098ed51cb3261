"""One file of the Hub into huggingface_hub's cache, taken up where an earlier attempt stopped, and checked.

huggingface_hub resumes within one call, but throws a partial file away when the process ends; at home a download of
40 GB lives through more than one evening. So the bytes are streamed by its `http_get` into `blobs/<etag>.part` of its
own cache (layout: its guide "Understand caching"), and its `hf_hub_download` then finds the blob and links it.
**Promises**: a partial file is continued, never trusted: the whole must have the announced size and, where the server
names it, SHA-256. Two processes do not write one file. **Fails when**: the network does (`NetworkError`, what came is
kept), the disk is full or read-only (`ModelError`), or the content is not what was announced (`CorruptWeightsError`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.errors import CorruptWeightsError, ModelError
from shardwise.model.hub_errors import mapped_hub_errors
from shardwise.model.identity import file_sha256

Progress = Callable[[str, int, int], None]  # (file, bytes done, bytes in all)
_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_LOCK_TIMEOUT_S = 6 * 3600.0  # another process may be downloading the same file for hours


def fetch_file(
    repo: str, name: str, *, revision: str | None, endpoint: str | None, cache: Path, progress: Progress | None = None
) -> Path:
    """The file's path in the cache, downloaded as far as it is not there."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    where = f"hf:{repo}:{name}"
    with mapped_hub_errors(where):
        url = hf_hub_url(repo, name, revision=revision, endpoint=endpoint)
        metadata = get_hf_file_metadata(url, token=_token(), endpoint=endpoint)
        size, etag = metadata.size, metadata.etag
        blob = _blob(repo, etag, cache)
        direct = size is None or etag is None or size > constants.MAX_HTTP_DOWNLOAD_SIZE
        if not direct and not blob.exists():
            _resume(url, blob, name, int(size), where, progress)
        path = hf_hub_download(
            repo,
            name,
            revision=revision,
            cache_dir=cache,
            endpoint=endpoint,
            tqdm_class=bar_class(name, size or 0, progress),
        )
    return Path(path)


def _resume(url: str, blob: Path, name: str, size: int, where: str, progress: Progress | None) -> None:
    """Fill `<blob>.part` from its present end, check it, and rename it."""
    from filelock import FileLock
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    blob.parent.mkdir(parents=True, exist_ok=True)
    part = blob.with_name(blob.name + ".part")
    with FileLock(f"{part}.lock", timeout=_LOCK_TIMEOUT_S):
        if blob.exists():  # another process was first
            return
        have = part.stat().st_size if part.exists() else 0
        if have > size:
            part.unlink()
            have = 0
        with part.open("ab") as file:
            http_get(
                url,
                file,
                resume_size=have,
                headers=build_hf_headers(token=_token()),
                expected_size=size,
                tqdm_class=bar_class(name, size, progress),
            )
            file.flush()
            os.fsync(file.fileno())
        _check(part, blob.name, size, where)
        part.replace(blob)
    Path(f"{part}.lock").unlink(missing_ok=True)


def _check(part: Path, etag: str, size: int, where: str) -> None:
    """Large files' etag is the SHA-256 of their content."""
    actual_size = part.stat().st_size
    actual = file_sha256(part) if _SHA256.match(etag) else etag
    if (actual_size, actual) != (size, etag):
        part.unlink()
        message = "the downloaded file is not what the server announced"
        details = {"file": where, "expected": f"{size} bytes, {etag}", "actual": f"{actual_size} bytes, {actual}"}
        raise CorruptWeightsError(message, where=where, hint="it was deleted; download again", **details)


def _blob(repo: str, etag: str | None, cache: Path) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    if etag is not None and not re.fullmatch(r"[\w.\-]+", etag):
        raise ModelError("the server names no usable etag", where=f"hf:{repo}")
    return cache / str(repo_folder_name(repo_id=repo, repo_type="model")) / "blobs" / (etag or "none")


def _token() -> str | None:
    """None leaves the choice to huggingface_hub (HF_TOKEN, or a login)."""
    return os.environ.get("HF_TOKEN") or None


def bar_class(name: str, total: int, progress: Progress | None) -> type[Any]:
    """A tqdm class that reports to `progress` and draws nothing."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True
            kwargs.pop("name", None)
            self.done = int(kwargs.get("initial") or 0)
            super().__init__(*args, **kwargs)
            self._report()

        def update(self, n: float | None = 1) -> bool | None:
            self.done += int(n or 0)
            self._report()
            return None

        def _report(self) -> None:
            if progress is not None:
                progress(name, self.done, total)

    return Bar
