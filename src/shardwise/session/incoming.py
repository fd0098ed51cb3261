"""The stages of a new split that come up beside the ones that serve.

New workers -- Ready --> a second set of `Peers` -- Connect --> Connected from all -> the driver switches over.

They have an inbox of their own, so nothing of the old split can meet anything of the new one. **Fails when** a new worker
reports that it cannot serve (`failure`). Belongs to the driver's thread; other threads may read the attributes.
"""

from __future__ import annotations

from shardwise.clock import Clock
from shardwise.errors import ShardwiseError, from_record
from shardwise.session.peers import Peers
from shardwise.transport.messages import Connected, Failure, Preparing, Ready


class Incoming:
    """See the module."""

    def __init__(self, peers: Peers, clock: Clock) -> None:
        self.peers = peers
        self.connected: set[int] = set()
        self.failure: ShardwiseError | None = None
        self.heard_s: dict[int, float] = {}
        self.moved_bytes: dict[int, int] = {}  # stage -> what it has fetched and verified so far
        self._clock = clock

    @property
    def complete(self) -> bool:
        """Whether every new stage has its neighbours."""
        return len(self.connected) == self.peers.num_stages

    def serve(self) -> bool:
        """Handle what has arrived; whether anything had."""
        self.peers.wait(0)
        for refusal in [*self.peers.read_replies(), *self.peers.read_refusals()]:
            self.failure = self.failure or refusal
        any_came = False
        while (envelope := self.peers.receive()) is not None:
            any_came = True
            self.heard_s[envelope.stage] = self._clock.now_s()
            match envelope.message:
                case Ready() as ready:
                    self.peers.add(ready)
                    self.connected.discard(ready.stage)
                    if self.peers.complete:
                        self.peers.connect_ring()
                case Connected(stage=stage):
                    self.connected.add(stage)
                case Preparing() as preparing:
                    self.moved_bytes[preparing.stage] = preparing.done_bytes
                case Failure() as f if f.session == 0:
                    self.failure = self.failure or from_record(f.kind, f.message, f.where, f.hint, dict(f.details))
                case _:
                    pass  # hearts beat already
        return any_came
