"""shardwise: splits one model over the machines you own, and says when that is a bad idea.

    import shardwise as sw
    model = sw.describe_model("model.gguf")
    with sw.launch_local(model, num_stages=3) as deployment:
        for token in deployment.generate("Hello", max_tokens=32): ...

Names are imported when they are first used: `import shardwise` loads no heavy library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardwise.deploy import Deployment, RunOptions, launch, launch_local
    from shardwise.errors import ShardwiseError
    from shardwise.machines import ClusterProfile, DeviceProfile, LinkProfile, NodeProfile
    from shardwise.machines.cluster_file import load_cluster
    from shardwise.model import ModelDescription
    from shardwise.model.resolve import describe_model
    from shardwise.planner import PlanRequest, Workload, advise, compute_shard_assignment, find_plan

_HOMES = {
    "ClusterProfile": "machines",
    "Deployment": "deploy",
    "DeviceProfile": "machines",
    "LinkProfile": "machines",
    "ModelDescription": "model",
    "NodeProfile": "machines",
    "PlanRequest": "planner",
    "RunOptions": "deploy",
    "ShardwiseError": "errors",
    "Workload": "planner",
    "advise": "planner",
    "compute_shard_assignment": "planner",
    "describe_model": "model.resolve",
    "find_plan": "planner",
    "launch": "deploy",
    "launch_local": "deploy",
    "load_cluster": "machines.cluster_file",
}

__all__ = [
    "ClusterProfile",
    "Deployment",
    "DeviceProfile",
    "LinkProfile",
    "ModelDescription",
    "NodeProfile",
    "PlanRequest",
    "RunOptions",
    "ShardwiseError",
    "Workload",
    "__version__",
    "advise",
    "compute_shard_assignment",
    "describe_model",
    "find_plan",
    "launch",
    "launch_local",
    "load_cluster",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'shardwise' has no attribute '{name}'")
    return getattr(importlib.import_module(f"shardwise.{home}"), name)


def __dir__() -> list[str]:
    return __all__
