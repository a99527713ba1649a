"""/fn/NAME/ at a whole site with a real server: streams, uploads, refusals, status, and `pilotlight dev`."""

import asyncio
import io
import json
import logging
import sysconfig
import time
from collections.abc import AsyncIterator
from pathlib import Path
from textwrap import dedent
from urllib.parse import quote

import aiohttp
import pytest

from pilotlight.functions.cli.dev import DevOptions, dev_app, site_of, watch
from pilotlight.functions.manifest import load_manifest
from pilotlight.runtime.cli.init import init
from pilotlight.wire.hop.headers import HOP, HOP_SECRET_ENV, REQUEST_ID, Hop, sign_hop
from tests.asgi import call, eventually, running
from tests.runtime.conftest import SiteMaker

pytestmark = pytest.mark.process

SOURCE = """
import asyncio
from workers import WorkerEntrypoint, Response

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.url.endswith("/boom"):
            raise ValueError("it went wrong")
        if request.url.endswith("/echo"):
            return Response(request.body, headers={"x-length": request.headers.get("content-length", "none")})
        if request.url.endswith("/events"):
            async def events():
                for i in range(3):
                    yield f"data: {i}\\n\\n"
            return Response(events(), headers={"content-type": "text/event-stream"})
        return Response.json([request.method, request.url, request.headers.get("x-pilotlight-prefix")])
"""


def function_in(folder: Path, source: str = SOURCE, name: str = "f") -> Path:
    (folder / "src").mkdir(parents=True, exist_ok=True)
    (folder / "src/entry.py").write_text(dedent(source))
    (folder / "wrangler.toml").write_text(f'name = "{name}"\nmain = "src/entry.py"\n')
    return folder


def functions_table(tmp_path: Path, **more: object) -> dict[str, object]:
    return {
        "serve": [{"name": "f", "path": str(function_in(tmp_path / "f"))}],
        "state_dir": str(tmp_path / "state"),
        **more,
    }


FASTAPI = """
import asgi
from fastapi import FastAPI, Request
from workers import WorkerEntrypoint

app = FastAPI()

@app.get("/notes/")
def notes(request: Request):
    return [str(request.url), str(request.url_for("notes")), request.scope["path"], request.scope["root_path"]]

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await asgi.fetch(app, request, self.env)
"""
FLASK = """
import wsgi
from flask import Flask, request, url_for
from workers import WorkerEntrypoint

app = Flask(__name__)

@app.get("/notes/")
def notes():
    return [request.url, url_for("notes"), request.path, request.script_root]

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await wsgi.fetch(app, request, self.env)
"""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (FASTAPI, ["http://shop.example/fn/f/notes/", "http://shop.example/fn/f/notes/", "/fn/f/notes/", "/fn/f"]),
        (FLASK, ["http://shop.example/fn/f/notes/", "/fn/f/notes/", "/notes/", "/fn/f"]),
    ],
)
async def test_a_frameworks_links_and_redirects_stay_below_the_functions_path(
    make_site: SiteMaker, tmp_path: Path, source: str, told: list[str]
) -> None:
    layer = sysconfig.get_path("purelib")
    serve = [{"name": "f", "path": str(function_in(tmp_path / "f", source)), "layer": layer}]
    async with make_site(functions={"serve": serve, "state_dir": str(tmp_path / "state")}) as site:
        headers = {"host": "shop.example", "x-pilotlight-prefix": "/forged"}
        assert (await call(site.app, "/fn/f/notes/", **headers)).json == told
        redirect = await call(site.app, "/fn/f/notes", **headers)
        assert redirect.status in (307, 308)
        assert redirect.headers["location"] == "http://shop.example/fn/f/notes/"
        if source == FASTAPI:
            assert b"url: '/fn/f/openapi.json'" in (await call(site.app, "/fn/f/docs", **headers)).body


async def test_a_functions_path_may_hold_anything(make_site: SiteMaker, tmp_path: Path) -> None:
    async with make_site(functions=functions_table(tmp_path)) as site:
        for path in ("/fn/f", "/fn/f/", "/fn/f/a/b", "/fn/f/a\nb"):
            answer = await call(site.app, path)
            assert answer.status == 200, (path, answer.body)


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/fn/f/a/../b?c=/../d", "b?c=/../d"),
        ("/fn/f/%2e%2e/%2E./g/x", "g/x"),
        ("/fn/f/../../v1/models", "v1/models"),
        ("/fn/f/a/..", ""),
    ],
)
async def test_a_functions_url_has_no_dot_segments(path: str, seen: str, make_site: SiteMaker, tmp_path: Path) -> None:
    async with make_site(functions=functions_table(tmp_path)) as site:
        answer = await call(site.app, path)
        assert answer.json[1].split("/", 3)[3] == seen
        assert answer.json[2] == "/fn/f"


async def test_an_encoded_slash_stays_encoded(make_site: SiteMaker, tmp_path: Path) -> None:
    async with make_site(functions=functions_table(tmp_path)) as site:
        answer = await call(site.app, "/fn/f/a%2Fb/c%2f")
        assert answer.json[1].split("/", 3)[3] == "a%2Fb/c%2f"


@pytest.mark.parametrize("path", ["/fn/f%2Fb/c", "/fn/f%2Fb", "/fn%2Ff/c", "/fn%2ff"])
async def test_a_name_with_an_encoded_slash_is_no_functions(path: str, make_site: SiteMaker, tmp_path: Path) -> None:
    async with make_site(functions=functions_table(tmp_path)) as site:
        answer = await call(site.app, path)
        assert (answer.status, answer.json["error"]["code"]) == (404, "function_not_found")
        assert path in answer.json["error"]["message"]
        assert (await call(site.app, "/%66n/%66/c")).json[1].endswith("/c")


async def test_a_site_serves_its_functions_under_fn(make_server: SiteMaker, tmp_path: Path) -> None:
    async with make_server(functions=functions_table(tmp_path)) as server, aiohttp.ClientSession(server.url) as client:
        async with client.get("/fn/f/a/b?c=d") as answer:
            port = server.url.rpartition(":")[2]
            assert await answer.json() == ["GET", f"http://127.0.0.1:{port}/a/b?c=d", "/fn/f"]
            assert answer.headers["x-pilotlight-site"] == "ams1"
        async with client.get("/fn/f/events") as answer:
            assert await answer.read() == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        whole = json.dumps(["HEAD", f"{server.url}/", "/fn/f"])
        for path, length in (("/fn/f", str(len(whole))), ("/fn/f/events", None)):
            async with client.head(path) as answer:
                assert (answer.status, answer.headers.get("content-length")) == (200, length)
        async with client.get("/fn/missing/") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["message"] == "this site has no function named 'missing'"
        async with client.get("/status") as answer:
            published = (await answer.json())["functions"]
            assert published["isolation_tier"] in (1, 2)
            assert published["functions"][0]["name"] == "f"
        await server.is_idle()


async def test_a_request_says_where_it_was_answered_and_a_router_where_its_client_stands(
    make_site: SiteMaker, tmp_path: Path
) -> None:
    source = """
    from workers import Response, WorkerEntrypoint

    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            return Response.json([request.cf.colo, request.cf["httpProtocol"], request.cf.get("latitude")])
    """
    table = functions_table(tmp_path)
    function_in(tmp_path / "f", source)
    async with make_site(functions=table, hop_secret="secret") as site:
        place = {"x-client-geo": "52.3,4.8"}
        assert (await call(site.app, "/fn/f/", **place)).json == ["AMS", "HTTP/1.1", None]
        hop = {
            "x-pilotlight-hop": sign_hop("secret", time.time(), Hop("GET", "/fn/f/", "r", "ams1")),
            "x-request-id": "r",
        }
        assert (await call(site.app, "/fn/f/", **place, **hop)).json == ["AMS", "HTTP/1.1", "52.3"]


async def test_an_upload_streams_through_a_function_and_back(make_server: SiteMaker, tmp_path: Path) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"u" * 100_000

    async with make_server(functions=functions_table(tmp_path)) as server, aiohttp.ClientSession(server.url) as client:
        async with client.post("/fn/f/echo", data=body()) as answer:
            assert await answer.read() == b"u" * 3_000_000
        async with client.post("/fn/f/echo", data=b"small") as answer:
            assert await answer.read() == b"small"
            assert answer.headers["x-length"] == "5"
        async with client.post("/fn/f/echo", data=io.BytesIO(b"x" * 2_000_000)) as answer:
            assert len(await answer.read()) == 2_000_000


async def test_a_client_that_sends_without_reading_and_then_leaves_leaves_nothing_behind(
    make_server: SiteMaker, tmp_path: Path
) -> None:
    async with make_server(functions=functions_table(tmp_path)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
        writer.write(b"POST /fn/f/echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n")
        for _ in range(200):  # 40 MB, more than all buffers in both directions
            writer.write(b"u" * 200_000)
            try:
                await asyncio.wait_for(writer.drain(), 0.3)
            except TimeoutError:
                break
        assert writer.transport.get_write_buffer_size() > 0, "the response must be stuck"
        writer.transport.abort()
        await server.is_idle()


async def test_a_body_beyond_the_limit_is_refused(make_server: SiteMaker, tmp_path: Path) -> None:
    table = functions_table(tmp_path, request_mib=0.5)
    async with (
        make_server(functions=table) as server,
        aiohttp.ClientSession(server.url) as client,
        client.post("/fn/f/echo", data=io.BytesIO(b"x" * 2_000_000)) as answer,
    ):
        assert answer.status == 413


@pytest.mark.parametrize("shown", [False, True])
async def test_a_failure_is_shown_to_clients_only_where_the_site_says_so(
    make_site: SiteMaker, tmp_path: Path, shown: bool
) -> None:
    async with make_site(functions=functions_table(tmp_path, show_errors=shown)) as site:
        answer = await call(site.app, "/fn/f/boom")
        assert answer.status == 500
        error = json.loads(answer.body)["error"]
        assert ("it went wrong" in error["message"]) is shown
        assert any("entry.py" in line for line in error.get("traceback", [])) is shown
        assert error["code"] == "function_failed"


@pytest.mark.parametrize("pool", ["f+loaded", "f@0123456789abcdef"], ids=["dynamic worker", "version"])
async def test_a_dynamic_worker_is_its_loaders_and_a_version_has_its_share_of_the_traffic(
    make_site: SiteMaker, tmp_path: Path, pool: str
) -> None:
    """A version without traffic, or one that is still being tried, must not answer callers who know its digest."""
    async with make_site(functions=functions_table(tmp_path)) as site:
        functions = site.app.functions.served.functions
        functions.pools[pool] = functions.pools["f"]
        try:
            for path in (f"/fn/{pool}/", f"/fn/{quote(pool, safe='')}/"):
                assert (await call(site.app, path)).status == 404
        finally:
            del functions.pools[pool]


@pytest.mark.parametrize("shown", [False, True])
async def test_a_browser_gets_a_page_with_the_authors_frames_alone(
    make_site: SiteMaker, tmp_path: Path, shown: bool
) -> None:
    async with make_site(functions=functions_table(tmp_path, show_errors=shown)) as site:
        answer = await call(site.app, "/fn/f/boom", accept="text/html,application/xhtml+xml,*/*;q=0.8")
    page = answer.body.decode()
    assert (answer.status, answer.headers["content-type"]) == (500, "text/html; charset=utf-8")
    assert ("it went wrong" in page) is shown
    assert ("entry.py" in page) is shown
    assert "isolate_main" not in page


async def test_a_stream_that_fails_after_its_start_is_cut_and_its_author_gets_one_error(
    make_server: SiteMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    source = """
        from workers import WorkerEntrypoint, Response

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                async def pieces():
                    yield "first"
                    raise ValueError("in the middle")
                return Response(pieces())
    """
    serve = [{"name": "f", "path": str(function_in(tmp_path / "f", source))}]
    table = {"serve": serve, "state_dir": str(tmp_path / "state")}
    async with make_server(functions=table) as server, aiohttp.ClientSession(server.url) as client:
        async with client.get("/fn/f/") as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        told = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert [record.name for record in told] == ["pilotlight.function"]
        assert "ValueError: in the middle" in told[0].getMessage()
        assert "in pieces" in told[0].getMessage()
        assert "entry.py" in told[0].getMessage()
        assert "Error in ASGI" not in capfd.readouterr().err  # the HTTP server would log this with a traceback
        await server.is_idle()


async def test_a_client_cannot_say_what_its_address_is_but_a_router_of_the_network_can(
    make_server: SiteMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
        from workers import WorkerEntrypoint, Response

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                return Response(" ".join(value for key, value in request.headers.items() if key == "cf-connecting-ip"))
    """
    monkeypatch.setenv(HOP_SECRET_ENV, "hush")
    serve = [{"name": "f", "path": str(function_in(tmp_path / "f", source))}]
    table = {"serve": serve, "state_dir": str(tmp_path / "state")}
    async with make_server(functions=table) as server, aiohttp.ClientSession(server.url) as client:
        claimed = {"cf-connecting-ip": "192.0.2.7"}

        def signed(secret: str) -> dict[str, str]:
            return {
                **claimed,
                REQUEST_ID: "abc",
                HOP: sign_hop(secret, time.time(), Hop("GET", "/fn/f/", "abc", "ams1")),
            }

        for headers, status, address in (
            ({}, 200, "127.0.0.1"),
            (claimed, 200, "127.0.0.1"),
            ({"CF-Connecting-IP": "192.0.2.7", "x-forwarded-for": "192.0.2.7"}, 200, "127.0.0.1"),
            (signed("guessed"), 403, None),
            ({**claimed, HOP: "forged"}, 403, None),
            (signed("hush"), 200, "192.0.2.7"),
        ):
            async with client.get("/fn/f/", headers=headers) as answer:
                assert answer.status == status
                assert address is None or await answer.text() == address


async def test_without_a_secret_there_is_no_hop_and_no_caller_may_set_its_address(
    make_server: SiteMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(HOP_SECRET_ENV, raising=False)
    source = SOURCE.replace('request.headers.get("x-pilotlight-prefix")', 'request.headers.get("cf-connecting-ip")')
    serve = [{"name": "f", "path": str(function_in(tmp_path / "f", source))}]
    table = {"serve": serve, "state_dir": str(tmp_path / "state")}
    async with make_server(functions=table) as server, aiohttp.ClientSession(server.url) as client:
        for headers in ({"cf-connecting-ip": "192.0.2.7"}, {"cf-connecting-ip": "192.0.2.7", HOP: "forged"}):
            async with client.get("/fn/f/", headers=headers) as answer:
                assert (await answer.json())[2] == "127.0.0.1"


async def test_the_url_is_the_one_that_the_client_asked_for_where_a_router_of_the_network_says_so(
    make_server: SiteMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOP_SECRET_ENV, "hush" * 8)
    source = SOURCE.replace('request.headers.get("x-pilotlight-prefix")', 'request.headers.get("host")')
    serve = [{"name": "f", "path": str(function_in(tmp_path / "f", source))}]
    table = {"serve": serve, "state_dir": str(tmp_path / "state")}
    async with make_server(functions=table) as server, aiohttp.ClientSession(server.url) as client:
        told = {"x-pilotlight-origin": "https://api.example.com", REQUEST_ID: "r"}
        signed = {HOP: sign_hop("hush" * 8, time.time(), Hop("GET", "/fn/f/a", "r", "ams1", "c=1"))}
        for headers, origin in ((told | signed, "https://api.example.com"), (told, server.url)):
            async with client.get("/fn/f/a?c=1", headers=headers) as answer:
                assert await answer.json() == ["GET", f"{origin}/a?c=1", origin.partition("://")[2]]


async def test_a_function_speaks_neither_for_its_site_nor_for_its_neighbours_below_fn(
    make_server: SiteMaker, tmp_path: Path
) -> None:
    source = """
    from workers import Response, WorkerEntrypoint
    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            response = Response("spent", status=503)
            pairs = {"X-Pilotlight-Refusal": "draining", "X-Pilotlight-Site": "evil", "Transfer-Encoding": "chunked"}
            response.headers._pairs = [*pairs.items(), ("Set-Cookie", "a=b; Path=/"), ("Service-Worker-Allowed", "/")]
            return response
    """
    serve = [{"name": "f", "path": str(function_in(tmp_path / "f", source))}]
    table = {"serve": serve, "state_dir": str(tmp_path / "state")}
    async with make_server(functions=table) as server, aiohttp.request("GET", f"{server.url}/fn/f") as answer:
        assert (answer.status, await answer.text()) == (503, "spent")
        assert answer.headers.getall("x-pilotlight-site") == ["ams1"]
        assert answer.headers["set-cookie"] == "a=b; Path=/fn/f"
        names = {name.lower() for name in answer.headers}
        assert not {"x-pilotlight-refusal", "transfer-encoding", "service-worker-allowed"} & names


async def test_a_draining_site_takes_no_new_requests_for_functions(make_site: SiteMaker, tmp_path: Path) -> None:
    async with make_site(functions=functions_table(tmp_path)) as site:
        site.admission.drain()
        assert (await call(site.app, "/fn/f/")).status == 503


async def test_dev_serves_at_the_root_and_reloads_what_changes(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    init(folder, None)
    manifest = load_manifest(folder)
    said: list[str] = []
    app = dev_app(manifest, site_of(manifest, DevOptions("127.0.0.1", 0)))
    async with running(app):
        watching = asyncio.create_task(watch(app, folder, None, said.append))
        try:
            first = await call(app, "/some/where", host="here")
            assert first.body == b"Hello from http://here/some/where\n"
            await asyncio.sleep(0.3)
            entry = folder / "src/entry.py"
            entry.write_text(entry.read_text().replace("GREETING} from", "GREETING} again from"))
            await eventually(lambda: any("reloaded after entry.py" in line for line in said))
            assert (await call(app, "/x", host="here")).body == b"Hello again from http://here/x\n"
            (folder / "wrangler.toml").write_text("nmae = 1")
            await eventually(lambda: any("not reloaded" in line for line in said))
            assert (await call(app, "/x", host="here")).status == 200
        finally:
            watching.cancel()


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    from pilotlight.runtime.cli.cli_error import CliError

    init(tmp_path / "new", "one")
    assert load_manifest(tmp_path / "new").name == "one"
    with pytest.raises(CliError, match="there already"):
        init(tmp_path / "new", "two")


def test_init_makes_no_function_that_could_not_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pilotlight.runtime.cli.cli_error import CliError

    with pytest.raises(CliError, match="--name 'X Y': a function's name has at most 63 small letters"):
        init(tmp_path / "named", "X Y")
    init(tmp_path / ("Long and Odd! " * 7), None)
    assert load_manifest(tmp_path / ("Long and Odd! " * 7)).name.startswith("long-and-odd-long-")
    assert "pilotlight dev '" in capsys.readouterr().out
