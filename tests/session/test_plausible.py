"""What a worker tells the driver is asked for its sense before anything is done with it; pure, so each case is written down."""

from __future__ import annotations

import math

import pytest

from shardwise.errors import UsageError, from_record
from shardwise.records import replace
from shardwise.session.plausible import DriverLimits, require_plausible
from shardwise.transport.channel import Envelope
from shardwise.transport.handshake import REPLICA_STAGE
from shardwise.transport.messages import (
    AnyMessage,
    Beat,
    Closed,
    Connected,
    Failure,
    KvState,
    Pong,
    Preparing,
    Progress,
    Quantiles,
    Ready,
    Sampled,
    Shutdown,
    Stats,
    TokenLogprob,
    Visit,
)
from shardwise.transport.security.keys import NodeKeys

LIMITS = DriverLimits(num_stages=2, context_tokens=256, encrypted=True, vocab_size=1000)
SAMPLED = Sampled(session=1, epoch=0, position=5, token=7, sent_s=1.0)
READY = Ready(
    stage=1,
    pid=9,
    address="tcp://127.0.0.1:4000",
    load_s=0.1,
    weight_bytes=1,
    kv_bytes=1,
    workspace_bytes=0,
    library="x",
    public_key=NodeKeys.generate().public,
)
NONE = Quantiles()
STATS = Stats(
    stage=1,
    sequence=0,
    pid=9,
    sessions=0,
    kv_tokens=0,
    peak_memory_bytes=0,
    memory_bytes=0,
    prefill=NONE,
    decode=NONE,
    wait=NONE,
    queue=NONE,
    transfer=NONE,
    copy=NONE,
    decode_rows=0,
    prefill_tokens=0,
    received_bytes=0,
    sent_bytes=0,
)
KV = KvState(session=1, epoch=0, stage=1, request=0, num_tokens=3, digest="x")
PONG = Pong(stage=1, sequence=0, sent_s=1.0, now_s=2.0)
PREPARING = Preparing(stage=1, what="fetching", done_bytes=1, total_bytes=2)
VISIT = Visit(stage=1, received_s=1.0, started_s=1.0, computed_s=1.0, sent_s=1.0, rows=1)
GOOD: list[AnyMessage] = [
    SAMPLED,
    replace(SAMPLED, finish="stop", top=(TokenLogprob(token=3, logprob=-math.inf),), visits=(VISIT,)),
    READY,
    replace(READY, address="tcp://[fe80::1%eth0]:4000"),
    replace(READY, address="tcp://mac-mini.local:4000"),
    STATS,
    KV,
    PONG,
    PREPARING,
    Beat(stage=1, sequence=1, now_s=1.0),
    Closed(session=1, stage=1),
    Connected(stage=1, epoch=2),
    Failure(stage=1, kind="StageError", message="x"),
    Progress(stage=1, sequence=0, positions=((1, 1),)),
]
BAD: dict[str, AnyMessage] = {
    "token beyond the vocabulary": replace(SAMPLED, token=1000),
    "negative token": replace(SAMPLED, token=-5),
    "position": replace(SAMPLED, position=257),
    "finish": replace(SAMPLED, finish="because"),
    "time": replace(SAMPLED, sent_s=math.nan),
    "candidate": replace(SAMPLED, top=(TokenLogprob(token=-1, logprob=0.0),)),
    "visit": replace(SAMPLED, visits=(replace(VISIT, sent_s=math.inf),)),
    "no address": replace(READY, address="nonsense"),
    "no port": replace(READY, address="tcp://127.0.0.1:99999"),
    "another transport": replace(READY, address="ipc://x"),
    "no key": replace(READY, public_key="zz"),
    "empty key": replace(READY, public_key=""),
    "load time": replace(READY, load_s=math.nan),
    "ready for another": replace(READY, stage=0),
    "pong for nobody": replace(PONG, stage=99),
    "pong at no time": replace(PONG, now_s=math.nan),
    "connected for another": Connected(stage=0, epoch=2),
    "failure for nobody": Failure(stage=99, kind="StageError", message="x"),
    "failure of a negative stage": Failure(stage=-7, kind="StageError", message="x"),
    "closed for another": Closed(session=1, stage=0),
    "progress for nobody": Progress(stage=99, sequence=0, positions=()),
    "negative bytes": replace(PREPARING, done_bytes=-1),
    "kv for another": replace(KV, stage=0),
    "kv beyond the context": replace(KV, num_tokens=257),
    "figures for another": replace(STATS, stage=0),
    "figures that are none": replace(STATS, decode=Quantiles(n=5, p50=math.nan)),
    "beat at no time": Beat(stage=1, sequence=1, now_s=math.nan),
    "not for the driver": Shutdown(),
}


def said(message: AnyMessage, stage: int = 1) -> Envelope:
    return Envelope(message, None, b"peer", stage)


@pytest.mark.parametrize("message", GOOD, ids=lambda m: type(m).__name__)
def test_what_workers_say_passes(message: AnyMessage) -> None:
    require_plausible(said(message), LIMITS)
    require_plausible(said(message, stage=1 + REPLICA_STAGE), LIMITS)


@pytest.mark.parametrize("what", BAD)
def test_what_makes_no_sense_does_not(what: str) -> None:
    with pytest.raises(UsageError):
        require_plausible(said(BAD[what]), LIMITS)


@pytest.mark.parametrize("stage", [-1, 2, 99, REPLICA_STAGE + 2, 7 * REPLICA_STAGE + 1])
def test_who_is_no_stage_says_nothing(stage: int) -> None:
    with pytest.raises(UsageError):
        require_plausible(said(replace(PONG, stage=stage), stage=stage), LIMITS)


def test_only_the_last_stage_gives_tokens() -> None:
    with pytest.raises(UsageError, match="stage 0"):
        require_plausible(said(SAMPLED, stage=0), LIMITS)


def test_a_vocabulary_that_is_not_known_bounds_nothing() -> None:
    require_plausible(said(replace(SAMPLED, token=10**6)), replace(LIMITS, vocab_size=0))


@pytest.mark.parametrize("name", ["where", "message", "hint", "self", "type"])
def test_details_of_a_failure_may_have_any_name(name: str) -> None:
    error = from_record("UsageError", "what", "here", "so", {name: "x"})
    assert isinstance(error, UsageError)
    assert error.one_line() == "what (here); so"
    assert error.as_dict()["message"] == "what"
