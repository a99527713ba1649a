"""A Ray cluster of two nodes on one machine, with a loopback address each.

Without these explicit addresses Ray would take the machine's own for both.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from ray.cluster_utils import Cluster

HERE, THERE = "127.0.0.2", "127.0.0.3"
NODE: dict[str, Any] = {"num_gpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """Start two nodes: the first has no CPU for actors, the other has one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0, "node_ip_address": HERE})
        add_node(cluster)
        yield cluster
        cluster.shutdown()


def add_node(cluster: Cluster) -> None:
    cluster.add_node(**NODE, num_cpus=1, node_ip_address=THERE)
