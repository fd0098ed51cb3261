"""A TCP relay on loopback that shapes what passes through it: the virtual home without root, on any platform.

    with TcpRelay(("127.0.0.1", port), forth=LinkShape(delay_s=0.02), back=LinkShape(delay_s=0.02)) as relay:
        connect to relay.address

Bytes come out in order and unchanged; a lost packet shows as the stall of its retransmission. What waits inside is
bounded, so a slow link pushes back on the sender.

**Promises** `close` ends both threads of every connection. **Fails when** the target refuses (the client is then
disconnected, as by the target itself). **Called by** `bench.lab.loopback`, tests, probes of the transport.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from typing import Protocol, Self

from shardwise.clock import Clock, SystemClock
from shardwise.transport.shaping import LinkModel, LinkShape

_CHUNK_BYTES = 16 * 1024
_QUEUE_CHUNKS = 64
_TICK_S = 0.2


class Carrier(Protocol):
    """What one direction goes through: a link of its own, or several that are shared with other relays."""

    def deliver_stream(self, now_s: float, num_bytes: int) -> float:
        """When bytes that are there now come out."""
        ...


class _Direction:
    """One direction of one connection: a reader that stamps chunks with their time, a writer that keeps it."""

    def __init__(
        self, relay: TcpRelay, source: socket.socket, target: socket.socket, model: Carrier, gate: threading.Event
    ) -> None:
        self._relay, self._source, self._target, self._model, self._gate = relay, source, target, model, gate
        self._chunks: queue.Queue[tuple[float, bytes]] = queue.Queue(_QUEUE_CHUNKS)
        self.threads = [threading.Thread(target=work, daemon=True, name="relay") for work in (self._read, self._write)]
        for thread in self.threads:
            thread.start()

    def _read(self) -> None:
        clock = self._relay.clock
        while True:
            try:
                data = self._source.recv(_CHUNK_BYTES)
            except OSError:
                data = b""
            with self._relay.lock:
                due_s = self._model.deliver_stream(clock.now_s(), len(data)) if data else clock.now_s()
            if not self._put((due_s, data)) or not data:
                return

    def _put(self, item: tuple[float, bytes]) -> bool:
        while not self._relay.closing.is_set():
            with contextlib.suppress(queue.Full):
                self._chunks.put(item, timeout=_TICK_S)
                return True
        return False

    def _write(self) -> None:
        clock = self._relay.clock
        while not self._relay.closing.is_set():
            try:
                due_s, data = self._chunks.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            clock.sleep(due_s - clock.now_s())
            while not self._gate.wait(_TICK_S) and not self._relay.closing.is_set():
                continue
            try:
                if data:
                    self._target.sendall(data)
                else:
                    self._target.shutdown(socket.SHUT_WR)
            except OSError:
                data = b""
            if not data:
                return


class TcpRelay:
    """Listens on a free loopback port and passes every connection on to `target`, shaped both ways."""

    def __init__(
        self,
        target: tuple[str, int],
        *,
        forth: LinkShape | Carrier | None = None,
        back: LinkShape | Carrier | None = None,
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self._target = target
        self._forth, self._back = _carrier(forth, seed), _carrier(back, seed + 1)
        self._gates = (threading.Event(), threading.Event())  # set: what is due passes
        self.hold(forth=False, back=False)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._directions: list[_Direction] = []
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._acceptor = threading.Thread(target=self._accept, daemon=True, name="relay-accept")
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, *, forth: bool, back: bool) -> None:
        """Let nothing pass in these directions, as when a cable is out; connections stay, and what waits comes later."""
        for gate, held in zip(self._gates, (forth, back), strict=True):
            gate.clear() if held else gate.set()

    def close(self) -> None:
        """End every connection and thread; may be called twice."""
        self.closing.set()
        for sock in [self._server, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._acceptor.join(timeout=5)
        for direction in self._directions:
            for thread in direction.threads:
                thread.join(timeout=5)

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * _CHUNK_BYTES)
            self._sockets += [near, far]
            self._directions += [
                _Direction(self, near, far, self._forth, self._gates[0]),
                _Direction(self, far, near, self._back, self._gates[1]),
            ]


def _carrier(given: LinkShape | Carrier | None, seed: int) -> Carrier:
    return LinkModel(given or LinkShape(), seed) if given is None or isinstance(given, LinkShape) else given
