"""Methods of other functions and of Durable Objects: arguments, results, and the lifetime of stubs."""

import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import msgspec
import pytest

from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.support.database import Databases
from tests.asgi import eventually
from tests.functions.conftest import Served, ServedMaker
from workers.remote.rpc_session import RpcSession

OTHER = """
import asyncio
from workers import *

events = []

class Counter(RpcTarget):
    step = 2

    def __init__(self):
        self.value = 0

    async def increment(self, by=1):
        self.value += by
        return self.value

    @property
    def doubled(self):
        return self.value * 2

    def _hidden(self):
        return "never"

    def dispose(self):
        events.append("disposed")

class Default(WorkerEntrypoint):
    async def identity(self, value):
        return value

    async def kind(self, value):
        return type(value).__name__

    async def fields(self, value):
        return [value.name, value.inner.n]

    async def text_of(self, message):
        return [message.headers["x-a"], await message.text()]

    async def read(self, stream):
        return len(b"".join([piece async for piece in stream]))

    async def call(self, function, *args, **named):
        return await function(*args, **named)

    async def call_many(self, function, count):
        return await asyncio.gather(*(function(n) for n in range(count)))

    async def counter(self):
        return Counter()

    async def adder(self):
        total = 0
        def add(amount):
            nonlocal total
            total += amount
            return total
        return {"add": add, "names": ["a", lambda: "deep"]}

    async def lines(self):
        async def some():
            try:
                for n in range(1000):
                    yield f"{n}\\n"
            finally:
                events.append("closed")
        return {"one": some(), "two": Response(some(), status=201, headers={"x-a": "b"})}

    async def keep(self, function, dup=True):
        global kept
        kept = function.dup() if dup else function

    async def kept(self):
        return await kept()

    async def drop(self):
        kept.dispose()

    async def fails(self, name):
        if name == "own":
            class OwnError(Exception):
                code = 7
            raise OwnError("of my own")
        if name == "unicode":
            b"\\xff".decode()
        raise {"value": ValueError, "key": KeyError, "io": FileNotFoundError, "kind": TypeError}[name](f"bad {name}")

    async def fetch_at(self, service):
        return await (await service.fetch("http://x/back")).text()

    async def events(self):
        return events

    async def fetch(self, request):
        return Response("other")
"""
MANIFEST = """
[[services]]
binding = "OTHER"
service = "other"
[[services]]
binding = "SELF"
service = "f"
[[durable_objects.bindings]]
name = "OBJECT"
class_name = "Object"
"""
HEAD = """
import asyncio
import js
import json
from datetime import UTC, datetime, date
from workers import *
from pyodide.ffi import JsException

class Object(DurableObject):
    async def watch(self, callback):
        await self.ctx.storage.put("n", 1)
        await callback(await self.ctx.storage.get("n"))
        await self.ctx.storage.put("n", 2)

    async def cursor(self):
        async def advance(by):
            n = (await self.ctx.storage.get("n") or 0) + by
            await self.ctx.storage.put("n", n)
            return n
        return advance

    async def n(self):
        return await self.ctx.storage.get("n")

    async def put_and_get(self, value):
        await self.ctx.storage.put("v", value)
        listed, several = await self.ctx.storage.list(), await self.ctx.storage.get(["v"])
        assert listed["v"] == several["v"] == await self.ctx.storage.get("v")
        return listed["v"]

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.url.endswith("/back"):
            return Response("back")
        try:
            return Response.json(await self.go(self.env.OTHER))
        except Exception as error:
            return Response.json({"failed": f"{type(error).__name__}: {error}"})

    async def go(self, other):
"""


@pytest.fixture
async def served(make_served: ServedMaker, tmp_path: Path) -> AsyncIterator[Served]:
    services = Services(databases=Databases())
    bindings = partial(FunctionBindings.open, tmp_path / "state", services)
    async with make_served(tier=1, open_bindings=bindings) as made:
        made.add(OTHER, name="other")
        yield made
    await services.databases.close()


async def go(served: Served, body: str) -> Any:
    """Run `body` in a function that has a service binding `other`; return the result."""
    served.add(HEAD + indent(dedent(body), " " * 8), manifest=MANIFEST)
    return json.loads(await served.get())


async def test_values_come_back_as_what_they_were(served: Served) -> None:
    body = """
    now = datetime(2026, 1, 2, 3, 4, 5, 6789, tzinfo=UTC)
    values = [
        None, True, 1.5, "a", [1, [2]], {"a": {"b": 1}}, {1, "x"}, {"$date": "no date"}, {"$set": [1]},
        {"$stub": 1}, {(1, 2)}, b"bytes", now, {"at": [now]}, -(2**63), 2**64 - 1,
    ]
    return [repr(value) for value in values if await other.identity(value) != value]
    """
    assert await go(served, body) == []


async def test_a_key_that_is_a_number_arrives_as_its_text_and_others_are_named(served: Served) -> None:
    body = """
    found = await other.identity({1: "one", 2.5: {3: "three"}})
    try:
        await other.identity({"a": {(1, 2): 3}})
    except TypeError as error:
        return [found, str(error)]
    """
    sentence = "DataCloneError: a dict in identity's arguments[0]['a'] takes a key that is a str, and not tuple"
    assert await go(served, body) == [{"1": "one", "2.5": {"3": "three"}}, sentence]


async def test_an_argument_is_an_object_whose_keys_are_attributes(served: Served) -> None:
    assert await go(served, 'return await other.fields({"name": "a", "inner": {"n": 1}})') == ["a", 1]


async def test_requests_responses_and_their_kin_cross_both_ways(served: Served) -> None:
    body = """
    async def pieces():
        yield b"ab"
        yield "cd"
    found = []
    for content in ("abcd", b"abcd", pieces()):
        request = Request("http://x/p", method="POST", headers={"x-a": "1"}, body=content)
        found.append(await other.text_of(request))
    response = await other.identity(Response(pieces(), status=418, headers=[("set-cookie", "a"), ("set-cookie", "b")]))
    found.append([response.status, response.headers.get_set_cookie(), await response.text()])
    request = await other.identity(Request("http://x/p?q", method="PUT", body="b"))
    found.append([request.method, request.url, await request.text()])
    blob, file = await other.identity([Blob(["x"], "text/x"), File(["y"], "name.txt", "text/y")])
    found.append([await blob.text(), blob.type, await file.text(), file.name, file.type])
    headers = await other.identity(Headers([("a", "1"), ("a", "2")]))
    form = FormData()
    form.append("a", "1")
    form.append("f", Blob(["z"]), "z.txt")
    form = await other.identity(form)
    found.append([headers.get("a"), form["a"], form["f"].name, await form["f"].text()])
    return found
    """
    assert await go(served, body) == [
        ["1", "abcd"], ["1", "abcd"], ["1", "abcd"], [418, ["a", "b"], "abcd"], ["PUT", "http://x/p?q", "b"],
        ["x", "text/x", "y", "name.txt", "text/y"], ["1, 2", "1", "z.txt", "z"],
    ]  # fmt: skip


async def test_streams_cross_in_any_number_and_are_closed_when_they_are_left(served: Served) -> None:
    body = """
    async def pieces():
        for _ in range(20):
            yield bytes(100_000)
    sizes = await asyncio.gather(other.read(pieces()), other.read(Response(pieces()).body))
    found = await other.lines()
    [first, second] = found.two.body.tee()
    text = await Response(first).text()
    assert await Response(second.pipe_through(js.TransformStream.new())).text() == text
    async for line in found.one:
        break
    await found.one.aclose()
    del found
    for _ in range(100):
        events = list(await other.events())
        if len(events) == 2:
            break
        await asyncio.sleep(0.01)
    return [sizes, len(text), line.decode(), events]
    """
    assert await go(served, body) == [[2_000_000, 2_000_000], 3890, "0\n", ["closed", "closed"]]


async def test_functions_are_called_back_while_the_call_runs(served: Served) -> None:
    body = """
    said = []
    async def note(*args, **named):
        said.append([list(args), dict(named)])
        return {"n": len(said)}
    first = await other.call(note, 1, [2], key="v")
    plain = await other.call(lambda: "plain")
    nested = await other.call(lambda inner: inner("x"), str.upper)
    many = await other.call_many(lambda n: n * 2, 500)
    return [first.n, said, plain, nested, many == [n * 2 for n in range(500)]]
    """
    assert await go(served, body) == [1, [[[1, [2]], {"key": "v"}]], "plain", "X", True]


async def test_an_exception_of_a_callback_reaches_its_caller_and_that_ones_caller(served: Served) -> None:
    body = """
    def fails():
        raise LookupError("not there")
    try:
        await other.call(fails)
    except LookupError as error:
        return [str(error), error.name]
    """
    assert await go(served, body) == ["not there", "LookupError"]


async def test_a_target_is_asked_for_what_its_class_defines_and_nothing_else(served: Served) -> None:
    body = """
    counter = await other.counter()
    found = [await counter.increment(), await counter.increment(by=4), await counter.doubled, await counter.step]
    for name in ("value", "_hidden", "nothing", "constructor"):
        try:
            found.append(await getattr(counter, name)())
        except (TypeError, AttributeError) as error:
            found.append(str(error))
    for call in (counter, lambda: counter.increment("x"), lambda: counter.step()):
        try:
            found.append(await call())
        except TypeError as error:
            found.append(str(error))
    return found
    """
    no, none = "the RPC receiver does not do this: ", "it has no method or property"
    assert await go(served, body) == [
        1, 5, 10, 2, f"{no}{none} 'value' that can be reached", "'RpcStub' object has no attribute '_hidden'",
        f"{no}{none} 'nothing' that can be reached", f"{no}{none} 'constructor' that can be reached",
        f"{no}it is no function", "unsupported operand type(s) for +=: 'int' and 'str'", f"{no}{none} 'step' that can be reached",
    ]  # fmt: skip


async def test_a_target_is_notified_when_the_last_of_its_stubs_is_disposed_of(served: Served) -> None:
    body = """
    counter = await other.counter()
    second = counter.dup()
    counter.dispose()
    found = [await second.increment(), list(await other.events())]
    with second:
        pass
    while not (events := await other.events()):
        await asyncio.sleep(0.01)
    try:
        await second.increment()
    except RuntimeError as error:
        found += [list(events), str(error)[:26]]
    (await other.counter()).increment  # nobody holds it any more
    while len(await other.events()) < 2:
        await asyncio.sleep(0.01)
    return found
    """
    assert await go(served, body) == [1, [], ["disposed"], "this stub was disposed of:"]


async def test_functions_inside_of_results_are_stubs_and_can_be_passed_on(served: Served) -> None:
    body = """
    tools = await other.adder()
    found = [await tools.add(2), await tools["add"](3), await tools.names[1](), callable(tools.add)]
    found.append(await other.call(tools.add, 10))
    same = await other.identity(tools.add)
    found.append(await same(1))
    return found
    """
    assert await go(served, body) == [2, 5, "deep", True, 15, 16]


async def test_a_function_that_came_as_an_argument_is_gone_after_the_call_unless_it_was_kept(served: Served) -> None:
    body = """
    found = []
    await other.keep(lambda: "kept")
    found.append(await other.kept())
    await other.drop()
    await other.keep(lambda: "lost", dup=False)
    try:
        await other.kept()
    except RuntimeError as error:
        found.append(str(error)[:68])
    return found
    """
    assert await go(served, body) == ["kept", "this stub was disposed of: an argument is valid until the method ret"]


async def test_an_exception_is_caught_by_its_kind_and_has_its_message(served: Served) -> None:
    body = """
    found = []
    for name, kind in {"value": ValueError, "key": KeyError, "io": OSError, "kind": TypeError, "own": JsException, "unicode": JsException}.items():
        try:
            await other.fails(name)
        except kind as error:
            found.append([error.name, str(error), isinstance(error, JsException), error.code])
    given = await other.identity(ValueError("an answer"))
    return [*found, [isinstance(given, ValueError), str(given)]]
    """
    found = await go(served, body)
    assert found[5].pop(1).startswith("'utf-8' codec can't decode")
    assert found == [
        ["ValueError", "bad value", True, "exception"], ["KeyError", "'bad key'", True, "exception"],
        ["FileNotFoundError", "bad io", True, "exception"], ["TypeError", "bad kind", True, "exception"],
        ["OwnError", "of my own", True, 7], ["UnicodeDecodeError", True, "exception"], [True, "an answer"],
    ]  # fmt: skip


async def test_what_cannot_be_sent_is_named_with_its_place(served: Served) -> None:
    body = """
    class Own:
        pass
    loop = []
    loop.append(loop)
    async def nothing():
        pass
    found, waiting = [], nothing()
    for value in (Own(), {"a": [1, Own]}, 1j, loop, waiting, range(3)):
        try:
            await other.identity(value)
        except TypeError as error:
            found.append(str(error))
            assert isinstance(error, JsException)
    waiting.close()
    return found
    """
    found = await go(served, body)
    assert [text.partition(",")[0] for text in found[:3]] == [
        "DataCloneError: identity's arguments[0] is of the type Own",
        "DataCloneError: identity's arguments[0]['a'][1] is of the type type",
        "DataCloneError: identity's arguments[0] is of the type complex",
    ]
    assert found[3] == "DataCloneError: identity's arguments is nested too deeply, or contains itself"
    assert found[4].endswith("cannot be sent; await it first")
    assert "supported are None, bool, numbers, " in found[5]


async def test_what_an_object_keeps_comes_back_as_it_was_and_what_cannot_be_kept_is_named(served: Served) -> None:
    body = """
    object, now = self.env.OBJECT.getByName("a"), datetime(2026, 1, 2, tzinfo=UTC)
    values = [{"$date": "2026-01-02"}, {"$set": [1]}, {"$date": "none"}, {"at": now, "in": {1, 2}}, b"b", [None]]
    found = [repr(value) for value in values if await object.put_and_get(value) != value]
    try:
        await object.put_and_get(Blob("a"))
    except JsException as error:
        found.append(str(error).partition(",")[0])
    return found
    """
    assert await go(served, body) == ["DataCloneError: the value of 'v' is of the type Blob"]


async def test_an_object_calls_back_and_its_functions_are_events_of_it(served: Served) -> None:
    body = """
    object, seen = self.env.OBJECT.getByName("a"), []
    async def callback(n):
        seen.append([n, await object.n()])
    await object.watch(callback)
    advance = await object.cursor()
    return [seen, await object.n(), await advance(5), await advance(1), await object.n(), await other.call(advance, 1)]
    """
    assert await go(served, body) == [[[1, 1]], 2, 7, 8, 8, 9]


async def test_a_service_can_be_given_to_another_function(served: Served) -> None:
    body = """
    self_stub = await other.identity(self.env.SELF)
    return [await other.fetch_at(self.env.SELF), await other.fetch_at(self.env.OTHER), await (await self_stub.fetch("http://x/back")).text()]
    """
    assert await go(served, body) == ["back", "other", "back"]


async def test_a_call_that_is_given_up_ends_what_it_began_elsewhere(served: Served) -> None:
    body = """
    async def forever():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(1)
    ended = []
    try:
        async with asyncio.timeout(0.2):
            await other.call(forever)
    except TimeoutError:
        pass
    while not ended:
        await asyncio.sleep(0.01)
    return ended
    """
    assert await go(served, body) == [1]
    pool = served.functions.pools["other"]
    await eventually(lambda: not any(isolate.work.requests for isolate in pool.isolates.usable))
    assert not any(isolate.work.requests for isolate in pool.isolates.usable)


async def test_a_stub_whose_function_has_ended_says_so(served: Served) -> None:
    body = """
    global kept
    if "kept" not in globals():
        kept = await other.counter()
        return await kept.increment()
    try:
        async with asyncio.timeout(60):
            return await kept.increment()
    except Exception as error:
        return str(error)
    """
    assert await go(served, body) == 1
    (isolate,) = served.functions.pools["other"].isolates.usable
    isolate.end("for the test", "test")
    await isolate.until_gone()
    assert "was ended: for the test" in json.loads(await served.get())


class Incoming:
    """Messages from the other side of a session."""

    def __init__(self, *messages: Any) -> None:
        self.is_closed = False
        self._chunks = [piece for message in messages for piece in framed(message)]

    def __aiter__(self) -> "Incoming":
        return self

    async def __anext__(self) -> bytes:
        if not self._chunks:
            raise StopAsyncIteration
        return self._chunks.pop(0)

    async def aclose(self) -> None:
        self.is_closed = True


def framed(message: Any) -> list[bytes]:
    """Return the bytes of a framed message, one by one."""
    data = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    whole = len(data).to_bytes(4, "big") + data
    return [whole[place : place + 1] for place in range(len(whole))]


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([b"\xc1"], "broke the protocol of calls: DecodeError"),
        ([["call"]], "broke the protocol of calls: TypeError"),
        ([["result", 0, {"$stub": []}]], "broke the protocol of calls: TypeError"),
        ([["call", number, 1, None, [], {}] for number in range(300)], "made too many concurrent calls"),
        ([["error", 5, "late"], ["drop", 7], ["cancel", 9]], "the call is over, and its results were released"),
    ],
)
async def test_a_fault_of_a_session_fails_the_call_and_nothing_else(messages: list[Any], sentence: str) -> None:
    incoming = Incoming(*messages)
    with pytest.raises(Failure, match=sentence):
        await RpcSession().result(incoming)
    assert incoming.is_closed


async def test_messages_arrive_whole_however_they_were_cut() -> None:
    assert await RpcSession().result(Incoming(["result", 0, {"a": [1, b"b"]}])) == {"a": [1, b"b"]}
