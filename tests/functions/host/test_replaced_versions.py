"""A version that is replaced, rolled back or deleted finishes its accepted work, with its own bindings and isolates."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.bindings.queues import Queue
from pilotlight.functions.bindings.storage.kv import KVNamespace
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.functions.host.site_functions import Response
from pilotlight.functions.manifest import BindingDeclaration, load_manifest
from pilotlight.support.database import Databases
from tests.asgi import eventually
from tests.functions.conftest import Served, ServedMaker

MANIFEST = """
[[kv_namespaces]]
binding = "KV"
id = "shared"
[[durable_objects.bindings]]
name = "OBJECTS"
class_name = "Counter"
[[queues.producers]]
binding = "QUEUE"
queue = "jobs"
[[queues.consumers]]
queue = "jobs"
max_batch_timeout = 0
max_retries = 0
[[worker_loaders]]
binding = "LOADER"
"""
SOURCE = """
import asyncio
from workers import DurableObject, Response, WorkerEntrypoint, env

VERSION = 0

async def until_told(what):
    await env.KV.put(what + " began", "yes")
    while await env.KV.get(what) is None:
        await asyncio.sleep(0.01)

class Counter(DurableObject):
    async def slow(self):
        await until_told("object")
        self.ctx.storage.kv.put("n", (self.ctx.storage.kv.get("n") or 0) + 1)
        return f"{self.ctx.storage.kv.get('n')} by {VERSION}"

    async def quick(self):
        return f"{self.ctx.storage.kv.get('n')} by {VERSION}"

    async def later(self):
        async def work():
            await until_told("object later")
            self.ctx.storage.kv.put("n", 7)
        self.ctx.waitUntil(work())

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path = request.url.rpartition("/")[2]
        if path == "slow":
            await until_told("request")
        if path == "stream":
            async def pieces():
                yield b"first,"
                await until_told("stream")
                yield f"{await self.env.KV.get('stream')} of {VERSION}".encode()
            return Response(pieces())
        if path == "background":
            async def work():
                await until_told("background")
                await self.env.KV.put("kept", str(VERSION))
            self.ctx.waitUntil(work())
        if path.startswith("object"):
            return Response(str(await getattr(self.env.OBJECTS.getByName("one"), path.partition("-")[2])()))
        if path == "loaded":
            code = f'''
from workers import Response, WorkerEntrypoint
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("loaded by {VERSION}")
'''
            worker = self.env.LOADER.get("one", lambda: {"mainModule": "main.py", "modules": {"main.py": code}})
            first = await (await worker.getEntrypoint().fetch("http://x/")).text()
            await until_told("loaded")
            return Response(first + ", " + await (await worker.getEntrypoint().fetch("http://x/")).text())
        return Response(str(VERSION))

    async def queue(self, batch):
        await until_told("batch")
        for message in batch.messages:
            await self.env.KV.put(f"seen {message.body}", f"attempt {message.attempts} at {VERSION}")
"""


class Site:
    """A site, versions of one function, and a store that they share with the test."""

    def __init__(self, served: Served, state: Path, services: Services) -> None:
        self.served, self.state, self.services = served, state, services
        declared = BindingDeclaration("kv", "KV", {"id": "shared"})
        self.kv = KVNamespace.open(declared, state, services)

    def reload(self, version: int) -> None:
        """Replace a version under the same name, as a reload does."""
        self.served.add(SOURCE.replace("VERSION = 0", f"VERSION = {version}"), manifest=MANIFEST)

    def deploy(self, version: int) -> None:
        """Replace a version as a deployment does: each has a pool; one becomes live, and the previous one is removed."""
        folder = self.state.parent / f"version {version}"
        folder.mkdir(exist_ok=True)
        (folder / "entry.py").write_text(SOURCE.replace("VERSION = 0", f"VERSION = {version}"))
        (folder / "wrangler.toml").write_text(f'name = "f"\nmain = "entry.py"\n{MANIFEST}')
        functions = self.served.functions
        before = functions.names.get("f")
        functions.add(load_manifest(folder), name=f"f@{version}")
        functions.live("f", f"f@{version}")
        if before is not None:
            functions.remove(before)

    async def get(self, key: str) -> str | None:
        found = await self.kv.call("get", [], {"key": key})
        return found["value"].decode() if found["found"] else None

    async def tell(self, what: str) -> None:
        await self.kv.call("put", [], {"key": what, "value": b"told"})

    async def began(self, what: str) -> None:
        async with asyncio.timeout(30):
            while await self.get(f"{what} began") is None:
                await asyncio.sleep(0.01)


Replace = Callable[[Site, int], None]
WAYS = pytest.mark.parametrize("replace", [Site.reload, Site.deploy], ids=["reload", "deploy"])


@pytest.fixture
async def site(make_served: ServedMaker, tmp_path: Path) -> AsyncIterator[Site]:
    services = Services(databases=Databases())
    bindings = partial(FunctionBindings.open, tmp_path / "state", services)
    async with make_served(tier=1, open_bindings=bindings, limits={"concurrency": 4, "max_isolates": 1}) as served:
        yield Site(served, tmp_path / "state", services)
    await services.databases.close()


@WAYS
async def test_a_request_under_way_finishes_with_its_own_bindings(site: Site, replace: Replace) -> None:
    replace(site, 1)
    answer = asyncio.create_task(site.served.get("/slow"))
    await site.began("request")
    replace(site, 2)
    assert await site.served.get("/") == b"2"
    await site.tell("request")
    assert await answer == b"1"


async def test_a_request_finishes_where_its_function_is_deleted(site: Site) -> None:
    site.deploy(1)
    answer = asyncio.create_task(site.served.get("/slow"))
    await site.began("request")
    site.served.functions.remove("f@1")
    with pytest.raises(Failure, match="no function named"):
        await site.served.get("/")
    await site.tell("request")
    assert await answer == b"1"


async def test_versions_that_come_and_go_quickly_each_finish_their_own(site: Site) -> None:
    answers = []
    for version in (1, 2, 1, 2):
        site.deploy(version)
        answers.append(asyncio.create_task(site.served.get("/slow")))
        await eventually(lambda: site.served.functions.pools[site.served.functions.names["f"]].num_asked)
    await site.began("request")
    await site.tell("request")
    assert await asyncio.gather(*answers) == [b"1", b"2", b"1", b"2"]


@WAYS
async def test_a_stream_continues_to_its_end(site: Site, replace: Replace) -> None:
    replace(site, 1)
    response = await site.served.ask("/stream")
    assert response.stream is not None
    assert await anext(response.stream) == b"first,"
    await site.began("stream")
    replace(site, 2)
    await site.tell("stream")
    assert b"".join([piece async for piece in response.stream]) == b"told of 1"


@WAYS
async def test_background_work_continues_to_its_end(site: Site, replace: Replace) -> None:
    replace(site, 1)
    await site.served.get("/background")
    await site.began("background")
    replace(site, 2)
    await site.tell("background")
    async with asyncio.timeout(30):
        while (kept := await site.get("kept")) is None:
            await asyncio.sleep(0.01)
    assert kept == "1"


@WAYS
async def test_a_request_that_waits_for_room_is_answered_by_the_version_that_took_it(
    site: Site, replace: Replace
) -> None:
    replace(site, 1)
    answers = [asyncio.create_task(site.served.get("/slow")) for _ in range(6)]
    await site.began("request")
    replace(site, 2)
    await site.tell("request")
    assert await asyncio.gather(*answers) == [b"1"] * 6


@WAYS
async def test_a_call_of_an_object_finishes_and_its_storage_is_kept(site: Site, replace: Replace) -> None:
    replace(site, 1)
    answer = asyncio.create_task(site.served.get("/object-slow"))
    await site.began("object")
    replace(site, 2)
    assert await site.served.get("/object-quick") == b"None by 1"  # an object has one instance, which is busy
    await site.tell("object")
    assert await answer == b"1 by 1"
    assert await site.served.get("/object-quick") == b"1 by 2"


@WAYS
async def test_what_an_object_does_in_the_background_is_kept(site: Site, replace: Replace) -> None:
    replace(site, 1)
    await site.served.get("/object-later")
    await site.began("object later")
    replace(site, 2)
    assert await site.served.get("/object-quick") == b"None by 1"
    await site.tell("object later")
    async with asyncio.timeout(30):
        while (found := await site.served.get("/object-quick")) != b"7 by 2":
            assert found in (b"None by 1", b"7 by 1")
            await asyncio.sleep(0.01)


@WAYS
async def test_a_batch_under_way_is_finished_by_the_version_that_took_it(site: Site, replace: Replace) -> None:
    replace(site, 1)
    queue = Queue.of("jobs", site.state, site.services)
    await queue.put([(b"\x01", 0.0)])
    await site.began("batch")
    replace(site, 2)
    await queue.put([(b"\x02", 0.0)])
    await site.tell("batch")
    async with asyncio.timeout(30):
        while await queue.depth():
            await asyncio.sleep(0.01)
    assert [await site.get(f"seen {body}") for body in (1, 2)] == ["attempt 1 at 1", "attempt 1 at 2"]


@WAYS
async def test_a_batch_that_its_site_cuts_off_costs_no_attempt(
    make_served: ServedMaker, tmp_path: Path, replace: Replace
) -> None:
    services = Services(databases=Databases())
    bindings: Any = partial(FunctionBindings.open, tmp_path / "state", services)
    async with make_served(tier=1, open_bindings=bindings) as served:
        site = Site(served, tmp_path / "state", services)
        replace(site, 1)
        queue = Queue.of("jobs", site.state, services)
        await queue.put([(b"\x01", 0.0)])
        await site.began("batch")
    async with asyncio.timeout(30):
        while not (taken := await queue.take(9)):
            await asyncio.sleep(0.05)
    assert [(message.body, message.attempts) for message in taken] == [(b"\x01", 1)]
    await services.databases.close()


@WAYS
async def test_each_version_has_dynamic_workers_of_its_own(site: Site, replace: Replace) -> None:
    replace(site, 1)
    first = asyncio.create_task(site.served.get("/loaded"))
    await site.began("loaded")
    replace(site, 2)
    second = asyncio.create_task(site.served.get("/loaded"))
    await eventually(lambda: sum("+" in name for name in site.served.functions.pools) == 2)
    await site.tell("loaded")
    assert await first == b"loaded by 1, loaded by 1"
    assert await second == b"loaded by 2, loaded by 2"


async def test_a_version_that_is_held_answers_though_it_was_replaced(site: Site) -> None:
    """A request chooses its version before it waits for its body, a file or a permit."""
    site.deploy(1)
    version = site.served.functions.version("f")
    with version.held():
        site.deploy(2)
        await eventually(lambda: len(site.served.functions.pools) == 1)
        response: Response = await site.served.ask("/", name=version)
        assert response.body == b"1"
    await eventually(lambda: version.waiters.is_closed)


async def test_packages_are_in_use_until_the_version_has_ended(site: Site) -> None:
    site.deploy(1)
    released: list[int] = []
    version = site.served.functions.version("f")
    version.release = partial(released.append, 1)
    with version.held():
        site.deploy(2)
        await asyncio.sleep(0)
        assert not released
    await eventually(lambda: released == [1])
