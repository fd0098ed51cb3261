"""The process behind the relay hosts' network cards: reads frames from TAP devices, asks `Switch`, writes them out.

Configuration is the first line of standard input (JSON, `WireConfig`); each further line is a `WireOrder`, answered
by a line `ok`. End of input ends the process.

**Promises** A frame leaves within about 0.1 ms of the time the links' shapes give (it asks for real-time priority).
**Fails when** a TAP device cannot be made; frames are dropped when a queue is full, as a real switch does.
**Called by** `Lab`, as `python -m shardwise.bench.lab.wire`, inside the switch's namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys

from shardwise.bench.lab.orders import WireConfig, WireOrder
from shardwise.bench.lab.switch import TRUNK, Switch
from shardwise.bench.lab.system import enter_netns, real_time
from shardwise.clock import SystemClock
from shardwise.records import from_json

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x04  # checksum, TCP segments over IPv4 and IPv6: large segments pass as one frame
_VNET_HEADER_BYTES = 10
_MAX_FRAME_BYTES = 65_536 + 64
_READS_AT_ONCE = 64


def open_tap(netns: str, device: str) -> int:
    """A TAP device in a namespace, with large-segment offload; returns its file descriptor."""
    enter_netns(netns)
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", _VNET_HEADER_BYTES))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
    return fd


class Wire:
    """Owns the file descriptors; `run` returns when standard input ends."""

    def __init__(self, config: WireConfig) -> None:
        self._clock = SystemClock()
        self._overhead_s = config.overhead_s
        relayed = [host for host in config.hosts if host.netns]
        self._fds = {host.name: open_tap(host.netns, "eth0") for host in relayed}
        self._fds[TRUNK] = open_tap(config.switch_netns, config.trunk_device)
        self._names = {fd: name for name, fd in self._fds.items()}
        ports = {
            bytes.fromhex(host.mac.replace(":", "")): (host.name, host.name if host.netns else TRUNK) for host in config.hosts
        }
        self.switch = Switch(ports, seed=config.seed, shaped_operator=config.shaped_operator)
        for host in relayed:
            self.switch.set_link((host.name, "up"), host.up)
            self.switch.set_link((host.name, "down"), host.down)
        for source, target, shape in config.links:
            self.switch.set_link((source, target), shape)

    def run(self) -> None:
        stdin = sys.stdin.fileno()
        fds = [*self._names, stdin]
        next_s: float | None = None
        while True:
            wait_s = None if next_s is None else max(0.0, next_s - self._overhead_s - self._clock.now_s())
            ready, _, _ = select.select(fds, [], [], wait_s)
            for fd in ready:
                if fd == stdin:
                    line = sys.stdin.buffer.readline()
                    if not line:
                        return
                    self._obey(from_json(line, WireOrder))
                else:
                    self._read(fd)
            next_s = self.switch.due(self._clock.now_s() + self._overhead_s, self._write)

    def _read(self, fd: int) -> None:
        name = self._names[fd]
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS_AT_ONCE):
                frame = os.read(fd, _MAX_FRAME_BYTES)
                self.switch.take(self._clock.now_s(), name, frame, _VNET_HEADER_BYTES)

    def _write(self, port: str, frame: bytes) -> None:
        try:
            os.write(self._fds[port], frame)
        except (BlockingIOError, OSError):  # the host's card is down or its queue is full: the frame is lost
            self.switch.num_dropped += 1

    def _obey(self, order: WireOrder) -> None:
        if order.op == "link":
            self.switch.set_link(order.key, order.shape)
        elif order.op in ("cut", "restore"):
            self.switch.set_cut(order.key[0], order.op == "cut")
        print(f"ok {self.switch.num_frames} {self.switch.num_dropped}", flush=True)


def main() -> None:
    """Read the configuration, make the devices, say `ready`, switch."""
    config = from_json(sys.stdin.buffer.readline(), WireConfig, where="standard input")
    wire = Wire(config)
    enter_netns(config.switch_netns)
    real_time()
    print("ready", flush=True)
    wire.run()


if __name__ == "__main__":
    main()
