"""A Hugging Face folder (config.json and safetensors), here or behind a server -> `ModelDescription`, from headers alone.

Fails when: config.json or the weights are missing, pickled or damaged (`ModelError` and below).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from shardwise.errors import MalformedModelError, ModelError, UnsupportedModelError
from shardwise.model.byte_source import ByteSource, for_each
from shardwise.model.description import (
    LayerDescription,
    ModelDescription,
    ModelSource,
    TokenizerDescription,
    WeightTensor,
)
from shardwise.model.hf_config import HfConfig
from shardwise.model.identity import revision_digest
from shardwise.model.layer_cost import build_layer, dominant_quantization
from shardwise.model.model_files import LocalFolder, ModelFiles, parse_object, read_text
from shardwise.model.safetensors_header import SafeTensor, SafetensorsHeader, read_safetensors_header

INDEX = "model.safetensors.index.json"
_LAYER_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.(.+)$")
_OTHER_PART = re.compile(r"(?:^|\.)(?:vision\w*|visual|audio\w*|image\w*|multi_modal_projector|mm_\w+|speech\w*)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens\w*|wte|wpe|word_embeddings\w*|embed_in|embed_positions|tok_embeddings)\b")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "tekken.json")


def describe_folder(path: str | Path, *, reference: str | None = None) -> ModelDescription:
    """Describe a folder on this machine."""
    folder = LocalFolder(Path(path))
    names = folder.names()
    if "config.json" not in names:
        models = [name for name in names if name.endswith(".gguf")]
        hint = f"name the file itself, such as {folder.path / models[0]}" if models else "it needs config.json and safetensors"
        raise ModelError("this folder holds no Hugging Face model", where=str(path), hint=hint)
    return describe_files(folder, reference=reference or str(path))


def describe_files(files: ModelFiles, *, reference: str) -> ModelDescription:
    """Describe the model that these files make up."""
    names = files.names()
    weights = weight_files(files, names)
    config_source, *sources = files.open_all(["config.json", *weights])
    config = HfConfig(parse_object(read_text(config_source), config_source.name), config_source.name)
    headers = for_each(read_safetensors_header, sources, parallel=any(s.is_remote for s in sources))
    groups = _Groups(headers, config)
    paths = tuple(str(files.path / name) for name in weights) if isinstance(files, LocalFolder) else ()
    return ModelDescription(
        name=Path(files.label.removeprefix("hf:")).name or files.label,
        architecture=config.architecture,
        source=ModelSource(kind="huggingface", reference=reference, paths=paths),
        layers=groups.describe_layers(),
        embedding=tuple(groups.embedding),
        output=tuple(groups.output),
        other=tuple(groups.other),
        unused=tuple(groups.unused),
        tied_embeddings=not any(t.name.endswith(("lm_head.weight", "embed_out.weight")) for t in groups.output),
        hidden_size=config.hidden,
        num_heads=config.heads,
        vocab_size=config.number("vocab_size"),
        context_length=config.context,
        tokenizer=_tokenizer(files, names, config),
        quantization=config.quantization or dominant_quantization([t for ts in groups.layers for t in ts]),
        revision_digest=_revision(config_source, groups.headers),
    )


def weight_files(files: ModelFiles, names: list[str]) -> list[str]:
    """The safetensors files of the model: those of the index, or the only one; `ModelError` where one is missing."""
    if INDEX in names:
        (source,) = files.open_all([INDEX])
        mapping = parse_object(read_text(source), source.name).get("weight_map")
        if not isinstance(mapping, dict) or not all(isinstance(name, str) for name in mapping.values()):
            raise MalformedModelError("the index has no weight_map", where=source.name)
        wanted = sorted(set(mapping.values()))
        missing = [name for name in wanted if name not in names]
        if missing:
            message = f"{len(missing)} of {len(wanted)} weight files are missing, first {missing[0][:100]}"
            raise ModelError(message, where=files.label, hint="download the whole model")
        if wanted:
            return wanted
    found = [n for n in names if n.endswith(".safetensors") and "/" not in n and not n.startswith("adapter_")]
    if "model.safetensors" in found:
        return ["model.safetensors"]
    if found:
        return found
    pickled = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
    message = "the weights are pickled, and pickles are not read" if pickled else "there are no safetensors files"
    raise UnsupportedModelError(message, where=files.label, hint="save the model with safe_serialization=True")


class _Groups:
    """The tensors of all files, by who holds them."""

    def __init__(self, headers: list[SafetensorsHeader], config: HfConfig) -> None:
        if not 0 < config.num_layers <= sum(len(header.tensors) for header in headers):
            message = f"config.json claims {config.num_layers} layers, but the files have not that many tensors"
            raise MalformedModelError(message, where=config.where)
        self.headers = headers
        self.config = config
        self.layers: list[list[WeightTensor]] = [[] for _ in range(config.num_layers)]
        self.embedding: list[WeightTensor] = []
        self.output: list[WeightTensor] = []
        self.other: list[WeightTensor] = []
        self.unused: list[WeightTensor] = []
        seen: set[str] = set()
        for index, header in enumerate(headers):
            for tensor in header.tensors:
                if tensor.name in seen:
                    raise MalformedModelError(f"the tensor {tensor.name[:200]!r} is in two files", where=header.source.name)
                seen.add(tensor.name)
                self._place(_weight(tensor, index))
        for index, tensors in enumerate(self.layers):
            if not tensors:
                raise MalformedModelError(f"layer {index} of {config.num_layers} has no tensors", where=config.where)

    def _place(self, weight: WeightTensor) -> None:
        match = _LAYER_NAME.search(weight.name)
        if _OTHER_PART.search(weight.name):
            self.unused.append(weight)
        elif match is not None:
            index = int(match[1])
            (self.layers[index] if index < len(self.layers) else self.unused).append(weight)
        elif _EMBEDDING.search(weight.name):
            self.embedding.append(weight)
        else:
            (self.other if "rotary" in weight.name else self.output).append(weight)

    def describe_layers(self) -> tuple[LayerDescription, ...]:
        config = self.config
        active, shared = config.number("active", 0), config.number("shared", 0)
        return tuple(
            build_layer(
                index,
                tuple(tensors),
                config.attention(index, {t.name for t in tensors}),
                num_experts=config.experts,
                num_active=active,
                num_shared=shared,
                logical_elements={t.name: packed_elements(t, config.packed_bits) for t in tensors},
            )
            for index, tensors in enumerate(self.layers)
        )


def packed_elements(tensor: WeightTensor, bits: int) -> int:
    """Weights behind a tensor whose integers hold several (GPTQ, AWQ, bitsandbytes' NF4, MXFP4 blocks)."""
    if tensor.quantization == "I32" and tensor.name.endswith(("qweight", "weight_packed")):
        return tensor.num_elements * 32 // bits
    if tensor.quantization == "U8" and tensor.name.endswith(("_blocks", ".weight", "weight_packed")):
        return tensor.num_elements * 2
    return tensor.num_elements


def _weight(tensor: SafeTensor, file_index: int) -> WeightTensor:
    return WeightTensor(
        name=tensor.name,
        shape=tensor.shape,
        quantization=tensor.dtype,
        num_bytes=tensor.num_bytes,
        file_index=file_index,
        offset_bytes=tensor.offset_bytes,
    )


def _revision(config: ByteSource, headers: list[SafetensorsHeader]) -> str:
    parts = [(config, config.size_bytes)]
    return revision_digest(parts + [(header.source, header.data_offset_bytes) for header in headers])


def _tokenizer(files: ModelFiles, names: list[str], config: HfConfig) -> TokenizerDescription:
    """Identity: the bytes of the first of the known files that is there (and of merges.txt beside vocab.json)."""
    present = [name for name in _TOKENIZER_FILES if name in names]
    chosen = [n for n in present if n in ("vocab.json", "merges.txt")] if present[:1] == ["vocab.json"] else present[:1]
    extra = [name for name in ("added_tokens.json",) if name in names]
    digest = hashlib.sha256()
    for name, source in zip(chosen + extra, files.open_all(chosen + extra), strict=True):
        digest.update(f"{name}\0".encode() + read_text(source))
    settings = _tokenizer_settings(files, names)
    kind = settings.get("tokenizer_class")
    return TokenizerDescription(
        kind=kind if isinstance(kind, str) else "",
        vocab_size=config.number("vocab_size"),
        digest=digest.hexdigest() if chosen else "",
        chat_template=_chat_template(files, names, settings),
        bos_id=config.token_id("bos"),
        eos_id=config.token_id("eos"),
    )


def _tokenizer_settings(files: ModelFiles, names: list[str]) -> dict[str, Any]:
    if "tokenizer_config.json" not in names:
        return {}
    (source,) = files.open_all(["tokenizer_config.json"])
    return parse_object(read_text(source), source.name)


def _chat_template(files: ModelFiles, names: list[str], settings: dict[str, Any]) -> str | None:
    if "chat_template.jinja" in names:
        (source,) = files.open_all(["chat_template.jinja"])
        return read_text(source).decode("utf-8", "replace")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = [t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0] if named else None
    return template if isinstance(template, str) else None
