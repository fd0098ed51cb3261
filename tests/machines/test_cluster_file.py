"""The cluster file: the agreed example, everything that can be wrong with one, and writing what reading gives back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import UsageError
from shardwise.machines import (
    ClusterProfile,
    DeviceProfile,
    LayerTiming,
    LinkProfile,
    Measurement,
    NodeProfile,
    RateTable,
    load_cluster,
    parse_cluster,
    write_cluster,
)
from shardwise.machines.cluster_writer import format_cluster

EXAMPLE = """\
[[node]]
name = "desktop"
memory = "16 GiB"                  # what a model may use
memory_bandwidth = "60 GB/s"
compute = "1.2 TFLOP/s"            # dense, at the type the backend computes in
[[node.device]]                    # optional accelerators
kind = "cuda"                      # cuda | metal | vulkan | cpu
memory = "24 GiB"
memory_bandwidth = "936 GB/s"
compute = "142 TFLOP/s"
[[node]]
name = "nas"
memory = "12 GiB"
memory_bandwidth = "25 GB/s"
compute = "0.2 TFLOP/s"
disk_bandwidth = "0.5 GB/s"
availability = 0.98
[[link]]
between = ["desktop", "nas"]
bandwidth = "1 Gbit/s"
latency = "0.3 ms"
jitter_p95 = "0.4 ms"
kind = "ethernet"
[defaults.link]
bandwidth = "1 Gbit/s"
latency = "0.5 ms"
"""


def test_the_agreed_example() -> None:
    cluster = parse_cluster(EXAMPLE)
    desktop, nas = cluster.nodes
    assert desktop.memory_bytes == 16 * 2**30
    assert desktop.devices[0].memory_bytes_per_s.value == 936e9
    assert nas.compute_flops_per_s.value == 0.2e12
    assert nas.disk_bytes_per_s == Measurement(value=0.5e9)
    assert nas.availability == 0.98
    there, back = cluster.link("desktop", "nas"), cluster.link("nas", "desktop")
    assert there is not None
    assert back is not None
    assert there.bytes_per_s.value == 125e6
    assert back.jitter_p95_s == Measurement(value=0.4e-3)
    assert cluster.default_link is not None
    assert cluster.default_link.latency_s.value == 0.5e-3


def swap(old: str, new: str) -> str:
    assert old in EXAMPLE
    return EXAMPLE.replace(old, new, 1)


BAD = [
    pytest.param(
        swap('["desktop", "nas"]', '["desktop", "nass"]'), 19, "unknown node 'nass'", "did you mean 'nas'", id="unknown-node"
    ),
    pytest.param(swap('name = "nas"', 'name = "desktop"'), 12, "name is taken", "own name", id="duplicate-name"),
    pytest.param(swap('"1 Gbit/s"', '"0 Gbit/s"'), 20, "above zero", "1 Gbit/s", id="zero-bandwidth"),
    pytest.param(swap('"12 GiB"', '"12"'), 13, "has no unit", "16 GiB", id="unit-missing"),
    pytest.param(swap('"12 GiB"', "12"), 13, "has no unit", "16 GiB", id="bare-number"),
    pytest.param(swap('"12 GiB"', '"12 Gbit/s"'), 13, "unknown unit 'Gbit/s'", "16 GiB", id="unit-of-another-kind"),
    pytest.param(swap('"0.2 TFLOP/s"', '"0.2 TFLAP/s"'), 15, "unknown unit", "TFLOP/s", id="unit-misspelt"),
    pytest.param(swap('"0.3 ms"', '"-0.3 ms"'), 21, "finite, non-negative", "0.3 ms", id="negative"),
    pytest.param(swap('"60 GB/s"', '"fast"'), 4, "is not a rate", "1 Gbit/s", id="no-number"),
    pytest.param(swap('memory = "12 GiB"\n', ""), 11, "'memory' is missing", "16 GiB", id="missing-field"),
    pytest.param(
        swap("availability", "availibility"),
        17,
        "unknown field 'availibility'",
        "did you mean 'availability'",
        id="field-misspelt",
    ),
    pytest.param(swap("0.98", "1.5"), 17, "availability = 1.5", "at most 1", id="availability"),
    pytest.param(swap("0.98", "true"), 17, "availability = True", "at most 1", id="boolean"),
    pytest.param(swap('"cuda"', '"cudo"'), 7, "kind = 'cudo'", "did you mean 'cuda'", id="device-kind"),
    pytest.param(
        swap('kind = "ethernet"', 'kind = "wlan"'), 23, "kind = 'wlan'", "ethernet, wifi, loopback, wan", id="link-kind"
    ),
    pytest.param(swap('["desktop", "nas"]', '["desktop"]'), 19, "is not a pair", "between =", id="not-a-pair"),
    pytest.param(
        EXAMPLE + '[[link]]\nfrom = "nas"\nto = "desktop"\nbandwidth = "1 Gbit/s"\nlatency = "1 ms"\n',
        27,
        "described twice",
        "each direction",
        id="link-twice",
    ),
    pytest.param(swap('name = "nas"', 'name = ""'), 12, "is not a name", "desktop", id="empty-name"),
    pytest.param(swap('latency = "0.5 ms"', 'delay = "0.5 ms"'), 26, "unknown field 'delay'", "allowed", id="default-field"),
    pytest.param("", 1, "no [[node]]", "at least one machine", id="empty"),
]


@pytest.mark.parametrize(("text", "line", "what", "hint"), BAD)
def test_complaints_name_line_field_value_and_what_is_allowed(text: str, line: int, what: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_cluster(text, file="home.toml")
    assert what in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.where == f"home.toml line {line}"
    assert caught.value.details["line"] == line
    assert caught.value.exit_code == 2


def test_a_pair_without_link_and_without_default() -> None:
    lonely = EXAMPLE.split("[[link]]")[0]
    with pytest.raises(UsageError, match="no link from 'desktop' to 'nas' and no default"):
        parse_cluster(lonely)
    one_way = EXAMPLE.split("[defaults.link]")[0].replace('between = ["desktop", "nas"]', 'from = "desktop"\nto = "nas"')
    with pytest.raises(UsageError, match="no link from 'nas' to 'desktop'"):
        parse_cluster(one_way)


def test_broken_toml_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="line 1"):
        parse_cluster("[[node]\n")
    with pytest.raises(UsageError, match="cannot read the cluster file"):
        load_cluster(tmp_path / "nothing.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_cluster(tmp_path / "binary.toml")


def test_a_single_machine_needs_no_link() -> None:
    assert len(parse_cluster(EXAMPLE.split("[[node.device]]")[0]).nodes) == 1


values = st.floats(min_value=1.0, max_value=1e16, allow_nan=False)
seconds = st.floats(min_value=1e-9, max_value=1e3)
words = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).filter(lambda s: s.strip())


def measurements(kind: st.SearchStrategy[float]) -> st.SearchStrategy[Measurement]:
    return st.builds(Measurement, value=kind, spread=kind, n=st.integers(0, 99), method=words, when=words)


timings = st.lists(st.integers(1, 512), unique=True, max_size=3).flatmap(
    lambda rows: st.tuples(*(st.builds(LayerTiming, rows=st.just(r), layer_s=measurements(seconds)) for r in sorted(rows)))
)
rates = st.builds(
    RateTable,
    quantization=words,
    library=words,
    compute_flops_per_s=measurements(values),
    weight_bytes_per_s=measurements(values),
    row_s=st.none() | measurements(seconds),
    layer_fixed_s=st.none() | measurements(seconds),
    timings=timings,
    timing_layer_bytes=st.integers(0, 2**40),
    attention_flops_per_s=st.none() | measurements(values),
)
devices = st.builds(
    DeviceProfile,
    kind=st.sampled_from(["cuda", "metal", "vulkan", "cpu"]),
    memory_bytes=st.integers(1, 2**50),
    memory_bytes_per_s=measurements(values),
    compute_flops_per_s=measurements(values),
    name=words,
    rates=st.lists(rates, max_size=2).map(tuple),
)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterProfile:
    names = draw(st.lists(words, min_size=1, max_size=3, unique=True))
    nodes = tuple(
        NodeProfile(
            name=name,
            memory_bytes=draw(st.integers(1, 2**50)),
            memory_bytes_per_s=draw(measurements(values)),
            compute_flops_per_s=draw(measurements(values)),
            devices=tuple(draw(st.lists(devices, max_size=2))),
            disk_bytes_per_s=draw(st.none() | measurements(values)),
            availability=draw(st.floats(0.01, 1.0)),
            num_cores=draw(st.integers(0, 64)),
            machine=draw(st.just("") | words),
            rates=tuple(draw(st.lists(rates, max_size=2))),
        )
        for name in names
    )
    link = st.builds(
        LinkProfile,
        source=st.just(""),
        target=st.just(""),
        bytes_per_s=measurements(values),
        latency_s=measurements(seconds),
        jitter_p95_s=st.none() | measurements(seconds),
        kind=st.sampled_from(["ethernet", "wifi", "loopback", "wan"]),
        overhead_s=seconds,
    )
    return ClusterProfile(nodes=nodes, default_link=draw(link))


@settings(max_examples=60, deadline=None)
@given(clusters())
def test_writing_and_reading_gives_the_same_profile(cluster: ClusterProfile) -> None:
    assert parse_cluster(format_cluster(cluster)) == cluster


def test_no_field_is_forgotten() -> None:
    """A field that is added to a profile must be read and written: this test fails until it is, then extend the strategies."""
    fields = {kind.__name__: len(kind.__struct_fields__) for kind in (NodeProfile, DeviceProfile, LinkProfile, RateTable)}
    assert fields == {"NodeProfile": 10, "DeviceProfile": 6, "LinkProfile": 7, "RateTable": 9}


def test_write_cluster_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("old")
    write_cluster(parse_cluster(EXAMPLE), path)
    assert load_cluster(path) == parse_cluster(EXAMPLE)
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.toml"]
    with pytest.raises(UsageError, match="cannot write"):
        write_cluster(parse_cluster(EXAMPLE), tmp_path / "no" / "such.toml")
