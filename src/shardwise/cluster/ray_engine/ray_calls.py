"""The only module that calls Ray's Python API: attach, list nodes, one host actor a node. Foreign errors end here.

**Fails with** `ConnectFailed` (no head there), `AuthenticationFailed` (wrong token), `CompatibilityError` (versions
differ, both are named), `PeerClosed` (a node or its actor is gone), `ReplyTimeout`. **Called by** the broker only.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray.exceptions
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shardwise.cluster.ray_engine.discovery import RayNode, living_nodes
from shardwise.cluster.ray_engine.host import NodeHost
from shardwise.cluster.ray_engine.settings import NAMESPACE
from shardwise.errors import (
    AuthenticationFailed,
    CompatibilityError,
    ConnectFailed,
    PeerClosed,
    ReplyTimeout,
    ShardwiseError,
)

_MAX_CONCURRENCY = 64
_KNOCK_TIMEOUT_S = 3.0
_TLS_TIMEOUT_S = 2.0
_CURE_JOIN = "join with an invite: 'shardwise cluster invite' on the coordinator's machine"
_CURE_VERSIONS = "install the same versions of Python and Ray on every machine ('shardwise doctor' shows them)"


class RayCalls:
    """One connection to one cluster."""

    def __init__(self, head: str, own_ip: str) -> None:
        options: dict[str, Any] = {"_node_ip_address": own_ip} if own_ip else {}
        _knock(head)
        if os.environ.get("RAY_USE_TLS") != "1" and _speaks_tls(head):  # Ray would try for 20 s and then end this process
            raise AuthenticationFailed("Ray is encrypted there, and this machine has no certificate", where=head, hint=_CURE_JOIN)
        try:
            GcsClient(address=head)  # says within a second what ray.init says after twenty: a wrong token
            ray.init(address=head, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **options)
        except (ray.exceptions.RayError, RuntimeError, ConnectionError, ValueError, OSError) as error:
            raise attach_error(error, head) from error
        self._head = head
        self._actor = ray.remote(NodeHost)

    def head_refuses(self) -> bool:
        """Whether the head's machine answers that nobody listens any more: not a cut network, an ended head."""
        try:
            _knock(self._head)
        except ConnectFailed as error:
            return isinstance(error.__cause__, ConnectionRefusedError)
        return False

    def nodes(self) -> dict[str, RayNode]:
        """Name -> living node."""
        with _mapped("the head"):
            return living_nodes(ray.nodes())

    def make_host(self, node: RayNode) -> Any:
        """A host actor on that node and no other."""
        with _mapped(node.info.name):
            strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            options = self._actor.options(
                num_cpus=0, max_restarts=0, max_concurrency=_MAX_CONCURRENCY, scheduling_strategy=strategy
            )
            return options.remote()

    def call(self, host: Any, node: str, method: str, *args: Any, timeout_s: float) -> Any:
        """The result of one method of a host."""
        with _mapped(node):
            return ray.get(getattr(host, method).remote(*args), timeout=timeout_s)


def _knock(head: str) -> None:
    """Whether anything listens there at all."""
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise attach_error(error, head) from error


def _speaks_tls(head: str) -> bool:
    """Whether a TLS handshake with the head succeeds; who answers does not matter here."""
    host, _, port = head.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TLS_TIMEOUT_S) as plain:
            context.wrap_socket(plain).close()
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def _mapped(node: str) -> Iterator[None]:
    try:
        yield
    except ray.exceptions.GetTimeoutError as error:
        raise ReplyTimeout(f"node '{node}' did not answer in time", where=node) from error
    except ray.exceptions.AuthenticationError as error:
        raise AuthenticationFailed("Ray refused the cluster's token", where=node, hint="join again") from error
    except ray.exceptions.RayError as error:
        raise PeerClosed(f"node '{node}' is gone: {_first_line(error)}", where=node) from error


def attach_error(error: BaseException, head: str) -> ShardwiseError:
    """Ray's many ways to say no, as ours."""
    text = str(error)
    if isinstance(error, ray.exceptions.AuthenticationError) or "token" in text.lower():
        return AuthenticationFailed("Ray refused the cluster's token", where=head, hint="join again with a new invite")
    if "Version mismatch" in text or "version mismatch" in text:
        return CompatibilityError(" ".join(text.split()), where=head, hint=_CURE_VERSIONS)
    return ConnectFailed(
        f"no Ray cluster answers: {_first_line(error)}",
        where=head,
        hint="is 'shardwise cluster up' running there, is this machine joined, and is a firewall in between?",
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
