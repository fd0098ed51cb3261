"""A probe of the whole cluster: a worker on each node, then node by node and link by link.

Settings flow to workers over CURVE, reports come back and become a `ProbeReport`. **Promises** machines measure at the
same time, workers of one machine one after the other, links one after the other while the rest is quiet; a node or
link that fails is named in the report and does not stop the others. **Fails when** no worker comes up (`StageLoadFailed`).
**Called by** the command line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from shardwise.clock import Clock, SystemClock
from shardwise.cluster.control_link import MessageServer
from shardwise.cluster.engine import ClusterEngine, NodeInfo, WorkerSpec, WorkerStatus
from shardwise.cluster.interfaces import url_host
from shardwise.errors import ShardwiseError, StageLoadFailed
from shardwise.machines.profile import ClusterProfile
from shardwise.probe.link_task import LinkReport, LinkSettings
from shardwise.probe.links import link_kind
from shardwise.probe.node import NodeReport, NodeSettings
from shardwise.probe.orders import (
    CODEC,
    End,
    Here,
    Idle,
    LinkDone,
    MeasureLink,
    MeasureNode,
    NodeDone,
    Order,
    OrderFailed,
    Progress,
    Request,
    Wait,
)
from shardwise.probe.report import ProbeReport
from shardwise.probe.worker import WorkerConfig
from shardwise.records import replace, to_json
from shardwise.transport.security import AllowList, NodeKeys

_START_TIMEOUT_S = 45.0
_NODE_TIMEOUT_S = 300.0
_LINK_TIMEOUT_S = 60.0
_MODULE = "shardwise.probe.worker"
OnProgress = Callable[[str, float], None]


class ClusterProbe:
    """One run over an engine's nodes. `settings` are those of each node, but for the name.

    Nodes that are `known`, and links between them, are not measured.
    """

    def __init__(
        self,
        engine: ClusterEngine,
        own_host: str,
        settings: NodeSettings,
        link_settings: LinkSettings,
        *,
        nodes: list[NodeInfo] | None = None,
        known: ClusterProfile | None = None,
        say: OnProgress | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._engine, self._settings, self._link_settings = engine, settings, link_settings
        self._infos = {info.name: info for info in (nodes if nodes is not None else engine.node_infos())}
        self._say: OnProgress = say or (lambda what, share: None)
        self._clock = clock or SystemClock()
        self._keys = {name: NodeKeys.generate() for name in self._infos}
        self._own_keys = NodeKeys.generate()
        allowed = AllowList()
        for name, keys in self._keys.items():
            allowed.allow(keys.public, name)
        self._server = MessageServer([f"tcp://{url_host(own_host)}:*"], self._own_keys, allowed, CODEC)
        self._here: dict[str, Here] = {}
        self._orders: dict[str, Order] = {}  # given and not yet answered
        self._node_reports: dict[str, NodeReport] = {}
        self._link_reports: dict[tuple[str, str], LinkReport] = {}
        self._failed: dict[str, str] = {}
        self._known_nodes = {node.name for node in known.nodes} & set(self._infos) if known is not None else set()
        self._over = False

    def run(self) -> ProbeReport:
        """Measure everything."""
        try:
            self._start_workers()
            self._serve(lambda: len(self._here) + len(self._failed) >= len(self._infos), _START_TIMEOUT_S, "did not start")
            if not self._here:
                raise StageLoadFailed(f"no probe worker came up: {self._first_failure()}", where="probe")
            self._serve(self._nodes_done, _NODE_TIMEOUT_S * len(self._here), "took too long")
            pairs = max(1, len(self._here) * (len(self._here) - 1))
            self._serve(self._links_done, _LINK_TIMEOUT_S * pairs, "took too long")
            self._over = True
            self._serve(lambda: not any(s.alive for s in self._own_statuses()), 3.0, "")
        finally:
            for name in self._infos:
                self._engine.stop(_worker(name), grace_s=1.0)
            self._server.close()
        return ProbeReport(
            nodes=tuple(self._marked(name) for name in self._infos if name in self._node_reports),
            links=tuple(self._link_reports.values()),
            failed=tuple(f"{what}: {why}" for what, why in self._failed.items()),
        )

    def _marked(self, name: str) -> NodeReport:
        """Nodes that share a machine share its cores, and the planner must know."""
        report, machine = self._node_reports[name], self._here[name].machine
        shared = sum(here.machine == machine for here in self._here.values()) > 1
        return replace(report, profile=replace(report.profile, machine=machine)) if shared else report

    def _start_workers(self) -> None:
        for name, info in self._infos.items():
            keys = self._keys[name]
            config = WorkerConfig(
                name=name,
                host=info.address,
                driver_address=self._server.address,
                driver_public=self._own_keys.public,
                public=keys.public,
                secret=keys.secret,
                peers={k.public: n for n, k in self._keys.items()},
            )
            try:
                self._engine.start(WorkerSpec(name=_worker(name), node=name, module=_MODULE, config=to_json(config)))
            except ShardwiseError as error:
                self._failed[name] = error.one_line()

    def _serve(self, done: Callable[[], bool], timeout_s: float, late: str) -> None:
        """Answer workers until `done`, the deadline, or nobody is left."""
        end_s = self._clock.now_s() + timeout_s
        while not done() and self._clock.now_s() < end_s:
            self._server.serve_once(self._answer, 0.1)
            self._look_for_dead()
        if not done() and late:
            for name in [n for n in self._infos if n not in self._failed and (n in self._orders or n not in self._here)]:
                self._failed[name] = late
                self._orders.pop(name, None)

    def _look_for_dead(self) -> None:
        for status in self._own_statuses():
            name = status.name.removeprefix(_worker(""))
            if not status.alive and not self._over and name not in self._failed:
                last = status.log_tail.strip().splitlines()[-1:] or ["no output"]
                self._failed[name] = f"its worker ended: {last[0]}"
                self._orders.pop(name, None)

    def _own_statuses(self) -> list[WorkerStatus]:
        mine = {_worker(name) for name in self._infos}
        return [status for status in self._engine.statuses() if status.name in mine]

    def _answer(self, request: Request, sender: str) -> Order:
        name = self._name_of(sender)
        match request:
            case Here():
                self._here[name] = request
            case Progress():
                self._say(f"{name}: {request.what}", request.share)
                return Wait()
            case NodeDone():
                self._node_reports[name] = replace(request.report, profile=replace(request.report.profile, name=name))
                self._orders.pop(name, None)
            case LinkDone():
                key = (request.report.profile.source, request.report.profile.target)
                self._link_reports[key] = request.report
                self._orders.pop(name, None)
            case OrderFailed():
                self._note_failure(name, request)
            case Idle():
                pass
        return self._next_order(name)

    def _note_failure(self, name: str, request: OrderFailed) -> None:
        order = self._orders.pop(name, None)
        what = f"{name} -> {order.target.name}" if isinstance(order, MeasureLink) else name
        self._failed[what] = f"{request.message} ({request.where})" if request.where else request.message

    def _next_order(self, name: str) -> Order:
        if self._over:
            return End()
        order: Order = Wait()
        if name not in self._orders:
            order = self._node_order(name) or self._link_order(name) or Wait()
            if not isinstance(order, Wait):
                self._orders[name] = order
        return order

    def _node_order(self, name: str) -> Order | None:
        if name in self._node_reports or name in self._failed or name in self._known_nodes:
            return None
        machine = self._here[name].machine
        busy = any(self._here[other].machine == machine for other in self._orders)
        return None if busy else MeasureNode(settings=replace(self._settings, name=name))

    def _link_order(self, name: str) -> Order | None:
        if self._orders or not self._nodes_done():
            return None
        for target in self._targets(name):
            here, there = self._here[name], self._here[target]
            self._say(f"{name} -> {target}", (len(self._link_reports) + 1) / max(1, self._num_links()))
            same = self._infos[name].address == self._infos[target].address
            kind = link_kind(here.card or there.card, 0.0, same_machine=same)
            return MeasureLink(target=there.echo, kind=kind, settings=self._link_settings)
        return None

    def _targets(self, name: str) -> list[str]:
        """Links from a node that have neither a figure nor a failure."""
        if name in self._failed:
            return []
        return [
            target
            for target in self._here
            if target != name
            and target not in self._failed
            and (name, target) not in self._link_reports
            and not {name, target} <= self._known_nodes
            and f"{name} -> {target}" not in self._failed
        ]

    def _num_links(self) -> int:
        return sum(1 for a, b in itertools.permutations(self._here, 2) if a not in self._failed and b not in self._failed)

    def _nodes_done(self) -> bool:
        return all(name in self._node_reports or name in self._failed or name in self._known_nodes for name in self._here)

    def _links_done(self) -> bool:
        return not self._orders and not any(self._targets(name) for name in self._here)

    def _name_of(self, sender: str) -> str:
        return next(name for name, keys in self._keys.items() if keys.public == sender)

    def _first_failure(self) -> str:
        return next(iter(self._failed.values()), "no reason is known")


def _worker(name: str) -> str:
    return f"probe-{name}"
