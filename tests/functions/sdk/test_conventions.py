"""Code that follows the platform's conventions, in a real isolate: parameters of handlers, and imports."""

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.functions.host.faults import Fault
from pilotlight.support.database import Databases
from tests.functions.conftest import Served, ServedMaker

HEAD = "from workers import *\nimport asyncio, json\n\n"


def default(body: str) -> str:
    """Return a module whose Default.fetch has this body."""
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    return f"{HEAD}class Default(WorkerEntrypoint):\n    async def fetch(self, request):\n{lines}\n"


@pytest.mark.parametrize(
    "source",
    [
        "class Default(WorkerEntrypoint):\n    async def fetch(self):\n        return Response('called')",
        "class Default(WorkerEntrypoint):\n    async def fetch(self, request, env):\n        return Response(env.WORD)",
        "class Default(WorkerEntrypoint):\n    def fetch(self, request, env, ctx):\n        return ctx and Response(env.WORD)",
        "class Default:\n    async def on_fetch(self, request):\n        return Response(self.env.WORD)",
        "class Default:\n    def __init__(self, ctx, env):\n        self.word = env.WORD\n    def fetch(self):\n        return Response(self.word)",
        "async def on_fetch(request, env, ctx):\n    return Response(env.WORD)",
        "@handler\nasync def on_fetch(request):\n    return Response('called')",
    ],
)
async def test_handlers_take_as_many_arguments_as_they_want(served: Served, source: str) -> None:
    served.add(f"{HEAD}{source}\n", manifest='[vars]\nWORD = "called"')
    assert await served.get() == b"called"


async def test_names_are_importable_from_where_the_platform_has_them(served: Served) -> None:
    source = """
    from workers import asgi, wsgi, FetchResponse, WorkflowEntrypoint, import_from_javascript, patch_env, wait_until, waitUntil
    from workers import BlobEnding, BlobValue, Body, FetchKwargs, FormDataValue, JSBody, RequestInitCfProperties
    from workers.workflows import NonRetryableError
    from workers.rpc import _BindingWrapper
    from workers.asgi import request_to_scope, run_in_background
    from workers.wsgi import build_environ
    from pyodide.ffi import JsException, JsProxy, can_run_sync, create_proxy, destroy_proxies, jsnull, run_sync, to_js
    from js import Array, Blob, FormData, HTMLRewriter, Map, Number, Promise, ReadableStream, Set, TransformStream, WebSocket, globalThis
    import js
    made = [js.fetch is fetch, FormData.new().to_string if False else True, Number("1.5"), Array.of(1, 2).length, Map.new([["a", 1]]).get("a")]
    made += [Set.new([1]).has(1), getattr(Array, "from")((1, 2)), Blob.new(["a"], to_js({"type": "text/x"})).type, jsnull is None]
    made += [await Promise.all([asyncio.sleep(0, 1), 2]), import_from_javascript("cloudflare:workers").env is env]
    try:
        import_from_javascript("node:fs")
    except ImportError as error:
        made.append(str(error)[:34])
    return Response.json(made)
    """
    served.add(default("\n".join(line[4:] for line in source.strip("\n").splitlines())))
    assert json.loads(await served.get()) == [
        True, True, 1.5, 2, 1, True, [1, 2], "text/x", True, [1, 2], True, "'node:fs' cannot be imported: func",
    ]  # fmt: skip


async def test_run_sync_waits_in_code_that_cannot_await_while_others_continue(served: Served) -> None:
    source = """
from pyodide.ffi import run_sync
beats = []
async def beat():
    for _ in range(3):
        beats.append(1)
        await asyncio.sleep(0.01)
    return len(beats)
def plain():
    return run_sync(beat())
def fails():
    async def bad():
        raise KeyError("x")
    try:
        run_sync(bad())
    except KeyError as error:
        return repr(error)
return Response.json([plain(), await asyncio.to_thread(plain), fails()])
"""
    served.add(default(source))
    assert json.loads(await served.get()) == [3, 6, "KeyError('x')"]


async def test_a_loop_may_be_run_within_a_handler_as_on_the_platform(served: Served) -> None:
    source = """
beats = []
async def beat():
    for _ in range(3):
        beats.append(1)
        await asyncio.sleep(0.01)
    return len(beats)
def loop():
    made = asyncio.new_event_loop()
    try:
        return made.run_until_complete(beat())
    finally:
        made.close()
def foreign():
    made = asyncio.new_event_loop()
    try:
        made.run_until_complete(made.create_future())
    except RuntimeError as error:
        return str(error)
    finally:
        made.close()
other = asyncio.ensure_future(asyncio.sleep(0))
found = [asyncio.run(beat()), other.done(), loop(), await asyncio.to_thread(asyncio.run, beat()), foreign()]
return Response.json(found)
"""
    served.add(default(source))
    assert json.loads(await served.get()) == [3, True, 6, 9, "Cannot run the event loop while another loop is running"]


async def test_many_requests_may_each_wait_in_run_sync(served: Served) -> None:
    """Callbacks that are ready in the same iteration of the loop run while a call waits."""
    source = """
from pyodide.ffi import run_sync
ran = []
def plain():
    for n in range(5):
        asyncio.get_running_loop().call_soon(ran.append, n)
    return run_sync(asyncio.sleep(0.02, request.url.rpartition("/")[2]))
first = plain()
others = await asyncio.gather(*(asyncio.sleep(0, n) for n in range(5)))
return Response(f"{first} {plain()} {len(ran)} {others}")
"""
    served.add(default(source))
    found = await asyncio.gather(*(served.get(f"/{n}") for n in range(12)))
    assert found == [f"{n} {n} 10 [0, 1, 2, 3, 4]".encode() for n in range(12)]
    assert await served.get("/again") == b"again again 10 [0, 1, 2, 3, 4]"
    assert served.functions.pools["f"].isolates.restarts.pause_s(0) == 0


async def test_a_bindings_failure_is_a_js_exception(served: Served) -> None:
    source = """
from pyodide.ffi import JsException
try:
    await fetch("http://10.0.0.1/")
except JsException as error:
    return Response.json([error.name, error.message[:27]])
"""
    served.add(default(source))
    assert json.loads(await served.get()) == ["TypeError", "fetch is not allowed there:"]


async def test_streams_of_javascript_carry_a_body(served: Served) -> None:
    source = """
from js import ReadableStream, TransformStream, TextEncoder
from pyodide.ffi import create_proxy, to_js
def start(controller):
    controller.enqueue("one ")
    controller.enqueue(to_js(b"two "))
    controller.close()
source = ReadableStream.new(to_js({"start": create_proxy(start)}))
upper = TransformStream.new({"transform": lambda chunk, c: c.enqueue(bytes(chunk, "ascii").upper() if isinstance(chunk, str) else chunk.upper())})
plain = TransformStream.new()
async def write():
    writer = plain.writable.getWriter()
    for n in range(40):
        await writer.write(f"{n},")
    await writer.close()
wait_until(write())
reader = Response(source.pipeThrough(upper)).body.getReader()
first = await reader.read()
rest = await reader.read()
assert (await reader.read())["done"]
async def both():
    yield first.value + rest.value
    async for chunk in plain.readable:
        yield chunk
return Response(both())
"""
    served.add(default(source))
    assert await served.get() == b"ONE TWO " + "".join(f"{n}," for n in range(40)).encode()


PAGE = (
    '<!DOCTYPE html><html><head><title>Old &amp; new</title><meta property="og:title" content="x"></head>'
    '<body><!-- note --><p class="a b">one</p><div id=main><p>two<br>lines</p><a href="/x">link</a></div></body></html>'
)


@pytest.mark.parametrize(
    ("selector", "handler", "before", "after"),
    [
        ('meta[property^="og:"]', "e.remove()", '<meta property="og:title" content="x">', ""),
        ("head", "e.prepend('<meta a=1>', html=True)", "<head>", "<head><meta a=1>"),
        ("head", "e.append('<x>')", "</head>", "&lt;x&gt;</head>"),
        ("p.a", "e.setInnerContent('new')", ">one<", ">new<"),
        ("#main > p", "e.replace('<hr>', {'html': True})", "<p>two<br>lines</p>", "<hr>"),
        ("div a", "e.setAttribute('href', '/y\"')", '<a href="/x">', '<a href="/y&quot;">'),
        ("p.a", "e.removeAndKeepContent()", '<p class="a b">one</p>', "one"),
        ("p:not(.a)", "e.before('[').after(']')", "<p>two<br>lines</p>", "[<p>two<br>lines</p>]"),
        ("body > p:first-child, br", "e.after('!')", '<p class="a b">one</p>', '<p class="a b">one</p>!'),
        ("a[href]", "e.onEndTag(lambda end: end.before('.'))", "link</a>", "link.</a>"),
        ("section", "e.remove()", "", ""),
    ],
)  # fmt: skip
async def test_a_page_is_rewritten_where_a_selector_says_and_nowhere_else(
    served: Served, selector: str, handler: str, before: str, after: str
) -> None:
    source = f"""
from js import HTMLRewriter
class Handler:
    def element(self, e):
        {handler}
async def pieces():
    page = {PAGE!r}
    for at in range(0, len(page), 7):
        yield page[at : at + 7]
return HTMLRewriter.new().on({selector!r}, Handler()).transform(Response(pieces(), headers={{"content-length": "1", "x-a": "b"}}))
"""
    served.add(default(source))
    response = await served.ask()
    assert dict(response.headers)["x-a"] == "b"
    assert "content-length" not in dict(response.headers)
    expected = PAGE.replace(before, after, 1) if before else PAGE
    if "br" in selector:
        expected = expected.replace("<br>", "<br>!")
    assert (response.body + b"".join([chunk async for chunk in response.stream or ()])).decode() == expected


async def test_text_and_comments_have_handlers_too(served: Served) -> None:
    source = f"""
from js import HTMLRewriter
seen = []
async def text(chunk):
    seen.append([chunk.text, chunk.lastInTextNode])
    if "one" in chunk.text:
        chunk.replace("1")
document = {{"comments": lambda c: c.remove(), "end": lambda e: e.append("<!--end-->", html=True)}}
rewriter = HTMLRewriter().on("p", {{"text": text}}).onDocument(document)
page = await rewriter.transform(Response({PAGE!r})).text()
return Response.json([page, seen])
"""
    served.add(default(source))
    page, seen = json.loads(await served.get())
    assert page == PAGE.replace("<!-- note -->", "").replace("one", "1") + "<!--end-->"
    assert seen == [["one", True], ["two", True], ["lines", True]]


async def test_a_selector_that_cannot_be_read_says_so(served: Served) -> None:
    served.add(default("from js import HTMLRewriter\nHTMLRewriter.new().on('p:hover', {})"))
    with pytest.raises(Fault, match="HTMLRewriter cannot select by 'p:hover'"):
        await served.ask()


async def test_a_binding_that_is_not_offered_stops_only_who_uses_it(served: Served) -> None:
    manifest = 'browser = { binding = "B" }'
    source = "return Response('fine') if request.url.endswith('/') else Response(str(self.env.B.launch()))"
    served.add(default(source), manifest=manifest)
    assert await served.get("/") == b"fine"
    with pytest.raises(Fault, match="B is a binding of the kind 'browser', which is not offered here"):
        await served.get("/x")


async def test_an_address_of_a_database_is_read_from_its_connection_string(served: Served) -> None:
    manifest = '[[hyperdrive]]\nbinding = "H"\nlocalConnectionString = "postgres://u:p%40@db.example:5433/shop"'
    served.add(
        default("h = self.env.H\nreturn Response.json([h.host, h.port, h.user, h.password, h.database])"),
        manifest=manifest,
    )
    assert json.loads(await served.get()) == ["db.example", 5433, "u", "p@", "shop"]


async def test_pyfetch_is_a_fetch_with_pythons_names(served: Served) -> None:
    source = """
from pyodide.http import open_url, pyfetch
try:
    await pyfetch("http://10.0.0.1/", method="POST")
except OSError as error:
    return Response(str(error)[:27])
"""
    served.add(default(source))
    assert await served.get() == b"fetch is not allowed there:"


@pytest.mark.parametrize("signature", ["self", "self, request", "self, request, env", "self, request, env, ctx"])
async def test_an_objects_handler_takes_as_many_arguments_as_it_wants(
    make_served: ServedMaker, tmp_path: Path, signature: str
) -> None:
    source = f"""
from workers import DurableObject, Response, WorkerEntrypoint
class Room(DurableObject):
    def __init__(self, state, env):
        self.state = state  # without the base's constructor
    async def on_fetch({signature}):
        return Response("called")
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await self.env.ROOM.getByName("x").fetch(request)
"""
    services = Services(databases=Databases())
    bindings = partial(FunctionBindings.open, tmp_path / "state", services)
    async with make_served(tier=1, open_bindings=bindings) as served:
        served.add(source, manifest='[[durable_objects.bindings]]\nname = "ROOM"\nclass_name = "Room"')
        assert await served.get() == b"called"
    await services.databases.close()
