"""Figures that cannot be, told apart from those of a fast machine: none of them is printed, kept or planned with. Pure.

A `RateTable` and what the same processor showed elsewhere flow in; the reason against it flows out. A wrong divisor or a
difference of two timings that was lost in noise gives rates that no plan survives. **Called by** the node suite.
"""

from __future__ import annotations

import math

from shardwise.machines.profile import Measurement, RateTable
from shardwise.records import Record
from shardwise.units import format_compute, format_rate


class Ceilings(Record):
    """What no processor of this kind exceeds."""

    bytes_per_s: float = 1e14  # of any device: a hundred times a large GPU's memory
    flops_per_s: float = 1e17

    @classmethod
    def of_cpu(cls, triad: Measurement, product: Measurement) -> Ceilings:
        """Layers may lie in a cache that is much faster than memory; int8 units do up to 32 times float32's work in theory."""
        return cls(bytes_per_s=32 * triad.value, flops_per_s=16 * product.value)


def why_impossible(table: RateTable, ceilings: Ceilings) -> str:
    """What is wrong with these rates; "" = nothing."""
    what = f"{table.quantization} was left out"
    optional = (table.row_s, table.layer_fixed_s, table.attention_flops_per_s)
    times = [timing.layer_s for timing in table.timings]
    for found in (table.compute_flops_per_s, table.weight_bytes_per_s, *filter(None, optional), *times):
        if not (math.isfinite(found.value) and found.value > 0):
            return f"{what}: {found.value:g} from '{found.method}' is no rate or time"
    reads, computes = table.weight_bytes_per_s.value, table.compute_flops_per_s.value
    if reads > ceilings.bytes_per_s:
        return f"{what}: no such processor reads {format_rate(reads)} ('{table.weight_bytes_per_s.method}')"
    if computes > ceilings.flops_per_s:
        return f"{what}: no such processor computes {format_compute(computes)} ('{table.compute_flops_per_s.method}')"
    return ""
