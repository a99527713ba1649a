"""The `workers` package as functions use it, in real isolates."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from pilotlight.functions.channel.frames import UNNUMBERED, QueueEvent, RpcEvent, ScheduledEvent
from pilotlight.functions.host.faults import Fault
from tests.asgi import eventually
from tests.functions.conftest import Served
from tests.functions.sdk.test_conventions import HEAD, default


async def test_a_response_of_json_says_so(served: Served) -> None:
    served.add(default("return Response.json({'a': [1, None, 'ä']}, status=201, headers={'X-A': 'b'})"))
    response = await served.ask()
    assert response.status == 201
    assert dict(response.headers) == {"x-a": "b", "content-type": "application/json"}
    assert json.loads(response.body) == {"a": [1, None, "ä"]}


async def test_a_generator_streams_and_each_piece_arrives_by_itself(served: Served) -> None:
    served.add(default(
        """
async def pieces():
    for i in range(3):
        yield f"{i};"
        await asyncio.sleep(0.02)
return Response(pieces(), headers={"content-type": "text/plain"})
"""
    ))  # fmt: skip
    response = await served.ask()
    assert response.stream is not None
    assert [chunk async for chunk in response.stream] == [b"0;", b"1;", b"2;"]


async def test_the_request_brings_method_headers_body_and_forms(served: Served) -> None:
    served.add(default(
        """
if request.headers.get("content-type", "").startswith("multipart/"):
    form = await request.form_data()
    upload = form["file"]
    return Response.json([form.get_all("a"), upload.name, upload.type, await upload.text()])
return Response.json([request.method, request.url, request.headers["X-One"], request.headers.get_all("x-two"), await request.json()])
"""
    ))  # fmt: skip
    headers = [("x-one", "1"), ("x-two", "a"), ("x-two", "b"), ("content-type", "application/json")]
    got = json.loads(await served.get("/p?q=1", method="POST", body=b'{"k":1}', headers=headers))
    assert got == ["POST", "http://host/p?q=1", "1", ["a, b"], {"k": 1}]
    body = (
        b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n2\r\n'
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="x.txt"\r\nContent-Type: text/x\r\n\r\nin\r\nside\r\n--B--\r\n'
    )
    got = json.loads(
        await served.get(method="POST", body=body, headers=[("content-type", "multipart/form-data; boundary=B")])
    )
    assert got == [["1", "2"], "x.txt", "text/x", "in\r\nside"]


async def test_a_streamed_body_goes_in_while_the_answer_comes_out(served: Served) -> None:
    served.add(default("return Response(request.body)"))

    async def body() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"z" * 100_000

    assert len(await served.get(method="POST", body=body())) == 2_000_000


async def test_vars_are_in_self_env_and_in_the_modules_env(served: Served) -> None:
    served.add(
        default("return Response(f'{self.env.GREETING} {env.GREETING} {AT_IMPORT} {self.env.LIST[1]}')").replace(
            "class Default", "AT_IMPORT = env.GREETING\n\nclass Default"
        ),
        manifest="[vars]\nGREETING = 'hi'\nLIST = [1, 2]",
    )
    assert await served.get() == b"hi hi hi 2"


async def test_a_name_that_is_not_bound_is_named_with_those_that_are(served: Served) -> None:
    served.add(default("return Response(self.env.GREETNG)"), manifest="[vars]\nGREETING = 'hi'")
    with pytest.raises(Fault, match="binds no 'GREETNG'; it binds GREETING") as failed:
        await served.get()
    assert 'entry.py", line 6, in fetch' in failed.value.detail
    assert "isolate.py" not in failed.value.detail
    assert "host.py" not in failed.value.detail


async def test_an_authors_mistake_is_shown_with_its_own_name_and_frames_alone(served: Served) -> None:
    body = """
def ask():
    return self.env.SELF.missing()
try:
    await ask()
except Exception as error:
    raise RuntimeError("own") from error
"""
    served.add(default(body), manifest='[[services]]\nbinding = "SELF"\nservice = "f"\n')
    with pytest.raises(Fault) as failed:
        await served.get()
    lines = failed.value.detail.splitlines()
    assert {line.split('"')[1].rpartition("/")[2] for line in lines if line.startswith("  File")} == {"entry.py"}
    assert [line for line in lines if line and not line.startswith((" ", "Traceback"))] == [
        "Error: the binding 'SELF' is not served here",
        "The above exception was the direct cause of the following exception:",
        "RuntimeError: own",
    ]


async def test_work_after_the_response_that_fails_is_logged_without_an_empty_line(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pilotlight.function")
    served.add(
        default(
            "async def fails():\n    raise ValueError('later')\nself.ctx.waitUntil(fails())\nreturn Response('now')"
        )
    )
    assert await served.get() == b"now"
    await eventually(lambda: any("ValueError: later" in line for line in caplog.messages))
    await asyncio.sleep(0.2)
    assert not [line for line in caplog.messages if line.rstrip() == "f:"]


async def test_a_forgotten_await_is_logged_with_the_authors_line(served: Served) -> None:
    body = "kept = self.env.SELF.fetch('http://x/')\nasync def own(): pass\nowned = own()\nreturn Response('ok')"
    served.add(default(body), manifest='[[services]]\nbinding = "SELF"\nservice = "f"\n')
    assert await served.get() == b"ok"
    log = served.functions.pools["f"].isolates.living[0].process.log
    await eventually(lambda: len(log.lines) >= 4)
    source = (served.folder / "f/src/entry.py").read_text().splitlines()
    for variable in ("kept", "owned"):
        number, text = next((i, line) for i, line in enumerate(source, 1) if f"{variable} =" in line)
        found = next(i for i, line in enumerate(log.lines) if f"entry.py:{number}: RuntimeWarning: coroutine '" in line)
        assert log.lines[found].endswith("' was never awaited")
        assert log.lines[found + 1].strip() == text.strip()
    assert not any("tracemalloc" in line or "isolate_main" in line for line in log.lines)


async def test_wait_until_continues_after_the_response(served: Served) -> None:
    served.add(
        HEAD
        + """
done = []
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.url.endswith("/done"):
            return Response(str(done))
        async def later():
            await asyncio.sleep(0.05)
            done.append(1)
        self.ctx.waitUntil(later())
        return Response("soon")
"""
    )
    assert await served.get() == b"soon"

    async def is_done() -> bool:
        return await served.get("/done") == b"[1]"

    await eventually(is_done)


async def test_named_entrypoints_and_rpc_methods_are_reached_by_name(served: Served) -> None:
    served.add(
        HEAD
        + """
class Default(WorkerEntrypoint):
    async def add(self, a, b=1):
        return {"sum": a + b}
    def _secret(self):
        return "no"
class Admin(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("admin")
"""
    )
    added = await served.functions.ask("f", RpcEvent(UNNUMBERED, "default", "add", [1], {"b": 4}))
    assert added.value == {"sum": 5}
    assert await served.get(entrypoint="Admin") == b"admin"
    with pytest.raises(Fault, match="no method '_secret' that can be called"):
        await served.functions.ask("f", RpcEvent(UNNUMBERED, "default", "_secret"))
    with pytest.raises(Fault, match="no entrypoint 'Missing'; its entrypoints: Default, Admin"):
        await served.get(entrypoint="Missing")


async def test_scheduled_and_queue_handlers_get_their_events(served: Served) -> None:
    served.add(
        HEAD
        + """
seen = []
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response.json(seen)
    async def scheduled(self, controller, env, ctx):
        seen.append([controller.cron, controller.scheduledTime])
    async def queue(self, batch):
        seen[:] = [[message.id, message.attempts, message.timestamp.isoformat()] for message in batch.messages]
        for message in batch.messages:
            if message.body["n"] == 2:
                message.retry(delay_seconds=3)
            else:
                message.ack()
"""
    )
    await served.functions.ask("f", ScheduledEvent(UNNUMBERED, "* * * * *", 123))
    assert json.loads(await served.get()) == [["* * * * *", 123]]
    messages = [{"id": str(n), "timestamp_ms": 1_500 * n, "body": {"n": n}, "attempts": 1} for n in (1, 2, 3)]
    outcome = (await served.functions.ask("f", QueueEvent(UNNUMBERED, "q", messages))).value
    assert outcome == {"acked": ["1", "3"], "retried": [{"id": "2", "delay_s": 3}]}
    times = ("01.500000", "03", "04.500000")
    assert json.loads(await served.get()) == [
        [str(n), 1, f"1970-01-01T00:00:{second}+00:00"] for n, second in enumerate(times, 1)
    ]


async def test_redirects_and_null_body_statuses_follow_the_standard(served: Served) -> None:
    served.add(default(
        """
if request.url.endswith("/r"):
    return Response.redirect("http://else/", 307)
if request.url.endswith("/n"):
    return Response(None, status=204)
return Response("x", status=204)
"""
    ))  # fmt: skip
    moved = await served.ask("/r")
    assert (moved.status, moved.headers) == (307, [("location", "http://else/")])
    assert (await served.ask("/n")).status == 204
    with pytest.raises(Fault, match="204 has no body"):
        await served.get("/x")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return 42", "a value of type int; it must return a Response"),
        ("pass", "a value of type NoneType"),
        ("return Response({'a': 1})", "Unsupported type in Response: dict; Response.json"),
        ("return Response({1})", "^Unsupported type in Response: set$"),
        ("return Response('x', status=99)", "from 101 to 599"),
        ("return Response('x', headers={'a': 'b\\r\\nc: d'})", "has a line break in it"),
        ("raise KeyError('nothing')", "nothing"),
        ("await request.text(); await request.text()", "read already"),
    ],
)
async def test_a_mistake_comes_back_with_the_authors_line(served: Served, body: str, sentence: str) -> None:
    served.add(default(body))
    with pytest.raises(Fault, match=sentence) as failed:
        await served.get(method="POST", body=b"x")
    assert (failed.value.code == "wrong_type") == ("a value of type" in sentence)
    if body.startswith(("return Response", "raise", "await")):
        assert "entry.py" in failed.value.detail


async def test_a_function_without_a_handler_is_named_as_on_the_platform(served: Served) -> None:
    served.add("from workers import WorkerEntrypoint\nclass Admin(WorkerEntrypoint): ...")
    with pytest.raises(
        Fault, match=r'^Python entrypoint "entry.py" does not export a handler named "on_fetch", nor .*: Admin'
    ):
        await served.get()


async def test_the_clients_leaving_cancels_the_functions_work(served: Served) -> None:
    served.add(
        HEAD
        + """
seen = []
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.url.endswith("/seen"):
            return Response.json(seen)
        async def endless():
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0.01)
            finally:
                seen.append("closed")
        return Response(endless())
"""
    )
    response = await served.ask()
    assert response.stream is not None
    assert await anext(response.stream) == b"x"
    await response.stream.aclose()  # type: ignore[attr-defined]

    async def is_closed() -> bool:
        return bool(json.loads(await served.get("/seen")) == ["closed"])

    await eventually(is_closed)
    assert served.functions.pools["f"].isolates.living[0].work.load == 0


async def test_an_isolate_that_idles_is_ended_and_the_next_request_starts_another(make_served) -> None:
    async with make_served(limits={"idle_s": 0.2}) as served:
        served.add(default("return Response('x')"))
        assert await served.get() == b"x"
        await eventually(lambda: served.functions.pools["f"].isolates.living == [])
        assert await served.get() == b"x"
        assert served.functions.pools["f"].isolates.num_started == 2


async def test_a_header_that_is_missing_is_none_and_a_default_is_taken(served: Served) -> None:
    served.add(default(
        """
headers = Headers({"x-a": "1"})
taken = [headers["cookie"], headers.get("cookie", "none"), "cookie" in headers, headers.setdefault("x-b", "2"), headers.pop("x-a")]
del headers["x-c"]
return Response.json([request.headers["cookie"], *taken, sorted(headers)])
"""
    ))  # fmt: skip
    assert json.loads(await served.get()) == [None, None, "none", False, "2", "1", ["x-b"]]


async def test_json_that_was_sent_is_read_by_attributes_too(served: Served) -> None:
    served.add(default(
        """
sent = await request.json()
again = await Response.json(sent).json()
return Response.json([sent.name, sent["name"], sent.inner[0].n, again.name, sent.to_py() == dict(sent), list(sent.object_keys())])
"""
    ))  # fmt: skip
    body = b'{"name": "Ada", "inner": [{"n": 1}]}'
    assert json.loads(await served.get(method="POST", body=body)) == ["Ada", "Ada", 1, "Ada", True, ["name", "inner"]]


async def test_a_handler_may_give_back_what_it_has_not_awaited(served: Served) -> None:
    served.add(default("async def later():\n    return Response('waited for')\nreturn later()"))
    assert await served.get() == b"waited for"


async def test_a_response_or_request_is_made_from_another_and_can_be_changed(served: Served) -> None:
    served.add(default(
        """
import js
first = js.Response.new("text", status=201, headers={"x-a": "1"})
second = js.Response.new(first.body, first)
second.headers["x-b"] = "2"
asked = js.Request.new("https://example.com/other", request.js_object)
return Response.json([second.status, dict(second.headers), dict(first.headers).get("x-b"), await second.text(),
    asked.url, asked.method, await asked.text(), asked.headers["x-c"]])
"""
    ))  # fmt: skip
    status, headers, before, *rest = json.loads(await served.get(method="PUT", body=b"sent", headers=[("x-c", "3")]))
    assert (status, headers["x-a"], headers["x-b"], before) == (201, "1", "2", None)
    assert rest == ["text", "https://example.com/other", "PUT", "sent", "3"]


async def test_numbers_that_json_does_not_have_are_null_and_redirects_are_encoded(served: Served) -> None:
    served.add(default(
        """
if "json" in request.url:
    return Response.json({"a": float("nan"), "b": [float("inf"), 1.5]})
return Response.redirect("https://exämple.com/ü/%C3%BC?q=a b&r=☃", 307)
"""
    ))  # fmt: skip
    assert json.loads(await served.get("/json")) == {"a": None, "b": [None, 1.5]}
    location = dict((await served.ask()).headers)["location"]
    assert location == "https://xn--exmple-cua.com/%C3%BC/%C3%BC?q=a%20b&r=%E2%98%83"


async def test_what_is_not_known_of_a_request_is_none(served: Served) -> None:
    served.add(default("return Response.json([request.cf.country, request.cf.tlsVersion, request.cf.get('asn')])"))
    assert json.loads(await served.get()) == [None, None, None]


async def test_older_code_takes_urls_apart_and_puts_them_together(served: Served) -> None:
    served.add(default(
        """
from js import URL, URLSearchParams
url = URL.new("https://Example.com:443/a b?q=1&q=2&e=#top")
seen = [url.href, url.origin, url.host, url.port, url.pathname, url.search, url.hash, url.searchParams.getAll("q"), url.searchParams["zz"]]
url.hostname, url.pathname, url.port = "foo.example.com", "/x", 8080
url.searchParams.set("q", "ü &")
seen += [str(url), URL.new("../c", "https://h/a/b/").href, URL.canParse("nothing"), URLSearchParams.new({"a": 1}).toString()]
try:
    URL.new("/only/a/path")
except TypeError as error:
    seen.append(str(error))
return Response.json(seen)
"""
    ))  # fmt: skip
    got = json.loads(await served.get())
    whole = "https://example.com/a%20b?q=1&q=2&e=#top"
    assert got[:5] == [whole, "https://example.com", "example.com", "", "/a%20b"]
    assert got[5:9] == ["?q=1&q=2&e=", "#top", ["1", "2"], None]
    assert got[9:13] == ["https://foo.example.com:8080/x?q=%C3%BC+%26&e=#top", "https://h/a/c", False, "a=1"]
    assert "begins with a scheme and a host" in got[13]


async def test_older_code_has_dates_bytes_timers_and_digests(served: Served) -> None:
    served.add(default(
        """
from js import AbortController, Date, TextDecoder, TextEncoder, Uint8Array, atob, btoa, clearTimeout, crypto, setTimeout
from pyodide.ffi import create_once_callable, create_proxy
fired = asyncio.Event()
setTimeout(create_once_callable(fired.set), 1)
clearTimeout(setTimeout(create_proxy(lambda: fired.clear()), 0))
await fired.wait()
controller = AbortController.new()
controller.abort()
digest = await crypto.subtle.digest("SHA-256", TextEncoder.new().encode("abc"))
random = crypto.getRandomValues(Uint8Array.new(8))
moment = Date.new(1700000000123)
text = TextDecoder.new().decode(TextEncoder.new().encode("hü"))
return Response.json([Uint8Array.new(digest).to_bytes().hex()[:8], len(random), random != bytes(8), len(crypto.randomUUID()),
    btoa("ab"), atob("YWI="), text, moment.toISOString(), moment.getUTCDay(), Date.now() > 1.7e12, controller.signal.aborted])
"""
    ))  # fmt: skip
    assert json.loads(await served.get()) == [
        "ba7816bf", 8, True, 36, "YWI=", "ab", "hü", "2023-11-14T22:13:20.123Z", 2, True, True,
    ]  # fmt: skip


async def test_javascript_features_that_are_not_offered_here_are_refused_by_name(served: Served) -> None:
    served.add(default("from js import Intl"))
    with pytest.raises(Fault, match=r"js\.Intl is not offered"):
        await served.ask()


async def test_requests_and_urls_are_written_as_browsers_write_them(served: Served) -> None:
    served.add(default(
        """
from js import URL
from workers import Request
written = ["https://é.H/a/../b", "https://h:443/a/%2e%2E/b?c=/../d", r"https:\\\\h\\b?\\c", "https://h/b c#d e", "https://h?a", "wss://h/./"]
seen = [Request(url).url for url in written]
url = URL.new("https://h/a/./b")
url.pathname = "/c/../d"
refused = []
for given in ("/only/a/path", "https://h:port/", "https://é..h/"):
    try:
        Request(given)
    except TypeError as error:
        refused.append(str(error))
copies = [Request(request.url).clone().url == request.url, request.clone().url == request.url]
return Response.json([seen, [URL.new(url).href for url in written] == seen, url.href, URL.new(r"\\x", url).href, refused, copies])
"""
    ))  # fmt: skip
    seen, is_same, changed, relative, refused, copies = json.loads(await served.get("/a/..//b"))
    assert seen == [
        "https://xn--9ca.h/b",
        "https://h/b?c=/../d",
        "https://h/b?%5Cc",
        "https://h/b%20c#d%20e",
        "https://h/?a",
        "wss://h/",
    ]
    assert (is_same, changed, relative, copies) == (True, "https://h/d", "https://h/x", [False, True])
    assert all("is no URL" in each for each in refused)
    assert len(refused) == 3
