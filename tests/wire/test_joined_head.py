"""What a client of Hypercorn sees of answers' heads, piece by piece, and that small answers come in one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.task_group import TaskGroup
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.typing import ConnectionState

from wire.joined_head import JoinedHead


def start(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": 200, "headers": list(headers)}


def body(data: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


@asynccontextmanager
async def connection(messages: list[dict[str, Any]]) -> AsyncIterator[tuple[JoinedHead, list[Event]]]:
    """To an application that sends these."""
    written: list[Event] = []

    async def app(scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        await receive()
        for message in messages:
            await send(message)

    async def send(event: Event) -> None:
        written.append(event)

    async with TaskGroup(asyncio.get_running_loop()) as group:
        made = JoinedHead(
            ASGIWrapper(app), Config(), WorkerContext(None), group, ConnectionState({}), False, ("c", 1), ("s", 2), send
        )
        yield made, written


async def asked(messages: list[dict[str, Any]], method: bytes = b"GET") -> list[bytes]:
    async with connection(messages) as (made, written):
        asking = asyncio.ensure_future(
            made.handle(RawData(method + b" / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"))
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while not any(isinstance(event, Closed) for event in written):
                    await asyncio.sleep(0.001)
        asking.cancel()
        await made.handle(Closed())
    return [event.data for event in written if isinstance(event, RawData) and event.data]


async def test_a_small_answer_is_one_piece() -> None:
    (whole,) = await asked([start((b"content-length", b"2")), body(b"hi")])
    assert whole.startswith(b"HTTP/1.1 200 \r\n")
    assert whole.endswith(b"\r\n\r\nhi")


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_an_answer_without_a_body_is_one_piece(method: bytes) -> None:
    length = b"0" if method == b"GET" else b"2"
    (whole,) = await asked([start((b"content-length", length)), body(b"" if method == b"GET" else b"hi")], method)
    assert whole.endswith(b"\r\n\r\n")


async def test_a_streams_head_leaves_at_once() -> None:
    head, *pieces = await asked([start((b"content-type", b"text/event-stream")), body(b"one", True), body(b"two")])
    assert head.endswith(b"\r\n\r\n")
    assert pieces == [b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"]


async def test_a_long_bodys_first_piece_comes_with_its_head() -> None:
    first, second = await asked([start((b"content-length", b"6")), body(b"one", True), body(b"two")])
    assert first.endswith(b"\r\n\r\none")
    assert second == b"two"
