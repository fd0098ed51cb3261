"""plan -> verified shards -> running stages -> ready; the only place that joins the rooms."""

from shardwise.deploy.deployment import Deployment, StageStatus
from shardwise.deploy.launcher import launch, launch_local
from shardwise.deploy.options import Placement, RunOptions

__all__ = ["Deployment", "Placement", "RunOptions", "StageStatus", "launch", "launch_local"]
