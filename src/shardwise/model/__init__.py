"""WHAT is split: descriptions of models, read from headers alone."""

from shardwise.model.description import (
    ExpertSpec,
    KvCost,
    LayerDescription,
    ModelDescription,
    ModelSource,
    Quantization,
    TokenizerDescription,
    WeightTensor,
)
from shardwise.model.gguf import describe_gguf
from shardwise.model.gguf_header import GgufHeader, read_gguf_header
from shardwise.model.resolve import describe_model, resolve_model, sample_path

__all__ = [
    "ExpertSpec",
    "GgufHeader",
    "KvCost",
    "LayerDescription",
    "ModelDescription",
    "ModelSource",
    "Quantization",
    "TokenizerDescription",
    "WeightTensor",
    "describe_gguf",
    "describe_model",
    "read_gguf_header",
    "resolve_model",
    "sample_path",
]
