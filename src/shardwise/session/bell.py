"""A bell that any thread may ring to wake the driver's thread out of its poll."""

from __future__ import annotations

import contextlib
import threading

import zmq


class Bell:
    """Two connected in-process sockets: `socket` belongs to the thread that is woken."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._rope: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        address = f"inproc://bell-{id(self)}"
        self.socket.bind(address)
        self._rope.connect(address)
        self._lock = threading.Lock()

    def ring(self) -> None:
        """Wake the thread; never waits. Harmless when it rings already, or when the thread has ended."""
        with self._lock, contextlib.suppress(zmq.Again):
            if not self._rope.closed:
                self._rope.send(b"", zmq.NOBLOCK)

    def silence(self) -> None:
        """Forget all rings so far (the woken thread)."""
        while self.socket.poll(0):
            self.socket.recv()

    def close_socket(self) -> None:
        """The woken thread's end."""
        self.socket.close(linger=0)

    def close(self) -> None:
        """Everybody else's end."""
        with self._lock:
            self._rope.close(linger=0)
