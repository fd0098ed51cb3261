"""What the facts mean: one small rule each, in the order in which people should read them. Pure.

`bad` stops something, `warning` costs speed or will stop something later, `good` is fine. Every finding that is not good
has a cure that can be typed or done.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator

from shardwise.cluster.membership import LEFT
from shardwise.cluster.ray_engine.settings import NEWEST_RAY, OLDEST_RAY, version_pair
from shardwise.cluster.versions import differences
from shardwise.errors import install_command, pip_command
from shardwise.probe.doctor.facts import ClusterFacts, Facts
from shardwise.records import Record
from shardwise.units import format_bytes, format_duration

GIB = 2**30
GOOD, WARNING, BAD = "good", "warning", "bad"
_SKEW_S = 30.0
_BUILD_GPU = "CMAKE_ARGS='-DGGML_{0}=on' {1}"
_REBUILD = "--force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python"


class Finding(Record):
    """One line of the report."""

    level: str  # good | warning | bad
    check: str
    message: str
    cure: str = ""


Findings = Iterator[Finding]


def examine(facts: Facts) -> list[Finding]:
    """All findings."""
    return [finding for rule in RULES for finding in rule(facts)]


def _python(facts: Facts) -> Findings:
    minor = tuple(int(part) for part in facts.python.split(".")[:2])
    if minor < (3, 11):
        yield Finding(level=BAD, check="python", message=f"Python {facts.python}", cure="install Python 3.11 or newer")
    else:
        yield Finding(level=GOOD, check="python", message=f"Python {facts.python} on {facts.system}")


def _backend(facts: Facts) -> Findings:
    if facts.llama_problem:
        cure = pip_command("--force-reinstall llama-cpp-python") + ("" if facts.compiler else ", after installing a C++ compiler")
        yield Finding(level=BAD, check="llama.cpp", message=facts.llama_problem, cure=cure)
        return
    where = f", {', '.join(facts.accelerators)}" if facts.accelerators else ""
    yield Finding(level=GOOD, check="llama.cpp", message=f"{facts.llama}{' with OpenBLAS' if facts.blas else ''}{where}")
    if facts.gpu_seen and not facts.accelerators:
        kind = "CUDA" if "NVIDIA" in facts.gpu_seen else "METAL" if facts.system == "Darwin" else "VULKAN"
        message = f"{facts.gpu_seen} is there, and llama.cpp was built without it"
        yield Finding(level=WARNING, check="gpu", message=message, cure=_BUILD_GPU.format(kind, pip_command(_REBUILD)))
    if not facts.blas and not facts.accelerators and facts.system != "Darwin":
        cure = (
            "build it with -DGGML_BLAS=ON (docs/adr/0002-llama-build.md); prefill of Q4_1 and K-quants gets 1.5 to 3 times faster"
        )
        yield Finding(level=WARNING, check="llama.cpp", message="built without OpenBLAS", cure=cure)


def _compiler(facts: Facts) -> Findings:
    if not facts.compiler:
        cures = {"Darwin": "xcode-select --install", "Windows": "install the Build Tools for Visual Studio (C++)"}
        cure = cures.get(facts.system, "apt install build-essential, or your system's package of g++")
        yield Finding(level=WARNING, check="compiler", message="no C++ compiler: llama.cpp cannot be rebuilt", cure=cure)


def _environment(facts: Facts) -> Findings:
    for name in facts.slow_environment:
        message = f"{name} is set and may slow OpenBLAS by a third; stages run without it"
        yield Finding(level=WARNING, check="environment", message=message, cure=f"unset {name}")


def _memory(facts: Facts) -> Findings:
    level = BAD if facts.memory_bytes < GIB // 2 else WARNING if facts.memory_bytes < 2 * GIB else GOOD
    message = f"{format_bytes(facts.memory_bytes)} of {format_bytes(facts.total_memory_bytes)} for a model"
    cure = "" if level == GOOD else "close other programs, or leave this machine out"
    if facts.cgroup_bytes is not None and facts.cgroup_bytes < facts.total_memory_bytes // 2:
        message += f"; a control group limits this process to {format_bytes(facts.cgroup_bytes)} more"
        cure = cure or "raise the container's or service's memory limit if that is not meant"
    yield Finding(level=level, check="memory", message=message, cure=cure)


def _disk(facts: Facts) -> Findings:
    if facts.disk_free_bytes < 5 * GIB:
        message = f"{format_bytes(facts.disk_free_bytes)} free in {facts.disk_folder}, where slices are kept"
        yield Finding(level=WARNING, check="disk", message=message, cure="make room, or set SHARDWISE_CACHE to a larger disk")
    else:
        yield Finding(level=GOOD, check="disk", message=f"{format_bytes(facts.disk_free_bytes)} free in {facts.disk_folder}")


def _ray(facts: Facts) -> Findings:
    if not facts.ray:
        message = "Ray is not installed: this machine works alone"
        yield Finding(level=WARNING, check="ray", message=message, cure=f"{install_command('ray')} to join a cluster")
        return
    oldest, newest = (".".join(map(str, pair)) for pair in (OLDEST_RAY, NEWEST_RAY))
    pair = version_pair(facts.ray)
    if pair < OLDEST_RAY:
        yield Finding(level=BAD, check="ray", message=f"Ray {facts.ray} is too old", cure=pip_command(f"'ray>={oldest}'"))
    elif pair > NEWEST_RAY:
        message = f"Ray {facts.ray} is newer than {newest}, the newest that was tested"
        yield Finding(
            level=WARNING, check="ray", message=message, cure=pip_command(f"'ray=={newest}.*'") + " if something breaks"
        )
    else:
        yield Finding(level=GOOD, check="ray", message=f"Ray {facts.ray}")
    if facts.system != "Linux":
        message = f"Ray calls clusters with {facts.system} machines experimental"
        yield Finding(
            level=WARNING, check="ray", message=message, cure="make a Linux machine the coordinator; WSL 2 counts as Linux"
        )
    if not facts.zeroconf:
        cure = pip_command("zeroconf")
        yield Finding(level=WARNING, check="discovery", message="without zeroconf no cluster is found by itself", cure=cure)
    if facts.shared_memory_bytes is not None and facts.shared_memory_bytes < 128 * 2**20:
        message = f"/dev/shm has {format_bytes(facts.shared_memory_bytes)}; Ray wants 128 MiB"
        yield Finding(level=WARNING, check="ray", message=message, cure="docker run --shm-size=256m, or mount a larger one")


def _network(facts: Facts) -> Findings:
    outward = [i for i in facts.interfaces if i.up and not i.ip.is_loopback]
    if not outward:
        yield Finding(level=BAD, check="network", message="no network but loopback", cure="connect a cable or Wi-Fi")
        return
    shown = ", ".join(f"{i.card} {i.address}" for i in outward[:4])
    yield Finding(level=GOOD, check="network", message=shown)
    if facts.wsl and all(_is_nat_of_wsl(i.address) for i in outward):
        message = "WSL is behind NAT: other machines cannot connect to it"
        cure = "write [wsl2] networkingMode=mirrored into %UserProfile%\\.wslconfig, then 'wsl --shutdown'"
        yield Finding(level=BAD, check="network", message=message, cure=cure)
    elif facts.container and all(i.ip in ipaddress.ip_network("172.16.0.0/12") for i in outward if i.ip.version == 4):
        message = "a container with a network of its own: other machines cannot connect to it"
        yield Finding(level=WARNING, check="network", message=message, cure="docker run --network=host")
    homes = [i for i in outward if i.ip.version == 4 and not i.card.startswith(("docker", "br-", "veth", "tun", "tap", "wg"))]
    if len({i.card for i in homes}) > 1:
        message = f"several network cards: {', '.join(sorted({i.card for i in homes}))}"
        yield Finding(level=GOOD, check="network", message=message, cure="--interface pins one, for 'cluster up' and 'join'")


def _is_nat_of_wsl(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return ip.version == 6 or ip in ipaddress.ip_network("172.16.0.0/12")


def _wifi(facts: Facts) -> Findings:
    for card in facts.wifi_power_save:
        message = f"{card} saves power: messages may wait 100 ms and more"
        yield Finding(level=WARNING, check="wifi", message=message, cure=f"iw dev {card} set power_save off, or use a cable")


def _ports(facts: Facts) -> Findings:
    for port in facts.ports:
        if port.problem:
            message = f"port {port.number} ({port.use}) cannot be used: {port.problem}"
            yield Finding(level=BAD, check="ports", message=message, cure="'shardwise cluster up --port N' takes others")


def _firewall(facts: Facts) -> Findings:
    cures = {
        "ufw": "ufw allow proto tcp from {net} to any port 7700:7799 && ufw allow proto udp from {net} to any port 5353",
        "firewalld": "firewall-cmd --permanent --zone=home --add-source={net} --add-port=7700-7799/tcp && firewall-cmd --reload",
        "macOS": "System Settings > Network > Firewall: allow incoming connections for Python",
        "Windows": "New-NetFirewallRule -DisplayName shardwise -Direction Inbound -Protocol TCP -LocalPort 7700-7799 "
        "-Action Allow -Profile Private",
    }
    for name in facts.firewalls:
        cure = cures.get(name, "allow TCP 7700-7799 and UDP 5353 from the home network").format(net=_home_network(facts))
        yield Finding(level=WARNING, check="firewall", message=f"the firewall {name} is on", cure=cure)


def _home_network(facts: Facts) -> str:
    for interface in facts.interfaces:
        if interface.up and interface.ip.version == 4 and interface.ip.is_private and not interface.ip.is_loopback:
            return str(ipaddress.ip_network(f"{interface.address}/24", strict=False))
    return "192.168.0.0/16"


def _sleep(facts: Facts) -> Findings:
    if facts.sleeps:
        cures = {
            "Darwin": "caffeinate -s, or System Settings > Battery: prevent automatic sleeping on power adapter",
            "Windows": "powercfg /change standby-timeout-ac 0",
        }
        cure = cures.get(facts.system, "systemd-inhibit, or HandleLidSwitch=ignore in /etc/systemd/logind.conf")
        announced = "; the service unit announces sleep, and the machine comes back by itself"
        yield Finding(level=WARNING, check="sleep", message=f"{facts.sleeps}{announced}", cure=cure)


def _cluster(facts: Facts) -> Findings:
    cluster = facts.cluster
    if cluster is None:
        cure = "'shardwise cluster up' here, or 'cluster join INVITE'"
        yield Finding(level=GOOD, check="cluster", message="this machine is in no cluster", cure=cure)
        return
    if not cluster.daemon_runs:
        message = f"in cluster '{cluster.name}', but its daemon does not run"
        yield Finding(level=BAD, check="cluster", message=message, cure="shardwise cluster start")
        return
    if cluster.trouble:
        cure = "see below, and daemon.log in the state folder"
        yield Finding(level=BAD, check="cluster", message=cluster.trouble, cure=cure)
    known = "1 node" if len(cluster.nodes) == 1 else f"{len(cluster.nodes)} nodes"
    role = "coordinator" if cluster.coordinator else "node"
    yield Finding(level=GOOD, check="cluster", message=f"{role} of '{cluster.name}', {known} known")
    for reach in cluster.reach:
        if reach.problem:
            message = f"{reach.use} at {reach.address} cannot be reached: {reach.problem}"
            cure = "is that machine awake and in the same network, and does its firewall allow TCP 7700-7799?"
            yield Finding(level=BAD, check="cluster", message=message, cure=cure)
    yield from _nodes(cluster)


def _nodes(cluster: ClusterFacts) -> Findings:
    first = next((n for n in cluster.nodes if n.coordinator), None)
    for node in cluster.nodes:
        if node.member.reason == LEFT:  # nothing is wrong with that, nor can it be helped
            continue
        if node.member.state not in ("ready", "asleep", "draining"):
            message = f"{node.member.name} is {node.member.state}: {node.member.reason}"
            yield Finding(level=WARNING, check="nodes", message=message, cure=f"run 'shardwise doctor' on {node.member.name}")
        if abs(node.clock_skew_s) > _SKEW_S:
            side = "ahead" if node.clock_skew_s > 0 else "behind"
            message = (
                f"the clock of {node.member.name} is {format_duration(abs(node.clock_skew_s))} {side}: invites and logs suffer"
            )
            yield Finding(
                level=WARNING, check="clock", message=message, cure="timedatectl set-ntp true (w32tm /resync on Windows)"
            )
        for found in differences(first.card, node.card) if first is not None else ():
            message = f"{found.what} is {found.there} on {node.member.name} and {found.here} in the cluster"
            yield Finding(level=BAD, check="versions", message=message, cure=found.cure)


RULES: tuple[Callable[[Facts], Findings], ...] = (
    _python,
    _backend,
    _compiler,
    _environment,
    _memory,
    _disk,
    _network,
    _wifi,
    _ports,
    _firewall,
    _sleep,
    _ray,
    _cluster,
)
