"""stub"""
from __future__ import annotations
from shardwise.bench.published.calibration import Calibration
from shardwise.bench.published.case import Case, Skip
def serve(case: Case, calibration: Calibration) -> float | Skip:
    return Skip("serving")
