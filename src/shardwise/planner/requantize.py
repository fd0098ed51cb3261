"""The same model at smaller quantizations, estimated from its description.

In: a `ModelDescription`. Out: descriptions with the same shapes and fewer bytes. Every matrix gets the mean bits a weight
of the mix (llama.cpp's table for Llama 3.1 8B, tools/quantize/README.md); norms stay. Good to a few per cent, which is
what advice needs; a real file tells better. Nothing here fails.
"""

from __future__ import annotations

from shardwise.model.description import LayerDescription, ModelDescription, WeightTensor
from shardwise.records import replace

# Below 3.9 bits answers get visibly worse, so nothing smaller is recommended.
LADDER = (("Q8_0", 8.50), ("Q6_K", 6.56), ("Q5_K_M", 5.70), ("Q4_K_M", 4.89), ("Q3_K_M", 4.00))
_KIND = {"Q8_0": "Q8_0", "Q6_K": "Q6_K", "Q5_K_M": "Q5_K", "Q4_K_M": "Q4_K", "Q3_K_M": "Q3_K"}


def bits_per_weight(model: ModelDescription) -> float:
    """Mean over all tensors."""
    return 8.0 * model.weight_bytes / max(1, model.num_params)


def requantized(model: ModelDescription, label: str) -> ModelDescription:
    """`model` at one step of the ladder."""
    bits, kind = dict(LADDER)[label], _KIND[label]

    def smaller(tensors: tuple[WeightTensor, ...]) -> tuple[WeightTensor, ...]:
        return tuple(
            replace(t, quantization=kind, num_bytes=round(t.num_elements * bits / 8)) if len(t.shape) > 1 else t for t in tensors
        )

    def layer(old: LayerDescription) -> LayerDescription:
        tensors = smaller(old.tensors)
        if old.experts is None:
            return replace(old, tensors=tensors)
        ratio = sum(t.num_bytes for t in tensors) / max(1, old.weight_bytes)
        spec = old.experts
        experts = replace(spec, expert_bytes=int(spec.expert_bytes * ratio), shared_bytes=int(spec.shared_bytes * ratio))
        return replace(old, tensors=tensors, experts=experts)

    known: dict[int, LayerDescription] = {}
    layers = tuple(known.setdefault(id(old), layer(old)) for old in model.layers)
    return replace(
        model,
        layers=layers,
        embedding=smaller(model.embedding),
        output=smaller(model.output),
        quantization=label,
        revision_digest="",
    )


def smaller_quantizations(model: ModelDescription) -> list[ModelDescription]:
    """Every step of the ladder that is at least a tenth smaller than the model is now, largest first."""
    bits = bits_per_weight(model)
    return [requantized(model, label) for label, target in LADDER if target < 0.9 * bits]
