"""Real worker processes that hold something else than the deployment: refused at once, exit status 4, both values named; the
worker never loads, and the deployment goes on for the right one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from shardwise.records import replace
from shardwise.shards.manifest import Manifest, ManifestSettings
from shardwise.shards.packing import pack_model
from shardwise.stage.config import AllowedPeer, WorkerConfig
from shardwise.stage.llama.library import build_identity
from shardwise.stage.own_slice import SliceOrder, of_manifest
from shardwise.stage.settings import BackendSettings
from shardwise.transport.channel import Inbox
from shardwise.transport.handshake import Hello
from shardwise.transport.messages import PROTOCOL_VERSION, Failure, Ready
from shardwise.transport.security import AllowList, Authenticator, NodeKeys
from tests.shards.conftest import write_tiny_model

NEXT = PROTOCOL_VERSION + 1
SETTINGS = ManifestSettings(protocol_version=PROTOCOL_VERSION, wire_dtype="f32", context_tokens=128)
EPOCH = 7


class Deployment:
    """The driver's side of a launch, and what its workers are told."""

    def __init__(self, context: zmq.Context, directory: Path, manifest: Manifest) -> None:
        self.manifest, self.directory = manifest, directory
        self.keys, self.worker_keys = NodeKeys.generate(), NodeKeys.generate()
        blank = Hello(
            deployment="home", epoch=EPOCH, manifest_digest="", revision_digest="", tokenizer_digest="", quantization_digest="",
            quantization="", layers=(), wire_dtype="", context_tokens=0, kv_type="", backend=build_identity(),
        )  # fmt: skip
        self.hello = of_manifest(blank, manifest)
        allowed = AllowList()
        allowed.allow(self.worker_keys.public, "stage-1")
        self.authenticator = Authenticator(context, allowed)
        self.inbox = Inbox(context, "tcp://127.0.0.1:*", self.hello, self.keys)

    def config(self, manifest: Manifest, directory: Path, **told: Any) -> WorkerConfig:
        stage = manifest.stages[1]
        return WorkerConfig(
            stage=1,
            num_stages=3,
            order=SliceOrder(
                manifest=manifest, paths=tuple(str(directory / file.name) for file in stage.files), record_dir=str(directory)
            ),
            main_quantization="F32",
            settings=BackendSettings(context_tokens=128, max_sessions=1),
            hello=replace(self.hello, stage=1, **told),
            driver_address=self.inbox.address,
            driver_key=self.keys.public,
            public_key=self.worker_keys.public,
            secret_key=self.worker_keys.secret,
            allowed=(AllowedPeer(public=self.keys.public, name="driver"),),
        )

    def close(self) -> None:
        self.inbox.close()
        self.authenticator.close()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    directory = tmp_path_factory.mktemp("packed")
    model = write_tiny_model(directory / "tiny.gguf")
    return directory / "out", pack_model(model, [10, 12, 8], directory / "out", SETTINGS)


@pytest.fixture
def deployment(context: zmq.Context, packed: tuple[Path, Manifest]) -> Iterator[Deployment]:
    made = Deployment(context, *packed)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_STATE", str(tmp_path / "state"))


# Starts the worker with something changed that is the worker's own and not configuration.
PATCHED = """
import sys
from shardwise.stage import own_slice, __main__ as worker
{patch}
sys.exit(worker.main())
"""
PATCHES = {
    "protocol_version older": ("own_slice.PROTOCOL_VERSION = 0", "protocol version", "0", f"{PROTOCOL_VERSION}"),
    "protocol_version newer": (
        "own_slice.PROTOCOL_VERSION += 1",
        "protocol version",
        f"{PROTOCOL_VERSION + 1}",
        f"{PROTOCOL_VERSION}",
    ),
    "backend": (
        "from shardwise.stage.llama import library\nlibrary.build_identity = lambda: 'llama.cpp 0.3.1'",
        "backend build",
        "llama.cpp 0.3.1",
        build_identity(),
    ),
}


def start(config: WorkerConfig, patch: str = "") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PATCHED.format(patch=patch)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdin is not None
    frame = config.frame()
    child.stdin.write(len(frame).to_bytes(8, "little") + frame)
    child.stdin.flush()
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()


def last_words(child: subprocess.Popen[bytes]) -> bytes:
    """What it said until it ended; its standard input stays open, because a worker ends when that closes."""
    assert child.stderr is not None
    child.wait(10)
    return child.stderr.read()


def refused(deployment: Deployment, config: WorkerConfig, patch: str = "") -> str:
    """Run a worker until it ends; returns what it said. Asserts status 4, and the second between its hello and its end."""
    child = start(config, patch)
    try:
        deadline_s = time.perf_counter() + 20
        while not deployment.inbox.refusals:
            assert child.poll() is None, child.stderr.read() if child.stderr else ""
            assert time.perf_counter() < deadline_s
            deployment.inbox.wait(0.1)
            assert deployment.inbox.receive() is None
        told_s = time.perf_counter()
        assert child.stderr is not None
        said = child.stderr.readline()  # at once; the interpreter may take its time to end on a busy machine
        assert time.perf_counter() - told_s < 1.0
        said += last_words(child)
        assert child.returncode == 4
        assert b"Traceback" not in said
        return said.decode()
    finally:
        end(child)


def assert_right_one_still_gets_in(deployment: Deployment) -> None:
    child = start(deployment.config(deployment.manifest, deployment.directory))
    try:
        deadline_s = time.perf_counter() + 60
        while True:
            assert time.perf_counter() < deadline_s
            deployment.inbox.wait(0.1)
            envelope = deployment.inbox.receive()
            if envelope is not None and isinstance(envelope.message, Ready):
                return
            assert child.poll() is None, child.stderr.read() if child.stderr else ""
    finally:
        end(child)


def named(said: str, name: str, theirs: str, own: str) -> None:
    """The refused side says what differs, with both values; the deployment is the peer."""
    assert said.count("\n") == 1
    assert f"{name} differs: the peer has {own}, here it is {theirs}" in said


def other_model(tmp_path: Path, **changes: Any) -> tuple[Path, Manifest]:
    counts = changes.pop("counts", [10, 12, 8])
    settings = changes.pop("settings", SETTINGS)
    model = write_tiny_model(tmp_path / "tiny.gguf", **changes)
    return tmp_path / "out", pack_model(model, counts, tmp_path / "out", settings)


def test_another_revision(deployment: Deployment, tmp_path: Path) -> None:
    directory, manifest = other_model(tmp_path, seed=5)
    said = refused(deployment, deployment.config(manifest, directory))
    named(said, "model revision", manifest.revision_digest, deployment.manifest.revision_digest)
    named(said, "manifest", manifest.digest, deployment.manifest.digest)
    assert_right_one_still_gets_in(deployment)


def test_another_tokenizer(deployment: Deployment, tmp_path: Path) -> None:
    directory, manifest = other_model(tmp_path, token="piece")
    said = refused(deployment, deployment.config(manifest, directory))
    named(said, "tokenizer", manifest.tokenizer_digest, deployment.manifest.tokenizer_digest)


def test_another_quantization(deployment: Deployment, tmp_path: Path) -> None:
    directory, manifest = other_model(tmp_path, half=True)
    said = refused(deployment, deployment.config(manifest, directory))
    named(said, "quantization layout", manifest.quantization_digest, deployment.manifest.quantization_digest)


def test_other_ranges(deployment: Deployment, tmp_path: Path) -> None:
    directory, manifest = other_model(tmp_path, counts=[10, 13, 7])
    said = refused(deployment, deployment.config(manifest, directory))
    named(said, "layer ranges", "0-10 10-23 23-30", "0-10 10-22 22-30")


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [("wire_dtype", "wire dtype", "f16"), ("context_tokens", "context length", 64), ("kv_type", "KV type", "q8_0")],
)
def test_other_settings(deployment: Deployment, tmp_path: Path, field: str, name: str, value: Any) -> None:
    directory, manifest = other_model(tmp_path, settings=replace(SETTINGS, **{field: value}))
    said = refused(deployment, deployment.config(manifest, directory))
    named(said, name, str(value), str(getattr(SETTINGS, field)))


@pytest.mark.parametrize("case", sorted(PATCHES))
def test_other_protocols_and_builds(deployment: Deployment, case: str) -> None:
    patch, name, theirs, own = PATCHES[case]
    config = deployment.config(deployment.manifest, deployment.directory)
    named(refused(deployment, config, patch), name, theirs, own)


def test_a_stale_epoch(deployment: Deployment) -> None:
    config = deployment.config(deployment.manifest, deployment.directory, epoch=EPOCH - 1)
    said = refused(deployment, config)
    named(said, "deployment epoch", str(EPOCH - 1), str(EPOCH))
    assert "has been replaced" in said
    assert_right_one_still_gets_in(deployment)


def test_a_flipped_bit_is_reported_to_the_driver_before_anything_is_mapped(deployment: Deployment, tmp_path: Path) -> None:
    directory, manifest = other_model(tmp_path)
    assert manifest.digest == deployment.manifest.digest
    victim = directory / manifest.stages[1].weights
    data = bytearray(victim.read_bytes())
    data[-300] ^= 16
    victim.write_bytes(data)
    child = start(deployment.config(manifest, directory))
    try:
        deadline_s, failure = time.perf_counter() + 30, None
        while not isinstance(failure, Failure) and time.perf_counter() < deadline_s:
            deployment.inbox.wait(0.1)
            envelope = deployment.inbox.receive()
            failure = envelope.message if envelope is not None else None
        said = last_words(child)
        assert child.returncode == 4
        assert isinstance(failure, Failure)
        assert failure.kind == "CorruptWeightsError"
        assert failure.details["file"] == str(victim)
        assert failure.details["tensor"]
        assert failure.details["expected"] != failure.details["actual"]
        assert str(failure.details["tensor"]) in said.decode()
    finally:
        end(child)


@pytest.mark.parametrize("whose", ["worker", "driver"])
def test_a_wrong_key_is_told_at_once(deployment: Deployment, whose: str) -> None:
    """The driver does not know this worker, or is not who the worker was told."""
    config = deployment.config(deployment.manifest, deployment.directory)
    stranger = NodeKeys.generate()
    if whose == "worker":
        config = replace(config, public_key=stranger.public, secret_key=stranger.secret)
    else:
        config = replace(config, driver_key=stranger.public)
    child = start(config)
    try:
        assert child.stderr is not None
        said = child.stderr.readline().decode()
        child.wait(10)
        assert child.returncode == 4
        assert "does not allow this node's key" in said or "hung up during the key exchange" in said
    finally:
        end(child)
