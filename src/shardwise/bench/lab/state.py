"""Which labs exist on this machine, and taking them down whatever happened to their owner.

Every lab owns a number: a file `<number>.json` made with O_EXCL in the state directory. All its namespaces, cgroups
and addresses carry the number, so two labs cannot meet and a lab can be taken down without its owner.

**Promises** `tear_down` removes everything a lab made; it may be called twice, and by anyone.
**Fails when** not root. **Called by** `Lab`, the guard process, `shardwise bench lab clean`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import psutil

from shardwise.bench.lab import system
from shardwise.bench.lab.system import lab_unavailable
from shardwise.errors import UsageError
from shardwise.records import Record, from_json, to_json

__all__ = ["LabState", "claim", "clean", "is_alive", "lab_unavailable", "labs", "tear_down"]

NUM_LABS = 256


class LabState(Record):
    """What is written down about a lab before anything is made."""

    number: int
    owner_pid: int
    owner_started_s: float  # seconds since the epoch, tells a reused process id apart

    @property
    def prefix(self) -> str:
        """What all names of this lab start with."""
        return f"swlab{self.number}-"

    @property
    def outside_device(self) -> str:
        """The machine's own end of the cable into the lab."""
        return f"swl{self.number}"

    @property
    def path(self) -> Path:
        return state_dir() / f"{self.number}.json"

    def netns(self, host: str) -> str:
        """The namespace of a host."""
        return f"{self.prefix}{host}"

    def address(self, index: int) -> str:
        """The address of the host with this index (1-250)."""
        return f"10.213.{self.number}.{index}"


def state_dir() -> Path:
    """Where labs are written down."""
    base = Path("/run") if os.access("/run", os.W_OK) else Path(tempfile.gettempdir())
    return base / "shardwise-lab"


def claim() -> LabState:
    """A free number, written down for this process."""
    directory = state_dir()
    directory.mkdir(parents=True, exist_ok=True)
    me = psutil.Process()
    for number in range(NUM_LABS):
        state = LabState(number=number, owner_pid=me.pid, owner_started_s=me.create_time())
        with contextlib.suppress(FileExistsError):
            fd = os.open(state.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(to_json(state))
            return state
    raise UsageError(f"all {NUM_LABS} lab numbers are taken", where=str(directory), hint="run 'shardwise bench lab clean'")


def labs() -> list[LabState]:
    """All labs written down; a file cut short by a crash counts as a lab whose owner is gone."""
    found = []
    for path in sorted(state_dir().glob("*.json")):
        try:
            found.append(from_json(path.read_bytes(), LabState))
        except UsageError:
            found.append(LabState(number=int(path.stem), owner_pid=0, owner_started_s=0.0))
        except FileNotFoundError:
            continue
    return found


def is_alive(state: LabState) -> bool:
    """Whether the process that made the lab still runs."""
    try:
        started_s = float(psutil.Process(state.owner_pid).create_time())
        return abs(started_s - state.owner_started_s) < 2.0
    except psutil.NoSuchProcess:
        return False


def tear_down(state: LabState) -> None:
    """Kill the lab's processes, remove its namespaces and cgroups, give the number back."""
    names = system.netns_names(state.prefix)
    for name in names:
        system.kill_all(system.netns_pids(name))
    system.call("ip", "link", "del", state.outside_device, check=False)  # namespaces are freed later, names at once
    for name in names:
        system.call("ip", "netns", "del", name, check=False)
    system.remove_cgroups(state.prefix)
    state.path.unlink(missing_ok=True)


def clean(*, everything: bool = False) -> list[int]:
    """Take down labs whose owner is gone (all labs with `everything`); returns their numbers."""
    gone = [state for state in labs() if everything or not is_alive(state)]
    for state in gone:
        tear_down(state)
    return [state.number for state in gone]
