"""Which of a machine's addresses the other machines should use.

The operating system's list of interfaces flows in, one address flows out. **Fails when** a pinned interface does not
exist or has no address, or nothing but loopback is there (`UsageError` with the list). The ranking is pure.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil

from shardwise.errors import UsageError
from shardwise.records import Record

# Interfaces that lead to containers and virtual machines on this host, not to other machines.
_INSIDE = ("docker", "br-", "veth", "virbr", "vmnet", "lo", "cni", "flannel", "podman", "lxc", "lxd")
_ELSEWHERE = "203.0.113.1"  # of documentation (RFC 5737): the card with the default route faces it
_TUNNELS = ("tun", "tap", "tailscale", "wg", "zt", "utun")


class Interface(Record):
    """One address of one network card."""

    card: str
    address: str  # without scope
    up: bool = True
    bits_per_s: int = 0  # as the driver says; 0 = unknown

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        return ipaddress.ip_address(self.address)


def list_interfaces() -> list[Interface]:
    """Every IPv4 and IPv6 address of this machine, link-local IPv6 left out (it needs a scope)."""
    stats = psutil.net_if_stats()
    found = []
    for card, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6) or "%" in entry.address:
                continue
            state = stats.get(card)
            speed = max(0, state.speed) * 10**6 if state is not None else 0
            found.append(Interface(card=card, address=entry.address, up=state is None or state.isup, bits_per_s=speed))
    return found


def rank(interfaces: list[Interface]) -> list[Interface]:
    """Best first: up, facing other machines, IPv4 before IPv6, home networks before public ones, fast before slow."""
    usable = [i for i in interfaces if i.up and not i.ip.is_loopback and not i.ip.is_unspecified]
    return sorted(usable, key=_penalty)


def _penalty(interface: Interface) -> tuple[int, int, int, int, str]:
    kind = 2 if interface.card.startswith(_INSIDE) else 1 if interface.card.startswith(_TUNNELS) else 0
    link_local = int(interface.ip.is_link_local)
    return (kind + 2 * link_local, interface.ip.version, int(not interface.ip.is_private), -interface.bits_per_s, interface.card)


def choose_address(pinned: str = "", *, interfaces: list[Interface] | None = None, toward: str = "") -> str:
    """The address to use: the pinned interface or address, else the one that routes `toward` a host, else the best."""
    known = list_interfaces() if interfaces is None else interfaces
    if pinned:
        match = rank([i for i in known if pinned in (i.card, i.address)]) or [i for i in known if pinned == i.address]
        if not match:
            raise UsageError(f"no usable interface or address '{pinned}'", where="--interface", hint=_there_are(known))
        return match[0].address
    if toward and (routed := address_toward(toward)):
        return routed
    ranked = rank(known)
    if interfaces is None and (routed := address_toward(_ELSEWHERE)) in {i.address for i in ranked}:
        return routed
    if not ranked:
        raise UsageError(
            "this machine has no network but loopback", where="interfaces", hint="connect it, or --interface 127.0.0.1"
        )
    return ranked[0].address


def address_toward(host: str) -> str:
    """The local address from which packets to `host` leave; "" where there is no route. Sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _there_are(interfaces: list[Interface]) -> str:
    return "there are: " + (", ".join(f"{i.card} {i.address}" for i in interfaces) or "none")


def url_host(address: str) -> str:
    """IPv6 addresses in brackets, as in URLs and ZeroMQ endpoints."""
    return f"[{address}]" if ":" in address else address
