"""Names that people give to models -> dimensions, as data (`presets.toml`), and from there a `ModelDescription`.

`find_preset("Llama-3.1-70B")` and `find_preset("llama-3.1-70b")` find the same entry: case, separators, words in
brackets and words such as Instruct do not count. A description takes a quantization: `llama-3-70b:q4_k_m`,
`Llama 3 70B Q4_K_M`; without one it is Q4_K_M, or what the model was published in.
Fails when: the name is unknown (`UsageError` with the nearest names) or the quantization is (`UnsupportedModelError`).
"""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import msgspec

from shardwise.errors import UsageError
from shardwise.model.description import ModelDescription, ModelSource, TokenizerDescription
from shardwise.model.preset_quantization import known_label, parse_quantization
from shardwise.model.preset_tensors import Dimensions, TensorFactory
from shardwise.records import replace

_ACTIVE = re.compile(r"^a\d+(?:\.\d+)?b$")
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)([bmt])$")
_SIZE_TAG = re.compile(r"([^:]+):(\d+(?:\.\d+)?[bm](?:-a\d+b)?)(?:[-:](?:instruct-|chat-)?([\w]+))?$", re.I)
_TRAILING_LABEL = re.compile(
    r"[\s:_\-]+((?:ud-)?(?:i?q\d\w*|tq\d_0|b?f16|fp16|f32|fp32|fp8|mxfp[48]|nvfp4|(?:gptq-)?int[48]|nf4|awq|gptq))$", re.I
)
DEFAULT_QUANTIZATION = "Q4_K_M"


class Preset(Dimensions):
    """A named model's dimensions."""

    name: str
    title: str
    aliases: tuple[str, ...] = ()
    quantization: str = DEFAULT_QUANTIZATION
    estimated: bool = False  # of a size that is not listed: layers of the nearest sibling

    @property
    def num_params(self) -> int:
        """Weights, norms and biases aside."""
        factory = TensorFactory(self, "F16")
        layers = sum(t.num_elements for i in range(self.layers) for t in factory.layer(i).tensors)
        return layers + sum(t.num_elements for t in (*factory.embedding(), *factory.output()))


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("presets.toml").read_text("utf-8"))


@cache
def _ignored(key: str) -> frozenset[str]:
    return frozenset(_data()[key])


@cache
def presets() -> dict[str, Preset]:
    """All presets by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, entry in _data().items():
        if not isinstance(entry, dict):
            continue
        own = dict(entry)
        inherited = {k: v for k, v in found.get(own.pop("like", ""), {}).items() if k not in ("aliases", "title")}
        found[name] = inherited | own | {"name": name}
    return {name: msgspec.convert(fields, Preset) for name, fields in found.items()}


def split_label(text: str) -> tuple[str, str | None]:
    """`llama-3-70b:q4_k_m` -> (`llama-3-70b`, `Q4_K_M`); a label after the last colon must be a known one.

    A size there belongs to the name, as in `llama3:8b` and `llama3:8b-q4_k_m`.
    """
    if match := _SIZE_TAG.match(text):
        return split_label(f"{match[1]}-{match[2]}:{match[3]}" if match[3] else f"{match[1]}-{match[2]}")
    if ":" in text:
        name, _, label = text.rpartition(":")
        return name.strip(), known_label(label)
    match = _TRAILING_LABEL.search(text)
    label_found = parse_quantization(match[1]) if match else None
    return (text[: match.start()].strip(), label_found) if match and label_found else (text, None)


def find_preset(name: str, *, estimate_size: bool = False) -> Preset:
    """The preset that people mean by `name`. With `estimate_size`, an unlisted size of a listed family is made from the
    layers of its nearest sibling (`estimated` is true then)."""
    bare, _ = split_label(name)
    words = _words(bare)
    for forget in (frozenset[str](), _ignored("ignored_at_need")):
        key = _key(words, forget)
        if key in _index(forget):
            return presets()[_index(forget)[key]]
    guess = _estimate(words) if estimate_size else None
    if guess is not None:
        return guess
    near = get_close_matches("-".join(words), [p.name for p in presets().values()], n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else "see `shardwise describe --list-presets`"
    if re.fullmatch(r"[\w.\-]+/[\w.\-]+", bare):
        hint = f"for a model of the Hub write hf:{bare}; {hint}"
    raise UsageError(f"there is no model '{name}': no such file, and no preset of that name", hint=hint, field="MODEL")


@lru_cache(maxsize=256)
def describe_preset(name: str, quantization: str | None = None, *, estimate_size: bool = False) -> ModelDescription:
    """Describe a preset; `quantization` overrides what the name says."""
    preset = find_preset(name, estimate_size=estimate_size)
    label = known_label(quantization) if quantization else split_label(name)[1] or preset.quantization
    factory = TensorFactory(preset, label)
    return ModelDescription(
        name=preset.title,
        architecture=preset.architecture,
        source=ModelSource(kind="preset", reference=name),
        layers=tuple(factory.layer(index) for index in range(preset.layers)),
        embedding=factory.embedding(),
        output=factory.output(),
        tied_embeddings=preset.tied,
        hidden_size=preset.hidden,
        num_heads=preset.heads,
        vocab_size=preset.vocab,
        context_length=preset.context,
        tokenizer=TokenizerDescription(kind="", vocab_size=preset.vocab, digest=""),
        quantization=label,
        revision_digest="",
    )


def _words(name: str) -> tuple[str, ...]:
    """`LLaMA-2 70B (fp16)` -> (llama, 2, 70b); `qwen2.5` and `Qwen-2.5` are the same."""
    text = re.sub(r"\([^)]*\)", " ", name.lower())
    out: list[str] = []
    for chunk in re.split(r"[^a-z0-9.]+", text):
        match = re.match(r"^([a-z]{2,})(\d.*)$", chunk)
        out += [part.strip(".") for part in ((match[1], match[2]) if match else (chunk,))]
    kept = tuple(word for word in out if word and word not in _ignored("ignored_words"))
    return kept[1:] if len(kept) > 1 and kept[0] in _ignored("companies") else kept


def _key(words: tuple[str, ...], forget: frozenset[str]) -> tuple[str, ...]:
    """With `forget`, words and active sizes that do not change the dimensions are dropped."""
    return tuple(w for w in words if not forget or (w not in forget and not _ACTIVE.match(w)))


@cache
def _index(forget: frozenset[str]) -> dict[tuple[str, ...], str]:
    index: dict[tuple[str, ...], str] = {}
    for preset in presets().values():
        for name in (preset.name, preset.title, *preset.aliases):
            index.setdefault(_key(_words(name), forget), preset.name)
    return index


def _size(words: tuple[str, ...]) -> float | None:
    """Parameters that the name states."""
    scale = {"m": 1e6, "b": 1e9, "t": 1e12}
    sizes = [float(m[1]) * scale[m[2]] for w in words if (m := _SIZE.match(w))]
    return sizes[0] if sizes else None


def _estimate(words: tuple[str, ...]) -> Preset | None:
    """As many layers of the nearest sibling as make up the size: how depth-scaled and pruned models are made."""
    size, family = _size(words), tuple(w for w in words if not _SIZE.match(w))
    siblings = [p for p in presets().values() if any(_is_family(n, family) for n in (p.name, *p.aliases))]
    if size is None or not siblings or not family:
        return None
    nearest = min(siblings, key=lambda p: max(p.num_params / size, size / p.num_params))
    one = sum(t.num_elements for t in TensorFactory(nearest, "F16").layer(nearest.layers - 1).tensors)
    layers = max(round(nearest.layers + (size - nearest.num_params) / one), 1)
    title = f"{nearest.title}, {layers} of whose layers make {size / 1e9:g}B"
    return replace(nearest, name="-".join(words), title=title, aliases=(), layers=layers, estimated=True)


def _is_family(name: str, family: tuple[str, ...]) -> bool:
    return tuple(w for w in _words(name) if not _SIZE.match(w)) == family
