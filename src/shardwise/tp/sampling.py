"""Choosing tokens from logits whose vocabulary is split over ranks: only the candidates travel, never the logits.

Shape legend: B rows, V vocabulary, L local vocabulary (`part.local_sizes[rank]`), K candidates. Every rank gives its (B, L)
logits and gets the same answer. Ids are global; `num_valid` excludes padded ids at the end of the vocabulary, which are
never chosen. Ties go to the lowest id. Random draws depend on the seeds alone, so all ranks draw alike.

What can fail: k outside 1..num_valid, p outside (0, 1], a temperature that is not positive (UsageError); a lost rank.
Traffic per rank and row: 12 bytes a candidate, 8 for a normaliser, against 4 V for gathered logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.errors import UsageError
from shardwise.tp.collectives import Collectives
from shardwise.tp.layout import Partition

_FIRST_CANDIDATES = 64


@dataclass(frozen=True)
class ShardedLogits:
    """This rank's logits (B, L), with the vocabulary's partition and the way to the other ranks."""

    local: torch.Tensor
    part: Partition
    comm: Collectives
    num_valid: int | None = None

    @property
    def valid(self) -> int:
        return self.part.size if self.num_valid is None else self.num_valid

    def ids(self) -> torch.Tensor:
        """(L,) global ids of the local columns."""
        return torch.tensor(self.part.indices(self.comm.rank), dtype=torch.long, device=self.local.device)

    def scores(self) -> torch.Tensor:
        """(B, L) fp32 logits, -inf for padded ids."""
        ids = self.ids()
        allowed = (ids >= 0) & (ids < self.valid)
        return torch.where(allowed, self.local.float(), torch.tensor(float("-inf"), device=self.local.device))


def sharded_logits(local: torch.Tensor, head: torch.nn.Module, num_valid: int | None = None) -> ShardedLogits:
    """Logits of a head with the style 'vocab_head' or 'colwise': (..., L) -> rows of `ShardedLogits`."""
    bound = head.__dict__.get("_tp_shard")
    if bound is None or bound.shard.part is None:
        raise UsageError("the head is not split by vocabulary", where=type(head).__name__, hint="give it the style 'vocab_head'")
    if num_valid is not None and not 0 < num_valid <= bound.shard.part.size:
        raise UsageError(f"num_valid {num_valid} is not within the vocabulary of {bound.shard.part.size}")
    return ShardedLogits(local.flatten(0, -2) if local.dim() > 1 else local[None], bound.shard.part, bound.comm, num_valid)


def argmax(logits: ShardedLogits) -> torch.Tensor:
    """(B,) the id of the largest logit, the lowest one on ties."""
    return topk(logits, 1)[1][:, 0]


def topk(logits: ShardedLogits, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, K) values and ids, by falling value, then rising id."""
    if not 1 <= k <= logits.valid:
        raise UsageError(f"k = {k} is not between 1 and the {logits.valid} ids that may be chosen")
    scores, ids = logits.scores(), logits.ids()
    values, columns = _ordered_top(scores, ids.expand_as(scores), min(k, scores.shape[1]))
    sizes = [min(k, size) for size in logits.part.local_sizes]
    all_values = torch.cat(logits.comm.all_gather(values.contiguous(), sizes, 1), 1)
    all_ids = torch.cat(logits.comm.all_gather(columns.contiguous(), sizes, 1), 1)
    return _ordered_top(all_values, all_ids, k)


def _ordered_top(values: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest with their ids; equal values by rising id (two stable sorts)."""
    by_id = torch.argsort(ids, dim=1, stable=True)
    values, ids = values.gather(1, by_id), ids.gather(1, by_id)
    order = torch.argsort(values, dim=1, descending=True, stable=True)[:, :k]
    return values.gather(1, order), ids.gather(1, order)


def log_normaliser(logits: ShardedLogits, temperature: float = 1.0) -> torch.Tensor:
    """(B,) the logarithm of the sum of exp(logit / temperature) over the whole vocabulary."""
    scores = logits.scores() / temperature
    rows = scores.shape[0]
    top = scores.amax(1) if scores.shape[1] else scores.new_full((rows,), float("-inf"))
    top = logits.comm.all_reduce_max(top)
    return top + logits.comm.all_reduce(torch.exp(scores - top[:, None]).sum(1)).log()


def logprobs(logits: ShardedLogits, ids: torch.Tensor) -> torch.Tensor:
    """(B,) log-probability of one id per row; -inf for padded ids."""
    local_ids = logits.ids()
    table = torch.full((logits.part.size,), -1, dtype=torch.long, device=local_ids.device)
    table[local_ids[local_ids >= 0]] = torch.arange(local_ids.numel(), device=local_ids.device)[local_ids >= 0]
    column = table[ids]
    mine = column >= 0
    scores = logits.scores()
    picked = scores.gather(1, column.clamp(min=0)[:, None])[:, 0] if scores.shape[1] else scores.new_zeros(ids.shape)
    summed = logits.comm.all_reduce(torch.where(mine, picked, torch.zeros_like(picked)))
    return summed - log_normaliser(logits)


def top_p(
    logits: ShardedLogits, p: float, *, temperature: float = 1.0, k: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nucleus: (B, K) probabilities and ids of the smallest set of most likely ids whose mass reaches p (the id that crosses
    p is in); 0 beyond the nucleus. With `k`, the k most likely are taken first and share the whole mass. Without it, candidates
    are doubled until every row has its nucleus, which all ranks decide alike."""
    if not 0 < p <= 1:
        raise UsageError(f"p = {p} is not in (0, 1]")
    if not temperature > 0:
        raise UsageError(f"temperature = {temperature} is not positive")
    if k is not None:
        values, ids = topk(logits, min(k, logits.valid))
        probabilities = torch.softmax(values / temperature, 1)
        mass = probabilities.cumsum(1)
    else:
        total = log_normaliser(logits, temperature)
        count = min(_FIRST_CANDIDATES, logits.valid)
        while True:
            values, ids = topk(logits, count)
            probabilities = torch.exp(values / temperature - total[:, None])
            mass = probabilities.cumsum(1)
            if count == logits.valid or bool((mass[:, -1] >= p).all()):
                break
            count = min(logits.valid, count * 2)
    inside = (mass - probabilities) < p
    return torch.where(inside, probabilities, torch.zeros_like(probabilities)), ids


def sample(
    logits: ShardedLogits,
    seeds: Sequence[int],
    *,
    temperature: float = 1.0,
    k: int | None = None,
    p: float = 1.0,
) -> torch.Tensor:
    """(B,) one id per row. seeds: one per row, derived from session and position, so that a rebuilt rank draws the same."""
    if len(seeds) != logits.local.shape[0]:
        raise UsageError(f"{len(seeds)} seeds for {logits.local.shape[0]} rows")
    if temperature == 0:
        return argmax(logits)
    probabilities, ids = top_p(logits, p, temperature=temperature, k=k)
    mass = probabilities.double().cumsum(1)
    draws = torch.tensor([_uniform(seed) for seed in seeds], dtype=torch.float64, device=mass.device) * mass[:, -1]
    chosen = torch.searchsorted(mass, draws[:, None], right=True).clamp(max=mass.shape[1] - 1)
    return ids.gather(1, chosen)[:, 0]


def _uniform(seed: int) -> float:
    """A number in [0, 1) from a seed; the same on every rank and device."""
    generator = torch.Generator().manual_seed(int(seed) & 0x7FFFFFFFFFFFFFFF)
    return float(torch.rand((), generator=generator, dtype=torch.float64))
