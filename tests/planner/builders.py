"""Models and clusters made by hand, for tests of the planner."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.machines.profile import ClusterProfile, DeviceProfile, LinkProfile, Measurement, NodeProfile
from shardwise.model.description import (
    ExpertSpec,
    KvCost,
    LayerDescription,
    ModelDescription,
    ModelSource,
    TokenizerDescription,
    WeightTensor,
)

GIB = 2**30
BYTES_PER_WEIGHT = {"F16": 2.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32, "Q4_1": 20 / 32, "F32": 4.0}


def tensor(name: str, shape: tuple[int, ...], quantization: str) -> WeightTensor:
    size = 1
    for n in shape:
        size *= n
    return WeightTensor(name=name, shape=shape, quantization=quantization, num_bytes=round(size * BYTES_PER_WEIGHT[quantization]))


def make_layer(
    index: int,
    *,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    quantization: str,
    experts: tuple[int, int] | None = None,
) -> LayerDescription:
    """A llama block; `experts` = (count, active) makes its feed-forward sparse."""
    head_dim = hidden // heads
    kv_dim = kv_heads * head_dim
    attention = [
        tensor("attn_q", (hidden, hidden), quantization),
        tensor("attn_k", (hidden, kv_dim), quantization),
        tensor("attn_v", (hidden, kv_dim), quantization),
        tensor("attn_output", (hidden, hidden), quantization),
        tensor("attn_norm", (hidden,), "F32"),
    ]
    attention_flops = 2.0 * sum(t.num_elements for t in attention[:4])
    spec = None
    if experts is None:
        feed = [tensor(f"ffn_{n}", (hidden, ffn), quantization) for n in ("gate", "up", "down")]
        flops = attention_flops + 2.0 * 3 * hidden * ffn
    else:
        count, active = experts
        feed = [tensor(f"ffn_{n}_exps", (hidden, ffn, count), quantization) for n in ("gate", "up", "down")]
        spec = ExpertSpec(num_experts=count, num_active=active, expert_bytes=sum(t.num_bytes for t in feed) // count)
        flops = attention_flops + 2.0 * 3 * hidden * ffn * active
    return LayerDescription(
        index=index,
        tensors=(*attention, *feed),
        flops_per_token=flops,
        attention_flops_per_position=4.0 * hidden,
        kv=KvCost(num_kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim),
        experts=spec,
    )


def make_model(
    num_layers: int = 8,
    *,
    hidden: int = 1024,
    ffn: int = 2816,
    heads: int = 16,
    kv_heads: int = 4,
    vocab: int = 32000,
    quantization: str = "Q4_0",
    tied: bool = False,
    context: int = 8192,
    experts: tuple[int, int] | None = None,
    ffn_of: Sequence[int] | None = None,
    name: str = "hand-made",
) -> ModelDescription:
    """A llama of the given size; `ffn_of` gives each layer its own width."""
    layers = tuple(
        make_layer(
            i,
            hidden=hidden,
            ffn=ffn_of[i] if ffn_of else ffn,
            heads=heads,
            kv_heads=kv_heads,
            quantization=quantization,
            experts=experts,
        )
        for i in range(num_layers)
    )
    head = () if tied else (tensor("output", (hidden, vocab), quantization),)
    return ModelDescription(
        name=name,
        architecture="llama",
        source=ModelSource(kind="preset", reference=name),
        layers=layers,
        embedding=(tensor("token_embd", (hidden, vocab), quantization),),
        output=(tensor("output_norm", (hidden,), "F32"), *head),
        tied_embeddings=tied,
        hidden_size=hidden,
        num_heads=heads,
        vocab_size=vocab,
        context_length=context,
        tokenizer=TokenizerDescription(kind="llama", vocab_size=vocab, digest=""),
        quantization=quantization,
        revision_digest="",
    )


def llama_70b(quantization: str = "Q4_0") -> ModelDescription:
    return make_model(
        80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256, quantization=quantization, name="llama-3-70b"
    )


def llama_8b(quantization: str = "Q4_0") -> ModelDescription:
    return make_model(
        32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, quantization=quantization, name="llama-3-8b"
    )


def make_node(
    name: str,
    *,
    memory_gib: float = 8.0,
    bandwidth_gb_s: float = 50.0,
    tflops: float = 1.0,
    availability: float = 1.0,
    devices: tuple[DeviceProfile, ...] = (),
    disk_gb_s: float | None = None,
) -> NodeProfile:
    return NodeProfile(
        name=name,
        memory_bytes=int(memory_gib * GIB),
        memory_bytes_per_s=Measurement(value=bandwidth_gb_s * 1e9),
        compute_flops_per_s=Measurement(value=tflops * 1e12),
        availability=availability,
        devices=devices,
        disk_bytes_per_s=Measurement(value=disk_gb_s * 1e9) if disk_gb_s else None,
    )


def make_gpu(
    *, memory_gib: float = 24.0, bandwidth_gb_s: float = 936.0, tflops: float = 142.0, kind: str = "cuda"
) -> DeviceProfile:
    return DeviceProfile(
        kind=kind,
        memory_bytes=int(memory_gib * GIB),
        memory_bytes_per_s=Measurement(value=bandwidth_gb_s * 1e9),
        compute_flops_per_s=Measurement(value=tflops * 1e12),
    )


def make_link(
    source: str = "",
    target: str = "",
    *,
    gbit: float = 1.0,
    latency_ms: float = 0.3,
    jitter_ms: float = 0.0,
    kind: str = "ethernet",
) -> LinkProfile:
    return LinkProfile(
        source=source,
        target=target,
        bytes_per_s=Measurement(value=gbit * 125e6),
        latency_s=Measurement(value=latency_ms / 1e3),
        jitter_p95_s=Measurement(value=jitter_ms / 1e3) if jitter_ms else None,
        kind=kind,
    )


def make_cluster(
    nodes: Sequence[NodeProfile], links: Sequence[LinkProfile] = (), default: LinkProfile | None = None
) -> ClusterProfile:
    return ClusterProfile(nodes=tuple(nodes), links=tuple(links), default_link=default or make_link())
