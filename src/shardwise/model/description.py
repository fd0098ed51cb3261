"""What the rest of the program knows about a model: sizes, costs and identity, never weights.

Shapes are written in the order of the file they come from; for GGUF that is ggml's order, fastest dimension first
(`ne`): a linear layer from `in` to `out` features is `(in, out)`.
"""

from __future__ import annotations

from shardwise.records import Record


class Quantization(Record):
    """How one kind of weight is stored: `block_bytes` bytes hold `block_elements` weights."""

    name: str  # GGUF's name (Q4_1, F16, ...) or the Hugging Face dtype in the same spelling (BF16, F8_E4M3, MXFP4)
    block_elements: int
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_elements


class WeightTensor(Record):
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    quantization: str
    num_bytes: int
    file_index: int = 0  # which part of a split model
    offset_bytes: int = 0  # absolute in that file; 0 where there is no file (presets)

    @property
    def num_elements(self) -> int:
        product = 1
        for size in self.shape:
            product *= size
        return product


class KvCost(Record):
    """What one token adds to the KV cache of one layer."""

    num_kv_heads: int
    key_dim: int  # per head
    value_dim: int  # per head; 0 where keys and values share one latent (MLA)
    window_tokens: int | None = None  # sliding window; None = all positions are kept
    state_bytes: int = 0  # recurrent state per session, independent of length

    def elements_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def bytes_per_token(self, kv_type: str = "f16") -> float:
        """Bytes per token for a KV type: f32, f16, bf16, q8_0 (34 bytes per 32 values), q4_0 (18 per 32)."""
        return self.elements_per_token() * KV_TYPE_BYTES[kv_type]


KV_TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}


class ExpertSpec(Record):
    """Experts of a mixture-of-experts layer."""

    num_experts: int
    num_active: int
    expert_bytes: int  # one expert's weights
    num_shared: int = 0
    shared_bytes: int = 0  # weights of shared experts, touched by every token


class LayerDescription(Record):
    """One transformer block."""

    index: int
    tensors: tuple[WeightTensor, ...]
    flops_per_token: float  # matrix products of one token, 2 per multiply-add, active experts only, without attention scores
    attention_flops_per_position: float  # additional FLOPs per token for each earlier position (QK^T and PV)
    kv: KvCost
    experts: ExpertSpec | None = None

    @property
    def weight_bytes(self) -> int:
        return sum(t.num_bytes for t in self.tensors)

    @property
    def weight_bytes_by_quantization(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for tensor in self.tensors:
            out[tensor.quantization] = out.get(tensor.quantization, 0) + tensor.num_bytes
        return out

    def active_weight_bytes(self, rows: int = 1) -> float:
        """Bytes read for `rows` tokens: all of a dense layer, `E * (1 - (1 - k/E)^rows)` experts of a sparse one."""
        if self.experts is None:
            return float(self.weight_bytes)
        spec = self.experts
        touched = spec.num_experts * (1.0 - (1.0 - spec.num_active / spec.num_experts) ** rows)
        dense = self.weight_bytes - spec.num_experts * spec.expert_bytes
        return dense + touched * spec.expert_bytes


class TokenizerDescription(Record):
    """Identity of the tokenizer."""

    kind: str  # gpt2, llama, bert, ... ("" where unknown)
    vocab_size: int
    digest: str  # SHA-256 over everything that changes token ids; "" for presets
    chat_template: str | None = None
    bos_id: int | None = None
    eos_id: int | None = None


class ModelSource(Record):
    """Where it came from. `paths` are all parts of a split file in order; empty for presets."""

    kind: str  # gguf | huggingface | module | preset
    reference: str  # what the user typed
    paths: tuple[str, ...] = ()


class ModelDescription(Record):
    """One model, whole."""

    name: str
    architecture: str  # GGUF's name: llama, qwen3moe, ...
    source: ModelSource
    layers: tuple[LayerDescription, ...]
    embedding: tuple[WeightTensor, ...]  # held by the first stage
    output: tuple[WeightTensor, ...]  # final norm and head, held by the last stage
    other: tuple[WeightTensor, ...] = ()  # needed by every stage (rope factors)
    unused: tuple[WeightTensor, ...] = ()  # in the file, but loaded by no stage (layers for multi-token prediction)
    tied_embeddings: bool  # the head reuses the token embedding, so the last stage holds a copy of it
    hidden_size: int
    num_heads: int
    vocab_size: int
    context_length: int
    tokenizer: TokenizerDescription
    quantization: str  # the label people use: Q4_K_M, F16, ...
    revision_digest: str  # identity of the weights; "" for presets

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the whole file's tensors (a tied embedding counts once)."""
        return sum(t.num_bytes for t in self.all_tensors())

    @property
    def num_params(self) -> int:
        return sum(t.num_elements for t in self.all_tensors())

    @property
    def head_bytes(self) -> int:
        """What the last stage holds beside its layers: final norm and head, or the tied embedding."""
        own = sum(t.num_bytes for t in self.output)
        return own + (sum(t.num_bytes for t in self.embedding) if self.tied_embeddings else 0)

    @property
    def head_flops_per_token(self) -> float:
        return 2.0 * self.hidden_size * self.vocab_size

    def all_tensors(self) -> list[WeightTensor]:
        inner = [t for layer in self.layers for t in layer.tensors]
        return [*self.embedding, *inner, *self.output, *self.other, *self.unused]

    def stage_weight_bytes(self, start: int, end: int) -> int:
        """Weights of a stage with the layers [start, end): embedding with layer 0, head with the last layer."""
        total = sum(layer.weight_bytes for layer in self.layers[start:end]) + sum(t.num_bytes for t in self.other)
        if start == 0:
            total += sum(t.num_bytes for t in self.embedding)
        if end == self.num_layers:
            # One stage that holds everything needs a tied embedding only once.
            own = sum(t.num_bytes for t in self.output)
            total += own if (start == 0 or not self.tied_embeddings) else self.head_bytes
        return total

    def kv_bytes_per_token(self, start: int = 0, end: int | None = None, kv_type: str = "f16") -> float:
        """KV cache bytes per token of the layers [start, end), ignoring windows."""
        return sum(layer.kv.bytes_per_token(kv_type) for layer in self.layers[start:end])
