"""A Ray cluster of two nodes serves one model: a node is killed, the site reports what it waits for, and serves again with a new node."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ray.cluster_utils import Cluster

from tests.cluster import THERE, add_node, two_nodes
from tests.e2e.test_engine_death import REQUESTS, Stream, assert_idle, end, wait_for, write_site
from tests.runtime.test_real_engine import Process

__all__ = ["two_nodes"]

SOME = [REQUESTS[0], REQUESTS[4], REQUESTS[9]]


@pytest.fixture(scope="module")
def site(two_nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("site")
    file = write_site(folder, "embedded:ember", continue_within_s=60.0, step_deadline_s=30.0)
    devices = f'devices = [["cpu", "ray:cpu"]]\nray_address = "{two_nodes.address}"'
    file.write_text(file.read_text().replace('device = "cpu"', devices))
    started = Process(file, folder / "log")
    yield started
    end(started)


def reasons(site: Process) -> str:
    return str(httpx.get(site.url + "/readyz").json().get("reasons", ""))


def answers_of(site: Process) -> list[Any]:
    streams = [Stream(site.url, body) for body in SOME]
    for stream in streams:
        stream.end()
    return [stream.answer for stream in streams]


@pytest.mark.slow
def test_a_killed_node_is_waited_for_and_its_streams_continue(site: Process, two_nodes: Cluster) -> None:
    engine = site.engine()
    assert not [child for child in engine.children() if "pilotlight.engine.parallel.follower" in child.cmdline()]
    undisturbed = answers_of(site)

    heard = threading.Semaphore(0)
    streams = [Stream(site.url, body, on_event=heard.release) for body in SOME]
    for _ in range(12):
        assert heard.acquire(timeout=60)
    (node,) = two_nodes.worker_nodes
    two_nodes.remove_node(node, allow_graceful=False)
    wait_for(lambda: "has no 1 CPU free on other machines" in reasons(site), timeout_s=60)
    (model,) = httpx.get(site.url + "/status").json()["models"]
    assert "has no 1 CPU free" in model["detail"]
    assert site.engine().pid != engine.pid
    add_node(two_nodes)
    for stream in streams:
        stream.end()
    assert [stream.answer for stream in streams] == undisturbed
    said = site.log.read_text()
    assert "a step of 2 ranks was cut" in said or f"rank 1 on {THERE} has ended" in said
    assert_idle(site)
