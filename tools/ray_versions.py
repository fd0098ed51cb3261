"""Run the tests of the Ray engine and of the cluster's life with other versions of Ray than the installed one.

    .venv/bin/python tools/ray_versions.py 2.55.1 2.58.1 [-- pytest options]

Each version gets an environment of its own under `~/.cache/shardwise/ray-versions/`: that Ray, and everything else from
`.venv`. It is kept, so a second run installs nothing. Ends with 1 where a version fails. Standard library only.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("SHARDWISE_CACHE", Path.home() / ".cache" / "shardwise")) / "ray-versions"
LIFE = "tests/cluster/test_lifecycle.py::test_"
TESTS = (  # start with a token, attach, place, kill, restart; what the head tells of its raylets
    "tests/cluster/test_ray_engine.py",
    "tests/cluster/test_raylet.py",
    f"{LIFE}both_are_ready_and_every_file_is_private",
    f"{LIFE}a_killed_raylet_comes_back_by_itself",
    f"{LIFE}a_killed_daemon_takes_everything_along_and_starts_again",
    f"{LIFE}once_the_nodes_are_ready_again_work_can_be_placed_on_each",
)
MARKS = "not bench"  # the long ones too


def environment(version: str) -> Path:
    """The interpreter of an environment with that Ray; made where it is missing."""
    folder = CACHE / f"{version}-py{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = folder / "done"
    if done.exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    found = subprocess.run(
        [str(python), "-c", "import site; print(site.getsitepackages()[-1])"], check=True, capture_output=True, text=True
    )
    packages = Path(found.stdout.strip())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(packages), f"ray=={version}"], check=True)
    base = site.getsitepackages()[-1]
    (packages / "zz-base.pth").write_text(f"import site; site.addsitedir({base!r})\n")  # after its own: this Ray comes first
    done.touch()
    return python


def run(version: str, options: list[str]) -> int:
    """The tests with that version."""
    python = environment(version)
    check = "import importlib.metadata as m, ray; assert ray.__version__ == m.version('ray') == {!r}, ray.__version__"
    subprocess.run([str(python), "-c", check.format(version)], check=True, cwd=ROOT)
    print(f"== Ray {version}", flush=True)
    return subprocess.run([str(python), "-m", "pytest", *TESTS, "-m", MARKS, *options], cwd=ROOT).returncode


def main() -> int:
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    versions, options = words[:split], words[split + 1 :]
    if not versions:
        print(__doc__, file=sys.stderr)
        return 2
    failed = [version for version in versions if run(version, options)]
    print(f"failed: {', '.join(failed)}" if failed else f"all pass: {', '.join(versions)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
