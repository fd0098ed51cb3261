"""A few layers with random weights in a GGUF file: the shape of a small Llama, any common quantization.

The quantized blocks are random bits under small scales, which every kernel takes as valid weights: speed does not
depend on the values as long as none is infinite or denormal. Files are slices that are not the last one, so nothing
but the layers is computed. **Called by** the layer probe.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardwise.errors import UsageError
from shardwise.model.quantization import quantizations
from shardwise.records import Record
from shardwise.shards.stage_paths import StageFiles

# Where a block keeps its f16 scales (ggml-common.h), in bytes from its start.
_SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
}
_PLAIN = ("F32", "F16", "BF16")
SUPPORTED = (*_SCALES, *_PLAIN)
_SCALE = np.float16(0.001)


class LayerShape(Record):
    """Sizes of one layer."""

    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 4
    feed_forward: int = 5632

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> (rows, columns)."""
        kv = self.hidden // self.heads * self.kv_heads
        return {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, self.hidden),
            "ffn_gate": (self.feed_forward, self.hidden),
            "ffn_up": (self.feed_forward, self.hidden),
            "ffn_down": (self.hidden, self.feed_forward),
        }

    @property
    def num_weights(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices.values())

    def layer_bytes(self, quantization: str) -> int:
        """Of the matrices, which is all that counts."""
        block = quantizations()[quantization]
        return self.num_weights // block.block_elements * block.block_bytes

    def kv_bytes_per_token(self, element_bytes: float) -> float:
        """Of one layer."""
        return 2 * self.hidden // self.heads * self.kv_heads * element_bytes


TYPICAL = LayerShape()
SMALL = LayerShape(hidden=256, heads=4, kv_heads=2, feed_forward=512)  # so light that only fixed costs remain
KV_HEAVY = LayerShape(hidden=1024, heads=16, kv_heads=16, feed_forward=256)


def write_layers(path: Path, shape: LayerShape, quantization: str, num_layers: int) -> StageFiles:
    """Write the file; `UsageError` for a quantization that is not supported here."""
    if quantization not in SUPPORTED:
        raise UsageError(f"no synthetic layer in {quantization}", where="probe", hint=f"one of {', '.join(SUPPORTED)}")
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(num_layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(1)
    writer.add_tokenizer_model("no_vocab")
    ones = np.ones(shape.hidden, dtype=np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((1, shape.hidden), dtype=np.float32))
    writer.add_tensor("output_norm.weight", ones)
    random = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType[quantization]
    for layer in range(num_layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", ones)
        for name, (rows, columns) in shape.matrices.items():
            data = random_matrix(random, quantization, rows, columns)
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return StageFiles(
        start=0,
        end=num_layers,
        num_layers=num_layers + 1,
        weights=str(path),
        embedding=None,
        architecture="llama",
        input_scale=1.0,
        input_node=None,
        output_node=f"l_out-{num_layers - 1}",
        weight_bytes=path.stat().st_size,
    )


def random_matrix(random: np.random.Generator, quantization: str, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Bytes of a matrix, [rows, bytes of a row]."""
    block = quantizations()[quantization]
    row_bytes = columns // block.block_elements * block.block_bytes
    if quantization in _PLAIN:
        values = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)
        return _plain_bytes(values, quantization)
    blocks = random.integers(0, 256, size=(rows * row_bytes // block.block_bytes, block.block_bytes), dtype=np.uint8)
    for offset in _SCALES[quantization]:
        blocks[:, offset : offset + 2] = np.frombuffer(_SCALE.tobytes(), dtype=np.uint8)
    return blocks.reshape(rows, row_bytes)


def _plain_bytes(values: npt.NDArray[np.float32], quantization: str) -> npt.NDArray[np.uint8]:
    if quantization == "F16":
        return values.astype(np.float16).view(np.uint8)
    if quantization == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.view(np.uint8)
