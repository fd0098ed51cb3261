"""Every way in which a split can be refused: a ValueError that names the full path and the way out, and an untouched model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.tp import (
    LoneCollectives,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    Style,
    TensorParallelConfig,
    apply_tensor_parallel,
    register_kernel,
    register_style,
    resolve_plan,
    undo,
)
from shardwise.tp.threads import run_ranks
from tests.tp import models
from tests.tp.parity import same_bits


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = models.Attention(heads=6, kv_heads=2, head_dim=4)
        self.mlp = models.Mlp()
        self.norm = nn.LayerNorm(models.WIDTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.named = nn.ModuleDict({"left": nn.Sequential(nn.Linear(24, 10), nn.GELU(), nn.Linear(10, 24))})
        self.tied_a, self.tied_b = nn.Linear(24, 24), nn.Linear(24, 24)
        self.tied_b.weight = self.tied_a.weight


MLP = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
CASES: list[tuple[str, dict[str, Any], int, list[float] | None, str]] = [
    (
        "indivisible",
        {"named.left.0": "colwise"},
        3,
        None,
        r"split 10 evenly over 3 ranks \(named\.left\.0\).*\[1, 2, 5, 10\].*shares",
    ),
    ("heads", {"layers.*.attn.q_proj": "colwise"}, 4, None, r"6 attention heads evenly over 4.*layers\.0\.attn.*\[1, 2, 3, 6\]"),
    (
        "heads < ranks",
        {"layers.*.attn.q_proj": "colwise"},
        8,
        [1] * 8,
        r"6 attention heads cannot occupy 8 ranks.*layers\.0\.attn",
    ),
    ("zero block", {"layers.0.mlp.up": PackedColwiseParallel([1, 0])}, 2, None, r"blocks \[1, 0\].*positive.*layers\.0\.mlp\.up"),
    ("negative block", {"layers.0.mlp.up": PackedColwiseParallel([2, -1])}, 2, None, r"\[2, -1\].*layers\.0\.mlp\.up"),
    (
        "blocks do not divide",
        {"layers.0.mlp.up": PackedColwiseParallel([5, 2])},
        2,
        None,
        r"sum 7 do not divide 48.*layers\.0\.mlp\.up",
    ),
    (
        "missing blocks",
        {"layers.1.mlp.down": PackedRowwiseParallel()},
        2,
        None,
        r"no blocks \(layers\.1\.mlp\.down\).*_tp_packed_row_blocks",
    ),
    ("unknown style", {"layers.*.mlp.up": "columnwise"}, 2, None, r"unknown style 'columnwise'.*did you mean 'colwise'"),
    ("no style", {"layers.*.mlp.up": 7}, 2, None, r"7 is no tensor-parallel style.*layers\.\*\.mlp\.up"),
    ("does not fit", {"layers.*.norm": "colwise"}, 2, None, r"'colwise' does not fit a LayerNorm \(layers\.0\.norm\)"),
    ("does not fit", {"named.left.1": "rowwise"}, 2, None, r"'rowwise' does not fit a GELU \(named\.left\.1\)"),
    (
        "no match",
        {"layers.*.mlp.upp": "colwise"},
        2,
        None,
        r"'layers\.\*\.mlp\.upp' matches no.*nearest name is 'layers\.\*\.mlp\.up'",
    ),
    ("tied", {"tied_a": "colwise", "tied_b": "rowwise"}, 2, None, r"'tied_a\.weight' and 'tied_b\.weight' are one tensor"),
    ("tied, one planned", {"tied_a": "colwise"}, 2, None, r"'tied_a\.weight' and 'tied_b\.weight' are one tensor"),
    ("shares: length", MLP, 2, [1, 2, 3], r"3 shares for 2 ranks"),
    ("shares: negative", MLP, 2, [1, -2], r"share -2\.0 of rank 1"),
    ("shares: nan", MLP, 2, [1, float("nan")], r"share nan of rank 1"),
    ("shares: nothing", MLP, 2, [0, 0], r"all shares are 0"),
    (
        "unit",
        {"layers.0.mlp.up": PackedColwiseParallel([1, 1], unit=5)},
        2,
        [1, 1],
        r"24 is not a whole number of units of 5.*layers\.0\.mlp\.up",
    ),
]


@pytest.mark.parametrize(("_name", "plan", "degree", "shares", "message"), CASES, ids=[case[0] for case in CASES])
def test_refused_by_name_and_untouched(
    _name: str, plan: dict[str, Any], degree: int, shares: list[float] | None, message: str
) -> None:
    model = Model()
    before, forwards = state_of(model)
    # a rule that is right comes first: nothing of it may be left behind either
    full = MLP | plan
    with pytest.raises(ValueError, match=message) as caught:
        run_ranks(
            degree, lambda comm: apply_tensor_parallel(model, TensorParallelConfig(degree, shares=shares, group=comm), full)
        )
    assert isinstance(caught.value, UsageError)
    assert_untouched(model, before, forwards)


def state_of(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    plain = {
        n: {k: v for k, v in m.__dict__.items() if not k.startswith("_") or k == "_tp_shard"} for n, m in model.named_modules()
    }
    return copy.deepcopy(model.state_dict()), plain


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor], attributes: dict[str, dict[str, Any]]) -> None:
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())
    for name, module in model.named_modules():
        now = {k: v for k, v in module.__dict__.items() if not k.startswith("_") or k == "_tp_shard"}
        assert now == attributes[name], name


def test_one_rank_that_refuses_stops_all() -> None:
    replicas = [Model(), Model(), Model()]

    def work(comm: Any) -> str:
        plan = MLP if comm.rank != 1 else {"layers.*.mlp.nothing": "colwise"}
        torch.manual_seed(0)
        with pytest.raises(UsageError) as caught:
            apply_tensor_parallel(replicas[comm.rank], TensorParallelConfig(3, group=comm), plan)
        assert not any("forward" in m.__dict__ for m in replicas[comm.rank].modules())
        return str(caught.value)

    messages = run_ranks(3, work)
    assert "rank 1 refused" in messages[0]
    assert "layers.*.mlp.nothing" in messages[0]
    assert "rank 1 refused" not in messages[1]


def test_different_weights_or_plans_are_noticed() -> None:
    torch.manual_seed(1)
    replicas = [models.Mlp(), models.Mlp()]
    plan = {"up": "colwise", "down": "rowwise"}
    with pytest.raises(UsageError, match=r"different weights.*source_rank=0"):
        run_ranks(2, lambda comm: apply_tensor_parallel(replicas[comm.rank], TensorParallelConfig(2, group=comm), plan))
    same = models.Mlp()
    with pytest.raises(UsageError, match="different plans"):
        run_ranks(
            2,
            lambda comm: apply_tensor_parallel(
                copy.deepcopy(same), TensorParallelConfig(2, group=comm), plan if comm.rank else {"up": "colwise_gather_output"}
            ),
        )


LONE = TensorParallelConfig(group=LoneCollectives())


def test_applied_twice_and_undone() -> None:
    model = models.Mlp()
    apply_tensor_parallel(model, LONE, {"up": "colwise", "down": "rowwise"})
    with pytest.raises(UsageError, match=r"split already.*undo\(model\)"):
        apply_tensor_parallel(model, LONE, {"up": "colwise"})
    undo(model)
    with pytest.raises(UsageError, match="not split"):
        undo(model)
    apply_tensor_parallel(model, LONE, {"up": "colwise", "down": "rowwise"})


def test_configuration_is_checked() -> None:
    with pytest.raises(ValueError, match="no mesh is set"):
        apply_tensor_parallel(models.Mlp(), TensorParallelConfig(2), {"up": "colwise"})
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="tp_degree"):
            TensorParallelConfig(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compression"):
        TensorParallelConfig(2, compression="int3")
    with pytest.raises(ValueError, match=r"no tensor-parallel plan.*infer_plan"):
        apply_tensor_parallel(models.Mlp(), LONE)
    with pytest.raises(ValueError, match="source_rank 3"):
        apply_tensor_parallel(models.Mlp(), LONE, {"up": "colwise"}, source_rank=3)

    class TpuMesh:
        device_type, ndim = "tpu", 1

    with pytest.raises(ValueError, match=r"'tpu'.*cpu, cuda, neuron, xpu, mps"):
        apply_tensor_parallel(models.Mlp(), TensorParallelConfig(mesh=TpuMesh()), {"up": "colwise"})


def _meta(model: nn.Module) -> None:
    model.to("meta")


def _offloaded(model: models.Mlp) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(model.up, AlignDevicesHook(io_same_device=True))


def _quantized(model: models.Mlp) -> None:
    from torch.ao.nn.quantized.dynamic import Linear

    model.up = Linear(24, 48)


def _mapped(model: models.Mlp) -> None:
    model.hf_device_map = {"up": 0, "down": "cpu"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_meta, r"no data \(meta\).*up\.weight.*load_sharded"),
        (_offloaded, r"accelerate.*\(up\)"),
        (_quantized, r"Linear is quantized.*\(up\)"),
        (_mapped, r"device_map"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.*quantiz", "ignore::DeprecationWarning")
def test_models_that_cannot_be_split(spoil: Callable[[Any], None], message: str) -> None:
    model = models.Mlp()
    spoil(model)
    with pytest.raises(ValueError, match=message):
        apply_tensor_parallel(model, LONE, {"up": "colwise", "down": "rowwise"})


def test_adapter_after_the_split_is_refused() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = models.Mlp()
    apply_tensor_parallel(model, LONE, {"up": "colwise", "down": "rowwise"})
    with pytest.raises(ValueError, match=r"already split \(up\).*before apply_tensor_parallel"):
        inject_adapter_in_model(LoraConfig(target_modules=["up"], r=2), model)
    assert type(model.up) is nn.Linear
    undo(model)
    inject_adapter_in_model(LoraConfig(target_modules=["up"], r=2), model)


def test_a_user_can_register_a_style() -> None:
    register_kernel("double", lambda bound, module, args, kwargs: 2 * bound.call(module, *args, **kwargs), replace_existing=True)
    register_style(Style("doubled", kernel="double"), replace_existing=True)
    with pytest.raises(UsageError, match="exists already"):
        register_style(Style("colwise"))
    model = models.Mlp()
    x = torch.randn(2, 24)
    want = model.down(torch.nn.functional.gelu(2 * model.up(x)))
    replicas = [copy.deepcopy(model) for _ in range(2)]
    results = run_ranks(
        2, lambda comm: apply_tensor_parallel(replicas[comm.rank], TensorParallelConfig(2, group=comm), {"up": "doubled"})(x)
    )
    assert torch.equal(results[0], want)


def test_wildcards_over_every_container() -> None:
    model = Model()
    wide = resolve_plan(model, {"**.up": "colwise", "**.down": "rowwise"}, 2)
    assert set(wide.shards) == {f"layers.{i}.mlp.{n}" for i in range(2) for n in ("up", "down")}
    named = resolve_plan(model, {"named.*.0": "colwise", "named.*.2": "rowwise"}, 2)
    assert set(named.shards) == {"named.left.0", "named.left.2"}
    two = resolve_plan(model, {"layers.*.mlp.*": "replicated", "layers.0.mlp.up": "colwise"}, 2)
    assert two.shards["layers.0.mlp.up"].style.name == "colwise"
    assert two.shards["layers.1.mlp.up"].style.name == "replicated"
