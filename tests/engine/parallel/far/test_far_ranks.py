"""Two ranks on two nodes of a Ray cluster compute the same as one rank. A lost node ends the group, and a new group waits for a node."""

import queue
import threading
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.api.struct import replace
from pilotlight.engine.loading.kv_memory import KvMemory, make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.parallel.ranks import RankGroup
from tests.cluster import THERE, add_node, two_nodes
from tests.engine.driver import Heard, drain, load_engine
from tests.engine.families import write_family
from tests.engine.parallel.test_ranks import DENSE, assert_same, group_of, several

__all__ = ["two_nodes"]

LATEST_S = 90.0  # seconds; only a failing test waits so long


def far_group(cluster: Cluster) -> HostConfig:
    return replace(group_of(2), group=("cpu", "ray:cpu"), ray_address=cluster.address)


@pytest.mark.process
@pytest.mark.slow  # on a busy machine Ray takes a late node for dead
def test_ranks_on_two_nodes_compute_the_logits_of_one_and_a_lost_node_is_waited_for(
    tmp_path: Path, two_nodes: Cluster
) -> None:
    write_family(tmp_path, DENSE)
    expected = drain(load_engine(tmp_path), several(prompt_logprobs=True))
    host, lost = far_group(two_nodes), queue.SimpleQueue[str]()
    memory = make_kv_memory(host, lost.put)
    check_answers(memory, host, tmp_path, expected)
    (node,) = two_nodes.worker_nodes
    two_nodes.remove_node(node, allow_graceful=False)  # no request is open
    assert isinstance(memory.group, RankGroup)
    assert memory.group.loss("a step was cut").was_killed, "Ray has not reported the node's end yet"
    assert f"rank 1 on {THERE} has ended" in lost.get(timeout=LATEST_S)
    assert memory.group.loss("").was_killed
    memory.close()

    waits, made, is_over = queue.SimpleQueue[str](), queue.SimpleQueue[KvMemory](), threading.Event()

    def make() -> None:
        made.put(make_kv_memory(host, lost.put, on_wait=waits.put))
        is_over.wait(LATEST_S)  # a child ends with the thread that started it

    making = threading.Thread(target=make)
    making.start()
    assert "has no 1 CPU free on other machines" in waits.get(timeout=LATEST_S)
    add_node(two_nodes)
    memory = made.get(timeout=LATEST_S)
    check_answers(memory, host, tmp_path, expected)
    memory.close()
    is_over.set()
    making.join()
    assert lost.empty(), "a group that is closed reports no loss"


def check_answers(memory: KvMemory, host: HostConfig, directory: Path, expected: dict[str, Heard]) -> None:
    model = load_model(ModelSpec("tiny", str(directory), kv_tokens=1024), host, memory)
    try:
        assert isinstance(memory.group, RankGroup)
        assert not memory.group.pids, "no rank is a child of the first one"
        assert_same(drain(model.engine, several(prompt_logprobs=True)), expected)
    finally:
        model.close()
