"""Deployments at the router: versions, shares, and changes that happen whole or not at all."""

import asyncio
import errno
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.edge_router.backends.published_status import PublishedStatus
from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.requests.function_hosts import FunctionHosts
from pilotlight.edge_router.routing.data_places import AllowedSites
from pilotlight.edge_router.services.deployments import (
    SERVE_TIMEOUT_S,
    DeployGuard,
    DeploymentApi,
    rolled_back,
    with_version,
)
from pilotlight.edge_router.telemetry.status_routes import FAILURES
from pilotlight.wire.credentials import Access, Account, Key
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.bundles import digest_of, pack
from pilotlight.wire.hop.deployments import (
    MAX_VERSIONS,
    PATH,
    SERVE_PATH,
    TRY_PATH,
    Deployment,
    Share,
    Version,
    decode_deployments,
    encode,
)
from pilotlight.wire.hop.headers import FOR_ROUTERS, HOP, REQUEST_ID, Hop, sign_hop, signed_body
from pilotlight.wire.hop.status import FunctionsStatus
from tests.asgi import Exchange, call, eventually
from tests.edge_router.builders import network
from tests.full_disk import files_of_at_most

pytestmark = pytest.mark.process

TOKEN = {"authorization": "Bearer token"}


def version(number: int) -> Version:
    return Version(number, f"{number:064x}", 0.0)


def shares(deployment: Deployment) -> list[tuple[int, float]]:
    return [(share.number, share.percent) for share in deployment.shares]


def test_shares_follow_rollouts_and_rollbacks() -> None:
    first = with_version(Deployment("f", 0), version(1), 10)
    assert (first.revision, shares(first)) == (1, [(1, 100.0)])  # no other version can get a share
    second = with_version(first, version(2), 10)
    assert shares(second) == [(2, 10), (1, 90)]
    more = with_version(second, version(2), 60)
    assert shares(more) == [(2, 60), (1, 40)]
    third = with_version(more, version(3), 5)
    assert shares(third) == [(3, 5), (2, 95)]
    assert shares(rolled_back(third, None)) == [(2, 100.0)]
    assert shares(rolled_back(rolled_back(third, None), None)) == [(1, 100.0)]
    assert shares(rolled_back(third, 1)) == [(1, 100.0)]
    with pytest.raises(ApiError, match="has no version 9; it has 1, 2, 3"):
        rolled_back(third, 9)
    with pytest.raises(ApiError, match="no version before this one"):
        rolled_back(first, None)
    deleted = replace(third, shares=())
    with pytest.raises(ApiError, match=r"f was deleted, .* use --version 3, its newest, or an earlier one"):
        rolled_back(deleted, None)
    assert shares(rolled_back(deleted, 2)) == [(2, 100.0)]


def test_old_versions_are_forgotten_but_for_those_that_have_traffic() -> None:
    deployment = with_version(Deployment("f", 0, account="acme"), version(1), 100)
    for number in range(2, MAX_VERSIONS + 20):
        deployment = with_version(deployment, version(number), 10)
    numbers = [each.number for each in deployment.versions]
    newest = MAX_VERSIONS + 19
    assert numbers == [1, *range(newest - MAX_VERSIONS, newest + 1)], "1 has had most of the traffic all the time"
    assert (shares(deployment), deployment.account) == ([(newest, 10), (1, 90)], "acme")
    assert rolled_back(deployment, None).account == "acme"


def test_a_client_keeps_its_version_and_a_share_is_kept() -> None:
    keys = [f"session {n}" for n in range(4000)]
    before: set[str] = set()
    for percent in (10, 30, 100):
        deployment = Deployment("f", 1, (version(1), version(2)), (Share(2, percent), Share(1, 100 - percent)))
        new = {key for key in keys if (chosen := deployment.chosen(key)) is not None and chosen.number == 2}
        assert abs(len(new) / 40 - percent) < 2.5
        assert before <= new  # a client never goes back to an old version while the share of the new one grows
        before = new


def test_an_early_client_of_one_function_is_not_early_for_all() -> None:
    named = [Deployment(name, 1, (version(1), version(2)), (Share(2, 50), Share(1, 50))) for name in ("one", "two")]
    same = sum(named[0].chosen(key) == named[1].chosen(key) for key in map(str, range(1000)))
    assert 400 < same < 600


class FakeSite:
    """A fake site that gives scripted answers about the versions that it should try."""

    def __init__(self) -> None:
        self.tried: list[dict[str, Any]] = []
        self.heads: list[Mapping[str, str]] = []
        self.answer: dict[str, Any] = {"healthy": True}
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()  # deployments that it was asked to serve
        self.serves = asyncio.Event()
        self.serves.set()
        self.serving: dict[str, Any] = {"healthy": True}
        self.gate = asyncio.Event()
        self.gate.set()
        self.state, self.name, self.url = "healthy", "ams1", ""
        self.status = SimpleNamespace(functions=FunctionsStatus(2, takes_deployed=True))
        self.published = PublishedStatus()

    async def handle(self, request: web.Request) -> web.Response:
        assert request.headers[HOP]
        self.heads.append(request.headers)
        self.tried.append(await request.json())
        await self.gate.wait()
        return web.json_response(self.answer)

    async def serve(self, request: web.Request) -> web.Response:
        assert request.headers[HOP]
        self.told.put_nowait(await request.json())
        await self.serves.wait()
        return web.json_response(self.serving)


@asynccontextmanager
async def site_of(name: str) -> AsyncIterator[FakeSite]:
    site = FakeSite()
    site.name = name
    app = web.Application()
    app.router.add_post(TRY_PATH, site.handle)
    app.router.add_post(SERVE_PATH, site.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    listener = web.TCPSite(runner, "127.0.0.1", 0)
    await listener.start()
    site.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield site
    site.gate.set()
    site.serves.set()
    await runner.cleanup()


@pytest.fixture
async def fake() -> AsyncIterator[FakeSite]:
    async with site_of("ams1") as site:
        yield site


def known(name: str, *scopes: str, account: Account | None = None) -> Key:
    return Key(name, hashlib.sha256(name.encode()).hexdigest(), frozenset(scopes), account or Account(name))


def router_app(
    fake: FakeSite,
    tmp_path: Path,
    token: str = "token",
    keys: Sequence[Key] = (),
    clocks: SiteClocks | None = None,
    further: Sequence[FakeSite] = (),
    allowed: frozenset[str] | None = None,
    serve_timeout_s: float = SERVE_TIMEOUT_S,
    limited: str = "",
    **tables: Any,
) -> Starlette:
    """Return an application with a router's routes of deployments only.

    `allowed` are the sites for accounts' data; `limited` is an account with limits; `tables` are additional tables of the router's file.
    """
    guard = DeployGuard(token, "secret", Access(keys, is_required=False), clocks or SiteClocks(["ams1", "iad1"]))
    sites: dict[str, Any] = {site.name: site for site in (fake, *further)}
    where: Any = SimpleNamespace(of=lambda *names: None if allowed is None else AllowedSites(allowed, "of the account"))
    hosts = FunctionHosts(network({"ams1": "http://127.0.0.1:1"}, **tables))
    api = DeploymentApi(
        sites, guard, where, hosts, tmp_path / "router", is_limited=limited.__eq__, serve_timeout_s=serve_timeout_s
    )
    app = Starlette(routes=api.routes(), exception_handlers=FAILURES)
    app.state.api = api
    return app


@pytest.fixture
def app(fake: FakeSite, tmp_path: Path) -> Starlette:
    return router_app(fake, tmp_path)


def bundle(tmp_path: Path, text: str = "1") -> bytes:
    folder = tmp_path / f"bundle{text}"
    folder.mkdir(exist_ok=True)
    (folder / "wrangler.toml").write_text(text)
    return pack(folder)


async def put(app: Starlette, data: bytes, digest: str | None = None, key: str = "token") -> Any:
    headers = {"authorization": f"Bearer {key}"}
    return await call(app, f"{PATH}/bundles/{digest or digest_of(data)}", method="PUT", body=data, **headers)


async def deployed(
    app: Starlette, data: bytes, revision: int, key: str = "token", name: str = "f", **further: Any
) -> Any:
    body = {"digest": digest_of(data), "expected_revision": revision, **further}
    headers = {"authorization": f"Bearer {key}"}
    return await call(app, f"{PATH}/{name}", method="POST", body=json.dumps(body).encode(), **headers)


async def test_a_version_is_tried_and_then_has_its_traffic(app: Starlette, fake: FakeSite, tmp_path: Path) -> None:
    data = bundle(tmp_path)
    assert (await put(app, data)).status == 201
    answer = await deployed(app, data, 0, health_path="/up", message="first")
    assert answer.status == 201, answer.body
    assert fake.tried[0]["name"] == "f"
    assert fake.tried[0]["version"]["health_path"] == "/up"
    known = decode_deployments((await call(app, PATH, **TOKEN)).body)
    assert shares(known["f"]) == [(1, 100.0)]
    assert decode_deployments((await call(router_app(fake, tmp_path), PATH, **TOKEN)).body) == known
    fetched = await call(app, f"{PATH}/bundles/{digest_of(data)}", **TOKEN)
    assert fetched.body == data


async def test_a_full_disk_is_named_and_nothing_is_changed(app: Starlette, tmp_path: Path) -> None:
    data = bundle(tmp_path)
    with files_of_at_most(10):
        refused = await put(app, data)
    assert (refused.status, "this router's disk is full" in refused.json["error"]["message"]) == (503, True)
    assert (await put(app, data)).status == 201
    with files_of_at_most(10):
        refused = await deployed(app, data, 0)
    assert (refused.status, "this router's disk is full" in refused.json["error"]["message"]) == (503, True)
    assert (await deployed(app, data, 0)).status == 201


async def test_a_read_only_disk_is_named() -> None:
    async def write(request: Request) -> Response:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "deployments.json")

    refused = await call(Starlette(routes=[Route("/", write)], exception_handlers=FAILURES), "/")
    told = "this router's files cannot be written (Read-only file system): nothing was changed"
    assert (refused.status, refused.json["error"]["message"]) == (503, told)


async def test_accounts_and_names_of_secrets_are_shown_to_admins_only(app: Starlette, tmp_path: Path) -> None:
    data = bundle(tmp_path)
    await put(app, data)
    await deployed(app, data, 0)
    put_secret = await call(app, f"{PATH}/f/secrets/TOKEN", method="PUT", body=b"a value", **TOKEN)
    assert put_secret.status == 200, put_secret.body
    api: DeploymentApi = app.state.api
    ((looked,), (managed,)) = (json.loads(api.versions(is_admin=is_admin)) for is_admin in (False, True))
    assert managed["secret_names"] == ["TOKEN"]
    assert "account" in managed
    assert managed["versions"] == looked["versions"]
    assert looked.keys() == {"name", "revision", "versions", "shares", "home"}
    assert b"a value" not in api.versions(is_admin=True)


async def rolled_back_by(app: Starlette, revision: int) -> Any:
    body = json.dumps({"expected_revision": revision, "number": 1}).encode()
    return await call(app, f"{PATH}/f/rollback", method="POST", body=body, **TOKEN)


async def test_a_deploy_and_a_rollback_are_answered_when_the_sites_serve_them(
    app: Starlette, fake: FakeSite, tmp_path: Path
) -> None:
    await put(app, data := bundle(tmp_path))
    fake.serves.clear()
    for revision, change in enumerate((deployed(app, data, 0), rolled_back_by(app, 1)), 1):
        answering = asyncio.ensure_future(change)
        assert await fake.told.get() == {"name": "f", "revision": revision}
        known = decode_deployments((await call(app, PATH, **TOKEN)).body)  # what the site reads next
        assert known["f"].revision == revision
        assert not answering.done()
        fake.serves.set()
        answer = await answering
        assert (answer.status < 300, answer.json["unconfirmed"]) == (True, {})
        fake.serves.clear()


async def test_sites_that_do_not_confirm_are_named_and_cost_no_deploy(
    app: Starlette, fake: FakeSite, tmp_path: Path
) -> None:
    await put(app, data := bundle(tmp_path))
    fake.serving = {"healthy": False, "detail": "the router cannot be asked"}
    answer = await deployed(app, data, 0)
    assert (answer.status, answer.json["unconfirmed"]) == (201, {"ams1": "the router cannot be asked"})
    app = router_app(fake, tmp_path, serve_timeout_s=0.05)  # after a restart
    fake.serves.clear()
    answer = await rolled_back_by(app, 1)
    assert (answer.status, answer.json["unconfirmed"]) == (200, {"ams1": "no answer within 0.05 s"})
    fake.state = "unhealthy"  # this site reads the deployments when it returns
    assert (await rolled_back_by(app, 2)).json["unconfirmed"] == {}


async def test_a_function_that_is_deleted_has_no_traffic_and_is_brought_back(
    app: Starlette, fake: FakeSite, tmp_path: Path
) -> None:
    async def deleted(name: str, revision: int) -> Any:
        body = json.dumps({"expected_revision": revision}).encode()
        return await call(app, f"{PATH}/{name}", method="DELETE", body=body, **TOKEN)

    await put(app, data := bundle(tmp_path))
    await deployed(app, data, 0, keeps_data=True)
    assert (await deleted("f", 7)).status == 409
    gone = await deleted("f", 1)
    assert (gone.status, gone.json["shares"], gone.json["revision"], gone.json["home"]) == (200, [], 2, "ams1")
    assert [fake.told.get_nowait()["revision"] for _ in range(2)] == [1, 2], "sites are told"
    for name, revision in (("f", 2), ("none", 0)):
        assert (await deleted(name, revision)).status == 404
    back = await rolled_back_by(app, 2)
    assert (back.status, back.json["shares"], back.json["home"]) == (200, [{"number": 1, "percent": 100.0}], "ams1")


async def test_a_rollback_never_leads_to_a_version_that_was_rolled_back(app: Starlette, tmp_path: Path) -> None:
    async def rolled_back_to() -> Any:
        revision = json.loads((await call(app, f"{PATH}/f", **TOKEN)).body)["revision"]
        body = json.dumps({"expected_revision": revision}).encode()
        answer = await call(app, f"{PATH}/f/rollback", method="POST", body=body, **TOKEN)
        return answer.json["shares"] if answer.status == 200 else answer.json["error"]["message"]

    for number, revision in ((1, 0), (2, 1)):
        await put(app, data := bundle(tmp_path, str(number)))
        assert (await deployed(app, data, revision)).status == 201
    assert await rolled_back_to() == [{"number": 1, "percent": 100.0}]
    await put(app, data := bundle(tmp_path, "3"))
    assert (await deployed(app, data, 3)).status == 201
    # the version that version 3 replaced is 1, not 2
    assert await rolled_back_to() == [{"number": 1, "percent": 100.0}]
    assert "has no version before this one" in await rolled_back_to()


async def test_an_unhealthy_version_takes_no_traffic(app: Starlette, fake: FakeSite, tmp_path: Path) -> None:
    data = bundle(tmp_path)
    await put(app, data)
    fake.answer = {"healthy": False, "detail": "NameError: name 'x' is not defined"}
    answer = await deployed(app, data, 0)
    assert answer.status == 422
    assert "takes no traffic: at ams1 NameError" in answer.json["error"]["message"]
    assert json.loads((await call(app, PATH, **TOKEN)).body) == []
    fake.state = "unhealthy"
    assert (await deployed(app, data, 0)).status == 503


async def test_a_function_that_keeps_data_runs_at_one_site_and_so_does_who_calls_it(
    fake: FakeSite, tmp_path: Path
) -> None:
    async with site_of("iad1") as second, site_of("sin1") as plain:
        plain.status.functions = FunctionsStatus(2)  # this site reads no router's deployments
        app = router_app(fake, tmp_path, further=(second, plain))
        await put(app, data := bundle(tmp_path))

        async def revision(name: str) -> int:
            found: int = (await call(app, f"{PATH}/{name}", **TOKEN)).json["revision"]
            return found

        async def deploy(name: str, **further: Any) -> tuple[str, list[str]]:
            """Return the home or the error, and the sites that tried the version."""
            for site in (fake, second, plain):
                site.tried.clear()
            answer = await deployed(app, data, await revision(name), name=name, **further)
            told = answer.json["home"] if answer.status == 201 else answer.json["error"]["message"]
            return told, [site.name for site in (fake, second, plain) if site.tried]

        async def homes() -> dict[str, str]:
            known = decode_deployments((await call(app, PATH, **TOKEN)).body)
            return {name: deployment.home for name, deployment in known.items()}

        assert await deploy("front", services=["notes"]) == ("", ["ams1", "iad1"])
        assert await deploy("outer", services=["front"]) == ("", ["ams1", "iad1"])
        assert await deploy("notes", keeps_data=True, home="iad1") == ("iad1", ["iad1"])
        assert await homes() == {"front": "iad1", "outer": "iad1", "notes": "iad1"}
        names = [[site.told.get_nowait()["name"] for _ in range(3)] for site in (fake, second)]
        assert names == 2 * [["front", "outer", "notes"]], "sites that do not serve a function redirect its callers"
        assert fake.published.functions == {"front", "outer"}
        assert second.published.functions == {"front", "outer", "notes"}
        assert await deploy("more", keeps_data=True) == ("iad1", ["iad1"]), "the site with most data"
        assert await deploy("notes", keeps_data=True) == ("iad1", ["iad1"]), "the home does not change"
        assert await deploy("notes") == ("iad1", ["iad1"]), "older versions have their data there"
        told = "own calls notes, which runs only at iad1, because its data is there: deploy with --home iad1"
        assert await deploy("own", home="ams1", services=["notes"]) == (told, [])
        for name in ("sin1", "nowhere"):
            told = f"{name!r} is not a healthy site that accepts deployed functions and may have their data; choose one of: ams1, iad1"
            assert await deploy("own", home=name) == (told, [])
        assert await deploy("own", keeps_data=True, home="") == ("", ["ams1", "iad1"]), "the author asked for no home"
        second.state = "unhealthy"
        told, tried = await deploy("notes", keeps_data=True)
        assert told.startswith("notes runs only at iad1, because its data is there, and that site is not healthy")
        assert tried == []
        assert await deploy("notes", keeps_data=True, home="ams1") == ("ams1", ["ams1"])
        body = json.dumps({"expected_revision": await revision("notes")}).encode()
        answer = await call(app, f"{PATH}/notes/rollback", method="POST", body=body, **TOKEN)
        assert (answer.status, answer.json["home"]) == (200, "ams1"), "data belongs to the function, not to a version"


async def test_a_functions_home_is_where_its_accounts_data_may_lie(fake: FakeSite, tmp_path: Path) -> None:
    async with site_of("iad1") as second:
        app = router_app(fake, tmp_path, further=(second,), allowed=frozenset(["iad1"]))
        await put(app, data := bundle(tmp_path))
        assert (await deployed(app, data, 0, name="f", keeps_data=True)).json["home"] == "iad1"
        refused = await deployed(app, data, 0, name="g", home="ams1")
        assert (refused.status, "choose one of: iad1" in refused.json["error"]["message"]) == (400, True)
        second.state = "unhealthy"
        refused = await deployed(app, data, 0, name="g", keeps_data=True)
        assert (refused.status, "may have the data of g" in refused.json["error"]["message"]) == (503, True)


async def test_of_two_deploys_at_once_one_is_refused(app: Starlette, fake: FakeSite, tmp_path: Path) -> None:
    first, second = bundle(tmp_path, "1"), bundle(tmp_path, "2")
    await put(app, first)
    await put(app, second)
    fake.gate.clear()
    both = [asyncio.ensure_future(deployed(app, data, 0)) for data in (first, second)]
    while len(fake.tried) < 2:
        await asyncio.sleep(0.01)
    fake.gate.set()
    answers = sorted(await asyncio.gather(*both), key=lambda answer: answer.status)
    assert [answer.status for answer in answers] == [201, 409]
    assert "another deployment came first" in answers[1].json["error"]["message"]
    assert json.loads((await call(app, f"{PATH}/f", **TOKEN)).body)["revision"] == 1


async def test_a_deploy_keeps_the_bundles_of_those_in_progress(app: Starlette, fake: FakeSite, tmp_path: Path) -> None:
    slow, fast = bundle(tmp_path, "1"), bundle(tmp_path, "2")
    await put(app, slow)
    await put(app, fast)
    held, opened = asyncio.Event(), fake.gate
    fake.gate = held
    trying = asyncio.ensure_future(deployed(app, slow, 0))
    await eventually(lambda: bool(fake.tried))
    fake.gate = opened
    assert (await deployed(app, fast, 0, name="g")).status == 201
    held.set()
    assert (await trying).status == 201
    assert (await call(app, f"{PATH}/bundles/{digest_of(slow)}", **TOKEN)).body == slow


async def test_a_deploy_that_is_cut_off_leaves_nothing(app: Starlette, tmp_path: Path) -> None:
    data = bundle(tmp_path)
    headers = {**TOKEN, "content-length": str(len(data))}
    exchange = Exchange(app, "PUT", f"{PATH}/bundles/{digest_of(data)}", data[:100], headers, is_whole=False)
    exchange.disconnect()
    await exchange.done()
    assert [path for path in (tmp_path / "router").rglob("*") if path.is_file()] == []
    assert (await deployed(app, data, 0)).status == 400
    for wrong in (data[:-512] + b"\1" * 512, b"", b"no tar"):
        assert (await put(app, wrong, digest_of(data))).status == 400
    assert (await put(app, b"no tar")).status == 400
    assert [path for path in (tmp_path / "router").rglob("*") if path.is_file()] == []


async def test_only_the_token_deploys_and_sites_may_read(app: Starlette, fake: FakeSite, tmp_path: Path) -> None:
    data = bundle(tmp_path)
    path = f"{PATH}/bundles/{digest_of(data)}"
    for headers, why in (
        ({}, "set PILOTLIGHT_DEPLOY_TOKEN"),
        ({"authorization": "Bearer wrong"}, "the deploy token is wrong; PILOTLIGHT_DEPLOY_TOKEN must have"),
        ({"authorization": "token"}, "set PILOTLIGHT_DEPLOY_TOKEN"),
    ):
        for refused in (await call(app, path, method="PUT", body=data, **headers), await call(app, PATH, **headers)):
            assert (refused.status, why in refused.json["error"]["message"]) == (403, True)
    await put(app, data)
    signed = {REQUEST_ID: "id", HOP: sign_hop("secret", time.time(), Hop("GET", path, "id", FOR_ROUTERS))}
    assert (await call(app, path, **signed)).body == data
    assert (await call(app, path, method="PUT", body=data, **signed)).status == 403
    off = router_app(fake, tmp_path, token="", keys=[known("asker", "models")])
    answer = await call(off, PATH, authorization="Bearer ")
    assert answer.status == 404
    assert "PILOTLIGHT_DEPLOY_TOKEN" in answer.json["error"]["message"]


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_a_site_whose_clock_is_wrong_takes_deployments(fake: FakeSite, tmp_path: Path, ahead_s: float) -> None:
    clocks = SiteClocks(["ams1", "iad1"])
    app = router_app(fake, tmp_path, clocks=clocks)
    path, its_time_s = f"{PATH}/bundles/{digest_of(data := bundle(tmp_path))}", time.time() + ahead_s
    signed = {REQUEST_ID: "id", HOP: sign_hop("secret", its_time_s, Hop("GET", path, "id", FOR_ROUTERS))}
    await put(app, data)
    assert (await call(app, path, **signed)).status == 403, "a clock that no site has sent"
    clocks.record("ams1", its_time_s)
    assert (await deployed(app, data, 0)).status == 201
    hop = Hop("POST", TRY_PATH, fake.heads[0][REQUEST_ID], "ams1")
    assert signed_body(fake.heads[0][HOP], "secret", its_time_s, hop) is not None
    assert (await call(app, path, **signed)).body == data


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"digest": "x", "expected_revision": 0}', b'{"digest": "' + b"0" * 64 + b'", "expected_revision": 0, "percent": 0}',
     b'{"digest": "' + b"0" * 64 + b'", "expected_revision": 0, "oops": 1}', b"x" * 100_000],
)  # fmt: skip
async def test_nonsense_is_refused(app: Starlette, body: bytes) -> None:
    assert (await call(app, f"{PATH}/f", method="POST", body=body, **TOKEN)).status in (400, 413)
    assert (await call(app, f"{PATH}/F..", method="POST", body=body, **TOKEN)).status in (400, 413)
    assert (await call(app, f"{PATH}/bundles/..%2fx", **TOKEN)).status in (400, 404)


def test_what_is_kept_can_be_read_again() -> None:
    deployment = Deployment("f", 3, (version(1), version(2)), (Share(2, 10.0), Share(1, 90.0)))
    assert decode_deployments(encode([deployment])) == {"f": deployment}
    with pytest.raises(msgspec.ValidationError):
        decode_deployments(encode([{"name": "../f", "revision": 1}]))


@pytest.mark.parametrize("secret", ["a secret", ""])
def test_the_deploy_token_is_never_sent_to_a_site_and_signs_where_there_is_no_secret(secret: str) -> None:
    guard = DeployGuard("a token", secret, Access([], is_required=False), SiteClocks(["ams1"]))
    headers = guard.signed("POST", TRY_PATH, "ams1", b"body")
    assert "a token" not in str(headers)
    hop = Hop("POST", TRY_PATH, headers[REQUEST_ID], "ams1")
    assert signed_body(headers[HOP], secret or "a token", time.time(), hop) == hashlib.sha256(b"body").hexdigest()
    assert signed_body(headers[HOP], secret or "a token", time.time(), replace(hop, site="iad1")) is None


async def test_a_function_is_its_accounts_and_no_other_account_touches_it(fake: FakeSite, tmp_path: Path) -> None:
    keys = [
        known("alice", "deploy"),
        known("bob", "deploy", account=Account("bob", None, ("bobs-*",))),
        known("root", "admin"),
        known("asker", "models"),
    ]
    app, data = router_app(fake, tmp_path, keys=keys, limited="alice"), bundle(tmp_path)
    assert (await put(app, data, key="alice")).status == 201
    assert (await deployed(app, data, 0, key="alice")).status == 201
    url, bob = f"{PATH}/f", {"authorization": "Bearer bob"}
    back = json.dumps({"expected_revision": 1, "number": 1}).encode()
    for answer in (
        await deployed(app, data, 1, key="bob"),
        await deployed(app, data, 0, key="bob"),
        await call(app, url, **bob),
        await call(app, url + "/tail", **bob),
        await call(app, url + "/logs", **bob),
        await call(app, url + "/rollback", method="POST", body=back, **bob),
    ):
        assert (answer.status, answer.json["error"]["code"]) == (403, "forbidden")
        assert "belongs to another account" in answer.json["error"]["message"]
    refused = await deployed(app, data, 0, key="bob", name="web")
    assert (refused.status, "may deploy bobs-*" in refused.json["error"]["message"]) == (403, True)
    assert (await call(app, PATH, **bob)).json == []
    assert (await call(app, f"{PATH}/bobs-own/logs", **bob)).status == 404, "the name may be a site's own function"
    assert (await call(app, f"{PATH}/bundles/{digest_of(data)}", **bob)).status == 404
    assert (await put(app, data, key="asker")).status == 403
    assert (await put(app, data, key="nobody")).status == 401
    (seen,) = (await call(app, PATH, authorization="Bearer alice")).json
    assert (seen["name"], seen["account"], seen["is_limited"]) == ("f", "alice", True)
    for operator in ("root", "token"):
        revision = (await call(app, url, authorization=f"Bearer {operator}")).json["revision"]
        changed = await deployed(app, data, revision, key=operator)
        assert (changed.status, changed.json["account"]) == (201, "alice"), "the owner does not change"
    tried = {(each["account"], each["is_limited"]) for each in fake.tried}
    assert tried == {("alice", True)}, "health calls are the owner's, too"
    again = router_app(fake, tmp_path, keys=keys)
    assert (await call(again, url, **bob)).status == 403, "and after a restart"


async def test_routes_of_a_version_are_checked_before_its_trial_and_published_with_its_address(
    fake: FakeSite, tmp_path: Path
) -> None:
    accounts = [{"name": "alice", "hosts": ["*.alice.example"]}]
    tables = {"accounts": accounts, "functions": {"domain": "fn.example"}}
    app, data = router_app(fake, tmp_path, keys=[known("alice", "deploy")], **tables), bundle(tmp_path)
    await put(app, data, key="alice")
    refused = await deployed(app, data, 0, key="alice", routes=["other.example/*"])
    assert (refused.status, "may not take the route other.example" in refused.json["error"]["message"]) == (403, True)
    assert fake.tried == []
    made = await deployed(app, data, 0, key="alice", routes=["www.alice.example/*"])
    assert (made.status, made.json["addresses"]) == (201, ["www.alice.example/*", "f.fn.example"])
    taken = await deployed(app, data, 0, key="token", name="g", routes=["www.alice.example/*"])
    assert (taken.status, "is the function f's already" in taken.json["error"]["message"]) == (409, True)
