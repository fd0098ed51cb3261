"""What the doctor looks at: plain data, so that every rule can be tried on any machine."""

from __future__ import annotations

from shardwise.cluster.control import ShownNode
from shardwise.cluster.interfaces import Interface
from shardwise.records import Record


class Port(Record):
    """A port that the cluster would use."""

    number: int
    use: str
    problem: str = ""  # empty: it can be bound


class Reach(Record):
    """An attempt to reach the cluster."""

    address: str
    use: str
    problem: str = ""


class ClusterFacts(Record):
    """Of the cluster that this machine is in."""

    name: str
    coordinator: bool
    daemon_runs: bool
    trouble: str = ""
    reach: tuple[Reach, ...] = ()
    nodes: tuple[ShownNode, ...] = ()
    own_public: str = ""


class Facts(Record):
    """Of this machine."""

    system: str  # Linux | Darwin | Windows
    python: str
    ray: str = ""  # version, empty where it is missing
    zeroconf: bool = False
    llama: str = ""  # version
    llama_problem: str = ""  # why it does not load
    blas: bool = False
    accelerators: tuple[str, ...] = ()
    gpu_seen: str = ""  # what the system shows of a GPU, whatever llama.cpp can use
    compiler: str = ""
    memory_bytes: int = 0  # usable
    total_memory_bytes: int = 0
    cgroup_bytes: int | None = None
    disk_free_bytes: int = 0
    disk_folder: str = ""
    shared_memory_bytes: int | None = None  # of /dev/shm
    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    firewalls: tuple[str, ...] = ()  # that are on
    wsl: bool = False
    container: bool = False
    battery: bool = False
    sleeps: str = ""  # what makes it sleep, empty = nothing known
    wifi_power_save: tuple[str, ...] = ()  # cards
    slow_environment: tuple[str, ...] = ()  # variables that slow OpenBLAS
    cluster: ClusterFacts | None = None
