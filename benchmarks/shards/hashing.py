"""Hash and slice against `sha256sum` on the same file, interleaved in one run.

    python benchmarks/shards/hashing.py [MODEL.gguf] [--rounds 7]

Method: the file is in the page cache. Each round times `sha256sum FILE`, `openssl dgst -sha256 FILE` where there is one, `pack`
into an empty folder (hash, slice, fsync, manifest), and `verify` of what was written. Rates are bytes of the *model file* over
time for sha256sum, openssl and pack, bytes read for verify. The ratio is against sha256sum: at least 0.8 is wanted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from shardwise.model import describe_gguf, sample_path
from shardwise.shards.manifest import ManifestSettings
from shardwise.shards.packing import make_manifest, pack_model
from shardwise.shards.verify import verify_dir

SETTINGS = ManifestSettings(protocol_version=1)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def timed(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", type=Path, default=sample_path())
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    model: Path = arguments.model
    num_layers = describe_gguf(model).num_layers
    counts = [num_layers // 3, num_layers // 3, num_layers - 2 * (num_layers // 3)]
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        size = model.stat().st_size
        for _ in range(arguments.rounds + 1):
            shutil.rmtree(out, ignore_errors=True)
            spent = {
                "sha256sum": size / timed(lambda: run("sha256sum", str(model))),
                "hash_only": size / timed(lambda: make_manifest(model, counts, SETTINGS)),
                "pack": size / timed(lambda: pack_model(model, counts, out, SETTINGS)),
            }
            written = sum(path.stat().st_size for path in out.glob("*.gguf"))
            spent["verify"] = written / timed(lambda: verify_dir(out))
            if shutil.which("openssl"):
                spent["openssl"] = size / timed(lambda: run("openssl", "dgst", "-sha256", str(model)))
            for name, rate in spent.items():
                rates.setdefault(name, []).append(rate)
    medians = {name: statistics.median(values[1:]) for name, values in rates.items()}  # the first round warms up
    ratios = {
        name: statistics.median(a / b for a, b in zip(rates[name][1:], rates["sha256sum"][1:], strict=True)) for name in rates
    }
    print(json.dumps({"bytes": size, "written_bytes": written, "bytes_per_s": medians, "ratio_to_sha256sum": ratios}, indent=2))


if __name__ == "__main__":
    main()
