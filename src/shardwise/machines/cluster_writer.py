"""Writing a cluster file: units that people read, digits enough that reading gives the same numbers.

In: a `ClusterProfile`. Out: the text that `load_cluster` reads back to an equal profile. Nothing fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from shardwise.errors import UsageError
from shardwise.machines.profile import ClusterProfile, DeviceProfile, LinkProfile, Measurement, NodeProfile, RateTable
from shardwise.units import parse_bytes, parse_compute, parse_duration, parse_rate

_SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_MEMORY_RATES = (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0))
_LINK_RATES = (("Gbit/s", 125e6), ("Mbit/s", 125e3), ("kbit/s", 125.0), ("B/s", 1.0))
_COMPUTE = (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6), ("FLOP/s", 1.0))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))


def exact_text(value: float, units: Sequence[tuple[str, float]], parse: Callable[[str], float]) -> str:
    """The shortest text that parses to exactly `value`, in the largest unit that makes it at least 1."""
    fitting = [u for u in units if abs(value) >= u[1]] or list(units[-1:])
    for name, factor in fitting:
        for digits in (6, 12, 17):
            text = f"{value / factor:.{digits}g} {name}"
            try:
                if parse(text) == value:
                    return text
            except UsageError:  # a form the parser does not know, such as 1e+20
                continue
    base = next(name for name, factor in units if factor == 1)
    return f"{value!r} {base}"


def _size(value: int) -> str:
    return exact_text(value, _SIZES, parse_bytes)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _measured(name: str, m: Measurement | None, units: Sequence[tuple[str, float]], parse: Callable[[str], float]) -> list[str]:
    """The value, and beside it how far it can be trusted."""
    if m is None:
        return []
    lines = [f"{name} = {_quoted(exact_text(m.value, units, parse))}"]
    if m.n or m.spread or m.method or m.when:
        spread = _quoted(exact_text(m.spread, units, parse))
        lines.append(
            f"{name}_measured = {{ spread = {spread}, n = {m.n}, method = {_quoted(m.method)}, when = {_quoted(m.when)} }}"
        )
    return lines


def _rate_tables(rates: tuple[RateTable, ...], header: str) -> list[str]:
    out: list[str] = []
    for rate in rates:
        out += ["", f"[[{header}.rate]]", f"quantization = {_quoted(rate.quantization)}", f"library = {_quoted(rate.library)}"]
        out += _measured("weight_bandwidth", rate.weight_bytes_per_s, _MEMORY_RATES, parse_rate)
        out += _measured("compute", rate.compute_flops_per_s, _COMPUTE, parse_compute)
        out += _measured("row", rate.row_s, _TIMES, parse_duration)
        out += _measured("layer_fixed", rate.layer_fixed_s, _TIMES, parse_duration)
        out += _measured("attention_compute", rate.attention_flops_per_s, _COMPUTE, parse_compute)
        if rate.timing_layer_bytes:
            out.append(f"timing_layer = {_quoted(_size(rate.timing_layer_bytes))}")
        for timing in rate.timings:
            out += [f"[[{header}.rate.timing]]", f"rows = {timing.rows}"]
            out += _measured("layer", timing.layer_s, _TIMES, parse_duration)
    return out


def _device(device: DeviceProfile) -> list[str]:
    out = ["", "[[node.device]]", f"kind = {_quoted(device.kind)}"]
    if device.name:
        out.append(f"name = {_quoted(device.name)}")
    out.append(f"memory = {_quoted(_size(device.memory_bytes))}")
    out += _measured("memory_bandwidth", device.memory_bytes_per_s, _MEMORY_RATES, parse_rate)
    out += _measured("compute", device.compute_flops_per_s, _COMPUTE, parse_compute)
    return out + _rate_tables(device.rates, "node.device")


def _node(node: NodeProfile) -> list[str]:
    out = ["[[node]]", f"name = {_quoted(node.name)}", f"memory = {_quoted(_size(node.memory_bytes))}"]
    out += _measured("memory_bandwidth", node.memory_bytes_per_s, _MEMORY_RATES, parse_rate)
    out += _measured("compute", node.compute_flops_per_s, _COMPUTE, parse_compute)
    out += _measured("disk_bandwidth", node.disk_bytes_per_s, _MEMORY_RATES, parse_rate)
    if node.availability != 1.0:
        out.append(f"availability = {node.availability!r}")
    if node.num_cores:
        out.append(f"cores = {node.num_cores}")
    if node.machine:
        out.append(f"machine = {_quoted(node.machine)}")
    out += _rate_tables(node.rates, "node")
    for device in node.devices:
        out += _device(device)
    return [*out, ""]


def _link(link: LinkProfile, header: str) -> list[str]:
    out = [header]
    if link.source or link.target:
        out += [f"from = {_quoted(link.source)}", f"to = {_quoted(link.target)}"]
    out += _measured("bandwidth", link.bytes_per_s, _LINK_RATES, parse_rate)
    out += _measured("latency", link.latency_s, _TIMES, parse_duration)
    out += _measured("jitter_p95", link.jitter_p95_s, _TIMES, parse_duration)
    out.append(f"kind = {_quoted(link.kind)}")
    if link.overhead_s:
        out.append(f"overhead = {_quoted(exact_text(link.overhead_s, _TIMES, parse_duration))}")
    return [*out, ""]


def format_cluster(profile: ClusterProfile) -> str:
    """The whole file."""
    lines: list[str] = []
    for node in profile.nodes:
        lines += _node(node)
    for link in profile.links:
        lines += _link(link, "[[link]]")
    if profile.default_link is not None:
        lines += _link(profile.default_link, "[defaults.link]")
    return "\n".join(lines)
