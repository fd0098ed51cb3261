"""API keys: several, named, kept as salted hashes, each with its own limits.

The key file is JSON, mode 0600: {"keys": [{"name", "salt", "hash", "requests_per_minute", "tokens_per_minute"}]}. A key is
`sw-` and 43 characters from 32 random bytes; with that much entropy one SHA-256 over salt and key is enough, and checking costs
microseconds. The key itself is shown once, when it is made.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from shardwise import records
from shardwise.clock import Clock
from shardwise.errors import UsageError
from shardwise.server.problems import Problem

MAX_KEY_CHARS = 256


class ApiKey(records.Record):
    """One key, without the key. Limits of 0 mean none."""

    name: str
    salt: str
    hash: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0


class KeyFile(records.Record):
    """What is on disk."""

    keys: tuple[ApiKey, ...] = ()


def _hash(salt: str, key: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys of a file; `UsageError` where it is missing or not one."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the key file: {error.strerror}", where=str(path)) from error
    return records.from_json(data, KeyFile, where=str(path)).keys


def new_key(path: Path, name: str, *, requests_per_minute: int = 0, tokens_per_minute: int = 0) -> str:
    """Add a named key to the file (made where missing, mode 0600) and return it, for the only time."""
    known = read_keys(path) if path.exists() else ()
    if any(key.name == name for key in known):
        raise UsageError(f"there is already a key named '{name}'", where=str(path), hint="choose another name")
    salt, key = secrets.token_hex(16), "sw-" + secrets.token_urlsafe(32)
    entry = ApiKey(
        name=name,
        salt=salt,
        hash=_hash(salt, key),
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
    )
    data = records.to_json(KeyFile(keys=(*known, entry)), indent=2)
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)
    return key


@dataclass(slots=True)
class Bucket:
    """A token bucket: holds `per_minute`, refills evenly. 0 = no limit."""

    per_minute: int
    level: float = 0.0
    at_s: float = 0.0

    def refill(self, now_s: float) -> None:
        self.level = min(float(self.per_minute), self.level + (now_s - self.at_s) * self.per_minute / 60.0)
        self.at_s = now_s

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` is there."""
        missing = min(amount, float(self.per_minute)) - self.level
        return max(0.0, missing * 60.0 / self.per_minute) if self.per_minute else 0.0


@dataclass(slots=True)
class Client:
    """Who asks, and what they may still ask for."""

    name: str
    requests: Bucket
    tokens: Bucket

    def spend_tokens(self, count: int) -> None:
        """Charge generated and read tokens after the fact; the next request waits for a debt."""
        if self.tokens.per_minute:
            self.tokens.level -= count


@dataclass(slots=True)
class Access:
    """Authentication and rate limits. Without keys everybody is `local`."""

    clock: Clock
    keys: tuple[ApiKey, ...] = ()
    clients: dict[str, Client] = field(default_factory=dict)

    def identify(self, authorization: str) -> Client:
        """The client behind an `Authorization` header; raises 401."""
        if not self.keys:
            return self._client("local", 0, 0)
        scheme, _, key = authorization.partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Problem(401, "no API key: send 'Authorization: Bearer KEY'", code="missing_api_key")
        found: ApiKey | None = None
        for entry in self.keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(_hash(entry.salt, key[:MAX_KEY_CHARS]), entry.hash):
                found = entry
        if found is None:
            raise Problem(401, "the API key is not known here", code="invalid_api_key")
        return self._client(found.name, found.requests_per_minute, found.tokens_per_minute)

    def admit(self, client: Client) -> dict[str, str]:
        """Charge one request, or raise 429; returns the x-ratelimit headers."""
        now_s = self.clock.now_s()
        for bucket in (client.requests, client.tokens):
            if bucket.per_minute:
                bucket.refill(now_s)
        for bucket, what in ((client.requests, "requests"), (client.tokens, "tokens")):
            wait_s = bucket.wait_s(1.0)
            if bucket.per_minute and wait_s > 0:
                raise Problem(
                    429,
                    f"key '{client.name}' has used its {bucket.per_minute} {what} per minute; try again in {wait_s:.1f} s",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
        headers = {}
        if client.requests.per_minute:
            client.requests.level -= 1.0
            headers["x-ratelimit-limit-requests"] = str(client.requests.per_minute)
            headers["x-ratelimit-remaining-requests"] = str(max(0, int(client.requests.level)))
        if client.tokens.per_minute:
            headers["x-ratelimit-limit-tokens"] = str(client.tokens.per_minute)
            headers["x-ratelimit-remaining-tokens"] = str(max(0, int(client.tokens.level)))
        return headers

    def _client(self, name: str, requests_per_minute: int, tokens_per_minute: int) -> Client:
        if name not in self.clients:
            now_s = self.clock.now_s()
            self.clients[name] = Client(
                name,
                Bucket(requests_per_minute, float(requests_per_minute), now_s),
                Bucket(tokens_per_minute, float(tokens_per_minute), now_s),
            )
        return self.clients[name]
