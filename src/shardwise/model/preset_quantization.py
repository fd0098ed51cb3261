"""Quantization labels: what people write -> a label, and which format each tensor of a model gets under a label.

The mixtures are llama.cpp's (`llama-quant.cpp`, `llama_tensor_get_type_impl`, without an importance matrix), so that a
preset weighs what the published file weighs. Labels of other programs (FP8, INT8, NF4, INT4) store every matrix of the
layers that way and keep embedding and head at 16 bits.
Fails when: a label is unknown (`UnsupportedModelError`, with the known ones).
"""

from __future__ import annotations

import re
from difflib import get_close_matches

from shardwise.errors import UnsupportedModelError
from shardwise.model.quantization import quantization
from shardwise.records import Record

_SYNONYMS = {
    "Q4": "Q4_0",
    "Q40": "Q4_0",
    "4-BIT": "Q4_0",
    "4BIT": "Q4_0",
    "Q41": "Q4_1",
    "Q50": "Q5_0",
    "Q5": "Q5_0",
    "Q6": "Q6_K",
    "Q8": "Q8_0",
    "Q80": "Q8_0",
    "8-BIT": "Q8_0",
    "8BIT": "Q8_0",
    "Q3_K": "Q3_K_M",
    "Q4_K": "Q4_K_M",
    "Q5_K": "Q5_K_M",
    "FP16": "F16",
    "HALF": "F16",
    "FP32": "F32",
    "FLOAT32": "F32",
    "BFLOAT16": "BF16",
    "F8": "FP8",
    "LLM.INT8": "INT8",
    "W8A8": "INT8",
    "GPTQ-INT4": "INT4",
    "GPTQ": "INT4",
    "AWQ": "INT4",
    "W4A16": "INT4",
}
# Mixtures: label -> the format of most weights.
_MIXES = {
    "Q2_K": "Q2_K",
    "Q3_K_S": "Q3_K",
    "Q3_K_M": "Q3_K",
    "Q3_K_L": "Q3_K",
    "Q4_K_S": "Q4_K",
    "Q4_K_M": "Q4_K",
    "Q5_K_S": "Q5_K",
    "Q5_K_M": "Q5_K",
    "IQ3_M": "IQ3_S",
    "IQ3_XS": "IQ3_S",
    "IQ2_M": "IQ2_S",
}
_PLAIN = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q8_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4"),
)
_OTHER_PROGRAMS = ("FP8", "MXFP8", "INT8", "NF4", "INT4", "NVFP4")
LABELS = (*_PLAIN, *_MIXES, *_OTHER_PROGRAMS)
# llama.cpp's fallbacks where a row is no multiple of 256 (`tensor_type_fallback`).
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL", "Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL"}
_LABEL = re.compile(
    r"(?<![a-z0-9])(i?q\d_[a-z0-9]+(?:_[smlx]+)?|tq\d_0|bf16|bfloat16|fp?\d+|float32|mxfp\d|nvfp4|gptq-int4|gptq|awq|w\da\d+"
    r"|llm\.int8|int\d|nf4|q\d+|\d-?bit|half)(?![a-z0-9_])"
)
_BUFFER = re.compile(r"[,/]?\s*\b(?:q80|q40|f16|f32)(?:\s+sync)?\s+buffer")


class MixFacts(Record):
    """What a mixture's rules ask about a model."""

    num_layers: int
    num_experts: int
    kv_groups: int  # query heads that share a key head
    architecture: str
    tied: bool


def parse_quantization(text: str) -> str | None:
    """The label in a description such as `Q40 weights, Q80 sync buffer`, `int8 (LLM.int8)`; None where there is none."""
    cleaned = _BUFFER.sub("", text.lower().replace("ud-", ""))
    found = [match[1].upper() for match in _LABEL.finditer(cleaned)]
    for word in sorted(found, key=lambda word: word.endswith("BIT")):  # "8-bit MXFP8" is MXFP8
        label = _SYNONYMS.get(word, word)
        if label in LABELS:
            return label
    return None


def known_label(text: str) -> str:
    """A label exactly as it is written in files; `UnsupportedModelError` suggests the nearest."""
    label = parse_quantization(text)
    if label is not None:
        return label
    near = get_close_matches(text.upper(), LABELS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(LABELS)}"
    raise UnsupportedModelError(f"the quantization '{text}' is unknown", hint=hint)


def tensor_format(label: str, name: str, row: int, index: int, facts: MixFacts) -> str:
    """The format of tensor `name` (GGUF's, without `blk.N.`) with rows of `row` weights in layer `index`."""
    if label in ("F32", "F16", "BF16"):
        return label
    role = name.split(".")[0]
    outside = role in ("token_embd", "output", "position_embd")
    if label in _OTHER_PROGRAMS:
        return "BF16" if outside else label
    if label == "MXFP4":
        return "MXFP4" if "_exps" in role else "Q8_0"
    kind = _MIXES.get(label, label)
    chosen = _outside_format(label, kind, role, facts) if outside else _layer_format(label, kind, role, index, facts)
    while row % quantization(chosen).block_elements:
        chosen = _FALLBACK.get(chosen, "F16" if chosen == "Q8_0" else "Q8_0")
    return chosen


def _outside_format(label: str, kind: str, role: str, facts: MixFacts) -> str:
    if role == "output" or (facts.tied and role == "token_embd"):
        if facts.architecture == "falcon":
            return "Q8_0"
        return "Q5_K" if label.startswith(("IQ1", "IQ2", "IQ3_XXS")) else kind if kind == "Q8_0" else "Q6_K"
    if role == "token_embd" and label in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"):
        return "Q2_K"
    return kind


def _layer_format(label: str, kind: str, role: str, index: int, facts: MixFacts) -> str:
    """The mixtures' exceptions."""
    eight = facts.num_experts == 8
    if role == "attn_v":
        return "Q8_0" if eight else _value_format(label, kind, index, facts)
    if role == "attn_k" and eight:
        return "Q8_0"
    if role == "attn_output" and facts.architecture != "falcon":
        if eight and label in ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS", "IQ3_M"):
            return "Q5_K"
        return kind if eight else {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_M": "Q4_K"}.get(label, kind)
    if role == "attn_qkv":
        return {"Q3_K_M": "Q4_K", "Q3_K_L": "Q4_K", "Q4_K_M": "Q5_K", "Q5_K_M": "Q6_K"}.get(label, kind)
    if role in ("ffn_down", "ffn_down_exps"):
        return _down_format(label, kind, index, facts)
    return kind


def _value_format(label: str, kind: str, index: int, facts: MixFacts) -> str:
    grouped = facts.kv_groups >= 4
    chosen = kind
    if label == "Q2_K":
        chosen = "Q4_K" if grouped else "Q3_K"
    elif label == "Q3_K_M":
        chosen = "Q5_K" if index < 2 else "Q4_K"
    elif label == "Q3_K_L" or (label == "Q4_K_S" and index < 4) or (label in ("IQ4_NL", "IQ4_XS") and grouped):
        chosen = "Q5_K"
    elif label == "IQ3_M" or (label.startswith(("IQ1", "IQ2", "IQ3")) and grouped):
        chosen = "Q4_K"
    elif label in ("Q4_K_M", "Q5_K_M") and _more_bits(index, facts.num_layers):
        chosen = "Q6_K"
    is_70b = facts.num_layers == 80 and facts.kv_groups > 1
    return "Q5_K" if is_70b and chosen in ("Q3_K", "Q4_K") else chosen


def _down_format(label: str, kind: str, index: int, facts: MixFacts) -> str:
    count, falcon = facts.num_layers, facts.architecture == "falcon"
    more = _more_bits(index, count)
    if label == "Q4_K_M" and falcon:
        return "Q6_K" if index < count // 16 else "Q5_K" if more else kind
    if label in ("Q4_K_M", "Q5_K_M"):
        return "Q6_K" if more else kind
    if label == "Q3_K_M":
        return "Q5_K" if index < count // 16 else "Q4_K" if not falcon or more else kind
    if label == "Q4_K_S" or label in ("IQ4_NL", "IQ4_XS"):
        return "Q5_K" if index < count // 8 and not (falcon and label == "Q4_K_S") else kind
    if label == "IQ3_M":
        return "Q4_K" if index < count // 8 else kind
    return {"Q2_K": "Q3_K", "Q3_K_L": "Q4_K" if falcon else "Q5_K"}.get(label, kind)


def _more_bits(index: int, count: int) -> bool:
    """`use_more_bits`: the first and the last eighth of the layers, and every third between."""
    # C++ gives -1 % 3 == -1 where Python gives 2; the first eighth is caught before.
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
