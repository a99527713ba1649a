"""A host's server of blocks for other hosts, and its reader of their blocks: both are opened if configured, or neither."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.kv.peers.peer_link import HostPeers, open_peers, own_host
from pilotlight.engine.kv.tiers.host_tier import HostTier
from tests.engine.kv.peers.test_peers import IDENTITY
from tests.engine.kv.tiers.test_host_tier import STRIDE


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostTier]:
    tier = HostTier.open(tmp_path / "tier", 10 * STRIDE)
    yield tier
    tier.close()


def opened(host: HostTier, folder: Path, **more: str) -> HostPeers | None:
    return open_peers(HostConfig(peer_address=f"ipc://{folder}/peers", **more), host)


def test_a_models_blocks_are_served_while_it_is_there(host: HostTier, tmp_path: Path) -> None:
    peers = opened(host, tmp_path)
    assert peers is not None
    link = peers.link(IDENTITY)
    assert (link.server, link.reader, link.identity) == (peers.server, peers.reader, IDENTITY)
    assert peers.server.caches == {IDENTITY}
    link.close()
    assert peers.server.caches == set()
    peers.close()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"peer_keys": "/nowhere/keys"}, "keys"),
        ({"peer_address": "ipc:///nowhere/at/all/peers"}, "No such file"),
        ({"peer_address": "nonsense"}, "argument"),
    ],
)
def test_where_blocks_cannot_be_served_the_log_has_the_reason_and_the_host_continues(
    host: HostTier, tmp_path: Path, caplog: pytest.LogCaptureFixture, more: dict[str, str], why: str
) -> None:
    config = {"peer_address": f"ipc://{tmp_path}/peers", **more}
    assert open_peers(HostConfig(**config), host) is None
    assert f"{config['peer_address']} serves no blocks to other hosts: " in caplog.text
    assert why in caplog.text
    again = opened(host, tmp_path)
    assert again is not None, "no unfinished connection is left"
    again.close()


@pytest.mark.parametrize(
    ("address", "name"),
    [("tcp://10.0.0.5:7000", "10.0.0.5"), ("tcp://[::1]:7000", "[::1]"), ("ipc:///run/peers", "127.0.0.1")],
)
def test_peers_reach_a_machine_by_the_name_it_listens_at(address: str, name: str) -> None:
    assert own_host(address) == name
