"""Deploys, rollbacks and kills under streams, sockets, queues, objects and workflows: each request is finished by the version that accepted it."""

import asyncio
from pathlib import Path

from load_tests.local_network import LocalNetwork
from load_tests.scenarios.deploys import ENVIRONMENT, SITE, deploy_under_load
from tests.e2e.conftest import NO_STANDBY


def test_every_request_is_answered_by_the_version_that_took_it(tmp_path: Path) -> None:
    with LocalNetwork(environment=ENVIRONMENT, num_sites=1, site_settings=SITE, engine_settings=NO_STANDBY) as network:
        result = asyncio.run(
            deploy_under_load(
                network.url, tmp_path / "function", num_deploys=20, within_s=16.0, each=1, network=network, num_kills=2
            )
        )
    assert result["errors"] == []
    kinds = {"request", "stream", "background", "send", "object", "socket", "workflow"}
    assert {kind for kind, count in result["answers"].items() if count} >= kinds
    assert result["cut by kills"], "no request was open when a site was killed"
