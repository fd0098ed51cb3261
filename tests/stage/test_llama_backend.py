"""`LlamaCppBackend` keeps the contract of a stage backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from shardwise.shards.stage_paths import StageFiles
from shardwise.stage.llama.backend import LlamaCppBackend
from shardwise.stage.settings import BackendSettings
from tests.shards.slicing.harness import cut
from tests.stage.backend_contract import BackendContract, Stages
from tests.tiny_models import SPECS, make_tiny

SETTINGS = BackendSettings(context_tokens=64, max_sessions=3, chunk_tokens=16)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[StageFiles]:
    folder = tmp_path_factory.mktemp("backend")
    model = make_tiny("llama", path=folder / "llama.gguf")
    return cut(model, [2], SPECS["llama"].num_layers, folder)


class TestLlamaCpp(BackendContract):
    """Two slices of a tiny model."""

    @pytest.fixture(autouse=True)
    def _files(self, files: list[StageFiles]) -> None:
        self.files = files

    @contextmanager
    def open_stages(self) -> Iterator[Stages]:
        with ExitStack() as stack:
            yield [stack.enter_context(closing(LlamaCppBackend(part, SETTINGS))) for part in self.files]
