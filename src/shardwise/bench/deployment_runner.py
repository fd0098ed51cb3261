"""Measures groups of cases on real deployments, in a virtual home or on this machine alone.

    scenario -> Lab -> agent process in the first stage's host -> launch() with a worker in each host -> trials

**Promises** the lab and every process are gone when `run_group` returns, whatever happened.
**Fails when** the agent ends without a word (`StageCrashed` with the end of its log) or is silent for too long.
**Called by** `runner`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import psutil

from shardwise.bench.agent_records import AgentJob, AgentPlace, AgentWord, Way, WayWanted
from shardwise.bench.lab import AnyLab, Lab, LoopbackLab, lab_unavailable
from shardwise.bench.result import Case
from shardwise.bench.runner import OnTrial
from shardwise.bench.scenario import Network, Scenario
from shardwise.errors import ReplyTimeout, StageCrashed, UsageError, from_record
from shardwise.records import from_json, replace, to_json
from shardwise.transport.faults import Fault
from shardwise.transport.shaping import LinkShape

GROUP_TIMEOUT_S = 900.0


class DeploymentRunner:
    """The `GroupRunner` of engine `shardwise`.

    `extra_prefix`: by (network, host), what to put before the commands of the workers there, after the lab's own prefix
    (`truth` injects its faults that way).
    """

    def __init__(self, *, extra_prefix: dict[tuple[str, str], tuple[str, ...]] | None = None) -> None:
        self._extra_prefix = extra_prefix or {}

    def run_group(self, scenario: Scenario, cases: Sequence[Case], repetition: int, on_trial: OnTrial) -> None:
        network = scenario.network(cases[0].network)
        with open_home(network, scenario.seed) as lab:
            job = make_job(scenario, network, cases, repetition, lab)
            with tempfile.TemporaryDirectory() as notes, background_traffic(network, lab):
                places = tuple(self._with_extras(place, network, job, notes) for place in job.places)
                asker = lab.prefix(cases[0].asking_host) if lab else ()
                self._run_agent(replace(job, places=places), asker, FaultHand(lab, network), on_trial)

    def _with_extras(self, place: AgentPlace, network: Network, job: AgentJob, notes: str) -> AgentPlace:
        """The place with what is put before its workers' commands: injected faults."""
        extra = self._extra_prefix.get((network.name, place.node), ())
        updated = {fault.target for faults in job.faults.values() for fault in faults if fault.kind == "version_mismatch"}
        if place.node in updated:
            folder = Path(__file__).parent / "injection" / "updated"
            extra = (*extra, "env", f"PYTHONPATH={folder}", f"SHARDWISE_STARTS={notes}/{place.node}")
        return replace(place, prefix=with_one_python_path((*place.prefix, *extra)))

    def _run_agent(self, job: AgentJob, asker: Sequence[str], hand: FaultHand, on_trial: OnTrial) -> None:
        command = [*asker, sys.executable, "-m", "shardwise.bench.agent"]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
            watch = threading.Timer(GROUP_TIMEOUT_S, process.kill)
            watch.start()
            try:
                _tell(process, job)
                _listen(process, hand, on_trial)
                if process.wait(timeout=30) != 0:
                    raise _crash(process.returncode, log, timed_out=not watch.is_alive())
            finally:
                watch.cancel()
                process.kill()
                process.wait(timeout=10)
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        with contextlib.suppress(BrokenPipeError):
                            pipe.close()


def with_one_python_path(prefix: tuple[str, ...]) -> tuple[str, ...]:
    """Several `env PYTHONPATH=...` in a row would each forget the earlier ones: all of them, in every place."""
    mark = "PYTHONPATH="
    folders = os.pathsep.join(word.removeprefix(mark) for word in prefix if word.startswith(mark))
    return tuple(mark + folders if word.startswith(mark) else word for word in prefix)


@contextlib.contextmanager
def open_home(network: Network, seed: int) -> Iterator[AnyLab | None]:
    """The network's virtual home, or None where plain processes on this machine do. Without root it is made of relays."""
    if network.is_bare:
        yield None
        return
    make = LoopbackLab if lab_unavailable() else Lab
    with make(network.hosts, network.links, seed=seed) as lab:
        yield lab


@contextlib.contextmanager
def background_traffic(network: Network, lab: AnyLab | None) -> Iterator[None]:
    """The network's bulk transfers, while the block runs."""
    with contextlib.ExitStack() as stack:
        for source, target in network.background:
            if lab is None:
                raise UsageError("background transfers need a virtual home", where=f"network {network.name}")
            stack.enter_context(lab.background(source, target))
        yield


def make_job(scenario: Scenario, network: Network, cases: Sequence[Case], repetition: int, lab: AnyLab | None) -> AgentJob:
    """The agent's orders for one group."""
    limits = {host.name: host.memory_bytes or psutil.virtual_memory().total for host in network.hosts}
    places = tuple(
        AgentPlace(
            node=name,
            host=lab.address(name) if lab else "127.0.0.1",
            prefix=tuple(lab.prefix(name)) if lab else (),
            memory_limit_bytes=limits[name],
        )
        for name in cases[0].hosts
    )
    return AgentJob(
        model=scenario.model,
        places=places,
        driver_host=lab.address(cases[0].asking_host) if lab else "127.0.0.1",
        cases=tuple(cases),
        repetition=repetition,
        layers=cases[0].layers,
        warm_up=scenario.warm_up,
        context_tokens=scenario.context_tokens,
        num_threads=scenario.num_threads,
        trace_tokens=scenario.trace_tokens,
        seed=scenario.seed,
        faults={name: scenario.fault_schedule(name) for case in cases for name in case.faults},
        relayed=isinstance(lab, LoopbackLab),
    )


def _tell(process: subprocess.Popen[bytes], record: AgentJob | Way) -> None:
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # it is gone: its log tells why
            process.stdin.write(to_json(record) + b"\n")
            process.stdin.flush()


def _listen(process: subprocess.Popen[bytes], hand: FaultHand, on_trial: OnTrial) -> None:
    if process.stdout is None:
        return
    with hand:
        for line in process.stdout:
            word = from_json(line, AgentWord, where="bench agent")
            if word.trial is not None:
                on_trial(word.trial)
            elif word.fault is not None:
                hand.act(word.fault)
            elif word.way is not None:
                _tell(process, hand.way(word.way))
            elif word.error is not None:
                raise from_record(word.error.type, word.error.message)


def _crash(status: int, log: IO[bytes], *, timed_out: bool) -> StageCrashed | ReplyTimeout:
    log.seek(0)
    tail = log.read()[-2000:].decode(errors="replace").strip()
    if timed_out:
        return ReplyTimeout(f"a group of trials took more than {GROUP_TIMEOUT_S:.0f} s", where="bench agent")
    last = tail.splitlines()[-1:] or ["no output"]
    return StageCrashed(f"the bench agent ended with {status}: {last[0]}", where="bench agent", exit_status=status, log_tail=tail)


class FaultHand:
    """Carries out the network's and the hosts' part of faults, and takes them back after their duration."""

    def __init__(self, lab: AnyLab | None, network: Network) -> None:
        self._lab, self._network = lab, network
        self._timers: list[threading.Timer] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FaultHand:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join(timeout=30)
        self._stack.close()

    def way(self, wanted: WayWanted) -> Way:
        """Through which relay one host reaches a port of another."""
        if self._lab is None:
            raise UsageError("there is no virtual home", where=f"network {self._network.name}")
        host, port = self._lab.route(wanted.source, wanted.target, wanted.port)
        return Way(host=host, port=port)

    def act(self, fault: Fault) -> None:
        """Do it; `UsageError` where this home cannot."""
        if self._lab is None:
            raise UsageError(f"the fault '{fault.kind}' needs a virtual home", where=f"network {self._network.name}")
        lab, host = self._lab, fault.target
        before = next((found for found in self._network.hosts if found.name == host), None)
        if fault.kind == "cut":
            lab.cut(host)
            self._later(fault.duration_s, lambda: lab.restore(host))
        elif fault.kind == "one_way_cut":
            lab.set_access(host, up=LinkShape(loss=0.999999, loss_burst_packets=1e9))
            self._later(fault.duration_s, lambda: lab.set_access(host, up=before.up if before else LinkShape()))
        elif fault.kind == "slow_link" and fault.shape is not None:
            lab.set_access(host, up=fault.shape, down=fault.shape)
            self._later(fault.duration_s, lambda: self._give_back(host))
        elif fault.kind == "roam" and fault.shape is not None:
            shape = fault.shape
            lab.cut(host)
            self._later(fault.duration_s, lambda: self._arrive(host, shape))
        elif fault.kind == "bulk":
            traffic = self._stack.enter_context(contextlib.ExitStack())
            traffic.enter_context(lab.background(host, fault.peer))
            self._later(fault.duration_s, traffic.close)
        elif fault.kind == "slow_node":
            lab.set_speed(host, fault.cpu_share)
            self._later(fault.duration_s, lambda: lab.set_speed(host, before.speed if before else 1.0))
        else:
            raise UsageError(f"the fault '{fault.kind}' is not one that the bench can cause", where="bench")

    def _arrive(self, host: str, shape: LinkShape) -> None:
        if self._lab is not None:
            self._lab.set_access(host, up=shape, down=shape)
            self._lab.restore(host)

    def _give_back(self, host: str) -> None:
        for found in self._network.hosts:
            if found.name == host and self._lab is not None:
                self._lab.set_access(host, up=found.up, down=found.down)

    def _later(self, delay_s: float, action: object) -> None:
        timer = threading.Timer(delay_s, action)  # type: ignore[arg-type]
        self._timers.append(timer)
        timer.start()
