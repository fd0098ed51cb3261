"""Every command of docs/cluster.md runs, in its order, on three virtual hosts."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from shardwise.bench.lab import Host, Lab
from tests.cluster.hosts import Hosts
from tests.cluster.waiting import wait_until
from tests.needs import needs_lab

DOC = Path(__file__).parents[2] / "docs" / "cluster.md"
COMMAND = re.compile(r"^(desk|nas|pi)\$ (shardwise .+)$", re.MULTILINE)
INVITE = "swi1_..."
GIB = 2**30


def commands() -> list[tuple[str, str]]:
    """(host, command) in the order of the page."""
    return [(m[1], m[2]) for m in COMMAND.finditer(DOC.read_text())]


def test_the_page_names_every_cluster_command() -> None:
    text = DOC.read_text()
    for command in ("up", "invite", "join", "find", "nodes", "leave", "drain", "revoke", "down", "start", "recipe", "propose"):
        assert f"cluster {command}" in text, command
    assert len(commands()) > 15


@pytest.mark.soak
@pytest.mark.netns
@needs_lab
@pytest.mark.timeout(900)
def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    hosts = [Host.on("ethernet_1g", name, memory_bytes=3 * GIB) for name in ("desk", "nas", "pi")]
    invite = ""
    with Lab(hosts) as lab:
        home = Hosts(tmp_path, lab.prefix)
        try:
            for host, command in commands():
                words = shlex.split(command.replace(INVITE, invite))[1:]
                work = tmp_path / "work"
                work.mkdir(exist_ok=True)
                if words[0] == "serve":
                    _serve(home, host, words, work)
                    continue
                out = _run(home, host, words, work)
                found = re.search(r"swi1_\S+", out)
                invite = found[0] if found else invite
        finally:
            home.end()


def _run(home: Hosts, host: str, words: list[str], work: Path) -> str:
    process = home.popen(host, "-m", "shardwise.cli", *words, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, log = process.communicate(timeout=300)
    assert process.returncode == 0, f"{host}$ {' '.join(words)}\n{out}{log}{home.log(host)}"
    return out


def _serve(home: Hosts, host: str, words: list[str], work: Path) -> None:
    """Until it is ready, then Ctrl-C."""
    port = words[words.index("--port") + 1]
    code = f"import urllib.request as u; print(u.urlopen('http://127.0.0.1:{port}/health/ready').status)"
    with home.popen(host, "-m", "shardwise.cli", *words, cwd=work, stderr=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: "200" in _quiet(home, host, code), 180, "the server is ready")
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)


def _quiet(home: Hosts, host: str, code: str) -> str:
    process = home.popen(host, "-c", code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    out, _ = process.communicate(timeout=60)
    return out
