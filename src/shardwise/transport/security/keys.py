"""Who a node is: its Curve25519 key pair, and the cluster's own key.

Keys flow from the operating system's random source to files with mode 0600 and into ZeroMQ's CURVE; nothing here ever prints,
logs or compares a secret. **Fails when** a file is missing, damaged or open to others (`UsageError`).
Keys are written as Z85 text (ZeroMQ RFC 32): 40 characters for 32 bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from shardwise.errors import UsageError
from shardwise.records import Record
from shardwise.transport.security.private_files import read_private, write_private

KEY_TEXT_LENGTH = 40


class KeyFile(Record):
    """What stands in a key file."""

    kind: str  # node | cluster
    public: str
    secret: str
    format: int = 1


def check_public_key(public: str) -> str:
    """The key itself if it is 32 bytes in Z85; otherwise `UsageError` (the wrong text is not repeated: it may be a secret)."""
    try:
        valid = len(public) == KEY_TEXT_LENGTH and len(z85.decode(public)) == 32
    except (KeyError, ValueError, UnicodeEncodeError):
        valid = False
    if not valid:
        raise UsageError("not a public key", hint=f"a public key is {KEY_TEXT_LENGTH} characters of Z85")
    return public


def fingerprint(public: str) -> str:
    """A short name for a public key, for logs and lists: 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(public.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class NodeKeys:
    """A node's key pair. The secret is left out of `repr`."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> NodeKeys:
        """A new pair from the operating system's random source."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def from_secret_bytes(cls, secret: bytes) -> NodeKeys:
        """The pair that belongs to 32 secret bytes."""
        text = z85.encode(secret)
        return cls(zmq.curve_public(text).decode(), text.decode())

    @classmethod
    def load(cls, path: Path) -> NodeKeys:
        """Read a pair; a file open to others or a pair that does not belong together is refused."""
        content = read_private(path, KeyFile)
        if content.kind != "node" or not _belong_together(content):
            raise UsageError("not a node's key file", where=str(path), hint="remove it; a new one is made and must join again")
        return cls(content.public, content.secret)

    @classmethod
    def load_or_make(cls, path: Path) -> NodeKeys:
        """The pair in `path`, made on first use."""
        if not path.exists():
            keys = cls.generate()
            if write_private(path, KeyFile(kind="node", public=keys.public, secret=keys.secret), replace=False):
                return keys
        return cls.load(path)

    def save(self, path: Path) -> None:
        """Write with mode 0600, atomically."""
        write_private(path, KeyFile(kind="node", public=self.public, secret=self.secret))

    def derive(self, purpose: str) -> bytes:
        """32 secret bytes for one purpose (HMAC-SHA256 of the purpose under the secret key): `derive("verification")`."""
        return _derive(self.secret.encode(), purpose)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public)


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """The secret that `cluster up` makes. It signs invites and never leaves the machine that made it."""

    secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> ClusterKey:
        return cls(z85.encode(secrets.token_bytes(32)).decode())

    @classmethod
    def load(cls, path: Path) -> ClusterKey:
        content = read_private(path, KeyFile)
        if content.kind != "cluster" or len(content.secret) != KEY_TEXT_LENGTH:
            raise UsageError("not a cluster's key file", where=str(path), hint="run 'shardwise cluster up' again")
        return cls(content.secret)

    def save(self, path: Path) -> None:
        """Write with mode 0600, atomically."""
        write_private(path, KeyFile(kind="cluster", public=self.cluster_id, secret=self.secret))

    def derive(self, purpose: str) -> bytes:
        """32 secret bytes for one purpose, e.g. an invite, or the token of Ray's own authentication."""
        return _derive(self.secret.encode(), purpose)

    @property
    def cluster_id(self) -> str:
        """A name that may be shown; it tells nothing about the secret."""
        return hashlib.sha256(self.derive("cluster id")).hexdigest()[:16]


def _derive(secret: bytes, purpose: str) -> bytes:
    return hmac.digest(secret, b"shardwise/1/" + purpose.encode(), "sha256")


def _belong_together(content: KeyFile) -> bool:
    try:
        expected = zmq.curve_public(content.secret.encode())
    except (ValueError, zmq.ZMQError):
        return False
    return hmac.compare_digest(expected, content.public.encode())
