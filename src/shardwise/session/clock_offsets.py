"""How the stages' clocks differ from the driver's: by the shortest of several round trips (Cristian's algorithm)."""

from __future__ import annotations

from shardwise.transport.messages import Pong

ROUNDS = 8


class ClockOffsets:
    """Offsets by stage, in seconds: the stage's clock minus ours."""

    def __init__(self) -> None:
        self.offset_s: dict[int, float] = {}
        self._best_trip_s: dict[int, float] = {}

    def take(self, pong: Pong, now_s: float) -> bool:
        """Learn from an answer; whether another round is worth it."""
        trip_s = now_s - pong.sent_s
        if trip_s < self._best_trip_s.get(pong.stage, float("inf")):
            self._best_trip_s[pong.stage] = trip_s
            self.offset_s[pong.stage] = pong.now_s - (pong.sent_s + now_s) / 2
        return pong.sequence < ROUNDS

    @property
    def error_s(self) -> dict[int, float]:
        """Stage -> how far its offset can be off: half the shortest round trip."""
        return {stage: trip_s / 2 for stage, trip_s in self._best_trip_s.items()}
