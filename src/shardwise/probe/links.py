"""Links through the real transport: an echo on one side, pings and bulk steps from the other.

Small steps of the size of a decode step and pings flow over one channel with the real codec, handshake and encryption;
answers come back on the same connection. One-way jitter needs no common clock: a constant offset does not change how
far percentiles are apart. **Fails with** `ReplyTimeout`, `PeerClosed`, `CompatibilityError`. **Called by** the worker.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import zmq

from shardwise.clock import Clock
from shardwise.errors import ReplyTimeout, ShardwiseError
from shardwise.machines.profile import LinkProfile
from shardwise.probe.link_task import LinkReport, LinkSettings, LinkTarget, Percentiles
from shardwise.probe.statistics import measurement, percentile
from shardwise.transport.channel import Inbox, Outbox
from shardwise.transport.handshake import Hello
from shardwise.transport.messages import Ping, Pong, Segment, Step
from shardwise.transport.security import NodeKeys

_BULK_PART_BYTES = 256 * 1024
_BULK_WINDOW = 8  # parts on their way
_TIMEOUT_S = 10.0
METHOD = "steps through the transport"


def probe_hello(name: str) -> Hello:
    """All probes of one version understand each other; nothing else does."""
    nothing: dict[str, Any] = dict.fromkeys(
        ("manifest_digest", "revision_digest", "tokenizer_digest", "quantization_digest", "quantization", "backend"), "probe"
    )
    return Hello(
        deployment="shardwise probe", epoch=1, layers=(), wire_dtype="f32", context_tokens=0, kv_type="", node=name, **nothing
    )


class Echo:
    """Answers pings on every connection until `close`; what is not a ping is only received."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, name: str, keys: NodeKeys, clock: Clock) -> None:
        self._stop = threading.Event()
        self._clock = clock
        started: list[Inbox] = []
        failed: list[ShardwiseError] = []
        up = threading.Event()

        def run() -> None:
            try:
                inbox = Inbox(context, address, probe_hello(name), keys)
            except ShardwiseError as error:
                failed.append(error)
                up.set()
                return
            started.append(inbox)
            up.set()
            self._run(inbox)

        self._thread = threading.Thread(target=run, name="echo", daemon=True)
        self._thread.start()
        up.wait(_TIMEOUT_S)
        if failed:
            raise failed[0]
        self.address = started[0].address

    def _run(self, inbox: Inbox) -> None:
        while not self._stop.is_set():
            if not inbox.wait(0.1):
                continue
            envelope = inbox.receive()
            while envelope is not None:
                message = envelope.message
                if isinstance(message, Ping):
                    pong = Pong(stage=0, sequence=message.sequence, sent_s=message.sent_s, now_s=self._clock.now_s())
                    inbox.reply(envelope.peer, pong)
                envelope = inbox.receive()
        inbox.close()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)


class LinkProbe:
    """Measures the link to one echo."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], name: str, target: LinkTarget, keys: NodeKeys, clock: Clock
    ) -> None:
        self._context, self._name, self._target, self._keys, self._clock = context, name, target, keys, clock
        self._outbox = Outbox(context, target.address, probe_hello(name), keys, target.public)
        self._sequence = 0
        self._lost = 0

    def run(self, settings: LinkSettings, kind: str) -> LinkReport:
        """All parts, one after the other."""
        clock = self._clock
        self._ping(b"", timeout_s=_TIMEOUT_S)  # connected and welcomed
        payload = np.zeros(settings.message_bytes // 4, dtype=np.float32).tobytes()
        bare = self._pings(b"", settings.ping_s / 2, settings.ping_every_s)
        dense = self._pings(payload, settings.ping_s / 2, settings.ping_every_s)
        sparse = self._pings(payload, settings.sparse_s, settings.sparse_every_s) if settings.sparse_s else []
        rates = self._bulk(settings.bulk_s)
        loaded = self._loaded(payload, settings) if settings.loaded_s else []
        there = [now_s - sent_s for sent_s, now_s, _ in dense]
        back = [received_s - now_s for _, now_s, received_s in dense]
        rounds = [received_s - sent_s for sent_s, _, received_s in dense]
        bare_s = [received_s - sent_s for sent_s, _, received_s in bare]  # without a step: its bytes count by bandwidth
        jitter_s = percentile(there, 0.95) - percentile(there, 0.5)
        profile = LinkProfile(
            source=self._name,
            target=self._target.name,
            bytes_per_s=measurement(rates, METHOD, clock),
            latency_s=measurement([r / 2 for r in bare_s], "pings through the transport, half of the round trip", clock),
            jitter_p95_s=measurement([jitter_s], f"{METHOD}, one way, of {len(there)} pings", clock),
            kind=kind,
        )
        return LinkReport(
            profile=profile,
            round_trip_s=_percentiles(rounds),
            sparse_round_trip_s=_percentiles([r - s for s, _, r in sparse]) if sparse else None,
            loaded_round_trip_s=_percentiles([r - s for s, _, r in loaded]) if loaded else None,
            lost_pings=self._lost,
            clock_offset_s=(min(there) - min(back)) / 2,
        )

    def close(self) -> None:
        self._outbox.close()

    def _pings(self, payload: bytes, duration_s: float, every_s: float) -> list[tuple[float, float, float]]:
        """(sent, seen by the target in its clock, answered), at least five."""
        out: list[tuple[float, float, float]] = []
        end_s = self._clock.now_s() + duration_s
        while len(out) < 5 or self._clock.now_s() < end_s:
            try:
                out.append(self._ping(payload, timeout_s=2.0))
            except ReplyTimeout:
                self._lost += 1
                if self._lost > 20:
                    raise
            self._clock.sleep(every_s)
        return out

    def _ping(self, payload: bytes, timeout_s: float) -> tuple[float, float, float]:
        """A step of the size of decode, then the ping: the answer comes when both have been received and decoded."""
        self._sequence += 1
        sent_s = self._clock.now_s()
        if payload:
            self._outbox.send(_step(payload), payload)
        self._outbox.send(Ping(sequence=self._sequence, sent_s=sent_s))
        return self._pong(self._sequence, timeout_s)

    def _pong(self, sequence: int, timeout_s: float) -> tuple[float, float, float]:
        end_s = self._clock.now_s() + timeout_s
        while True:
            left_ms = round((end_s - self._clock.now_s()) * 1000)
            if left_ms <= 0 or not self._outbox.socket.poll(left_ms):
                raise ReplyTimeout(f"no echo from '{self._target.name}' within {timeout_s:g} s", where=self._target.address)
            message = self._outbox.receive()
            if isinstance(message, Pong) and message.sequence == sequence:
                return message.sent_s, message.now_s, self._clock.now_s()

    def _bulk(self, duration_s: float) -> list[float]:
        """Bytes per second over windows of several parts; a ping after each part is its receipt."""
        payload = bytes(_BULK_PART_BYTES)
        receipts: list[float] = []
        first = self._sequence + 1
        end_s = self._clock.now_s() + duration_s
        while self._clock.now_s() < end_s or len(receipts) < 2 * _BULK_WINDOW:
            self._send_part(payload)
            if self._sequence - first + 1 > _BULK_WINDOW:
                receipts.append(self._pong(first + len(receipts), _TIMEOUT_S)[2])
        while first + len(receipts) <= self._sequence:
            receipts.append(self._pong(first + len(receipts), _TIMEOUT_S)[2])
        steps = range(_BULK_WINDOW, len(receipts), _BULK_WINDOW)
        return [_BULK_WINDOW * _BULK_PART_BYTES / max(1e-9, receipts[i] - receipts[i - _BULK_WINDOW]) for i in steps]

    def _send_part(self, payload: bytes) -> None:
        self._sequence += 1
        self._outbox.send(_step(payload), payload)
        self._outbox.send(Ping(sequence=self._sequence, sent_s=self._clock.now_s()))

    def _loaded(self, payload: bytes, settings: LinkSettings) -> list[tuple[float, float, float]]:
        """Pings while another connection sends all it can to the same target."""
        stop = threading.Event()

        def pump() -> None:
            other = LinkProbe(self._context, self._name, self._target, self._keys, self._clock)
            try:
                while not stop.is_set():
                    other._bulk(0.1)
            finally:
                other.close()

        thread = threading.Thread(target=pump, name="load", daemon=True)
        thread.start()
        try:
            return self._pings(payload, settings.loaded_s, settings.ping_every_s)
        finally:
            stop.set()
            thread.join(timeout=2 * _TIMEOUT_S)


def _step(payload: bytes) -> Step:
    segment = Segment(session=1, epoch=1, position=0, num_tokens=1, sample=False)
    return Step(segments=(segment,), dtype="f32", hidden=len(payload) // 4, sent_s=0.0)


def _percentiles(samples: list[float]) -> Percentiles:
    return Percentiles(p50=percentile(samples, 0.5), p95=percentile(samples, 0.95), p99=percentile(samples, 0.99), n=len(samples))


def link_kind(card: str, latency_s: float, *, same_machine: bool) -> str:
    """ethernet | wifi | loopback | wan, from the card's name and the latency."""
    if same_machine:
        return "loopback"
    if card.startswith(("wl", "wifi", "ath")):
        return "wifi"
    return "wan" if latency_s > 8e-3 else "ethernet"
