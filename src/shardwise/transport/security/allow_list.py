"""Which public keys may talk to this process, until when, and which never again.

Keys flow in from the cluster's membership, invites and the deployment; verdicts flow out to the ZAP handler (each new connection)
and to receivers (each message). **Promises** a verdict takes the same time whichever entry matches or none; a revoked key stays
revoked, whatever older list is merged in later. **Fails when** a file is damaged (`UsageError`); a full list refuses
(`UsageError`). **Called by** `authenticator`, `invites`, the channel, the cluster. Safe to use from several threads.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Iterable
from pathlib import Path

from shardwise.clock import Clock, SystemClock
from shardwise.errors import UsageError
from shardwise.records import Record
from shardwise.transport.security.keys import check_public_key, fingerprint
from shardwise.transport.security.private_files import read_private, write_private

MAX_ENTRIES = 10_000


class AllowedKey(Record):
    """One entry. `role` is `node`, `invite` (may only ask to join) or `driver`."""

    public: str
    name: str
    role: str = "node"
    expires_at_s: float | None = None  # seconds since the epoch; None = until revoked


class AllowListFile(Record):
    """What stands on disk."""

    allowed: tuple[AllowedKey, ...]
    revoked: tuple[str, ...]
    format: int = 1


class AllowList:
    """Public keys that may connect."""

    def __init__(self, entries: Iterable[AllowedKey] = (), *, clock: Clock | None = None) -> None:
        self._lock = threading.Lock()
        self._clock = clock or SystemClock()
        self._allowed: dict[str, AllowedKey] = {}
        self._revoked: set[str] = set()
        self.num_removals = 0  # grows with every key that was removed or banned: whoever caches verdicts looks again
        for entry in entries:
            self._add(entry)

    def allow(self, public: str, name: str, *, role: str = "node", expires_at_s: float | None = None) -> None:
        """Permit a key. A revoked key is refused (`UsageError`): the node must make new keys and join again."""
        self._add(AllowedKey(public=check_public_key(public), name=name, role=role, expires_at_s=expires_at_s))

    def remove(self, public: str) -> None:
        """Forget a key (an invite that was used, a worker that ended); it may be allowed again later."""
        with self._lock:
            self._allowed.pop(public, None)
            self.num_removals += 1

    def revoke(self, public_or_name: str) -> list[AllowedKey]:
        """Ban a key, or every key of a node's name, for good; returns what was banned."""
        with self._lock:
            hit = [e for e in self._allowed.values() if public_or_name in (e.public, e.name)]
            if not hit:
                raise UsageError(f"no node '{_showable(public_or_name)}' to revoke", hint="see 'shardwise cluster nodes'")
            for entry in hit:
                del self._allowed[entry.public]
                self._revoked.add(entry.public)
            self.num_removals += 1
        return hit

    def find(self, public: str) -> AllowedKey | None:
        """The entry of a key that may talk now, or None. Looks at every entry, so that timing tells nothing."""
        asked = public.encode("utf-8", "replace")
        now_s = self._clock.wall_s()
        found: AllowedKey | None = None
        with self._lock:
            for entry in self._allowed.values():
                same = hmac.compare_digest(entry.public.encode(), asked)
                found = entry if same else found
        if found is not None and found.expires_at_s is not None and now_s >= found.expires_at_s:
            return None
        return found

    def permits(self, public: str) -> bool:
        """Whether this key may talk now."""
        return self.find(public) is not None

    def entries(self) -> list[AllowedKey]:
        """All entries, expired ones included."""
        with self._lock:
            return list(self._allowed.values())

    def save(self, path: Path) -> None:
        """Write with mode 0600, atomically."""
        with self._lock:
            content = AllowListFile(allowed=tuple(self._allowed.values()), revoked=tuple(sorted(self._revoked)))
        write_private(path, content)

    @classmethod
    def load(cls, path: Path, *, clock: Clock | None = None) -> AllowList:
        """Read a list back, bans included."""
        content = read_private(path, AllowListFile)
        out = cls(clock=clock)
        out._revoked = set(content.revoked)
        for entry in content.allowed:
            out._add(entry)
        return out

    def _add(self, entry: AllowedKey) -> None:
        with self._lock:
            if entry.public in self._revoked:
                raise UsageError(
                    f"the key of '{entry.name}' was revoked",
                    where=fingerprint(entry.public),
                    hint="remove the node's key file and join again with a new invite",
                )
            if len(self._allowed) >= MAX_ENTRIES and entry.public not in self._allowed:
                raise UsageError(f"more than {MAX_ENTRIES} keys are allowed", hint="revoke nodes that left")
            self._allowed[entry.public] = entry


def _showable(public_or_name: str) -> str:
    return public_or_name if len(public_or_name) != 40 else fingerprint(public_or_name)
