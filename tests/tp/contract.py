"""What every implementation of `Collectives` promises; run on each rank of a group, of processes or threads."""

from __future__ import annotations

import torch

from shardwise.tp.collectives import Collectives


def check_collectives(comm: Collectives) -> dict[str, bool]:
    """Each promise and whether it held on this rank."""
    rank, size = comm.rank, comm.size
    total = size * (size - 1) // 2
    out: dict[str, bool] = {}
    comm.stats.clear()
    x = torch.arange(6.0).view(2, 3) + rank
    out["all_reduce"] = torch.equal(comm.all_reduce(x.clone()), torch.arange(6.0).view(2, 3) * size + total)
    finish = comm.start_all_reduce(torch.full((4,), float(rank)))
    out["start_all_reduce"] = torch.equal(finish(), torch.full((4,), float(total)))
    out["strided"] = torch.equal(comm.all_reduce(x.t().clone().t()), torch.arange(6.0).view(2, 3) * size + total)
    out["max"] = comm.all_reduce_max(torch.tensor([float(rank), -float(rank)])).tolist() == [float(size - 1), 0.0]
    sizes = list(range(size))  # rank 0 has nothing
    parts = comm.all_gather(torch.full((2, rank), float(rank)), sizes, 1)
    out["all_gather_uneven"] = all(torch.equal(part, torch.full((2, r), float(r))) for r, part in enumerate(parts))
    rows = torch.ones(sum(sizes) or 1, 3) * (rank + 1)
    mine = comm.reduce_scatter(rows[: sum(sizes)], sizes, 0)
    out["reduce_scatter_uneven"] = torch.equal(mine, torch.full((sizes[rank], 3), float(total + size))) if size > 1 else True
    raw = comm.gather_bytes(torch.tensor([float("nan"), rank], dtype=torch.bfloat16), [2] * size, 0)
    out["gather_bytes"] = all(
        bool(part[0].isnan()) and part[1] == r and part.dtype == torch.bfloat16 for r, part in enumerate(raw)
    )
    sent = torch.full((3,), float(rank))
    out["broadcast"] = torch.equal(comm.broadcast(sent, size - 1), torch.full((3,), float(size - 1)))
    if size > 1:
        if rank == 0:
            comm.send(torch.arange(5.0), size - 1)
        if rank == size - 1:
            letter = torch.empty(5)
            comm.receive(letter, 0)
            out["send_receive"] = torch.equal(letter, torch.arange(5.0))
    out["counted"] = size == 1 or (comm.stats.calls["all_reduce"] == 3 and comm.stats.sent_bytes["all_reduce"] == 24 + 16 + 24)
    return out
