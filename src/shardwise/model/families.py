"""What a layer's place in the model means to llama.cpp, per architecture, as data.

A slice renumbers its layers from 0, so everything that llama.cpp derives from a layer's index, from the number of
layers, or from "this is the model's input" must be told to the slice in another way. Each fact below was read in
llama.cpp's `src/models/<architecture>.cpp` and is proved by a parity test on tiny random weights
(`tests/shards/slicing/`). An architecture that is not in `FAMILIES` is refused by name.

Fails when: `require_proved` raises `UnsupportedModelError` for an architecture that is not proved here.
"""

from __future__ import annotations

from shardwise.errors import UnsupportedModelError
from shardwise.model.description import ModelDescription
from shardwise.records import Record


class SlidingWindow(Record):
    """llama.cpp's own pattern of windowed layers; a slice states it as an array, so that any cut is allowed."""

    period: int  # one of `period` layers sees everything
    dense_first: bool = False  # the full layer is the first of the period instead of the last
    requires_key: bool = True  # the pattern applies only where `attention.sliding_window` is in the file


class Family(Record):
    """Facts of one architecture (`general.architecture`)."""

    architecture: str
    sliding_window: SlidingWindow | None = None
    cut_multiple: int = 1  # layers may be cut only at multiples of this (a pattern that no metadata expresses)
    output_optional: bool = True  # without `output.weight`, llama.cpp takes `token_embd.weight` as the head
    scales_input: bool = False  # multiplies token embeddings by sqrt(hidden size), but not embeddings given from outside
    input_node: str | None = None  # graph node to overwrite with a later slice's input, where llama.cpp changes its input
    neutral_metadata: dict[str, float] = {}  # scalars that later slices carry instead, because they act on the input
    fixed_layer_counts: tuple[int, ...] = ()  # models with so many layers cannot be cut: the count changes the arithmetic


# Keys (without the architecture's prefix) whose arrays have one element a layer.
PER_LAYER_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.sliding_window_pattern",
        "expert_feed_forward_length",
        "expert_used_count",
        "feed_forward_length",
    }
)

# Keys that count layers from the start of the model: a slice that starts at `s` carries max(0, value - s).
LEADING_LAYER_KEYS = frozenset({"leading_dense_block_count"})

_ALL = (
    Family(architecture="llama"),
    Family(architecture="qwen2"),
    Family(architecture="qwen3"),
    Family(architecture="qwen3moe"),
    Family(
        architecture="gemma2",
        sliding_window=SlidingWindow(period=2, requires_key=False),
        input_node="inp_scaled",
        fixed_layer_counts=(46,),
    ),
    Family(
        architecture="gemma3",
        sliding_window=SlidingWindow(period=6),
        scales_input=True,
        fixed_layer_counts=(62,),
    ),
    Family(architecture="phi3"),
    Family(architecture="starcoder2"),
    Family(architecture="olmo2", sliding_window=SlidingWindow(period=4), output_optional=False),
    Family(architecture="granite", neutral_metadata={"embedding_scale": 0.0}),
    Family(
        architecture="gpt-oss",
        sliding_window=SlidingWindow(period=2, requires_key=False),
        output_optional=False,
    ),
)

FAMILIES: dict[str, Family] = {family.architecture: family for family in _ALL}


def require_proved(architecture: str) -> Family:
    """The facts of a proved architecture; `UnsupportedModelError` names it and lists the proved ones."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModelError(
            f"architecture '{architecture}' is not proved to give the same logits when it is split",
            hint="proved: " + ", ".join(sorted(FAMILIES)),
            architecture=architecture,
            proved=sorted(FAMILIES),
        )
    return family


def cut_points(family: Family, num_layers: int) -> list[int]:
    """Layer indices at which a model of `num_layers` layers may be cut (0 and `num_layers` are not cuts)."""
    if num_layers in family.fixed_layer_counts:
        return []
    step = family.cut_multiple
    return list(range(step, num_layers, step))


def allowed_cuts(description: ModelDescription) -> list[int]:
    """`cut_points` of a described model; `UnsupportedModelError` if its architecture is not proved."""
    return cut_points(require_proved(description.architecture), description.num_layers)
