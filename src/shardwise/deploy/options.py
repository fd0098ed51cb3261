"""How a model is to be run: what `run`, `chat`, `serve` and `bench` have in common."""

from __future__ import annotations

from pathlib import Path

from shardwise.cluster.follow_policy import FollowPolicy
from shardwise.errors import UsageError
from shardwise.model.description import ModelDescription
from shardwise.model.even_split import even_split
from shardwise.processors import default_threads
from shardwise.records import Record, replace
from shardwise.session.checkpoints import CheckpointSettings
from shardwise.session.recovery import RecoveryPolicy
from shardwise.shards.cache_folder import default_cache
from shardwise.stage.llama.library import BLAS_HELPS
from shardwise.stage.settings import WIRE_DTYPES

KV_TYPES = ("f16", "q8_0")
BLAS_CHUNK_TOKENS = 128  # where BLAS dequantizes the weights for every chunk, larger chunks pay (ADR 0003)
PLAIN_CHUNK_TOKENS = 64
CHECKPOINT_TOKENS = 256  # between two checkpoints, where only a directory was named


class Placement(Record):
    """Where one stage runs."""

    node: str = ""
    host: str = "127.0.0.1"  # its address as the other nodes see it
    prefix: tuple[str, ...] = ()
    device: str = "cpu"


class RunOptions(Record):
    """Settings of a deployment. Defaults suit two people chatting."""

    layers: tuple[int, ...] = ()  # layers of each stage; empty = `num_stages` about equal ones
    num_stages: int = 1
    nodes: tuple[str, ...] = ()  # of this machine's cluster, one a stage; ("*",) = all in turn; empty = this machine alone
    context_tokens: int = 2048  # per session; 0 = 2048, or what the model allows
    max_sessions: int = 4
    max_queue: int = 256
    chunk_tokens: int = 0  # 0 = by quantization
    kv_type: str = "f16"
    wire_dtype: str = "f32"
    threads: int = 1  # of a stage: other numbers round otherwise; 0 = its machine's cores but one, shared by the stages there
    gpu_layers: int = 0
    blas: str = "auto"
    deterministic: bool = False
    encrypt: bool = True
    paranoid: bool = False  # workers read every byte of their slice at every start
    weights_from: tuple[str, ...] = ()  # packed folders (a NAS) under the same path on every node, asked before other nodes
    fetch_bytes_per_s: float = 0.0  # of one node from the others; 0 = no limit
    start_timeout_s: float = 120.0
    probe_interval_s: float = 10.0
    cache_dir: str = ""  # "" = the user's cache
    recovery: RecoveryPolicy = RecoveryPolicy()
    follow: FollowPolicy = FollowPolicy()  # on a cluster: what to do when machines come and go
    journal_dir: str = ""  # "" = sessions are journalled in memory only
    checkpoint_every_tokens: int = 0  # of a session, its KV is copied to the driver; 0 = never, or 256 with a directory
    checkpoint_dir: str = ""  # "" = in the driver's memory
    sent_log_bytes: int = 64 * 2**20  # of activations that a stage keeps to refill its neighbour after a fault

    def check(self, model: ModelDescription) -> None:
        """Raise `UsageError` for anything that cannot be; says what would."""
        if self.layers:
            if min(self.layers) < 1 or sum(self.layers) != model.num_layers:
                given, total = ",".join(map(str, self.layers)), sum(self.layers)
                good = ",".join(map(str, equal_split(model.num_layers, min(len(self.layers), model.num_layers))))
                raise UsageError(
                    f"--layers {given} add up to {total}, the model has {model.num_layers} layers",
                    where="layers",
                    hint=f"try --layers {good}",
                )
        elif not 1 <= self.num_stages <= model.num_layers:
            raise UsageError(
                f"{self.num_stages} stages for {model.num_layers} layers", where="stages", hint=f"1 to {model.num_layers}"
            )
        for name, value, allowed in (
            ("wire-dtype", self.wire_dtype, WIRE_DTYPES),
            ("kv-type", self.kv_type, KV_TYPES),
            ("blas", self.blas, ("auto", "on", "off")),
        ):
            if value not in allowed:
                raise UsageError(f"--{name} {value}", where=name, hint=f"one of {', '.join(allowed)}")
        for name, number, least in (
            ("ctx", self.context_tokens, 8),
            ("sessions", self.max_sessions, 1),
            ("threads", self.threads, 0),
            ("checkpoint-every", self.checkpoint_every_tokens, 0),
        ):
            if number < least:
                raise UsageError(f"--{name} {number}", where=name, hint=f"at least {least}")
        if self.context_tokens > model.context_length > 0:
            raise UsageError(
                f"--ctx {self.context_tokens} is beyond the model's {model.context_length}",
                where="ctx",
                hint=f"at most {model.context_length}",
            )

    def settled_for(self, model: ModelDescription) -> RunOptions:
        """With everything that was left open decided for this model."""
        if self.context_tokens:
            return self
        return replace(self, context_tokens=min(2048, model.context_length or 2048))

    def layer_counts(self, model: ModelDescription) -> tuple[int, ...]:
        """Layers of each stage."""
        return self.layers or even_split(model, max(self.num_stages, len(self.nodes)))

    def chunk(self, quantization: str) -> int:
        """Rows of a prefill chunk."""
        if self.chunk_tokens:
            return self.chunk_tokens
        return BLAS_CHUNK_TOKENS if self.blas != "off" and quantization in BLAS_HELPS else PLAIN_CHUNK_TOKENS

    @property
    def checkpoints(self) -> CheckpointSettings:
        """How often KV is copied, and where to."""
        every = self.checkpoint_every_tokens or (CHECKPOINT_TOKENS if self.checkpoint_dir else 0)
        return CheckpointSettings(every_tokens=every, directory=self.checkpoint_dir)

    def threads_here(self, num_stages: int) -> int:
        """Of each of so many stages on this machine."""
        return self.threads or default_threads(num_stages)

    def cache(self) -> Path:
        """Where slices are kept."""
        return Path(self.cache_dir) if self.cache_dir else default_cache()


def equal_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage as equal as possible; the first ones get the rest, because the last stage has the head too."""
    base, rest = divmod(num_layers, num_stages)
    return tuple(base + (1 if i < rest else 0) for i in range(num_stages))


def main_quantization(model: ModelDescription) -> str:
    """The quantization that most bytes of the layers have."""
    totals: dict[str, int] = {}
    for layer in model.layers:
        for name, num_bytes in layer.weight_bytes_by_quantization.items():
            totals[name] = totals.get(name, 0) + num_bytes
    return max(totals, key=lambda name: totals[name]) if totals else model.quantization
