"""A real HTTP server on loopback that speaks the Hub's endpoints for one folder a repository.

It counts the bytes it sends and can cut a connection, so that tests can show what is fetched and how a download goes on.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_CHUNK = 1 << 16


@dataclass
class HubState:
    """What the server serves, and what it saw."""

    repos: dict[str, Path]
    address: str = ""
    sent_bytes: int = 0
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, Range
    tokens: set[str] = field(default_factory=set)  # Authorization headers seen
    cut_after_bytes: int | None = None  # once: drop the connection in the middle of a body
    ignore_ranges: bool = False
    digests: dict[tuple[Path, int], str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def digest(self, path: Path) -> str:
        """SHA-256, as the Hub has it for large files."""
        key = (path, path.stat().st_mtime_ns)
        with self.lock:
            if key not in self.digests:
                self.digests[key] = hashlib.sha256(path.read_bytes()).hexdigest()
            return self.digests[key]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: HubState

    def log_message(self, *_args: object) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlparse(self.path).path)
        with self.state.lock:
            self.state.requests.append((self.command, path, self.headers.get("Range", "")))
            self.state.tokens.add(self.headers.get("Authorization", ""))
        info = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if info is not None:
            self._model_info(info[1], info[2] or "main")
        elif file is not None:
            self._file(file[1], file[2], file[3], body)
        else:
            self._error(404, "EntryNotFound")

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _model_info(self, repo: str, revision: str) -> None:
        folder = self.state.repos.get(repo)
        if folder is None:
            return self._error(401 if repo == "closed/model" else 404, "GatedRepo" if repo == "closed/model" else "RepoNotFound")
        if revision not in ("main", COMMIT):
            return self._error(404, "RevisionNotFound")
        siblings = [{"rfilename": p.name, "size": p.stat().st_size} for p in sorted(folder.iterdir())]
        data = json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return None

    def _file(self, repo: str, revision: str, name: str, body: bool) -> None:
        folder = self.state.repos.get(repo)
        path = folder / name if folder else None
        if path is None or not path.is_file():
            return self._error(404, "EntryNotFound")
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        partial = asked is not None and not self.state.ignore_ranges
        start = int(asked[1]) if partial and asked else 0
        end = min(int(asked[2]) + 1 if partial and asked and asked[2] else size, size)
        self.send_response(206 if partial else 200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"' + self.state.digest(path) + '"')
        self.send_header("X-Repo-Commit", COMMIT)
        if partial:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        return self._send(path, start, end) if body else None

    def _send(self, path: Path, start: int, end: int) -> None:
        with path.open("rb") as file:
            file.seek(start)
            done = 0
            while start + done < end:
                chunk = file.read(min(_CHUNK, end - start - done))
                with self.state.lock:
                    cut = self.state.cut_after_bytes
                    self.close_connection = cut is not None and done >= cut
                    if self.close_connection:
                        self.state.cut_after_bytes = None
                        return
                    self.state.sent_bytes += len(chunk)
                try:
                    self.wfile.write(chunk)
                except ConnectionError:  # the client crashed, as one test has it do
                    self.close_connection = True
                    return
                done += len(chunk)


@contextmanager
def hub_server(repos: dict[str, Path]) -> Iterator[HubState]:
    """Serve until the block ends."""
    state = HubState(repos)
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
