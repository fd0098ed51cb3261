"""Scenarios: what is measured, as TOML with units. `load_scenario` reads one strictly; `cases` unfolds its matrix.

Bad input is a `UsageError` that names file, table, field, the value and what is allowed.
"""

from __future__ import annotations

import difflib
import random
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from shardwise.bench.lab.plan import Host, Link
from shardwise.bench.lab.profiles import link_preset, shape_from_toml
from shardwise.bench.result import Case
from shardwise.errors import UsageError
from shardwise.records import Record
from shardwise.transport.faults import Fault
from shardwise.units import parse_bytes, parse_duration

_KINDS = ("loopback", "wired", "wireless", "wan")


class Network(Record):
    """A virtual home: its hosts, what single links add, and which bulk transfers run all the time."""

    name: str
    title: str
    kind: str
    hosts: tuple[Host, ...]
    links: tuple[Link, ...] = ()
    background: tuple[tuple[str, str], ...] = ()

    @property
    def is_bare(self) -> bool:
        """No lab needed: plain child processes on this machine."""
        return self.kind == "loopback" and not self.links and not any(host.cpu_share or host.speed < 1 for host in self.hosts)


class Load(Record):
    """What users do: prompt length, answer length, how many at the same time."""

    name: str
    prompt_tokens: int
    output_tokens: int
    num_users: int = 1


class Split(Record):
    """Where the stages are. `hosts` has one name per stage; `layers` is empty for equal parts.

    `asked_from`: the host of whoever asks (the driver, a peer's client); empty = the first stage's.
    """

    name: str
    hosts: tuple[str, ...]
    layers: tuple[int, ...] = ()
    asked_from: str = ""


class NamedFaults(Record):
    """A fault schedule with a name."""

    name: str
    faults: tuple[Fault, ...]


class Matrix(Record):
    """Which combinations are measured."""

    networks: tuple[str, ...]
    splits: tuple[str, ...]
    loads: tuple[str, ...]
    faults: tuple[str, ...] = ()
    engines: tuple[str, ...] = ("shardwise",)


class Scenario(Record):
    """A whole scenario file."""

    name: str
    title: str
    networks: tuple[Network, ...]
    loads: tuple[Load, ...]
    splits: tuple[Split, ...]
    matrices: tuple[Matrix, ...]
    faults: tuple[NamedFaults, ...] = ()
    model: str = "sample"
    seed: int = 1
    warm_up: int = 1
    repetitions: int = 3
    context_tokens: int = 2048
    num_threads: int = 1
    target_inter_token_p95_s: float = 0.2
    trace_tokens: int = 12

    def network(self, name: str) -> Network:
        return next(network for network in self.networks if network.name == name)

    def fault_schedule(self, name: str) -> tuple[Fault, ...]:
        return next(schedule.faults for schedule in self.faults if schedule.name == name)

    def cases(self) -> list[Case]:
        """Every cell once, in the file's order."""
        networks = {network.name: network for network in self.networks}
        splits = {split.name: split for split in self.splits}
        loads = {load.name: load for load in self.loads}
        found: dict[str, Case] = {}
        for matrix in self.matrices:
            for engine in matrix.engines:
                for network in matrix.networks:
                    for split in matrix.splits:
                        for load in matrix.loads:
                            for fault in matrix.faults or ("",):
                                case = _case(self.model, engine, networks[network], splits[split], loads[load], fault)
                                found[case.key] = case
        return list(found.values())


def _case(model: str, engine: str, network: Network, split: Split, load: Load, fault: str) -> Case:
    return Case(
        model=model,
        engine=engine,
        network=network.name,
        network_kind=network.kind,  # type: ignore[arg-type]  # checked when read
        split=split.name,
        hosts=split.hosts,
        layers=split.layers,
        asked_from=split.asked_from,
        workload=load.name,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        num_users=load.num_users,
        faults=(fault,) if fault else (),
    )


def ordered_groups(cases: list[Case], repetitions: int, seed: int) -> list[tuple[int, list[Case]]]:
    """(repetition, cases of one deployment) in random order: blocks by repetition, so that drift hits all alike."""
    rng = random.Random(seed)
    order: list[tuple[int, list[Case]]] = []
    for repetition in range(repetitions):
        groups: dict[tuple[str, ...], list[Case]] = {}
        for case in cases:
            groups.setdefault((case.engine, case.network, case.split, *case.faults), []).append(case)
        block = list(groups.values())
        rng.shuffle(block)
        for group in block:
            rng.shuffle(group)
            order.append((repetition, group))
    return order


def scenario_names() -> list[str]:
    """The scenarios that come with the program."""
    folder = resources.files("shardwise.bench").joinpath("scenarios")
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def load_scenario(name_or_path: str) -> Scenario:
    """A scenario by name (`home`) or path (`my.toml`)."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        try:
            return parse_scenario(path.read_text(encoding="utf-8"), where=str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the scenario: {error}", where=str(path)) from error
    known = scenario_names()
    if name_or_path not in known:
        near = difflib.get_close_matches(name_or_path, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}, or a path ending in .toml"
        raise UsageError(f"unknown scenario {name_or_path!r}", hint=hint, field="scenario")
    file = resources.files("shardwise.bench").joinpath("scenarios", f"{name_or_path}.toml")
    return parse_scenario(file.read_text(encoding="utf-8"), where=f"{name_or_path}.toml")


def parse_scenario(text: str, *, where: str = "scenario") -> Scenario:
    """A scenario from TOML text."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"not TOML: {error}", where=where) from error
    target = table.pop("target", {})
    lists: dict[str, Any] = {
        "networks": _each(table, "network", _network, where),
        "loads": _each(table, "load", lambda row, at: _strict(row, Load, at), where),
        "splits": _each(table, "split", _split, where),
        "faults": _each(table, "fault", _fault, where),
        "matrices": _each(table, "measure", lambda row, at: _strict(row, Matrix, at), where),
    }
    if "inter_token_p95" in target:
        table["target_inter_token_p95_s"] = parse_duration(target["inter_token_p95"], field="target.inter_token_p95")
    scenario: Scenario = _strict(table | lists, Scenario, where)
    _check_names(scenario, where)
    return scenario


def _each(table: dict[str, Any], key: str, make: Callable[[dict[str, Any], str], Any], where: str) -> tuple[Any, ...]:
    return tuple(make(dict(row), f"{where}: {key} {row.get('name', number)}") for number, row in enumerate(table.pop(key, []), 1))


def _strict(table: dict[str, Any], kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{error}", where=where, hint="see benchmarks/method.md for the fields") from error


def _network(row: dict[str, Any], where: str) -> Network:
    kind = row.get("kind", "wired")
    if kind not in _KINDS:
        raise UsageError(f"kind = {kind!r}", where=where, hint=f"one of {', '.join(_KINDS)}", field="kind")
    hosts = [_host(dict(host), where) for host in row.pop("hosts", [])]
    links = []
    for link in row.pop("links", []):
        rest = {key: value for key, value in link.items() if key not in ("from", "to")}
        links.append(Link(source=link.get("from", ""), target=link.get("to", ""), shape=shape_from_toml(rest, where=where)))
    return _strict({"title": row.get("name", ""), "kind": kind} | row | {"hosts": hosts, "links": links}, Network, where)  # type: ignore[no-any-return]


def _host(row: dict[str, Any], where: str) -> Host:
    preset = link_preset(row.pop("link", "loopback"))
    if "memory" in row:
        row["memory_bytes"] = parse_bytes(row.pop("memory"), field="memory")
    return _strict(row | {"up": preset.up, "down": preset.down}, Host, where)  # type: ignore[no-any-return]


def _split(row: dict[str, Any], where: str) -> Split:
    return _strict({"name": "+".join(row.get("hosts", []))} | row, Split, where)  # type: ignore[no-any-return]


def _fault(row: dict[str, Any], where: str) -> NamedFaults:
    steps = []
    for step in row.pop("steps", []):
        fields = dict(step)
        for key in ("after", "duration"):
            if key in fields:
                fields[f"{key}_s"] = parse_duration(fields.pop(key), field=key)
        if "shape" in fields:
            fields["shape"] = shape_from_toml(fields["shape"], where=where)
        steps.append(_strict(fields, Fault, where))
    return _strict(row | {"faults": steps}, NamedFaults, where)  # type: ignore[no-any-return]


def _check_names(scenario: Scenario, where: str) -> None:
    known = {
        "networks": {network.name for network in scenario.networks},
        "splits": {split.name for split in scenario.splits},
        "loads": {load.name for load in scenario.loads},
        "faults": {schedule.name for schedule in scenario.faults},
    }
    for matrix in scenario.matrices:
        for field, names in known.items():
            for name in getattr(matrix, field):
                if name not in names:
                    hint = f"one of {', '.join(sorted(names))}"
                    raise UsageError(f"'measure' names the unknown {field[:-1]} {name!r}", where=where, hint=hint, field=field)
    for case in scenario.cases():
        hosts = {host.name for host in scenario.network(case.network).hosts}
        if missing := [host for host in (*case.hosts, case.asking_host) if host not in hosts]:
            raise UsageError(f"split {case.split!r} uses {missing[0]!r}, which network {case.network!r} lacks", where=where)
    if scenario.repetitions < 1 or scenario.warm_up < 0:
        raise UsageError("repetitions must be 1 or more and warm_up 0 or more", where=where, field="repetitions")
