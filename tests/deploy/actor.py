"""Carries out the faults of a `FaultPlan` on a deployment in a virtual home, and takes them back after their duration."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from shardwise.bench.lab import Host, Lab
from shardwise.cluster.local import LocalEngine
from shardwise.deploy import Deployment, Placement, RunOptions, launch
from shardwise.transport.faults import Fault, FaultClock, FaultPlan
from shardwise.transport.shaping import LinkShape
from tests.deploy.faults import Watched

HOSTS = ("desktop", "nas", "laptop")
LOST = LinkShape(loss=0.999999, loss_burst_packets=1e9)
SIGNALS = {"kill": signal.SIGKILL, "restart": signal.SIGTERM}


def make_home() -> Lab:
    """Three hosts whose cables can be cut, slowed and delayed, also towards the driver, and whose processors can be slowed."""
    return Lab([Host.on("ethernet_1g", name, relay=True, brakes=True) for name in HOSTS], shaped_operator=True)


def launch_at_home(home: Lab, model: Path, **settings: object) -> Deployment:
    """One stage a host; the driver has an address of its own."""
    engine = LocalEngine({name: tuple(home.prefix(name)) for name in HOSTS})
    options = RunOptions(num_stages=len(HOSTS), **settings)  # type: ignore[arg-type]
    return launch(model, options, engine=engine, placements=places(home), driver_host=home.operator_address)


def places(home: Lab) -> list[Placement]:
    return [Placement(node=name, host=home.address(name)) for name in HOSTS]


class Actor:
    """Targets are stages ("stage-1"); network faults strike the host on which the stage runs at that moment."""

    def __init__(self, home: Lab, deployment: Deployment) -> None:
        self._home, self._deployment = home, deployment
        self._timers: list[threading.Timer] = []
        self._stopped: dict[threading.Timer, int] = {}

    def act(self, fault: Fault) -> None:
        """Begin a fault; its end is a timer's business."""
        home = self._home
        if fault.target == "driver":
            self._around_the_driver(fault)
            return
        index = min(int(fault.target.removeprefix("stage-")), len(self._deployment.stages) - 1)
        stage = self._deployment.stages[index]
        host = stage.node
        if fault.kind in SIGNALS:
            _signal(stage.pid, SIGNALS[fault.kind])
        elif fault.kind == "stop":
            _signal(stage.pid, signal.SIGSTOP)
            self._later(fault, _signal, stage.pid, signal.SIGCONT)
            self._stopped[self._timers[-1]] = stage.pid
        elif fault.kind == "corrupt_slice":
            self.corrupt(index)
            _signal(stage.pid, signal.SIGKILL)
        elif fault.kind == "cut":
            home.cut(host)
            self._later(fault, home.restore, host)
        elif fault.kind == "slow_node":
            home.set_speed(host, fault.cpu_share)
            self._later(fault, home.set_speed, host, 1.0)
        else:
            up = fault.shape or LOST
            down = fault.shape or LinkShape()  # one way: only what the host sends is lost
            home.set_access(host, up=up, down=down)
            self._later(fault, self._heal, host)

    def _around_the_driver(self, fault: Fault) -> None:
        """It is alone: nothing of any host (or nothing that they send) arrives."""
        for host in HOSTS:
            if fault.kind == "cut":
                self._home.cut(host)
                self._later(fault, self._home.restore, host)
            else:
                self._home.set_access(host, up=LOST, down=LinkShape())
                self._later(fault, self._heal, host)

    def _heal(self, host: str) -> None:
        self._home.set_access(host, up=LinkShape(), down=LinkShape())

    def _later(self, fault: Fault, undo: object, *args: object) -> None:
        timer = threading.Timer(fault.duration_s, undo, args)  # type: ignore[arg-type]
        timer.start()
        self._timers.append(timer)

    def corrupt(self, stage: int) -> None:
        """Flip a bit on the disk; what a running worker has mapped stays as it is."""
        deployment = self._deployment
        for file in deployment.manifest.stages[stage].files:
            path = next(deployment.options.cache().rglob(file.name))
            damaged = path.with_suffix(".damaged")
            shutil.copy(path, damaged)
            with damaged.open("r+b") as stream:
                stream.seek(file.num_bytes // 2)
                byte = stream.read(1)
                stream.seek(-1, os.SEEK_CUR)
                stream.write(bytes([byte[0] ^ 0x10]))
            damaged.replace(path)

    def join(self) -> None:
        """Until every fault has been taken back. A stopped process that was replaced needs nobody to wake it."""
        for timer in self._timers:
            while timer.is_alive():
                if timer in self._stopped and not psutil.pid_exists(self._stopped[timer]):
                    timer.cancel()
                timer.join(timeout=0.1)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it was replaced meanwhile


def run_plan(home: Lab, deployment: Deployment, plan: FaultPlan, sessions: Sequence[Watched]) -> None:
    """Strike as the plan says (moments are those of the first session) until all sessions have ended and all is healed."""
    actor, clock, first = Actor(home, deployment), FaultClock(plan), sessions[0]
    started_s = deployment.driver.clock.now_s()
    try:
        while not first.over:
            elapsed_s = deployment.driver.clock.now_s() - started_s
            for fault in clock.due(elapsed_s=elapsed_s, num_tokens=len(first.tokens), prefilling=not first.tokens):
                actor.act(fault)
            first.wait_changed(0.01)
            assert elapsed_s < 240, f"hangs: {deployment.readiness()}, {[len(s.tokens) for s in sessions]} tokens"
        for session in sessions:
            session.wait_for(10**9)
    finally:
        actor.join()
