"""A running deployment: stage workers, the session driver, and what can be asked of them.

**Promises** after `close` (or leaving the `with` block, or the end of this process, however it ends) no worker is left.
A worker that crashes, sleeps or is cut off is replaced and the sessions go on (`supervisor`). **Fails when** that is
impossible or forbidden: every session ends with `SessionLost`.
**Called by** `cli`, `server`, `bench`, and people who embed shardwise.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import zmq

from shardwise.cluster.engine import ClusterEngine, WorkerSpec
from shardwise.deploy.options import Placement, RunOptions
from shardwise.deploy.supervisor import Supervisor
from shardwise.deploy.tokenizer import LlamaTokenizer
from shardwise.errors import ReplyTimeout, ShardwiseError, StageCrashed, UsageError
from shardwise.model.description import ModelDescription
from shardwise.records import Record, replace
from shardwise.session.driver import Driver, SessionHandle
from shardwise.session.journal import Unfinished
from shardwise.session.recovery import Available, RecoveryPolicy
from shardwise.session.request import GenerationRequest, Readiness, Recovery, Token
from shardwise.shards.manifest import Manifest
from shardwise.stage.config import WorkerConfig
from shardwise.transport.messages import SamplingSettings, Stats
from shardwise.transport.pieces import PieceServer

TOKEN_TIMEOUT_S = 600.0


class StageStatus(Record):
    """One stage of a deployment."""

    index: int
    node: str
    pid: int
    layers: tuple[int, int]  # [start, end)
    state: str  # loading | ready | gone
    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int
    address: str = ""
    load_s: float = 0.0


class Deployment:
    """See the module; made by `launch`."""

    def __init__(
        self,
        *,
        model: ModelDescription,
        manifest: Manifest,
        options: RunOptions,
        tokenizer: LlamaTokenizer,
        engine: ClusterEngine,
        driver: Driver,
        configs: list[WorkerConfig],
        places: list[Placement],
        context: zmq.Context[zmq.Socket[bytes]],
        pieces: PieceServer | None = None,
    ) -> None:
        self.model, self.manifest, self.options, self.tokenizer = model, manifest, options, tokenizer
        self.engine, self.driver = engine, driver
        self._configs, self._places, self._context = configs, places, context
        self._pieces = pieces
        self._names = [worker_name(config.stage) for config in configs]
        self._replica_configs: dict[int, WorkerConfig] = {}
        self._replica_places: dict[int, Placement] = {}
        self._replica_names: dict[int, str] = {}
        self._closed = threading.Event()
        self.supervisor: Supervisor | None = None

    def supervise(self, policy: RecoveryPolicy) -> None:
        """Begin to watch the workers, once all are ready."""
        self.supervisor = Supervisor(self.driver, self.engine, self, policy, self.driver.clock)

    # -- asking -------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> list[StageStatus]:
        """All stages, in order, live."""
        out = []
        for index, (name, layers) in enumerate(zip(self._names, self.manifest.layers, strict=True)):
            status = self.engine.status(name)
            ready = self.driver.peers.ready.get(index)
            out.append(
                StageStatus(
                    index=index,
                    node=status.node,
                    pid=ready.pid if ready else status.pid or 0,
                    layers=layers,
                    state="gone" if not status.alive else "ready" if ready else "loading",
                    weight_bytes=ready.weight_bytes if ready else 0,
                    kv_bytes=ready.kv_bytes if ready else 0,
                    workspace_bytes=ready.workspace_bytes if ready else 0,
                    address=ready.address if ready else "",
                    load_s=ready.load_s if ready else 0.0,
                )
            )
        return out

    def readiness(self) -> Readiness:
        """Whether a token really went through every stage lately."""
        return self.driver.readiness()

    def stats(self, *, reset: bool = False) -> list[Stats]:
        """Every stage's figures since the last reset."""
        return self.driver.stats(reset=reset)

    # -- generating ---------------------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, on_event: Callable[[Token | ShardwiseError], None]) -> SessionHandle:
        """Begin a generation; events come from the driver's thread and end with a final one."""
        return self.driver.submit(request, on_event)

    def generate(
        self,
        prompt: str | list[int] | list[dict[str, Any]],
        *,
        max_tokens: int = 128,
        temperature: float = 0.0,
        seed: int = 0,
        stop: tuple[str, ...] = (),
        ignore_eos: bool = False,
        traced: bool = False,
        sampling: SamplingSettings | None = None,
    ) -> Iterator[Token]:
        """Tokens as they come. `prompt` is text, token ids, or chat messages. Leaving the loop early frees the session."""
        settings = sampling or SamplingSettings(temperature=temperature, seed=seed)
        request = GenerationRequest(
            prompt=tuple(self.prompt_ids(prompt)),
            max_tokens=max_tokens,
            sampling=settings,
            stop=stop,
            ignore_eos=ignore_eos,
            traced=traced,
        )
        return self.stream(request)

    @property
    def unfinished(self) -> list[Unfinished]:
        """Sessions of the journal that an earlier driver did not finish, and that this deployment can go on with."""
        journal = self.driver.journal
        return [] if journal is None else [u for u in journal.unfinished if u.manifest_digest == self.manifest.digest]

    def resume(self, unfinished: Unfinished) -> Iterator[Token]:
        """Go on with such a session: its further tokens, the same as if nothing had happened."""
        events: queue.SimpleQueue[Token | ShardwiseError] = queue.SimpleQueue()
        return self._events(self.driver.resume(unfinished, events.put), events)

    def stream(self, request: GenerationRequest) -> Iterator[Token]:
        """Tokens of a request as they come."""
        events: queue.SimpleQueue[Token | ShardwiseError] = queue.SimpleQueue()
        handle = self.submit(request, events.put)
        return self._events(handle, events)

    def _events(self, handle: SessionHandle, events: queue.SimpleQueue[Token | ShardwiseError]) -> Iterator[Token]:
        finished = False
        try:
            while not finished:
                try:
                    event = events.get(timeout=TOKEN_TIMEOUT_S)
                except queue.Empty:
                    raise ReplyTimeout(f"no token within {TOKEN_TIMEOUT_S:.0f} s") from None
                if isinstance(event, ShardwiseError):
                    raise event
                finished = bool(event.finish_reason)
                yield event
        finally:
            if not finished:
                handle.cancel()

    def prompt_ids(self, prompt: str | list[int] | list[dict[str, Any]]) -> list[int]:
        """Token ids of a prompt in any of its forms."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if all(isinstance(part, int) for part in prompt):
            ids = [part for part in prompt if isinstance(part, int)]
            if ids and not 0 <= min(ids) <= max(ids) < self.tokenizer.vocab_size:
                raise UsageError(f"a token id is outside 0..{self.tokenizer.vocab_size - 1}", where="prompt")
            return ids
        return self.tokenizer.encode_chat([part for part in prompt if isinstance(part, dict)])

    # -- recovering ---------------------------------------------------------------------------------------------

    @property
    def recoveries(self) -> list[Recovery]:
        """Every recovery of every session so far, in the order in which the sessions went on."""
        return list(self.driver.recoveries)

    def worker_name(self, stage: int) -> str:
        return self._names[stage]

    def available(self, stage: int) -> Available:
        """What there is to recover a stage with (`supervisor.Restarter`)."""
        place = self._places[stage]
        replica = self._replica_names.get(stage, "")
        standing = stage in self.driver.peers.replicas and bool(replica) and self.engine.status(replica).alive
        return Available(
            node=place.node,
            hot_replica=replica if standing else "",
            restart_s=max(s.load_s for s in self.stages) + 0.5,
        )

    def replica_promoted(self, stage: int) -> None:
        """The replica takes the stage's place (`supervisor.Restarter`)."""
        self._names[stage], self._replica_names[stage] = self._replica_names[stage], self._names[stage]

    def add_replica(self, stage: int) -> None:
        """Start a replica of a stage under its current epoch (`supervisor.Restarter`, `launch`)."""
        config = self._replica_configs[stage]
        place = self._replica_places[stage]
        name = self._replica_names[stage]
        self.engine.stop(name, grace_s=0.0)
        hello = replace(config.hello, epoch=self.driver.peers.hello.epoch)
        self.engine.start(worker_spec(name, replace(config, hello=hello), place))

    def add_replicas(self, configs: list[WorkerConfig], places: list[Placement], *, hot: bool) -> None:
        """Start a replica of every stage; `hot`: they are sent a copy of everything."""
        self.driver.peers.mirroring = hot
        self.driver.peers.awaited_replicas = len(configs)
        for config, place in zip(configs, places, strict=True):
            self._replica_configs[config.stage] = config
            self._replica_places[config.stage] = place
            self._replica_names[config.stage] = f"{worker_name(config.stage)}-replica"
            self.add_replica(config.stage)

    def restart_stage(self, stage: int, epoch: int, node: str) -> None:
        """Start a stage's worker anew (`supervisor.Restarter`)."""
        config = self._configs[stage]
        config = replace(config, hello=replace(config.hello, epoch=epoch))
        place = replace(self._places[stage], node=node)
        self.engine.stop(self._names[stage], grace_s=0.0)
        self.engine.start(worker_spec(self._names[stage], config, place))

    # -- ending -------------------------------------------------------------------------------------------------

    def close(self, drain_s: float = 0.0) -> None:
        """End everything: first wait up to `drain_s` for running sessions."""
        if self._closed.is_set():
            return
        if drain_s > 0:
            with contextlib.suppress(ShardwiseError):  # what has not ended by then is cancelled
                self.driver.wait_until(lambda: not self.driver.open_sessions and not self.driver.waiting, drain_s, "draining")
        self._closed.set()
        if self.supervisor is not None:
            self.supervisor.stop()
        if self._pieces is not None:
            self._pieces.close()
        self.driver.close()
        self.engine.close()
        self.tokenizer.close()
        self._context.destroy(linger=0)

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def worker_name(stage: int) -> str:
    """The name of a stage's worker within its deployment."""
    return f"stage-{stage}"


def worker_spec(name: str, config: WorkerConfig, place: Placement) -> WorkerSpec:
    """What an engine needs to start a stage's worker."""
    return WorkerSpec(name=name, node=place.node, config=config.frame(), device=place.device, prefix=place.prefix)


def crash_error(name: str, exit_status: int | None, log_tail: str) -> StageCrashed:
    """The error for a worker process that ended."""
    status = exit_status if exit_status is not None else "unknown"
    how = f"signal {-status}" if isinstance(status, int) and status < 0 else f"status {status}"
    last = log_tail.strip().splitlines()[-1:] or ["no output"]
    return StageCrashed(f"the worker {name} ended with {how}: {last[0]}", where=name, exit_status=status, log_tail=log_tail)
