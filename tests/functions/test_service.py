"""A site that serves only functions, no models, and the folder of its data."""

from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Match

from pilotlight.runtime.app import build_app
from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.site import SiteConfig
from pilotlight.wire.hop.status import decode_status
from tests.asgi import call, eventually, running

pytestmark = pytest.mark.process

ENTRY = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.url.endswith("/ai"):
            try:
                await self.env.AI.run("@cf/any", {"prompt": "hi"})
            except Exception as error:
                return Response(str(error))
        return Response("hello")
"""


def site_config(folder: Path, port: int = 0, **functions: Any) -> SiteConfig:
    (folder / "f").mkdir(exist_ok=True)
    (folder / "f/entry.py").write_text(ENTRY)
    (folder / "f/wrangler.toml").write_text('name = "f"\nmain = "entry.py"\n[ai]\nbinding = "AI"\n')
    values = {
        "name": "ams1",
        "place": {"city": "Amsterdam", "latitude": 52.31, "longitude": 4.76},
        "listen": {"port": port},
        "functions": {"serve": [{"name": "f", "path": str(folder / "f")}], **functions},
        "responses": {"directory": str(folder / "responses")},
    }
    return parse(SiteConfig, values, "test")


async def test_two_sites_of_one_name_do_not_share_what_functions_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    own = site_config(tmp_path, state_dir=str(tmp_path / "own"))
    async with running(build_app(site_config(tmp_path))), running(build_app(own)):
        with pytest.raises(ConfigError, match=r"another site named 'ams1' keeps .* set functions.state_dir"):
            async with running(build_app(site_config(tmp_path))):
                pass
    async with running(build_app(site_config(tmp_path))):
        pass
    assert "has the state of a site at" not in caplog.text
    async with running(build_app(site_config(tmp_path, port=8801))):
        assert "has the state of a site at 127.0.0.1:0, but this site is at 127.0.0.1:8801" in caplog.text


def test_requests_of_clients_are_routed_before_rare_ones(tmp_path: Path) -> None:
    routes = build_app(site_config(tmp_path, state_dir=str(tmp_path / "state"))).routes
    for path in ("/v1/chat/completions", "/fn/f", "/fn/f/a/path"):
        scope: dict[str, Any] = {"type": "http", "path": path, "method": "POST", "headers": []}
        tried = next(number for number, route in enumerate(routes, 1) if route.matches(scope)[0] is Match.FULL)
        assert tried <= 16, f"{path} is compared with {tried} routes"


async def test_a_site_without_models_serves_functions_and_starts_no_engine_host(tmp_path: Path) -> None:
    app = build_app(site_config(tmp_path, state_dir=str(tmp_path / "state")))
    async with running(app):
        await eventually(lambda: not app.site.why_not_ready())
        assert app.site.fleet.hosts == ()
        assert (await call(app, "/fn/f")).body == b"hello"
        assert b"any" in (await call(app, "/fn/f/ai")).body
        assert (await call(app, "/v1/models")).json == {"object": "list", "data": []}
        status = decode_status((await call(app, "/status")).body)
        assert (status.ready, status.models, [known.name for known in status.functions.functions]) == (True, (), ["f"])
        refused = await call(
            app, "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        )
        assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")
