"""Does the report find what was put in? Runs the scenario `truth` and compares culprits with the injected faults.

**Called by** `shardwise bench truth` and a timing test. Needs root on Linux (a virtual home).
"""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.bench.deployment_runner import DeploymentRunner
from shardwise.bench.parts import culprits
from shardwise.bench.result import ResultFile
from shardwise.bench.runner import Progress, run_scenario
from shardwise.bench.scenario import load_scenario
from shardwise.bench.stats import quantile
from shardwise.bench.store import TrialStore
from shardwise.errors import StageCrashed
from shardwise.records import Record, replace

TOLERANCE = 0.15
LINK_S, SPEED, COPY_BYTES = 3e-3, 0.5, 2**20


class Truth(Record):
    """One injected fault and what the comparison with the base said first."""

    injected: str
    expected: str  # kind and place
    found: str
    injected_size: float
    found_size: float
    unit: str
    sentence: str

    @property
    def error(self) -> float:
        """Of the size, as a share."""
        return self.found_size / self.injected_size - 1 if self.injected_size else 0.0

    @property
    def ok(self) -> bool:
        return self.found == self.expected and abs(self.error) <= TOLERANCE


def measure_truth(folder: Path, progress: Progress, *, repetitions: int = 3) -> tuple[ResultFile, list[Truth]]:
    """Run the scenario into `folder` and judge it."""
    scenario = replace(load_scenario("truth"), repetitions=repetitions)
    path = str(Path(__file__).parent / "injection" / "copy")
    files = {network: folder / f"conversion-{network}.jsonl" for network in ("base", "copy")}
    sizes = {"base": 0, "copy": COPY_BYTES}

    def prefix(network: str) -> tuple[str, ...]:
        file = files[network].resolve()
        return ("env", f"PYTHONPATH={path}", f"SHARDWISE_INJECTED={file}", f"SHARDWISE_COPY_BYTES={sizes[network]}")

    runner = DeploymentRunner(extra_prefix={(network, "desktop"): prefix(network) for network in files})
    result = run_scenario(scenario, TrialStore(folder, scenario), {"shardwise": runner}, progress)
    return result, judge(result, _median_s(files["copy"]) - _median_s(files["base"]))


def _median_s(file: Path) -> float:
    """Of all conversions that the injected code has timed."""
    if not file.exists():
        return 0.0
    return quantile([value for line in file.read_text(encoding="utf-8").splitlines() for value in json.loads(line)], 0.5)


def judge(result: ResultFile, copy_s: float) -> list[Truth]:
    """The first culprit of each injected network against the base."""
    by_network = {trials[0].case.network: key for key, trials in result.cases().items()}
    cases = result.cases()
    base = cases[by_network["base"]]
    expected = {
        "link": ("3 ms on the link from desktop to nas", "transfer desktop>nas", LINK_S, "s"),
        "slow": ("nas at half its speed", "compute nas", SPEED, "of its speed"),
        "copy": ("a copy of 1 MB on desktop", "copy desktop", copy_s, "s"),
    }
    found = []
    for network, (words, culprit, size, unit) in expected.items():
        blamed = culprits(base, cases[by_network[network]])
        if not size:
            raise StageCrashed("the scenario has no figures", where=f"network {network}")
        first = blamed[0] if blamed else None
        measured = 0.0
        if first is not None:
            measured = first.extra_s if unit == "s" else first.base_s / first.new_s
        found.append(
            Truth(
                injected=words,
                expected=culprit,
                found=f"{first.kind} {first.where}" if first else "nothing",
                injected_size=size,
                found_size=measured,
                unit=unit,
                sentence=first.sentence() if first else "nothing is slower beyond the noise",
            )
        )
    return found
