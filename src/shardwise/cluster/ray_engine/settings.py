"""How Ray is asked to run in a home: environment of its processes, supported versions. Plain data, no Ray import.

The environment is read by Ray's native code at start, so it must be complete before a Ray process starts.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys

from shardwise.cluster.ray_engine.tls import tls_environment
from shardwise.errors import MissingExtraError, UsageError, pip_command
from shardwise.records import Record

OLDEST_RAY = (2, 55)
NEWEST_RAY = (2, 60)  # newest that the tests ran with; newer ones are allowed and said to be untested
LABEL_NODE = "shardwise-node"
LABEL_IDENTITY = "shardwise-identity"
LABEL_INCARNATION = "shardwise-incarnation"
NAMESPACE = "shardwise"

# Seconds, not Ray's minutes: a home notices when a lid closes. Periods in milliseconds.
_HOME = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",
    "RAY_memory_monitor_refresh_ms": "0",  # a model that fills the memory is the purpose, not a leak to kill
    "RAY_worker_niceness": "0",  # Ray starts actors at niceness 15, and their children inherit it: 4x slower on a busy machine
    # A fifth less of Ray's idle work: nothing of ours waits for these (no objects, no autoscaler, no queued tasks).
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_kill_idle_workers_interval_ms": "2000",
    "RAY_raylet_check_gc_period_milliseconds": "5000",
    "RAY_object_manager_timer_freq_ms": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "5000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_DEDUP_LOGS": "0",
}


class RaySecurity(Record):
    """What a process needs to talk to a cluster's Ray."""

    token: str = ""  # empty: the cluster runs without (an attached one)
    tls_folder: str = ""  # with certificates; empty: without TLS

    def __repr__(self) -> str:
        return f"RaySecurity(token={'...' if self.token else 'none'})"

    def environment(self) -> dict[str, str]:
        """For Ray's processes; never on a command line."""
        tls = tls_environment(self.tls_folder)
        if not self.token:
            return {"RAY_AUTH_MODE": "disabled"} | tls
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token} | tls


class RayAddress(Record):
    """Where a Ray cluster answers, and which of our addresses faces it."""

    head: str  # host:port of the head's control service
    own_ip: str = ""  # "" = Ray chooses


def ray_environment(security: RaySecurity) -> dict[str, str]:
    """The whole environment of a Ray process: ours without foreign RAY_ variables, plus the settings for a home."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    if sys.platform != "linux":
        inherited["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # experimental there, says Ray
    return inherited | _HOME | security.environment()


def ray_version() -> str:
    """The installed version; `MissingExtraError` where there is none."""
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise MissingExtraError.for_extra("ray", "a cluster of several machines") from None


def require_supported_ray() -> str:
    """The installed version if it is not too old (`UsageError`)."""
    version = ray_version()
    if version_pair(version) < OLDEST_RAY:
        oldest = ".".join(map(str, OLDEST_RAY))
        raise UsageError(f"Ray {version} is too old", where="cluster", hint=pip_command(f"'ray>={oldest}'"))
    return version


def version_pair(version: str) -> tuple[int, int]:
    """`2.60.0` -> (2, 60)."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return int(major), int(minor or 0)
