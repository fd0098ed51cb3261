"""Dry runs: the figures of the report against what really happens; plans found without being given."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import UnsupportedModelError, UsageError
from shardwise.tp import TensorParallelConfig, apply_tensor_parallel, empty_model, infer_plan, report, report_folder, simulate
from shardwise.tp.bound import bound_modules
from shardwise.tp.threads import run_ranks
from tests.tp import models
from tests.tp.cases_diffusion import build
from tests.tp.cases_models import language_model
from tests.tp.parity import relative

IDS = torch.arange(3, 9).view(1, 6)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_moe", "phi3"])
@pytest.mark.parametrize("shares", [[1, 1], [3, 1]])
def test_report_says_what_happens(name: str, shares: list[float]) -> None:
    model = language_model(name, 12, 4)
    found = report(model, None, shares, rows=IDS.numel())
    replicas = [copy.deepcopy(model) for _ in range(2)]

    def work(comm: Any) -> tuple[int, dict[str, int], dict[str, int]]:
        split = apply_tensor_parallel(replicas[comm.rank], TensorParallelConfig(2, shares=shares, group=comm))
        inner = next(iter(bound_modules(split).values())).comm
        inner.stats.clear()
        with torch.no_grad():
            split(IDS)
        held = {id(t): t.numel() * t.element_size() for t in split.state_dict(keep_vars=True).values()}
        return sum(held.values()), dict(inner.stats.calls), dict(inner.stats.sent_bytes)

    results = run_ranks(2, work)
    assert found.bytes_per_rank == tuple(result[0] for result in results)
    assert {c.kind: c.count for c in found.collectives} == results[0][1]
    assert {c.kind: c.bytes_per_step for c in found.collectives} == results[0][2]
    assert json.loads(json.dumps(found.as_dict()))["degree"] == 2
    assert any("rank 0" in line for line in found.lines())


def test_report_on_meta_and_its_lists() -> None:
    model = empty_model(lambda: nn.ModuleDict({"a": models.Attention(heads=6, kv_heads=2), "m": models.Mlp()}))
    plan = {"a.q_proj": "colwise", "a.k_proj": "colwise", "a.v_proj": "colwise", "a.o_proj": "rowwise", "x.*": "colwise"}
    found = report(model, plan, degree=3)
    assert found.valid_degrees == (1, 2, 3, 6)
    assert found.unmatched_rules == ("x.*",)
    assert "m.up.weight" in found.unmatched_parameters
    assert "KV heads" in found.notes[0]
    with pytest.raises(UsageError, match="evenly over 4"):
        report(model, plan, degree=4)


def test_report_of_a_folder_reads_its_config_only(tmp_path: Path) -> None:
    model = language_model("llama", 12, 4)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == []
    found = report_folder(tmp_path, shares=[2, 1])
    assert found.bytes_per_rank == report(model, None, [2, 1]).bytes_per_rank
    with pytest.raises(UsageError, match=r"no config\.json"):
        report_folder(tmp_path / "nothing")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UnsupportedModelError, match="no_such_model"):
        report_folder(tmp_path)


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_plans_are_found_for_language_models(name: str) -> None:
    model = language_model(name, 12, 4)
    found = infer_plan(model, lambda m: m(IDS).logits)
    assert found.left_whole == {}
    whole = report(model, found.plan, [1, 1])
    assert max(whole.bytes_per_rank) < 0.55 * whole.full_bytes
    for shares in ([2, 1], [1, 1, 1]):
        for logits in simulate(model, found.plan, lambda m: m(IDS).logits, degree=len(shares), shares=shares):
            assert relative(logits, model(IDS).logits) <= 1e-5


@pytest.mark.parametrize("name", ["wan", *(pytest.param(name, marks=pytest.mark.soak) for name in ("flux", "flux2"))])
def test_plans_are_found_for_diffusion_models(name: str) -> None:
    model, run, _ = build(name)
    found = infer_plan(model, run)
    whole = report(model, found.plan, [1, 1])
    assert max(whole.bytes_per_rank) < 0.75 * whole.full_bytes
    assert all("attn" not in pattern and "ff" not in pattern for pattern in found.left_whole), found.left_whole
    assert relative(simulate(model, found.plan, run)[1], run(model)) <= 1e-5


def test_what_cannot_be_split_is_left_whole_with_a_reason() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(24, 48), nn.Linear(48, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.softmax(self.a(x), -1))  # needs all features at once

    found = infer_plan(Odd(), example=torch.randn(4, 24))
    assert "a" not in found.plan
    assert "output differs" in found.left_whole["a"]
    with pytest.raises(UsageError, match="needs an example"):
        infer_plan(Odd())
