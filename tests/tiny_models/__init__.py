"""Tiny models with random weights: real GGUF files of a few megabytes that llama.cpp loads.

`make_tiny("gemma3", "F16", path=...)` writes one; `SPECS` lists what there is.
"""

from tests.tiny_models.catalog import SPECS
from tests.tiny_models.make import make_tiny, vocab_size
from tests.tiny_models.quantize import QUANTIZATIONS

__all__ = ["QUANTIZATIONS", "SPECS", "make_tiny", "vocab_size"]
