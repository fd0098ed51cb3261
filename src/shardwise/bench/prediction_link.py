"""One link of a virtual home through the real transport: `python -m shardwise.bench.prediction_link echo|ping`.

`echo ADDRESS KEY` prints where it listens and its key, and answers the owner of KEY until its standard input ends; `ping`
reads a `PingJob` from standard input and prints a `LinkReport`. **Fails when** the other side does not answer.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from shardwise.bench.deployment_runner import open_home
from shardwise.bench.lab import AnyLab
from shardwise.bench.scenario import Network
from shardwise.clock import SystemClock
from shardwise.errors import ConnectFailed
from shardwise.machines.profile import LinkProfile
from shardwise.probe.link_task import LinkReport, LinkSettings, LinkTarget
from shardwise.probe.links import Echo, LinkProbe, link_kind
from shardwise.records import Record, from_json, replace, to_json
from shardwise.transport.promptness import prompt_context
from shardwise.transport.security import AllowList, Authenticator, NodeKeys

_MODULE = "shardwise.bench.prediction_link"


class PingJob(Record):
    """What to measure, and how long."""

    target: LinkTarget
    settings: LinkSettings
    public: str
    secret: str


def measure_link(network: Network, settings: LinkSettings) -> LinkProfile:
    """The link between the first two hosts of a network, as stages of a deployment would see it."""
    with open_home(network, seed=1) as lab:
        here, there = network.hosts[0].name, network.hosts[1].name
        keys = NodeKeys.generate()
        with _echo(lab, there, keys.public) as target:
            if lab is not None:
                address, port = lab.route(here, there, int(target.address.rpartition(":")[2]))
                target = replace(target, address=f"tcp://{address}:{port}")
            job = PingJob(target=target, settings=settings, public=keys.public, secret=keys.secret)
            command = [*(lab.prefix(here) if lab else []), sys.executable, "-m", _MODULE, "ping"]
            done = subprocess.run(command, input=to_json(job), capture_output=True, timeout=60)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise ConnectFailed(f"the link of network '{network.name}' could not be measured: {last[0]}", where="bench")
    profile = from_json(done.stdout, LinkReport, where="ping").profile
    return replace(profile, source="", target="")


@contextlib.contextmanager
def _echo(lab: AnyLab | None, host: str, asker: str) -> Iterator[LinkTarget]:
    address = lab.address(host) if lab else "127.0.0.1"
    command = [*(lab.prefix(host) if lab else []), sys.executable, "-m", _MODULE, "echo", address, asker]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        line = process.stdout.readline() if process.stdout else b""
        yield from_json(line, LinkTarget, where="echo")
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)


def run_echo(host: str, asker: str) -> None:
    """Answer pings until standard input ends."""
    keys = NodeKeys.generate()
    context = prompt_context()
    allowed = AllowList()
    allowed.allow(asker, "ping")
    authenticator = Authenticator(context, allowed)
    echo = Echo(context, f"tcp://{host}:*", "echo", keys, SystemClock())
    target = LinkTarget(name="echo", address=echo.address, public=keys.public)
    sys.stdout.buffer.write(to_json(target) + b"\n")
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()
    echo.close()
    authenticator.close()
    context.destroy(linger=0)


def run_ping() -> None:
    """One measurement."""
    job = from_json(sys.stdin.buffer.read(), PingJob, where="standard input")
    context = prompt_context()
    probe = LinkProbe(context, "ping", job.target, NodeKeys(public=job.public, secret=job.secret), SystemClock())
    try:
        report = probe.run(job.settings, "ethernet")
    finally:
        probe.close()
        context.destroy(linger=0)
    kind = link_kind("", report.profile.latency_s.value, same_machine=job.target.address.startswith("tcp://127."))
    sys.stdout.buffer.write(to_json(replace(report, profile=replace(report.profile, kind=kind))))


if __name__ == "__main__":
    run_echo(sys.argv[2], sys.argv[3]) if sys.argv[1] == "echo" else run_ping()
