"""`python -m shardwise.probe.worker`: one machine's part of a cluster-wide probe, started by the engine.

A `WorkerConfig` comes on standard input (after its length); the worker opens its echo, reports to the driver and does
what it is told: measure this machine, measure a link, end. **Promises** ends with its standard input, with the driver's
`End`, or when the driver is silent for a minute. **Fails when** the driver cannot be reached.
"""

from __future__ import annotations

import sys

from shardwise.clock import SystemClock
from shardwise.cluster.control_link import MessageClient
from shardwise.cluster.interfaces import list_interfaces, url_host
from shardwise.errors import ShardwiseError, UsageError
from shardwise.parent_watch import end_with_input
from shardwise.probe.link_task import LinkTarget
from shardwise.probe.links import Echo, LinkProbe
from shardwise.probe.node import NodeSuite
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
)
from shardwise.records import Record, from_json
from shardwise.transport.promptness import prompt_context
from shardwise.transport.security import AllowList, Authenticator, NodeKeys

_MAX_CONFIG_BYTES = 2**20
_ASK_EVERY_S = 0.05
_DRIVER_TIMEOUT_S = 60.0


class WorkerConfig(Record):
    """What a worker is told at its start."""

    name: str
    host: str  # this machine's address
    driver_address: str
    driver_public: str
    public: str
    secret: str
    peers: dict[str, str]  # public key -> name


class ProbeWorker:
    """One machine."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config, self._clock = config, SystemClock()
        self._keys = NodeKeys(config.public, config.secret)
        self._client: MessageClient[Request, Order] = MessageClient(
            [config.driver_address], self._keys, config.driver_public, CODEC
        )
        allowed = AllowList()
        for public, name in config.peers.items():
            allowed.allow(public, name)
        self._context = prompt_context()
        self._authenticator = Authenticator(self._context, allowed)
        self._echo = Echo(self._context, f"tcp://{url_host(config.host)}:*", config.name, self._keys, self._clock)

    def run(self) -> None:
        """Obey until the end."""
        name, target = self._config.name, self._echo.address
        echo = LinkTarget(name=name, address=target, public=self._config.public)
        card = next((i.card for i in list_interfaces() if i.address == self._config.host), "")
        order = self._tell(Here(name=name, machine=machine_identity(), card=card, echo=echo))
        while not isinstance(order, End):
            try:
                if isinstance(order, MeasureNode):
                    report = NodeSuite(order.settings, self._clock, self._progress).run()
                    order = self._tell(NodeDone(report=report))
                    continue
                if isinstance(order, MeasureLink):
                    order = self._tell(self._measure_link(order))
                    continue
            except ShardwiseError as error:
                order = self._tell(
                    OrderFailed(name=name, kind=type(error).__name__, message=error.message, where=error.where, hint=error.hint)
                )
                continue
            self._clock.sleep(_ASK_EVERY_S)
            order = self._tell(Idle(name=name))

    def close(self) -> None:
        self._echo.close()
        self._client.close()
        self._authenticator.close()
        self._context.destroy(linger=0)

    def _measure_link(self, order: MeasureLink) -> LinkDone:
        probe = LinkProbe(self._context, self._config.name, order.target, self._keys, self._clock)
        try:
            return LinkDone(report=probe.run(order.settings, order.kind))
        finally:
            probe.close()

    def _progress(self, what: str, share: float) -> None:
        self._tell(Progress(name=self._config.name, what=what, share=share))

    def _tell(self, request: Request) -> Order:
        return self._client.ask(request, timeout_s=_DRIVER_TIMEOUT_S)


def machine_identity() -> str:
    """The same for processes of one running machine, network namespaces included."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as source:
            return source.read().strip()
    except OSError:
        import uuid

        return f"{uuid.getnode():x}"


def main() -> int:
    """Run one worker."""
    size = int.from_bytes(sys.stdin.buffer.read(8), "little")
    try:
        if not 0 < size <= _MAX_CONFIG_BYTES:
            raise UsageError(f"a configuration of {size} bytes", where="standard input")
        config = from_json(sys.stdin.buffer.read(size), WorkerConfig, where="standard input")
        end_with_input()
        worker = ProbeWorker(config)
        worker.run()
        worker.close()
    except ShardwiseError as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
