"""Weights in host memory: a site's share, files that are adopted, and files that are deleted."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from pilotlight.runtime.hosts.memory_budget import AvailableMemory, open_tier
from pilotlight.runtime.hosts.tier_directory import COMING_BACK_S, TierDirectory
from pilotlight.runtime.models.weights_tier import WeightsTier
from pilotlight.sites.config import ConfigError
from pilotlight.sites.site import SiteConfig
from tests.runtime.conftest import site_config
from tests.runtime.test_kv_tiers import lose_lock
from tests.waiting import until

GIB = 1 << 30
PLENTY = AvailableMemory(memory=16 * GIB, place=8 * GIB, held=0)


def write_weights(directory: Path, elements: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.zeros(elements, dtype=dtype)}, directory / "model.safetensors", {"format": "pt"})
    return directory


def site(directory: Path, gib: float | None, engine: dict[str, Any] | None = None, **model: Any) -> SiteConfig:
    values = {"name": "tiny", "source": str(directory), **model}
    return site_config(directory, models=[values], engine={"weights_host_gib": gib, **(engine or {})})


def opened(
    config: SiteConfig, root: Path, supply: AvailableMemory = PLENTY, coming_back_s: float = COMING_BACK_S
) -> WeightsTier | None:
    return open_tier(config, TierDirectory(config.name, root, "weights", coming_back_s), lambda places: supply)


def test_a_promise_that_the_machine_cannot_keep_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        opened(site(tmp_path, 10.0), tmp_path, AvailableMemory(memory=16 * GIB, place=8 * GIB, held=0))
    assert "promises 10 GiB" in str(refused.value)
    assert "16 GiB of memory are available and 8 GiB of shared memory are free" in str(refused.value)
    assert opened(site(tmp_path, 10.0), tmp_path, AvailableMemory(16 * GIB, 8 * GIB, held=3 * GIB)) is not None


def test_kv_blocks_of_all_devices_are_part_of_what_is_promised(tmp_path: Path) -> None:
    two = {"devices": ["cpu", "cpu"], "kv_host_gib": 3.0}
    with pytest.raises(ConfigError) as refused:
        opened(site(tmp_path, 4.0, two), tmp_path)
    assert "2 devices x 3 GiB for KV blocks (engine.kv_host_gib) + 4 GiB for sleeping weights" in str(refused.value)
    assert "= 10 GiB, and 16 GiB of memory are available and 8 GiB of shared memory are free: promise less" in str(
        refused.value
    )
    with pytest.raises(ConfigError, match="promises 9 GiB for KV blocks"):
        opened(site(tmp_path, 0.0, {"kv_host_gib": 9.0}), tmp_path)
    tier = opened(site(tmp_path, 2.0, two), tmp_path)
    assert tier is not None
    assert tier.limit_bytes == 2 * GIB
    tier.close()
    rest = opened(site(tmp_path, None, two, residency="host"), tmp_path)
    assert rest is not None
    assert rest.limit_bytes == 1 * GIB, "half of what the KV blocks leave"


def test_what_a_former_life_holds_is_what_its_files_take(tmp_path: Path) -> None:
    places = [TierDirectory("ams1", tmp_path, "weights"), TierDirectory("ams1", tmp_path)]
    for place in places:
        place.directory.mkdir()
        with (place.directory / "part").open("wb") as file:
            file.write(b"w" * 8192)
            file.truncate(1 << 30)  # a file without written pages uses no memory
    assert AvailableMemory.at(places).held == 2 * 8192
    assert AvailableMemory.at([TierDirectory("iad1", tmp_path, "weights")]).held == 0


def test_models_that_must_sleep_in_memory_are_counted_at_start(tmp_path: Path) -> None:
    directory = write_weights(tmp_path / "m", 1 << 20, torch.float32)
    with pytest.raises(ConfigError) as refused:
        opened(site(directory, 0.001, residency="host"), tmp_path)
    assert "models with residency host need tiny 0.00391 GiB" in str(refused.value)
    assert "engine.weights_host_gib = 0.001" in str(refused.value)
    assert opened(site(directory, 0.01, residency="host"), tmp_path) is not None


def test_a_site_that_must_sleep_in_memory_and_has_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has residency host, but engine\.weights_host_gib is 0"):
        site(tmp_path, 0.0, residency="host")


def test_without_a_promise_half_of_what_there_is_may_be_used(tmp_path: Path) -> None:
    config = site(tmp_path, None, residency="host")
    tier = opened(config, tmp_path)
    assert tier is not None
    assert tier.limit_bytes == 4 * GIB
    assert opened(site(tmp_path, 0.0), tmp_path) is None
    assert opened(site(tmp_path, None), tmp_path) is None, "files on a disk are not memory, unless configured"


def test_two_runtimes_of_one_name_do_not_share_and_the_second_gets_an_error(tmp_path: Path) -> None:
    first = opened(site(tmp_path, 1.0), tmp_path)
    assert first is not None
    with pytest.raises(ConfigError) as refused:
        opened(site(tmp_path, 1.0), tmp_path)
    assert "site 'ams1' cannot keep weights" in str(refused.value)
    assert "another process serves a site of this name" in str(refused.value)
    first.close()
    assert opened(site(tmp_path, 1.0), tmp_path) is not None


def test_a_killed_sites_files_are_adopted_by_its_next_life_and_strangers_removed(tmp_path: Path) -> None:
    place = TierDirectory("ams1", tmp_path, "weights")
    tier = open_tier(site(tmp_path, 1.0), place, lambda places: PLENTY)
    assert tier is not None
    tier.file_of("tiny").write_bytes(b"w" * 100)
    tier.file_of("forgotten").write_bytes(b"w" * 50)
    (place.directory / "tiny.weights.part-77").write_bytes(b"half")
    lose_lock(place)
    again = opened(site(tmp_path, 1.0), tmp_path)
    assert again is not None
    assert again.bytes_of("tiny") == 100
    assert again.bytes_of("forgotten") == 0
    assert sorted(path.suffix for path in place.directory.iterdir()) == [".lock", ".weights"]
    again.close()
    assert not place.directory.exists()


def test_a_file_that_is_being_written_counts_and_is_not_there_yet(tmp_path: Path) -> None:
    tier = WeightsTier(TierDirectory("ams1", tmp_path, "weights"), tmp_path, 1000)
    assert (tier.bytes_of("tiny"), tier.held_for("tiny")) == (0, 0)
    partial = tier.file_of("tiny").with_name(tier.file_of("tiny").name + ".0badcafe.partial")
    partial.write_bytes(b"w" * 100)
    assert (tier.bytes_of("tiny"), tier.held_for("tiny")) == (0, 100)
    assert tier.held_for("tin") == 0
    partial.rename(tier.file_of("tiny"))
    assert (tier.bytes_of("tiny"), tier.held_for("tiny")) == (100, 100)
    partial.write_bytes(b"w" * 100)
    tier.remove("tiny")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_site_left_goes_soon_after_any_other_starts(tmp_path: Path) -> None:
    place = TierDirectory("sin1", tmp_path, "weights")
    directory = place.claim()
    assert directory is not None
    (directory / "x.weights").write_bytes(b"w")
    assert opened(site(tmp_path, 1.0), tmp_path, coming_back_s=0.01) is not None
    assert directory.exists(), "its site lives"
    lose_lock(place)
    opened(replace(site(tmp_path / "other", 1.0), name="iad1"), tmp_path, coming_back_s=0.01)
    until(lambda: not directory.exists())


def test_every_model_has_a_file_name_of_its_own(tmp_path: Path) -> None:
    tier = WeightsTier(TierDirectory("ams1", tmp_path, "weights"), tmp_path, 1)
    names = ["a/b", "a-b", "a.b", "x" * 200, "x" * 199, "\u6a21\u578b", "../../etc/passwd"]
    files = {tier.file_of(name) for name in names}
    assert len(files) == len(names)
    assert all(file.parent == tmp_path and len(os.fsencode(file.name)) < 100 for file in files)
