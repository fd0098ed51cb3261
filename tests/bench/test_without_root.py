"""The same scenarios for a user without root: relays on loopback instead of namespaces. Root is really given up."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.bench.lab import Host, LoopbackLab
from shardwise.bench.parts import account
from shardwise.bench.result import ResultFile, TrialResult
from shardwise.bench.store import load_result
from tests.needs import IN_CI

SRC = Path(__file__).resolve().parents[2] / "src"
DELAY_S = 5e-3
HOME = """
name = "no root"
title = "Three hosts"
repetitions = 1
context_tokens = 256
[[network]]
name = "near"
hosts = [{ name = "desktop" }, { name = "nas" }]
links = [{ from = "desktop", to = "nas", rate = "10 Gbit/s" }]
[[network]]
name = "far"
hosts = [{ name = "desktop", link = "ethernet_1g" }, { name = "nas", link = "wifi_good", speed = 0.5, brakes = true }]
links = [{ from = "desktop", to = "nas", delay = "5 ms" }, { from = "nas", to = "desktop", delay = "5 ms" }]
[[load]]
name = "short"
prompt_tokens = 8
output_tokens = 32
[[split]]
name = "two"
hosts = ["desktop", "nas"]
layers = [20, 10]
[[fault]]
name = "cable"
steps = [{ kind = "cut", target = "nas", at_token = 6, duration = "400 ms" }]
[[fault]]
name = "slow"
steps = [{ kind = "slow_node", target = "nas", at_token = 6, duration = "10 s", cpu_share = 0.25 }]
[[measure]]
networks = ["near", "far"]
splits = ["two"]
loads = ["short"]
[[measure]]
networks = ["far"]
splits = ["two"]
loads = ["short"]
faults = ["cable", "slow"]
"""


# A child of its own as well: what `setpriv` starts may still be allowed more than its children.
_TRY = "import os, shardwise, subprocess, sys; subprocess.run([sys.executable, '-V'], check=True); sys.exit(os.geteuid() == 0)"


def powerless() -> list[str]:
    """What to put before a command so that it runs without root, and can still read this checkout."""
    if os.geteuid() != 0:
        return []
    ways = [["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"], ["unshare", "--user"]]
    for way in ways:
        if shutil.which(way[0]):
            test = [*way, sys.executable, "-c", _TRY]
            if subprocess.run(test, capture_output=True, env=dict(os.environ, PYTHONPATH=str(SRC)), cwd="/").returncode == 0:
                return way
    if IN_CI:
        pytest.fail("nobody but root can read this checkout")
    pytest.skip("nobody but root can read this checkout")


@pytest.fixture(scope="module")
def result() -> Iterator[ResultFile]:
    """The scenario, run by somebody without rights."""
    way = powerless()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        file = Path(folder) / "home.toml"
        file.write_text(HOME)
        env = dict(os.environ, HOME=folder, XDG_CACHE_HOME=folder, TMPDIR=folder, PYTHONPATH=str(SRC))
        command = [sys.executable, "-m", "shardwise", "bench", str(file), "--out", f"{folder}/run"]
        done = subprocess.run([*way, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-2000:]
        assert (Path(folder) / "run" / "report.html").exists()
        yield load_result(Path(folder) / "run")


def only(result: ResultFile, network: str, *faults: str) -> TrialResult:
    found = [trial for trial in result.trials if trial.case.network == network and trial.case.faults == faults]
    assert [trial.error for trial in found] == [None]
    return found[0]


def test_every_trial_is_measured_and_the_result_says_how(result: ResultFile) -> None:
    assert result.environment.lab == "relays"
    assert [trial.error for trial in result.trials] == [None] * 4
    assert len({request.token_digest for trial in result.trials for request in trial.requests}) == 1


def test_links_have_their_delay_and_hosts_their_speed(result: ResultFile) -> None:
    near, far = only(result, "near"), only(result, "far")
    for slow, fast in zip(far.boundaries, near.boundaries, strict=True):
        assert DELAY_S < slow.transfer_s["p50"] < 3 * DELAY_S
        assert fast.transfer_s["p50"] < DELAY_S / 2
    (desktop, nas), (_, full) = far.stages, near.stages
    assert desktop.node == "desktop"
    assert 1.5 < nas.compute_s["decode_p50"] / full.compute_s["decode_p50"] < 3.0


def test_a_cable_out_holds_the_tokens_up_and_loses_none(result: ResultFile) -> None:
    cut = only(result, "far", "cable")
    assert cut.requests[0].num_tokens == 32
    assert max(cut.requests[0].inter_token_s) > 0.3
    assert any("cut" in event.what for event in cut.events)


def test_a_host_that_slows_down_meanwhile_shows(result: ResultFile) -> None:
    parts = only(result, "far", "slow").parts
    (nas_s,) = (part.seconds for part in parts if (part.kind, part.where) == ("compute", "nas"))
    assert statistics.median(nas_s[-12:]) > 1.5 * statistics.median(nas_s[:3])  # half of its speed, by the fault


def test_the_parts_of_a_token_are_its_time(result: ResultFile) -> None:
    found = account(only(result, "far"))
    assert abs(found.gap) < 0.1  # 0.05 is shown by `bench home` on a quiet machine


def test_connections_of_a_host_share_its_link() -> None:
    with LoopbackLab([Host.on("ethernet_100m", "a"), Host(name="b"), Host(name="c")]) as lab:
        one, other = lab._path("a", "b"), lab._path("a", "c")
        alone_s = one.deliver_stream(0.0, 1_000_000)
        assert other.deliver_stream(0.0, 1_000_000) > 1.8 * alone_s
