"""Data rules: no other site is tried, not even for failover, and a refusal names the reason."""

import hashlib
from typing import Any

import msgspec
import pytest

from pilotlight.edge_router.routing.data_places import DataPlaces
from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.network import NetworkConfig
from tests.edge_router.builders import model_status, network
from tests.edge_router.fakes import FirstThen, continued_stream, last_error, reset_it, router, sites

pytestmark = pytest.mark.process

KEYS = [{"name": name, "key_sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("acme", "bob")]
ACME, BOB = ({"authorization": f"Bearer {name}"} for name in ("acme", "bob"))
ONLY_IAD: dict[str, Any] = {"keys": KEYS, "accounts": [{"name": "acme", "data": {"sites": ["iad1"]}}]}


async def test_an_accounts_data_stays_where_it_may_go_whatever_is_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    policy = FirstThen("ams1", "iad1")
    async with sites("ams1", "iad1") as fakes, router(fakes, policy=policy, tables=ONLY_IAD) as running:
        for headers, site in ((ACME, 1), (BOB, 0)):
            async with running.chat(headers=headers) as response:
                await response.read()
            assert [len(fake.seen) for fake in fakes][site] == 1
        assert [len(fake.seen) for fake in fakes] == [1, 1]


async def test_a_stream_that_loses_its_only_site_ends_rather_than_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    async with sites("ams1", "iad1") as fakes, router(fakes, tables=ONLY_IAD, continue_within_s=1.0) as running:
        fakes[0].behave = continued_stream(8)
        fakes[1].behave = continued_stream(8, until=3, ending=reset_it)
        async with running.chat(headers=ACME) as response:
            fakes[1].behave = continued_stream(8, until=3, ending=reset_it)
            body = await response.read()
        assert last_error(body)["error"]["code"] == "upstream_lost"
        assert fakes[0].seen == []


async def test_a_site_that_is_gone_is_named_and_no_other_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    async with sites("ams1", "iad1") as fakes, router(fakes, tables=ONLY_IAD) as running:
        await fakes[1].stop()
        async with running.chat(headers=ACME) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"]) == (503, "no_site_available")
        assert "data of the account acme may go to iad1 alone" in error["message"]
        async with running.chat(headers=BOB) as response:
            assert response.status == 200
        assert [request.headers["x-pilotlight-account"] for request in fakes[0].seen] == ["bob"]


async def test_a_models_rule_holds_by_any_of_its_names_and_rules_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    tables = {**ONLY_IAD, "models": [{"model": "emb*", "data": {"sites": ["ams1"]}}]}
    async with (
        sites("ams1", "iad1") as fakes,
        router(fakes, policy=FirstThen("iad1", "ams1"), tables=tables) as running,
    ):
        for fake in fakes:
            fake.status_fields = {"models": (model_status(aliases=("@x/ember",)),)}
        await running.until(lambda: running.proxy.selector.own_name("@x/ember") == "ember")
        for model in ("ember", "@x/ember"):
            async with running.chat(headers=BOB, model=model) as response:
                assert response.status == 200
            async with running.chat(headers=ACME, model=model) as response:
                error = (await response.json())["error"]
                assert (response.status, error["code"]) == (403, "forbidden")
                assert "of the account acme and for the model ember may go to no site at all" in error["message"]
        assert (len(fakes[0].seen), len(fakes[1].seen)) == (2, 0)


def test_a_place_outside_the_network_stops_the_start() -> None:
    for data, why in (
        ({"sites": ["ams2"]}, "the site 'ams2'"),
        ({"regions": ["eu"]}, "the region 'eu'"),
        ({}, "names no site"),
    ):
        with pytest.raises(ConfigError, match=why):
            network({"ams1": "http://x:1"}, accounts=[{"name": "a", "data": data}])
        with pytest.raises(ConfigError, match=why):
            network({"ams1": "http://x:1"}, models=[{"model": "*", "data": data}])
    with pytest.raises(ConfigError, match=r"ledger\.directory"):
        network({"ams1": "http://x:1"}, accounts=[{"name": "a", "tokens_per_day": 5}])


def test_sites_are_named_or_in_a_region_and_every_rule_that_fits_takes_some_away() -> None:
    urls = {"ams1": "http://x:1", "iad1": "http://x:2", "sin1": "http://x:3"}
    accounts = [{"name": "acme", "data": {"sites": ["iad1"], "regions": ["eu"]}}, {"name": "free"}]
    models = [
        {"model": "emb*", "data": {"sites": ["iad1", "sin1"]}}, {"model": "ember", "data": {"regions": ["asia", "eu"]}}, {"model": "*"},
    ]  # fmt: skip
    plain = msgspec.to_builtins(network(urls))
    for site, region in zip(plain["sites"], ("eu", None, "asia"), strict=True):
        site["region"] = region
    places = DataPlaces(parse(NetworkConfig, {**plain, "accounts": accounts, "models": models}, "test"))

    def names(account: str | None, own_name: str | None, model: str | None = None) -> str | None:
        allowed = places.of(account, own_name, model or own_name)
        return None if allowed is None else " ".join(sorted(allowed.names))

    assert not places.is_empty
    assert names(None, "other") is names("free", "other") is names("nobody", None) is None
    assert names("acme", "other") == names("acme", None) == "ams1 iad1"
    assert names(None, "embers") == "iad1 sin1"
    assert names(None, "ember") == names(None, "@x/y", "ember") == names(None, "ember", "@x/y") == "sin1"
    assert names("acme", "embers") == "iad1"
    assert names("acme", "ember") == ""
    for some in ({"accounts": accounts[:1]}, {"models": models[:1]}):
        assert not DataPlaces(parse(NetworkConfig, {**plain, **some}, "test")).is_empty
    before = DataPlaces(network(urls))
    assert before.is_empty
    before.update_from(places)
    assert not before.is_empty
    assert before.of("acme", "embers", None) == places.of("acme", "embers", None)
