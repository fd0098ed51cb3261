"""Keeps trials on disk while a scenario runs, so that an interrupted run goes on where it stopped.

One folder a run: `scenario.json` (what is measured, for the digest), `trials.jsonl` (one finished trial a line, each
flushed; a line torn by a crash is dropped), and at the end `result.json`.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shardwise.bench.result import RESULT_VERSION, Environment, ResultFile, TrialResult, read_result
from shardwise.bench.scenario import Scenario
from shardwise.errors import UsageError
from shardwise.records import digest, to_json


class TrialStore:
    """The folder of one run. Raises `UsageError` when the folder holds a run of another scenario."""

    def __init__(self, folder: Path, scenario: Scenario) -> None:
        self.folder, self._scenario = folder, scenario
        self._trials_path = folder / "trials.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        described = folder / "scenario.json"
        if described.exists() and described.read_bytes() != to_json(scenario):
            hint = "choose another --out, or delete the folder to start anew"
            raise UsageError("the folder holds a run of another scenario or seed", where=str(folder), hint=hint)
        described.write_bytes(to_json(scenario))
        self.trials = self._read()

    def _read(self) -> list[TrialResult]:
        if not self._trials_path.exists():
            return []
        trials, good_bytes = [], 0
        for line in self._trials_path.read_bytes().splitlines(keepends=True):
            try:
                trials.append(msgspec.json.decode(line, type=TrialResult))
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
            if not line.endswith(b"\n"):
                trials.pop()
                break
            good_bytes += len(line)
        os.truncate(self._trials_path, good_bytes)
        return trials

    def finished(self, key: str, repetition: int) -> bool:
        """Whether that trial is there already, without an error."""
        return any(trial.case.key == key and trial.repetition == repetition and trial.error is None for trial in self.trials)

    def add(self, trial: TrialResult) -> None:
        """Keep a finished trial; on disk when this returns."""
        self.trials = [t for t in self.trials if (t.case.key, t.repetition) != (trial.case.key, trial.repetition)] + [trial]
        with self._trials_path.open("ab") as file:
            file.write(to_json(trial) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def result(self, environment: Environment, *, complete: bool) -> ResultFile:
        """Everything so far as one document; later trials of the same case and repetition win."""
        return ResultFile(
            version=RESULT_VERSION,
            name=self._scenario.name,
            title=self._scenario.title,
            scenario_digest=digest(self._scenario),
            seed=self._scenario.seed,
            environment=environment,
            trials=tuple(self.trials),
            target_inter_token_p95_s=self._scenario.target_inter_token_p95_s,
            complete=complete,
        )

    def write(self, result: ResultFile) -> Path:
        """`result.json`, replaced in one step."""
        path = self.folder / "result.json"
        new = path.with_suffix(".new")
        new.write_bytes(to_json(result, indent=1))
        os.replace(new, path)
        return path


def load_result(path: Path) -> ResultFile:
    """A result from a file, or from a run's folder."""
    file = path / "result.json" if path.is_dir() else path
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the result: {error.strerror}", where=str(file)) from error
    return read_result(data, where=str(file))
