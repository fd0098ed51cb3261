"""Tiny models, made once a session."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny

MakeTiny = Callable[..., Path]


@pytest.fixture(scope="package", autouse=True)
def cheap_collections() -> Iterator[None]:
    """Each backend that closes runs the garbage collector; what is there already need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> MakeTiny:
    """`tiny("gemma3", "Q8_0")` -> the path of that model."""
    folder = tmp_path_factory.mktemp("tiny")

    def make(name: str, quantization: str = "F16", num_layers: int | None = None) -> Path:
        path = folder / f"{name.replace('/', '-')}-{num_layers or 'own'}-{quantization}.gguf"
        return make_tiny(name, quantization, num_layers=num_layers, path=path)

    return make
