"""A function at its own host name, through a real router to a real site: it gets all paths, cookies and redirects."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from pilotlight.edge_router.app import build_app
from pilotlight.edge_router.serve import serving
from pilotlight.sites.config import ConfigError
from pilotlight.wire.hop.headers import HOP_SECRET_ENV, OWN_HOST
from pilotlight.wire.http.listen import bind, url_of
from tests.asgi import eventually
from tests.edge_router.builders import network
from tests.functions.routes.test_invocations import function_in
from tests.runtime.conftest import SiteMaker

SOURCE = """
    from workers import Response, WorkerEntrypoint
    from js import WebSocketPair

    class Default(WorkerEntrypoint):
        async def fetch(self, request):
            if request.headers.get("upgrade") == "websocket":
                client, server = WebSocketPair.new().object_values()
                server.accept()
                server.send(request.url)
                return Response(None, status=101, web_socket=client)
            headers = {"set-cookie": "a=b; Path=/", "x-prefix": str(request.headers.get("x-pilotlight-prefix"))}
            return Response(request.url, headers=headers)
"""


@pytest.fixture
async def url(make_server: SiteMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setenv(HOP_SECRET_ENV, "hush" * 8)
    monkeypatch.setenv("PILOTLIGHT_ROUTER_STATE", str(tmp_path / "router"))
    function_in(tmp_path / "f", SOURCE)
    (tmp_path / "f" / "public" / "sub").mkdir(parents=True)
    (tmp_path / "f" / "public" / "sub" / "index.html").write_text("a page")
    with (tmp_path / "f" / "wrangler.toml").open("a") as manifest:
        manifest.write('[assets]\ndirectory = "public"\n')
    table = {"serve": [{"name": "f", "path": str(tmp_path / "f")}], "state_dir": str(tmp_path / "state")}
    hosts = [{"pattern": "shop.example/*", "function": "f"}]
    async with make_server(functions=table) as site:
        config = network({"ams1": site.url}, hosts=hosts, functions={"domain": "fn.example"})
        app, listener = build_app(config), bind("127.0.0.1", 0)
        base = url_of(listener)
        async with serving(app, config, listener):
            await eventually(lambda: app.edge.backends["ams1"].state == "healthy")
            yield base


async def test_a_function_has_its_host_to_itself(url: str) -> None:
    async with aiohttp.ClientSession(url) as client:
        for host in ("shop.example", "f.fn.example"):
            for path in ("/", "/v1/models", "/healthz", "/a%20b?c=1"):
                async with client.get(path, headers={"host": host}) as answer:
                    assert await answer.text() == f"http://{host}{path}"
                    assert answer.headers["set-cookie"] == "a=b; Path=/"
                    assert answer.headers["x-prefix"] == "None"
        async with client.get("/sub", headers={"host": "shop.example"}, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["location"]) == (307, "/sub/")
        async with client.ws_connect("/room", headers={"host": "shop.example"}) as socket:
            assert await socket.receive_str(timeout=20) == "http://shop.example/room"


async def test_below_fn_it_shares_the_host_as_before_whatever_a_client_says(url: str) -> None:
    async with aiohttp.ClientSession(url) as client:
        async with client.get("/fn/f/x", headers={OWN_HOST: "1"}) as answer:
            assert answer.headers["set-cookie"] == "a=b; Path=/fn/f"
            assert answer.headers["x-prefix"] == "/fn/f"
        async with client.get("/", headers={"host": "unknown.fn.example"}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "function_not_found")
        async with client.get("/", headers={"host": "other.example"}) as answer:
            assert answer.status == 421, "a listener on loopback refuses other host names"


def test_hosts_need_the_networks_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOP_SECRET_ENV, raising=False)
    with pytest.raises(ConfigError, match="domain need PILOTLIGHT_HOP_SECRET"):
        build_app(network({"ams1": "http://127.0.0.1:1"}, functions={"domain": "fn.example"}))
