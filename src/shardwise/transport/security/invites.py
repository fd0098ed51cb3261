"""Invites: how a stranger becomes a node, once, within minutes.

An invite is a key pair whose public half stands on the coordinator's `AllowList` until it is used or expires (docs/adr/0040).
The joiner connects with it, over CURVE, to the coordinator whose public key the invite names, and hands over its own public key.
**Promises** an invite works once, also across a restart of the coordinator and with two joiners at the same time; a replayed,
expired or altered one fails in the CURVE handshake. **Fails with** `AuthenticationFailed` (used, expired, unknown) or
`UsageError` (not an invite). **Called by** `cluster up`, `cluster join`.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import threading
from pathlib import Path

from zmq.utils import z85

from shardwise.clock import Clock, SystemClock
from shardwise.errors import AuthenticationFailed, UsageError
from shardwise.records import Record, from_json, to_json
from shardwise.transport.security.allow_list import AllowList
from shardwise.transport.security.keys import ClusterKey, NodeKeys, check_public_key
from shardwise.transport.security.private_files import read_private, write_private

DEFAULT_VALID_S = 600.0
MAX_OPEN_INVITES = 256
_PREFIX = "swi1_"
_MAX_TEXT = 4096
_HINT_NEW = "ask for a new invite with 'shardwise cluster invite'"


class Invite(Record):
    """What the joiner gets, as one word (`encode`). It is a secret until it was used."""

    invite_id: str
    addresses: tuple[str, ...]  # where the coordinator listens, best first: tcp://host:port
    coordinator_public: str
    expires_at_s: float  # seconds since the epoch
    secret: str

    def encode(self) -> str:
        """One word for a command line or a QR code."""
        return _PREFIX + base64.urlsafe_b64encode(to_json(self)).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Invite:
        """Read the word back; errors never repeat it."""
        body = text.strip()
        if not body.startswith(_PREFIX) or len(body) > _MAX_TEXT:
            raise UsageError("this is not an invite", hint=f"an invite starts with '{_PREFIX}'; {_HINT_NEW}")
        body = body.removeprefix(_PREFIX)
        try:
            invite = from_json(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), cls)
            check_public_key(invite.coordinator_public)
            check_public_key(invite.secret)
        except (UsageError, binascii.Error, ValueError):
            raise UsageError("this invite is damaged", hint=f"copy all of it, or {_HINT_NEW}") from None
        return invite

    def keys(self) -> NodeKeys:
        """The key pair to connect with, once."""
        return NodeKeys.from_secret_bytes(z85.decode(self.secret))

    def __repr__(self) -> str:
        return f"Invite(invite_id={self.invite_id!r}, addresses={self.addresses!r}, secret=...)"


class IssuedInvite(Record):
    """The coordinator's note about an invite; holds no secret."""

    invite_id: str
    public: str
    expires_at_s: float
    used_by: str = ""  # the joiner's public key


class InviteFile(Record):
    """What stands on disk."""

    invites: tuple[IssuedInvite, ...]
    format: int = 1


class InviteBook:
    """The coordinator's invites. With a `path`, used and open ones survive a restart."""

    def __init__(self, key: ClusterKey, allowed: AllowList, *, path: Path | None = None, clock: Clock | None = None) -> None:
        self._key = key
        self._allowed = allowed
        self._path = path
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._issued: dict[str, IssuedInvite] = {}
        if path is not None and path.exists():
            for entry in read_private(path, InviteFile).invites:
                self._issued[entry.public] = entry
                self._open(entry)

    def issue(self, addresses: tuple[str, ...], coordinator_public: str, *, valid_s: float = DEFAULT_VALID_S) -> Invite:
        """A new invite; it works once, within `valid_s`."""
        now_s = self._clock.wall_s()
        invite_id, expires_at_s = secrets.token_hex(8), now_s + valid_s
        secret = self._key.derive(f"invite/{invite_id}/{expires_at_s!r}/{secrets.token_hex(16)}")
        keys = NodeKeys.from_secret_bytes(secret)
        entry = IssuedInvite(invite_id=invite_id, public=keys.public, expires_at_s=expires_at_s)
        with self._lock:
            self._forget_expired(now_s)
            if sum(not e.used_by for e in self._issued.values()) >= MAX_OPEN_INVITES:
                raise UsageError(f"{MAX_OPEN_INVITES} invites are open", hint="wait until some expire")
            self._issued[entry.public] = entry
            self._save()
        self._open(entry)
        return Invite(
            invite_id=invite_id,
            addresses=addresses,
            coordinator_public=check_public_key(coordinator_public),
            expires_at_s=expires_at_s,
            secret=keys.secret,
        )

    def redeem(self, invite_public: str, node_public: str, node_name: str) -> None:
        """Use an invite up and allow the node. `invite_public` is the `User-Id` of the joiner's connection."""
        check_public_key(node_public)
        with self._lock:
            entry = self._issued.get(invite_public)
            if entry is None:
                raise AuthenticationFailed("this invite is unknown here", where=node_name, hint=_HINT_NEW)
            if entry.used_by:
                raise AuthenticationFailed("this invite was already used", where=node_name, hint=_HINT_NEW)
            if self._clock.wall_s() >= entry.expires_at_s:
                raise AuthenticationFailed("this invite has expired", where=node_name, hint=_HINT_NEW)
            self._allowed.allow(node_public, node_name)
            self._issued[invite_public] = IssuedInvite(
                invite_id=entry.invite_id, public=entry.public, expires_at_s=entry.expires_at_s, used_by=node_public
            )
            self._save()
            self._allowed.remove(invite_public)

    def _open(self, entry: IssuedInvite) -> None:
        if not entry.used_by:
            self._allowed.allow(entry.public, f"invite {entry.invite_id}", role="invite", expires_at_s=entry.expires_at_s)

    def _forget_expired(self, now_s: float) -> None:
        for public in [k for k, e in self._issued.items() if now_s >= e.expires_at_s]:
            del self._issued[public]
            self._allowed.remove(public)

    def _save(self) -> None:
        if self._path is not None:
            write_private(self._path, InviteFile(invites=tuple(self._issued.values())))
