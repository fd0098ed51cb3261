"""Tensor parallelism for any torch module: even or uneven, packed or plain, exact both ways. Stands alone.

    from shardwise.tp import TensorParallelConfig, apply_tensor_parallel, gather

    torch.distributed.init_process_group("gloo")
    apply_tensor_parallel(model, TensorParallelConfig(tp_degree=2, shares=[5, 3]), {"layers.*.up": "colwise", ...})
    full = gather(model)                    # the original state dict, bit for bit

Data flow: `styles` + `matching` + `attention` -> `resolve` (pure, on names and shapes) -> `apply` (all or nothing) ->
`kernels` over `functional` over `collectives`. `gather`, `checkpoint` and `loading` go the other way through `layout`.
docs/tp.md tells how to write a plan.
"""

from shardwise.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:  # pragma: no cover - needs an environment without torch
    raise MissingExtraError.for_extra("torch", "tensor parallelism") from error

from shardwise.tp.apply import apply_tensor_parallel, plan_of, resolved_of, undo
from shardwise.tp.checkpoint import save_full, save_sharded
from shardwise.tp.collectives import Collectives, LoneCollectives
from shardwise.tp.config import TensorParallelConfig
from shardwise.tp.folder import report_folder
from shardwise.tp.gather import gather
from shardwise.tp.infer import InferredPlan, infer_plan
from shardwise.tp.kernels import register_kernel
from shardwise.tp.layout import Partition, Piece, ShardLayout
from shardwise.tp.loading import empty_model, load_sharded
from shardwise.tp.report import TpReport, report
from shardwise.tp.resolve import ModuleShard, ResolvedPlan, resolve_plan
from shardwise.tp.simulate import simulate
from shardwise.tp.styles import ExpertParallel, PackedColwiseParallel, PackedRowwiseParallel, Style, register_style

__all__ = [
    "Collectives",
    "ExpertParallel",
    "InferredPlan",
    "LoneCollectives",
    "ModuleShard",
    "PackedColwiseParallel",
    "PackedRowwiseParallel",
    "Partition",
    "Piece",
    "ResolvedPlan",
    "ShardLayout",
    "Style",
    "TensorParallelConfig",
    "TpReport",
    "apply_tensor_parallel",
    "empty_model",
    "gather",
    "infer_plan",
    "load_sharded",
    "plan_of",
    "register_kernel",
    "register_style",
    "report",
    "report_folder",
    "resolve_plan",
    "resolved_of",
    "save_full",
    "save_sharded",
    "simulate",
    "undo",
]
