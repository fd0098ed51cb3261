"""Ray's head as a child process: what it tells about its raylets, and that nothing of it stays, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shardwise.cluster.ray_engine.head import HeadNews, news_line, read_news
from shardwise.cluster.ray_engine.raylet import Raylet, RayletSettings, RayPorts
from shardwise.cluster.ray_engine.settings import RaySecurity
from tests.cluster.ports import free_port
from tests.cluster.waiting import is_gone, wait_until

NEWS = HeadNews(answers=True, raylets=(("a", 3), ("b", 1)))


def test_a_line_tells_what_the_head_said_and_any_other_tells_nothing() -> None:
    assert read_news(news_line(NEWS)) == NEWS
    assert read_news(news_line(HeadNews())) == HeadNews()
    for line in (b"Ray runtime started.\n", news_line(NEWS)[:-9], news_line(NEWS)[5:], b"shardwise-head 3\n", b"\xff\n"):
        assert read_news(line) is None


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Raylet]:
    ports = RayPorts(head=free_port(), node_manager=free_port(), object_manager=free_port())
    note = tmp_path / "ray-folder"
    settings = RayletSettings(name="h", identity="me", own_ip="127.0.0.1", incarnation=4, ports=ports, folder_note=str(note))
    raylet = Raylet(settings, RaySecurity(token="t" * 64))
    yield raylet
    raylet.stop()
    assert not note.exists()


def test_a_head_tells_of_its_raylet_and_nothing_of_it_stays(head: Raylet) -> None:
    """Also where `ray start` hangs: its raylet, left alone, would keep its ports."""
    assert head.wait_started()
    wait_until(lambda: head.news == HeadNews(answers=True, raylets=(("me", 4),)), 20, "the head has its own raylet")
    parent = psutil.Process(head.pid)
    family = parent.children(recursive=True)
    assert {"raylet", "gcs_server"} <= {process.name() for process in family}
    parent.suspend()
    head.stop(grace_s=0.2)
    assert all(is_gone(process.pid) for process in (parent, *family))
    assert head.news == HeadNews()


@pytest.mark.soak
def test_a_raylet_that_does_not_answer_is_no_longer_listed(head: Raylet) -> None:
    """Its process lives, and `ray start` is content with that."""
    assert head.wait_started()
    wait_until(lambda: head.news.raylets == (("me", 4),), 20, "the head has its own raylet")
    raylet = next(child for child in psutil.Process(head.pid).children(recursive=True) if child.name() == "raylet")
    raylet.suspend()
    wait_until(lambda: head.news == HeadNews(answers=True), 30, "given up")
    assert head.alive()
