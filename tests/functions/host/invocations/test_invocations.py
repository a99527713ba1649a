"""Records of invocations: functions run in real isolates, and queries return the records."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from pilotlight.functions.channel import frames
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.invocations.invocation_log import InvocationLog
from pilotlight.functions.host.invocations.log_store import InvocationRow, LineRow, LogStore
from pilotlight.wire.hop.function_logs import LoggedInvocation, LogQuery
from tests.asgi import eventually
from tests.functions.conftest import Served, ServedMaker

ENTRY = """
import asyncio, sys, time
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        path = request.url.partition("//")[2].partition("/")[2].partition("?")[0]
        print("begins", path)
        if path.startswith("wait"):
            await asyncio.sleep(0.2)
        if path == "compute":
            end = time.process_time() + 0.05
            while time.process_time() < end:
                pass
        if path == "raise":
            raise ValueError("a bad thing")
        if path == "stream":
            async def pieces():
                yield b"one"
                print("within the stream")
                yield b"two"
            return Response(pieces())
        if path == "later":
            self.ctx.wait_until(self.work())
        print("ends", path, file=sys.stderr)
        return Response("done", status=404 if path == "missing" else 200)

    async def work(self):
        await asyncio.sleep(0.1)
        print("in the background")

    async def scheduled(self, controller):
        print("by the clock")
"""


@asynccontextmanager
async def kept(make_served: ServedMaker, folder: Path, **options: Any) -> AsyncIterator[Served]:
    store = LogStore(folder / "logs.sqlite", days=7, mib=64)
    async with make_served(tier=1, logs=store, **options) as served:
        yield served


async def found(served: Served, **query: Any) -> list[LoggedInvocation]:
    invocations = await served.functions.invocations.find(LogQuery(query.pop("function", "f"), **query))
    return sorted(invocations, key=lambda each: each.seq)


def lines(invocation: LoggedInvocation) -> list[tuple[str, str]]:
    return [(line.level, line.text) for line in invocation.lines]


async def test_lines_of_requests_at_once_belong_each_to_their_own(make_served: ServedMaker, tmp_path: Path) -> None:
    async with kept(make_served, tmp_path) as served:
        served.add(ENTRY)
        await asyncio.gather(*(served.get(f"/wait{i}") for i in range(5)))
        all_of = await found(served, grep="wait")
        assert sorted(each.what for each in all_of) == [f"GET /wait{i}" for i in range(5)]
        for each in all_of:
            name = each.what.removeprefix("GET /")
            assert lines(each) == [("log", f"begins {name}"), ("error", f"ends {name}")]
            assert (each.status, each.outcome, each.trigger) == (200, "ok", "fetch")
            assert each.wall_ms >= 200.0


async def test_a_short_request_is_charged_the_cpu_time_that_it_used(make_served: ServedMaker, tmp_path: Path) -> None:
    async with kept(make_served, tmp_path) as served:
        served.add(ENTRY)
        await served.get("/first")  # a first request may end before its isolate's CPU time is measured
        await served.get("/nothing")
        await served.get("/compute")
        cpu_ms = {each.what: each.cpu_ms for each in await found(served)}
        assert 50.0 <= cpu_ms["GET /compute"] < 1000.0
        assert 0.0 < cpu_ms["GET /nothing"] < 50.0


async def test_an_exception_is_kept_with_its_traceback_and_found_by_status_and_text(
    make_served: ServedMaker, tmp_path: Path
) -> None:
    async with kept(make_served, tmp_path) as served:
        served.add(ENTRY)
        with pytest.raises(Fault):
            await served.get("/raise")
        await served.get("/missing")
        await served.get("/fine")
        (failed,) = await found(served, status="error")
        assert (failed.outcome, failed.error) == ("exception", "ValueError: a bad thing")
        assert 'raise ValueError("a bad thing")' in failed.detail
        assert [each.what for each in await found(served, status="404")] == ["GET /missing"]
        assert [each.what for each in await found(served, status="4xx")] == ["GET /missing"]
        assert [each.what for each in await found(served, status="ok", grep="ends fine")] == ["GET /fine"]
        assert [each.what for each in await found(served, grep="a bad thing")] == ["GET /raise"]
        assert await found(served, function="g") == []


async def test_an_invocation_lasts_as_long_as_its_stream_and_one_that_is_left_is_canceled(
    make_served: ServedMaker, tmp_path: Path
) -> None:
    async with kept(make_served, tmp_path) as served:
        served.add(ENTRY)
        response = await served.ask("/stream")
        assert await found(served) == [], "the invocation is still open"
        assert response.stream is not None
        assert b"".join([chunk async for chunk in response.stream]) == b"onetwo"
        left = await served.ask("/stream")
        assert left.stream is not None
        await left.stream.aclose()  # type: ignore[attr-defined]
        whole, canceled = await found(served)
        assert (whole.outcome, canceled.outcome) == ("ok", "canceled")
        assert ("log", "within the stream") in lines(whole)


async def test_what_background_work_prints_belongs_to_its_request(make_served: ServedMaker, tmp_path: Path) -> None:
    async with kept(make_served, tmp_path) as served:
        served.add(ENTRY)
        await served.get("/later")

        async def has_line() -> bool:
            return [lines(invocation)[-1:] for invocation in await found(served)] == [[("log", "in the background")]]

        await eventually(has_line)


async def test_what_no_request_printed_is_kept_as_the_processs(make_served: ServedMaker, tmp_path: Path) -> None:
    async with kept(make_served, tmp_path) as served:
        served.add("print('at import')\nimport os\nos.write(1, b'past Python\\n')\n" + ENTRY)
        await served.functions.ask("f", frames.ScheduledEvent(frames.UNNUMBERED, "* * * * *", 0))
        process, by_clock = sorted(await found(served), key=lambda each: each.trigger)
        assert (process.trigger, lines(process)) == ("process", [("log", "at import"), ("log", "past Python")])
        assert (by_clock.trigger, by_clock.what, lines(by_clock)) == (
            "scheduled", "* * * * *", [("log", "by the clock")],
        )  # fmt: skip


async def test_a_manifest_says_which_share_is_kept(make_served: ServedMaker, tmp_path: Path) -> None:
    async with kept(make_served, tmp_path) as served:
        served.add(ENTRY, manifest="[observability]\nenabled = false")
        served.add(ENTRY, name="g", manifest="[observability]\nhead_sampling_rate = 0.5")
        for _ in range(40):
            await served.get("/x")
            await served.get("/x", name="g")
        assert await found(served) == []
        assert 0 < len(await found(served, function="g")) < 40


TAIL = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def tail(self, events):
        for event in events:
            print("heard", event.scriptName, event.outcome, event["event"].get("request", {}).get("url"),
                  [log["message"][0] for log in event.logs], [error["message"] for error in event.exceptions],
                  event["event"].get("response"), event["event"].get("request", {}).get("headers", {}).get("authorization"))
"""


async def test_a_tail_consumer_gets_outcomes_of_invocations_and_its_own_are_sent_to_none(
    make_served: ServedMaker, tmp_path: Path
) -> None:
    async with kept(make_served, tmp_path) as served:
        served.add(TAIL, name="listener", manifest='[[tail_consumers]]\nservice = "listener"')
        served.add(ENTRY, manifest='[[tail_consumers]]\nservice = "listener"')
        await served.get("/missing?token=x", headers=[("authorization", "Bearer x")])
        with pytest.raises(Fault):
            await served.get("/raise")
        heard: list[str] = []

        async def both() -> None:
            while len(heard) < 2:
                heard[:] = [line.text for each in await found(served, function="listener") for line in each.lines]
                await asyncio.sleep(0.05)

        await asyncio.wait_for(both(), 20)
        assert heard == [
            "heard f ok http://host/missing ['begins missing', 'ends missing'] [] {'status': 404} REDACTED",
            "heard f exception http://host/raise ['begins raise'] ['a bad thing'] None None",
        ]
        assert {each.trigger for each in await found(served, function="listener")} == {"tail"}


class StuckStore:
    """A store on a disk that does not answer until it is mended."""

    def __init__(self) -> None:
        self.is_mended = asyncio.Event()
        self.written: list[str] = []

    async def write(self, invocations: list[InvocationRow], lines: list[LineRow]) -> None:
        await self.is_mended.wait()
        self.written += [line.text for line in lines]

    async def find(self, query: LogQuery) -> list[LoggedInvocation]:
        return []

    async def close(self) -> None: ...


async def test_unwritten_output_takes_limited_memory_and_what_is_dropped_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def ask(function: str, event: frames.TailEvent) -> None: ...

    store = StuckStore()
    log = InvocationLog(ask, cast("Any", store), max_bytes=1 << 20)
    finding = []
    for number in range(100):
        log.keep_line("f", "", 1, "log", f"{number:02}" + "x" * (64 << 10))
        finding.append(asyncio.create_task(log.find(LogQuery("f"))))  # each query begins another write
        await asyncio.sleep(0)
    assert log.num_dropped == {"disk": 85, "collector": 0, "tail": 0}
    store.is_mended.set()
    await asyncio.gather(*finding)
    assert [text[:2] for text in store.written] == [f"{number:02}" for number in range(15)]
    log.keep_line("f", "", 1, "log", "later")
    await log.close()
    assert store.written[-1] == "later"
    reported = re.findall(r"(\d+) records of functions' logs were dropped", caplog.text)
    assert sum(map(int, reported)) == 85
