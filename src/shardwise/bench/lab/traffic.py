"""Bulk transfers and probes inside a lab's hosts: `python -m shardwise.bench.lab.traffic ROLE ADDRESS [PORT ...]`.

    sink ADDRESS                        take whatever comes; prints its port first
    pump ADDRESS PORT                   send as fast as it goes, until killed
    meter ADDRESS PORT SECONDS          send for a while; prints payload bytes per second as the sink's end saw it
    echo ADDRESS                        note when datagrams arrive; prints its port, then one JSON list of seconds
    ping ADDRESS PORT NUM SECONDS       NUM datagrams, one every SECONDS

One-way delays are true because all hosts share the machine's clock.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from collections.abc import Callable

from shardwise.bench.lab.system import real_time
from shardwise.clock import SystemClock

_CLOCK = SystemClock()
_CHUNK = bytes(256 * 1024)
_SO_TIMESTAMPNS = 35  # Linux: the module `socket` does not name it
_STAMP = struct.Struct("!Id")
_DEADLINE_S = 60.0


def _listen(address: str) -> socket.socket:
    server = socket.create_server((address, 0))
    server.settimeout(_DEADLINE_S)
    print(server.getsockname()[1], flush=True)
    return server


def sink(address: str) -> None:
    """Take whatever comes, from several senders; answers a closed sending side with `bytes seconds`."""
    server = _listen(address)
    server.settimeout(None)
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_drain, args=(connection,), daemon=True).start()


def _drain(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    total, first_s, last_s = 0, 0.0, 0.0
    with connection:
        while data := connection.recv(1 << 20):
            last_s = _CLOCK.now_s()
            first_s = first_s or last_s
            total += len(data)
        connection.sendall(f"{total} {last_s - first_s}".encode())


def pump(address: str, port: str) -> None:
    with socket.create_connection((address, int(port)), timeout=_DEADLINE_S) as connection:
        connection.settimeout(None)
        while True:
            connection.sendall(_CHUNK)


def meter(address: str, port: str, seconds: str) -> None:
    with socket.create_connection((address, int(port)), timeout=_DEADLINE_S) as connection:
        end_s = _CLOCK.now_s() + float(seconds)
        while _CLOCK.now_s() < end_s:
            connection.sendall(_CHUNK[: 64 * 1024])
        connection.shutdown(socket.SHUT_WR)
        total, took_s = connection.recv(100).split()
        print(json.dumps({"bytes_per_s": int(total) / float(took_s), "num_bytes": int(total)}))


def echo(address: str, num: str) -> None:
    """Receive up to `num` datagrams; ends a second after the last. Arrival is the kernel's own time stamp."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        sock.bind((address, 0))
        print(sock.getsockname()[1], flush=True)
        sock.settimeout(_DEADLINE_S)
        delays_s: dict[int, float] = {}
        try:
            for _ in range(int(num)):
                data, ancillary, _, _ = sock.recvmsg(2048, 64)
                seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
                number, sent_s = _STAMP.unpack_from(data)
                delays_s[number] = seconds - sent_s + nanoseconds * 1e-9
                sock.settimeout(1.0)
        except TimeoutError:
            pass
        print(json.dumps([delays_s[number] for number in sorted(delays_s)]), flush=True)


def ping(address: str, port: str, num: str, every_s: str) -> None:
    real_time()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        next_s = _CLOCK.now_s()
        for number in range(int(num)):
            _CLOCK.sleep(next_s - _CLOCK.now_s())
            sock.sendto(_STAMP.pack(number, _CLOCK.wall_s()), (address, int(port)))
            next_s += float(every_s)


ROLES: dict[str, Callable[..., None]] = {
    "sink": sink, "pump": pump, "meter": meter, "echo": echo, "ping": ping,
}  # fmt: skip

if __name__ == "__main__":
    try:
        ROLES[sys.argv[1]](*sys.argv[2:])
    except (BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        sys.exit(0)
