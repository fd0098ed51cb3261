"""`hf:` against a real server on loopback: only headers are fetched to describe, and a cut download goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwise.errors import ConnectFailed, CorruptWeightsError, ModelError, UsageError
from shardwise.model import describe_gguf, describe_model, resolve_model, sample_path
from shardwise.model.hub import RemoteRepo, cache_folder, parse_reference
from tests.model.gguf_bytes import GgufFile, llama_keys, llama_tensors, small_llama
from tests.model.hf_folder import write_llama_folder
from tests.model.hub_server import COMMIT, HubState, hub_server
from tests.model.test_gguf_description import split_into


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubState]:
    """Repositories: one with the sample, one with two quantizations, a split one, one of safetensors, and a closed one."""
    one, two, split, folder = (tmp_path / name for name in ("one", "two", "split", "folder"))
    for path in (one, two, split):
        path.mkdir()
    shutil.copy(sample_path(), one / "SmolLM2.Q4_1.gguf")
    for label in ("Q4_0", "Q8_0"):
        small_llama().write(two / f"small.{label}.gguf")
    split_into(split, 3)
    write_llama_folder(folder)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    repos = {"org/one": one, "org/two": two, "org/split": split, "org/folder": folder}
    with hub_server(repos) as state:
        monkeypatch.setenv("HF_ENDPOINT", state.address)
        yield state


def test_describing_fetches_headers_only(hub: HubState) -> None:
    remote = describe_model("hf:org/one")
    local = describe_gguf(sample_path())
    size = sample_path().stat().st_size
    print(f"{hub.sent_bytes} of {size} bytes in {len(hub.requests)} requests")
    assert hub.sent_bytes < 3_000_000 < size / 30
    assert all(method != "GET" or asked for method, path, asked in hub.requests if "/resolve/" in path)
    assert remote.revision_digest == local.revision_digest
    assert remote.tokenizer == local.tokenizer
    assert remote.layers == local.layers
    assert (remote.source.reference, remote.source.paths) == ("hf:org/one", ())


def test_a_whole_download_with_progress(hub: HubState) -> None:
    seen: list[tuple[str, int, int]] = []
    path = resolve_model("hf:org/one", progress=lambda name, done, total: seen.append((name, done, total)))
    size = sample_path().stat().st_size
    assert path.read_bytes() == sample_path().read_bytes()
    assert seen[-1] == ("SmolLM2.Q4_1.gguf", size, size)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert len(seen) >= 3
    sent = hub.sent_bytes
    assert resolve_model("hf:org/one") == path
    assert hub.sent_bytes == sent  # it is there


def test_a_cut_connection_is_taken_up_where_it_stopped(hub: HubState) -> None:
    hub.cut_after_bytes = 50_000_000
    path = resolve_model("hf:org/one")
    size = sample_path().stat().st_size
    assert path.read_bytes() == sample_path().read_bytes()
    ranges = [asked for method, _, asked in hub.requests if method == "GET" and asked.startswith("bytes=")]
    assert ranges, hub.requests
    assert int(ranges[-1].removeprefix("bytes=").removesuffix("-")) > 0
    assert hub.sent_bytes < size + 11_000_000  # huggingface_hub writes in chunks of 10 MiB


def test_a_download_broken_off_by_a_crash_goes_on(hub: HubState) -> None:
    """What an earlier process left is kept: only the rest is sent."""
    size = sample_path().stat().st_size

    with pytest.raises(RuntimeError, match="crash"):
        resolve_model("hf:org/one", progress=_crash_at(size // 2))
    kept = sum(p.stat().st_size for p in cache_folder().rglob("*.part"))
    assert kept > size // 3
    before = hub.sent_bytes
    assert resolve_model("hf:org/one").read_bytes() == sample_path().read_bytes()
    assert hub.sent_bytes - before <= size - kept + 1_000_000


def test_a_server_that_cannot_resume_sends_everything_again(hub: HubState) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        resolve_model("hf:org/one", progress=_crash_at(50_000_000))
    hub.ignore_ranges = True
    assert resolve_model("hf:org/one").read_bytes() == sample_path().read_bytes()


def test_a_partial_file_of_something_else_is_not_trusted(hub: HubState) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        resolve_model("hf:org/one", progress=_crash_at(50_000_000))
    (part,) = cache_folder().rglob("*.part")
    with part.open("r+b") as file:
        file.seek(1000)
        file.write(b"rotten")
    with pytest.raises(CorruptWeightsError, match="not what the server announced") as caught:
        resolve_model("hf:org/one")
    assert caught.value.exit_code == 4
    assert resolve_model("hf:org/one").read_bytes() == sample_path().read_bytes()


def _crash_at(limit: int) -> Callable[[str, int, int], None]:
    def report(_name: str, done: int, _total: int) -> None:
        if done > limit:
            raise RuntimeError("crash")

    return report


def test_a_server_without_ranges_still_works(hub: HubState) -> None:
    hub.ignore_ranges = True
    assert describe_model("hf:org/two:small.Q4_0.gguf").num_layers == 2


def test_the_token_goes_with_every_request(hub: HubState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    describe_model("hf:org/two:Q4_0")
    resolve_model("hf:org/two:Q4_0")
    assert hub.tokens == {"Bearer hf_secret"}


def test_several_models_ask_for_a_choice(hub: HubState) -> None:
    with pytest.raises(UsageError, match="several models") as caught:
        describe_model("hf:org/two")
    assert "small.Q4_0.gguf, small.Q8_0.gguf" in caught.value.hint
    assert describe_model("hf:org/two:q8_0").num_layers == 2
    assert describe_model("hf:org/two@main:small.Q8_0.gguf").num_layers == 2
    assert describe_model(f"hf:org/two@{COMMIT}:Q4_0").num_layers == 2
    with pytest.raises(UsageError, match="'Q6_K' names no single model"):
        describe_model("hf:org/two:Q6_K")


def test_a_split_model(hub: HubState) -> None:
    model = describe_model("hf:org/split")
    assert model.num_layers == 4
    first = resolve_model("hf:org/split")
    assert first.name == "m-00001-of-00003.gguf"
    assert describe_gguf(first).revision_digest == model.revision_digest
    whole = GgufFile(keys=llama_keys(4), tensors=llama_tensors(4))
    assert model.weight_bytes == sum(t.num_bytes for t in whole.tensors)


def test_a_split_model_without_a_part(hub: HubState) -> None:
    (hub.repos["org/split"] / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelError, match="lacks m-00002-of-00003"):
        describe_model("hf:org/split")


def test_a_repository_of_safetensors(hub: HubState) -> None:
    model = describe_model("hf:org/folder")
    assert (model.source.kind, model.num_layers) == ("huggingface", 3)
    weights = sum(p.stat().st_size for p in hub.repos["org/folder"].glob("*.safetensors"))
    assert hub.sent_bytes < weights
    folder = resolve_model("hf:org/folder")
    again = describe_model(folder)
    assert again.revision_digest == model.revision_digest
    assert again.tokenizer == model.tokenizer


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("hf:org/none", "no such repository"),
        ("hf:org/one@v9", "no such revision"),
        ("hf:closed/model", "closed to you"),
    ],
)
def test_what_does_not_exist(hub: HubState, reference: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        describe_model(reference)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["hf:", "hf:one", "hf:a/b/c", "hf:a/b:x:y", "hf:../etc", "hf:a/..", "hf:a b/c"])
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(UsageError, match="names no model on the Hub"):
        parse_reference(text)


def test_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with hub_server({}) as state:
        address = state.address
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConnectFailed, match="does not answer"):
        describe_model("hf:org/one")


def test_without_a_network_what_is_here_is_used(hub: HubState, monkeypatch: pytest.MonkeyPatch) -> None:
    path = resolve_model("hf:org/two:small.Q4_0.gguf")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("hf:org/two:small.Q4_0.gguf") == path
    assert describe_model("hf:org/two:small.Q4_0.gguf").num_layers == 2
    with pytest.raises(ConnectFailed):
        resolve_model("hf:org/two:small.Q8_0.gguf")


def test_a_disk_that_is_too_small(hub: HubState, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = RemoteRepo(parse_reference("hf:org/one"))
    small = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: small)
    with pytest.raises(ModelError, match="the disk has 1000 B free"):
        repo.check_disk(repo.names())
    assert hub.sent_bytes == 0
