"""What the link probe says and measures: records."""

from __future__ import annotations

from shardwise.machines.profile import LinkProfile
from shardwise.records import Record


class LinkSettings(Record):
    """How long to look at one directed link."""

    ping_s: float = 2.0  # of pings while idle
    ping_every_s: float = 0.02  # as often as a slow decode sends
    sparse_s: float = 1.5  # of pings with long pauses between: a radio that sleeps shows here
    sparse_every_s: float = 0.15
    bulk_s: float = 1.5
    loaded_s: float = 1.0  # of pings beside a bulk transfer
    message_bytes: int = 4096  # of a ping: what decode sends

    @classmethod
    def quick(cls) -> LinkSettings:
        """Under a second."""
        return cls(ping_s=0.4, ping_every_s=0.01, sparse_s=0.0, bulk_s=0.4, loaded_s=0.0)


class LinkTarget(Record):
    """The echo at the other end."""

    name: str
    address: str  # tcp://host:port
    public: str  # its key


class Percentiles(Record):
    """Seconds."""

    p50: float
    p95: float
    p99: float
    n: int


class LinkReport(Record):
    """One directed link: the profile, and what it was made of."""

    profile: LinkProfile
    round_trip_s: Percentiles
    sparse_round_trip_s: Percentiles | None = None
    loaded_round_trip_s: Percentiles | None = None
    lost_pings: int = 0
    clock_offset_s: float = 0.0  # the target's monotonic clock minus ours: the halves of the best round trip are equal
