"""Bytes: what a rank of a stage holds, and what happens when that is more than there is.

weights + KV x sessions x reserved context + activations and buffers + a runtime constant. Too little memory is a cliff:
weights are read in the same order at every token, so an LRU page cache that is short by a little misses everything
(Belady 1966; seen with llama.cpp's mmap by prima.cpp). There is no smooth curve. Nothing here fails.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.machines.profile import DeviceProfile, NodeProfile
from shardwise.model.description import ModelDescription
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.types import Workload

HOST_EMBEDDING = ("cuda", "vulkan")  # devices with memory of their own: llama.cpp looks embeddings up in the host's
KV_PADDING_TOKENS = 256  # llama.cpp pads the context of its KV cache to this
DEFAULT_DISK_BYTES_PER_S = 0.5e9  # a SATA disk, where the cluster file says nothing


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank."""

    weight_bytes: int
    kv_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes


def reserved_positions(workload: Workload) -> int:
    """Positions of KV cache a session, padded as the backend pads."""
    return -(-workload.reserved_tokens // KV_PADDING_TOKENS) * KV_PADDING_TOKENS


def layer_kv_bytes(model: ModelDescription, index: int, workload: Workload, sessions: int) -> float:
    """KV bytes of one layer for all sessions; a sliding window and a recurrent state keep their own size."""
    kv = model.layers[index].kv
    positions = reserved_positions(workload)
    if kv.window_tokens is not None:
        positions = min(positions, kv.window_tokens + workload.prefill_chunk_tokens)
    return sessions * (positions * kv.bytes_per_token(workload.kv_type) + kv.state_bytes)


def workspace_bytes(model: ModelDescription, workload: Workload, costs: RuntimeCosts, *, last: bool) -> int:
    """Compute buffers (f32) of a chunk: hidden rows, the widest product, attention scores; logits on the last stage."""
    rows = max(workload.prefill_chunk_tokens, workload.num_users)
    widest = max((max(t.shape) for t in model.layers[0].tensors), default=model.hidden_size) if model.layers else 0
    scores = model.num_heads * min(reserved_positions(workload), model.context_length)
    floats = rows * (4 * model.hidden_size + 2 * widest + scores)
    logits = workload.num_users * model.vocab_size if last else 0
    vocabulary = costs.vocab_token_bytes * model.vocab_size if last else 0
    return costs.process_bytes + vocabulary + 4 * (floats + logits)


def mapped_bytes(model: ModelDescription, start: int, end: int) -> int:
    """Weights of a stage that stay on disk but for the rows that are looked up: the token embedding, where it is no head."""
    is_head = end == model.num_layers and model.tied_embeddings
    return sum(t.num_bytes for t in model.embedding) if start == 0 and not is_head else 0


def rank_memory(
    model: ModelDescription,
    start: int,
    end: int,
    workload: Workload,
    costs: RuntimeCosts,
    *,
    share: float = 1.0,
    sessions: int | None = None,
    device_kind: str = "cpu",
) -> RankMemory:
    """Bytes of a rank that holds `share` of the layers [start, end) and KV for `sessions` (default: every user).

    On a device with memory of its own the token embedding does not count, unless it is the head too.
    """
    users = workload.num_users if sessions is None else sessions
    kv = sum(layer_kv_bytes(model, index, workload, users) for index in range(start, end))
    buffers = workspace_bytes(model, workload, costs, last=end == model.num_layers)
    weights = model.stage_weight_bytes(start, end)
    if device_kind in HOST_EMBEDDING:
        weights -= mapped_bytes(model, start, end)
    return RankMemory(round(weights * share), round(kv * share), buffers)


def expert_rank_memory(
    model: ModelDescription,
    start: int,
    end: int,
    experts: tuple[int, int],
    workload: Workload,
    costs: RuntimeCosts,
    *,
    dense: bool,
) -> RankMemory:
    """Bytes of an expert-parallel rank: its experts, and on the first rank (`dense`) all that is not an expert."""
    own = others = 0
    for layer in model.layers[start:end]:
        if layer.experts is not None:
            own += (experts[1] - experts[0]) * layer.experts.expert_bytes
            others += layer.experts.num_experts * layer.experts.expert_bytes
    whole = rank_memory(model, start, end, workload, costs)
    if not dense:
        return RankMemory(own, 0, whole.workspace_bytes)
    return RankMemory(whole.weight_bytes - others + own, whole.kv_bytes, whole.workspace_bytes)


def paging_s(weight_bytes: float, node: NodeProfile, device: DeviceProfile, needed_bytes: float) -> float:
    """Extra seconds of a step when `needed_bytes` exceed the device: all weights come from disk; 0 when they fit."""
    if needed_bytes <= device.memory_bytes:
        return 0.0
    disk = node.disk_bytes_per_s.value if node.disk_bytes_per_s else DEFAULT_DISK_BYTES_PER_S
    return weight_bytes / disk
