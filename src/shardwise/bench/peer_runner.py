"""Measures other programs on the same virtual network: llama.cpp, its RPC backend, language-pipes, transformers.

Each peer is a script in `benchmarks/peers` that runs in an environment of its own and speaks the protocol described
there: a `serve` process on every host (where the peer has servers), then a `client` on the first host that prints one
line a load.

**Promises** every process is gone when `run_group` returns. **Fails when** the environment or the script is missing
(`MissingExtraError` with the command that makes it), or the peer ends early (`StageCrashed` with its last words).
**Called by** `runner`, for the engines of `PEERS`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from shardwise.bench.deployment_runner import background_traffic, open_home
from shardwise.bench.environment import iso_now, load_1min, machine_s
from shardwise.bench.lab import AnyLab, LoopbackLab
from shardwise.bench.prompts import TEXT
from shardwise.bench.result import Case, RequestResult, StageFigures, TrialResult
from shardwise.bench.runner import OnTrial
from shardwise.bench.scenario import Scenario
from shardwise.clock import SystemClock
from shardwise.errors import MissingExtraError, StageCrashed, UsageError
from shardwise.model.resolve import describe_model, resolve_model
from shardwise.records import Record
from shardwise.shards.cache_folder import default_cache

_CLOCK = SystemClock()
_TIMEOUT_S = 600.0
_RPC_PORT = 50_852


class Peer(Record):
    """How an engine is run. `servers`: whether every host runs one; `needs_folder`: bfloat16 safetensors."""

    script: str
    environment: str
    servers: bool = False
    needs_folder: bool = False


PEERS = {
    "llama.cpp": Peer(script="llama_peer.py", environment="llama-rpc"),
    "llama.cpp RPC": Peer(script="llama_peer.py", environment="llama-rpc", servers=True),
    "language-pipes": Peer(script="language_pipes_peer.py", environment="language-pipes", servers=True, needs_folder=True),
    "transformers": Peer(script="transformers_peer.py", environment="transformers", needs_folder=True),
}


class PeerUser(msgspec.Struct):
    """One user's times, as the script prints them."""

    first_s: float
    gaps_s: list[float]
    num_tokens: int
    digest: str


class PeerLine(msgspec.Struct):
    """One line of a client."""

    loaded: bool = False
    load: str = ""
    users: list[PeerUser] = []
    peak_memory_bytes: int = 0


class PeerRunner:
    """The `GroupRunner` of one peer."""

    def __init__(self, peer: Peer, scripts: Path) -> None:
        self._peer, self._scripts = peer, scripts
        self._home = default_cache() / "peers"

    def run_group(self, scenario: Scenario, cases: Sequence[Case], repetition: int, on_trial: OnTrial) -> None:
        network = scenario.network(cases[0].network)
        job = self._job(scenario, cases)
        with open_home(network, scenario.seed) as lab, background_traffic(network, lab), contextlib.ExitStack() as stack:
            hosts = cases[0].hosts
            if isinstance(lab, LoopbackLab):
                raise UsageError("peers cannot be told of relays", where=network.name, hint="run as root on Linux")
            addresses = [lab.address(host) if lab else "127.0.0.1" for host in hosts]
            job["addresses"] = addresses
            if self._peer.servers:
                job["servers"] = [f"{address}:{_RPC_PORT + index}" for index, address in enumerate(addresses)]
                for index, host in enumerate(hosts):
                    own = job | {"index": index, "address": job["servers"][index]}
                    process = stack.enter_context(self._process("serve", own, lab, host))
                    _wait_for_ready(process)
            client = stack.enter_context(self._process("client", job, lab, cases[0].asking_host))
            self._collect(client, cases, repetition, on_trial)

    def _job(self, scenario: Scenario, cases: Sequence[Case]) -> dict[str, Any]:
        model = str(describe_model(resolve_model(scenario.model)).source.paths[0])
        return {
            "model": model,
            "hf_folder": str(self._folder(Path(model))) if self._peer.needs_folder else "",
            "text": TEXT,
            "servers": [],
            "threads": scenario.num_threads,
            "context_tokens": scenario.context_tokens,
            "warm_up": scenario.warm_up,
            "loads": [
                {
                    "name": case.workload,
                    "prompt_tokens": case.prompt_tokens,
                    "output_tokens": case.output_tokens,
                    "num_users": case.num_users,
                }
                for case in cases
            ],
        }

    def _python(self, environment: str) -> str:
        python = self._home / environment / "bin" / "python"
        if not python.exists():
            raise MissingExtraError(
                f"the environment of the peer '{environment}' is not there",
                where=str(python),
                hint=f"python3 benchmarks/peers/envs.py {environment}",
            )
        return str(python)

    def _folder(self, gguf: Path) -> Path:
        """The same weights as bfloat16 safetensors, made once."""
        folder = self._home / f"hf-{gguf.stem}"
        if not (folder / "model.safetensors").exists():
            command = [self._python("transformers"), str(self._scripts / "gguf_to_hf.py"), str(gguf), str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
            if done.returncode:
                raise StageCrashed(f"the weights were not converted: {_last(done.stderr)}", where=str(gguf))
        return folder

    @contextlib.contextmanager
    def _process(self, role: str, job: dict[str, Any], lab: AnyLab | None, host: str) -> Iterator[PeerProcess]:
        command = [*(lab.prefix(host) if lab else []), self._python(self._peer.environment), self._peer.script, role]
        with tempfile.TemporaryFile() as log:
            process = PeerProcess(command, self._scripts, job, log)
            try:
                yield process
            finally:
                process.end()

    def _collect(self, client: PeerProcess, cases: Sequence[Case], repetition: int, on_trial: OnTrial) -> None:
        by_load = {case.workload: case for case in cases}
        start_s, before_s = _CLOCK.now_s(), machine_s()
        for line in client.lines():
            if line.loaded:
                start_s = _CLOCK.now_s()
                continue
            case = by_load.pop(line.load)
            on_trial(_trial(case, repetition, line, _CLOCK.now_s() - start_s, (before_s + machine_s()) / 2))
            start_s, before_s = _CLOCK.now_s(), machine_s()
        if by_load:
            raise StageCrashed(f"the peer ended early: {client.last_words()}", where=cases[0].engine)


class PeerProcess:
    """A peer's script, with its job on standard input (which stays open: its end is the signal to end)."""

    def __init__(self, command: list[str], folder: Path, job: dict[str, Any], log: IO[bytes]) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
        self._log = log
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
        )
        self._watch = threading.Timer(_TIMEOUT_S, self.process.kill)
        self._watch.start()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # its log tells why
                self.process.stdin.write(msgspec.json.encode(job) + b"\n")
                self.process.stdin.flush()

    def lines(self) -> Iterator[PeerLine]:
        """What a client prints, until it ends."""
        for line in self.process.stdout or ():
            yield msgspec.json.decode(line, type=PeerLine)

    def first_line(self) -> str:
        return (self.process.stdout.readline() if self.process.stdout else b"").decode().strip()

    def last_words(self) -> str:
        self._log.seek(0)
        return _last(self._log.read()[-4000:].decode(errors="replace"))

    def end(self) -> None:
        self._watch.cancel()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.5)
        self.process.kill()
        self.process.wait(timeout=10)
        if self.process.stdout is not None:
            self.process.stdout.close()


def _wait_for_ready(process: PeerProcess) -> None:
    if process.first_line() != "ready":
        raise StageCrashed(f"the peer's server did not start: {process.last_words()}", where="peer")


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def _trial(case: Case, repetition: int, line: PeerLine, duration_s: float, busy_s: float) -> TrialResult:
    requests = tuple(
        RequestResult(
            prompt_tokens=case.prompt_tokens,
            num_tokens=user.num_tokens,
            time_to_first_token_s=user.first_s,
            inter_token_s=tuple(round(gap, 7) for gap in user.gaps_s),
            token_digest=user.digest,
        )
        for user in line.users
    )
    stage = StageFigures(node=case.hosts[0], layers=(0, 0), peak_memory_bytes=line.peak_memory_bytes)
    return TrialResult(
        case=case,
        repetition=repetition,
        started=iso_now(),
        duration_s=round(duration_s, 4),
        requests=requests,
        stages=(stage,),
        load_1min=load_1min(),
        machine_s=round(busy_s, 6),
    )
