"""The Cache API, and the `cf` options of fetch, in a real isolate with a site's bindings."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.support.database import Databases
from tests.functions.conftest import Served, ServedMaker
from tests.functions.sdk.test_platform_code import go


@pytest.fixture
async def bound(make_served: ServedMaker, tmp_path: Path) -> AsyncIterator[Served]:
    services = Services(databases=Databases())
    bindings: Any = partial(FunctionBindings.open, tmp_path / "state", services)
    async with make_served(open_bindings=bindings, egress_allow=["127.0.0.1"]) as served:
        yield served
    await services.databases.close()


async def test_a_response_is_kept_matched_and_deleted(bound: Served) -> None:
    body = """
    cache, kept = js.caches.default, Response("x", headers={"cache-control": "max-age=60", "x-own": "1"})
    found = [await cache.match(request), await cache.put("http://x/a", kept), kept.body_used]
    hit = await cache.match("http://x/a")
    found += [await hit.text(), hit.headers["x-own"], hit.headers["cf-cache-status"], hit.headers["age"]]
    head = await cache.match(Request("http://x/a", method="HEAD"), ignoreMethod=True)
    found += [await cache.match(Request("http://x/a", method="POST")), await head.text()]
    own = await js.caches.open("own")
    found += [await own.match("http://x/a"), await cache.delete("http://x/a"), await cache.delete("http://x/a"), await cache.match("http://x/a")]
    return found
    """
    assert await go(bound, body) == [
        None, None, True, "x", "1", "HIT", "0", None, "x", None, True, False, None,
    ]  # fmt: skip


async def test_streams_and_long_bodies_are_kept_whole_and_asked_for_in_parts(bound: Served) -> None:
    body = """
    cache = js.caches.default
    async def pieces():
        for number in range(300):
            yield bytes([number % 256]) * 1000
    await cache.put("http://x/stream", Response(pieces()))
    await cache.put("http://x/long", Response(b"ab" * 100_000, headers={"etag": '"7"'}))
    whole = await (await cache.match("http://x/stream")).bytes()
    part = await cache.match(Request("http://x/long", headers={"range": "bytes=1-4"}))
    same = await cache.match(Request("http://x/long", headers={"if-none-match": '"6", W/"7"'}))
    return [len(whole), whole[2999], part.status, await part.text(), part.headers["content-range"], same.status]
    """
    assert await go(bound, body) == [300_000, 2, 206, "baba", "bytes 1-4/200000", 304]


async def test_what_the_platforms_cache_refuses_is_refused_and_what_its_headers_forbid_is_not_kept(
    bound: Served,
) -> None:
    body = """
    cache, found = js.caches.default, []
    for asked, given in ((Request("http://x/", method="POST"), Response("")), ("http://x/", "text"), ("http://x/", Response("", status=206))):
        try:
            await cache.put(asked, given)
        except TypeError as error:
            found.append(str(error)[:28])
    for headers in ({"cache-control": "private"}, {"cache-control": "no-store"}, {"set-cookie": "a=b"}, {"cache-control": "max-age=0"}):
        await cache.put("http://x/no", Response("x", headers=headers))
        found.append(await cache.match("http://x/no"))
    return found
    """
    assert await go(bound, body) == [
        "caches: only responses to GE", "caches: put takes a Response", "caches: a response with the ", None, None, None, None,
    ]  # fmt: skip


async def test_two_functions_do_not_see_each_others_responses(bound: Served) -> None:
    put = "await js.caches.default.put('http://x/', Response('one')); return True"
    assert await go(bound, put)
    bound.add(
        "import js\nfrom workers import Response\nasync def on_fetch(request):\n"
        "    return Response.json(await js.caches.default.match('http://x/'))\n",
        name="other",
    )
    assert await bound.get(name="other") == b"null"


@asynccontextmanager
async def counting() -> AsyncIterator[tuple[str, list[str]]]:
    """Start a server that answers each path with the number of its requests, and /missing with 404."""
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        asked.append(path)
        body, status = str(asked.count(path)).encode(), b"404 Not Found" if path == "/missing" else b"200 OK"
        writer.write(b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def test_a_fetch_is_kept_as_its_options_say(bound: Served) -> None:
    async with counting() as (url, asked):
        body = f"""
    async def twice(path, **cf):
        first = await (await fetch("{url}" + path, cf=cf)).text()
        for _ in range(200):  # a copy is kept while it is read
            second = await fetch("{url}" + path, cf=cf)
            if second.headers.get("cf-cache-status") == "HIT" or not cf.get("cacheTtl"):
                break
            await js.Promise.resolve(None)
        return [first, await second.text()]
    return [
        await twice("/plain"), await twice("/kept", cacheTtl=60), await twice("/zero", cacheTtl=0),
        await twice("/missing", cacheTtlByStatus={{"200-299": 60, "404": 0}}),
        await (await fetch("{url}/other", cf={{"cacheTtl": 60, "cacheKey": "{url}/kept"}})).text(),
    ]
        """
        plain, kept, zero, missing, by_key = await go(bound, body)
    assert (plain, zero, missing) == (["1", "2"], ["1", "2"], ["1", "2"])
    assert int(kept[1]) <= asked.count("/kept")
    assert int(by_key) <= asked.count("/kept"), "the latest response for that key"
    assert "/other" not in asked


async def test_a_body_is_compressed_where_its_headers_promise_it_and_left_alone_where_it_is(bound: Served) -> None:
    bound.add("""
        import asyncio, gzip
        from workers import Response
        async def on_fetch(request):
            path = request.url.rpartition("/")[2]
            headers = {"content-encoding": "gzip", "content-length": "5"}
            async def pieces():
                yield b"he"
                yield b"llo"
            if path == "stream":
                return Response(pieces(), headers=headers)
            if path == "manual":
                return Response(gzip.compress(b"hello"), headers={"content-encoding": "gzip"}, encodeBody="manual")
            return Response("hello", headers=headers)
        """)
    import gzip

    for path in ("whole", "stream", "manual"):
        assert gzip.decompress(await bound.get(f"/{path}")) == b"hello"
        assert ("content-length", "5") not in (await bound.ask(f"/{path}")).headers


async def test_an_application_that_compresses_by_itself_is_sent_as_it_is(bound: Served) -> None:
    bound.add("""
        import asgi, gzip
        from workers.gateway import BaseOptions
        from workers.asgi import Options
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-encoding", b"gzip")]})
            await send({"type": "http.response.body", "body": gzip.compress(b"hello")})
        async def on_fetch(request, env):
            assert issubclass(Options, BaseOptions)
            manual = Options(encode_body="manual") if "manual" in request.url else None
            return await asgi.fetch(app, request, env, options=manual)
        """)
    import gzip

    for path in ("/manual", "/automatic"):
        assert gzip.decompress(await bound.get(path)) == b"hello"
