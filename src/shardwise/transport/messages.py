"""Everything that driver and stages say to each other.

A message is a MessagePack header (a tagged, strict record) and, for activations and KV state, a
raw payload. Nothing is ever unpickled; unknown tags, unknown fields and wrong types are refused by the decoder.

    driver -> stages   Connect, OpenSession, CloseSession, StatsRequest, Ping, Shutdown, KV and checkpoint requests
    driver -> stage 0  OpenSession carries the prompt; stage 0 cuts it into chunks, and passes it on ahead of them
    stage  -> next     Step + activations [rows, hidden]
    stage  -> previous Taken (backpressure), Wanted (after a fault)
    last   -> stage 0  Sampled (the ring) and, the same, to the driver
    stages -> driver   Preparing, Ready, Connected, Sampled, Stats, Pong, Beat, Progress, Failure, Closed

Idempotence: every Step belongs to (session, epoch, position). A stage processes a position once per epoch; an earlier
position is a duplicate and is dropped, a later one is a gap and is reported, never guessed.

Shapes: T rows of a step, H hidden size.
"""

from __future__ import annotations

import msgspec

from shardwise.errors import ProtocolMismatch, ShardwiseError
from shardwise.records import Record

PROTOCOL_VERSION = 3
MAX_HEADER_BYTES = 64 * 2**20  # a session of ten million tokens fits, the longest context there is
MAX_GRAMMAR_BYTES = 2**20


class Message(Record, tag_field="t", omit_defaults=True):
    """Base of all messages."""


class SamplingSettings(Record, omit_defaults=True):
    """How the next token is chosen. Temperature 0 is greedy (lowest id on ties)."""

    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_tokens: int = 64  # how many earlier tokens the penalties look at; -1 = all
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""  # GBNF; empty = free
    num_logprobs: int = -1  # -1 = none, 0 = of the chosen token only, k = and the k best


class Segment(Record, array_like=True):
    """Consecutive rows of one session inside a step."""

    session: int
    epoch: int
    position: int  # of the first row
    num_tokens: int
    sample: bool  # the last row's logits are wanted
    traced: bool = False


class Visit(Record, array_like=True):
    """One stage's part of one step, in that stage's own monotonic clock (seconds)."""

    stage: int
    received_s: float
    started_s: float
    computed_s: float
    sent_s: float
    rows: int
    copy_s: float = 0.0


class Step(Message, tag="step"):
    """Rows for the next stage; the payload is activations [T, H] in `dtype`."""

    segments: tuple[Segment, ...]
    dtype: str  # f32 | f16
    hidden: int
    sent_s: float
    visits: tuple[tuple[Visit, ...], ...] = ()  # of each segment, () for one that is not traced; empty where none is


class TokenLogprob(Record, array_like=True):
    """A candidate token."""

    token: int
    logprob: float


class Sampled(Message, tag="sampled"):
    """The token at `position`, chosen from the row at `position - 1`."""

    session: int
    epoch: int
    position: int
    token: int
    finish: str = ""  # "" | stop | length
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()
    sent_s: float = 0.0
    visits: tuple[Visit, ...] = ()


class OpenSession(Message, tag="open"):
    """Begin, or after a fault begin again, a session on a stage.

    `tokens` are the prompt and whatever has been generated already. Stage 0 sends the first `num_prompt` in chunks and
    the rest as forced single rows, the shapes an undisturbed run had, so a replay is equal to the bit; with
    `fast_replay` everything goes in chunks.
    """

    session: int
    epoch: int
    tokens: tuple[int, ...]
    num_prompt: int
    max_tokens: int  # generated tokens in all, forced ones included
    stop_ids: tuple[int, ...] = ()
    sampling: SamplingSettings = SamplingSettings()
    traced: bool = False
    fast_replay: bool = False
    start_position: int = 0  # with `resume`: rebuilt stages that were sent a checkpoint hold KV up to here
    resume: bool = False  # stages that know the session keep their KV; each asks its predecessor for what it lacks


class Wanted(Message, tag="wanted"):
    """A resumed stage to its predecessor: send the session's rows from `position` on again, and then go on."""

    session: int
    epoch: int
    position: int


class CloseSession(Message, tag="close"):
    """Forget a session and free its KV, whatever its phase."""

    session: int
    epoch: int


class Closed(Message, tag="closed"):
    """A stage has freed a session."""

    session: int
    stage: int


class Preparing(Message, tag="preparing"):
    """A worker fetches or verifies its slice; `left_s` is None until a rate is known."""

    stage: int
    what: str  # fetching | verifying
    done_bytes: int
    total_bytes: int
    bytes_per_s: float = 0.0
    left_s: float | None = None


class Ready(Message, tag="ready"):
    """A worker has loaded its slice and listens."""

    stage: int
    pid: int
    address: str
    load_s: float
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    library: str
    public_key: str = ""
    replica: bool = False  # a second copy of the stage that stands by


class Connect(Message, tag="connect"):
    """Where the neighbours are; a new one replaces the old."""

    epoch: int
    next_address: str  # empty on the last stage
    first_address: str  # empty unless this is the last stage
    next_key: str = ""
    first_key: str = ""
    next_mirror_address: str = ""  # the next stage's hot replica: it gets a copy of everything
    next_mirror_key: str = ""
    first_mirror_address: str = ""  # the first stage's
    first_mirror_key: str = ""


class NewEpoch(Message, tag="epoch"):
    """The deployment goes on under a higher epoch; whoever does not hear this is fenced. `Connect` follows."""

    epoch: int


class Connected(Message, tag="connected"):
    """The neighbours' channels stand."""

    stage: int
    epoch: int


class Taken(Message, tag="taken"):
    """The next stage has computed a prefill chunk: there is room for another (backpressure)."""

    stage: int


class Ping(Message, tag="ping"):
    """Liveness and clock offset."""

    sequence: int
    sent_s: float


class Pong(Message, tag="pong"):
    """Answer to Ping; `now_s` is the stage's clock."""

    stage: int
    sequence: int
    sent_s: float
    now_s: float
    sessions: int = 0


class Beat(Message, tag="beat"):
    """A worker's heartbeat, from a thread of its own: it beats while the worker computes, and not while it sleeps."""

    stage: int
    sequence: int
    now_s: float


class ProgressRequest(Message, tag="progress?"):
    """Ask where the sessions stand; answered between two steps."""

    sequence: int


class Progress(Message, tag="progress"):
    """For every session of a stage: the next position it will compute."""

    stage: int
    sequence: int
    positions: tuple[tuple[int, int], ...]  # (session, next position)


class StatsRequest(Message, tag="stats?"):
    """Ask for figures; `reset` starts new ones."""

    sequence: int
    reset: bool = False


class Quantiles(Record, omit_defaults=True):
    """Seconds; n samples."""

    n: int = 0
    total: float = 0.0
    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Stats(Message, tag="stats"):
    """One worker's figures since the last reset."""

    stage: int
    sequence: int
    pid: int
    sessions: int
    kv_tokens: int
    peak_memory_bytes: int
    memory_bytes: int
    prefill: Quantiles  # compute per chunk
    decode: Quantiles  # compute per step
    wait: Quantiles  # idle before a step
    queue: Quantiles  # from arrival to start
    transfer: Quantiles  # sender's clock to ours, of decode steps: what arrives here
    copy: Quantiles
    decode_rows: int
    prefill_tokens: int
    received_bytes: int
    sent_bytes: int
    decode_sent_bytes: int = 0
    decode_steps_sent: int = 0
    now_s: float = 0.0


class ExportKv(Message, tag="kv?"):
    """Ask a stage for a session's KV state."""

    session: int
    epoch: int
    request: int


class KvState(Message, tag="kv"):
    """KV state of one session on one stage; the payload is llama.cpp's own format. Also the way back in."""

    session: int
    epoch: int
    stage: int
    request: int
    num_tokens: int
    digest: str  # SHA-256 of the payload


KV_STATE = "KV state"  # `Failure.where` of a stage that could not hand out, or take, the state of a session: no more than that
REFILL_IMPOSSIBLE = "refill impossible"  # `Failure.where` of a stage that has not kept enough rows for its neighbour


class Failure(Message, tag="failure"):
    """An error as plain data; `session` 0 = the whole stage."""

    stage: int
    kind: str
    message: str
    where: str = ""
    hint: str = ""
    session: int = 0
    epoch: int = 0
    position: int = 0
    details: dict[str, str | int | float] = {}


def failure_of(error: ShardwiseError, *, stage: int, session: int = 0, epoch: int = 0) -> Failure:
    """An error as a message; details that are not plain are left out."""
    return Failure(
        stage=stage,
        kind=type(error).__name__,
        message=error.message,
        where=error.where,
        hint=error.hint,
        session=session,
        epoch=epoch,
        details={k: v for k, v in error.details.items() if isinstance(v, str | int | float)},
    )


class Shutdown(Message, tag="shutdown"):
    """End the worker."""


AnyMessage = (
    Step
    | Sampled
    | OpenSession
    | Wanted
    | CloseSession
    | Closed
    | Preparing
    | Ready
    | Connect
    | NewEpoch
    | Connected
    | Taken
    | Ping
    | Pong
    | Beat
    | ProgressRequest
    | Progress
    | StatsRequest
    | Stats
    | ExportKv
    | KvState
    | Failure
    | Shutdown
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """Header bytes of a message."""
    return _encoder.encode(message)


def decode(header: bytes | memoryview) -> AnyMessage:
    """Strict decoding; raises `ProtocolMismatch` on anything that is not one of our messages."""
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolMismatch(f"a header of {len(header)} bytes", hint=f"at most {MAX_HEADER_BYTES} are allowed")
    try:
        return _decoder.decode(header)
    except (
        msgspec.DecodeError,
        msgspec.ValidationError,
        UnicodeDecodeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise ProtocolMismatch(f"not a shardwise message: {error}") from error
