"""Whatever the driver's thread, or the supervisor's, meets: no session hangs, and what is not to blame goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq
from zmq.utils import z85

from shardwise.deploy import Deployment, launch_local
from shardwise.errors import SessionError, SessionLost, ShardwiseError
from shardwise.records import replace
from shardwise.session.journal import Journal, read_events
from shardwise.session.request import Token
from shardwise.session.session import Session
from shardwise.transport.channel import Outbox
from shardwise.transport.messages import (
    AnyMessage,
    Closed,
    Connected,
    Failure,
    KvState,
    Pong,
    Preparing,
    Progress,
    Ready,
    Sampled,
)
from shardwise.transport.security.allow_list import AllowedKey, AllowList
from shardwise.transport.security.authenticator import Authenticator
from shardwise.transport.security.keys import NodeKeys
from tests.deploy.faults import Watched, eventually, request, undisturbed


@pytest.fixture(scope="module")
def deployment(sample_gguf: Path) -> Iterator[Deployment]:
    with launch_local(sample_gguf, num_stages=2, context_tokens=256, max_sessions=2, deterministic=True) as built:
        yield built


class Member:
    """Says things to the driver with the last stage's own key."""

    def __init__(self, deployment: Deployment) -> None:
        config = deployment.layout.configs[1]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        hello = replace(config.hello, epoch=deployment.driver.peers.hello.epoch)
        keys = NodeKeys(config.public_key, config.secret_key)
        self.outbox = Outbox(self._context, config.driver_address, hello, keys, config.driver_key)
        self.ready = deployment.driver.peers.ready[1]
        eventually(lambda: self.outbox.receive() is None and self.outbox.welcomed, "the welcome")

    def close(self) -> None:
        self.outbox.close()
        self._context.destroy(linger=0)


Say = Callable[[Session, Ready], AnyMessage]
SAID: dict[str, Say] = {
    "token": lambda s, _: Sampled(session=s.number, epoch=s.epoch, position=s.next_position, token=10**9),
    "negative token": lambda s, _: Sampled(session=s.number, epoch=s.epoch, position=s.next_position, token=-5),
    "failure of nobody": lambda s, _: Failure(stage=99, kind="StageLoadFailed", message="x"),
    "failure of another": lambda s, _: Failure(stage=0, kind="StageLoadFailed", message="x"),
    "details": lambda s, _: Failure(stage=1, kind="UsageError", message="x", session=10**6, details={"message": "x"}),
    "ready of nobody": lambda s, ready: replace(ready, stage=99),
    "address": lambda s, ready: replace(ready, address="nonsense"),
    "key": lambda s, ready: replace(ready, public_key="zz"),
    "pong": lambda s, _: Pong(stage=99, sequence=0, sent_s=0.0, now_s=1.0),
    "connected": lambda s, _: Connected(stage=99, epoch=1),
    "progress": lambda s, _: Progress(stage=99, sequence=1, positions=((1, 1),)),
    "preparing": lambda s, _: Preparing(stage=99, what="x", done_bytes=-1, total_bytes=0),
    "closed": lambda s, _: Closed(session=s.number, stage=0),
    "kv": lambda s, _: KvState(session=s.number, epoch=s.epoch, stage=99, request=0, num_tokens=3, digest="x"),
}


@pytest.mark.parametrize(
    "what", [what if n % 3 == 0 else pytest.param(what, marks=pytest.mark.soak) for n, what in enumerate(SAID)]
)
def test_a_member_that_talks_nonsense(deployment: Deployment, what: str) -> None:
    """It is counted, and nothing else happens: the same tokens for whoever runs and whoever comes later."""
    wanted = request(deployment, num_tokens=60)
    expected = undisturbed(deployment, wanted)
    recoveries, member = len(deployment.recoveries), Member(deployment)
    try:
        running = Watched(deployment, wanted)
        running.wait_for(2)
        dropped = deployment.driver.peers.inbox.num_malformed
        for _ in range(10):
            member.outbox.send(SAID[what](running.handle.session, member.ready))
        assert running.ids() == expected
        if what != "details":
            eventually(lambda: deployment.driver.peers.inbox.num_malformed >= dropped + 10, "the messages")
    finally:
        member.close()
    assert undisturbed(deployment, wanted) == expected
    assert len(deployment.recoveries) == recoveries


@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit])
def test_a_listener_that_raises_ends_its_own_session(deployment: Deployment, raised: type[BaseException]) -> None:
    wanted = request(deployment, num_tokens=60)
    expected = undisturbed(deployment, wanted)
    heard: list[Token | ShardwiseError] = []

    def listen(event: Token | ShardwiseError) -> None:
        heard.append(event)
        raise raised

    other = Watched(deployment, wanted)
    handle = deployment.submit(wanted, listen)
    assert other.ids() == expected
    eventually(lambda: len(heard) == 2, "the error")
    assert isinstance(heard[0], Token)
    assert isinstance(heard[1], SessionError)
    assert raised.__name__ in str(heard[1])
    eventually(lambda: not deployment.driver.open_sessions, "the end")
    handle.cancel()
    assert undisturbed(deployment, wanted) == expected


def test_a_driver_that_fails_says_so(sample_gguf: Path) -> None:
    """Running and waiting sessions end with an error that names the cause, later ones are refused, no worker is left."""
    with launch_local(sample_gguf, num_stages=2, context_tokens=768, max_sessions=1) as built:
        wanted = request(built, num_tokens=600)
        running, waiting = Watched(built, wanted), Watched(built, wanted)
        running.wait_for(2)
        workers = [psutil.Process(stage.pid) for stage in built.stages]
        built.driver.call(lambda: {}["what nobody expected"])
        for session in (running, waiting):
            with pytest.raises(SessionLost, match="the session driver failed: KeyError: 'what nobody expected'"):
                session.ids()
        with pytest.raises(SessionLost, match="KeyError"):
            built.submit(wanted, lambda event: None)
        assert not built.readiness().ready
        assert "KeyError" in built.readiness().reason
        running.handle.cancel()
    assert not psutil.wait_procs(workers, timeout=10)[1]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_supervisor_that_fails_says_so(sample_gguf: Path) -> None:
    """Without it nobody would recover anything: the deployment is not ready, with the reason."""
    with launch_local(sample_gguf, num_stages=2, context_tokens=768) as built:
        running = Watched(built, request(built, num_tokens=600))
        running.wait_for(2)
        assert built.supervisor is not None
        built.supervisor.on_change = lambda what: [][1]
        os.kill(built.stages[1].pid, signal.SIGKILL)
        with pytest.raises(SessionLost, match="the supervisor failed: IndexError"):
            running.ids()
        assert not built.readiness().ready
        assert "the supervisor failed" in built.readiness().reason
        with pytest.raises(SessionLost, match="the supervisor failed"):
            built.submit(request(built), lambda event: None)


class BrokenList(AllowList):
    """Cannot judge one key."""

    def __init__(self, unlucky: str) -> None:
        super().__init__()
        self._unlucky = unlucky

    def find(self, public: str) -> AllowedKey | None:
        if public == self._unlucky:
            raise RuntimeError("what nobody expected")
        return super().find(public)


def test_a_connection_that_cannot_be_judged_is_refused_and_the_next_one_is_not() -> None:
    unlucky, friend = NodeKeys.generate(), NodeKeys.generate()
    allowed = BrokenList(unlucky.public)
    allowed.allow(friend.public, "friend")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Authenticator(context, allowed) as guard:
        for keys, status in ((unlucky, b"500"), (friend, b"200")):
            with context.socket(zmq.REQ) as asking:  # as libzmq asks
                asking.connect("inproc://zeromq.zap.01")
                key = z85.decode(keys.public)
                asking.send_multipart([b"1.0", b"7", b"shardwise", b"10.0.0.1", b"", b"CURVE", key])
                assert asking.poll(5000)
                assert asking.recv_multipart()[1:3] == [b"7", status]
        assert guard.num_refused == 1
    context.destroy(linger=0)


FULL_DISK = """
import resource, sys
from pathlib import Path
from shardwise.clock import SystemClock
from shardwise.deploy import launch_local
from shardwise.errors import SessionLost
from tests.deploy.faults import Watched, eventually, request, undisturbed
model, folder = sys.argv[1:]
journal = Path(folder) / "sessions.journal"
options = dict(num_stages=2, context_tokens=256, max_sessions=2, deterministic=True, probe_interval_s=0.5)
with launch_local(model, journal_dir=folder, **options) as built:
    wanted = request(built, num_tokens=60)
    expected = undisturbed(built, wanted)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = journal.stat().st_size + 1000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    running = Watched(built, wanted)
    try:
        running.ids()
        raise AssertionError("the journal was written")
    except SessionLost as error:
        assert "the journal cannot be written: File too large" in str(error), error
        assert str(journal) in str(error), error
    assert 0 < len(running.tokens) < 60
    assert [token.id for token in running.tokens] == expected[: len(running.tokens)]
    try:
        undisturbed(built, wanted)
        raise AssertionError("the journal was written")
    except SessionLost as error:
        assert str(journal) in str(error), error
    assert not built.readiness().ready
    assert str(journal) in built.readiness().reason
    assert journal.stat().st_size <= limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    eventually(lambda: built.readiness().ready, "room on the disk")
    assert undisturbed(built, wanted) == expected
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process")
def test_a_journal_that_cannot_be_written(sample_gguf: Path, tmp_path: Path) -> None:
    """The session that would not survive a restart ends with one clear error; when there is room again, all goes on."""
    command = [sys.executable, "-c", FULL_DISK, str(sample_gguf), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout.endswith("done\n"), done.stderr
    data = (tmp_path / "sessions.journal").read_bytes()
    assert read_events(data)[1] == len(data)
    with Journal(tmp_path) as journal:
        assert not journal.unfinished
