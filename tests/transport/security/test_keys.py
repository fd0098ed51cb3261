"""Key files: 0600 from birth, refused when open to others, secrets never shown."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import UsageError
from shardwise.transport.security import AllowList, ClusterKey, NodeKeys, check_public_key, fingerprint, own_keys
from shardwise.transport.security.private_files import write_private


def test_save_and_load_round_trip_with_mode_0600(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "node.key"
    keys = NodeKeys.generate()
    keys.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert NodeKeys.load(path) == keys
    assert NodeKeys.load_or_make(path) == keys
    assert [p.name for p in path.parent.iterdir()] == ["node.key"]


def test_cluster_key_round_trip_and_purposes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    key = ClusterKey.generate()
    key.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ClusterKey.load(path) == key
    assert key.derive("a") != key.derive("b")
    assert len(key.derive("a")) == 32


@pytest.mark.skipif(os.name != "posix", reason="needs mode bits")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    NodeKeys.generate().save(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match="open to other users") as caught:
        NodeKeys.load(path)
    assert caught.value.hint == f"chmod 600 {path}"


@pytest.mark.parametrize("damage", [b"", b"{}", b"not json", b'{"kind":"node","public":"x","secret":"hunter2","format":"1"}'])
def test_a_damaged_file_is_refused_without_quoting_it(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "node.key"
    NodeKeys.generate().save(path)
    path.write_bytes(damage)
    with pytest.raises(UsageError) as caught:
        NodeKeys.load(path)
    assert "hunter2" not in str(caught.value)


def test_halves_of_two_pairs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    NodeKeys(NodeKeys.generate().public, NodeKeys.generate().secret).save(path)
    with pytest.raises(UsageError, match="not a node's key file"):
        NodeKeys.load(path)


def test_secrets_are_not_in_repr(tmp_path: Path) -> None:
    keys, cluster = NodeKeys.generate(), ClusterKey.generate()
    assert keys.secret not in repr(keys)
    assert cluster.secret not in repr(cluster)


@pytest.mark.parametrize("text", ["", "short", "x" * 41, "ü" * 40, "\\" * 40, " " * 40])
def test_what_is_no_public_key(text: str) -> None:
    with pytest.raises(UsageError, match="not a public key"):
        check_public_key(text)


def test_revoked_keys_stay_revoked_after_a_restart(tmp_path: Path) -> None:
    allowed = AllowList()
    keys = NodeKeys.generate()
    allowed.allow(keys.public, "nas")
    allowed.revoke("nas")
    allowed.save(tmp_path / "members")
    again = AllowList.load(tmp_path / "members")
    assert not again.permits(keys.public)
    with pytest.raises(UsageError, match="was revoked") as caught:
        again.allow(keys.public, "nas")
    assert caught.value.where == fingerprint(keys.public)


def test_revoking_nobody_is_an_error() -> None:
    with pytest.raises(UsageError, match="no node 'nas'"):
        AllowList().revoke("nas")


@pytest.mark.skipif(sys.platform != "linux", reason="needs places that nobody may write, not even root")
@pytest.mark.parametrize(
    "folder", ["/dev/null", "/dev/null/state", "/sys/kernel", "/proc/state", "FILE", "FILE/state", "CLOSED/state"]
)
def test_a_state_folder_that_cannot_be_used_is_named(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    folder = folder.replace("FILE", str(tmp_path / "file")).replace("CLOSED", str(tmp_path / "closed"))
    if folder.startswith(str(tmp_path / "closed")) and os.geteuid() == 0:
        folder = "/sys/kernel/state"  # root may write everywhere else
    monkeypatch.setenv("SHARDWISE_STATE", folder)
    with pytest.raises(UsageError, match="state folder") as caught:
        own_keys()
    assert caught.value.where == folder
    assert "SHARDWISE_STATE" in caught.value.hint


@pytest.mark.skipif(os.name != "posix", reason="needs mode bits")
def test_a_key_that_is_open_to_others_keeps_its_own_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_STATE", str(tmp_path))
    keys = own_keys()
    assert own_keys() == keys
    (tmp_path / "node.key").chmod(0o644)
    with pytest.raises(UsageError, match="open to other users") as caught:
        own_keys()
    assert caught.value.hint.startswith("chmod")


@pytest.mark.parametrize("stages", ["1", "2"])
def test_a_run_without_a_state_folder_is_wrong_usage(stages: str) -> None:
    command = [sys.executable, "-m", "shardwise", "run", "sample", "--stages", stages, "-p", "hi", "--max-tokens", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=os.environ | {"SHARDWISE_STATE": os.devnull, "COLUMNS": "300"}
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line.startswith("error: ") for line in done.stderr.splitlines()].count(True) == 1
    assert "SHARDWISE_STATE" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_private_file_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UsageError, match="folder for a private file") as caught:
        write_private(tmp_path / "taken" / "keys", NodeKeys.generate())
    assert caught.value.exit_code == 2
