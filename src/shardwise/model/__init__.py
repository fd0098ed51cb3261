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

__all__ = [
    "ExpertSpec",
    "KvCost",
    "LayerDescription",
    "ModelDescription",
    "ModelSource",
    "Quantization",
    "TokenizerDescription",
    "WeightTensor",
]
