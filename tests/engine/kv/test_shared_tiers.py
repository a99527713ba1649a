"""The tiers that a host shares among its models: the configured ones are opened, and a tier that cannot be opened is logged and left out."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.kv.shared_tiers import open_tiers
from pilotlight.engine.kv.tiered_cache import TieredCache
from pilotlight.engine.kv.tiers.disk_tier import DiskTier
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.transfer.block_copier import CpuBlockCopier
from tests.engine.kv.peers.test_peers import IDENTITY
from tests.engine.kv.tiers.test_host_tier import SIZE, STRIDE, name, put


def config(folder: Path, **more: Any) -> HostConfig:
    return HostConfig(kv_host_bytes=10 * STRIDE, kv_host_dir=str(folder / "host"), **more)


def on_disk(folder: Path, **more: Any) -> HostConfig:
    return config(folder, kv_disk_bytes=1 << 20, kv_disk_dir=str(folder / "disk"), **more)


def test_without_memory_there_are_no_tiers(tmp_path: Path) -> None:
    assert open_tiers(HostConfig()) is None
    assert open_tiers(HostConfig(kv_host_bytes=1 << 20)) is None
    assert open_tiers(HostConfig(kv_host_dir=str(tmp_path))) is None
    tiers = open_tiers(config(tmp_path, kv_disk_dir=str(tmp_path / "disk")))
    assert tiers is not None
    assert (tiers.disk, tiers.store, tiers.peers) == (None, None, None)
    tiers.close()


@pytest.mark.parametrize(("given", "rate"), [(0.0, math.inf), (1e9, 1e9)])
def test_blocks_go_to_the_disk_as_fast_as_it_may_be_written(tmp_path: Path, given: float, rate: float) -> None:
    tiers = open_tiers(on_disk(tmp_path, kv_disk_write_bytes_per_s=given))
    assert tiers is not None
    assert tiers.disk is not None
    assert tiers.disk.write_bytes_per_s == rate
    for n in range(3):
        assert put(tiers.host, n)
        tiers.disk.offer(name(n))
    assert tiers.disk.wait_until_idle(10)
    assert all(name(n) in tiers.disk.disk for n in range(3))
    tiers.close()


def test_what_another_host_has_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    taken = DiskTier.open(tmp_path / "disk", 1 << 20)
    tiers = open_tiers(on_disk(tmp_path), patience_s=0.01)
    assert tiers is not None
    assert tiers.disk is None
    assert caplog.text.count("this engine host runs without") == 1
    assert open_tiers(config(tmp_path), patience_s=0.01) is None
    assert caplog.text.count("this engine host runs without") == 2
    tiers.close()
    taken.close()
    again = open_tiers(on_disk(tmp_path))
    assert again is not None
    assert again.disk is not None, "all tiers must have been closed"
    again.close()


def test_a_model_whose_blocks_do_not_fit_goes_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = open_tiers(config(tmp_path))
    assert tiers is not None
    copier = CpuBlockCopier(torch.zeros(2, SIZE, dtype=torch.uint8))
    fitting, large = tiers.cache_for(IDENTITY, copier, SIZE), tiers.cache_for(IDENTITY, copier, 11 * STRIDE)
    assert (isinstance(fitting, TieredCache), isinstance(large, TieredCache)) == (True, False)
    assert "tiny runs without KV tiers: " in caplog.text
    fitting.close()
    tiers.close()
    HostTier.open(tmp_path / "host", 10 * STRIDE).close()


def test_a_host_that_serves_others_closes_what_they_come_by(tmp_path: Path) -> None:
    for _ in range(2):  # the second time the address must be free again
        tiers = open_tiers(config(tmp_path, peer_address=f"ipc://{tmp_path}/peers"))
        assert tiers is not None
        assert tiers.peers is not None
        cache = tiers.cache_for(IDENTITY, CpuBlockCopier(torch.zeros(2, SIZE, dtype=torch.uint8)), SIZE)
        assert tiers.peers.server.caches == {IDENTITY}
        cache.close()
        assert tiers.peers.server.caches == set()
        tiers.close()
