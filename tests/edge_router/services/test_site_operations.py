"""Operations on the sites of a network, through its router."""

import json
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pilotlight.edge_router.backends.discovery import DRAINED
from pilotlight.edge_router.backends.site_control import SiteAnswer
from pilotlight.edge_router.services.site_operations import SiteOperations
from pilotlight.sites.config import drained_sites_file
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.management import (
    CATALOGUE_PATH,
    HUB_PATH,
    OPERATION_PATH,
    STORES_PATH,
    Catalogue,
    FunctionStore,
    HubModel,
    HubQuery,
    SiteOperation,
    StorePage,
    StoreQuery,
)
from tests.edge_router.fakes import Router, answer, router, sites
from tests.edge_router.telemetry.test_activity import whole
from tests.full_disk import files_of_at_most

pytestmark = pytest.mark.process


async def act(running: Router, site: str, **fields: str) -> tuple[int, Any]:
    async with running.http.post(f"{running.url}/manage/sites/{site}", json=fields) as told:
        return told.status, await told.json()


async def test_a_site_that_is_drained_here_gets_nothing_new_until_it_is_resumed() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes) as running:
        assert (await act(running, "ams1", action="drain"))[0] == 202
        for _ in range(4):
            async with running.chat() as told:
                assert "site=iad1;" in told.headers["x-pilotlight-route"]
        (row,) = [site for site in (await whole(running))["sites"] if site["name"] == "ams1"]
        assert (row["state"], row["detail"]) == ("draining", DRAINED.format("ams1"))
        running.edge.reload(running.edge.configured)  # SIGHUP
        async with router(fakes, until={"ams1": "draining", "iad1": "healthy"}):
            pass  # another worker, or the router after a restart
        assert (await act(running, "ams1", action="resume"))[0] == 202
        await running.until_states(ams1="healthy")
        async with router(fakes):
            pass


async def test_a_drain_that_cannot_be_stored_is_refused() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        file = drained_sites_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("[")
        status, told = await act(running, "ams1", action="drain")
        assert (status, told["error"]["code"]) == (500, "internal_error")
        assert "remove it" in told["error"]["message"]
        file.write_text("[]")
        with files_of_at_most(0):
            status, told = await act(running, "ams1", action="drain")
        assert (status, told["error"]["code"]) == (503, "overloaded")
        await running.until_states(ams1="healthy")


async def test_an_operation_reaches_the_site_and_is_a_line_of_the_audit() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(202, {})
        assert (await act(running, "ams1", action="run", source="/models/m", model="m"))[0] == 202
        assert [request.path for request in fakes[0].seen][-1] == OPERATION_PATH
        assert msgspec.json.decode(fakes[0].bodies[-1], type=SiteOperation) == SiteOperation("run", "m", "/models/m")
        fakes[0].behave = answer(409, {"error": {"message": "m is in use"}})
        status, told = await act(running, "ams1", action="remove", model="m\nx")
        assert (status, told["error"]["code"]) == (409, "conflict")
        async with running.http.get(f"{running.url}/manage/audit") as audit:
            lines = [(each["what"], each["outcome"]) for each in (await audit.json())["changes"]]
        assert lines == [("run /models/m m at ams1", "done"), ("remove m?x at ams1", "ams1: m is in use")]


async def test_catalogues_of_sites_are_returned_beside_why_one_is_missing() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(200, json.loads(msgspec.json.encode(Catalogue())))
        fakes[1].behave = answer(403, {"error": {"message": "not signed"}})
        async with running.http.get(f"{running.url}/manage/catalogue") as told:
            found = await told.json()
        assert found["sites"] == {"ams1": {"models": [], "downloads": [], "devices": []}}
        assert found["unread"] == {"iad1": "not signed"}
        assert CATALOGUE_PATH in [request.path for request in fakes[0].seen]


async def test_the_hub_is_searched_from_the_site_that_was_named() -> None:
    async with sites("ams1", "iad1") as fakes, router(fakes) as running:
        fakes[1].behave = answer(200, json.loads(msgspec.json.encode([HubModel("org/tiny", "LlamaForCausalLM")])))
        async with running.http.get(f"{running.url}/manage/hub?site=iad1&words=tiny") as told:
            assert [one["source"] for one in (await told.json())["models"]] == ["org/tiny"]
        assert fakes[1].seen[-1].path == HUB_PATH
        assert msgspec.json.decode(fakes[1].bodies[-1], type=HubQuery) == HubQuery("tiny")
        fakes[1].behave = answer(503, {"error": {"message": "the hub cannot be searched: no route"}})
        async with running.http.get(f"{running.url}/manage/hub?site=iad1&words=tiny") as told:
            error = (await told.json())["error"]
        assert (error["code"], error["message"]) == ("overloaded", "iad1: the hub cannot be searched: no route")
        async with running.http.get(f"{running.url}/manage/hub?site=nowhere&words=tiny") as told:
            assert told.status == 404


async def test_a_store_is_read_at_its_site() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        async with running.http.get(f"{running.url}/manage/stores") as told:
            assert await told.json() == {"sites": {}, "unread": {}}, "it serves no functions"
        page = StorePage(("t",), "t", ("a",), (("1",), (None,)), "50")
        fakes[0].behave = answer(200, json.loads(msgspec.json.encode(page)))
        async with running.http.get(f"{running.url}/manage/stores/ams1?kind=d1&name=shop&table=t") as told:
            assert (await told.json())["rows"] == [["1"], [None]]
        assert fakes[0].seen[-1].path == STORES_PATH
        assert msgspec.json.decode(fakes[0].bodies[-1], type=StoreQuery) == StoreQuery("d1", "shop", "t")
        fakes[0].behave = answer(404, {"error": {"message": "no d1 store"}})
        async with running.http.get(f"{running.url}/manage/stores/ams1?kind=d1&name=other") as told:
            assert (told.status, (await told.json())["error"]["message"]) == (404, "ams1: no d1 store")
        fakes[0].behave = answer(200, {"strange": True})
        async with running.http.get(f"{running.url}/manage/stores/ams1?kind=d1&name=shop") as told:
            assert "cannot be read" in (await told.json())["error"]["message"]


async def test_stores_are_listed_of_healthy_sites_that_serve_functions() -> None:
    stores = msgspec.json.encode([FunctionStore("kv", "notes", "f", 10)])

    class Orders:
        async def exchange(self, method: str, site: str, path: str, **_: object) -> SiteAnswer:
            assert (method, path) == ("GET", STORES_PATH)
            return SiteAnswer(200, stores) if site == "ams1" else SiteAnswer(0, b"no answer")

    def backend(state: str, functions: object) -> Any:
        return SimpleNamespace(state=state, status=SimpleNamespace(functions=functions))

    backends = {"ams1": backend("healthy", 1), "iad1": backend("healthy", 1), "sin1": backend("healthy", None)}
    backends |= {"gru1": backend("unhealthy", 1), "new1": SimpleNamespace(state="healthy", status=None)}
    found = await SiteOperations(backends, cast("Any", Orders()), cast("Any", None)).stores()
    assert found == {"ams1": (FunctionStore("kv", "notes", "f", 10),), "iad1": "no answer"}


@pytest.mark.parametrize(
    ("answered", "timeline", "order"),
    [
        (SiteAnswer(200, b"{}"), "b'{}'", "None"),
        (SiteAnswer(202, b"{}"), "upstream_timeout: ams1: {}", "None"),
        (SiteAnswer(0, b"no answer"), "upstream_timeout: ams1: no answer", "upstream_timeout: ams1: no answer"),
        (SiteAnswer(409, b'{"error": {"message": "no"}}'), "upstream_timeout: ams1: no", "conflict: ams1: no"),
        (SiteAnswer(300, b"x" * 500), "upstream_timeout: ams1: " + "x" * 200, "invalid_request: ams1: " + "x" * 200),
    ],
)
async def test_an_operator_hears_what_a_site_says_or_why_it_does_not(
    answered: SiteAnswer, timeline: str, order: str
) -> None:
    class Orders:
        async def exchange(self, *_: object, **__: object) -> SiteAnswer:
            return answered

    async def told(work: Awaitable[object]) -> str:
        try:
            return str(await work)
        except ApiError as error:
            return f"{error.word}: {error.message}"

    backends = {"ams1": cast("Any", SimpleNamespace(name="ams1"))}
    operations = SiteOperations(backends, cast("Any", Orders()), cast("Any", None))
    assert await told(operations.timeline("ams1")) == timeline
    assert await told(operations.perform("ams1", SiteOperation("wake", "ember"))) == order


async def test_operations_that_make_no_sense_are_refused_by_name() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        assert (await act(running, "nowhere", action="drain"))[1]["error"]["code"] == "not_found"
        assert "explode" in (await act(running, "ams1", action="explode"))[1]["error"]["message"]
        assert "`colour`" in (await act(running, "ams1", action="run", colour="red"))[1]["error"]["message"]
        form = {"data": b'{"action": "drain"}', "headers": {"content-type": "text/plain"}}
        async with running.http.post(f"{running.url}/manage/sites/ams1", **form) as told:
            assert told.status == 400, "what a form of another page can send"
        strange = {"json": {"action": "drain"}, "headers": {"origin": "https://evil.example"}}
        async with running.http.post(f"{running.url}/manage/sites/ams1", **strange) as told:
            assert told.status == 403
        async with running.http.get(f"{running.url}/page/history?range=1y") as told:
            assert told.status == 400
