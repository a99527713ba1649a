"""A site's spans: a request in the router's trace, a generation with its phases, a function's invocation with its generations."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.channel.frames import BindingCall
from pilotlight.functions.host.subrequests import Subrequests
from pilotlight.runtime.generation.inference import SiteInference
from pilotlight.runtime.telemetry.tracing import SiteTracing
from pilotlight.sites.config import ConfigError
from pilotlight.wire.tracing import CURRENT
from tests.asgi import call
from tests.edge_router.telemetry.test_tracing import PARENT, TRACE, Collector, attributes, collector
from tests.functions.bindings.conftest import Wire, wire  # noqa: F401 - a fixture
from tests.runtime.conftest import SiteMaker

pytestmark = pytest.mark.process

MODEL = "@test/tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi, a secret"}]}
CAME_WITH = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}


def named(receiver: Collector) -> dict[str, Any]:
    found = {span.name: span for span in receiver.spans}
    assert len(found) == len(receiver.spans)
    return found


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_and_its_generations_phases_are_in_the_routers_trace(
    make_site: SiteMaker, is_stream: bool
) -> None:
    async with collector() as receiver:
        async with make_site(telemetry={"otlp": receiver.url}) as site:
            answer = await call(site.app, "/v1/chat/completions", {**CHAT, "stream": is_stream}, **CAME_WITH)
            assert answer.status == 200
        spans = named(receiver)
        request, chat = spans["POST v1"], spans["chat tiny"]
        phases = [spans[name] for name in ("admission", "queue", "prefill", "decode")]
        assert len(spans) == 6
        assert {span.trace_id.hex() for span in receiver.spans} == {TRACE}
        assert request.parent_span_id.hex() == PARENT
        assert chat.parent_span_id == request.span_id
        assert {span.parent_span_id for span in phases} == {chat.span_id}
        for before, after in pairwise(phases):
            assert before.start_time_unix_nano <= before.end_time_unix_nano == after.start_time_unix_nano
        assert phases[-1].end_time_unix_nano == chat.end_time_unix_nano
        told = attributes(chat)
        assert told.pop("gen_ai.response.finish_reasons").values[0].string_value == "stop"
        assert told.pop("gen_ai.usage.input_tokens") > 0
        assert told == {
            "gen_ai.operation.name": "chat", "gen_ai.provider.name": "pilotlight", "gen_ai.request.model": "tiny",
            "gen_ai.usage.output_tokens": 13, "gen_ai.usage.cache_read.input_tokens": 0, "pilotlight.device_us": 0,
        }  # fmt: skip
        assert attributes(request)["http.response.status_code"] == 200
        assert (receiver.resource["service.name"], receiver.resource["pilotlight.site"]) == ("pilotlight-site", "ams1")
        assert b"secret" not in receiver.raw


async def test_a_refusal_has_its_word_and_no_phases_beyond_admission(make_site: SiteMaker) -> None:
    async with collector() as receiver:
        async with make_site(telemetry={"otlp": receiver.url}) as site:
            refused = await call(site.app, "/v1/chat/completions", {**CHAT, "model": "nope"})
            assert refused.status == 404
            assert (await call(site.app, "/readyz")).status == 200  # not a client's request
        (span,) = receiver.spans
        assert attributes(span)["error.type"] == "model_not_found"


async def test_a_function_gets_the_requests_span_and_its_calls_are_in_the_trace(
    make_site: SiteMaker,
    wire: Wire,  # noqa: F811
    tmp_path: Path,
) -> None:
    async with collector() as receiver:
        async with make_site(telemetry={"otlp": receiver.url}) as site:
            tracing = site.app.site.tracing
            ai = (await wire(("ai", "AI", {}), inference=SiteInference(site.app.site))).bindings
            asked: dict[str, Any] = {}

            async def answer(frame: Any, body: Any) -> Any:
                asked.update(CURRENT.get())
                return await ai.answer(frame, body)

            subrequests = Subrequests(answer, 10, ())
            with tracing.invocation("hello", "http"):
                subrequests.begin(7)
            inputs = {"messages": CHAT["messages"]}
            await subrequests.answer(BindingCall(1, "AI", "run", [MODEL, inputs], within=7), None)
            assert asked["traceparent"]
            subrequests.forget(7)
        spans = named(receiver)
        invocation = spans["invoke hello"]
        assert attributes(invocation) == {"faas.name": "hello", "faas.trigger": "http"}
        assert spans["chat tiny"].parent_span_id == invocation.span_id
        assert spans["chat tiny"].trace_id == invocation.trace_id


async def test_calls_outside_of_any_request_are_a_part_of_none() -> None:
    async def answer(frame: Any, body: Any) -> Any:
        return dict(CURRENT.get())

    subrequests = Subrequests(answer, 10, ())
    token = CURRENT.set({"traceparent": "of the request that started the isolate"})
    try:
        assert await subrequests.answer(BindingCall(1, "AI", "run"), None) == {}
    finally:
        CURRENT.reset(token)


def test_a_collector_without_its_packages_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pilotlight-inference\[telemetry\]"):
        SiteTracing("http://127.0.0.1:9", "ams1", "0")
