"""A site with a fake engine, and a real server for tests that need sockets."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pilotlight.runtime.app import SiteApp, build_app
from pilotlight.runtime.serve import serve_app
from pilotlight.runtime.timings import SiteTimings
from pilotlight.sites.config import parse
from pilotlight.sites.site import SiteConfig
from pilotlight.wire.http.listen import bind, url_of
from tests.asgi import eventually, running
from tests.fakes import FakeEngineClient, FakeLauncher, write_model_directory


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    return write_model_directory(tmp_path / "tiny")


def site_config(model_directory: Path, **tables: Any) -> SiteConfig:
    values: dict[str, Any] = {
        "name": "ams1",
        "place": {"city": "Amsterdam", "latitude": 52.31, "longitude": 4.76},
        "listen": {"port": 0},
        "engine": {"standby": False, "weights_host_gib": 0.0},
        "responses": {"directory": str(model_directory.parent / "responses")},
        "models": [{"name": "tiny", "source": str(model_directory), "aliases": ["@test/tiny"]}],
    }
    for name, table in tables.items():
        values[name] = {**values.get(name, {}), **table} if isinstance(table, dict) else table
    return parse(SiteConfig, values, "test")


class WallClock:
    """The clock by which a site estimates demand: the machine's, until a test sets its time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s or time.time()


class Site:
    """A running site and the controls of its engine."""

    def __init__(self, app: SiteApp, config: SiteConfig, launcher: FakeLauncher, clock: WallClock) -> None:
        self.clock = clock
        self.app = app
        self.config = config
        self.launcher = launcher
        self.url = ""
        self.stop = asyncio.Event()

    @property
    def engine(self) -> FakeEngineClient:
        return self.launcher.client

    @property
    def admission(self) -> Any:
        return self.app.site.admission

    async def is_idle(self) -> None:
        """Check that no permit, reserved token or sequence is left (I6)."""
        await eventually(
            lambda: self.admission.inflight == 0 and not any(self.admission.reserved.values()) and not self.engine.open
        )


SiteMaker = Callable[..., AbstractAsyncContextManager[Site]]


@pytest.fixture
def make_site(model_directory: Path) -> SiteMaker:
    @asynccontextmanager
    async def make(
        *,
        launcher: FakeLauncher | None = None,
        further: Sequence[FakeLauncher] = (),
        hop_secret: str | None = None,
        wait: bool = True,
        timings: SiteTimings = SiteTimings(),  # noqa: B008 - frozen
        **tables: Any,
    ) -> AsyncIterator[Site]:
        """Make a site. `launcher` starts the hosts of the first device; `further` has a launcher for each other device."""
        config = site_config(model_directory, **tables)
        launcher = launcher or FakeLauncher()
        timings = timings._replace(clock=(clock := WallClock()))
        app = build_app(config, launchers=[launcher, *further], hop_secret=hop_secret, timings=timings)
        async with running(app):
            if wait:
                await eventually(lambda: not app.site.why_not_ready())
            yield Site(app, config, launcher, clock)

    return make


@pytest.fixture
async def site(make_site: SiteMaker) -> AsyncIterator[Site]:
    async with make_site() as made:
        yield made
        await made.is_idle()


@pytest.fixture
def make_server(process_tier: None, model_directory: Path) -> SiteMaker:
    """Make a site with a real server on a free port."""

    @asynccontextmanager
    async def make(
        *, launcher: FakeLauncher | None = None, hop_secret: str | None = None, **tables: Any
    ) -> AsyncIterator[Site]:
        config = site_config(model_directory, **tables)
        launcher = launcher or FakeLauncher()
        listener = bind(config.listen.host, config.listen.port)
        app = build_app(config, launchers=[launcher], hop_secret=hop_secret, url=url_of(listener))
        site = Site(app, config, launcher, WallClock())
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve_app(app, listener, stop=site.stop, on_ready=ready.set_result))
        site.url = await asyncio.wait_for(ready, 60)
        try:
            yield site
        finally:
            site.stop.set()
            await asyncio.wait_for(server, 60)

    return make


@pytest.fixture
async def server(make_server: SiteMaker) -> AsyncIterator[Site]:
    async with make_server() as made:
        yield made
        await made.is_idle()
