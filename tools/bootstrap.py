"""Make `.venv` from nothing: environment, compiled llama.cpp (cached), shardwise itself with the asked extras.

    python3 tools/bootstrap.py sample dev server ...

Standard library only. llama.cpp is compiled with OpenBLAS (docs/adr/0002-llama-build.md) where the platform has
it and without where that fails; the wheel is kept in `~/.cache/shardwise/wheels/<key>`, the key being everything
that changes the machine code. A second run that finds nothing to do takes well under a second.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
OPENBLAS = "scipy-openblas32==0.3.34.481.3"
CACHE = Path(os.environ.get("SHARDWISE_CACHE", Path.home() / ".cache" / "shardwise"))
RECIPE = "2"  # raised whenever `cmake_args` changes
GGML_BASE = ROOT / "tools" / "ggml_base.cmake"
RENAMED = ("cblas_sgemm", "openblas_set_num_threads", "openblas_get_parallel")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(*command: str | Path, env: dict[str, str] | None = None, log: Path | None = None) -> None:
    """Run a command; where `log` is given its output goes there and a failure shows the end of it."""
    args = [str(part) for part in command]
    if log is None:
        subprocess.run(args, check=True, env=env)
        return
    with log.open("ab") as out:
        code = subprocess.run(args, stdout=out, stderr=subprocess.STDOUT, env=env).returncode
    if code:
        say("".join(log.read_text(errors="replace").splitlines(keepends=True)[-25:]))
        raise SystemExit(f"error: {' '.join(args[:4])} ... failed with {code} (log: {log}); see the lines above")


def pip(*args: str | Path) -> None:
    run(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *args)


def llama_requirement() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return next(str(d) for d in project["dependencies"] if str(d).startswith("llama-cpp-python"))


def cpu_identity() -> str:
    """What `-march=native` depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))]
        return "\n".join(sorted(set(lines)))
    return platform.processor()


def build_key(requirement: str) -> str:
    parts = [requirement, OPENBLAS, platform.system(), platform.machine(), cpu_identity(), RECIPE, GGML_BASE.read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def cmake_args(with_blas: bool) -> str:
    """Only the libraries; BLAS from the PyPI package whose symbols carry the prefix `scipy_`."""
    args = [
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_EXAMPLES=OFF",
        "-DLLAMA_BUILD_TOOLS=OFF",
        "-DLLAMA_BUILD_SERVER=OFF",
        "-DLLAVA_BUILD=OFF",
    ]
    if with_blas:
        where = subprocess.check_output(
            [str(PYTHON), "-c", "import scipy_openblas32 as b; print(b.get_lib_dir()); print(b.get_include_dir())"], text=True
        ).split("\n")
        library = next(
            p for p in Path(where[0]).iterdir() if "scipy_openblas" in p.name and p.suffix in {".so", ".dylib", ".lib"}
        )
        defines = " ".join(f"-D{name}=scipy_{name}" for name in RENAMED)
        args += [
            f"-DCMAKE_PROJECT_ggml_INCLUDE={GGML_BASE.as_posix()}",
            "-DGGML_BLAS=ON",
            "-DGGML_BLAS_VENDOR=OpenBLAS",
            f"-DBLAS_LIBRARIES={library.as_posix()}",
            f"-DBLAS_INCLUDE_DIRS={Path(where[1]).as_posix()}",
            f"-DCMAKE_CXX_FLAGS='{defines}'",
        ]
    return " ".join(args)


def compile_wheel(requirement: str, target: Path, with_blas: bool) -> Path:
    """Compile llama.cpp into a wheel, with a line of progress every ten seconds."""
    env = dict(os.environ, CMAKE_ARGS=cmake_args(with_blas), CMAKE_BUILD_PARALLEL_LEVEL=str(os.cpu_count() or 1))
    log = target / "build.log"
    done = threading.Event()

    def progress() -> None:
        started = time.monotonic()
        while not done.wait(10):
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            steps = [line.strip().split("]")[0] + "]" for line in lines if line.strip().startswith("[") and "/" in line[:12]]
            say(f"  compiling llama.cpp {steps[-1] if steps else ''} {time.monotonic() - started:.0f} s")

    watcher = threading.Thread(target=progress, daemon=True)
    watcher.start()
    try:
        run(
            PYTHON,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-cache-dir",
            "--no-binary",
            "llama-cpp-python",
            "-v",
            "-w",
            target,
            requirement,
            env=env,
            log=log,
        )
    finally:
        done.set()
        watcher.join()
    return next(target.glob("llama_cpp_python-*.whl"))


def llama_wheel(requirement: str) -> Path:
    target = CACHE / "wheels" / build_key(requirement)
    wheels = list(target.glob("llama_cpp_python-*.whl"))
    if wheels:
        return wheels[0]
    target.mkdir(parents=True, exist_ok=True)
    say("compiling llama.cpp (3-5 minutes on two cores, once)")
    if platform.system() == "Darwin":  # ggml uses Accelerate there by itself
        return compile_wheel(requirement, target, with_blas=False)
    try:
        return compile_wheel(requirement, target, with_blas=True)
    except SystemExit:
        say("the build with OpenBLAS failed; building without (prefill of some quantizations will be slower)")
        return compile_wheel(requirement, target, with_blas=False)


def stamp(extras: list[str]) -> str:
    decisive = [ROOT / "pyproject.toml", ROOT / "setup.py", GGML_BASE, *sorted((ROOT / "src").rglob("*.c")), Path(__file__)]
    parts = [*(path.read_text() for path in decisive), *sorted(extras), sys.version]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def main(extras: list[str]) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  (run by whatever python3 the user has)
        raise SystemExit(f"error: Python 3.11 or newer is needed (this is {platform.python_version()}); set PYTHON=python3.12")
    mark = VENV / "shardwise-setup.txt"
    have = mark.read_text().split("\n") if mark.exists() else ["", ""]
    extras = sorted(set(extras) | set(filter(None, have[1].split(","))))
    if have[0] == stamp(extras):
        return
    if not PYTHON.exists():
        say("making .venv")
        run(sys.executable, "-m", "venv", VENV)
        pip("--upgrade", "pip", "setuptools", "wheel")
    requirement = llama_requirement()
    if platform.system() != "Darwin":
        pip(OPENBLAS)
    pip("--force-reinstall", "--no-deps", llama_wheel(requirement))
    say(f"installing shardwise[{','.join(extras)}]")
    if "torch" in extras and platform.system() == "Linux" and (found := os.environ.get("SHARDWISE_TORCH", "torch==2.13.0")):
        pip(found)
    pip("-e", f"{ROOT}[{','.join(extras)}]" if extras else ROOT)
    mark.write_text(f"{stamp(extras)}\n{','.join(extras)}")


if __name__ == "__main__":
    main(sys.argv[1:])
