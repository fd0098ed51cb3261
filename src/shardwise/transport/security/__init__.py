"""Who may talk to whom, and that nobody else listens (docs/security.md, docs/adr/0040-security.md).

keys = NodeKeys.load_or_make(path)                  # once a node
allowed = AllowList(); allowed.allow(peer_public, "desktop")
with Authenticator(context, allowed):               # once a ZeroMQ context, before the first bind
    secure_server(socket, keys); socket.bind(...)   # or
    secure_client(socket, keys, peer_public); with HandshakeWatch(socket) as watch: socket.connect(...); watch.wait(2.0)
"""

from shardwise.transport.security.allow_list import AllowedKey, AllowList
from shardwise.transport.security.authenticator import Authenticator
from shardwise.transport.security.invites import Invite, InviteBook
from shardwise.transport.security.keys import ClusterKey, NodeKeys, check_public_key, fingerprint
from shardwise.transport.security.sockets import (
    DEFAULT_LIMITS,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    SocketLimits,
    require_curve,
    secure_client,
    secure_server,
    sender_key,
)
from shardwise.transport.security.state_dir import own_keys, state_dir
from shardwise.transport.security.watch import HandshakeWatch

__all__ = [
    "DEFAULT_LIMITS",
    "MAX_FRAMES",
    "MAX_FRAME_BYTES",
    "AllowList",
    "AllowedKey",
    "Authenticator",
    "ClusterKey",
    "HandshakeWatch",
    "Invite",
    "InviteBook",
    "NodeKeys",
    "SocketLimits",
    "check_public_key",
    "fingerprint",
    "own_keys",
    "require_curve",
    "secure_client",
    "secure_server",
    "sender_key",
    "state_dir",
]
