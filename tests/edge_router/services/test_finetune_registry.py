"""Fine-tunes at a router: real sites with fake engines, between which adapters are copied."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest

from pilotlight.edge_router.assembly import RouterLimits
from pilotlight.edge_router.backends.site_control import SiteAnswer
from pilotlight.edge_router.routing.data_places import DataPlaces
from pilotlight.edge_router.services.finetune_registry import FinetuneTimings, SiteFinetunes
from pilotlight.runtime.app import build_app
from pilotlight.runtime.models.finetunes import RECORD
from pilotlight.runtime.serve import serve_app
from pilotlight.wire.hop.finetunes import Finetune, FinetuneList
from pilotlight.wire.hop.headers import HOP_SECRET_ENV
from pilotlight.wire.http.listen import bind
from tests.edge_router.fakes import FakeSite, Router, router
from tests.fakes import FakeLauncher, write_model_directory
from tests.runtime.conftest import site_config
from tests.uploads import FORM, TINY, adapter_files, form

pytestmark = pytest.mark.process

PATH = "/client/v4/accounts/acc1/ai/finetunes"
ANN, BOB = {"authorization": "Bearer key-of-ann"}, {"authorization": "Bearer key-of-bob"}


class ServedSite(FakeSite):
    """A real site instead of a FakeSite; its disk persists over a stop."""

    def __init__(self, name: str, folder: Path, *, keeps: bool = True) -> None:
        super().__init__(name)
        write_model_directory(folder / "tiny")
        (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
        self.kept = folder / "kept"
        self._model = {"name": "tiny", "source": str(folder / "tiny"), "aliases": ["@test/tiny"]}
        self._finetunes = {"directory": str(self.kept)} if keeps else {}
        self._stop = asyncio.Event()
        self._server: asyncio.Task[Any] | None = None

    async def start(self) -> None:
        tables = {"models": [self._model], "finetunes": self._finetunes, "listen": {"port": self.port}}
        self.launcher = FakeLauncher()
        app = build_app(site_config(self.kept, name=self.name, **tables), launchers=[self.launcher])
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        served = serve_app(app, bind("127.0.0.1", self.port), stop=self._stop, on_ready=ready.set_result)
        self._server = asyncio.create_task(served)
        self.port = int((await asyncio.wait_for(ready, 60)).rpartition(":")[2])

    async def stop(self) -> None:
        self._stop.set()
        server, self._server = self._server, None
        if server is not None:
            await asyncio.wait_for(server, 60)

    @property
    def ids(self) -> set[str]:
        """Return the ids of its complete adapters."""
        return {path.parent.name for path in self.kept.glob("*/*/adapter_model.safetensors")}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOP_SECRET_ENV, "s3cret")


SOON = RouterLimits(finetunes=FinetuneTimings(look_every_s=0.02, try_again_s=0.1))


@asynccontextmanager
async def network(
    folder: Path, *, lacks: str = "", tables: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Router, dict[str, ServedSite]]]:
    sites = {name: ServedSite(name, folder / name, keeps=name != lacks) for name in ("ams1", "iad1")}
    async with AsyncExitStack() as stack:
        for site in sites.values():
            await site.start()
            stack.push_async_callback(site.stop)
        yield await stack.enter_async_context(router([*sites.values()], tables=tables, limits=SOON)), sites


async def told(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    async with answer:
        fields: dict[str, Any] = await answer.json()
    return {**fields, "status": answer.status}


async def create(running: Router, key: dict[str, str] = ANN, **body: Any) -> dict[str, Any]:
    fields = {"model": "@test/tiny", "name": "tone", **body}
    return await told(await running.http.post(running.url + PATH, json=fields, headers=key))


async def put(running: Router, id: str, name: str, content: bytes, key: dict[str, str] = ANN) -> dict[str, Any]:
    headers = {**key, "content-type": FORM}
    url = f"{running.url}{PATH}/{id}/finetune-assets"
    return await told(await running.http.post(url, data=form(content, name), headers=headers))


async def upload(running: Router, key: dict[str, str] = ANN, **body: Any) -> tuple[str, list[str]]:
    """Upload an adapter; return its id, and the router's messages about sites that lack it."""
    id = (await create(running, key, **body))["result"]["id"]
    answers = [await put(running, id, *each, key) for each in adapter_files().items()]
    assert [answer["status"] for answer in answers] == [200, 200], answers
    return id, answers[1]["messages"]


async def listed(running: Router, key: dict[str, str] = ANN) -> list[str]:
    found = await told(await running.http.get(running.url + PATH, headers=key))
    return [each["name"] for each in found["result"]]


async def ask(running: Router, lora: str, key: dict[str, str] = ANN) -> tuple[int, str]:
    url = f"{running.url}{PATH.removesuffix('finetunes')}run/@test/tiny"
    async with running.http.post(url, json={"prompt": "Hi", "lora": lora}, headers=key) as answer:
        return answer.status, answer.headers.get("x-pilotlight-site", "")


async def has_come(site: ServedSite, *ids: str) -> None:
    async with asyncio.timeout(30):
        while site.ids != {*ids}:
            await asyncio.sleep(0.01)


async def test_an_upload_comes_to_every_site_that_serves_its_base_and_is_removed_at_all(tmp_path: Path) -> None:
    async with network(tmp_path) as (running, sites):
        id, lacking = await upload(running)
        assert lacking == []
        assert [site.ids for site in sites.values()] == [{id}, {id}]
        assert (await listed(running), await listed(running, BOB)) == (["tone"], [])
        for lora in (id, "tone"):
            assert (await ask(running, lora))[0] == 200
        assert (await ask(running, "tone", BOB))[0] == 400
        url = f"{running.url}{PATH}/{id}"
        assert (await told(await running.http.delete(url, headers=BOB)))["status"] == 404
        refused = await put(running, id, *next(iter(adapter_files().items())), key=BOB)
        assert (refused["status"], refused["errors"][0]["message"]) == (404, f"there is no fine-tune {id!r}")
        removed = await told(await running.http.delete(url, headers=ANN))
        assert (removed["status"], removed["messages"]) == (200, [])
        assert [site.ids for site in sites.values()] == [set(), set()]
        assert (await ask(running, "tone"))[0] == 400


async def test_a_site_that_was_away_gets_what_it_missed(tmp_path: Path) -> None:
    async with network(tmp_path) as (running, sites):
        first, _ = await upload(running, name="first")
        await sites["iad1"].stop()
        await running.until_states(iad1="unhealthy")
        second, lacking = await upload(running, name="second")
        assert lacking == ["iad1 is unhealthy and will get it when it returns"]
        removed = await told(await running.http.delete(f"{running.url}{PATH}/{first}", headers=ANN))
        (still,) = removed["messages"]
        assert still.startswith("iad1 still has it, until it returns")
        assert sites["iad1"].ids == {first}
        assert [await ask(running, "second") for _ in range(4)] == [(200, "ams1")] * 4
        await sites["iad1"].start()
        await has_come(sites["iad1"], second)
        assert sites["ams1"].ids == {second}
        await sites["iad1"].stop()  # otherwise its tasks would count as the router's


async def test_requests_go_where_their_adapter_is(tmp_path: Path) -> None:
    async with network(tmp_path, lacks="iad1") as (running, sites):
        id, lacking = await upload(running)
        assert lacking == ["iad1 accepts no fine-tunes: finetunes.directory in its file is unset"]
        assert {await ask(running, lora) for lora in (id, "tone") * 4} == {(200, "ams1")}
        sites["iad1"].launcher.client.submits.clear()
        body = {"model": "tiny:tone", "messages": [{"role": "user", "content": "Hi"}]}
        for _ in range(4):
            async with running.http.post(f"{running.url}/v1/chat/completions", json=body, headers=ANN) as answer:
                assert answer.status == 200
        assert sites["iad1"].launcher.client.submits == []


async def test_an_accounts_adapters_stay_where_its_data_may_be(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"key-of-ann").hexdigest()
    tables = {
        "keys": [{"name": "ann", "key_sha256": digest, "account": "acme"}],
        "accounts": [{"name": "acme", "models": ["@test/tiny:t*", "@test/tiny"], "data": {"sites": ["iad1"]}}],
    }
    async with network(tmp_path, tables=tables) as (running, sites):
        id, lacking = await upload(running)
        assert (lacking, sites["ams1"].ids, sites["iad1"].ids) == ([], set(), {id})
        assert await ask(running, "tone") == (200, "iad1")
        refused = await create(running, name="other")
        assert (refused["status"], "not available to the account" in refused["errors"][0]["message"]) == (403, True)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"name": "tone"}, 409, "there is a fine-tune named 'tone' already"),
        ({"name": "../up"}, 400, "is not a valid name"),
        ({"name": 3}, 400, "must be an object such as"),
        ({"model": "nothing", "name": "new"}, 503, "no site that accepts fine-tunes and serves 'nothing'"),
    ],
)
async def test_what_cannot_be_created_is_named(tmp_path: Path, body: dict[str, Any], status: int, words: str) -> None:
    async with network(tmp_path, lacks="iad1") as (running, _):
        await create(running)
        refused = await create(running, **body)
        assert (refused["status"], words in refused["errors"][0]["message"]) == (status, True), refused


async def test_a_name_is_an_accounts_once_in_the_whole_network(tmp_path: Path) -> None:
    async with network(tmp_path) as (running, sites):
        await create(running)
        (holder,) = [name for name, site in sites.items() if [*site.kept.rglob(RECORD)]]
        async with asyncio.timeout(60):
            while await listed(running) != ["tone"]:
                await asyncio.sleep(0.01)
        running.proxy.selector.backends[holder].cordon("drained")
        refused = await create(running)
        assert "there is a fine-tune named 'tone' already" in refused["errors"][0]["message"]


async def test_a_file_that_is_too_large_or_no_adapter_is_refused_by_the_site_that_judges_it(tmp_path: Path) -> None:
    async with network(tmp_path) as (running, sites):
        id = (await create(running))["result"]["id"]
        refused = await put(running, id, "adapter_model.bin", b"x")
        assert (refused["status"], "a pickled file" in refused["errors"][0]["message"]) == (400, True)
        for name, content in adapter_files(columns=20).items():
            refused = await put(running, id, name, content)
        assert (refused["status"], "of another model" in refused["errors"][0]["message"]) == (400, True)
        assert [site.ids for site in sites.values()] == [set(), set()]


async def test_without_the_networks_secret_nothing_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOP_SECRET_ENV)
    async with network(tmp_path) as (running, _):
        refused = await create(running)
        assert (refused["status"], HOP_SECRET_ENV in refused["errors"][0]["message"]) == (404, True)


async def test_a_site_that_refuses_is_asked_again_after_a_pause() -> None:
    kept = FinetuneList("one", (Finetune("7", "owner", "", "tiny", "tone", is_whole=True),), ("7",))
    asked: list[str] = []

    async def exchange(method: str, site: str, path: str, **options: Any) -> SiteAnswer:
        asked.append(method)
        return SiteAnswer(200, msgspec.json.encode(kept)) if method == "GET" else SiteAnswer(503, b"{}")

    site: Any = SimpleNamespace(
        name="ams1", state="healthy", status=SimpleNamespace(finetunes="one"), round_trip=SimpleNamespace(ms=1.0)
    )
    nobodys: Any = SimpleNamespace(accounts=(), models=())
    orders: Any = SimpleNamespace(exchange=exchange, secret="")
    known = SiteFinetunes({"ams1": site}, DataPlaces(nobodys), orders, FinetuneTimings(0.0, 3600.0))
    running = asyncio.create_task(known.run())
    for _ in range(100):
        await asyncio.sleep(0)
    assert asked == ["GET", "DELETE", "GET"]
    running.cancel()
    await asyncio.wait([running])
