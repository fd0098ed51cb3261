"""What `plan` and `advise` print is whole on a terminal of 80 columns: nothing cut, every flag in one piece."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from shardwise.cli.main import run
from shardwise.cli.plan_view import alternative_table, memory_table, prediction_table
from shardwise.cli.policy_view import policy_table
from shardwise.machines import load_cluster
from shardwise.model import describe_model
from shardwise.planner import PlanRequest, find_plan
from shardwise.planner.types import STRATEGIES
from shardwise.records import replace
from shardwise.session.policy_costs import policy_costs

HOME = Path(__file__).parents[2] / "examples" / "home.toml"


def shown(table: Table) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in text.splitlines()) <= 80
    return text


def whole(table: Table) -> str:
    """The text of the table, after a check that no letter of any cell is missing."""
    text = shown(table)
    cells = "".join(str(cell) for column in table.columns for cell in column.cells)
    assert not Counter("".join(cells.split())) - Counter(text.replace("\\", "")), text
    assert "…" not in text
    return text


@pytest.mark.parametrize("longer", ["", "-of-the-living-room-on-the-left"])
@pytest.mark.parametrize("users", ["1", "8"])
def test_tables_are_whole(tmp_path: Path, longer: str, users: str) -> None:
    text = HOME.read_text()
    for name in ("desktop", "laptop", "nas"):
        text = text.replace(f'"{name}"', f'"{name}{longer}"')
    file = tmp_path / "home.toml"
    file.write_text(text)
    request = PlanRequest(model=describe_model("llama-3-70b:q4_k_m"), cluster=load_cluster(file), strategies=STRATEGIES)
    request = replace(request, workload=replace(request.workload, num_users=int(users)), wire_dtypes=("f32", "f16"))
    for asked in (request, replace(request, strategies=("layer_wise",))):
        plan = find_plan(asked)
        assert plan.predicted is not None
        assert plan.alternatives
        whole(memory_table(plan))
        whole(prediction_table(asked, plan.predicted))
        text = whole(alternative_table(plan))
        for option in plan.alternatives:
            assert option.strategy in text
        for cost in (costs := policy_costs(asked, plan)):
            assert cost.flags in whole(policy_table(costs))


def test_a_terminal_of_80_columns_sees_whole_words() -> None:
    environment = os.environ | {"COLUMNS": "80"}
    command = [sys.executable, "-m", "shardwise.cli", "advise", "llama-3-70b:q4_k_m", "--cluster", str(HOME)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True).stdout
    assert "…" not in out
    for word in ("tensor_parallel", "--checkpoint-every 256", "--replicate standby", "machines", "desktop cuda"):
        assert word in out


def test_every_machine_s_miss_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("advise", "plan"):
        assert run([command, "llama-3.1-405b:q4_k_m", "--cluster", str(HOME)]) == 3
        said = capsys.readouterr()
        misses = (said.out + said.err).partition("short by:")[2].splitlines()[0]
        for name in ("desktop ", "laptop ", "nas "):
            assert f"{name}" in misses
    assert run(["advise", "llama-3-70b:q4_k_m", "--cluster", str(HOME), "--max-stages", "1"]) == 3
    out = capsys.readouterr().out
    assert "not on laptop: does not fit alone: 15.9 GiB short" in out
