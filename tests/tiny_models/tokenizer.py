"""A tiny but real byte-level BPE tokenizer (GPT-2 style): 256 bytes, some merges, the three ChatML tokens."""

from __future__ import annotations

from functools import cache

import gguf

# Pairs in the order of their rank; each joins two tokens that exist by then (U+0120 is the space).
_MERGES = """
Ġ t|h e|i n|r e|o n|a n|e r|e s|Ġ a|Ġt he|Ġ s|Ġ w|e n|o r|a t|Ġ c|Ġ b|in g|an d|Ġ o|Ġo f|Ġ f|Ġ p|e d|Ġ m|i s|o u|Ġt o
Ġ and|Ġ in|Ġ h|l l|a l|i t|a r|Ġ d|Ġ n|Ġ l|l e|i on|Ġ is|y o|yo u|T h|Th e|c o|co m|p u|t er|pu ter|com puter|o m|m e|Ġh ome
s e|b e|w h|wh at|Ġ y|Ġy ou|' s|a ve|h ave|Ġh ave|st ory|s t|l o|Ġl ong|n g|o ne|Ġ one|Ġ r|Ġ e|Ġ g|k e|Ġ u|Ġf or|Ġw as
"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def byte_letters() -> tuple[str, ...]:
    """GPT-2's printable letter for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters: dict[int, str] = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + sum(b not in printable for b in range(byte)))
    return tuple(letters[byte] for byte in range(256))


@cache
def vocabulary() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(tokens, merges); the special tokens come last."""
    tokens = list(byte_letters())
    merges: list[str] = []
    for merge in _MERGES.replace("\n", "|").split("|"):
        left, _, right = merge.partition(" ")
        if left and right and left in tokens and right in tokens and left + right not in tokens:
            tokens.append(left + right)
            merges.append(merge)
    return (*tokens, *SPECIAL), tuple(merges)


def add_tokenizer(writer: gguf.GGUFWriter) -> int:
    """Write the tokenizer's keys; returns the vocabulary's size."""
    tokens, merges = vocabulary()
    types = [1] * (len(tokens) - len(SPECIAL)) + [3] * len(SPECIAL)  # NORMAL, CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(tokens))
    writer.add_token_types(types)
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(tokens.index(SPECIAL[0]))
    writer.add_eos_token_id(tokens.index(SPECIAL[2]))
    writer.add_pad_token_id(tokens.index(SPECIAL[0]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    return len(tokens)
