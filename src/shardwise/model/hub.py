"""`hf:org/repo[@revision][:file]` -> a description by range requests, or the whole model on this machine.

All requests go through `huggingface_hub` (its tokens, retries, cache and resumption) to `HF_ENDPOINT`; the cache is
`HF_HOME`'s. `file` may also be a quantization (`hf:org/repo:Q4_K_M`) where that names one model of the repository.
**Promises**: describing fetches headers and about 64 KiB of samples, never weights; a download that was cut is taken up
where it stopped. **Fails when**: the reference is no reference or names several models (`UsageError`), the repository
or file does not exist or is closed (`ModelError`), the server cannot be reached (`NetworkError`), or the disk is too
small (`ModelError`, before anything is written). **Called by**: `model.resolve`.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from shardwise.errors import ConnectFailed, MalformedModelError, ModelError, NetworkError, UsageError
from shardwise.model.byte_source import ByteSource
from shardwise.model.description import ModelDescription
from shardwise.model.gguf import describe_gguf, describe_sources
from shardwise.model.hub_download import Progress, fetch_file
from shardwise.model.hub_errors import mapped_hub_errors
from shardwise.model.huggingface import describe_files, weight_files
from shardwise.model.split_files import PART_NAME, part_names
from shardwise.units import format_bytes

_REFERENCE = re.compile(r"^hf:(?P<repo>[\w.\-]+/[\w.\-]+)(?:@(?P<revision>[\w.\-/]+))?(?::(?P<file>[^:\0]+))?$")
_SIDE_MODEL = re.compile(r"mmproj|imatrix")
_SIDE_FILES = re.compile(r"^(?:[\w.\-]+\.(?:json|jinja|model|txt))$")
READ_AHEAD_BYTES = 64 << 10  # a header's length and the header in one request
MAX_PREFIX_BYTES = 128 << 20  # of one remote file's beginning kept in memory


@dataclass(frozen=True, slots=True)
class HubReference:
    """A parsed `hf:` reference."""

    text: str
    repo: str
    revision: str | None
    file: str | None


def parse_reference(text: str) -> HubReference:
    """`UsageError` for anything that is not `hf:org/repo[@revision][:file]`."""
    match = _REFERENCE.match(text)
    if match is None or ".." in match["repo"]:
        hint = "write hf:org/repo, hf:org/repo@revision or hf:org/repo:file.gguf"
        raise UsageError(f"'{text[:200]}' names no model on the Hub", hint=hint, field="MODEL")
    return HubReference(text, match["repo"], match["revision"], match["file"])


def describe_remote(text: str) -> ModelDescription:
    """Describe a model of the Hub; where the server cannot be reached, a file that was downloaded before."""
    repo, gguf, kept = _look_up(text)
    if kept is not None:
        return describe_gguf(kept, reference=text)
    if gguf:
        return describe_sources(repo.open_all(gguf), reference=text)
    return describe_files(repo, reference=text)


def download(text: str, *, progress: Progress | None = None) -> Path:
    """Have a model of the Hub on this machine: the first `.gguf` part, or a Hugging Face folder."""
    repo, gguf, kept = _look_up(text)
    if kept is not None:
        return kept
    names = gguf or [*weight_files(repo, repo.names()), *(n for n in repo.names() if _SIDE_FILES.match(n))]
    repo.check_disk(names)
    paths = [repo.fetch(name, progress) for name in names]
    return paths[0] if gguf else paths[0].parent


def _look_up(text: str) -> tuple[RemoteRepo, list[str], Path | None]:
    """(repository, its GGUF parts that are meant, the file in the cache where the server does not answer)."""
    reference = parse_reference(text)
    repo = RemoteRepo(reference)
    try:
        return repo, repo.gguf_parts(), None
    except ConnectFailed:
        kept = cached_file(reference)
        if kept is None:
            raise
        return repo, [], kept


@dataclass
class RemoteRepo:
    """One repository at one revision; the list of its files is fetched once, then the commit is pinned."""

    reference: HubReference

    @property
    def label(self) -> str:
        return f"hf:{self.reference.repo}"

    @cached_property
    def _info(self) -> tuple[str, dict[str, int]]:
        """(commit, size of each file)."""
        from huggingface_hub import HfApi

        with mapped_hub_errors(self.label):
            api = HfApi(endpoint=_endpoint())
            info = api.model_info(self.reference.repo, revision=self.reference.revision, files_metadata=True)
        sizes = {s.rfilename: s.size for s in info.siblings or () if s.size is not None}
        return str(info.sha), sizes

    def names(self) -> list[str]:
        return sorted(self._info[1])

    def gguf_parts(self) -> list[str]:
        """The GGUF files that the reference means; empty for a repository of safetensors."""
        models = [name for name in self.names() if name.endswith(".gguf") and not _SIDE_MODEL.search(name)]
        wanted = self.reference.file
        if wanted is None:
            candidates = models
            if not models or ("config.json" in self.names() and any(n.endswith(".safetensors") for n in self.names())):
                return []
        else:
            tag = re.compile(rf"(?<![a-z0-9]){re.escape(wanted.lower())}(?![a-z0-9_])")
            candidates = [n for n in models if n == wanted] or [n for n in models if tag.search(n.lower())]
        firsts = [name for name in candidates if (m := PART_NAME.match(name)) is None or int(m["number"]) == 1]
        if not firsts and wanted in candidates:
            firsts = [part_names(wanted)[0]]
        if len(firsts) != 1:
            raise self._choose(wanted, firsts or models)
        parts = part_names(firsts[0])
        missing = [name for name in parts if name not in self._info[1]]
        if missing:
            raise ModelError(f"the repository lacks {missing[0]}, a part of this model", where=self.label)
        return parts

    def _choose(self, wanted: str | None, models: list[str]) -> UsageError:
        shown = ", ".join(models[:8]) + (f" and {len(models) - 8} more" if len(models) > 8 else "")
        what = f"'{wanted}' names no single model of this repository" if wanted else "this repository holds several models"
        hint = f"write {self.label}:FILE with one of: {shown}" if models else "it holds no .gguf file"
        return UsageError(what, where=self.label, hint=hint, field="MODEL")

    def open_all(self, names: list[str]) -> list[ByteSource]:
        commit, sizes = self._info
        absent = [name for name in names if name not in sizes]
        if absent:
            raise ModelError(f"the repository has no file '{absent[0]}'", where=self.label)
        return [RemoteFile(f"{self.label}:{name}", self._url(name, commit), sizes[name]) for name in names]

    def _url(self, name: str, commit: str) -> str:
        from huggingface_hub import hf_hub_url

        return str(hf_hub_url(self.reference.repo, name, revision=commit, endpoint=_endpoint()))

    def check_disk(self, names: list[str]) -> None:
        """Refuse before writing where what is still to come does not fit."""
        folder = cache_folder()
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        needed = sum(size for name, size in self._info[1].items() if name in names and self._cached(name) is None)
        free = shutil.disk_usage(folder).free
        if needed > free:
            message = f"the download needs {format_bytes(needed)}, but the disk has {format_bytes(free)} free"
            hint = "free some space, or set HF_HOME to another disk"
            raise ModelError(message, where=str(folder), hint=hint, needed_bytes=needed, available_bytes=free)

    def _cached(self, name: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.reference.repo, name, cache_dir=cache_folder(), revision=self._info[0])
        return Path(found) if isinstance(found, str) else None

    def fetch(self, name: str, progress: Progress | None) -> Path:
        """One file into the cache, resuming what is there of it."""
        # By the name that was asked for, so that the file is found again without a network.
        revision, size = self.reference.revision, self._info[1][name]
        path = fetch_file(
            self.reference.repo, name, revision=revision, endpoint=_endpoint(), cache=cache_folder(), progress=progress
        )
        if path.stat().st_size != size:
            message = f"the repository changed during the download: {name} has {path.stat().st_size} bytes, not {size}"
            raise ModelError(message, where=self.label, hint="start again")
        if progress is not None:
            progress(name, size, size)
        return path


@dataclass
class RemoteFile:
    """A file behind a server, read by ranges; its beginning is kept, because headers are read more than once."""

    name: str
    url: str
    size_bytes: int
    is_remote: ClassVar[bool] = True
    _prefix: bytearray = field(default_factory=bytearray, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, offset_bytes: int, num_bytes: int) -> bytes:
        end = offset_bytes + num_bytes
        if end > self.size_bytes:
            message = f"the file ends at byte {self.size_bytes}, {end - self.size_bytes} bytes too early"
            raise MalformedModelError(message, where=self.name)
        with self._lock:
            have = len(self._prefix)
            if offset_bytes <= have < end <= MAX_PREFIX_BYTES:
                self._prefix += self._fetch(have, min(max(end, have + READ_AHEAD_BYTES), self.size_bytes))
            if end <= len(self._prefix):
                return bytes(self._prefix[offset_bytes:end])
        return self._fetch(offset_bytes, end)

    def _fetch(self, start: int, end: int) -> bytes:
        if start == end:
            return b""
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        headers = build_hf_headers() | {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        with mapped_hub_errors(self.name):
            response = http_backoff("GET", self.url, headers=headers, max_retries=3)
            hf_raise_for_status(response)
        data = bytes(response.content)
        if response.status_code != 206 and len(data) > end - start:
            data = data[start:end]  # the server does not know ranges
        if len(data) != end - start:
            raise NetworkError(f"the server sent {len(data)} bytes of {end - start}", where=self.name, hint="try again")
        return data


def cached_file(reference: HubReference) -> Path | None:
    """The file of a full reference if all its parts were downloaded before (for use without a network)."""
    from huggingface_hub import try_to_load_from_cache

    if reference.file is None:
        return None
    revision = reference.revision or "main"
    found = [
        try_to_load_from_cache(reference.repo, name, cache_dir=cache_folder(), revision=revision)
        for name in part_names(reference.file)
    ]
    return Path(found[0]) if all(isinstance(path, str) for path in found) else None


def cache_folder() -> Path:
    """Where huggingface_hub keeps files, read from the environment now rather than at import."""
    explicit = os.environ.get("HF_HUB_CACHE")
    home = os.environ.get("HF_HOME")
    if explicit or home:
        return Path(explicit).expanduser() if explicit else Path(str(home)).expanduser() / "hub"
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _endpoint() -> str | None:
    endpoint = os.environ.get("HF_ENDPOINT")
    return endpoint.rstrip("/") if endpoint else None
