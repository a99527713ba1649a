"""Tiers outlive an engine host: its successor finds the computed blocks, but only for the model that computed them (invariant I9)."""

import os
import time
from pathlib import Path

import pytest

from pilotlight.engine.api.protocol import HostConfig, TokenOutput
from pilotlight.engine.api.socket_client import SocketEngineClient
from pilotlight.engine.api.validation import host_problem
from pilotlight.engine.kv.shared_tiers import open_tiers
from pilotlight.engine.weights.digests import fingerprint
from tests.checkpoints import write_llama
from tests.engine.driver import load_engine, one, random_prompt, submit
from tests.engine.host.test_engine_host import collect, host_process, load, until

PROMPT = random_prompt(70, seed=1)


def tiered_config(directory: Path) -> HostConfig:
    return HostConfig(
        threads=1, kv_bytes=1 << 20, kv_host_bytes=4 << 20, kv_host_dir=str(directory / "host"),
        kv_disk_bytes=4 << 20, kv_disk_dir=str(directory / "disk"),
    )  # fmt: skip


@pytest.mark.process
async def test_a_host_that_is_killed_leaves_its_cache_to_the_next(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    config = tiered_config(tmp_path)
    async with host_process(tmp_path, config) as (process, address):
        client = SocketEngineClient(address)
        await load(client, tmp_path / "model")
        first = await collect(client, submit("a", PROMPT, max_tokens=30))
        assert first[0].num_cached_tokens == 0
        await until(lambda: any((tmp_path / "disk").glob("segment-*.kv")))
        async with client.generate(submit("b", random_prompt(100, seed=2), max_tokens=150)) as outputs:
            await anext(outputs)  # the host is killed in the middle of this answer
            process.kill()
            process.wait()
        await client.close()
    (tmp_path / "engine").unlink(missing_ok=True)
    async with host_process(tmp_path, config) as (_, address):
        client = SocketEngineClient(address)
        await load(client, tmp_path / "model")
        again = await collect(client, submit("c", PROMPT, max_tokens=30))
        assert again[0].num_cached_tokens == 64
        assert tokens(again) == tokens(first)
        assert client.loads["tiny"].prefix_host_hits == 64
        # When the conversation continues, the tokens of the answer are found too.
        longer = await collect(client, submit("d", [*PROMPT, *tokens(first), 7, 7, 7], max_tokens=5))
        assert (longer[0].num_cached_tokens or 0) >= 96 - 16
        await client.close()


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_a_model_that_goes_to_sleep_keeps_what_it_has_just_computed(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    tiers = open_tiers(tiered_config(tmp_path))
    assert tiers is not None
    for expected in (0, 64):
        engine = load_engine(tmp_path / "model", tiers=tiers)
        engine.submit(submit("a", PROMPT, max_tokens=1))
        cached: list[int | None] = []
        while engine.has_work:
            if not engine.step():
                time.sleep(0.001)  # blocks are being loaded from a tier
            cached += [output.num_cached_tokens for output in engine.sequences.take_outputs()]
        assert cached == [expected]
        engine.close()  # closed before a further step could have started the stores
    tiers.close()


@pytest.mark.parametrize("change", ["nothing", "weights", "one weight", "config", "block size", "name", "dtype"])
def test_only_the_same_model_finds_what_was_kept(tmp_path: Path, change: str) -> None:
    model = tmp_path / "model"
    write_llama(model, seed=1)
    tiers = open_tiers(tiered_config(tmp_path))
    assert tiers is not None
    engine = load_engine(model, tiers=tiers)
    assert one(engine, submit("a", PROMPT)).num_cached_tokens == 0
    assert engine.tiers.wait_until_idle(10)  # type: ignore[attr-defined]
    engine.close()
    tiers.close()
    settings: dict[str, object] = {}
    if change == "weights":
        write_llama(model, seed=2)
    elif change == "one weight":
        weights = model / "model.safetensors"
        damaged = bytearray(weights.read_bytes())
        damaged[-20] ^= 1
        weights.write_bytes(damaged)
    elif change == "config":
        config = model / "config.json"
        config.write_text(config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 2e-05'))
        assert "2e-05" in config.read_text()
    elif change != "nothing":
        settings = {"block size": {"block_size": 8}, "name": {"name": "other"}, "dtype": {"dtype": "bfloat16"}}[change]
    tiers = open_tiers(tiered_config(tmp_path))
    assert tiers is not None
    assert len(tiers.host) > 0
    engine = load_engine(model, tiers=tiers, **settings)
    assert one(engine, submit("b", PROMPT)).num_cached_tokens == (64 if change == "nothing" else 0)
    engine.close()
    tiers.close()


def test_tenants_do_not_meet_in_the_tiers(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    for salt, expected in ((b"one", 0), (b"two", 0), (b"one", 64)):
        tiers = open_tiers(tiered_config(tmp_path))
        assert tiers is not None
        engine = load_engine(tmp_path / "model", tiers=tiers)
        assert one(engine, submit("a", PROMPT, salt=salt)).num_cached_tokens == expected
        assert engine.tiers.wait_until_idle(10)  # type: ignore[attr-defined]
        engine.close()
        tiers.close()


@pytest.mark.long
def test_a_second_host_at_the_same_place_goes_without_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_tiers(tiered_config(tmp_path))
    assert first is not None
    assert open_tiers(tiered_config(tmp_path)) is None
    assert "another engine host is using it; this engine host runs without" in caplog.text
    first.close()


def test_a_disk_that_cannot_be_had_leaves_the_host_tier(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "disk").write_bytes(b"a file")
    tiers = open_tiers(tiered_config(tmp_path))
    assert tiers is not None
    assert tiers.disk is None
    assert "the disk KV tier" in caplog.text
    tiers.close()


def test_a_block_larger_than_the_host_tier_leaves_that_model_without(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path / "model")
    tiers = open_tiers(HostConfig(kv_host_bytes=4096, kv_host_dir=str(tmp_path / "host")))
    assert tiers is not None
    engine = load_engine(tmp_path / "model", tiers=tiers)
    assert "tiny runs without KV tiers" in caplog.text
    assert len(one(engine, submit("a", PROMPT)).token_ids) == 8
    engine.close()
    tiers.close()


def test_what_cannot_be_configured_is_refused_with_what_to_change() -> None:
    assert "kv_host_dir is missing" in (host_problem(HostConfig(kv_host_bytes=1)) or "")
    assert "set kv_host_bytes as well" in (host_problem(HostConfig(kv_disk_dir="/x")) or "")
    assert "kv_disk_bytes is -1" in (host_problem(HostConfig(kv_disk_bytes=-1)) or "")


def test_a_fingerprint_is_the_same_until_something_changes(tmp_path: Path) -> None:
    write_llama(tmp_path, max_shard_size="100KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    before = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == before
    seen = {before}
    os.utime(files[0], ns=(1, 1))
    seen.add(fingerprint(tmp_path))
    files[1].rename(tmp_path / "renamed.safetensors")
    seen.add(fingerprint(tmp_path))
    with (tmp_path / "renamed.safetensors").open("ab") as file:
        file.write(b"more")
    seen.add(fingerprint(tmp_path))
    assert len(seen) == 4
