"""Traces: the spans of a request and of each tried site, the parents of the sites' spans, and data that must not be in them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from pilotlight.edge_router.app import build_app
from pilotlight.sites.config import ConfigError
from tests.edge_router.builders import network
from tests.edge_router.fakes import FirstThen, answer, continued_stream, refuse, reset_it, router, sites

pytestmark = pytest.mark.process

collected = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}


class Collector:
    """An OTLP receiver."""

    def __init__(self) -> None:
        self.url = ""
        self.raw = b""
        self.resource: dict[str, Any] = {}
        self.spans: list[Any] = []

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.raw += body
        for resource in collected.ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = attributes(resource.resource)
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(body=collected.ExportTraceServiceResponse().SerializeToString())


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    receiver, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", receiver.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield receiver
    finally:
        await runner.cleanup()


async def test_a_collector_gets_a_span_of_the_request_and_one_of_each_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    async with collector() as receiver, sites("ams1", "iad1", "sin1") as fakes:
        fakes[0].behave = refuse("overloaded")
        fakes[1].behave = continued_stream(6, until=3, ending=reset_it)
        fakes[2].behave = continued_stream(6)
        tables = {"telemetry": {"otlp": receiver.url + "/"}}
        async with router(fakes, policy=FirstThen("ams1", "iad1", "sin1"), tables=tables) as running:
            async with running.chat(headers={**ASKED, "x-request-id": "r1"}) as response:
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            assert (await running.http.post(running.url + "/v1/chat/completions", data=b"{")).status == 400
        request, *tries = sorted(receiver.spans, key=lambda span: span.start_time_unix_nano)
        names = ["chat ember", "try ams1", "try iad1", "try ams1", "try sin1"]  # after a cut all sites may be tried
        assert [span.name for span in (request, *tries)] == names
        assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
        assert {span.parent_span_id for span in tries} == {request.span_id}
        sent = [fakes[i].seen[j].headers for i, j in ((0, 0), (1, 0), (0, 1), (2, 0))]
        assert [each.getall("traceparent") for each in sent] == [
            [f"00-{TRACE}-{span.span_id.hex()}-01"] for span in tries
        ]
        assert {each["tracestate"] for each in sent} == {"a=b"}
        assert [attributes(span).get("error.type") for span in tries] == ["full", "closed", "full", None]
        assert all(
            request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano for span in tries
        )
        assert tries[-1].end_time_unix_nano <= request.end_time_unix_nano
        told = attributes(request)
        assert told.pop("pilotlight.first_token_s") > 0
        assert told == {
            "http.request.method": "POST", "url.path": "/ai/v1/chat/completions", "http.response.status_code": 200,
            "pilotlight.request_id": "r1", "gen_ai.operation.name": "chat", "gen_ai.provider.name": "pilotlight",
            "gen_ai.request.model": "ember", "gen_ai.usage.input_tokens": 7, "gen_ai.usage.cache_read.input_tokens": 3,
            "gen_ai.usage.output_tokens": 6,
        }  # fmt: skip
        assert receiver.resource["service.name"] == "pilotlight-router"
        assert b"hello" not in receiver.raw  # the prompt


async def test_an_answer_that_says_the_site_failed_is_a_failure() -> None:
    async with collector() as receiver, sites("ams1") as fakes:
        fakes[0].behave = answer(500, {"error": {"message": "no"}})
        async with router(fakes, tables={"telemetry": {"otlp": receiver.url}}) as running:
            async with running.chat() as response:
                assert response.status == 500
            fakes[0].behave = answer(400, {"error": {"message": "yours"}})
            async with running.chat() as response:
                assert response.status == 400
        requests = [span for span in receiver.spans if span.name == "chat ember"]
        assert [attributes(span).get("error.type") for span in requests] == ["500", None]


async def test_a_dead_collector_costs_no_request_and_no_stop() -> None:
    async with sites("ams1") as fakes:
        fakes[0].behave = refuse("overloaded")
        dead = {"telemetry": {"otlp": "http://127.0.0.1:9"}}
        async with asyncio.timeout(60), router(fakes, tables=dead) as running, running.chat() as response:
            assert response.status == 503


async def test_what_a_client_does_not_want_recorded_is_passed_on_and_not_recorded() -> None:
    async with collector() as receiver, sites("ams1") as fakes:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        tables = {"telemetry": {"otlp": receiver.url}}
        async with router(fakes, tables=tables) as running, running.chat(headers=headers) as response:
            await response.read()
        assert fakes[0].seen[0].headers["traceparent"].startswith(f"00-{TRACE}-")
        assert fakes[0].seen[0].headers["traceparent"].endswith("-00")
        assert receiver.spans == []


def test_a_router_without_a_collector_keeps_no_traces_and_a_wrong_url_is_refused() -> None:
    urls = {"ams1": "http://127.0.0.1:9"}
    assert not build_app(network(urls)).edge.stages.present()
    with pytest.raises(ConfigError, match="telemetry"):
        network(urls, telemetry={"otlp": "collector:4317"})
