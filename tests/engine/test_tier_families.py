"""Every model family, compared with `transformers` when blocks come from a tier: after a restart, from disk, from a store, after a swap."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.api.struct import replace
from pilotlight.engine.kv.shared_tiers import SharedTiers, open_tiers
from pilotlight.engine.kv.store.store_thread import StoreThread
from pilotlight.engine.kv.store.store_tier import StoreTier
from pilotlight.engine.kv.tiered_cache import TieredCache
from tests.engine.agreement import assert_agrees, full
from tests.engine.driver import drain_preempting, load_engine, one, random_prompt
from tests.engine.families import MODELS, SWEPT, write_family
from tests.engine.kv.fake_store import FakeStore
from tests.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("always_worth_it")]


@pytest.fixture(scope="module", params=[*MODELS, *SWEPT])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("family")
    return directory, write_family(directory, request.param)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[SharedTiers]:
    opened = open_tiers(HostConfig(kv_host_bytes=8 << 20, kv_host_dir=str(tmp_path / "host")))
    assert opened is not None
    yield opened
    opened.close()


def open_anew(directory: Path, package: FakeStore | None = None, host: str = "host", disk: str = "disk") -> SharedTiers:
    opened = open_tiers(
        HostConfig(
            kv_host_bytes=8 << 20,
            kv_host_dir=str(directory / host),
            kv_disk_bytes=8 << 20,
            kv_disk_dir=str(directory / disk),
            kv_store="127.0.0.1:1" if package else None,
        ),
        join_store=lambda master: StoreTier(package),
    )
    assert opened is not None
    return opened


@pytest.mark.process
def test_a_round_trip_through_host_disk_and_store_agrees(written: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    directory, model = written
    package = FakeStore()
    prompt = random_prompt(64, seed=3)
    longer = prompt + random_prompt(21, seed=4)
    hosts = (("host", "nothing"), ("host", "host"), ("another host", "disk"), ("one without a disk", "store"))
    for host, kept_in in hosts:
        tiers = open_anew(tmp_path, package, host, "no disk" if kept_in == "store" else "disk")
        assert tiers.store is not None
        until(partial(is_usable, tiers.store))
        assert tiers.disk is not None
        assert tiers.disk.wait_until_idle(10), "the disk is being looked through"
        engine = load_engine(directory, tiers=tiers)
        assert isinstance(engine.tiers, TieredCache)
        heard = one(engine, full("a", longer if kept_in == "host" else prompt, max_tokens=4))
        assert_agrees(model, longer if kept_in == "host" else prompt, heard)
        load = engine.load()
        expected = {"nothing": (0, 0, 0), "host": (64, 0, 0), "disk": (0, 48, 0), "store": (0, 0, 48)}[kept_in]
        assert (load.prefix_host_hits, load.prefix_disk_hits, load.prefix_store_hits) == expected
        assert heard.num_cached_tokens == sum(expected)
        stranger = replace(full("b", prompt, max_tokens=4), salt=f"a request when it was in {kept_in}".encode())
        assert one(engine, stranger).num_cached_tokens == 0
        assert engine.tiers.wait_until_idle(10)
        engine.close()
        tiers.close()


def is_usable(store: StoreThread) -> bool:
    return store.is_usable


def test_swapped_sequences_agree(written: tuple[Path, PreTrainedModel], tiers: SharedTiers) -> None:
    directory, model = written
    engine = load_engine(directory, kv_tokens=144, max_num_batched_tokens=40, tiers=tiers)
    assert isinstance(engine.tiers, TieredCache)
    prompts = {str(n): random_prompt(n, seed=n) for n in (30, 31, 32)}
    heard = drain_preempting(engine, [full(name, prompt, max_tokens=30) for name, prompt in prompts.items()])
    load = engine.load()
    assert load.swaps == load.preemptions > 0
    for name, prompt in prompts.items():
        assert len(heard[name].token_ids) == 30
        assert_agrees(model, prompt, heard[name])
    assert engine.tiers.load().num_pinned == 0
    engine.close()
