"""What a link does to bytes, as data (`LinkShape`) and as a pure rule (`LinkModel`). No socket, no clock.

A relay asks the model when the bytes it just took in should come out at the other end; the model answers
with a time, or with `None` for a lost packet. The same rule serves the packet relay of the virtual home
(`bench.lab.wire`) and the TCP relay on loopback (`transport.relay`), and its distributions are what the
lab's checks compare measurements with.
"""

from __future__ import annotations

import math
import random
from typing import Literal

from shardwise.errors import UsageError
from shardwise.records import Record

JitterKind = Literal["none", "uniform", "exponential", "lognormal"]
RETRANSMIT_S = 0.2  # Linux's smallest TCP retransmission time-out (TCP_RTO_MIN)
PAYLOAD_SHARE = 1448 / 1514  # TCP payload of a full Ethernet frame: 1500 - 20 (IP) - 32 (TCP with time stamps)


class LinkShape(Record):
    """One direction of a link. Zero means "not there" in every field.

    `bytes_per_s` is what a long TCP transfer carries as payload, not the line rate (1 Gbit Ethernet: 941 Mbit/s).
    `delay_s` is one way and constant; jitter comes on top and is never negative:

    - `uniform`: on [0, `jitter_s`];
    - `exponential`: with mean `jitter_s`;
    - `lognormal`: median `jitter_s`, sigma `jitter_sigma` of the logarithm (long tails, as measured on Wi-Fi).

    Packets never overtake each other. Losses come in bursts (a two-state Gilbert model): each packet starts one
    with probability `loss`, a burst takes `loss_burst_packets` packets on average. Power saving: after
    `doze_after_s` without traffic the radio sleeps and wakes on multiples of `doze_period_s` only.
    """

    bytes_per_s: float = 0.0
    delay_s: float = 0.0
    jitter_kind: JitterKind = "none"
    jitter_s: float = 0.0
    jitter_sigma: float = 0.5
    loss: float = 0.0
    loss_burst_packets: float = 1.0
    doze_after_s: float = 0.0
    doze_period_s: float = 0.0
    queue_bytes: int = 0  # what the queue in front of a slow link holds; 0 = a quarter of a second, at least 64 KiB

    def __post_init__(self) -> None:
        for field in ("bytes_per_s", "delay_s", "jitter_s", "jitter_sigma", "doze_after_s", "doze_period_s", "queue_bytes"):
            value = getattr(self, field)
            if not math.isfinite(value) or value < 0:
                raise UsageError(f"{field} = {value} is not a finite, non-negative number", where="LinkShape", field=field)
        if not 0 <= self.loss < 1:
            raise UsageError(f"loss = {self.loss} is not a probability", where="LinkShape", hint="0 <= loss < 1", field="loss")
        if self.loss_burst_packets < 1:
            raise UsageError("loss_burst_packets is below 1", where="LinkShape", field="loss_burst_packets")

    @property
    def only_rate(self) -> bool:
        """Whether a token bucket in the kernel can do it all."""
        return not (self.delay_s or self.jitters or self.loss or self.dozes)

    @property
    def jitters(self) -> bool:
        return self.jitter_kind != "none" and self.jitter_s > 0

    @property
    def dozes(self) -> bool:
        return self.doze_period_s > 0

    def queue_limit_bytes(self) -> int:
        """How much may wait before packets are dropped."""
        return self.queue_bytes or max(64 * 1024, int(self.bytes_per_s / 4))

    def jitter_cdf(self, extra_s: float) -> float:
        """Probability that the jitter of one packet is at most `extra_s`."""
        if not self.jitters:
            return 1.0 if extra_s >= 0 else 0.0
        if extra_s <= 0:
            return 0.0
        if self.jitter_kind == "uniform":
            return min(1.0, extra_s / self.jitter_s)
        if self.jitter_kind == "exponential":
            return 1.0 - math.exp(-extra_s / self.jitter_s)
        return 0.5 * (1.0 + math.erf(math.log(extra_s / self.jitter_s) / (self.jitter_sigma * math.sqrt(2.0))))

    def jitter_quantile_s(self, share: float) -> float:
        """The inverse of `jitter_cdf`, 0 < share < 1, by bisection (1e-9 s)."""
        if not self.jitters:
            return 0.0
        low, high = 0.0, self.jitter_s
        while self.jitter_cdf(high) < share:
            high *= 2
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (middle, high) if self.jitter_cdf(middle) < share else (low, middle)
        return high

    def plus(self, other: LinkShape) -> LinkShape:
        """Two links one after the other: the smaller rate, the sum of the delays, the rougher of each other trait."""
        rates = [shape.bytes_per_s for shape in (self, other) if shape.bytes_per_s]
        rough = self if self.jitter_quantile_s(0.95) >= other.jitter_quantile_s(0.95) else other
        lossy = self if self.loss >= other.loss else other
        dozy = self if self.doze_period_s >= other.doze_period_s else other
        return LinkShape(
            bytes_per_s=min(rates, default=0.0),
            delay_s=self.delay_s + other.delay_s,
            jitter_kind=rough.jitter_kind,
            jitter_s=rough.jitter_s,
            jitter_sigma=rough.jitter_sigma,
            loss=lossy.loss,
            loss_burst_packets=lossy.loss_burst_packets,
            doze_after_s=dozy.doze_after_s,
            doze_period_s=dozy.doze_period_s,
            queue_bytes=max(self.queue_bytes, other.queue_bytes),
        )


class LinkModel:
    """One direction of one link over time. Pure: the caller says what time it is; the same seed gives the same draws."""

    def __init__(self, shape: LinkShape, seed: int = 0) -> None:
        self.shape = shape
        self._random = random.Random(seed)
        self._free_s = -math.inf  # when the sender's side of the link is free again
        self._last_out_s = -math.inf
        self._last_active_s = -math.inf
        self._losing = False

    def deliver_packet(self, now_s: float, num_bytes: int) -> float | None:
        """When a packet handed over at `now_s` comes out; None if it is lost or the queue is full."""
        shape = self.shape
        start_s = max(now_s, self._free_s)
        if shape.bytes_per_s and (start_s - now_s) * shape.bytes_per_s > shape.queue_limit_bytes():
            return None
        if self._lost():
            return None
        return self._out(now_s, start_s, num_bytes)

    def deliver_stream(self, now_s: float, num_bytes: int) -> float:
        """The same for a piece of a TCP stream: a loss is a wait for the retransmission, doubling while it goes on."""
        stall_s, wait_s = 0.0, RETRANSMIT_S
        while self._lost():
            stall_s += wait_s
            wait_s = min(2 * wait_s, 120.0)
        start_s = max(now_s, self._free_s)
        return self._out(now_s, start_s, num_bytes, stall_s)

    def backlog_bytes(self, now_s: float) -> float:
        """What waits in front of the link."""
        return max(0.0, self._free_s - now_s) * self.shape.bytes_per_s if self.shape.bytes_per_s else 0.0

    def _out(self, now_s: float, start_s: float, num_bytes: int, stall_s: float = 0.0) -> float:
        shape = self.shape
        start_s = self._awake_s(now_s, start_s)
        sent_s = start_s + (num_bytes / shape.bytes_per_s if shape.bytes_per_s else 0.0)
        self._free_s = sent_s
        out_s = max(self._last_out_s, sent_s + shape.delay_s + self.jitter_s() + stall_s)
        self._last_out_s, self._last_active_s = out_s, start_s
        return out_s

    def jitter_s(self) -> float:
        """One draw."""
        shape = self.shape
        if not shape.jitters:
            return 0.0
        if shape.jitter_kind == "uniform":
            return self._random.uniform(0.0, shape.jitter_s)
        if shape.jitter_kind == "exponential":
            return self._random.expovariate(1.0 / shape.jitter_s)
        return shape.jitter_s * math.exp(shape.jitter_sigma * self._random.gauss(0.0, 1.0))

    def _awake_s(self, now_s: float, start_s: float) -> float:
        shape = self.shape
        if not shape.dozes or now_s - self._last_active_s <= shape.doze_after_s:
            return start_s
        return max(start_s, math.ceil(now_s / shape.doze_period_s) * shape.doze_period_s)

    def _lost(self) -> bool:
        shape = self.shape
        if not shape.loss:
            return False
        if self._losing:
            self._losing = self._random.random() >= 1.0 / shape.loss_burst_packets
        else:
            self._losing = self._random.random() < shape.loss
        return self._losing
