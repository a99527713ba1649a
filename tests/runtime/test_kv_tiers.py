"""The directories of a site's KV tiers: they survive its engine hosts, and only the intended files survive the site."""

import logging
import os
import stat
import threading
from pathlib import Path

import httpx
import pytest

from pilotlight.runtime.hosts.launch import host_config, launchers_of
from pilotlight.runtime.hosts.memory import GIB
from pilotlight.runtime.hosts.tier_directory import LOCKS, TierDirectory
from pilotlight.sites.site import EngineConfig
from pilotlight.support.directory_locks import is_dead, remove_if_dead, try_lock
from tests.checkpoints import write_llama, write_tokenizer
from tests.runtime.test_real_engine import Process
from tests.waiting import until

PROMPT = "the pilot light of a gas stove burns small and blue until somebody wants warm water " * 2  # data
ASK = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}


def test_a_site_that_stops_leaves_nothing(tmp_path: Path) -> None:
    place = TierDirectory("ams1", tmp_path)
    directory = place.claim()
    assert directory is not None
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (directory / "slots-4096.kv").write_bytes(b"blocks")
    assert place.claim() == directory, "for the next engine host"
    place.remove()
    assert list(tmp_path.iterdir()) == []
    place.remove()


def test_two_processes_of_one_site_name_do_not_share(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second, other = (
        TierDirectory("ams1", tmp_path),
        TierDirectory("ams1", tmp_path),
        TierDirectory("iad1", tmp_path),
    )
    directory = first.claim()
    assert second.claim() is None
    assert "another process serves a site of this name" in caplog.text
    assert other.claim() not in (None, directory)
    second.remove()
    assert directory is not None
    assert directory.exists(), "it belongs to the first"


def test_what_a_killed_site_left_is_taken_over_by_its_next_life_and_removed_by_any_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    killed = TierDirectory("ams1", tmp_path)
    directory = killed.claim()
    assert directory is not None
    (directory / "slots-4096.kv").write_bytes(b"blocks")
    living = TierDirectory("sin1", tmp_path)
    living.claim()
    remove_dead(tmp_path)
    assert directory.exists(), "its site lives"
    lose_lock(killed)
    again = TierDirectory("ams1", tmp_path)
    assert again.claim() == directory
    remove_dead(tmp_path)
    assert (directory / "slots-4096.kv").exists()
    lose_lock(again)
    remove_dead(tmp_path)
    assert not directory.exists()
    assert f"removed the host KV tier of a site that is gone: {directory}" in caplog.text
    assert living.claim() is not None


def remove_dead(root: Path) -> None:
    for directory in root.iterdir():
        remove_if_dead(directory, LOCKS, "host KV tier")


def lose_lock(place: TierDirectory) -> None:
    """Release the lock, as the kernel does for a killed process."""
    lock = str(place.directory / "site.lock")
    opened = [int(name) for name in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{name}") == lock]
    (descriptor,) = opened
    os.close(descriptor)


def test_the_engine_gets_tiers_only_where_the_site_has_a_place_for_them() -> None:
    config = EngineConfig(kv_host_gib=0.5, kv_disk_dir="/var/cache/kv", kv_disk_gib=2.0)
    told = host_config(config, ("cpu",), "ams1", Path("/dev/shm/x"))
    assert (told.kv_host_bytes, told.kv_host_dir) == (GIB // 2, "/dev/shm/x")
    assert (told.kv_disk_bytes, told.kv_disk_dir) == (2 * GIB, "/var/cache/kv/ams1")
    without = host_config(config, ("cpu",), "ams1", None)
    assert (without.kv_host_bytes, without.kv_host_dir, without.kv_disk_dir) == (0, None, None)


def test_every_device_has_tiers_of_its_own_and_none_takes_anothers_for_dead(tmp_path: Path) -> None:
    site = f"t{abs(hash(str(tmp_path))) % 10**8}"  # its directories are in the machine's memory, as any site's
    owners = [site, f"{site}@1"]
    for owner in owners:  # files of the site's killed predecessor
        place = TierDirectory(owner)
        directory = place.claim()
        assert directory is not None
        (directory / "slots-4096.kv").touch()
        lose_lock(place)
    config = EngineConfig(devices=("cpu", "cpu"), kv_host_gib=0.5, kv_disk_dir="/var/cache/kv")
    first, second = launchers_of(config, site)
    claimed = [launcher._claim_tier_place() for launcher in (first, second)]
    assert [path.name.rpartition("-")[2] for path in claimed if path is not None] == owners
    assert all((path / "slots-4096.kv").exists() for path in claimed if path is not None)
    assert host_config(config, ("cpu",), second._owner, claimed[1]).kv_disk_dir == f"/var/cache/kv/{site}@1"
    for launcher in (first, second):
        launcher.close()
    assert not any(TierDirectory(owner).directory.exists() for owner in owners)


@pytest.mark.process
def test_blocks_outlive_the_engine_and_go_with_the_site(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny")
    write_tokenizer(tmp_path / "tiny")
    file = tmp_path / "site.toml"
    name = f"t{abs(hash(str(tmp_path))) % 10**8}"
    file.write_text(
        f'name = "{name}"\nplace = {{city = "A", latitude = 0.0, longitude = 0.0}}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.01\nkv_host_gib = 0.01\n'
        f'kv_disk_dir = "{tmp_path}/disk"\nkv_disk_gib = 0.01\n'
        f'[[models]]\nname = "tiny"\nsource = "{tmp_path}/tiny"\n'
    )
    directory = TierDirectory(name).directory
    try:
        process = Process(file, tmp_path / "log")
        with httpx.Client(base_url=process.url, timeout=30) as client:
            first = client.post("/v1/completions", json=ASK).json()
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert directory.is_dir()
            until(lambda: any((tmp_path / "disk" / name).glob("segment-*.kv")))  # blocks reach the disk later
            engine = process.engine()
            engine.kill()
            until(lambda: process.has_another_engine(engine) and client.get("/readyz").status_code == 200)
            again = client.post("/v1/completions", json=ASK).json()
            assert again["choices"][0]["text"] == first["choices"][0]["text"]
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
            assert metric(client, "pilotlight_kv_host_tier_hits_total") >= 32
        assert process.stop() == 0
        assert not directory.exists()
        process = Process(file, tmp_path / "log2")
        with httpx.Client(base_url=process.url, timeout=30) as client:
            from_disk = client.post("/v1/completions", json=ASK).json()
            assert from_disk["choices"][0]["text"] == first["choices"][0]["text"]
            assert from_disk["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
            assert metric(client, "pilotlight_kv_disk_tier_hits_total") >= 32
        process.popen.kill()
        process.popen.wait()
        assert directory.exists(), "no process was left to remove it"
        until(lambda: removed(directory))
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()
        remove_if_dead(directory, LOCKS, "tier")


def test_a_killed_site_may_come_back_for_what_it_left_before_another_removes_it(tmp_path: Path) -> None:
    killed, lost, alive = (TierDirectory(name, tmp_path) for name in ("killed", "lost", "alive"))
    for place in (killed, lost, alive):
        place.claim()
    for place in (killed, lost):
        lose_lock(place)
    TierDirectory("another", tmp_path, coming_back_s=0.3).remove_dead_later()
    restarted = TierDirectory("killed", tmp_path)
    assert restarted.claim() is not None
    lose_lock(alive)  # this site was killed only now, so it may still restart
    until(lambda: not lost.directory.exists())
    assert restarted.directory.exists()
    assert alive.directory.exists()


def test_who_looks_whether_an_owner_is_dead_keeps_nothing_of_it(tmp_path: Path) -> None:
    place = TierDirectory("ams1", tmp_path)
    place.directory.mkdir()
    (place.directory / "owner.lock").mkdir()  # opening this lock fails while the check holds the directory's other lock
    assert not is_dead(place.directory, LOCKS)
    assert place.claim() == place.directory


def test_a_lock_that_is_being_checked_is_waited_for(tmp_path: Path) -> None:
    place = TierDirectory("ams1", tmp_path)
    (tmp_path / place.directory.name).mkdir()
    looked_at = try_lock(place.directory, "site.lock")
    assert looked_at is not None
    timer = threading.Timer(0.02, os.close, [looked_at])
    timer.start()
    assert place.claim() == place.directory
    timer.join()


def removed(directory: Path) -> bool:
    """Tell whether a folder is removed. The engine host of a killed site lives until its next heartbeat."""
    remove_if_dead(directory, LOCKS, "tier")
    return not directory.exists()


def metric(client: httpx.Client, name: str) -> float:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
