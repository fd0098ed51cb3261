"""What a layer's place in the model means to llama.cpp, per architecture, as data.

A slice renumbers its layers from 0, so everything that llama.cpp derives from a layer's index, from the number of
layers, or from "this is the model's input" must be told to the slice in another way. Each fact below was read in
llama.cpp's `src/models/<architecture>.cpp` and is proved by a parity test on tiny random weights
(`tests/shards/slicing/`). An architecture that is not in `FAMILIES` is refused by name.

Fails when: `require_proved` raises `UnsupportedModelError` for an architecture that is not proved here.
"""

from __future__ import annotations

from typing import Any

from shardwise.errors import UnsupportedModelError
from shardwise.model.description import KvCost, ModelDescription
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
    output_node: str = "l_out"  # graph node that a layer's output is called, with "-<layer>" behind it
    input_node: str | None = None  # graph node to overwrite with a later slice's input, where llama.cpp changes its input
    first_input_node: str | None = None  # the same for the first slice (None: `input_node`, where `token_batches`)
    token_batches: bool = False  # refuses embeddings from outside: feed token 0 and overwrite `input_node`, in every slice
    neutral_metadata: dict[str, float] = {}  # scalars that later slices carry instead, because they act on the input
    fixed_layer_counts: tuple[int, ...] = ()  # models with so many layers cannot be cut: the count changes the arithmetic
    fixed_from_layers: int | None = None  # the same for models with at least so many layers
    min_layers: int = 1  # of a slice
    forbidden_lengths: tuple[int, ...] = ()  # no slice may have so many layers: llama.cpp takes it for another model
    needs_keys: tuple[str, ...] = ()  # without these, llama.cpp guesses from the number of layers
    required_values: dict[str, tuple[float | int | str, ...]] = {}  # keys that may have only these values, if present
    refused_values: dict[str, tuple[float | int | str, ...]] = {}  # and keys that may not have these
    default_metadata: dict[str, int] = {}  # keys that slices state where the file does not
    recurrent_interval: int = 0  # llama.cpp's own pattern: every n-th layer has attention, the others a recurrent state
    hybrid: bool = False  # a slice needs layers of both kinds, with attention and with a recurrent state
    forgets_positions: bool = True  # False: a recurrent state knows no single positions, a session can only begin anew
    layers_of_one_part: bool = False  # a layer is attention, or recurrent, or a feed-forward network, not two of them
    without_rows_of_images: bool = False  # `n_deepstack_layers` becomes 0 in later slices, and is no reason to refuse
    rope_factors_of_full_layers: bool = False  # `rope_freqs` belongs to layers without a window only


# Keys (without the architecture's prefix) whose arrays have one element a layer.
PER_LAYER_KEYS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.recurrent_layers",
        "attention.sliding_window_pattern",
        "expert_feed_forward_length",
        "expert_used_count",
        "feed_forward_length",
    }
)
# The same, of keys that have no prefix (apertus).
PER_LAYER_PLAIN_KEYS = frozenset({"xielu.alpha_n", "xielu.alpha_p", "xielu.beta", "xielu.eps"})

# Keys that count layers from the start of the model: a slice that starts at `s` carries max(0, value - s).
LEADING_LAYER_KEYS = frozenset({"leading_dense_block_count"})

# Keys of models that take more than token embeddings (images): rows have another shape there ...
DEEPSTACK = "n_deepstack_layers"
REFUSED_KEYS = frozenset({"deepstack_mapping", DEEPSTACK})
# ... or positions have, which llama.cpp fills in for batches of tokens only.
REFUSED_WITHOUT_TOKENS = frozenset({"rope.dimension_sections"})

_SCALE = {"embedding_scale": 0.0}  # 0 = llama.cpp leaves the scaling out

_HYBRID: dict[str, Any] = {"hybrid": True, "forgets_positions": False}
_DELTA_NET: dict[str, Any] = _HYBRID | {
    "recurrent_interval": 4,
    "cut_multiple": 4,
    "required_values": {"full_attention_interval": (4,)},
}

_PLAIN = (
    "arcee",
    "bitnet",
    "chatglm",
    "deepseek",
    "exaone",
    "falcon",
    "hunyuan-dense",
    "hunyuan-moe",
    "llama",
    "mistral3",
    "mpt",
    "olmo",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "seed_oss",
    "starcoder2",
)
_WITH_OWN_HEAD = (
    "apertus",
    "bailingmoe",
    "bailingmoe2",
    "dbrx",
    "dots1",
    "gptneox",
    "internlm2",
    "minimax-m2",
    "nemotron",
    "olmoe",
    "orion",
    "phi2",
    "phimoe",
    "qwen",
    "qwen2moe",
    "stablelm",
    "xverse",
)

# Text through a vision model: the images' extra rows stay zero, so later slices go without them.
_DEEPSTACK: dict[str, Any] = {
    "token_batches": True,
    "input_node": "embd",
    "first_input_node": "node_0",  # the looked-up rows, before they are padded
    "without_rows_of_images": True,
}

_SPECIAL = (
    Family(
        architecture="afmoe",
        sliding_window=SlidingWindow(period=4),
        cut_multiple=4,
        min_layers=4,
        input_node="inp_embd_scaled",
    ),
    Family(architecture="bloom", input_node="inp_norm-0"),
    Family(architecture="cohere2", sliding_window=SlidingWindow(period=4, requires_key=False)),
    Family(
        architecture="cohere2moe",
        sliding_window=SlidingWindow(period=4, dense_first=True, requires_key=False),
    ),
    Family(architecture="command-r", fixed_from_layers=64),
    Family(
        architecture="deepseek2",
        forbidden_lengths=(26, 27),
        needs_keys=("expert_gating_func",),
        default_metadata={"attention.q_lora_rank": 0},
    ),
    Family(architecture="ernie4_5"),
    Family(architecture="ernie4_5-moe", required_values={"interleave_moe_layer_step": (1,)}),
    Family(
        architecture="exaone-moe",
        sliding_window=SlidingWindow(period=4, requires_key=False),
        output_optional=False,
    ),
    Family(architecture="exaone4", fixed_layer_counts=(64,)),
    Family(architecture="gemma", input_node="inp_scaled"),
    Family(architecture="falcon-h1", forgets_positions=False),
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
    Family(
        architecture="gemma4",
        min_layers=2,
        scales_input=True,
        required_values={"embedding_length_per_layer_input": (0,), "attention.shared_kv_layers": (0,)},
        rope_factors_of_full_layers=True,
    ),
    Family(architecture="glm4", token_batches=True, input_node="embd"),
    Family(architecture="glm4moe", token_batches=True, input_node="embd"),
    Family(architecture="gpt2", input_node="inpL"),
    Family(
        architecture="gpt-oss",
        sliding_window=SlidingWindow(period=2, requires_key=False),
        output_optional=False,
    ),
    Family(architecture="granite", neutral_metadata=_SCALE),
    Family(architecture="granitehybrid", neutral_metadata=_SCALE, **_HYBRID),
    Family(architecture="granitemoe", neutral_metadata=_SCALE),
    Family(architecture="lfm2", **_HYBRID),
    Family(architecture="lfm2moe", **_HYBRID),
    Family(
        architecture="llama4",
        sliding_window=SlidingWindow(period=4),
        cut_multiple=4,
        min_layers=4,
        required_values={"interleave_moe_layer_step": (1, 2, 4)},
        refused_values={"attention.sliding_window": (0,)},
    ),
    Family(architecture="mamba2", forgets_positions=False),
    Family(
        architecture="minicpm",
        neutral_metadata=_SCALE,
        needs_keys=("embedding_scale", "residual_scale", "logit_scale"),
    ),
    Family(architecture="nemotron_h", output_node="nemotron_h_block_out", layers_of_one_part=True, **_HYBRID),
    Family(architecture="nemotron_h_moe", output_node="nemotron_h_block_out", layers_of_one_part=True, **_HYBRID),
    Family(architecture="olmo2", sliding_window=SlidingWindow(period=4), output_optional=False),
    Family(architecture="qwen2vl", token_batches=True, input_node="embd"),
    Family(architecture="qwen3vl", **_DEEPSTACK),
    Family(architecture="qwen3vlmoe", **_DEEPSTACK),
    Family(architecture="qwen35", token_batches=True, input_node="model.input_embed", **_DELTA_NET),
    Family(architecture="qwen35moe", token_batches=True, input_node="model.input_embed", **_DELTA_NET),
    Family(architecture="qwen3next", **_DELTA_NET),
    Family(
        architecture="smallthinker",
        sliding_window=SlidingWindow(period=4, dense_first=True),
        cut_multiple=4,
        forbidden_lengths=(4,),
    ),
    Family(architecture="smollm3", cut_multiple=4),
    Family(architecture="starcoder", input_node="inpL"),
)

_ALL = (
    *(Family(architecture=name) for name in _PLAIN),
    *(Family(architecture=name, output_optional=False) for name in _WITH_OWN_HEAD),
    *_SPECIAL,
)

FAMILIES: dict[str, Family] = {family.architecture: family for family in sorted(_ALL, key=lambda f: f.architecture)}


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
    too_many = family.fixed_from_layers is not None and num_layers >= family.fixed_from_layers
    if num_layers in family.fixed_layer_counts or too_many:
        return []
    least = family.min_layers
    return [cut for cut in range(family.cut_multiple, num_layers, family.cut_multiple) if least <= cut <= num_layers - least]


# Kinds of layers: attention to everything, to a sliding window, a recurrent state instead, none of these.
ATTENTION, WINDOWED, RECURRENT, OTHER = "attention", "sliding window", "recurrent", "other"


def slice_problem(family: Family, start: int, end: int, num_layers: int, kinds: list[str] | None = None) -> str | None:
    """Why layers [start, end) cannot be a stage of their own, or None if they can.

    `kinds` of all layers: llama.cpp aborts where it expects caches of two kinds and has layers for one only
    (None: not judged).
    """
    if not 0 <= start < end <= num_layers:
        return f"layers {start} to {end} are not a part of a model of {num_layers} layers"
    if (start, end) == (0, num_layers):
        return None
    what = f"a {family.architecture} model of {num_layers} layers"
    allowed = cut_points(family, num_layers)
    for cut in (start, end):
        if cut not in (0, num_layers) and cut not in allowed:
            return f"{what} cannot be cut before layer {cut}"
    if end - start < family.min_layers or end - start in family.forbidden_lengths:
        return f"llama.cpp cannot run {end - start} layers of {what}"
    needed = {ATTENTION, RECURRENT} if family.hybrid else {WINDOWED}
    missing = needed.intersection(kinds or ()).difference((kinds or [])[start:end])
    if missing:
        return f"layers {start} to {end} of {what} include no {min(missing)} layer, without which llama.cpp fails"
    return None


def allowed_stage(description: ModelDescription, start: int, end: int) -> bool:
    """Can layers [start, end) of a described model be a stage? A few architectures forbid some ranges between allowed cuts."""
    family = require_proved(description.architecture)
    return slice_problem(family, start, end, description.num_layers, described_kinds(description)) is None


def described_kinds(description: ModelDescription) -> list[str]:
    """The kind of each layer, for `slice_problem`."""
    return [_kind(layer.kv) for layer in description.layers]


def _kind(kv: KvCost) -> str:
    if kv.state_bytes:
        return RECURRENT
    return OTHER if not kv.num_kv_heads else ATTENTION if kv.window_tokens is None else WINDOWED
