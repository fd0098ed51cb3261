"""A running deployment: stage workers, the session driver, and what can be asked of them.

**Promises** after `close` (or leaving the `with` block, or the end of this process, however it ends) no worker is left.
A worker that crashes, sleeps or is cut off is replaced and the sessions go on (`supervisor`). **Fails when** that is
impossible or forbidden: every session ends with `SessionLost`.
**Called by** `cli`, `server`, `bench`, and people who embed shardwise.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import zmq

from shardwise.cluster.engine import ClusterEngine, WorkerStatus
from shardwise.deploy.fallback import fallback_options
from shardwise.deploy.moving import move_stage, place_for
from shardwise.deploy.options import Placement, RunOptions
from shardwise.deploy.relayout import Change, relayout
from shardwise.deploy.slices import recut_stage
from shardwise.deploy.stall import Refill, SessionRows, refill_times
from shardwise.deploy.supervisor import Supervisor
from shardwise.deploy.survivors import nodes_with_room, room_bytes, split_over, spread_over, surviving_stages
from shardwise.deploy.tokenizer import LlamaTokenizer
from shardwise.deploy.workers import Layout, Replica
from shardwise.errors import ReplyTimeout, ShardwiseError, UsageError
from shardwise.model.description import ModelDescription
from shardwise.records import Record, replace
from shardwise.session.driver import Driver
from shardwise.session.handle import SessionHandle
from shardwise.session.journal import Unfinished
from shardwise.session.recovery import Available, RecoveryAction, RecoveryPolicy
from shardwise.session.request import GenerationRequest, Readiness, Recovery, Token
from shardwise.session.slow import SlowStage, rebalanced
from shardwise.shards.manifest import Manifest
from shardwise.transport.messages import SamplingSettings, Stats
from shardwise.transport.security.keys import NodeKeys

if TYPE_CHECKING:  # it plans: only a deployment on a cluster loads it
    from shardwise.deploy.following import Follower, Note

TOKEN_TIMEOUT_S = 600.0

log = logging.getLogger("shardwise.deploy")


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
        layout: Layout,
        tokenizer: LlamaTokenizer,
        engine: ClusterEngine,
        driver: Driver,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: NodeKeys | None,
        driver_host: str = "127.0.0.1",
        fallback: ModelDescription | None = None,
        replica_places: list[Placement] | None = None,
    ) -> None:
        self.layout, self.tokenizer = layout, tokenizer
        self.engine, self.driver = engine, driver
        self.context, self.keys, self.driver_host = context, keys, driver_host
        self.changing = threading.RLock()  # held while workers change places; whoever watches them waits
        self.degraded = ""  # name of the fallback model, once it serves
        self.start_s = 1.0  # how long the last start of a worker took, until it was connected
        self._fallback = fallback
        self._replica_places = replica_places
        self._generation = 0
        self._one_change = threading.Lock()
        self._closed = threading.Event()
        self.supervisor: Supervisor | None = None
        self.follower: Follower | None = None  # on a cluster: what reacts to machines that come and go

    @property
    def model(self) -> ModelDescription:
        return self.layout.model

    @property
    def manifest(self) -> Manifest:
        return self.layout.manifest

    @property
    def options(self) -> RunOptions:
        return self.layout.options

    def supervise(self, policy: RecoveryPolicy) -> None:
        """Begin to watch the workers, once all are ready."""
        self.supervisor = Supervisor(self.driver, self.engine, self, policy, self.driver.clock)
        if policy.rebalance:
            self.supervisor.on_slow = self._move_load

    @property
    def slow_stages(self) -> list[SlowStage]:
        """Stages that compute much slower than they used to, while the others do not."""
        return list(self.supervisor.slow) if self.supervisor is not None else []

    def _move_load(self, slow: SlowStage) -> None:
        """Give layers of a slow stage to the others, in a thread of its own: the supervisor goes on watching."""
        figures = dict(self.driver.latest_stats)
        counts = self.options.layer_counts(self.model)
        if len(counts) < 2 or set(figures) != set(range(len(counts))):
            return
        step_s = {stage: found.decode.p50 for stage, found in figures.items()} | {slow.stage: slow.step_s}
        layers = rebalanced(list(counts), step_s)

        def act() -> None:
            try:
                self.relayout(layers)
            except ShardwiseError as error:
                log.warning("stage %d is slow, and its layers stay where they are: %s", slow.stage, error.one_line())

        if layers != counts:
            threading.Thread(target=act, name="rebalance", daemon=True).start()

    # -- asking -------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> list[StageStatus]:
        """All stages, in order, live."""
        out = []
        layout = self.layout
        for index, (name, layers) in enumerate(zip(layout.names, layout.manifest.layers, strict=True)):
            status = self._status(name)
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

    def _status(self, name: str) -> WorkerStatus:
        """Of a worker that may be stopped at this moment."""
        try:
            return self.engine.status(name)
        except UsageError:
            return WorkerStatus(name=name, node="")

    @property
    def notes(self) -> list[Note]:
        """What there was to say about machines that come and go, oldest first."""
        return list(self.follower.notes) if self.follower is not None else []

    @property
    def capacities(self) -> dict[str, int]:
        """Bytes that models may use on each node, where that is known."""
        return {info.name: info.memory_bytes for info in self.engine.node_infos() if info.memory_bytes}

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
        return self.layout.names[stage]

    def available(self, stage: int) -> Available:
        """What there is to recover a stage with (`supervisor.Restarter`)."""
        layout, nodes = self.layout, self.engine.nodes()
        place, replica = layout.places[stage], layout.replicas.get(stage)
        standing = replica is not None and stage in self.driver.peers.replicas and self._status(replica.name).alive
        refill = self._refill(stage)
        free_bytes = {info.name: info.memory_bytes for info in self.engine.node_infos()}
        others = nodes_with_room(layout, stage, nodes, free_bytes)
        return Available(
            node=place.node,
            node_alive=not place.node or place.node in nodes,
            hot_replica=(replica.place.node or replica.name) if standing and replica is not None else "",
            replica_holds_kv=self.driver.peers.mirroring,
            other_nodes=tuple(n for n in others if place.node and place_for(layout, self.engine, n) is not None),
            replan_layers=split_over(layout, surviving_stages(layout, stage, nodes), free_bytes)[0],
            fallback=self._fallback is not None and not self.degraded,
            refill_s=refill.exact_s,
            replay_s=refill.replay_s,
            fast_refill_s=refill.fast_s,
            checkpoint_refill_s=self._checkpoint_refill_s(stage),
            restart_s=self.start_s,
        )

    def _refill(self, stage: int) -> Refill:
        rows = [
            SessionRows(prompt_tokens=len(s.request.prompt), generated_tokens=len(s.generated))
            for s in list(self.driver.open_sessions.values())
        ]
        return refill_times(stage, self.driver.latest_stats, rows)

    def _checkpoint_refill_s(self, stage: int) -> float | None:
        """Of the rows after each session's checkpoint of the stage; None where a session has none."""
        known, rows = self.driver.restoring.checkpoints.num_tokens, []
        for session in list(self.driver.open_sessions.values()):
            num_tokens = known.get((session.number, stage))
            if num_tokens is None:
                return None
            after = max(0, len(session.request.prompt) + len(session.generated) - num_tokens)
            rows.append(SessionRows(prompt_tokens=0, generated_tokens=after))
        return refill_times(stage, self.driver.latest_stats, rows).exact_s if rows else None

    def replica_promoted(self, stage: int) -> None:
        """The replica takes the stage's place (`supervisor.Restarter`)."""
        self.layout.promote(stage)

    def after_promotion(self, stage: int) -> None:
        """Where replicas are kept, a new one starts where the lost worker was (`supervisor.Restarter`)."""
        if self.options.recovery.replicate == "none":
            self.engine.stop(self.layout.replicas.pop(stage).name, grace_s=0.0)
        else:
            self.start_replica(stage)

    def dead_replicas(self) -> list[int]:
        """Stages whose replica does not live (`supervisor.Restarter`)."""
        if self.options.recovery.replicate == "none":
            return []
        return [stage for stage, replica in self.layout.replicas.items() if not self._status(replica.name).alive]

    def start_replica(self, stage: int) -> None:
        """Start the replica of a stage under the present epoch; an old one ends."""
        self.engine.stop(self.layout.replicas[stage].name, grace_s=0.0)
        self.engine.start(self.layout.spec(stage, self.driver.peers.hello.epoch, replica=True))

    def replicate(self, *, at_launch: bool = False) -> None:
        """Start a replica of every stage, as the policy wants it; hot ones are sent a copy of everything."""
        kind, layout = self.options.recovery.replicate, self.layout
        if kind == "none" or self.degraded:
            return
        num_stages = len(layout.names)
        given = self._replica_places if at_launch else None
        places = given or [layout.places[(stage + 1) % num_stages] for stage in range(num_stages)]
        layout.replicas = {stage: Replica(f"{layout.names[stage]}-replica", place) for stage, place in enumerate(places)}
        self.driver.peers.mirroring = kind == "hot"
        self.driver.peers.wanted_replicas = num_stages
        self.driver.peers.awaited_replicas = num_stages if at_launch else 0
        for stage in layout.replicas:
            self.start_replica(stage)

    def restart_stage(self, stage: int, epoch: int, node: str) -> None:
        """Start a stage's worker anew (`supervisor.Restarter`)."""
        layout = self.layout
        if node and node != layout.places[stage].node:  # "" = where it was
            place = place_for(layout, self.engine, node)
            if place is None:
                raise UsageError(f"no way to reach node '{node}'", where=f"stage {stage}")
            layout.places[stage] = place
        self.engine.stop(layout.names[stage], grace_s=0.0)
        self.engine.start(layout.spec(stage, epoch))

    def recut(self, stage: int) -> None:
        """Cut the stage's slice from the model again (`supervisor.Restarter`)."""
        recut_stage(self.model, self.options, self.manifest, stage)

    def rebuild(self, action: RecoveryAction, what: str, timeout_s: float) -> None:
        """A new split over the survivors, or the fallback model on one of them (`supervisor.Restarter`)."""
        change = Change(
            what=what,
            grade=action.grade,
            predicted_stall_s=action.predicted_stall_s,
            beside=False,
            timeout_s=min(timeout_s, self.options.start_timeout_s),
        )
        survivors = surviving_stages(self.layout, action.stage, self.engine.nodes())
        places = [self.layout.places[stage] for stage in survivors]
        if action.kind == "fallback":
            assert self._fallback is not None
            known = [place_for(self.layout, self.engine, node) for node in self.engine.nodes()]
            places += [place for place in known if place is not None]
            self._change(self._fallback, fallback_options(self.options), (places or self.layout.places)[:1], change)
            self.degraded = self._fallback.name
        else:
            options = replace(self.options, layers=action.layers, num_stages=len(action.layers))
            self._change(self.model, options, places, change)

    # -- changing -----------------------------------------------------------------------------------------------

    def relayout(self, layers: tuple[int, ...] = (), placements: list[Placement] | None = None, *, beside: bool = True) -> None:
        """Another split or other places under load: no request is lost, sessions go on with the same tokens.

        `layers` of each stage (default: as now), `placements` one a stage (default: the present places in turn). With
        `beside` the old workers serve until the new ones are ready; without, they end first, for machines with memory for
        one split only. Raises `UsageError` for an impossible split, and what a launch raises; then the old split goes on.
        """
        counts = tuple(layers) or self.options.layer_counts(self.model)
        places = placements or [self.layout.places[stage % len(self.layout.places)] for stage in range(len(counts))]
        if len(places) != len(counts):
            raise UsageError(f"{len(places)} places for {len(counts)} stages", where="placements")
        options = replace(self.options, layers=counts, num_stages=len(counts))
        change = Change(
            what=f"new split {'+'.join(map(str, counts))}",
            predicted_stall_s=self._refill(0).replay_s + (0.0 if beside else self.start_s),
            beside=beside,
            timeout_s=options.start_timeout_s,
        )
        self._change(self.model, options, places, change)

    def _change(self, model: ModelDescription, options: RunOptions, places: list[Placement], change: Change) -> None:
        with self.exclusively():
            relayout(self, model, options, places, change)

    def replace_worker(self, stage: int, placement: Placement | None = None) -> None:
        """A fresh worker takes over a stage, on another node or the same (an upgrade); only that stage is refilled."""
        if not 0 <= stage < len(self.layout.names):
            raise UsageError(f"stage {stage}", where="stage", hint=f"0 to {len(self.layout.names) - 1}")
        with self.exclusively():
            move_stage(self, stage, placement or self.layout.places[stage])

    def works_on(self, node: str) -> bool:
        """Whether a stage or a replica runs there."""
        places = [*self.layout.places, *(replica.place for replica in self.layout.replicas.values())]
        return any(place.node == node for place in places)

    def drain(self, node: str, to: Sequence[str] = ()) -> None:
        """Move every stage and replica away from a node that is to leave, to the others or to those named; nothing is lost.

        Each stage goes to the node with most room; where none has enough for one, all are split anew over those that are left.
        `UsageError` where that does not fit either; then those that could not move stay.
        """
        others = [n for n in to or self.engine.nodes() if n != node and place_for(self.layout, self.engine, n) is not None]
        mine = [status.index for status in self.stages if status.node == node]
        if mine and not others:
            raise UsageError(f"no other node can take the stages of '{node}'", where="drain", hint="add a node first")
        for stage in mine:
            room = room_bytes(self.layout, self.engine.node_infos())
            fitting = nodes_with_room(self.layout, stage, others, room)
            if not fitting:
                self._spread(others, room)
                break
            self.replace_worker(stage, place_for(self.layout, self.engine, fitting[0]))
        for stage, replica in list(self.layout.replicas.items()):
            if replica.place.node == node and others:
                place = place_for(
                    self.layout, self.engine, next((n for n in others if n != self.layout.places[stage].node), others[0])
                )
                with self.changing:
                    replica.place = place or replica.place
                    self.start_replica(stage)

    def _spread(self, nodes: Sequence[str], room: dict[str, int]) -> None:
        """A new split over these nodes."""
        layers, names = spread_over(self.layout, nodes, room)
        places = [place for name in names if (place := place_for(self.layout, self.engine, name)) is not None]
        if not layers:
            raise UsageError(f"{', '.join(nodes)} have no room for the stages", where="drain", hint="add a node first")
        self.relayout(layers, places)

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """One change of the split at a time."""
        if not self._one_change.acquire(blocking=False):
            raise UsageError("another change of the deployment is under way", where="deployment", hint="try again later")
        try:
            yield
        finally:
            self._one_change.release()

    def next_generation(self) -> int:
        """A number for the names of a new split's workers."""
        self._generation += 1
        return self._generation

    # -- ending -------------------------------------------------------------------------------------------------

    def close(self, drain_s: float = 0.0) -> None:
        """End everything: first wait up to `drain_s` for running sessions."""
        if self._closed.is_set():
            return
        if drain_s > 0:
            with contextlib.suppress(ShardwiseError):  # what has not ended by then is cancelled
                self.driver.wait_until(lambda: not self.driver.open_sessions and not self.driver.waiting, drain_s, "draining")
        self._closed.set()
        with contextlib.ExitStack() as ends:  # last in, first out; one that fails does not keep the others from ending
            ends.callback(self.context.destroy, linger=0)
            ends.callback(self.engine.close)
            ends.callback(self.driver.close)
            if self.layout.pieces is not None:
                ends.callback(self.layout.pieces.close)
            if self.supervisor is not None:
                ends.callback(self.supervisor.stop)
            if self.follower is not None:
                ends.callback(self.follower.close)

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
