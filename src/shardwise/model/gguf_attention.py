"""GGUF metadata -> what each layer keeps of a token: GQA, MLA, sliding windows, recurrent state, shared caches.

The rules are llama.cpp's (`llama-hparams.cpp` and `models/<architecture>.cpp`, version b6000 and later), because that
is what allocates the caches. Which layers are recurrent is read from their tensors, so new hybrids need no entry here.
Fails when: a key that the rules need is missing or impossible (`MalformedModelError`).
"""

from __future__ import annotations

from shardwise.model.description import KvCost
from shardwise.model.families import FAMILIES, SlidingWindow
from shardwise.model.gguf_header import GgufArray, GgufHeader
from shardwise.model.layer_cost import AttentionSpec

# Architectures beyond those in `families`: read in llama.cpp, used for costs only.
_OTHER_WINDOWS = {
    "afmoe": SlidingWindow(period=4),
    "cohere2": SlidingWindow(period=4),
    "cohere2moe": SlidingWindow(period=4, dense_first=True),
    "exaone-moe": SlidingWindow(period=4),
    "exaone4": SlidingWindow(period=4),
    "gemma3n": SlidingWindow(period=5),
    "llama4": SlidingWindow(period=4),
    "smallthinker": SlidingWindow(period=4, dense_first=True),
}
_FIXED_WINDOW = {"llama4": 8192, "smallthinker": 4096}  # whatever the key says, unless it says 0
_DEFAULT_WINDOW = {"gemma2": 4096, "llama4": 8192}  # where the key is missing
_SHARED_CACHE_FROM = {"gemma3n": 20}  # models/gemma3n.cpp: n_layer_kv_from_start
_STATE_BYTES = 4  # recurrent state is f32


class LayerFacts:
    """Per-layer hyperparameters of one file."""

    def __init__(self, header: GgufHeader, num_layers: int) -> None:
        self.header = header
        self.architecture = header.text("general.architecture")
        self.num_layers = num_layers
        self.hidden_size = self.integer("embedding_length")
        self.heads = self.integers("attention.head_count", 0)
        kv_key = self.key("attention.head_count_kv")
        self.kv_heads = header.integers(kv_key, num_layers) if kv_key in header.metadata else list(self.heads)
        self.windows = self._windows()

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None) -> int:
        return self.header.integer(self.key(name), default)

    def integers(self, name: str, default: int | None = None) -> list[int]:
        return self.header.integers(self.key(name), self.num_layers, default)

    def attention(self, index: int, tensor_names: set[str]) -> AttentionSpec:
        """Layer `index`; `tensor_names` are its tensors' names without `blk.N.`."""
        state_bytes = self._state_bytes(index) if _is_recurrent(tensor_names) else 0
        if not _has_attention(tensor_names, self.kv_heads[index], state_bytes):
            empty = KvCost(num_kv_heads=0, key_dim=0, value_dim=0, state_bytes=state_bytes)
            return AttentionSpec(num_heads=0, key_dim=0, value_dim=0, kv=empty)
        heads = self.heads[index]
        if heads == 0:
            raise self.header.complaint(f"layer {index} attends, but '{self.key('attention.head_count')}' gives it no heads")
        if not self.kv_heads[index] <= heads <= self.hidden_size:
            message = f"layer {index} claims {heads} heads and {self.kv_heads[index]} key heads, of a width of {self.hidden_size}"
            raise self.header.complaint(message)
        latent = self.integer("attention.kv_lora_rank", 0)
        if latent and self.integer("attention.key_length_mla", 0):
            key_dim = self.integer("attention.key_length", latent + self.integer("rope.dimension_count", 0))
            return AttentionSpec(
                num_heads=heads, key_dim=key_dim, value_dim=latent, kv=KvCost(num_kv_heads=1, key_dim=key_dim, value_dim=0)
            )
        key_dim, value_dim = self._head_dims(index)
        kv = KvCost(
            num_kv_heads=self.kv_heads[index] if self._has_own_cache(index) else 0,
            key_dim=key_dim,
            value_dim=value_dim,
            window_tokens=self.windows[index],
            state_bytes=state_bytes,
        )
        return AttentionSpec(num_heads=heads, key_dim=key_dim, value_dim=value_dim, kv=kv)

    def _head_dims(self, index: int) -> tuple[int, int]:
        default = self.hidden_size // max(self.heads[index], 1)
        key_dim = self.integer("attention.key_length", default)
        value_dim = self.integer("attention.value_length", default)
        if self.windows[index] is not None:
            key_dim = self.integer("attention.key_length_swa", key_dim)
            value_dim = self.integer("attention.value_length_swa", value_dim)
        return key_dim, value_dim

    def _has_own_cache(self, index: int) -> bool:
        """Some models let their last layers read an earlier layer's cache."""
        shared = self.integer("attention.shared_kv_layers", 0)
        first_shared = self.num_layers - shared if shared else _SHARED_CACHE_FROM.get(self.architecture, self.num_layers)
        return index < first_shared

    def _windows(self) -> list[int | None]:
        """The sliding window of each layer, in tokens; None where it sees everything."""
        everything: list[int | None] = [None] * self.num_layers
        size = self.integer("attention.sliding_window", _DEFAULT_WINDOW.get(self.architecture, 0))
        family = FAMILIES.get(self.architecture)
        known = (family.sliding_window if family else None) or _OTHER_WINDOWS.get(self.architecture)
        entry = self.header.metadata.get(self.key("attention.sliding_window_pattern"))
        if size == 0 or (known is None and entry is None):
            return everything
        size = _FIXED_WINDOW.get(self.architecture, size)
        if entry is not None and isinstance(entry.value, GgufArray):
            flags = self.integers("attention.sliding_window_pattern")
            return [size if flag else None for flag in flags]
        period = self.integer("attention.sliding_window_pattern", known.period if known else 0)
        full_at = 0 if known and known.dense_first else period - 1
        return [size if period == 0 or i % period != full_at else None for i in range(self.num_layers)]

    def _state_bytes(self, index: int) -> int:
        """llama-hparams.cpp, `n_embd_r` (convolution or token shift) + `n_embd_s` (state), both f32."""
        head = self.integer("wkv.head_size", 0)
        if head:
            return _STATE_BYTES * self.hidden_size * (self.integer("token_shift_count", 2) + head)
        short = self.integer("shortconv.l_cache", 0)
        if short:
            return _STATE_BYTES * self.hidden_size * (short - 1)
        taps = max(self.integer("ssm.conv_kernel", 0) - 1, 0)
        delta = self.integer("kda.head_dim", 0)
        if delta:
            inner = self.heads[index] * delta
            return _STATE_BYTES * (3 * (taps or 3) * inner + inner * delta)
        inner, state = self.integer("ssm.inner_size", 0), self.integer("ssm.state_size", 0)
        groups = self.integer("ssm.group_count", 0)
        return _STATE_BYTES * (taps * (inner + 2 * groups * state) + state * inner)


def _is_recurrent(names: set[str]) -> bool:
    return any(name.startswith(("ssm_", "time_mix_", "shortconv")) for name in names)


def _has_attention(names: set[str], kv_heads: int, state_bytes: int) -> bool:
    """A recurrent layer attends as well only where it has a key projection of its own (Falcon-H1)."""
    if state_bytes:
        return any(name.startswith(("attn_k.", "attn_kv")) for name in names)
    return any(name.startswith(("attn_k.", "attn_qkv.", "attn_kv")) for name in names) and kv_heads > 0
