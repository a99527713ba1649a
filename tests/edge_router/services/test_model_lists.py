"""A router's lists of models: the models of all sites, although no site has all of them."""

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientTimeout, web

from tests.edge_router.builders import model_status
from tests.edge_router.fakes import Behaviour, FakeSite, answer, hang, refuse, reset_before_first_byte, router, sites
from tests.edge_router.metering.test_usage_report import ACME, BOB, metered

pytestmark = pytest.mark.process

SEARCH = "/client/v4/accounts/a/ai/models/search"
LISTS = ("/v1/models", "/ai/v1/models", "/client/v4/accounts/a/ai/v1/models")
PRICE = {"prompt": "0.000001", "input_cache_read": "0.0000005", "completion": "0.000003", "currency": "USD"}


def lister(*names: str, **more: Any) -> Behaviour:
    """Return the behaviour of a site with these models, whose answers have the form of a real site's."""

    async def behave(site: FakeSite, request: web.Request) -> web.StreamResponse:
        entries = [{"id": name, "at": site.name} for name in names]
        asked = request.query.get("model") if request.path.endswith("/schema") else None
        if "/v1/models/" in request.path:
            asked = request.path.partition("/v1/models/")[2]
        if request.path == SEARCH:
            found = [entry for entry in entries if request.query.get("search", "") in entry["id"]]
            found = found[: int(request.query.get("per_page", 50))]
            return web.json_response({"result": found, "success": True, "result_info": {"total_count": len(found)}})
        if asked is None:
            return web.json_response({"object": "list", "data": entries, **more})
        if asked.partition(":")[0] not in names:
            return web.json_response({"error": {"code": "model_not_found", "message": f"none {asked}"}}, status=404)
        return web.json_response(
            {"result": {"input": asked}} if "model" in request.query else entries[names.index(asked)]
        )

    return behave


def serve(site: FakeSite, *names: str, **more: Any) -> None:
    site.status_fields = {"models": tuple(model_status(name) for name in names)}
    site.behave = lister(*names, **more)


@pytest.mark.parametrize("path", LISTS)
async def test_a_list_has_the_models_of_all_sites_each_once_and_a_twin_is_not_asked(path: str) -> None:
    async with sites("ams1", "iad1", "sin1") as fakes:
        serve(fakes[0], "ember")
        serve(fakes[1], "coal", "ember")
        serve(fakes[2], "ember")
        async with router(fakes) as running, running.http.get(running.url + path) as response:
            listed = await response.json()
            assert listed == {
                "object": "list",
                "data": [{"id": "ember", "at": listed["data"][0]["at"]}, {"id": "coal", "at": "iad1"}],
            }
            assert listed["data"][0]["at"] in ("ams1", "sin1")
            assert len(fakes[0].seen) + len(fakes[2].seen) == 1
            assert response.headers["content-type"] == "application/json"


async def test_anthropics_list_has_first_and_last_of_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = [{"name": "acme", "models": ["c*", "e*"]}]
    async with sites("ams1", "iad1") as fakes:
        serve(fakes[0], "ash", "ember", first_id="ash", last_id="ember", has_more=False)
        serve(fakes[1], "coal", "dust", first_id="coal", last_id="dust", has_more=False)
        async with metered(fakes, tmp_path, monkeypatch, accounts=accounts) as running:
            headers = {**ACME, "anthropic-version": "2023-06-01"}
            async with running.http.get(running.url + "/v1/models", headers=headers) as response:
                listed = await response.json()
            assert [entry["id"] for entry in listed["data"]] == ["ember", "coal"]
            assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("ember", "coal", False)
            assert [fake.seen[-1].headers["anthropic-version"] for fake in fakes] == ["2023-06-01"] * 2
            accounts[0]["models"] = ["x"]
        async with metered(fakes, tmp_path, monkeypatch, accounts=accounts) as running:
            async with running.http.get(running.url + "/v1/models", headers=headers) as response:
                listed = await response.json()
            assert (listed["data"], listed["first_id"], listed["last_id"]) == ([], None, None)


async def test_a_model_by_its_name_is_described_by_a_site_that_has_it() -> None:
    async with sites("ams1", "iad1") as fakes:
        serve(fakes[0], "ember")
        serve(fakes[1], "coal", "@org/coal")
        async with router(fakes) as running:
            for path, told in (
                ("/v1/models/coal", {"id": "coal", "at": "iad1"}),
                ("/v1/models/@org/coal", {"id": "@org/coal", "at": "iad1"}),
                ("/client/v4/accounts/a/ai/v1/models/ember", {"id": "ember", "at": "ams1"}),
                ("/client/v4/accounts/a/ai/models/schema?model=coal", {"result": {"input": "coal"}}),
            ):
                async with running.http.get(running.url + path) as response:
                    assert await response.json() == told
            for path, status in (("/v1/models/none", 404), ("/client/v4/accounts/a/ai/models/schema?model=none", 400)):
                async with running.http.get(running.url + path) as response:
                    assert (response.status, "no site has a model named 'none'" in await response.text()) == (
                        status,
                        True,
                    )


async def test_a_model_whose_only_site_is_away_is_not_said_to_be_unknown() -> None:
    async with sites("ams1", "iad1") as fakes:
        serve(fakes[0], "ember")
        serve(fakes[1], "coal")
        async with router(fakes) as running:
            await fakes[0].stop()
            await running.until_states(ams1="unhealthy")
            for path, status in (
                ("/v1/models/ember", 503),
                ("/v1/models/none", 404),
                ("/v1/models/coal", 200),
                ("/client/v4/accounts/a/ai/models/schema?model=ember", 503),
                (f"{SEARCH}?search=ember", 503),
                (f"{SEARCH}?search=coal", 200),
            ):
                async with running.http.get(running.url + path) as response:
                    assert (path, response.status) == (path, status)
                    assert ("retry-after" in response.headers) is (status == 503)
            serve(fakes[1], "coal", "ember")
            fakes[1].behave = lister("coal")  # the site's search does not find a model that the site has
            await running.until(lambda: running.proxy.selector.backends["iad1"].view().model("ember") is not None)
            async with running.http.get(f"{running.url}{SEARCH}?search=none") as response:
                assert (response.status, (await response.json())["result"]) == (200, [])


async def test_an_adapter_is_described_by_the_kind_of_site_that_has_it() -> None:
    async with sites("ams1", "iad1") as fakes:
        serve(fakes[0], "ember")
        serve(fakes[1], "ember", "coal")
        fakes[0].behave = answer(404, {"error": {"code": "model_not_found", "message": "no adapter"}})
        fakes[1].behave = answer(200, {"id": "ember:french"})
        async with router(fakes) as running:
            async with running.http.get(running.url + "/v1/models/ember:french") as response:
                assert (response.status, await response.json()) == (200, {"id": "ember:french"})
            fakes[1].behave = fakes[0].behave
            async with running.http.get(running.url + "/v1/models/ember:french") as response:
                assert (response.status, (await response.json())["error"]["message"]) == (404, "no adapter")
            for behaviours in ((fakes[0].behave, refuse("draining")), (refuse("draining"), fakes[0].behave)):
                fakes[0].behave, fakes[1].behave = behaviours
                async with running.http.get(running.url + "/v1/models/ember:french") as response:
                    assert response.status == 503, "an unreachable site may have it"


async def test_a_search_is_paged_over_all_sites() -> None:
    async with sites("ams1", "iad1") as fakes:
        serve(fakes[0], *(f"a{i}" for i in range(60)))
        serve(fakes[1], "a0", *(f"b{i}" for i in range(5)))
        async with router(fakes) as running:
            for query, ids, info in (
                ("", [f"a{i}" for i in range(50)], (1, 50, 50, 65)),
                ("?page=2", [*(f"a{i}" for i in range(50, 60)), *(f"b{i}" for i in range(5))], (2, 50, 15, 65)),
                ("?search=b&per_page=2&page=2", ["b2", "b3"], (2, 2, 2, 5)),
                ("?page=9", [], (9, 50, 0, 65)),
            ):
                async with running.http.get(running.url + SEARCH + query) as response:
                    found = await response.json()
                assert ([card["id"] for card in found["result"]], found["success"]) == (ids, True)
                assert found["result_info"] == dict(
                    zip(("page", "per_page", "count", "total_count"), info, strict=True)
                )
            async with running.http.get(running.url + SEARCH + "?page=0") as response:
                assert (response.status, "page" in await response.text()) == (400, True)


async def test_what_a_failing_site_alone_has_is_missing_and_its_twin_speaks_for_it_where_there_is_one() -> None:
    async with sites("ams1", "iad1", "sin1") as fakes:
        serve(fakes[0], "ember")
        serve(fakes[1], "coal")
        serve(fakes[2], "coal")
        async with router(fakes, first_byte_timeout_s=0.3) as running:
            fakes[0].behave = hang
            fakes[1].behave = reset_before_first_byte
            async with running.http.get(running.url + "/v1/models") as response:
                assert [entry["id"] for entry in (await response.json())["data"]] == ["coal"]
            fakes[2].behave = refuse("draining")
            async with running.http.get(running.url + "/v1/models") as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "no_site_available"


async def test_an_account_sees_what_it_may_use_with_prices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = [{"name": "acme", "models": ["@org/emb*"]}]
    async with sites("ams1", "iad1") as fakes:
        serve(fakes[0], "ember")
        fakes[0].status_fields = {"models": (model_status("ember", aliases=("@org/ember",)),)}
        serve(fakes[1], "other")
        async with metered(fakes, tmp_path, monkeypatch, accounts=accounts) as running:
            priced, other = {"id": "ember", "at": "ams1", "pricing": PRICE}, {"id": "other", "at": "iad1"}
            for headers, listed in ((ACME, [priced]), (BOB, [priced, other])):
                async with running.http.get(running.url + "/v1/models", headers=headers) as response:
                    assert await response.json() == {"object": "list", "data": listed}
                async with running.http.get(running.url + SEARCH, headers=headers) as response:
                    assert (await response.json())["result"] == listed
            async with running.http.get(running.url + "/v1/models/ember", headers=ACME) as response:
                assert await response.json() == priced
            for path in ("/v1/models/other", "/client/v4/accounts/a/ai/v1/models/other"):
                async with running.http.get(running.url + path, headers=ACME) as response:
                    told = (await response.json())["error"]
                    assert (response.status, told["code"], told["param"]) == (404, "model_not_found", "model")
            schema = "/client/v4/accounts/a/ai/models/schema?model=other"
            async with running.http.get(running.url + schema, headers=ACME) as response:
                assert (response.status, (await response.json())["errors"][0]["code"]) == (400, 5007)
            async with running.http.get(running.url + "/v1/models/other", headers=BOB) as response:
                assert await response.json() == other


@pytest.mark.parametrize("odd", [[], {"data": 7}, {"data": [7]}, {"data": [{}]}, "text", {"data": [{"id": 7}]}])
async def test_an_invalid_list_belongs_to_no_site_and_alone_it_is_passed_on(odd: object) -> None:
    async with sites("ams1", "iad1") as fakes:
        serve(fakes[0], "ember")
        serve(fakes[1], "coal")
        async with router(fakes) as running:
            fakes[0].behave = answer(200, odd)
            async with running.http.get(running.url + "/v1/models") as response:
                assert [entry["id"] for entry in (await response.json())["data"]] == ["coal"]
            fakes[1].behave = answer(200, odd)
            async with running.http.get(running.url + "/v1/models") as response:
                assert (response.status, await response.json()) == (200, odd)


async def test_a_list_is_read_with_get_and_its_head_is_there() -> None:
    async with sites("ams1") as fakes:
        serve(fakes[0], "ember")
        async with router(fakes) as running:
            async with running.http.head(running.url + "/v1/models") as response:
                assert response.status == 200
            async with running.http.post(running.url + "/v1/models", json={}) as response:
                assert response.status == 405
            async with running.http.get(running.url + "/v1/models", json={}) as response:
                assert response.status == 200


async def test_a_client_that_leaves_frees_its_requests() -> None:
    async with sites("ams1", "iad1") as fakes:
        serve(fakes[0], "ember")
        serve(fakes[1], "coal")
        async with router(fakes) as running:
            fakes[0].behave = fakes[1].behave = hang
            with pytest.raises(TimeoutError):
                async with running.http.get(running.url + "/v1/models", timeout=ClientTimeout(total=0.3)):
                    pass
            await running.until(lambda: [fake.cancelled for fake in fakes] == [1, 1])
