"""KV checkpoints: a stage that is lost after one computes only what came later, and the tokens are the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from shardwise.deploy import Deployment, launch_local
from shardwise.session.journal import Journal
from tests.deploy.faults import Watched, eventually, request, undisturbed

EVERY, AT_TOKEN, NUM_TOKENS = 30, 80, 90


def rows_computed(deployment: Deployment, stage: int) -> int:
    """By the stage's present worker since it started."""
    found = deployment.stats()[stage]
    return found.decode_rows + found.prefill_tokens


def checkpoints(deployment: Deployment, num: int) -> bool:
    return len(deployment.driver.restoring.checkpoints.num_tokens) == num


@pytest.mark.parametrize("on_disk", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_lost_stage_goes_on_from_its_checkpoint(sample_gguf: Path, tmp_path: Path, on_disk: bool) -> None:
    """Every stage in turn; the refill is what came after the checkpoint, not the session."""
    folder = str(tmp_path / "kv") if on_disk else ""
    settings = {"context_tokens": 512, "deterministic": True, "checkpoint_every_tokens": EVERY, "checkpoint_dir": folder}
    with launch_local(sample_gguf, num_stages=3, probe_interval_s=0, **settings) as built:
        undisturbed_ids = {
            s: undisturbed(built, request(built, sampling=s, num_tokens=NUM_TOKENS)) for s in ("sampled", "greedy")
        }
        for stage, sampling in ((0, "sampled"), (1, "greedy"), (2, "sampled")):
            wanted = undisturbed_ids[sampling]
            session = Watched(built, request(built, sampling=sampling, num_tokens=NUM_TOKENS))
            session.wait_for(AT_TOKEN)
            os.kill(built.stages[stage].pid, signal.SIGKILL)
            assert session.ids() == wanted
            recovery = built.recoveries[-1]
            print(f"stage {stage}: {recovery.action}, stall {recovery.stall_s:.2f} s ({recovery.predicted_stall_s:.2f})")
            assert recovery.action.startswith(f"restart of stage {stage}, from a checkpoint of ")
            assert recovery.grade == "exact"
            assert rows_computed(built, stage) < NUM_TOKENS - EVERY  # of 98 rows in all
        eventually(lambda: checkpoints(built, 0), "forgetting the checkpoints")
    assert not on_disk or not list((tmp_path / "kv").iterdir())


def test_two_stages_go_on_from_the_same_position(sample_gguf: Path) -> None:
    with launch_local(sample_gguf, num_stages=3, context_tokens=512, deterministic=True, checkpoint_every_tokens=EVERY) as built:
        wanted = undisturbed(built, request(built, num_tokens=NUM_TOKENS))
        session = Watched(built, request(built, num_tokens=NUM_TOKENS))
        session.wait_for(AT_TOKEN)
        for stage in (0, 1):
            os.kill(built.stages[stage].pid, signal.SIGKILL)
        assert session.ids() == wanted
        assert "checkpoint" in built.recoveries[-1].action


def test_a_damaged_checkpoint_is_left_out(sample_gguf: Path, tmp_path: Path) -> None:
    """Its payload or its head: it is named, the rows are computed again, and the tokens are the same."""
    settings = {"context_tokens": 512, "deterministic": True, "checkpoint_every_tokens": EVERY, "checkpoint_dir": str(tmp_path)}
    with launch_local(sample_gguf, num_stages=2, **settings) as built:  # type: ignore[arg-type]
        assert built.supervisor is not None
        wanted = undisturbed(built, request(built, num_tokens=NUM_TOKENS))
        for byte in (-1000, 3):
            eventually(lambda: not list(tmp_path.iterdir()), "forgetting the checkpoints")
            said: list[str] = []
            built.supervisor.on_change = said.append
            session = Watched(built, request(built, num_tokens=NUM_TOKENS))
            session.wait_for(AT_TOKEN)
            (path,) = tmp_path.glob("*.1.kv")
            data = bytearray(path.read_bytes())
            data[byte] ^= 1
            path.write_bytes(data)
            os.kill(built.stages[1].pid, signal.SIGKILL)
            assert session.ids() == wanted
            assert built.recoveries[-1].action == "restart of stage 1"
            assert any("damaged" in line for line in said), said


def test_another_driver_goes_on_from_the_checkpoints(sample_gguf: Path, tmp_path: Path) -> None:
    """The journal has the tokens, the directory the KV: next to nothing is computed again."""
    settings = {"num_stages": 2, "context_tokens": 512, "deterministic": True, "checkpoint_every_tokens": EVERY}
    folders = {"journal_dir": str(tmp_path / "journal"), "checkpoint_dir": str(tmp_path / "kv")}
    with launch_local(sample_gguf, **settings, **folders) as built:  # type: ignore[arg-type]
        wanted = undisturbed(built, request(built, num_tokens=NUM_TOKENS))
        session = Watched(built, request(built, num_tokens=NUM_TOKENS))
        session.wait_for(AT_TOKEN)
        journal = Journal(tmp_path / "copy")  # what a killed driver leaves behind
        journal.close()
        journal.path.write_bytes((tmp_path / "journal" / "sessions.journal").read_bytes())
        for stage in (0, 1):
            (tmp_path / f"{stage}").write_bytes(next((tmp_path / "kv").glob(f"*.{stage}.kv")).read_bytes())
            name = next((tmp_path / "kv").glob(f"*.{stage}.kv")).name
            (tmp_path / "left").mkdir(exist_ok=True)
            (tmp_path / f"{stage}").rename(tmp_path / "left" / name)
    folders = {"journal_dir": str(tmp_path / "copy"), "checkpoint_dir": str(tmp_path / "left")}
    with launch_local(sample_gguf, probe_interval_s=0, **settings, **folders) as built:  # type: ignore[arg-type]
        (left,) = built.unfinished
        assert [*left.generated, *(token.id for token in built.resume(left))] == wanted
        assert rows_computed(built, 1) < NUM_TOKENS - EVERY
