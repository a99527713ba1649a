"""Code written for the platform: values in its notation, and mistakes that raise a helpful error."""

import json
from textwrap import dedent
from typing import Any

from tests.functions.conftest import Served

HEAD = """
import js, json
from datetime import UTC, datetime
from http import HTTPMethod
from workers import *

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response.json(await go(request))

def said(call, *args, **named):
    try:
        call(*args, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


async def go(served: Served, body: str) -> Any:
    lines = "\n".join(f"    {line}" for line in dedent(body).strip().splitlines())
    served.add(f"{HEAD}\nasync def go(request):\n{lines}\n")
    return json.loads(await served.get("/x"))


async def test_a_method_is_a_member_of_http_method_and_a_text(served: Served) -> None:
    body = """
    other = Request("http://x/", method=HTTPMethod.PUT)
    own = Request("http://x/", method="propfind")
    return [request.method.value, request.method == "GET", request.method is HTTPMethod.GET, repr(other), other.clone().method.name, own.method]
    """
    assert await go(served, body) == ["GET", True, True, "Request(method='PUT', url='http://x/')", "PUT", "PROPFIND"]


async def test_what_is_no_request_and_no_response_is_named(served: Served) -> None:
    body = """
    return [
        said(Response, "x", init={"status": 404}),
        said(Response, "x", statsu=404),
        said(Response, "x", {"status": 404}),
        said(Request, "http://x/", method="A B"),
        said(Request, "http://x/", headers="bad"),
        said(Headers, [("a", "b", "c")]),
        said(Blob, 5),
    ]
    """
    assert await go(served, body) == [
        "TypeError: a response has no option 'init'; it has status, status_text, headers, web_socket",
        "TypeError: a response has no option 'statsu'; it has status, status_text, headers, web_socket",
        "TypeError: a response's status is a number from 101 to 599, and not {'status': 404}; options come by name: status=404, headers={...}",
        "TypeError: 'A B' is no HTTP method",
        "TypeError: headers are a dict, or pairs of a name and a value, and not 'bad'",
        "TypeError: headers are a dict, or pairs of a name and a value, and not \"[('a', 'b', 'c')]\"",
        "TypeError: a Blob is made of str, bytes and Blobs, and not of int",
    ]


async def test_responses_and_files_have_what_the_platforms_sdk_gives_them(served: Served) -> None:
    body = """
    found = [await Response("a").string(), bytes(await Response(b"b").memoryview()).decode()]
    found += [said(Response("", status=404).raise_for_status), said(Response("").raise_for_status)]
    file = File(["a\\r\\nb"], "f.txt", "text/plain", endings="native", last_modified=5)
    copy = File(file, "g.txt")
    found += [await file.text(), file.lastModified, copy.last_modified, copy.type, Blob(file).type, File([], "h").last_modified > 10**12]
    return found
    """
    assert await go(served, body) == [
        "a", "b", "OSError: 404 Not Found for url: ", None, "a\nb", 5, 5, "text/plain", "text/plain", True,
    ]  # fmt: skip


async def test_a_body_is_read_once_and_its_bytes_answer_as_a_buffer(served: Served) -> None:
    body = """
    from pyodide.http import BodyUsedError
    given = Request("http://x/", method="POST", body="ab")
    buffer = await given.buffer()
    found = [buffer.byteLength, buffer.to_bytes().decode(), (await Blob("abc").array_buffer()).byteLength, Blob("a", "b/c").js_object.type]
    for kind in (OSError, TypeError, BodyUsedError):
        try:
            await given.text()
        except kind as error:
            found.append(str(error)[:31])
    try:
        given.clone()
    except OSError:
        found.append("no clone")
    return found
    """
    used = "the body has been read already;"
    assert await go(served, body) == [2, "ab", 3, "b/c", used, used, used, "no clone"]


async def test_headers_and_responses_are_written_as_the_platforms_sdk_writes_them(served: Served) -> None:
    body = """
    headers = Headers([("a", "1"), ("A", "2"), ("set-cookie", "x=1, y"), ("set-cookie", "z=2")])
    found = [headers.get_all("a"), headers.get_all("Set-Cookie"), headers.get_all("none"), await Response.json({"a": [1, "ü"]}).text()]
    return [*found, repr(Response.json(1)), repr(Response(None, status=204))]
    """
    assert await go(served, body) == [
        ["1, 2"], ["x=1, y", "z=2"], [], '{"a": [1, "\\u00fc"]}',
        "Response(status=200, status_text='OK', content_type='application/json')", "Response(status=204, status_text='No Content')",
    ]  # fmt: skip


async def test_json_is_written_as_javascript_writes_it(served: Served) -> None:
    body = """
    value = {"at": datetime(2026, 1, 2, 3, 4, 5, 6789, tzinfo=UTC), "naive": datetime(2026, 1, 2), "n": [1.0, 1.5, float("nan")]}
    return [js.JSON.stringify(value), js.JSON.stringify({"a": 1}, None, 1), said(js.JSON.stringify, {"a": {1}})]
    """
    assert await go(served, body) == [
        '{"at":"2026-01-02T03:04:05.007Z","naive":"2026-01-02T00:00:00.000Z","n":[1,1.5,null]}',
        '{\n "a": 1\n}',
        "TypeError: the argument of JSON.stringify contains a value of type 'set', which JSON cannot represent",
    ]


async def test_names_for_annotations_can_be_imported(served: Served) -> None:
    body = """
    from pyodide.ffi import ConversionError, JsArray, JsBuffer, JsMap, JsPromise, JsProxy
    return [isinstance({}, kind) for kind in (JsArray, JsBuffer, JsMap, JsPromise, JsProxy)]
    """
    assert await go(served, body) == [False] * 5
