"""The management API of the page and of `pilotlight manage`: its refusals, and the audit line of each change."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette

from pilotlight.edge_router.telemetry.status_routes import FAILURES
from pilotlight.page.management import KeyRequest, ManagementRoutes
from pilotlight.page.sessions import Sessions
from pilotlight.wire.credentials import Access
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.management import (
    Catalogue,
    FunctionStore,
    HubModel,
    HubQuery,
    SiteOperation,
    StorePage,
    StoreQuery,
)
from tests.asgi import Exchange, call

NOTES = FunctionStore("kv", "notes", "f", 10)


class ScriptedOperator:
    """An operator that records its calls and returns fixed results; the site "nowhere" does not exist."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def catalogues(self) -> dict[str, Catalogue | str]:
        return {}

    async def perform(self, site: str, operation: SiteOperation) -> None:
        if site == "nowhere":
            raise ApiError("not_found", "no such site")

    async def search_hub(self, site: str, query: HubQuery) -> tuple[HubModel, ...]:
        self.asked.append((site, query))
        return (HubModel("org/tiny"),)

    async def stores(self) -> dict[str, tuple[FunctionStore, ...] | str]:
        return {"ams1": (NOTES,), "iad1": "too old"}

    async def read_store(self, site: str, query: StoreQuery) -> StorePage:
        self.asked.append((site, query))
        return StorePage((), "", ("key",), (("a",),), "")


class ScriptedKeys:
    def list_keys(self) -> list[dict[str, Any]]:
        return []

    async def create(self, new: KeyRequest) -> str:
        return "pl-secret"

    async def revoke(self, name: str) -> None:
        raise ApiError("not_found", f"no key {name}")


async def line(minutes: float) -> str:
    return f"pilotlight join https://here:8443 pj-secret-{minutes:g}"


def app(operator: ScriptedOperator, joining: Callable[[float], Awaitable[str]] | None = line) -> Starlette:
    sessions = Sessions(Access([], is_required=False), "")
    routes = ManagementRoutes(operator, sessions, ScriptedKeys(), joining, clock=lambda: 5.0)
    return Starlette(routes=routes.routes(), exception_handlers=FAILURES)


async def get(served: Starlette, path: str) -> Exchange:
    return await call(served, path, method="GET", body=b"")


async def send(served: Starlette, method: str, path: str, **fields: Any) -> Exchange:
    body = json.dumps(fields).encode()
    return await call(served, path, method=method, body=body, content_type="application/json")


async def test_every_change_is_a_line_of_the_audit_without_its_secrets() -> None:
    served = app(ScriptedOperator())
    assert (await send(served, "POST", "/manage/sites/ams1", action="wake", model="m")).status == 202
    assert (await send(served, "POST", "/manage/sites/nowhere", action="drain")).status == 404
    assert (await send(served, "POST", "/manage/keys", name="alice")).json["key"] == "pl-secret"
    assert (await send(served, "DELETE", "/manage/keys/bob")).status == 404
    joined = await send(served, "POST", "/manage/join", minutes=5)
    assert (joined.status, joined.json["line"]) == (201, "pilotlight join https://here:8443 pj-secret-5")
    told = (await get(served, "/manage/audit")).json["changes"]
    assert [(one["who"], one["what"], one["outcome"]) for one in told] == [
        ("this machine", "wake m at ams1", "done"),
        ("this machine", "drain at nowhere", "no such site"),
        ("this machine", "create the key alice with models", "done"),
        ("this machine", "revoke the key bob", "no key bob"),
        ("this machine", "let one machine join within 5 minutes", "done"),
    ]
    assert "secret" not in json.dumps(told)


async def test_what_is_only_read_is_asked_of_the_site_and_no_change() -> None:
    operator = ScriptedOperator()
    served = app(operator)
    hub = await get(served, "/manage/hub?site=ams1&words=tiny%20llama")
    assert [one["source"] for one in hub.json["models"]] == ["org/tiny"]
    stores = (await get(served, "/manage/stores")).json
    assert ([one["name"] for one in stores["sites"]["ams1"]], stores["unread"]) == (["notes"], {"iad1": "too old"})
    page = await get(served, "/manage/stores/ams1?kind=kv&name=notes&limit=7&prefix=a")
    assert page.json["rows"] == [["a"]]
    query = StoreQuery("kv", "notes", prefix="a", limit=7)
    assert operator.asked == [("ams1", HubQuery("tiny llama")), ("ams1", query)]
    assert (await get(served, "/manage/audit")).json["changes"] == []


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/manage/hub?site=ams1", "words"),
        ("/manage/hub?site=ams1&words=", "words"),
        ("/manage/hub?site=ams1&words=a&colour=red", "colour"),
        ("/manage/stores/ams1?kind=r2&name=x", "kind"),
        ("/manage/stores/ams1?kind=kv&name=", "name"),
        ("/manage/stores/ams1?kind=kv&name=x&limit=1000", "limit"),
        ("/manage/stores/ams1?kind=kv&name=x&limit=many", "limit"),
    ],
)
async def test_an_invalid_query_is_refused_by_its_field(path: str, word: str) -> None:
    refused = await get(app(ScriptedOperator()), path)
    assert refused.status == 400
    assert f"`{word}`" in refused.json["error"]["message"] or f"`$.{word}`" in refused.json["error"]["message"]


async def test_no_line_is_made_for_longer_than_a_day_or_where_no_machine_may_join() -> None:
    assert (await send(app(ScriptedOperator()), "POST", "/manage/join", minutes=10_000)).status == 400
    closed = await send(app(ScriptedOperator(), None), "POST", "/manage/join")
    assert closed.status == 404
    assert "`pilotlight network init` makes one" in closed.json["error"]["message"]
