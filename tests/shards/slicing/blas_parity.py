"""Run as a program: parity with BLAS and with several threads, in a process of its own (BLAS cannot be switched back on).

`python -m tests.shards.slicing.blas_parity FOLDER` prints one JSON object: {"blas": bool, "NAME/THREADS": difference}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from shardwise.stage.llama import library
from tests.shards.slicing import harness
from tests.tiny_models import make_tiny


def main(folder: Path) -> None:
    """Prompts of 33 rows and matrices of 256 x 512 are large enough for ggml to hand them to BLAS (from 32 on)."""
    out: dict[str, object] = {}
    for threads in (1, 2):
        harness.SETTINGS = msgspec.structs.replace(harness.SETTINGS, blas="on", threads=threads)
        for name, quantization in (
            ("llama", "F16"),
            ("llama", "Q8_0"),
            ("llama", "Q4_1"),
            ("llama", "Q4_K"),
            ("gpt-oss", "Q8_0"),
        ):
            path = make_tiny(name, quantization, path=folder / f"{name}-{quantization}.gguf")
            num_layers = 5 if name == "gpt-oss" else 4
            expected = harness.reference_logits(path)
            actual = harness.chain_logits(harness.cut(path, [2], num_layers, folder))
            out[f"{name}-{quantization}/{threads}"] = harness.largest_difference(expected, actual)
    out["blas"] = library.has_blas()
    print(json.dumps(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
