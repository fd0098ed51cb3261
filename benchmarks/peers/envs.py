"""Makes the peers' environments: `python3 benchmarks/peers/envs.py [llama-rpc] [transformers] [language-pipes]`.

Everything lands in `$SHARDWISE_CACHE/peers` (default `~/.cache/shardwise/peers`); a second run finds it done. llama.cpp is
compiled once with the very options of tools/bootstrap.py plus `-DGGML_RPC=ON`, and the wheel is kept.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import bootstrap  # noqa: E402

PEERS = Path(os.environ.get("SHARDWISE_CACHE", Path.home() / ".cache" / "shardwise")) / "peers"
TORCH = os.environ.get("SHARDWISE_TORCH", "torch==2.13.0")
PACKAGES = {
    "llama-rpc": ["numpy", "jinja2", "typing_extensions", "diskcache"],
    "transformers": [TORCH, "transformers==5.14.1", "accelerate==1.15.0", "gguf", "safetensors"],
    "language-pipes": [TORCH, "language-pipes==2.5.0"],
}


def python_of(name: str) -> Path:
    """The environment's interpreter, made if need be."""
    python = PEERS / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS / name)], check=True)
    return python


def pip(python: Path, *args: str) -> None:
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args], check=True)


def llama_wheel(python: Path) -> Path:
    """The wheel with the RPC backend, compiled once."""
    wheels = PEERS / "wheels"
    found = sorted(wheels.glob("llama_cpp_python-*.whl"))
    if found:
        return found[-1]
    wheels.mkdir(parents=True, exist_ok=True)
    pip(python, "--upgrade", "pip", "setuptools", "wheel")
    pip(python, bootstrap.OPENBLAS)
    bootstrap.PYTHON = python
    plain_args = bootstrap.cmake_args
    bootstrap.cmake_args = lambda with_blas: f"{plain_args(with_blas)} -DGGML_RPC=ON"
    return bootstrap.compile_wheel(bootstrap.llama_requirement(), wheels, with_blas=True)


def make(name: str) -> None:
    """One environment, marked when complete."""
    mark = PEERS / name / "complete"
    if mark.exists():
        return
    bootstrap.say(f"making the environment of {name}")
    python = python_of(name)
    if name == "llama-rpc":
        wheel = llama_wheel(python)
        pip(python, bootstrap.OPENBLAS)
        pip(python, "--no-deps", str(wheel))
    pip(python, *PACKAGES[name])
    mark.write_text("\n".join(PACKAGES[name]))


if __name__ == "__main__":
    for wanted in sys.argv[1:] or list(PACKAGES):
        if wanted not in PACKAGES:
            raise SystemExit(f"error: unknown environment {wanted}; one of {', '.join(PACKAGES)}")
        make(wanted)
