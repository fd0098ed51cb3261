"""One small cluster for the whole folder: Ray takes ten seconds to start."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import PORTS, Hosts
from tests.cluster.waiting import is_gone, wait_until


def is_free(port: int) -> bool:
    """Whether nothing listens there, on any address."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """A coordinator "desk" and a node "nas" on this machine; after `down` nothing is left of either."""
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        made = hosts.run("desk", "cluster", "up", "--name", "desk", "--port", str(PORTS["desk"]), "--memory", "1 GiB")
        hosts.paste("nas", made["join"], "--name", "nas", "--port", str(PORTS["nas"]), "--memory", "2 GiB")
        yield hosts
        pids = hosts.pids("desk") + hosts.pids("nas")
        folders = [Path(hosts.state(host).ray_folder.read_text()) for host in ("desk", "nas")]
        hosts.run("desk", "cluster", "down")
        for pid in pids:
            wait_until(lambda pid=pid: is_gone(pid), 20, f"{pid} is gone after down")
        assert not hosts.state("desk").cluster.exists()
        wait_until(lambda: not hosts.state("nas").cluster.exists(), 20, "the node heard of it")
        assert not any(folder.exists() for folder in folders)
        for host in ("desk", "nas"):
            assert [path.name for path in hosts.state(host).folder.iterdir()] == ["node.key"]
            for port in (PORTS[host], PORTS[host] + 1, PORTS[host] + 2, PORTS[host] + 3):
                assert is_free(port), port
    finally:
        hosts.end()
