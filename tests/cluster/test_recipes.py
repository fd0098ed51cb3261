"""Files for service managers and foreign clusters: complete, with this machine's paths, and parsable."""

from __future__ import annotations

import plistlib
import subprocess
from pathlib import Path

import pytest

from shardwise.cluster.recipes import RECIPES, recipe
from shardwise.cluster.state import StateDir
from shardwise.errors import UsageError


@pytest.mark.parametrize("name", [r.name for r in RECIPES])
def test_each_is_filled_in(name: str, tmp_path: Path) -> None:
    text = recipe(name, StateDir(tmp_path / "st"))
    for unfilled in ("$SHARDWISE ", "$STATE", "$PYTHON", "$USER", "${SHARDWISE}"):
        assert unfilled not in text
    assert "shardwise" in text


def test_units_start_what_the_command_line_has(tmp_path: Path) -> None:
    unit = recipe("systemd", StateDir(tmp_path / "st"))
    assert "cluster start --foreground" in unit
    assert f"SHARDWISE_STATE={tmp_path / 'st'}" in unit
    property_list = plistlib.loads(recipe("launchd", StateDir(tmp_path)).encode())
    assert property_list["ProgramArguments"][1:] == ["cluster", "start", "--foreground"]


def test_the_slurm_script_is_valid_bash() -> None:
    done = subprocess.run(["bash", "-n"], input=recipe("slurm"), capture_output=True, text=True, timeout=10)
    assert done.returncode == 0, done.stderr


def test_kuberay_is_yaml_with_a_token_from_a_secret() -> None:
    import yaml  # comes with Ray

    document = yaml.safe_load(recipe("kuberay"))
    assert document["kind"] == "RayCluster"
    worker = document["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert {"name": "RAY_AUTH_MODE", "value": "token"} in worker["env"]


def test_an_unknown_one_lists_the_known() -> None:
    with pytest.raises(UsageError, match="no recipe 'cron'") as caught:
        recipe("cron")
    assert "systemd" in caught.value.hint
