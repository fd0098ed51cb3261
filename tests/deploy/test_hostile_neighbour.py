"""A member with stage 0's own key sends the next stage steps that make no sense, beside the real ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from shardwise.deploy import Deployment, launch_local
from shardwise.errors import UsageError
from shardwise.records import replace
from shardwise.transport.channel import Outbox
from shardwise.transport.messages import OpenSession, Segment, Step, Wanted
from shardwise.transport.security.keys import NodeKeys
from tests.deploy.faults import Watched, eventually, request, undisturbed

HIDDEN = 576  # of the sample


@pytest.fixture(scope="module")
def deployment(sample_gguf: Path) -> Iterator[Deployment]:
    with launch_local(sample_gguf, num_stages=2, context_tokens=256, max_sessions=2, deterministic=True) as built:
        yield built


@pytest.fixture
def neighbour(deployment: Deployment) -> Iterator[Outbox]:
    """A second connection to stage 1, with the key of stage 0."""
    config, ready = deployment.layout.configs[0], deployment.driver.peers.ready[1]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hello = replace(config.hello, epoch=deployment.driver.peers.hello.epoch)
    outbox = Outbox(context, ready.address, hello, NodeKeys(config.public_key, config.secret_key), ready.public_key)
    eventually(lambda: outbox.receive() is None and outbox.welcomed, "the welcome")
    yield outbox
    outbox.close()
    context.destroy(linger=0)


def step(*segments: Segment, hidden: int = HIDDEN, dtype: str = "f32") -> Step:
    return Step(segments=segments, dtype=dtype, hidden=hidden, sent_s=0.0)


def segment(session: int, *, position: int = 0, num_tokens: int = 1, epoch: int = 0) -> Segment:
    return Segment(session=session, epoch=epoch, position=position, num_tokens=num_tokens, sample=True)


def rows(count: int, hidden: int = HIDDEN) -> bytes:
    return bytes(4 * count * hidden)


NONSENSE = {
    "too few rows": (step(segment(10**6, num_tokens=255)), rows(1)),
    "too many columns": (step(segment(10**6), hidden=577), rows(1, 577)),
    "another type": (step(segment(10**6), dtype="q8"), rows(1)),
    "no payload": (step(segment(10**6)), None),
    "no segments": (step(), rows(1)),
    "too many tokens": (step(segment(10**6, num_tokens=10**6)), rows(1)),
    "twice the same session": (step(segment(10**6), segment(10**6, position=1)), rows(2)),
    "session 0": (step(segment(0)), rows(1)),
    "a wish for session 0": (Wanted(session=0, epoch=1, position=-1), None),
    "session 0 is opened": (OpenSession(session=0, epoch=1, tokens=(1,), num_prompt=7, max_tokens=1), None),
}


@pytest.mark.parametrize(
    "what", [what if n % 3 == 0 else pytest.param(what, marks=pytest.mark.soak) for n, what in enumerate(NONSENSE)]
)
def test_it_disturbs_nobody(deployment: Deployment, neighbour: Outbox, what: str) -> None:
    """The receiver is not to blame: it is not restarted, and whoever runs gets the same tokens."""
    wanted = request(deployment, num_tokens=60)
    expected = undisturbed(deployment, wanted)
    pids, recoveries = [stage.pid for stage in deployment.stages], len(deployment.recoveries)
    running = Watched(deployment, wanted)
    running.wait_for(2)
    for _ in range(10):
        neighbour.send(*NONSENSE[what])
    assert running.ids() == expected
    assert undisturbed(deployment, wanted) == expected
    assert [stage.pid for stage in deployment.stages] == pids
    assert len(deployment.recoveries) == recoveries


@pytest.mark.parametrize("payload", [None, pytest.param(rows(3), marks=pytest.mark.soak)], ids=["no payload", "too many rows"])
def test_only_the_session_that_it_names_ends(deployment: Deployment, neighbour: Outbox, payload: bytes | None) -> None:
    wanted = request(deployment, num_tokens=200)
    expected = undisturbed(deployment, wanted)
    pids = [stage.pid for stage in deployment.stages]
    named, other = Watched(deployment, wanted), Watched(deployment, wanted)
    named.wait_for(2)
    session = named.handle.session
    neighbour.send(step(segment(session.number, position=session.next_position, epoch=session.epoch)), payload)
    with pytest.raises(UsageError, match="a step of 1 rows with"):
        named.ids()
    assert other.ids() == expected
    assert [stage.pid for stage in deployment.stages] == pids
    eventually(lambda: all(s.sessions == 0 for s in deployment.stats()), "free slots")
    assert undisturbed(deployment, wanted) == expected


def test_a_broken_chunk_leaves_room_for_the_next_ones(deployment: Deployment, neighbour: Outbox) -> None:
    """Every chunk is acknowledged, or its sender would wait for good."""
    for turn in range(5):
        neighbour.send(step(segment(10**6, num_tokens=3)), rows(1))
        eventually(lambda: neighbour.receive() is not None, f"the acknowledgement of chunk {turn}")
