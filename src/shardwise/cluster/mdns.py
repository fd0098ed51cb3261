"""Clusters on this network, by multicast DNS: announced by coordinators, found by machines that want to join.

**Promises** an announcement carries nothing secret (a name, the cluster's id, the coordinator's public key); a found
cluster is a proposal: joining still takes an invite. **Fails when** zeroconf is missing (`MissingExtraError`) or no
interface takes part; a network without multicast finds nothing and that is no error. **Called by** daemons, `cluster find`.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from types import TracebackType
from typing import Any, Self

from shardwise.clock import SystemClock
from shardwise.errors import MissingExtraError, UsageError
from shardwise.records import Record

SERVICE = "_shardwise._tcp.local."
_MAX_FOUND = 256


class FoundCluster(Record):
    """An announced cluster."""

    cluster_id: str
    name: str
    coordinator: str  # the node's name
    public: str  # its public key
    addresses: tuple[str, ...]  # tcp://host:port
    version: str = ""


def _zeroconf(addresses: list[str]) -> Any:
    try:
        import zeroconf
    except ImportError:
        raise MissingExtraError.for_extra("ray", "finding clusters on the network") from None
    versions = {ipaddress.ip_address(a).version for a in addresses}
    version = zeroconf.IPVersion.V6Only if versions == {6} else zeroconf.IPVersion.V4Only if versions == {4} else None
    try:
        return zeroconf.Zeroconf(interfaces=addresses, ip_version=version or zeroconf.IPVersion.All)
    except OSError as error:
        raise UsageError(
            f"no multicast on {', '.join(addresses)}: {error.strerror}", where="mDNS", hint="pin another with --interface"
        ) from error


class Announcement:
    """Announces one cluster until `close`."""

    def __init__(self, found: FoundCluster, address: str, port: int) -> None:
        self._zeroconf = _zeroconf([address])
        import zeroconf

        properties = {"id": found.cluster_id, "name": found.name, "node": found.coordinator, "key": found.public}
        self._info = zeroconf.ServiceInfo(
            SERVICE,
            f"{found.name[:40]}-{found.cluster_id[:8]}.{SERVICE}",
            addresses=[ipaddress.ip_address(address).packed],
            port=port,
            properties=properties | {"version": found.version},
            server=f"shardwise-{found.cluster_id[:12]}.local.",
        )
        self._zeroconf.register_service(self._info, allow_name_change=True)

    def close(self) -> None:
        """Say goodbye on the network."""
        self._zeroconf.unregister_service(self._info)
        self._zeroconf.close()


class Browser:
    """Collects announcements while it is open."""

    def __init__(self, address: str) -> None:
        self._zeroconf = _zeroconf([address])
        import zeroconf

        self._found: dict[str, FoundCluster] = {}
        self._lock = threading.Lock()
        self._browser = zeroconf.ServiceBrowser(self._zeroconf, SERVICE, handlers=[self._heard])

    def clusters(self) -> list[FoundCluster]:
        """What was heard so far, by name."""
        with self._lock:
            return sorted(self._found.values(), key=lambda c: (c.name, c.cluster_id))

    def wait_for(self, cluster_id: str, timeout_s: float) -> FoundCluster | None:
        """The announcement of one cluster, or None in time."""
        clock = SystemClock()
        deadline_s = clock.now_s() + timeout_s
        while True:
            for found in self.clusters():
                if found.cluster_id == cluster_id:
                    return found
            if clock.now_s() >= deadline_s:
                return None
            clock.sleep(0.05)

    def close(self) -> None:
        self._zeroconf.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _heard(self, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        info = zeroconf.get_service_info(service_type, name, timeout=1500)
        with self._lock:
            if state_change.name == "Removed":
                self._found = {k: v for k, v in self._found.items() if k != name}
            elif info is not None and len(self._found) < _MAX_FOUND and (found := _read(info)) is not None:
                self._found[name] = found


def _read(info: Any) -> FoundCluster | None:
    """An announcement as a record; None where something else uses our service type."""
    values = {(k or b"").decode(errors="replace"): (v or b"").decode(errors="replace")[:200] for k, v in info.properties.items()}
    if not values.get("id") or not values.get("key"):
        return None
    hosts = [a if ":" not in a else f"[{a}]" for a in info.parsed_addresses()]
    return FoundCluster(
        cluster_id=values["id"],
        name=values.get("name", ""),
        coordinator=values.get("node", socket.gethostname()),
        public=values["key"],
        addresses=tuple(f"tcp://{host}:{info.port}" for host in hosts),
        version=values.get("version", ""),
    )
