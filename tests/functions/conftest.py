"""Fixtures that serve functions from test folders, without the rest of a site."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from pilotlight.functions.channel.frames import UNNUMBERED, FetchEvent
from pilotlight.functions.host.site_functions import Response, SiteFunctions
from pilotlight.functions.manifest import load_manifest
from pilotlight.functions.sandbox.confinement.isolation import IsolationError
from pilotlight.functions.sandbox.limits import FunctionLimits
from tests.runtime.conftest import make_server, make_site, model_directory, server, site  # noqa: F401

RUNTIMES = ("crun", "runc", "crun --cgroup-manager=disabled")
QUICK = {"blocked_s": 1.0, "memory_mib": 160, "disk_mib": 16, "idle_s": 30.0}


def quick(limits: dict[str, Any]) -> FunctionLimits:
    return FunctionLimits(**{**QUICK, **limits})


class Served:
    """The functions of a site, with helpers that return whole response bodies."""

    def __init__(self, functions: SiteFunctions, folder: Path) -> None:
        self.functions = functions
        self.folder = folder

    def add(
        self, source: str, name: str = "f", manifest: str = "", limits: dict[str, Any] | None = None, **files: str
    ) -> None:
        """Add a function. `limits` replace the site's."""
        folder = self.folder / name
        (folder / "src").mkdir(parents=True, exist_ok=True)
        (folder / "src/entry.py").write_text(dedent(source))
        (folder / "wrangler.toml").write_text(f'name = "{name}"\nmain = "src/entry.py"\n{dedent(manifest)}')
        for file, text in files.items():
            path = folder / file.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        sites_own = self.functions.limits
        self.functions.limits = sites_own if limits is None else quick(limits)
        self.functions.add(load_manifest(folder))
        self.functions.limits = sites_own

    async def ask(
        self,
        path: str = "/",
        *,
        name: str = "f",
        method: str = "GET",
        body: Any = b"",
        headers: Any = (),
        **options: Any,
    ) -> Response:
        whole, stream = (body, None) if isinstance(body, bytes) else (b"", body)
        entrypoint, is_socket = options.pop("entrypoint", "default"), options.pop("websocket", False)
        event = FetchEvent(
            UNNUMBERED, method, f"http://host{path}", list(headers), whole, entrypoint=entrypoint, options=options
        )
        return await self.functions.fetch(name, event, stream, is_socket=is_socket)

    async def get(self, path: str = "/", **options: Any) -> bytes:
        response = await self.ask(path, **options)
        return response.body + b"".join([chunk async for chunk in response.stream or _nothing()])


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


ServedMaker = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def make_served(process_tier: None, tmp_path: Path) -> ServedMaker:
    @asynccontextmanager
    async def make(*, tier: int = 2, limits: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Served]:
        async with SiteFunctions(limits=quick(limits or {}), min_tier=tier, max_tier=tier, **options) as functions:
            yield Served(functions, tmp_path)

    return make


@functools.cache
def working_oci_runtime() -> str | None:
    """Return the name of an OCI runtime that can start containers here, found by trying; None if none can."""

    async def works(command: str) -> bool:
        try:
            async with SiteFunctions(min_tier=3, oci_runtime=command):
                return True
        except IsolationError:
            return False

    def run(command: str) -> bool:
        return asyncio.run(works(command))

    with ThreadPoolExecutor(1) as aside:  # the test's event loop is running in this thread
        return next((command for command in RUNTIMES if aside.submit(run, command).result()), None)


@pytest.fixture
def oci_runtime(process_tier: None) -> str:
    found = working_oci_runtime()
    if found is None:
        pytest.skip(f"no OCI runtime works here as root: {', '.join(RUNTIMES)}")
    return found


@pytest.fixture
async def served(make_served: ServedMaker) -> AsyncIterator[Served]:
    async with make_served() as made:
        yield made
