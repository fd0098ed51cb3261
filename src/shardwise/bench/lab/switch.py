"""The packet switch of the virtual home, as a rule without I/O: frames in, (time, port, frame) out.

A frame from host `a` to host `b` passes a's up link, what the link a-b adds, and b's down link, one after the other and
each in order. Hosts that need no relay stand behind the `trunk` port (a kernel bridge) and have no up and down here.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from shardwise.transport.shaping import LinkModel, LinkShape

TRUNK = "trunk"
_UNSHAPED = LinkShape()
_BROADCAST_BIT = 1


class Switch:
    """`ports` maps the Ethernet address of every host to its port; several addresses may share the trunk."""

    def __init__(self, ports: dict[bytes, tuple[str, str]], *, seed: int = 0, shaped_operator: bool = False) -> None:
        # address -> (host name, port name); the host name finds the link a-b. The operator (this machine) has none.
        self._shaped_operator = shaped_operator
        self._ports = ports
        self._seed = seed
        self._models: dict[tuple[str, str], LinkModel] = {}
        self._queue: list[tuple[float, int, str, bytes, list[LinkModel]]] = []
        self._counter = itertools.count()
        self._cut: set[str] = set()
        self.num_dropped = 0
        self.num_frames = 0

    def set_link(self, key: tuple[str, str], shape: LinkShape) -> None:
        """`(host, "up")`, `(host, "down")` or `(source, target)`; unset again by the empty shape."""
        if shape == _UNSHAPED:
            self._models.pop(key, None)
        else:
            seed = hash((self._seed, sum(ord(c) * 31**i for i, c in enumerate("/".join(key)))))
            self._models[key] = LinkModel(shape, seed)

    def set_cut(self, host: str, cut: bool) -> None:
        """A cut host's frames are dropped, both ways."""
        (self._cut.add if cut else self._cut.discard)(host)

    def take(self, now_s: float, port: str, frame: bytes, header_bytes: int) -> None:
        """One frame from a port. `header_bytes`: what stands before the Ethernet header."""
        target = frame[header_bytes : header_bytes + 6]
        source = frame[header_bytes + 6 : header_bytes + 12]
        source_name = self._ports.get(source, ("", port))[0]
        if target[0] & _BROADCAST_BIT:
            for name, out_port in set(self._ports.values()):
                if out_port != port:
                    self._start(now_s, source_name, name, out_port, frame)
                    if out_port == TRUNK:
                        port = TRUNK  # once is enough: the bridge copies
            return
        name, out_port = self._ports.get(target, ("", TRUNK))
        if out_port != port:
            self._start(now_s, source_name, name, out_port, frame)

    def due(self, now_s: float, write: Callable[[str, bytes], None]) -> float | None:
        """Write what is due by `now_s`; returns when the next one is, or None."""
        queue = self._queue
        while queue and queue[0][0] <= now_s:
            at_s, _, port, frame, rest = heapq.heappop(queue)
            if rest:
                self._step(at_s, port, frame, rest)
            else:
                self.num_frames += 1
                write(port, frame)
        return queue[0][0] if queue else None

    def _start(self, now_s: float, source: str, target: str, port: str, frame: bytes) -> None:
        if source in self._cut or target in self._cut:
            self.num_dropped += 1
            return
        get = self._models.get
        chain = (
            [get((source, "up")), get((source, target)), get((target, "down"))]
            if self._shaped_operator or (source and target)
            else []
        )
        self._step(now_s, port, frame, [model for model in chain if model])

    def _step(self, at_s: float, port: str, frame: bytes, rest: list[LinkModel]) -> None:
        if not rest:
            heapq.heappush(self._queue, (at_s, next(self._counter), port, frame, rest))
            return
        out_s = rest[0].deliver_packet(at_s, payload_bytes(len(frame)))
        if out_s is None:
            self.num_dropped += 1
        else:
            heapq.heappush(self._queue, (out_s, next(self._counter), port, frame, rest[1:]))


def payload_bytes(frame_bytes: int) -> int:
    """TCP payload of a frame, or of a large segment that stands for many: what a link's rate is counted in."""
    return max(1, frame_bytes - 76)
