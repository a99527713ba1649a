"""A router's requests for sites' logs: parsing of the client's query, and sites that do not answer."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.requests.function_hosts import FunctionHosts
from pilotlight.edge_router.services.deployments import DeployGuard, DeploymentApi
from pilotlight.edge_router.services.function_logs import log_query
from pilotlight.wire.credentials import Access
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.deployments import encode
from pilotlight.wire.hop.function_logs import LOGS_PATH, FoundLogs, LoggedInvocation, LogQuery
from pilotlight.wire.hop.headers import HOP
from pilotlight.wire.hop.status import FunctionsStatus
from pilotlight.wire.http.certificate import Certificate, client_context
from pilotlight.wire.http.listen import bind
from pilotlight.wire.http.server import Server
from tests.edge_router.builders import network
from tests.edge_router.test_https import write


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


def test_a_status_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        ApiError, match=r"^status is an HTTP status \(404, 5xx\), an outcome \(ok, .*\), or error, and not 'good'$"
    ):
        log_query("f", QueryParams([("status", "good")]))


@pytest.mark.process
@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl's command")
async def test_sites_are_merged_by_time_over_https_and_one_that_is_gone_is_named(tmp_path: Path) -> None:
    def invocation(seq: int, at_s: float) -> LoggedInvocation:
        return LoggedInvocation(seq, str(seq), "f", "", at_s, 1.0, 1.0, "fetch", "GET /", 200, "ok", site="x")

    asked: list[bytes] = []

    async def answer(request: Request) -> Response:
        asked.append(await request.body())
        assert request.headers[HOP]
        return Response(encode([invocation(9, 30.0), invocation(8, 10.0)]))

    files = write(tmp_path)
    listener, gone = bind("127.0.0.1", 0), bind("127.0.0.1", 0)
    server = Server(Starlette(routes=[Route(LOGS_PATH, answer, methods=["POST"])]))
    await server.start(listener, Certificate(Path(files["tls_certificate"]), Path(files["tls_key"])).context)
    urls = {name: f"https://127.0.0.1:{sock.getsockname()[1]}" for name, sock in (("ams1", listener), ("iad1", gone))}
    gone.close()
    status = SimpleNamespace(functions=FunctionsStatus(2, takes_deployed=True))
    sites: Any = {
        name: SimpleNamespace(name=name, url=url, state="healthy", status=status) for name, url in urls.items()
    }
    guard = DeployGuard("token", "", Access([], is_required=False), SiteClocks([*urls]))
    tls = client_context(files["tls_certificate"])
    places: Any = None
    api = DeploymentApi(sites, guard, places, FunctionHosts(network(urls)), tmp_path / "router", tls)
    try:
        found = msgspec.json.decode(await api.invocations("f", QueryParams([("after", "iad1:2")])), type=FoundLogs)
    finally:
        await server.stop()
    assert [each.at_s for each in found.invocations] == [10.0, 30.0]
    assert found.after == {"ams1": 9, "iad1": 2}
    assert [*found.unread] == ["iad1"]
    assert b'"function":"f"' in asked[0]
