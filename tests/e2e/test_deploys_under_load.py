"""Deploys and a rollback under streams, sockets, queues and objects, across processes.

Every request is answered by the version that accepted it.
"""

import asyncio
from pathlib import Path

from load_tests.local_network import LocalNetwork
from load_tests.scenarios.deploys import ENVIRONMENT, SITE, deploy_under_load
from tests.e2e.conftest import NO_STANDBY


def test_every_request_is_answered_by_the_version_that_took_it(tmp_path: Path) -> None:
    with LocalNetwork(environment=ENVIRONMENT, num_sites=1, site_settings=SITE, engine_settings=NO_STANDBY) as network:
        result = asyncio.run(
            deploy_under_load(network.url, tmp_path / "function", num_deploys=10, within_s=8.0, each=1)
        )
    assert result["errors"] == []
    assert set(result["answers"]) == {"request", "stream", "background", "send", "object", "socket"}
