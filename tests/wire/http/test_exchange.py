"""One request and its response, without a socket: the messages of the application, the bytes of the client, and their ends."""

import asyncio
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.wire.http.exchange import HELD_BODY_BYTES, SLICE_BYTES, HttpExchange, RequestBody
from pilotlight.wire.http.request import RequestHead

DATE = b"date: today\r\n"


class Connection:
    """A connection that records the calls of its exchange."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.transport = cast(Any, SimpleNamespace(write=self._write))
        self.is_full = False
        self.server = SimpleNamespace(date=DATE, is_stopping=False)
        self.written: list[bytes] = []
        self.told: list[str] = []

    def _write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def pause_reading(self) -> None:
        self.told.append("pause")

    def resume_reading(self) -> None:
        self.told.append("resume")

    def finished(self, exchange: HttpExchange) -> None:
        assert exchange.is_done
        self.told.append("finished")

    def forget(self, exchange: HttpExchange) -> None:
        self.told.append("forget")

    def abort(self) -> None:
        self.told.append("abort")


def exchange(*, expects: bool = False, version: str = "1.1") -> tuple[HttpExchange, Connection]:
    connection = Connection()
    head = RequestHead(b"POST", b"/", version, [], keep_alive=True, expects=expects)
    return HttpExchange(connection, head, {}), connection


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_body_arrives_in_pieces_and_the_held_part_is_bounded() -> None:
    made, connection = exchange()
    made.take(b"a" * HELD_BODY_BYTES)
    assert connection.told == []
    made.take(b"b")
    assert connection.told == ["pause"]
    assert made.body.held_bytes == HELD_BODY_BYTES + 1
    message = await made.receive()
    assert (len(message["body"]), message["more_body"], made.body.held_bytes) == (HELD_BODY_BYTES + 1, True, 0)
    assert connection.told == ["pause", "resume"]
    waiting = asyncio.ensure_future(made.receive())
    await turn()
    assert not waiting.done()
    made.end_body()
    assert await waiting == {"type": "http.request", "body": b"", "more_body": False}
    again = asyncio.ensure_future(made.receive())
    await turn()
    assert not again.done(), "the end of the body comes once; the next message is the disconnect"
    made.gone()
    assert await again == {"type": "http.disconnect"}


async def test_a_whole_body_is_one_message_and_an_empty_one_is_too() -> None:
    for parts in ((), (b"a",), (b"a", b"bc")):
        made, connection = exchange()
        for part in parts:
            made.take(part)
        made.end_body()
        assert await made.receive() == {"type": "http.request", "body": b"".join(parts), "more_body": False}
        assert connection.told == []
    assert RequestBody(expects=False).take() is None


async def test_a_waiting_client_is_asked_to_continue_once_and_not_after_the_answers_start() -> None:
    made, connection = exchange(expects=True)
    waiting = asyncio.ensure_future(made.receive())
    await turn()
    assert connection.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    made.take(b"a")
    assert (await waiting)["body"] == b"a"
    waiting = asyncio.ensure_future(made.receive())
    await turn()
    assert len(connection.written) == 1
    waiting.cancel()
    made, connection = exchange(expects=True)
    await made.send(start())
    await turn()
    waiting = asyncio.ensure_future(made.receive())
    await turn()
    assert not any(b"100 Continue" in each for each in connection.written)
    waiting.cancel()


async def test_a_whole_answer_is_one_write_and_a_streams_head_does_not_wait_for_its_first_part() -> None:
    made, connection = exchange()
    made.end_body()
    await made.send(start(201, (b"a", b"b")))
    await made.send(body(b"xyz"))
    assert connection.written == [b"HTTP/1.1 201 Created\r\na: b\r\ncontent-length: 3\r\n" + DATE + b"\r\nxyz"]
    assert connection.told == ["finished"]
    await turn()
    assert len(connection.written) == 1
    made, connection = exchange()
    made.end_body()
    await made.send(start())
    assert not made.has_started
    await turn()
    assert made.has_started
    (head,) = connection.written
    assert b"transfer-encoding: chunked\r\n" in head
    await made.send(body(b"", more=True))
    await made.send(body(b"ab", more=True))
    await made.send(body(b"c"))
    assert connection.written[1:] == [b"2\r\nab\r\n", b"1\r\nc\r\n0\r\n\r\n"]
    assert connection.told == ["finished"]
    await made.send(body(b"more"))
    assert len(connection.written) == 3, "nothing is sent after the end"


async def test_a_connection_continues_if_the_request_is_whole_and_the_server_keeps_running() -> None:
    for is_whole, is_stopping, goes_on in ((True, False, True), (False, False, False), (True, True, False)):
        made, connection = exchange()
        if is_whole:
            made.end_body()
        connection.server.is_stopping = is_stopping
        await made.send(start())
        await made.send(body(b""))
        assert (b"connection: close" not in connection.written[0], made.framing.keep_alive) == (goes_on, goes_on)


async def test_who_sends_to_a_full_connection_waits_until_it_has_room_or_its_client_has_left() -> None:
    ends: tuple[Callable[[HttpExchange, Connection], None], ...] = (
        lambda made, connection: (setattr(connection, "is_full", False), made.wake())[1],
        lambda made, connection: made.gone(),
    )
    for end in ends:
        made, connection = exchange()
        connection.is_full = True
        await made.send(start())
        sending = asyncio.ensure_future(made.send(body(b"a", more=True)))
        await turn()
        made.wake()
        await turn()
        assert not sending.done()
        end(made, connection)
        await sending
    made, connection = exchange()
    connection.is_full = True
    await made.send(start())
    await made.send(body(b"a"))
    assert connection.told == ["finished"], "the last part does not wait"
    made.take(b"what comes behind it")
    assert made.body.held_bytes == 0


async def failing(made: HttpExchange, connection: Connection, *messages: dict[str, Any], error: bool = True) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)
            await turn()
        if error:
            raise RuntimeError("on purpose")

    made.end_body()
    made.begin(app)
    assert made.task is not None
    await made.task


@pytest.mark.parametrize("error", [True, False])
async def test_an_answer_that_is_not_given_is_a_500_and_one_that_breaks_off_is_cut(
    error: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    made, connection = exchange()
    await failing(made, connection, error=error)
    assert connection.written[0].startswith(b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n")
    assert connection.told == ["finished"]
    made, connection = exchange()
    await failing(made, connection, start(), body(b"a", more=True), error=error)
    assert connection.told == ["abort"]
    made, connection = exchange()
    await failing(made, connection, start(), body(b"a"), error=False)
    assert connection.told == ["finished"]
    made, connection = exchange()
    made.gone()
    await failing(made, connection, error=False)
    assert (connection.told, connection.written) == (["forget"], []), "there is no client to notify"


async def test_a_task_that_is_ended_cuts_its_connection() -> None:
    made, connection = exchange()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    made.begin(app)
    await turn()
    assert made.task is not None
    made.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await made.task
    assert connection.told == ["abort"]


async def test_a_part_is_written_at_once_where_nothing_has_to_be_waited_for() -> None:
    answer, connection = exchange()
    assert not answer.write_now(b"x"), "there is no head yet"
    await answer.send(start())
    assert not answer.write_now(b"x"), "the head is only written with the first part"
    await answer.send(body(b"first", more=True))
    before = len(connection.written)
    assert answer.write_now(b"next")
    assert connection.written[before:] == [b"4\r\nnext\r\n"]
    connection.is_full = True
    assert not answer.write_now(b"x"), "the client does not read"
    connection.is_full = False
    assert not answer.write_now(bytes(SLICE_BYTES + 1)), "large parts are written in slices"
    await answer.send(body(b""))
    assert not answer.write_now(b"x"), "the response has ended"
    answer, connection = exchange()
    await answer.send(start())
    await answer.send(body(b"first", more=True))
    answer.gone()
    assert not answer.write_now(b"x"), "the client has left"
    assert len(connection.written) == 1
