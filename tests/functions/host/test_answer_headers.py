"""The headers that a site sends for a hostile function, which bypasses the SDK's checks."""

import pytest

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.host.answer_headers import checked_headers, confined_headers
from tests.functions.conftest import Served

RAW = """
from workers import Response, WorkerEntrypoint
from urllib.parse import parse_qsl, urlsplit
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        async def pieces():
            yield "x"
        query = parse_qsl(urlsplit(request.url).query, keep_blank_values=True, encoding="latin-1")
        response = Response(pieces() if request.url.split("?")[0].endswith("/stream") else "well")
        response.headers._pairs = query
        response.status = int(request.headers.get("x-status") or 200)
        return response
"""
OURS_IN_ANY_CASE = "X-Pilotlight-Site=evil&x-PILOTLIGHT-refusal=draining&x-pilotlight-queue=99"
HOPS_IN_ANY_CASE = "Transfer-Encoding=chunked&CONNECTION=close&Keep-Alive=1&Upgrade=h2c&Trailer=x&Proxy-Authenticate=x"


async def test_what_only_a_site_or_a_connection_may_say_is_dropped_whatever_its_case(served: Served) -> None:
    served.add(RAW)
    for path in ("/", "/stream"):
        answer = await served.ask(f"{path}?{OURS_IN_ANY_CASE}&{HOPS_IN_ANY_CASE}&X-Kept=%20yes%09")
        assert answer.headers == [("x-kept", "yes")]
        if answer.stream is not None:
            await answer.stream.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "query",
    [
        "foo:bar=1",
        "foo%20bar=1",
        "=1",
        "f%C3%B6=1",
        "a=1%012",
        "a=1%0b",
        "a=1%7f",
        "a=1%0d%0aset-cookie:%20b",
        "a%0d=1",
        "content-length=-1",
        "content-length=1,%201",
        "content-length=1&Content-Length=2",
    ],
)
async def test_a_header_that_http_does_not_know_is_refused_by_name_and_its_request_is_over(
    served: Served, query: str
) -> None:
    served.add(RAW)
    for path in ("/", "/stream"):
        with pytest.raises(Failure, match="the function's response has "):
            await served.ask(f"{path}?{query}")
    assert served.functions.pools["f"].isolates.load == 0


@pytest.mark.parametrize("status", ["100", "101", "103", "199", "600", "-1"])
async def test_a_status_that_is_no_answers_is_refused(served: Served, status: str) -> None:
    served.add(RAW)
    for path in ("/", "/stream"):
        with pytest.raises(Failure):
            await served.ask(path, headers=[("x-status", status)])
    assert served.functions.pools["f"].isolates.load == 0


def test_a_length_is_sent_once_however_often_a_function_sets_it() -> None:
    pairs = [("Content-Length", "3"), ("a", "b"), ("content-length", " 3"), ("CONTENT-LENGTH", "3")]
    assert checked_headers(pairs) == [("content-length", "3"), ("a", "b")]


def test_values_in_latin_1_and_tabs_pass() -> None:
    assert checked_headers([("A", "caf\xe9\tau lait"), ("b", "")]) == [("a", "caf\xe9\tau lait"), ("b", "")]


@pytest.mark.parametrize(
    ("cookie", "sent"),
    [
        ("a=b", "a=b; Path=/fn/f"),
        ("a=b; Path=/; HttpOnly", "a=b; HttpOnly; Path=/fn/f"),
        ("a=b;path = /x/;PATH=/", "a=b; Path=/fn/f"),
        ("a=b; Path=/x; Secure", "a=b; Secure; Path=/fn/f/x"),
        ("a=b; Path=/fn/f/x", "a=b; Path=/fn/f/x"),
        ("a=b; Path=/fn/other", "a=b; Path=/fn/f/fn/other"),
        ("a=b; Path=/fn/f2", "a=b; Path=/fn/f/fn/f2"),
        ("a=b; Path=x", "a=b; Path=/fn/f"),
        ("a=b; Path=/x; Path=", "a=b; Path=/fn/f"),
    ],
)
def test_a_cookie_of_a_function_below_a_path_goes_to_it_alone(cookie: str, sent: str) -> None:
    assert confined_headers([("set-cookie", cookie), ("x", "y")], "/fn/f") == [("set-cookie", sent), ("x", "y")]


def test_a_function_below_a_path_says_nothing_of_the_whole_origin() -> None:
    assert confined_headers([("clear-site-data", '"*"'), ("service-worker-allowed", "/")], "/fn/f") == []
