"""One real deployment (stage processes on the sample model) and one server for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from shardwise.deploy.deployment import Deployment
from shardwise.deploy.launcher import launch_local

from .running import Running, running_server, wait_until


@pytest.fixture(scope="package")
def deployment() -> Iterator[Deployment]:
    with launch_local("sample", num_stages=2, max_sessions=8, context_tokens=1024, probe_interval_s=1.0) as running:
        wait_until(lambda: running.readiness().ready, 60, "the first token")
        yield running


@pytest.fixture(scope="package")
def server(deployment: Deployment) -> Iterator[Running]:
    with running_server(deployment) as running:
        yield running


@pytest.fixture(scope="package")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client
