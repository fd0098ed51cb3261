"""The cluster file: text with units for people, profiles in SI units inside.

`load_cluster` reads what people write and what `shardwise probe` writes; `write_cluster` writes every measured value
with spread, sample count, method and date beside it, so that reading it again gives the same profile. Fails with
`UsageError` that names line, field, value and what is allowed: unknown nodes in a link, a pair without link and without
default, names that appear twice, zero rates, missing or wrong units, unknown fields, broken TOML.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Any

from shardwise.errors import UsageError
from shardwise.machines.cluster_fields import Table
from shardwise.machines.cluster_lines import LineIndex
from shardwise.machines.cluster_writer import format_cluster
from shardwise.machines.profile import (
    ClusterProfile,
    DeviceProfile,
    LayerTiming,
    LinkProfile,
    Measurement,
    NodeProfile,
    RateTable,
)

DEVICE_KINDS = ("cuda", "metal", "vulkan", "cpu")
LINK_KINDS = ("ethernet", "wifi", "loopback", "wan")

_NODE_RATES = ("memory_bandwidth", "compute", "disk_bandwidth")
_LINK_RATES = ("bandwidth", "latency", "jitter_p95")
_TABLE_RATES = ("weight_bandwidth", "compute", "row", "layer_fixed", "attention_compute")


def load_cluster(path: str | os.PathLike[str]) -> ClusterProfile:
    """Read a cluster file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read the cluster file: {error.strerror or error}",
            where=str(path),
            hint="write one, or let 'shardwise probe --out cluster.toml' write it",
        ) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("the cluster file is not UTF-8 text", where=str(path)) from error
    return parse_cluster(text, file=str(path))


def parse_cluster(text: str, *, file: str = "cluster file") -> ClusterProfile:
    """Read the text of a cluster file; `file` is what complaints call it."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"not valid TOML: {error}", where=file, hint="see the example in the documentation") from error
    root = Table(values, (), "cluster", file, LineIndex.of(text))
    root.check_fields(("node", "link", "defaults"))
    nodes = tuple(_node(t) for t in root.tables("node", lambda i, v: f"node '{v.get('name', i + 1)}'"))
    if not nodes:
        root.fail("no [[node]] in it", hint="describe at least one machine")
    _refuse_duplicates(root, nodes)
    links = _links(root, {node.name for node in nodes})
    cluster = ClusterProfile(nodes=nodes, links=links, default_link=_default_link(root))
    _refuse_missing_links(root, cluster)
    return cluster


def write_cluster(profile: ClusterProfile, path: str | os.PathLike[str]) -> None:
    """Write a cluster file that `load_cluster` reads back to an equal profile; replaces the file at once."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        partial.write_text(format_cluster(profile), encoding="utf-8")
        os.replace(partial, target)
    except OSError as error:
        raise UsageError(f"cannot write the cluster file: {error.strerror or error}", where=str(path)) from error


def _node(table: Table) -> NodeProfile:
    others = ("availability", "cores", "machine", "device", "rate")
    table.check_fields(("name", "memory", *_NODE_RATES, *others), measured=_NODE_RATES)
    devices = table.tables("device", lambda i, v: f"{table.label}, device {i + 1}")
    return NodeProfile(
        name=table.text("name", example='"desktop"'),
        memory_bytes=table.num_bytes("memory"),
        memory_bytes_per_s=table.rate("memory_bandwidth"),
        compute_flops_per_s=table.compute("compute"),
        devices=tuple(_device(t) for t in devices),
        disk_bytes_per_s=table.optional("disk_bandwidth", table.rate),
        availability=table.number("availability", 1.0, 0.0, 1.0),
        num_cores=table.count("cores"),
        machine=table.text("machine", ""),
        rates=_rates(table),
    )


def _device(table: Table) -> DeviceProfile:
    table.check_fields(("kind", "name", "memory", "memory_bandwidth", "compute", "rate"), measured=_NODE_RATES[:2])
    return DeviceProfile(
        kind=table.choice("kind", DEVICE_KINDS),
        name=table.text("name", ""),
        memory_bytes=table.num_bytes("memory"),
        memory_bytes_per_s=table.rate("memory_bandwidth"),
        compute_flops_per_s=table.compute("compute"),
        rates=_rates(table),
    )


def _rates(owner: Table) -> tuple[RateTable, ...]:
    tables = owner.tables("rate", lambda i, v: f"{owner.label}, rate '{v.get('quantization', i + 1)}'")
    return tuple(_rate_table(t) for t in tables)


def _rate_table(table: Table) -> RateTable:
    table.check_fields(("quantization", "library", *_TABLE_RATES, "timing_layer", "timing"), measured=_TABLE_RATES)
    timings = []
    for t in table.tables("timing", lambda i, v: f"{table.label}, timing {i + 1}"):
        t.check_fields(("rows", "layer"), measured=("layer",))
        timings.append(LayerTiming(rows=t.count("rows"), layer_s=t.duration("layer")))
    return RateTable(
        quantization=table.text("quantization", example='"Q4_K"'),
        library=table.text("library", ""),
        compute_flops_per_s=table.compute("compute"),
        weight_bytes_per_s=table.rate("weight_bandwidth"),
        row_s=table.optional("row", table.duration),
        layer_fixed_s=table.optional("layer_fixed", table.duration),
        attention_flops_per_s=table.optional("attention_compute", table.compute),
        timings=tuple(sorted(timings, key=lambda item: item.rows)),
        timing_layer_bytes=table.num_bytes("timing_layer") if "timing_layer" in table.values else 0,
    )


def _refuse_duplicates(root: Table, nodes: tuple[NodeProfile, ...]) -> None:
    seen: dict[str, int] = {}
    for number, node in enumerate(nodes):
        if node.name in seen:
            first = root.index.line(("node", seen[node.name], "name"))
            table = Table({}, ("node", number), f"node '{node.name}'", root.file, root.index)
            table.fail(f"the name is taken (line {first})", field="name", value=node.name, hint="give every machine its own name")
        seen[node.name] = number


def _link_values(table: Table, source: str, target: str) -> LinkProfile:
    overhead: Measurement | None = table.optional("overhead", table.duration)
    return LinkProfile(
        source=source,
        target=target,
        bytes_per_s=table.rate("bandwidth", '"1 Gbit/s"'),
        latency_s=table.duration("latency"),
        jitter_p95_s=table.optional("jitter_p95", table.duration),
        kind=table.choice("kind", LINK_KINDS, "ethernet"),
        overhead_s=overhead.value if overhead else 0.0,
    )


def _ends(table: Table, names: set[str]) -> list[tuple[str, str]]:
    """(source, target) pairs of one [[link]]."""
    values = table.values
    if "between" in values:
        pair = values["between"]
        if "from" in values or "to" in values:
            table.fail("has 'between' and 'from'/'to'", field="between", hint="write one of them")
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(n, str) for n in pair):
            table.fail(f"between = {pair!r} is not a pair", field="between", value=pair, hint='write between = ["a", "b"]')
        ends = [(pair[0], pair[1])] + ([(pair[1], pair[0])] if pair[0] != pair[1] else [])
        fields = ("between", "between")
    else:
        ends = [(table.text("from", example='"desktop"'), table.text("to", example='"nas"'))]
        fields = ("from", "to")
    for name, field in zip(ends[0], fields):
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), n=1)
            hint = (f"did you mean '{near[0]}'? " if near else "") + f"known: {', '.join(sorted(names))}"
            table.fail(f"unknown node '{name}'", field=field, value=name, hint=hint)
    return ends


def _links(root: Table, names: set[str]) -> tuple[LinkProfile, ...]:
    out: list[LinkProfile] = []
    seen: set[tuple[str, str]] = set()
    for table in root.tables("link", lambda i, v: f"link {i + 1}"):
        table.check_fields(("between", "from", "to", *_LINK_RATES, "kind", "overhead"), measured=_LINK_RATES)
        for source, target in _ends(table, names):
            if (source, target) in seen:
                table.fail(f"'{source}' to '{target}' is described twice", hint="keep one [[link]] for each direction")
            seen.add((source, target))
            out.append(_link_values(table, source, target))
    return tuple(out)


def _default_link(root: Table) -> LinkProfile | None:
    defaults: Any = root.values.get("defaults", {})
    if not isinstance(defaults, dict):
        root.fail("'defaults' is not a table", field="defaults", hint="write [defaults.link]")
    outer = Table(defaults, ("defaults",), "defaults", root.file, root.index)
    outer.check_fields(("link",))
    if "link" not in defaults:
        return None
    if not isinstance(defaults["link"], dict):
        outer.fail("'link' is not a table", field="link", hint="write [defaults.link]")
    table = Table(defaults["link"], ("defaults", "link"), "defaults.link", root.file, root.index)
    table.check_fields((*_LINK_RATES, "kind", "overhead"), measured=_LINK_RATES)
    return _link_values(table, "", "")


def _refuse_missing_links(root: Table, cluster: ClusterProfile) -> None:
    if cluster.default_link is not None:
        return
    listed = {(link.source, link.target) for link in cluster.links}
    for number, a in enumerate(cluster.nodes):
        for b in cluster.nodes:
            if a.name != b.name and (a.name, b.name) not in listed:
                table = Table({}, ("node", number), f"node '{a.name}'", root.file, root.index)
                table.fail(
                    f"no link from '{a.name}' to '{b.name}' and no default",
                    hint=f'add [[link]] between = ["{a.name}", "{b.name}"], or [defaults.link]',
                )
