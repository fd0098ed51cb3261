"""Another split, other places or another model under a running deployment, without losing a request.

new slices -> new workers beside the old ones -> Ready, Connected -> the driver switches -> sessions are replayed -> old ones end

**Promises** until the switch the old split serves; if a new worker fails, the old split goes on as if nothing had been tried;
sessions go on with the same tokens, because the replay feeds the rows in their old shapes. **Fails when** the split is
impossible (`UsageError`), a new worker cannot load (`StageError`), or one takes too long (`ReplyTimeout`).
**Called by** `Deployment.relayout`, `drain`, and the supervisor when a stage cannot be had again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from shardwise.deploy.options import Placement, RunOptions
from shardwise.deploy.slices import prepare_slices
from shardwise.deploy.workers import Layout, crash_error, hello_of, listen_on, make_layout
from shardwise.errors import ReplyTimeout, ShardwiseError
from shardwise.model.description import ModelDescription
from shardwise.records import Record, replace
from shardwise.session.driver import Driver
from shardwise.session.incoming import Incoming
from shardwise.session.peers import Peers

if TYPE_CHECKING:
    from shardwise.deploy.deployment import Deployment

LOOK_S = 0.1
SWITCH_TIMEOUT_S = 30.0


class Change(Record):
    """What is to be changed, and how it is reported."""

    what: str
    grade: str = "exact"
    predicted_stall_s: float = 0.0
    timeout_s: float = 120.0
    beside: bool = True  # the old workers serve until the new ones are ready; False: they end first (memory for one split only)


def relayout(
    deployment: Deployment, model: ModelDescription, options: RunOptions, places: list[Placement], change: Change
) -> None:
    """Carry out a change; returns when the new split serves."""
    options.check(model)
    manifest, _ = prepare_slices(model, options)
    driver, engine = deployment.driver, deployment.engine
    hello = hello_of(manifest, options, driver.peers.hello.epoch + 1)
    settings = replace(
        driver.peers.settings,
        num_stages=len(manifest.layers),
        hello=hello,
        context_tokens=options.context_tokens,
        listen=listen_on(deployment.driver_host),
    )
    peers = Peers(settings, deployment.keys, deployment.context, beside=driver.peers)
    generation = deployment.next_generation()
    made = make_layout(
        model, options, manifest, places, peers, deployment.driver_host, deployment.keys, deployment.context, generation
    )
    old = deployment.layout
    incoming = driver.expect(peers)
    try:
        if not change.beside:
            _end_workers(deployment, old, grace_s=0.0)
        for stage in range(settings.num_stages):
            engine.start(made.spec(stage, hello.epoch))
        _await_connected(deployment, made, incoming, change.timeout_s)
        _switch(deployment, made, change)
    except BaseException:
        _abandon(deployment, made)
        raise
    _end_workers(deployment, old)
    if old.pieces is not None:
        old.pieces.close()


def _await_connected(deployment: Deployment, made: Layout, incoming: Incoming, timeout_s: float) -> None:
    clock = deployment.driver.clock
    end_s, moved_bytes = clock.now_s() + timeout_s, 0
    while not incoming.complete:
        if incoming.failure is not None:
            raise incoming.failure
        if deployment.driver.failure is not None:
            raise deployment.driver.failure
        if (moved := sum(incoming.moved_bytes.values())) != moved_bytes:  # slices are on their way: the time begins anew
            moved_bytes, end_s = moved, clock.now_s() + timeout_s
        if clock.now_s() > end_s:
            raise ReplyTimeout(f"the new stages were not ready within {timeout_s:.0f} s", hint="raise --start-timeout")
        deployment.driver.wait_changed(LOOK_S)
        for name in made.names:
            status = deployment.engine.status(name)
            if not status.alive and incoming.failure is None:
                deployment.driver.wait_changed(0.3)  # its own last word says more
                raise incoming.failure or crash_error(name, status.exit_status, status.log_tail)


def _switch(deployment: Deployment, made: Layout, change: Change) -> None:
    """In the driver's thread, while the supervisor looks away."""
    driver, done = deployment.driver, threading.Event()
    failed: list[ShardwiseError] = []

    def act() -> None:
        try:
            driver.switch(change.what, change.grade, change.predicted_stall_s)
            deployment.layout = made
        except ShardwiseError as error:
            failed.append(error)
        done.set()

    with deployment.changing:
        driver.call(act)
        if not done.wait(SWITCH_TIMEOUT_S):
            raise ReplyTimeout("the session driver does not answer", where="relayout")
    if failed:
        raise failed[0]
    if deployment.supervisor is not None:
        deployment.supervisor.forget_history()
    deployment.replicate()


def _abandon(deployment: Deployment, made: Layout) -> None:
    _call(deployment.driver, deployment.driver.drop_incoming)
    _end_workers(deployment, made)
    for config in made.configs:
        if config.public_key:
            deployment.driver.peers.allowed.remove(config.public_key)
    if made.pieces is not None:
        made.pieces.close()


def _call(driver: Driver, action: Callable[[], None]) -> None:
    done = threading.Event()

    def act() -> None:
        action()
        done.set()

    driver.call(act)
    done.wait(SWITCH_TIMEOUT_S)


def _end_workers(deployment: Deployment, layout: Layout, grace_s: float = 1.0) -> None:
    """All at once: they were told to end, or are not wanted; the driver does not listen to them any more."""
    threads = [
        threading.Thread(target=deployment.engine.stop, args=(name,), kwargs={"grace_s": grace_s}, name=f"end-{name}")
        for name in layout.worker_names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
