"""One attempt at a site, over a connection whose bytes come from the test: responses, failures, and the state afterwards."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.forwarding.relay import DeliveryLog, Forward, StreamBroken, StreamDone
from pilotlight.edge_router.forwarding.site_failure import SiteFailed, StreamLost
from pilotlight.edge_router.forwarding.timeouts import LOOK_AGAIN_S, LOST_S, AnswerLimits, AttemptLimits
from pilotlight.edge_router.forwarding.upstream import SMALL_BYTES, SiteConnections, UpstreamAttempt, UpstreamResponse
from pilotlight.edge_router.requests.request import AT_ONCE_BYTES, Head, RequestParser, ValidRequest
from pilotlight.sites.network import RelayConfig
from pilotlight.wire.hop.headers import ROUTE
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.http.client import Origin, UpstreamConnection
from tests.asgi import eventually

NEVER = float("-inf")
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: Text/Event-Stream; charset=utf-8\r\n"
MARKED = SSE + b"x-pilotlight-marks: 1\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
SMALL = bytes(SMALL_BYTES)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(body: bytes, status: bytes = b"200 OK", *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *headers, b"", body])


class Transport:
    """A fake transport of a connection."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        self.written += b"".join(parts)

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Pool:
    """Connections without a peer. The first `num_kept` of them were used before."""

    def __init__(self, num_kept: int = 0) -> None:
        self.num_kept = num_kept
        self.made: list[UpstreamConnection] = []
        self.back: list[UpstreamConnection] = []

    def idle(self, origin: Origin) -> UpstreamConnection | None:
        return self._made(origin) if len(self.made) < self.num_kept else None

    async def connect(self, origin: Origin) -> UpstreamConnection:
        return self._made(origin)

    def put_back(self, connection: UpstreamConnection) -> None:
        self.back.append(connection)

    def _made(self, origin: Origin) -> UpstreamConnection:
        connection = UpstreamConnection(origin)
        connection.connection_made(cast(Any, Transport()))
        self.made.append(connection)
        return connection


class Pace:
    is_slow = is_dead = has_other_site = False

    def may_leave(self) -> bool:
        return self.has_other_site

    may_move = may_leave

    def is_frozen(self) -> bool:
        return self.is_dead

    def is_stalled(self, silent_s: float) -> bool:
        self.silent_s = silent_s
        return self.is_slow


def asked(path: str = "/v1/chat/completions", method: str = "POST", body: bytes | None = None) -> ValidRequest:
    given = (
        b'{"model": "ember", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'
        if body is None
        else body
    )
    return RequestParser("", 4, lambda *_: None).parse(Head(method, path, path, []), given, "id", "1.2.3.4")


class Attempt:
    def __init__(
        self,
        request: ValidRequest | None = None,
        *,
        is_continuation: bool = False,
        num_kept: int = 0,
        first_byte_s: float = 60.0,
        lost_s: float = 30.0,
        limits: AnswerLimits | None = None,
    ) -> None:
        self.pool, self.pace, self.log = Pool(num_kept), Pace(), DeliveryLog()
        self.upstream = SiteConnections(RelayConfig(idle_timeout_s=40.0), "", SiteClocks([]), limits=limits)
        self.upstream.pool = cast(Any, self.pool)
        times = AttemptLimits(first_byte_s, 10.0, is_continuation, lost_s)
        self.attempt = UpstreamAttempt(
            self.upstream, "ams1", "http://h:1", request or asked(), times, cast(Any, self.pace), self.log
        )
        self.task = asyncio.ensure_future(self.attempt.response())

    @property
    def connection(self) -> UpstreamConnection:
        return self.pool.made[-1]

    async def hears(self, *pieces: bytes | None) -> None:
        """Feed pieces of a response; None closes the connection."""
        for piece in pieces:
            await self.settle()
            if piece is None:
                self.connection.connection_lost(None)
            else:
                self.connection.data_received(piece)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def response(self, *pieces: bytes | None) -> UpstreamResponse:
        await self.hears(*pieces)
        async with asyncio.timeout(60):
            response = await self.task
        assert not self.upstream.silence.watched - {response}, "an ended attempt is not watched"
        return response

    async def failure(self, *pieces: bytes | None) -> SiteFailed:
        with pytest.raises(SiteFailed) as failed:
            await self.response(*pieces)
        assert not self.upstream.silence.watched
        assert self.pool.back == self.pool.made, "all connections are put back"
        return failed.value


async def test_an_answer_in_one_piece_is_read_whole_and_leaves_its_connection_to_the_next() -> None:
    attempt = Attempt()
    answer = whole(
        b"{}",
        b"201 Created",
        b"x-a: b",
        b"server: x",
        b"date: y",
        b"connection: keep-alive",
        b"x-pilotlight-site: ams1",
    )
    response = await attempt.response(answer[:40], answer[40:])
    assert (response.status, response.body, response.is_resumable, response.is_opaque) == (201, b"{}", False, False)
    assert response.headers == [("x-a", "b"), ("x-pilotlight-site", "ams1"), ("content-length", "2")]
    assert response.has_answered
    assert not attempt.pool.back
    with response:
        pass
    assert attempt.pool.back == [attempt.connection]
    assert attempt.connection.is_fit


@pytest.mark.parametrize(("num_bytes", "is_taken"), [(8, True), (9, False)])
async def test_an_answer_in_one_piece_has_a_largest_size(num_bytes: int, is_taken: bool) -> None:
    attempt = Attempt(limits=AnswerLimits(max_body_bytes=8))
    if is_taken:
        assert (await attempt.response(whole(b"x" * num_bytes))).body == b"x" * num_bytes
    else:
        assert (await attempt.failure(whole(b"x" * num_bytes))).kind == "malformed"


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ((whole(b"", b"503 Unavailable"),), "full"),
        ((whole(b"", b"400 Bad", b"x-pilotlight-refusal: draining"),), "draining"),
        ((None,), "lost"),
        ((whole(b"{}")[:-1], None), "lost"),
        ((b"nonsense\r\n\r\n",), "lost"),
        ((MARKED, None), "lost"),
        ((MARKED + b"0\r\n\r\n",), "lost"),
        ((MARKED + chunk(b":pl [9\n\n"),), "malformed"),
    ],
)
async def test_a_site_that_gave_nothing_has_failed(pieces: tuple[bytes | None, ...], kind: str) -> None:
    assert (await Attempt().failure(*pieces)).kind == kind


async def test_a_stream_is_a_response_from_its_first_event_that_carries_data() -> None:
    attempt = Attempt()
    await attempt.hears(MARKED + chunk(b": keep-alive\n\n"))
    assert not attempt.task.done()
    response = await attempt.response(
        chunk(b":pl [0,[7]]\ndata: a\n\n"), chunk(b":pl [0,[8]]\ndata: b\n\n" + DONE), b"0\r\n\r\n"
    )
    assert (response.is_resumable, response.has_answered, response.body) == (True, True, None)
    with response:
        events = [event async for batch in response for event in batch]
    told = b"".join(each.data for each in events if isinstance(each, Forward))
    assert told == b": keep-alive\n\ndata: a\n\ndata: b\n\n" + DONE
    assert isinstance(events[-1], StreamDone)
    assert (attempt.log.num_tokens, attempt.connection.is_fit) == (2, True)


async def test_a_site_that_does_not_continue_a_stream_has_refused() -> None:
    for answer in (whole(b"{}"), SSE + b"transfer-encoding: chunked\r\n\r\n"):
        failed = await Attempt(is_continuation=True).failure(answer)
        assert (failed.kind, "200 instead of continuing" in failed.detail) == ("refused", True)
    assert (await Attempt(is_continuation=True).response(MARKED + chunk(b":pl [0,[7]]\ndata: a\n\n"))).is_resumable
    unmarked = await Attempt().response(SSE + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"data: a\n\n"))
    assert not unmarked.is_resumable


async def test_a_kept_connection_that_was_closed_meanwhile_says_nothing_of_its_site() -> None:
    attempt = Attempt(num_kept=1)
    await attempt.hears(None)
    assert len(attempt.pool.made) == 2
    assert (await attempt.response(whole(b"{}"))).body == b"{}"
    assert attempt.pool.back == attempt.pool.made[:1]
    assert (await Attempt(num_kept=1).failure(b"HTTP/1.1 2", None)).kind == "lost"
    assert (await Attempt(asked("/fn/f"), num_kept=1).failure(None)).kind == "lost", "the function may have started"
    repeated = Attempt(asked("/fn/f", "GET"), num_kept=1)
    await repeated.hears(None)
    assert (await repeated.response(whole(b"x"))).body == b"x"


@pytest.mark.parametrize(
    ("answer", "is_stream", "body"),
    [
        (whole(SMALL), False, SMALL),
        (whole(SMALL + b"x")[:-1], True, None),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"1"), True, None),
        (whole(b"{}", b"503 Unavailable"), False, b"{}"),
        (SSE + b"transfer-encoding: chunked\r\n\r\n", True, None),
    ],
    ids=["small", "large", "of unknown length", "a failure", "events"],
)
async def test_a_functions_response_is_passed_on_in_one_piece_where_it_is_known_to_be_small(
    answer: bytes, is_stream: bool, body: bytes | None
) -> None:
    response = await Attempt(asked("/fn/f")).response(answer)
    assert (response.is_opaque, response.body, response.has_answered) == (is_stream, body, True)


async def test_a_functions_site_is_believed_in_its_own_name_alone() -> None:
    refused = whole(b"x" * 9, b"503 Unavailable", b"x-pilotlight-refusal: overloaded")
    assert (await Attempt(asked("/fn/f")).failure(refused)).kind == "full"


async def test_a_time_limit_ends_an_attempt_whatever_it_waits_for() -> None:
    for num_kept, pieces in ((0, ()), (1, ()), (0, (MARKED,))):
        attempt = Attempt(num_kept=num_kept)
        await attempt.hears(*pieces)
        now = asyncio.get_running_loop().time()
        attempt.attempt.look(now + 59.0, NEVER)
        attempt.attempt.look(now + 90.0, now + 89.0)  # this process was stopped until a second ago
        await attempt.settle()
        assert not attempt.task.done()
        attempt.attempt.look(now + 60.5, NEVER)
        failed = await attempt.failure()
        assert (failed.kind, "it sent nothing for" in failed.detail) == ("silent", True)


@pytest.mark.parametrize(("has_other_site", "lost_s"), [(True, 30.0), (False, 0.0)])
async def test_a_site_whose_probes_fail_is_left_for_another_or_after_a_long_silence(
    has_other_site: bool, lost_s: float
) -> None:
    lost = Attempt(lost_s=lost_s)
    lost.pace.has_other_site = has_other_site
    await lost.settle()
    lost.attempt.site_lost("it does not answer")
    failed = await lost.failure()
    assert (failed.kind, failed.detail) == ("silent", "it became unhealthy before its first byte: it does not answer")


async def test_a_request_that_no_other_site_can_answer_waits_for_a_busy_site_that_misses_probes() -> None:
    attempt = Attempt()
    await attempt.settle()
    attempt.attempt.site_lost("/status did not answer within 1 s")
    await attempt.settle()
    assert not attempt.task.done()
    with await attempt.response(*streaming(attempt)) as response:
        assert response.has_answered


async def test_a_time_limit_ends_the_wait_for_a_connection() -> None:
    attempt = Attempt()

    async def never(origin: Origin) -> UpstreamConnection:
        await asyncio.Event().wait()
        raise AssertionError

    cast(Any, attempt.pool).connect = never
    await attempt.settle()
    now = asyncio.get_running_loop().time()
    attempt.attempt.look(now + 59.0, NEVER)
    await attempt.settle()
    assert not attempt.task.done()
    for late_s in (60.5, 61.0):  # at the second look the attempt has already ended
        attempt.attempt.look(now + late_s, NEVER)
    failed = await attempt.failure()
    assert (failed.kind, "it sent nothing for" in failed.detail) == ("silent", True)


async def test_a_time_limit_that_passes_while_a_kept_connection_is_lost_makes_no_new_one() -> None:
    attempt = Attempt(num_kept=1)
    await attempt.settle()
    attempt.attempt.look(asyncio.get_running_loop().time() + 60.5, NEVER)
    attempt.connection.connection_lost(None)
    assert (await attempt.failure()).kind == "silent"
    assert len(attempt.pool.made) == 1


class SlowlySigned(ValidRequest, frozen=True):
    def head_lines(self, secret: str, now_s: float, site: str, body: bytes) -> bytes:
        assert MAY_SIGN.wait(60.0)
        return super().head_lines(secret, now_s, site, body)


MAY_SIGN = threading.Event()


@pytest.mark.parametrize("is_late", [False, True])
async def test_no_connection_is_taken_while_a_large_body_is_signed(is_late: bool) -> None:
    MAY_SIGN.clear()
    request = asked("/fn/f", body=bytes(AT_ONCE_BYTES + 1))
    attempt = Attempt(SlowlySigned(**{name: getattr(request, name) for name in request.__struct_fields__}), num_kept=1)
    await attempt.settle()
    assert attempt.pool.made == [], "one that is lost now would count against its site"
    if is_late:
        attempt.attempt.look(asyncio.get_running_loop().time() + 60.5, NEVER)
    MAY_SIGN.set()
    if is_late:
        assert (await attempt.failure()).kind == "silent"
        return
    await eventually(lambda: attempt.pool.made)
    assert (await attempt.response(whole(b"yes"))).body == b"yes"


async def test_a_site_that_sends_heartbeats_is_at_work_when_most_of_the_time_is_over() -> None:
    attempt = Attempt(first_byte_s=0.05)
    response = await attempt.response(MARKED + chunk(b": keep-alive\n\n"))
    assert not response.has_answered
    with response:
        assert [type(each) for each in await anext(response)] == [Forward]


async def test_a_site_that_sent_heartbeats_and_is_lost_has_failed_and_is_waited_for_no_more() -> None:
    attempt = Attempt()
    attempt.pace.has_other_site = True
    await attempt.hears(MARKED + chunk(b": keep-alive\n\n"))
    attempt.attempt.site_lost("it does not answer")
    assert (await attempt.failure()).kind == "silent"


def streaming(attempt: Attempt) -> tuple[bytes, ...]:
    return (MARKED + chunk(b":pl [0,[7]]\ndata: a\n\n"),)


@pytest.mark.parametrize(
    ("silent_s", "heard_s", "pace", "cause"),
    [
        (40.5, 40.5, {}, "silent"),
        (39.5, 39.5, {}, None),
        (99.0, 39.5, {}, None),  # this process was stopped for most of the silence
        (LOOK_AGAIN_S + 0.1, LOOK_AGAIN_S + 0.1, {"is_dead": True, "has_other_site": True}, "frozen"),
        (99.0, LOOK_AGAIN_S - 0.1, {"is_dead": True, "has_other_site": True}, None),
        (99.0, LOST_S - 0.5, {"is_dead": True}, None),
        (LOST_S + 0.1, LOST_S + 0.1, {"is_dead": True}, "frozen"),
        (3.0, 2.0, {"is_slow": True}, "stalled"),
    ],
)
async def test_a_stream_is_given_up_when_it_is_silent_for_too_long(
    silent_s: float, heard_s: float, pace: dict[str, bool], cause: str | None
) -> None:
    attempt = Attempt()
    response = await attempt.response(*streaming(attempt))
    attempt.pace.__dict__.update(pace)
    with response:
        await anext(response)
        response.look(asyncio.get_running_loop().time() + 999, NEVER)  # no task waits for it at this time
        waiting = asyncio.ensure_future(anext(response))
        await attempt.settle()
        began = asyncio.get_running_loop().time()
        response.look(began + silent_s, began + silent_s - heard_s)
        await attempt.settle()
        assert waiting.done() == (cause is not None)
        if cause is None:
            waiting.cancel()
            return
        with pytest.raises(StreamLost) as lost:
            await waiting
        assert lost.value.cause == cause
        if cause == "stalled":
            assert attempt.pace.silent_s == pytest.approx(heard_s, abs=0.5)
    assert response not in attempt.upstream.silence.watched


async def test_a_functions_stream_that_stands_still_is_left_alone_until_its_time_is_over() -> None:
    attempt = Attempt(asked("/fn/f"))
    attempt.pace.is_slow = True
    response = await attempt.response(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    with response:
        assert await anext(response) == []
        waiting = asyncio.ensure_future(anext(response))
        await attempt.settle()
        response.look(asyncio.get_running_loop().time() + 20.0, NEVER)
        await attempt.hears(chunk(b"a"))
        assert await waiting == [Forward(b"a")]


async def test_the_end_of_a_stream_is_waited_for_and_one_that_has_none_is_broken() -> None:
    for last, is_fit in ((b"0\r\n\r\n", True), (chunk(b"more"), False), (None, False)):
        attempt = Attempt(limits=AnswerLimits(last_chunk_s=0.02))
        response = await attempt.response(*streaming(attempt))
        await attempt.hears(chunk(b":pl [0,[8]]\ndata: b\n\n" + DONE), last)
        with response:
            events = [event async for batch in response for event in batch]
        assert (isinstance(events[-1], StreamDone), attempt.connection.is_fit) == (True, is_fit)
    attempt = Attempt()
    response = await attempt.response(*streaming(attempt))
    await attempt.hears(b"0\r\n\r\n")
    with response:
        (first,), (last_event,) = await anext(response), await anext(response)
        assert isinstance(first, Forward)
        assert isinstance(last_event, StreamBroken)
    attempt = Attempt()
    response = await attempt.response(*streaming(attempt))
    await anext(response)
    await attempt.hears(None)
    with pytest.raises(StreamLost) as lost:
        await anext(response)
    assert lost.value.cause == "closed"


@pytest.mark.parametrize("is_silence_first", [True, False])
async def test_a_stream_whose_last_event_comes_with_the_end_of_its_time_is_complete(is_silence_first: bool) -> None:
    attempt = Attempt()
    response = await attempt.response(*streaming(attempt))
    with response:
        await anext(response)
        last = asyncio.ensure_future(anext(response))
        await attempt.settle()
        # After a pause of this process both happen in one turn of the event loop, in either order.
        if is_silence_first:
            response.look(asyncio.get_running_loop().time() + 31.0, NEVER)
        attempt.connection.data_received(chunk(b":pl [0,[8]]\ndata: b\n\n" + DONE))
        response.look(asyncio.get_running_loop().time() + 31.0, NEVER)
        assert isinstance((await last)[-1], StreamDone)
        with pytest.raises(StopAsyncIteration):
            await anext(response)


@pytest.mark.parametrize(
    ("body", "headers", "use"),
    [
        (b"{}", (b"x-pilotlight-usage: 1,2,3,4", b"x-pilotlight-work: 5,6,7"), ResourceUse(1, 2, 3, 4, 5, 6, 7)),
        (b'{"usage": {"completion_tokens": 12, "x": 1}}', (), ResourceUse(output=12)),
        (b'{"usage": {"output_tokens":7}}', (b"x-pilotlight-usage: no",), ResourceUse(output=7)),
        (b'{"completion_tokens": 12' + b" " * 2048 + b"}", (), ResourceUse()),
        (
            b'{"completion_tokens": 12' + b" " * (2048 - len('"completion_tokens": 12') - 1) + b"}",
            (),
            ResourceUse(output=12),
        ),
        (b"", (), ResourceUse()),
    ],
)
async def test_what_an_answer_in_one_piece_has_used_is_its_sites_word_or_stands_at_its_end(
    body: bytes, headers: tuple[bytes, ...], use: ResourceUse
) -> None:
    assert (await Attempt().response(whole(body, b"200 OK", *headers))).use == use


async def test_lengths_are_sent_where_a_body_follows_or_would_have() -> None:
    for status, told in ((b"204 No Content", []), (b"304 Not Modified", []), (b"200 OK", [("content-length", "0")])):
        assert (await Attempt().response(whole(b"", status))).headers == told
    head = Attempt(asked("/fn/f", "HEAD", b""))
    assert (await head.response(whole(b"12345")[:-5])).headers == [("content-length", "5")]
    stream = await Attempt().response(MARKED + chunk(b":pl [0,[7]]\ndata: a\n\n"))
    assert [name for name, _ in stream.headers] == ["content-type"]


async def test_a_route_is_a_models_sites_word_and_no_functions() -> None:
    answer = whole(b"{}", b"200 OK", ROUTE.encode() + b": computed=b")
    assert (await Attempt().response(answer)).route == "computed=b"
    said = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n" + ROUTE.encode() + b": computed=b\r\n\r\n"
    assert (await Attempt(asked("/fn/f")).response(said)).route == ""
    assert (await Attempt().response(MARKED + chunk(b":pl [0,[7]]\ndata: a\n\n"))).use == ResourceUse()


@pytest.mark.parametrize(
    ("method", "body", "length"),
    [
        ("POST", b"{}", b"2"),
        ("POST", b"", b"0"),
        ("PUT", b"", b"0"),
        ("GET", b"", None),
        ("HEAD", b"", None),
        ("DELETE", b"", None),
        ("DELETE", b"x", b"1"),
    ],
)
async def test_a_request_names_the_length_of_its_body_where_it_has_or_could_have_one(
    method: str, body: bytes, length: bytes | None
) -> None:
    attempt = Attempt(asked("/fn/f?a=b", method, body))
    await attempt.settle()
    transport = cast(Transport, attempt.connection.transport)
    head, _, sent = transport.written.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[:2] == [f"{method} /fn/f?a=b HTTP/1.1".encode(), b"host: h:1"]
    assert [line.partition(b": ")[2] for line in lines if line.startswith(b"content-length")] == (
        [length] if length else []
    )
    assert sent == body
    attempt.task.cancel()
    await asyncio.gather(attempt.task, return_exceptions=True)
    assert attempt.pool.back == attempt.pool.made


async def test_connections_that_have_waited_too_long_are_looked_for_with_all_that_is_waited_for() -> None:
    attempt, swept = Attempt(), list[bool]()
    attempt.pool.sweep = lambda: swept.append(True)  # type: ignore[attr-defined]
    attempt.upstream.look(0.0, NEVER)
    assert swept
    assert (await attempt.response(whole(b""))).status == 200


async def test_events_are_forwarded_as_they_come_until_one_needs_the_task() -> None:
    attempt = Attempt()
    response = await attempt.response(*streaming(attempt))
    forwarded: list[bytes] = []
    room = 2

    def forward(data: bytes) -> bool:
        if len(forwarded) == room:
            return False
        forwarded.append(data)
        return True

    with response:
        await anext(response)
        response.forward_by(cast(Any, SimpleNamespace(forward=forward)))
        waiting = asyncio.ensure_future(anext(response))
        await attempt.settle()
        for number in range(2):
            attempt.connection.data_received(chunk(b":pl [0,[%d]]\ndata: %d\n\n" % (number, number)))
            assert forwarded[-1] == b"data: %d\n\n" % number
        await attempt.settle()
        assert not waiting.done()
        attempt.connection.data_received(chunk(b":pl [0,[2]]\ndata: 2\n\n"))  # the client's buffer is full
        attempt.connection.data_received(chunk(b":pl [0,[3]]\ndata: 3\n\n"))
        assert await waiting == [Forward(b"data: 2\n\n")]
        room = 9
        ending = asyncio.ensure_future(anext(response))
        await attempt.hears(chunk(DONE), b"0\r\n\r\n")
        assert forwarded[2:] == [b"data: 3\n\n"]
        last = await ending
        assert [type(each) for each in last] == [Forward, StreamDone]
    assert attempt.log.num_tokens == 5
