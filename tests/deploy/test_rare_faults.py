"""A disk that is full when a damaged slice must be cut again, and a worker that comes back as another version."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.cluster.engine import WorkerSpec
from shardwise.cluster.local import LocalEngine
from shardwise.deploy import RunOptions, launch, launch_local
from shardwise.errors import SessionLost
from shardwise.records import replace
from shardwise.session.recovery import RecoveryPolicy
from shardwise.transport.faults import Fault
from tests.deploy.actor import Actor
from tests.deploy.faults import Watched, request, undisturbed

MIB = 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for one split of the sample model."""
    if sys.platform != "linux" or os.geteuid() != 0:
        if os.environ.get("CI"):
            pytest.fail("mounting needs root on Linux")
        pytest.skip("mounting needs root on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={240 * MIB}", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Somebody else takes every byte of the disk as soon as it is free."""
    over = threading.Event()

    def fill() -> None:
        with (folder / "somebody else's").open("wb", buffering=0) as file:
            while not over.wait(0.001):
                with contextlib.suppress(OSError):
                    while not over.is_set() and shutil.disk_usage(folder).free:
                        file.write(bytes(MIB))

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        while shutil.disk_usage(folder).free:
            over.wait(0.01)
        yield
    finally:
        over.set()
        thread.join()


def damage(deployment: object, stage: int) -> None:
    Actor(None, deployment).corrupt(stage)  # type: ignore[arg-type]


def test_a_full_disk_while_a_slice_is_cut_again(sample_gguf: Path, small_disk: Path) -> None:
    """The damaged slice cannot be written; one machine takes the whole model from the model's own file, with the same tokens."""
    with launch_local(sample_gguf, num_stages=2, context_tokens=512, deterministic=True, cache_dir=str(small_disk)) as built:
        said: list[str] = []
        assert built.supervisor is not None
        built.supervisor.on_change = said.append
        wanted = undisturbed(built, request(built, sampling="sampled"))
        damage(built, 1)  # the file; the worker goes on with the one it has open
        with full(small_disk):  # before the session: filling takes as long as dozens of tokens
            session = Watched(built, request(built, sampling="sampled"))
            session.wait_for(10)
            os.kill(built.stages[1].pid, signal.SIGKILL)
            assert session.ids() == wanted
        print(*said, sep="\n")
        assert any("recut" in line and "disk" in line for line in said)
        assert built.recoveries[-1].action == "replan"


class Upgraded(LocalEngine):
    """Workers that start from now on are of another release."""

    upgraded = False

    def start(self, spec: WorkerSpec) -> None:
        super().start(replace(spec, module="tests.deploy.other_version") if self.upgraded else spec)


def test_a_worker_that_comes_back_as_another_version_is_refused(sample_gguf: Path) -> None:
    """Nothing on this machine speaks our protocol any more: the session ends with both versions named, and nothing hangs."""
    engine = Upgraded()
    options = RunOptions(num_stages=2, context_tokens=512, recovery=RecoveryPolicy(deadline_s=30.0))
    with launch(sample_gguf, options, engine=engine) as built:
        said: list[str] = []
        assert built.supervisor is not None
        built.supervisor.on_change = said.append
        session = Watched(built, request(built, num_tokens=400))
        session.wait_for(10)
        engine.upgraded = True
        os.kill(built.stages[1].pid, signal.SIGKILL)
        with pytest.raises(SessionLost, match="tried: restart"):
            session.ids()
        print(*said, sep="\n")
        assert any("refused" in line and "protocol version differs" in line for line in said)


def test_the_schedule_knows_these_faults() -> None:
    for kind in ("full_disk", "version_mismatch", "driver_restart"):
        assert kind.replace("_", " ") in Fault(kind=kind, target="stage-1", at_token=3).describe()  # type: ignore[arg-type]
