"""The functions of a site file whose secrets are put, changed and deleted while the site runs."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from pilotlight.functions.bindings.secrets.secret_store import SecretStore
from pilotlight.functions.channel.frames import UNNUMBERED, FetchEvent
from pilotlight.functions.served import ServedFunctions
from pilotlight.sites.site import FunctionConfig, FunctionsConfig
from pilotlight.support.directory_locks import alone_in
from tests.asgi import eventually

pytestmark = pytest.mark.process

ENTRY = """
import asyncio
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.url.endswith("/slow"):
            yield_to = await request.text()
            await asyncio.sleep(float(yield_to))
        return Response(getattr(self.env, "TOKEN", "none"))
"""


@asynccontextmanager
async def serving(tmp_path: Path, secrets_s: float) -> AsyncIterator[ServedFunctions]:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "entry.py").write_text(ENTRY)
    (folder / "wrangler.toml").write_text('name = "f"\nmain = "entry.py"\n[vars]\nTOKEN = "declared"\n')
    config = FunctionsConfig(serve=(FunctionConfig(name="f", path=str(folder)),))
    inference = cast(Any, None)
    state = tmp_path / "state"
    async with ServedFunctions(config, state, inference, lambda: [], "ams1", secrets_s=secrets_s) as functions:
        yield functions


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[ServedFunctions]:
    async with serving(tmp_path, secrets_s=0.05) as functions:
        yield functions


async def ask(site: ServedFunctions, path: str = "/", body: bytes = b"") -> str:
    return (
        await site.functions.fetch("f", FetchEvent(UNNUMBERED, "POST", f"http://host{path}", [], body))
    ).body.decode()


async def test_a_running_function_has_secrets_as_they_are_changed_and_no_request_is_lost(
    site: ServedFunctions, tmp_path: Path
) -> None:
    store = SecretStore(tmp_path / "state")
    assert await ask(site) == "declared"
    under_way = asyncio.ensure_future(ask(site, "/slow", b"2"))
    first = site.functions.pools["f"]
    await eventually(lambda: first.isolates.load == 1)
    for secret in ("first", "second"):
        store.put("f", "TOKEN", secret)
        store.put("other", "TOKEN", "another's")
        await eventually(lambda secret=secret: _secret_of(site) == secret)
        assert await ask(site) == secret
    store.delete("f", "TOKEN")
    await eventually(lambda: _secret_of(site) is None)
    assert await ask(site) == "declared"
    assert await under_way == "declared"
    assert first.num_failed == 0


async def test_a_secret_that_changes_twice_within_a_tick_of_the_clock_is_noticed(tmp_path: Path) -> None:
    store = SecretStore(tmp_path / "state")
    async with serving(tmp_path, secrets_s=0.2) as site:
        store.put("f", "TOKEN", "first")
        ticked_ns = store.directory.stat().st_mtime_ns
        await eventually(lambda: _secret_of(site) == "first")
        store.put("f", "TOKEN", "second")  # before the next poll
        os.utime(store.directory, ns=(ticked_ns, ticked_ns))
        await eventually(lambda: _secret_of(site) == "second")


async def test_a_site_without_history_deletes_the_histories_of_its_earlier_days(tmp_path: Path) -> None:
    objects = tmp_path / "bindings/durable_object/f/Counter/00"
    histories = [tmp_path / "bindings/d1/one/database.history", objects / "1.history", objects / "2.history"]
    others = [objects / "1.sqlite", tmp_path / "bindings/r2/bucket/files/a.history"]
    for path in (*(folder / "00000000.base" for folder in histories), *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    inference = cast(Any, None)
    for history_days, left in ((7.0, [True] * 3), (0.0, [False, False, True])):
        with alone_in(histories[2]):  # another process writes it
            config = FunctionsConfig(history_days=history_days)
            async with ServedFunctions(config, tmp_path, inference, lambda: [], "ams1"):
                await eventually(lambda left=left: [folder.exists() for folder in histories] == left)
    assert all(path.exists() for path in others)


def _secret_of(site: ServedFunctions) -> str | None:
    bindings = site.functions.pools["f"].manifest.bindings
    return next((each.options["value"] for each in bindings if each.kind == "secret"), None)
