"""torch.compile, LoRA, meshes, less traffic, lost ranks, sampling: cases that run on every rank."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import NetworkError
from shardwise.tp import PackedColwiseParallel, TensorParallelConfig, apply_tensor_parallel, gather, undo
from shardwise.tp import sampling as sampled
from shardwise.tp.bound import bound_modules
from shardwise.tp.collectives import DistCollectives, StagedCollectives
from shardwise.tp.compression import Compressed, error_bound
from tests.tp import models, parity
from tests.tp.cases_models import language_model


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = models.Attention(kv_heads=2, qk_norm="all")
        self.mlp = models.GateUp()
        self.head = nn.Linear(models.WIDTH, 31)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return self.head(x + self.mlp(x))


BOTH_PLAN = {
    "attn.q_proj": "colwise",
    "attn.k_proj": "colwise",
    "attn.v_proj": "colwise",
    "attn.o_proj": "rowwise",
    "mlp.gate_up": PackedColwiseParallel([1, 1]),
    "mlp.down": "rowwise",
    "head": "colwise_gather_output",
}


def compiled(rank: int, world: int, *, backend: str, shares: list[float] | None) -> dict[str, Any]:
    """One graph, no break; forward and gradients as in eager mode."""
    torch._dynamo.reset()
    torch.manual_seed(2)
    model = Both()
    x = torch.randn(2, 5, models.WIDTH)
    split = apply_tensor_parallel(copy.deepcopy(model), TensorParallelConfig(world, shares=shares), BOTH_PLAN)
    fast = torch.compile(split, backend=backend, fullgraph=True)
    with torch.no_grad():
        out = {"forward": parity.relative(fast(x), model(x))}
    y = fast(x)
    y.square().sum().backward()
    model(x).square().sum().backward()
    grads = parity.full_grads(split)
    out["grads"] = max(parity.relative(grads[name], p.grad) for name, p in model.named_parameters())
    return out


def lora(rank: int, world: int, *, shares: list[float] | None) -> dict[str, Any]:
    """Adapters put on before the split are split along; outputs and adapter gradients match."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(3)
    model = Both()
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj", "v_proj", "o_proj", "gate_up", "down"], r=3), model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    x = torch.randn(2, 5, models.WIDTH)
    config = TensorParallelConfig(world, shares=shares)
    out = parity.compare(model, BOTH_PLAN, lambda m: m(x), config=config)
    split = apply_tensor_parallel(copy.deepcopy(model), config, BOTH_PLAN)
    out["b_is_split"] = split.attn.q_proj.lora_B["default"].weight.shape[0] < model.attn.q_proj.lora_B["default"].weight.shape[0]
    out["a_is_split"] = split.mlp.down.lora_A["default"].weight.shape[1] < model.mlp.down.lora_A["default"].weight.shape[1]
    return out


def mesh(rank: int, world: int) -> dict[str, Any]:
    """Data x tensor on one mesh of 4: each half sees its own batch, sums stay inside the tensor axis."""
    grid = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(5)
    model = Both()
    batches = torch.randn(2, 3, 5, models.WIDTH)
    mine = batches[grid["dp"].get_local_rank()]
    split = apply_tensor_parallel(copy.deepcopy(model), TensorParallelConfig(mesh=grid), BOTH_PLAN)
    split(mine).square().sum().backward()
    model(batches.flatten(0, 1)).square().sum().backward()
    for parameter in split.parameters():
        dist.all_reduce(parameter.grad, group=grid["dp"].get_group())
    grads = parity.full_grads(split)
    error = ""
    try:
        apply_tensor_parallel(copy.deepcopy(model), TensorParallelConfig(mesh=grid, axis="cp"), BOTH_PLAN)
    except ValueError as refused:
        error = str(refused)
    degree_two = apply_tensor_parallel(copy.deepcopy(model), TensorParallelConfig(2), BOTH_PLAN)
    comm = next(iter(bound_modules(degree_two).values())).comm
    return {
        "grads": max(parity.relative(grads[name], p.grad) for name, p in model.named_parameters()),
        "error": error,
        "group": [comm.rank, comm.size],
    }


def staged(rank: int, world: int) -> dict[str, Any]:
    """Through CPU memory, as devices without a backend and mixed groups go."""
    torch.manual_seed(5)
    model = Both()
    x = torch.randn(2, 5, models.WIDTH)
    comm = StagedCollectives(dist.group.WORLD)
    out = parity.compare(model, BOTH_PLAN, lambda m: m(x), config=TensorParallelConfig(world, group=comm))
    whole = parity.compare(model, BOTH_PLAN, lambda m: m(x), config=TensorParallelConfig(world, group=comm), source_rank=1)
    return {"forward": out["forward"], "grads": out["grads"], "handed_out": whole["forward"], "exact": whole["gather_exact"]}


def contract(rank: int, world: int, *, kind: str) -> dict[str, bool]:
    """What every implementation of `Collectives` promises."""
    from tests.tp.contract import check_collectives

    inner = DistCollectives(dist.group.WORLD)
    if kind == "dist":
        return check_collectives(inner)
    return check_collectives(StagedCollectives(dist.group.WORLD) if kind == "staged" else Compressed(inner))


def compression(rank: int, world: int, *, kind: str, scale: float) -> dict[str, Any]:
    """The error of a compressed sum against its bound, and equality of the result on all ranks."""
    torch.manual_seed(100 + rank)
    comm = Compressed(DistCollectives(dist.group.WORLD), kind)
    x = torch.randn(64, 333) * scale * torch.logspace(-3, 3, 333)
    parts = comm.all_gather(x, [64] * world, 0)
    exact = torch.stack(parts).sum(0)
    comm.stats.clear()
    got = comm.all_reduce(x.clone())
    sent = dict(comm.stats.sent_bytes)
    small = torch.randn(10)
    exact_small = torch.stack(comm.all_gather(small, [10] * world, 0)).sum(0)
    same = comm.all_gather(got, [64] * world, 0)
    bound = error_bound(parts, kind)
    return {
        "within": bool(((got - exact).abs().flatten() <= bound).all()),
        "tightness": float(((got - exact).abs().flatten() / bound.clamp(min=1e-30)).max()),
        "same": all(torch.equal(one, got) for one in same),
        "small_exact": torch.equal(comm.all_reduce(small.clone()), exact_small) or world > 2,
        "sent": sent.get("all_reduce_compressed", 0) / (x.numel() * 4),
    }


def less_traffic(rank: int, world: int, *, compression: str | None, chunks: int) -> dict[str, Any]:
    torch.manual_seed(5)
    model = models.Mlp()
    x = torch.randn(64, 40, models.WIDTH)
    config = TensorParallelConfig(world, compression=compression, overlap_chunks=chunks)
    split = apply_tensor_parallel(copy.deepcopy(model), config, {"up": "colwise", "down": "rowwise"})
    comm = next(iter(bound_modules(split).values())).comm
    comm.stats.clear()
    with torch.no_grad():
        return {"forward": parity.relative(split(x), model(x)), "calls": dict(comm.stats.calls)}


def sampling(rank: int, world: int, *, vocab: int, valid: int | None, shares: list[float] | None) -> dict[str, Any]:
    """Against the same choice made on the full logits."""
    torch.manual_seed(8)
    head = nn.Linear(models.WIDTH, vocab)
    x = torch.randn(6, models.WIDTH)
    with torch.no_grad():
        logits = head(x).round(decimals=1)  # many ties
    full = logits.clone()
    full[:, valid or vocab :] = float("-inf")
    split = apply_tensor_parallel(
        nn.Sequential(copy.deepcopy(head)), TensorParallelConfig(world, shares=shares), {"0": "vocab_head"}
    )
    with torch.no_grad():
        mine = sampled.sharded_logits(split(x).round(decimals=1), split[0], valid)
    out = {"argmax": sampled.argmax(mine).tolist() == _first_argmax(full)}
    values, ids = sampled.topk(mine, 5)
    want = [sorted(range(vocab), key=lambda i: (-row[i].item(), i))[:5] for row in full]
    out["topk"] = ids.tolist() == want and torch.equal(values, full.gather(1, ids))
    chosen = torch.arange(6) * 7 % (valid or vocab)
    exact = torch.log_softmax(full, -1).gather(1, chosen[:, None])[:, 0]
    out["logprobs"] = torch.allclose(sampled.logprobs(mine, chosen), exact, atol=1e-5)
    out["top_p"] = all(_same_nucleus(mine, full, p) for p in (0.1, 0.5, 0.95, 1.0))
    seeds = [[1000 * step + row for row in range(6)] for step in range(20)]
    draws = torch.stack([sampled.sample(mine, step, temperature=0.7, p=0.9) for step in seeds])
    out["same_everywhere"] = dist_equal(draws)
    out["valid"] = int(draws.max()) < (valid or vocab)
    out["draws"] = draws.tolist() == [[_reference_draw(full[row], seed, 0.9) for row, seed in enumerate(step)] for step in seeds]
    out["top_k_draws"] = bool((sampled.sample(mine, [3] * 6, temperature=5.0, k=1) == sampled.argmax(mine)).all())
    out["greedy"] = torch.equal(sampled.sample(mine, [0] * 6, temperature=0), sampled.argmax(mine))
    return out


def _reference_draw(row: torch.Tensor, seed: int, p: float) -> int:
    """The nucleus by rising rank, and the seed's number on its running sum; all on full logits."""
    order = sorted(range(row.numel()), key=lambda i: (-row[i].item(), i))
    mass = torch.softmax(row.double() / 0.7, -1)[order].cumsum(0)
    size = int((mass < p).sum()) + 1
    draw = float(torch.rand((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)) * float(mass[size - 1])
    return order[int((mass[:size] <= draw).sum())]


def dist_equal(x: torch.Tensor) -> bool:
    copies = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, x)
    return all(torch.equal(one, x) for one in copies)


def _first_argmax(full: torch.Tensor) -> list[int]:
    return [int((row == row.max()).nonzero()[0]) for row in full]


def _same_nucleus(mine: sampled.ShardedLogits, full: torch.Tensor, p: float) -> bool:
    probabilities, ids = sampled.top_p(mine, p, temperature=0.7)
    reference = torch.softmax(full.double() / 0.7, -1)
    for row in range(full.shape[0]):
        order = sorted(range(full.shape[1]), key=lambda i: (-full[row, i].item(), i))
        mass, nucleus = 0.0, []
        for index in order:
            if mass >= p - 1e-6:
                break
            nucleus.append(index)
            mass += reference[row, index].item()
        got = ids[row][probabilities[row] > 0].tolist()
        if (p < 1 and got[: len(nucleus)] != nucleus[: len(got)]) or abs(len(got) - len(nucleus)) > (1 if p < 1 else len(order)):
            return False
    return True


def lost_rank(rank: int, world: int, *, timeout_s: float, victim: int) -> dict[str, Any]:
    """One rank is killed in the middle of its work; gives what the others raised and how long they waited."""
    model = models.Mlp()
    config = TensorParallelConfig(world, timeout_s=timeout_s)
    split = apply_tensor_parallel(model, config, {"up": "colwise", "down": "rowwise"}, source_rank=0)
    x = torch.randn(2, models.WIDTH)
    for _ in range(5):
        split(x)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        split(x)
    except NetworkError as error:
        return {"error": type(error).__name__, "took_s": time.monotonic() - start, "message": str(error)}
    return {"error": None}


def stopped_rank(rank: int, world: int, *, timeout_s: float, sleeper: int) -> dict[str, Any]:
    """One rank stops answering without ending; the others raise when the timeout is over."""
    model = models.Mlp()
    config = TensorParallelConfig(world, timeout_s=timeout_s)
    split = apply_tensor_parallel(model, config, {"up": "colwise", "down": "rowwise"}, source_rank=0)
    x = torch.randn(2, models.WIDTH)
    split(x)
    if rank == sleeper:
        time.sleep(3 * timeout_s)
        return {"error": "asleep"}
    start = time.monotonic()
    try:
        split(x)
    except NetworkError as error:
        return {"error": type(error).__name__, "took_s": time.monotonic() - start}
    return {"error": None}


def inference_mode(rank: int, world: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    model = language_model("llama", 12, 4)
    ids = torch.arange(3, 15).view(2, 6)
    with torch.inference_mode():
        split = apply_tensor_parallel(copy.deepcopy(model), TensorParallelConfig(world))
        out = {"logits": parity.relative(split(ids).logits, model(ids).logits)}
        full = gather(split)
        undo(split)
        out["undone"] = torch.equal(split(ids).logits, model(ids).logits)
    out["exact"] = all(torch.equal(full[name], tensor) for name, tensor in model.state_dict().items())
    return out
