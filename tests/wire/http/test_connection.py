"""A connection of a client, without a socket: the order of its requests, refusals, and time limits."""

import asyncio
import time
from typing import Any, cast

import pytest

from pilotlight.wire.errors import ApiError
from pilotlight.wire.http.connection import (
    EARLY_BYTES,
    EVENTS_AT_ONCE,
    LINGER_S,
    NEVER,
    HttpConnection,
    HttpLimits,
    host_and_port,
)
from pilotlight.wire.http.exchange import HELD_BODY_BYTES
from pilotlight.wire.http.request_starts import RequestStarts
from pilotlight.wire.http.server import REFUSED_AT_ONCE, Server

LIMITS = HttpLimits(
    head_timeout_s=11.0, keep_alive_s=22.0, stall_s=33.0, max_connections=2, max_connections_per_client=1
)
GET = b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


class Transport:
    def __init__(self, peer: tuple[Any, ...] = ("192.0.2.1", 7), *, is_tls: bool = False) -> None:
        self.written = b""
        self.told: list[str] = []
        self._peer = peer
        self._is_tls = is_tls

    def get_extra_info(self, name: str) -> Any:
        return {"peername": self._peer, "ssl_object": self if self._is_tls else None}.get(name)

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == LIMITS.write_buffer_bytes

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return bool({"close", "abort"} & {*self.told})

    def can_write_eof(self) -> bool:
        return not self._is_tls

    def __getattr__(self, name: str) -> Any:
        return lambda: self.told.append(name)


class Client:
    """A connection, with an application that records requests and sends the responses that a test gives it."""

    def __init__(self, server: Server | None = None, transport: Transport | None = None) -> None:
        self.server = server or Server(self._app, LIMITS, overload_headers=[("x-over", "loaded")])
        self.transport = transport or Transport()
        self.seen: list[str] = []
        self.left: list[str] = []
        self.answers: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self.connection = HttpConnection(self.server)
        self.connection.connection_made(cast(Any, self.transport))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope["path"])
        self.scope = scope
        for message in await self.answers.get():
            await send(message)
        if (await receive())["type"] == "http.disconnect":
            self.left.append(scope["path"])

    async def says(self, data: bytes) -> None:
        self.connection.data_received(data)
        await self.turn()

    async def turn(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def is_answered(self, data: bytes = b"ok", *, more: bool = False) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": []}
        self.answers.put_nowait([start, {"type": "http.response.body", "body": data, "more_body": more}])
        await self.turn()

    def has(self, seconds: float) -> bool:
        """Tell whether the connection's deadline is `seconds` from now, within a second."""
        return abs(self.connection.deadline - time.monotonic() - seconds) < 1.0

    @property
    def statuses(self) -> list[bytes]:
        return [part[:3] for part in self.transport.written.split(b"HTTP/1.1 ")[1:]]


async def test_requests_are_answered_one_after_the_other_and_not_read_far_ahead() -> None:
    client = Client()
    await client.says(GET % 1 + GET % 2 + GET % 3)
    assert (client.seen, client.transport.told) == (["/1"], ["pause_reading"])
    for number in (2, 3):
        await client.is_answered()
        assert client.seen[-1] == f"/{number}"
    assert client.transport.told == ["pause_reading", "resume_reading"]
    await client.is_answered()
    assert (client.statuses, client.transport.told[2:]) == ([b"200"] * 3, [])
    assert client.scope["client"] == ("192.0.2.1", 7)
    assert client.scope["scheme"] == "http"


async def test_a_request_whose_client_has_left_while_it_waited_for_its_start_is_not_started() -> None:
    client = Client()
    client.server.starts, client.server.limits = RequestStarts(1), LIMITS._replace(max_connections=3)
    clients = [client, *(Client(client.server, Transport((f"192.0.2.{number}", 7))) for number in (2, 3))]
    for number, each in enumerate(clients):
        each.connection.data_received(GET % number)
    clients[1].connection.eof_received()
    await client.turn()
    assert client.seen == ["/0", "/2"]
    assert (clients[1].transport.told, clients[1].connection.task) == (["close"], None)


@pytest.mark.long
async def test_a_body_of_many_small_chunks_gives_others_their_turns() -> None:
    """A transport may deliver two megabytes in one turn of the loop; as chunks of one byte they would take half a second."""
    client = Client()
    head = b"POST /1 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    client.connection.data_received(head + b"1\r\nx\r\n" * (EVENTS_AT_ONCE - 2))
    assert client.transport.told == []
    client.connection.data_received(b"1\r\nx\r\n" * (EVENTS_AT_ONCE + 1))
    assert client.transport.told == ["pause_reading"]
    await client.turn()
    assert client.transport.told == ["pause_reading", "resume_reading"]
    many = HELD_BODY_BYTES + 1
    client.connection.data_received(b"1\r\nx\r\n" * many)
    await client.turn()
    assert client.transport.told[2:] == ["pause_reading"], "an unread body also pauses reading, until it is read"


async def test_a_connection_has_a_time_for_a_head_for_being_idle_and_none_while_it_is_answered() -> None:
    client = Client()
    assert client.has(LIMITS.head_timeout_s)
    await client.says(GET % 1)
    assert client.connection.deadline == NEVER
    await client.is_answered()
    assert client.has(LIMITS.keep_alive_s)
    await client.says(b"GET / HT")
    assert client.has(LIMITS.head_timeout_s)
    client.connection.deadline = 5.0
    await client.says(b"TP/1.1\r\n")
    assert client.connection.deadline == 5.0, "a head that comes in pieces gets no more time"
    client.connection.pause_writing()
    assert client.connection.is_full
    assert client.has(LIMITS.stall_s)
    client.connection.resume_writing()
    assert client.has(LIMITS.keep_alive_s)
    await client.says(b"host: x\r\n\r\n")
    client.connection.pause_writing()
    client.connection.resume_writing()
    assert (client.connection.deadline, client.connection.is_full) == (NEVER, False)


@pytest.mark.parametrize("ask", [GET % 2, b"GET / HT", b""])
async def test_who_does_not_read_an_answer_has_no_more_time_for_asking_again(ask: bytes) -> None:
    client = Client()
    await client.says(GET % 1)
    client.connection.pause_writing()
    client.connection.deadline = deadline = time.monotonic() + 5.0
    await client.is_answered()
    await client.says(ask)
    assert client.connection.deadline == deadline
    client.connection.overdue()
    assert (client.server.cut, client.transport.told[-1]) == ({"unread": 1}, "abort")


@pytest.mark.parametrize("head", [GET % 1, b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", POST])
async def test_who_reads_an_answer_late_has_the_time_that_is_left_to_its_connection(head: bytes) -> None:
    client = Client()
    await client.says(head)
    client.connection.pause_writing()
    await client.is_answered()
    assert client.has(LIMITS.stall_s)
    client.connection.resume_writing()
    assert client.has(LINGER_S if head == POST else LIMITS.stall_s if b"close" in head else LIMITS.keep_alive_s)


@pytest.mark.parametrize(
    ("begins", "told", "cut", "status"),
    [(b"", ["close"], None, None), (b"GET / HT", ["write_eof"], "request_timeout", b"408")],
)
async def test_a_connection_that_timed_out_is_closed_with_a_reason_if_it_has_started_a_request(
    begins: bytes, told: list[str], cut: str | None, status: bytes | None
) -> None:
    client = Client()
    if begins:
        await client.says(begins)
    client.connection.overdue()
    assert (client.transport.told, client.has(LINGER_S)) == (told, True)
    assert client.statuses == ([status] if status else [])
    assert dict(client.server.cut) == ({cut: 1} if cut else {})
    client.connection.overdue()
    assert client.transport.told == [*told, "abort"]
    assert client.connection.deadline == NEVER
    full = Client()
    full.connection.pause_writing()
    full.connection.overdue()
    assert (full.transport.told, dict(full.server.cut)) == (["abort"], {"unread": 1})


async def test_a_refusal_is_no_answer_to_another_request() -> None:
    refusal = ApiError("overloaded", "full", retry_after_s=1)
    client = Client()
    client.connection.refuse(refusal)
    assert client.statuses == [b"503"]
    assert b"x-over: loaded\r\n" in client.transport.written
    assert b"connection: close\r\n" in client.transport.written
    assert client.transport.told == ["write_eof"]
    await client.says(GET % 1)
    assert client.seen == [], "bytes after a refusal are discarded"
    incoming = Client()
    await incoming.says(POST)
    incoming.connection.refuse(ApiError("request_timeout", "slow"))
    await incoming.turn()
    assert incoming.statuses == [b"408"]
    assert b"x-over" not in incoming.transport.written
    await incoming.is_answered()
    assert (incoming.left, incoming.statuses) == (["/"], [b"408"]), "the application gets http.disconnect"
    started = Client()
    await started.says(POST)
    await started.is_answered(more=True)
    started.connection.refuse(refusal)
    assert (started.statuses, started.transport.told) == ([b"200"], ["abort"])
    behind = Client()
    await behind.says(GET % 1 + POST)
    behind.connection.refuse(refusal)
    assert (behind.statuses, behind.transport.told[-1]) == ([], "abort"), (
        "the first request would get the refusal as its response"
    )


async def test_what_is_no_request_spoils_no_answer_before_it() -> None:
    client = Client()
    await client.says(GET % 1 + b"nonsense\r\n\r\n")
    assert client.seen == ["/1"]
    await client.is_answered()
    assert client.statuses == [b"200"]
    assert b"connection: close" in client.transport.written
    assert (client.transport.told[-1], client.has(LIMITS.stall_s)) == ("close", True)
    alone = Client()
    await alone.says(b"nonsense\r\n\r\n")
    assert (alone.statuses, alone.seen) == ([b"400"], [])


async def test_an_answer_before_its_requests_end_is_the_last_one() -> None:
    for is_tls, told in ((False, ["write_eof"]), (True, ["close"])):
        client = Client(transport=Transport(is_tls=is_tls))
        await client.says(POST + b"ab")
        await client.is_answered()
        assert (client.statuses, client.transport.told, client.has(LINGER_S)) == ([b"200"], told, True)
        await client.says(b"cd" + GET % 2)
        assert client.seen == ["/"]
        assert client.scope["scheme"] == ("https" if is_tls else "http")


async def test_a_server_that_stops_answers_started_requests_and_closes_the_others() -> None:
    client = Client()
    await client.says(GET % 1)
    client.connection.close_if_idle()
    assert client.transport.told == []
    client.server.is_stopping = True
    await client.is_answered()
    assert client.transport.told == ["close"]
    idle = Client()
    idle.connection.close_if_idle()
    assert idle.transport.told == ["close"]


async def test_a_leaving_client_ends_all_its_requests_and_no_longer_counts() -> None:
    for leave in (HttpConnection.eof_received, lambda connection: connection.connection_lost(None)):
        client = Client()
        await client.says(GET % 1 + GET % 2)
        assert (len(client.server.connections), dict(client.server.by_client)) == (1, {"192.0.2.1": 1})
        leave(client.connection)
        await client.is_answered()
        assert (client.left, client.seen, client.statuses) == (["/1"], ["/1"], []), (
            "requests that wait in the connection are not started"
        )
        client.connection.connection_lost(None)
        client.connection.connection_lost(None)
        assert (len(client.server.connections), dict(client.server.by_client)) == (0, {})


async def test_connections_beyond_a_limit_get_an_error_and_far_beyond_it_are_closed_at_once() -> None:
    first = Client()
    second = Client(first.server, Transport(("192.0.2.1", 8)))
    assert second.statuses == [b"429"]
    assert b"your address has 1 connections open" in second.transport.written
    assert b"x-over: loaded" in second.transport.written
    third = Client(first.server, Transport(("192.0.2.2", 8)))
    assert third.statuses == [b"503"]
    others = [Client(first.server, Transport((f"192.0.2.{i}", 8))) for i in range(3, 3 + REFUSED_AT_ONCE)]
    assert [client.transport.told for client in others[:-1]] == [["write_eof"]] * (REFUSED_AT_ONCE - 1)
    assert (others[-1].transport.told, others[-1].statuses) == (["abort"], [])
    assert dict(first.server.cut) == {"quota_exceeded": 1, "overloaded": REFUSED_AT_ONCE, "closed": 1}


async def test_bytes_before_a_handshakes_answer_are_bounded() -> None:
    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    client = Client(Server(nothing, LIMITS))
    key = b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    await client.says(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n" + key + b"\r\nab")
    await client.says(b"c" * (EARLY_BYTES - 2))
    assert client.transport.told == []
    await client.says(b"d")
    assert client.transport.told == ["pause_reading"]
    assert client.connection.task is not None
    client.connection.task.cancel()
    await asyncio.gather(client.connection.task, return_exceptions=True)


def test_an_address_of_ipv6_has_two_parts() -> None:
    assert [host_and_port(each) for each in (("::1", 5, 0, 0), ("a", 5), "/socket", None)] == [
        ("::1", 5),
        ("a", 5),
        "/socket",
        None,
    ]
