"""A Ray that somebody else started: `up --ray-address`, its raylets are the nodes, and `down` leaves it alone."""

from __future__ import annotations

import secrets

import psutil
import pytest

from shardwise.cluster import lifecycle
from shardwise.cluster.interfaces import choose_address
from shardwise.cluster.ray_engine import RaySecurity
from shardwise.cluster.ray_engine.raylet import Raylet, RayletSettings, RayPorts
from shardwise.cluster.state import StateDir
from shardwise.errors import AuthenticationFailed
from tests.cluster.engine_contract import tiny
from tests.cluster.ports import free_port


@pytest.mark.soak
def test_a_foreign_ray_is_used_and_left_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    token, port, address = secrets.token_hex(32), free_port(), choose_address()
    settings = RayletSettings(name="gpubox", identity="somebody", own_ip=address, ports=RayPorts(head=port), memory_bytes=2**30)
    foreign = Raylet(settings, RaySecurity(token=token))
    state = StateDir(tmp_path_factory.mktemp("attached"))
    try:
        foreign.wait_started(120)
        head = f"{address}:{port}"
        options = lifecycle.UpOptions(name="desk", port=17300, ray_address=head, ray_token=token)
        lifecycle.up(state, options)
        assert [n.member.state for n in lifecycle.nodes(state).nodes] == ["ready"]
        engine = lifecycle.attach(state)
        try:
            assert engine.nodes() == ["gpubox"]
            engine.start(tiny("w"))
            assert engine.status("w").node == "gpubox"
        finally:
            engine.close()
        lifecycle.down(state)
        assert foreign.alive()
        assert psutil.pid_exists(foreign.pid)
        wrong = lifecycle.UpOptions(name="desk", port=17300, ray_address=head, ray_token="0" * 64)
        with pytest.raises(AuthenticationFailed):  # at once, not only when somebody attaches
            lifecycle.up(state, wrong)
        assert not lifecycle.daemon_runs(state)
    finally:
        foreign.stop()
