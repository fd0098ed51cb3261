"""A worker's heartbeat: a thread with a connection of its own, so that it beats while the worker computes a long step, and
stops with the whole process when the machine sleeps, the process is stopped, or the network is cut.
"""

from __future__ import annotations

import contextlib
import threading

import zmq

from shardwise.clock import Clock
from shardwise.errors import CompatibilityError
from shardwise.stage.config import WorkerConfig
from shardwise.transport.channel import Outbox
from shardwise.transport.handshake import Hello
from shardwise.transport.messages import Beat
from shardwise.transport.security.keys import NodeKeys

INTERVAL_S = 0.25


class Heart:
    """Beats until `stop`."""

    def __init__(self, config: WorkerConfig, context: zmq.Context[zmq.Socket[bytes]], clock: Clock) -> None:
        self._config, self._context, self._clock = config, context, clock
        self._hello = config.hello
        self._greet_again = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()

    def set_hello(self, hello: Hello) -> None:
        """The deployment has a new epoch: say hello again before the next beat."""
        self._hello, self._greet_again = hello, True

    def _run(self) -> None:
        keys = NodeKeys(self._config.public_key, self._config.secret_key) if self._config.public_key else None
        outbox = Outbox(self._context, self._config.driver_address, self._hello, keys, self._config.driver_key)
        sequence = 0
        while not self._stopped.wait(INTERVAL_S):
            if self._greet_again:
                self._greet_again = False
                outbox.greet(self._hello)
            with contextlib.suppress(CompatibilityError):  # not of the driver's epoch: it is told of the new one, or ends
                outbox.receive()
            sequence += 1
            outbox.send(Beat(stage=self._config.stage, sequence=sequence, now_s=self._clock.now_s()), required=False)
        outbox.close(linger_ms=0)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=2)
