"""Routers' requests for sites' logs: parsing a client's question, and sites that do not answer."""

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.edge_router.services.function_logs import find_logs, log_query
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.deployments import encode
from pilotlight.wire.hop.function_logs import LOGS_PATH, LoggedInvocation, LogQuery
from pilotlight.wire.http.listen import bind
from pilotlight.wire.http.server import Server


def test_a_question_is_read_with_the_places_up_to_which_sites_were_read() -> None:
    asked = QueryParams(
        [("since_s", "12.5"), ("status", "5xx"), ("limit", "7"), ("after", "ams1:3"), ("after", "iad1:4")]
    )
    assert log_query("f", asked) == (LogQuery("f", since_s=12.5, status="5xx", limit=7), {"ams1": 3, "iad1": 4})


@pytest.mark.parametrize(
    ("name", "value"),
    [("since", "1h"), ("status", "good"), ("limit", "0"), ("limit", "x"), ("after", "ams1"), ("grep", "x" * 501)],
)
def test_a_question_that_makes_no_sense_is_refused(name: str, value: str) -> None:
    with pytest.raises(ApiError) as refused:
        log_query("f", QueryParams([(name, value)]))
    assert refused.value.word == "invalid_request"


@pytest.mark.process
async def test_sites_are_merged_by_time_and_one_that_is_gone_is_named() -> None:
    def invocation(seq: int, at_s: float) -> LoggedInvocation:
        return LoggedInvocation(seq, str(seq), "f", "", at_s, 1.0, 1.0, "fetch", "GET /", 200, "ok", site="x")

    asked: list[bytes] = []

    async def answer(request: Request) -> Response:
        asked.append(await request.body())
        assert request.headers["x-signed"] == "POST"
        return Response(encode([invocation(9, 30.0), invocation(8, 10.0)]))

    listener, gone = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
    server = Server(Starlette(routes=[Route(LOGS_PATH, answer, methods=["POST"])]))
    await server.start(listener)
    urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in (listener, gone)]
    gone.close()
    sites: Any = [SimpleNamespace(name=name, url=url) for name, url in zip(("ams1", "iad1"), urls, strict=True)]
    try:
        found = await find_logs(sites, LogQuery("f"), {"iad1": 2}, lambda method, *rest: {"x-signed": method})
    finally:
        await server.stop()
    assert [each.at_s for each in found.invocations] == [10.0, 30.0]
    assert found.after == {"ams1": 9, "iad1": 2}
    assert [*found.unread] == ["iad1"]
    assert b'"function":"f"' in asked[0]
