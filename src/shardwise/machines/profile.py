"""Profiles of nodes and links. SI base units throughout; text with units exists only in the cluster file.

The data flows one way: a cluster file or a probe makes a `ClusterProfile`; the planner reads it. A rate is a
`Measurement`: hand-written values have `n = 0` and no spread.
"""

from __future__ import annotations

from shardwise.records import Record


class Measurement(Record):
    """A value and how far it can be trusted."""

    value: float
    spread: float = 0.0  # interquartile range, in the unit of the value
    n: int = 0  # samples; 0 = written by hand
    method: str = ""
    when: str = ""  # ISO 8601 date-time


class LayerTiming(Record):
    """Seconds that one real layer took for a step of `rows` rows with almost no context."""

    rows: int
    layer_s: Measurement


HEAD_TABLE = "HEAD"


class RateTable(Record):
    """Effective rates of one device for one quantization under one library build (ADR 0002).

    `timings` are the best evidence there is: one real layer of `timing_layer_bytes` bytes through the real backend.
    A table named `KV_F16` (KV_Q8_0, ...) holds the rate at which decode reads the KV cache of that type; `HEAD` the final
    norm and the output matrix of the model that was probed, by rows whose logits are wanted.
    """

    quantization: str
    library: str  # e.g. "llama.cpp 0.3.36 openblas"
    compute_flops_per_s: Measurement  # in prefill
    weight_bytes_per_s: Measurement  # in decode of one row
    row_s: Measurement | None = None  # extra decode time per byte-independent row, per layer
    layer_fixed_s: Measurement | None = None
    timings: tuple[LayerTiming, ...] = ()  # by rows, ascending
    timing_layer_bytes: int = 0
    attention_flops_per_s: Measurement | None = None  # of scores and values in prefill; None = as the products


class DeviceProfile(Record):
    """One processor with its memory. `kind` is cuda | metal | vulkan | cpu."""

    kind: str
    memory_bytes: int
    memory_bytes_per_s: Measurement
    compute_flops_per_s: Measurement
    name: str = ""
    rates: tuple[RateTable, ...] = ()


class NodeProfile(Record):
    """One machine. A node without `devices` computes on its CPU, described by the node's own figures."""

    name: str
    memory_bytes: int  # what a model may use
    memory_bytes_per_s: Measurement
    compute_flops_per_s: Measurement
    devices: tuple[DeviceProfile, ...] = ()
    disk_bytes_per_s: Measurement | None = None
    availability: float = 1.0
    num_cores: int = 0
    machine: str = ""  # nodes with the same machine share its cores (virtual ones, several stages on one computer)
    rates: tuple[RateTable, ...] = ()

    def all_devices(self) -> tuple[DeviceProfile, ...]:
        """The accelerators, or the CPU where there are none."""
        if self.devices:
            return self.devices
        cpu = DeviceProfile(
            kind="cpu",
            name="cpu",
            memory_bytes=self.memory_bytes,
            memory_bytes_per_s=self.memory_bytes_per_s,
            compute_flops_per_s=self.compute_flops_per_s,
            rates=self.rates,
        )
        return (cpu,)


class LinkProfile(Record):
    """The directed path from one node to another, as the transport sees it."""

    source: str
    target: str
    bytes_per_s: Measurement
    latency_s: Measurement  # one way, median
    jitter_p95_s: Measurement | None = None  # p95 of the one-way latency above the median
    kind: str = "ethernet"  # ethernet | wifi | loopback | wan
    overhead_s: float = 0.0  # per message: serialization, syscalls, wake-ups on both sides


class ClusterProfile(Record):
    """Nodes and the links between them; `default_link` serves pairs that are not listed."""

    nodes: tuple[NodeProfile, ...]
    links: tuple[LinkProfile, ...] = ()
    default_link: LinkProfile | None = None

    def node(self, name: str) -> NodeProfile:
        """The node of that name; `KeyError` where there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def link(self, source: str, target: str) -> LinkProfile | None:
        """The path between two nodes, the default, or None."""
        for link in self.links:
            if link.source == source and link.target == target:
                return link
        return self.default_link
