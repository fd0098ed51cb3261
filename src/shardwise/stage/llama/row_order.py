"""In which order llama.cpp's graphs see the rows of a batch. Pure.

Without a unified KV cache, llama.cpp cuts a batch into graphs of equally many rows of consecutive sequences
(`llama_batch_allocr::split_equal`, sequential): rows of two sequences of 17 and 5 tokens arrive as 5 and 5, then 12.
Logits are put back into the batch's order by llama.cpp; what a tap takes out or overwrites is not.
"""

from __future__ import annotations

from collections.abc import Sequence


def graph_order(lengths: Sequence[int], slots: Sequence[int]) -> list[int]:
    """Rows of the batch in the order of the graphs; segment `i` has `lengths[i]` consecutive rows of sequence `slots[i]`."""
    waiting: list[list[int]] = []
    start = 0
    for length in lengths:
        waiting.append(list(range(start, start + length)))
        start += length
    order: list[int] = []
    while any(waiting):
        taken: list[int] = []
        for index, rows in enumerate(waiting):
            if rows and (not taken or slots[index] == slots[taken[-1]] + 1):
                taken.append(index)
        count = min(len(waiting[index]) for index in taken)
        for index in taken:
            order += waiting[index][:count]
            del waiting[index][:count]
    return order
