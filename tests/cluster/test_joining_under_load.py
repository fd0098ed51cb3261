"""A third host joins while a client on a fourth one streams; the plan changes; later the host drains and leaves. No text changes.

Ray, pairing, serving and the follower together, each host a network namespace. The machines' figures are written by hand: they
share this machine's cores, and measured they would rightly say that a third host brings nothing.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.bench.lab import Host, Lab
from shardwise.deploy import launch_local
from shardwise.server.access import new_key
from tests.cluster.keep_asking import NUM_TOKENS
from tests.cluster.test_follower import LINKS, NODE
from tests.cluster.test_three_hosts import GIB, PROMPT, ThreeHosts
from tests.cluster.waiting import is_gone, wait_until
from tests.needs import needs_lab

pytestmark = [
    pytest.mark.netns,
    pytest.mark.soak,
    pytest.mark.timeout(400),
    needs_lab,
]
HOME = NODE.format("desk", 5, 0.05) + NODE.format("nas", 5, 0.05) + NODE.format("pi", 50, 0.5) + LINKS


@pytest.fixture
def home(tmp_path: Path) -> Iterator[ThreeHosts]:
    names = ("desk", "nas", "pi", "client")
    with Lab([Host.on("ethernet_1g", name, memory_bytes=2 * GIB) for name in names]) as lab:
        home = ThreeHosts(tmp_path, lab)
        try:
            home.paste("nas", home.run("desk", "cluster", "up", "--name", "desk")["join"], "--name", "nas")
            yield home
            pids = [pid for host in ("desk", "nas") for pid in home.pids(host)]
            home.run("desk", "cluster", "down")
            for pid in pids:
                wait_until(lambda pid=pid: is_gone(pid), 20, f"{pid} is gone after down")
        finally:
            home.end()


def picture(home: ThreeHosts, url: str, key: str) -> Any:
    """What the dashboard shows."""
    request = f"r.Request({url + '/api/status'!r}, headers={{'Authorization': 'Bearer {key}'}})"
    return json.loads(home.python("client", "-c", f"import urllib.request as r; print(r.urlopen({request}).read().decode())"))


def test_a_host_joins_and_leaves_while_a_client_streams(home: ThreeHosts) -> None:
    key_file, end_file, cluster_file = home.folder / "keys.json", home.folder / "end", home.folder / "home.toml"
    key, url = new_key(key_file, "client"), f"http://{home.lab.address('desk')}:8000"
    cluster_file.write_text(HOME)
    log = home.folder / "serve.log"
    split = ["--nodes", "desk,nas", "--cluster", str(cluster_file), "--auto", "--ctx", "512", "--deterministic"]
    serving = ["serve", "sample", *split, "--host", home.lab.address("desk"), "--api-key-file", str(key_file), "--no-access-log"]
    with log.open("w") as out, home.popen("desk", "-m", "shardwise.cli", *serving, stderr=out) as server:
        try:
            wait_until(lambda: "ready: " in log.read_text() or server.poll() is not None, 60, "it serves")
            asking = [url, key, PROMPT, str(end_file)]
            with home.popen("client", "-m", "tests.cluster.keep_asking", *asking, stdout=subprocess.PIPE) as client:
                line = home.run("desk", "cluster", "invite")["join"]
                home.paste("pi", line, "--name", "pi")
                wait_until(lambda: "moved to pi" in log.read_text(), 60, "the new host serves")
                shown = picture(home, url, key)
                assert any("moving: another plan with pi" in event["text"] for event in shown["events"])
                assert {node["name"]: 0 < node["capacity_bytes"] < 2 * GIB for node in shown["nodes"]} == {"pi": True}
                left = home.run("pi", "cluster", "leave", "--drain", "--wait", "60")
                assert left == {"left": True, "workers_ended": 0}
                end_file.touch()
                answers = json.loads(client.communicate(timeout=60)[0])
                assert client.returncode == 0
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=40)
            print(log.read_text())
    assert "would take" in log.read_text()
    assert "nothing runs on 'pi' any more" in log.read_text()
    with launch_local("sample", num_stages=1, context_tokens=512, deterministic=True) as alone:
        wanted = "".join(token.text for token in alone.generate(PROMPT, max_tokens=NUM_TOKENS))
    assert [answer["text"] for answer in answers] == [wanted] * len(answers)
    print(f"{len(answers)} answers, longest pause {max(answer['longest_s'] for answer in answers):.2f} s")
