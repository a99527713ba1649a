"""Durable streams: read again from any event, by their tenant only, also after a client or a site is lost."""

import asyncio
import hashlib
import json
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, cast

import pytest
from msgspec.structs import replace

from pilotlight.edge_router.admission.filter import AdmissionFilter, TenantLimits, tenant_of
from pilotlight.edge_router.durable.event_buffer import EVENT_BYTES
from pilotlight.edge_router.durable.journal import AnswerStarted, JournalEvents, JournalHeader, StreamEnded
from pilotlight.edge_router.durable.streams import STREAM, DurableStream, DurableStreams, StreamRoutes, accepted, tell
from pilotlight.edge_router.forwarding.downstream import Downstream, ResponseWriter
from pilotlight.edge_router.requests.request import Head, parse_durable
from pilotlight.sites.network import DoorConfig, DurableConfig, TenantLimitsConfig
from pilotlight.wire.credentials import Access, Account, Key
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.continuation import AnswerName, ResumePoint
from pilotlight.wire.sse import Event, EventDecoder, encode_event
from tests.edge_router.builders import Clock
from tests.edge_router.fakes import (
    DONE,
    Router,
    answer,
    continued_stream,
    event,
    hang,
    raw_stream,
    reset_it,
    routed_sites,
    router,
    sites,
    stream_of,
)

pytestmark = pytest.mark.process

ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
DURABLE = {"stream_options": {"durable": True, "include_usage": True}}
HEAD = Head("POST", "/v1/chat/completions", "/v1/chat/completions", [])
ASKED = JournalHeader(b"alice", "POST", HEAD.path, HEAD.target, (), "http", "", "q", b"", AnswerName(1, 2, "0" * 24))


def events(body: bytes) -> list[Event]:
    return [event for event in EventDecoder().feed(body) if event.data is not None]


def data(body: bytes) -> bytes:
    """Return the events without the ids that a recording adds."""
    return b"".join(encode_event(event.data or b"") for event in events(body))


async def read_again(
    running: Router, name: str, after: bytes | None = None, headers: dict[str, str] = ALICE
) -> tuple[int, bytes]:
    given = headers if after is None else {**headers, "last-event-id": after.decode()}
    async with running.http.get(f"{running.url}/streams/{name}", headers=given) as response:
        return response.status, await response.read()


async def test_a_durable_stream_can_be_read_again_from_each_of_its_events() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = stream_of(4)
        async with running.chat(headers=ALICE, **DURABLE) as response:
            name = response.headers["x-pilotlight-stream"]
            body = await response.read()
        assert json.loads(fakes[0].bodies[-1])["stream_options"] == {"include_usage": True}  # the router adds the rest
        assert data(body) == b"".join(event(i) for i in range(4)) + DONE
        whole = events(body)
        assert len({event.event_id for event in whole}) == len(whole)
        assert await read_again(running, name) == (200, body)
        for i, each in enumerate(whole):
            assert await read_again(running, name, each.event_id) == (
                200,
                b"".join(event.raw for event in whole[i + 1 :]),
            )
        status, refusal = await read_again(running, name, b"no-such-id")
        assert (status, json.loads(refusal)["error"]["code"]) == (400, "invalid_request")


@pytest.mark.parametrize("ids", [(None, None, None), (None, "0", None, "1", "1", None), ("9", "8", "x")])
async def test_each_event_is_a_place_of_its_own_whatever_a_function_calls_it(ids: tuple[str | None, ...]) -> None:
    recording = DurableStream("r", ASKED, HEAD, DurableConfig())
    await recording.write(b"".join(encode_event(b"%d" % i, event_id) for i, event_id in enumerate(ids)))
    recording.events.end(1.0)
    kept = events(b"".join([batch async for batch in recording.events.read(0)]))
    for i, each in enumerate(kept):
        assert each.event_id is not None
        after = recording.events.place_after(each.event_id.decode())
        left = events(b"".join([batch async for batch in recording.events.read(after)]))
        assert [event.data for event in left] == [b"%d" % j for j in range(i + 1, len(ids))]


async def test_an_event_that_a_function_writes_in_pieces_is_one_event() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(
            b"data: a", b"b\n", b"\ndata: c\r\n\r", b"\nevent: last\nda", b"ta: d\n\n", end="on command"
        )
        fakes[0].go_on.set()
        async with running.chat("/fn/f", headers=ALICE, **DURABLE) as response:
            name, body = response.headers["x-pilotlight-stream"], await response.read()
        assert [each.data for each in events(body)] == [
            b"ab",
            b"c",
            b"d",
            *[each.data for each in events(event(99) + DONE)],
        ]
        assert await read_again(running, name) == (200, body)


async def test_it_continues_when_its_client_leaves_and_a_returning_one_misses_nothing() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        response = await running.chat(headers=ALICE, **DURABLE)
        name = response.headers["x-pilotlight-stream"]
        (first,) = events(await response.content.readany())
        limits = running.proxy.admission.limits
        response.close()
        await running.until(lambda: limits.num_open == 1)  # the stream itself
        assert fakes[0].active == 1
        again = asyncio.create_task(read_again(running, name, first.event_id))
        await running.until(lambda: limits.num_open == 2)
        assert not again.done()
        fakes[0].go_on.set()
        status, rest = await again
        assert (status, data(rest)) == (200, event(99) + DONE)


async def test_a_stream_counts_once_against_its_accounts_limit_with_and_without_its_client() -> None:
    async with sites("ams1") as fakes, router(fakes, tables={"tenant_limits": {"max_open": 2}}) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        limits = running.proxy.admission.limits
        first = await running.chat(headers=ALICE, **DURABLE)
        assert await first.content.readany()
        assert limits.num_open == 1
        second = await running.chat(headers=ALICE, **DURABLE)
        assert (second.status, limits.num_open) == (200, 2)
        async with running.chat(headers=ALICE, **DURABLE) as third:
            assert third.status == 429
        first.close()
        await running.until(lambda: len(running.proxy.under_way) == 2)
        async with running.chat(headers=ALICE, **DURABLE) as third:
            assert third.status == 429, "the stream continues without its client"
        fakes[0].go_on.set()
        await second.read()
        await running.until(lambda: limits.num_open == 0)


async def test_an_ordinary_stream_still_ends_with_its_client() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        response = await running.chat(headers=ALICE, stream_options={"durable": False})
        assert "x-pilotlight-stream" not in response.headers
        assert b"stream_options" not in fakes[0].bodies[-1]
        response.close()
        async with asyncio.timeout(60):
            await running.until(lambda: fakes[0].active == 0)


async def test_a_client_that_does_not_want_to_wait_gets_the_streams_address() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        async with running.chat(headers={**ALICE, "prefer": "respond-async"}) as response:
            assert response.status == 202
            assert response.headers["preference-applied"] == "respond-async"
            where = response.headers["location"]
            assert where == (await response.json())["url"]
        fakes[0].go_on.set()
        status, body = await read_again(running, where.removeprefix("/streams/"))
        assert (status, data(body)) == (200, event(0) + event(99) + DONE)


async def test_only_its_tenant_learns_that_it_exists() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        response = await running.chat(headers=ALICE, **DURABLE)
        name = response.headers["x-pilotlight-stream"]
        for headers in (BOB, {}):
            mine, theirs = (
                await read_again(running, name, headers=headers),
                await read_again(running, "0" * 32, headers=headers),
            )
            assert mine == theirs
            assert mine[0] == 404
            async with running.http.delete(f"{running.url}/streams/{name}", headers=headers) as refused:
                assert refused.status == 404
        assert fakes[0].active == 1
        fakes[0].go_on.set()
        assert data(await response.read()) == event(0) + event(99) + DONE


async def test_a_stopped_stream_frees_its_site_and_notifies_its_readers() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        response = await running.chat(headers=ALICE, **DURABLE)
        name = response.headers["x-pilotlight-stream"]
        assert await response.content.readany()
        async with running.http.delete(f"{running.url}/streams/{name}", headers=ALICE) as stopped:
            assert (stopped.status, await stopped.read()) == (204, b"")
        assert b'"aborted"' in await response.read()
        async with asyncio.timeout(60):
            await running.until(lambda: fakes[0].active == 0)
        assert (await read_again(running, name))[0] == 404
        assert running.counted("pilotlight_router_requests_total", site="", outcome="stopped") == 1


async def test_a_durable_stream_outlives_its_client_and_then_its_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    async with routed_sites("ams1", "iad1") as (fakes, running):
        fakes[0].behave = continued_stream(6, until=3, ending=reset_it)
        fakes[1].behave = continued_stream(6)
        async with running.chat(headers={**ALICE, "prefer": "respond-async"}) as response:
            name = response.headers["x-pilotlight-stream"]
        status, body = await read_again(running, name)
        assert (status, data(body)) == (200, b"".join(event(i) for i in range(6)) + DONE)
        assert running.counted("pilotlight_router_streams_continued_total", site="iad1") == 1


async def test_a_refusal_is_what_its_reader_gets() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = answer(404, {"error": {"message": "no such model", "code": "model_not_found"}})
        async with running.chat(headers={**ALICE, "prefer": "respond-async"}) as response:
            name = response.headers["x-pilotlight-stream"]
        status, body = await read_again(running, name)
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")


async def test_a_drain_waits_for_recordings_and_reports_those_it_cuts() -> None:
    async with sites("ams1") as fakes, router(fakes) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        response = await running.chat(headers=ALICE, **DURABLE)
        assert await response.content.readany()
        await running.proxy.drain(0.1)
        assert b'"draining"' in await response.read()
        async with asyncio.timeout(60):
            await running.until(lambda: fakes[0].active == 0)


async def left_of(kept: DurableStreams, made: list[DurableStream]) -> list[DurableStream]:
    """Return the streams that can still be read."""
    left = []
    for each in made:
        with suppress(ApiError):
            left.append(await kept.find(each.name, each.head, each.asked.tenant, never_continued))
    return left


async def never_continued(recording: DurableStream) -> None:
    raise AssertionError


async def test_an_account_that_has_most_makes_room_and_not_who_came_first() -> None:
    clock, size = Clock(), len(encode_event(b"x" * 90, 1)) + EVENT_BYTES
    kept = DurableStreams(DurableConfig(max_total_mib=3.5 * size / 2**20, keep_s=60), clock)
    client = Downstream({"type": "http", "method": "POST", "path": "/v1/x", "headers": []}, None, None)

    async def work(recording: DurableStream) -> None:
        await recording.write(encode_event(b"x" * 90))

    made = []
    for owner in (b"alice", b"loud", b"loud", b"bob", b"loud", b"loud"):
        made.append(await kept.start(owner, client, b"", work))
        assert made[-1].task is not None
        await made[-1].task
        clock.advance(1)
        kept.forget()
    assert await left_of(kept, made) == [made[0], made[3], made[5]]


async def test_streams_that_have_not_ended_are_not_forgotten_for_new_ones() -> None:
    tables = {"durable": {"max_total_mib": 0.0001}}
    async with sites("ams1") as fakes, router(fakes, tables=tables) as running:
        fakes[0].behave = raw_stream(event(0), end="on command")
        first = await running.chat(headers=ALICE, **DURABLE)
        assert await first.content.readany()
        async with running.chat(headers=ALICE, **DURABLE) as second:
            assert second.status == 503
            assert int(second.headers["retry-after"]) > 0
        fakes[0].go_on.set()
        assert (await first.read()).endswith(DONE)


async def test_a_stream_that_never_ends_is_ended() -> None:
    async with sites("ams1") as fakes, router(fakes, tables={"durable": {"max_age_s": 0.3}}) as running:
        fakes[0].behave = hang
        async with running.chat(headers=ALICE, **DURABLE) as response:
            assert response.status == 499
            assert b"had not ended after" in await response.read()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"stream": True, "stream_options": {"durable": 1}}, "true or false"),
        ({"stream": False, "stream_options": {"durable": True}}, "set stream to true"),
        ({"stream_options": {"durable": True}}, "set stream to true"),
    ],
)
def test_a_wish_for_durability_that_makes_no_sense_is_refused(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(ApiError, match=complaint):
        parse_durable(HEAD, json.dumps(fields).encode())


@pytest.mark.parametrize(
    "body", [b'{"durable', b'["durable"]', b'{"prompt": "\\"durable\\""}', b'{"stream_options": "durable"}']
)
def test_a_body_that_only_speaks_of_it_is_left_as_it_is(body: bytes) -> None:
    assert parse_durable(HEAD, body) == (False, False, body)


class Reader:
    """A client that follows a stream."""

    def __init__(self) -> None:
        self.status, self.headers, self.body, self.is_over = 0, dict[str, str](), b"", False

    async def respond(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        assert len(dict(headers)) == len(headers), "no header twice"
        self.status, self.headers, self.body, self.is_over = status, dict(headers), body, True

    async def start_stream(self, status: int, headers: list[tuple[str, str]]) -> None:
        await self.respond(status, headers, b"")
        self.is_over = False

    async def write(self, batch: bytes) -> None:
        self.body += batch

    async def end_stream(self) -> None:
        self.is_over = True


def stream(asked: JournalHeader = ASKED, head: Head = HEAD, **config: float) -> DurableStream:
    return DurableStream("name", asked, head, DurableConfig(**config))


async def told(recording: DurableStream, place: int = 0) -> Reader:
    reader = Reader()
    await tell(recording, cast(Downstream, reader), place)
    return reader


async def test_a_reader_gets_the_answers_head_and_the_streams_name() -> None:
    given = [("content-type", "text/event-stream"), ("content-length", "7"), ("x-a", "b"), ("x-request-id", "q")]
    recording = stream()
    await recording.start_stream(203, given)
    await recording.write(encode_event(b"x") + encode_event(b"y"))
    recording.events.end(1.0)
    reader = await told(recording, 1)
    assert (reader.status, reader.body, reader.is_over) == (203, encode_event(b"y", 2), True)
    assert reader.headers == {
        "x-a": "b", "x-request-id": "q", "content-type": "text/event-stream; charset=utf-8", STREAM: "name", "cache-control": "no-store",
    }  # fmt: skip
    whole = stream()
    await whole.respond(404, given[1:], b"nothing")
    reader = await told(whole)
    assert (reader.status, reader.body, reader.headers) == (404, b"nothing", {**dict(given[1:]), STREAM: "name"})
    stopped = stream()
    stopped.events.end(1.0)
    with pytest.raises(ApiError, match="stopped before its answer began"):
        await told(stopped)
    reader = Reader()
    await accepted(recording, cast(Downstream, reader))
    assert (reader.status, reader.headers["location"], reader.headers[STREAM]) == (202, "/streams/name", "name")
    assert reader.headers["content-length"] == str(len(reader.body))


async def test_a_stream_may_hold_as_many_bytes_as_the_limit_and_its_request_until_its_end() -> None:
    limit = 2 * (len(encode_event(b"x" * 90)) + EVENT_BYTES)
    recording = stream(replace(ASKED, body=b"b" * 50), max_stream_mib=(limit + len("id: 1\n")) / 2**20)
    await recording.write(encode_event(b"x" * 90))
    assert recording.num_bytes == 50 + recording.events.num_bytes
    with pytest.raises(ApiError, match="the limit of a durable stream") as refused:
        await recording.write(encode_event(b"x" * 91))
    assert refused.value.word == "aborted"
    await recording.write(encode_event(b"x" * 90))
    recording.events.end(1.0)
    assert recording.num_bytes == recording.events.num_bytes


FUNCTION = Head("POST", "/fn/f", "/fn/f", [])


@pytest.mark.parametrize(
    ("head", "entries", "is_over", "may_go_on"),
    [
        (HEAD, [], False, True),
        (HEAD, [AnswerStarted(200, (), None)], False, True),
        (HEAD, [AnswerStarted(200, (), None), JournalEvents(event(0), ())], False, False),
        (HEAD, [AnswerStarted(200, (), None), JournalEvents(event(0), (ResumePoint(0, (7,)),))], False, True),
        (HEAD, [AnswerStarted(200, (), None), JournalEvents(event(0) + DONE, ())], True, False),
        (HEAD, [AnswerStarted(200, (), b"whole"), StreamEnded()], True, True),
        (FUNCTION, [], False, False),
        (Head("GET", "/fn/f", "/fn/f", []), [], False, True),
    ],
)
async def test_another_routers_stream_can_be_continued_if_all_of_it_is_known_or_nothing_was_delivered(
    head: Head, entries: list[Any], is_over: bool, may_go_on: bool
) -> None:
    recording = stream(head=head)
    assert recording.replay(entries) == is_over
    assert recording.may_go_on == may_go_on
    assert recording.log.num_tokens == sum(
        len(point.token_ids) for each in entries if isinstance(each, JournalEvents) for point in each.points
    )


async def test_no_more_streams_are_forgotten_than_have_to_be() -> None:
    clock, size = Clock(), len(encode_event(b"x" * 90, 1)) + EVENT_BYTES
    kept = DurableStreams(DurableConfig(max_total_mib=3.5 * size / 2**20, keep_s=60), clock)
    client = Downstream({"type": "http", "method": "POST", "path": "/v1/x", "headers": []}, None, None)
    go_on = asyncio.Event()

    async def work(recording: DurableStream) -> None:
        await recording.write(encode_event(b"x" * 90))
        if len(kept) == 1:
            await go_on.wait()

    made = []
    for _ in range(4):
        made.append(await kept.start(b"alice", client, b"", work))
        for _ in range(4):
            await asyncio.sleep(0)
        clock.advance(1)
    assert [each.events.ended_at is not None for each in made] == [False, True, True, True]
    kept.forget()
    assert await left_of(kept, made) == [made[0], *made[2:]], "only the oldest stream that has ended"
    clock.now = (made[2].events.ended_at or 0) + 60
    kept.forget()
    assert await left_of(kept, made) == [made[0], *made[2:]]
    clock.advance(0.5)
    kept.forget()
    assert await left_of(kept, made) == [made[0], made[3]]
    go_on.set()
    await kept.close()
    assert kept.num_bytes == 0


class AskedStreams:
    """The routes of streams, called without a server."""

    def __init__(self, *, is_required: bool = False, **default: float) -> None:
        self.clock = Clock()
        self.kept = DurableStreams(DurableConfig(), self.clock)
        known = Key("ci", hashlib.sha256(b"k").hexdigest(), account=Account("acme"))
        self.limits = TenantLimits(DoorConfig(), TenantLimitsConfig(**default), (), "s", self.clock)
        admission = AdmissionFilter(Access([known], is_required=is_required), self.limits, "")
        self.routes = StreamRoutes(self.kept, admission, "s", self._handle, self._work)
        self.told: list[str | int] = []

    async def ask(self, method: str, name: str, key: str = "") -> str | int:
        async def send(message: Any) -> None:
            if "status" in message:
                self.told.append(message["status"])

        async def receive() -> Any:
            await asyncio.sleep(60)

        headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
        scope = {"type": "http", "method": method, "path": f"/streams/{name}", "headers": headers, "client": ("a", 1)}
        await self.routes(scope, receive, send)
        return self.told.pop()

    async def _handle(self, client: ResponseWriter, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except ApiError as error:
            self.told.append(error.word)

    async def start(self, key: str) -> str:
        client = Downstream({"type": "http", "method": "POST", "path": "/v1/x", "headers": []}, None, None)
        tenant = tenant_of(Head("POST", "/v1/x", "/v1/x", [("authorization", f"Bearer {key}")]), "s")
        return (await self.kept.start(tenant, client, b"", self._work)).name

    async def _work(self, recording: DurableStream) -> None:
        await recording.respond(200, [], b"whole")


async def test_a_stream_is_read_and_stopped_only_with_its_key_if_one_is_required() -> None:
    asked = AskedStreams(is_required=True)
    for key in ("", "other"):
        assert await asked.ask("GET", "x" * 32, key) == "unauthorized"
    assert await asked.ask("GET", "x" * 32, "k") == "not_found"
    asked = AskedStreams()
    name = await asked.start("mine")
    await asyncio.sleep(0)
    assert [await asked.ask("GET", name, key) for key in ("mine", "other", "")] == [200, "not_found", "not_found"]
    assert [await asked.ask(method, name, "mine") for method in ("POST", "PUT", "HEAD")] == ["method_not_allowed"] * 3
    assert await asked.ask("DELETE", name, "other") == "not_found"
    assert [await asked.ask("DELETE", name, "mine"), await asked.ask("GET", name, "mine")] == [204, "not_found"]


async def test_reading_a_stream_counts_as_a_request_of_its_tenant() -> None:
    asked = AskedStreams(requests_per_min=2)
    name = await asked.start("mine")
    await asyncio.sleep(0)
    assert [await asked.ask("GET", name, "mine") for _ in range(3)] == [200, 200, "quota_exceeded"]
    assert asked.limits.num_open == 0
    ready: list[Head] = []

    async def none_left(head: Head) -> None:
        ready.append(head)
        raise ApiError("quota_exceeded", "at all routers")

    asked.limits.ready = none_left
    assert await asked.ask("GET", name, "other") == "quota_exceeded"
    assert len(ready) == 1


async def test_a_journal_has_each_token_once_with_the_events_that_brought_it() -> None:
    class Kept:
        """A journal that this router writes."""

        is_ours, has_failed, num_parts = True, False, 3

        def __init__(self) -> None:
            self.entries: list[Any] = []

        async def keep(self, *entries: Any) -> None:
            self.entries += entries

    recording = stream()
    recording.journal = kept = cast(Any, Kept())
    recording.log.keep_untold()
    await recording.start_stream(200, [])
    first, second = ResumePoint(0, (1,)), ResumePoint(0, (2, 3))
    for point in (first, second):
        recording.log.add(point)
    await recording.write(event(0))
    await recording.write(event(1))
    recording.log.add(ResumePoint(0, (4,)))
    await recording.write(event(2))
    told = [entry for entry in kept.entries if isinstance(entry, JournalEvents)]
    assert [(each.events, each.points) for each in told] == [
        (event(0), (first, second)), (event(1), ()), (event(2), (ResumePoint(0, (4,)),)),
    ]  # fmt: skip
    assert recording.started == (ASKED.answer, recording.log, "name.3")
    again = stream()
    assert not again.replay(kept.entries)
    assert (again.log.num_tokens, again.events.num_bytes) == (4, recording.events.num_bytes)
    await recording.refuse(ApiError("aborted", "cut"))
    assert isinstance(kept.entries[-1], JournalEvents)
    kept.is_ours = False
    num_entries = len(kept.entries)
    await recording.refuse(ApiError("aborted", "it may continue elsewhere"))
    assert len(kept.entries) == num_entries
    assert recording.events.last is not None
    assert recording.events.last.event_id is None
