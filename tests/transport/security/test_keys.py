"""Key files: 0600 from birth, refused when open to others, secrets never shown."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from shardwise.errors import UsageError
from shardwise.transport.security import AllowList, ClusterKey, NodeKeys, check_public_key, fingerprint


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
