"""The log of functions at a collector: a record for each invocation, and one for each line of output."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.invocations.log_export import LogExport
from pilotlight.sites.config import ConfigError
from tests.asgi import call, eventually
from tests.functions.conftest import ServedMaker
from tests.functions.host.invocations.test_invocations import ENTRY
from tests.functions.routes.test_invocations import functions_table
from tests.runtime.conftest import SiteMaker

pytestmark = pytest.mark.process

collected = pytest.importorskip("opentelemetry.proto.collector.logs.v1.logs_service_pb2")


class Collector:
    """An OTLP receiver of logs."""

    def __init__(self) -> None:
        self.url = ""
        self.records: list[Any] = []
        self.resource: dict[str, Any] = {}

    async def take(self, request: web.Request) -> web.Response:
        for resource in collected.ExportLogsServiceRequest.FromString(await request.read()).resource_logs:
            self.resource = attributes(resource.resource)
            self.records += [record for scope in resource.scope_logs for record in scope.log_records]
        return web.Response(body=collected.ExportLogsServiceResponse().SerializeToString())


def attributes(described: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in described.attributes}


@asynccontextmanager
async def collector() -> AsyncIterator[Collector]:
    receiver, app = Collector(), web.Application()
    app.router.add_post("/v1/logs", receiver.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        yield receiver
    finally:
        await runner.cleanup()


async def test_a_collector_gets_invocations_and_their_lines_without_a_store(make_served: ServedMaker) -> None:
    async with collector() as receiver:
        async with make_served(tier=1, log_export=LogExport(receiver.url, "ams1")) as served:
            served.add(ENTRY)
            await served.get("/missing")
            with pytest.raises(Fault):
                await served.get("/raise")
        assert receiver.resource["pilotlight.site"] == "ams1"
        told = {record.body.string_value: (record.severity_text, attributes(record)) for record in receiver.records}
    assert told["begins missing"][0] == "log"
    assert told["ends missing"][0] == "error"
    missing, raised = told["GET /missing"][1], told["GET /raise"]
    assert told["ends missing"][1]["faas.invocation_id"] == missing["faas.invocation_id"]
    assert missing["faas.name"] == "f"
    assert missing["http.response.status_code"] == 404
    assert missing["pilotlight.outcome"] == "ok"
    assert missing["pilotlight.wall_ms"] > 0
    assert raised[0] == "error"
    assert "a bad thing" in raised[1]["exception.message"]
    assert "ValueError" in raised[1]["exception.stacktrace"]


async def test_a_collector_that_does_not_answer_delays_no_request(make_served: ServedMaker) -> None:
    async with make_served(tier=1, log_export=LogExport("http://127.0.0.1:9", "ams1")) as served:
        served.add(ENTRY)
        assert await served.get("/missing") == b"done"


async def test_records_for_a_collector_that_is_down_take_limited_memory_and_are_counted_when_they_are_lost() -> None:
    export = LogExport("http://127.0.0.1:9", "ams1", max_bytes=2 << 20)
    for _ in range(100):
        export.line("f", "", 1, 1.0, "log", "x" * (64 << 10))
    fit = (2 << 20) // (64 << 10)
    assert 100 - fit <= export.num_dropped < 100
    await eventually(lambda: export.num_dropped == 100)
    export.line("f", "", 1, 1.0, "log", "there is room again")
    assert export.num_dropped == 100
    await asyncio.to_thread(export.close)


async def test_records_that_a_collector_has_are_not_counted_as_lost() -> None:
    async with collector() as receiver:
        export = LogExport(receiver.url, "ams1", max_bytes=2 << 20)
        for _ in range(6):
            received = len(receiver.records)
            for _ in range(10):
                export.line("f", "", 1, 1.0, "log", "x" * (64 << 10))
            await eventually(lambda received=received: len(receiver.records) == received + 10)
        await asyncio.to_thread(export.close)
        assert export.num_dropped == 0


async def test_dropped_records_are_in_the_sites_metrics(make_site: SiteMaker, tmp_path: Path) -> None:
    async with make_site(functions=functions_table(tmp_path)) as site:
        text = (await call(site.app, "/metrics")).body.decode()
        for destination in ("disk", "collector", "tail"):
            assert f'pilotlight_function_log_records_dropped_total{{destination="{destination}"}} 0.0' in text


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk._logs", None)
    with pytest.raises(ConfigError, match=r"pilotlight-inference\[telemetry\]"):
        LogExport("http://127.0.0.1:4318", "ams1")
