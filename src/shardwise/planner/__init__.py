"""HOW to split a model, and WHETHER: cost model, search, advice. Pure functions over records; no clock, socket or process."""

from shardwise.planner.assignment import compute_shard_assignment
from shardwise.planner.cost_rates import RuntimeCosts
from shardwise.planner.find_plan import advise, consult, find_plan
from shardwise.planner.predict import predict
from shardwise.planner.requantize import smaller_quantizations
from shardwise.planner.types import (
    Advice,
    Alternative,
    BoundaryPrediction,
    Limits,
    Objective,
    Percentiles,
    Plan,
    PlanRequest,
    Prediction,
    RankAssignment,
    Reason,
    Rejection,
    Speculation,
    StageAssignment,
    StagePrediction,
    Workload,
)

__all__ = [
    "Advice",
    "Alternative",
    "BoundaryPrediction",
    "Limits",
    "Objective",
    "Percentiles",
    "Plan",
    "PlanRequest",
    "Prediction",
    "RankAssignment",
    "Reason",
    "Rejection",
    "RuntimeCosts",
    "Speculation",
    "StageAssignment",
    "StagePrediction",
    "Workload",
    "advise",
    "compute_shard_assignment",
    "consult",
    "find_plan",
    "predict",
    "smaller_quantizations",
]
