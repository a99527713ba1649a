"""EventWriter alone: the start of the stream, heartbeats, and the notice to a router when a drain starts."""

import asyncio
from typing import Any

from pilotlight.runtime.api.connection import EventWriter
from pilotlight.wire.hop.continuation import DRAIN_NOTICE
from pilotlight.wire.sse import HEARTBEAT
from tests.asgi import eventually


class Client:
    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    async def send(self, message: Any) -> None:
        self.told.append(message)

    @property
    def parts(self) -> list[bytes]:
        return [message["body"] for message in self.told if message["type"] == "http.response.body"]


async def test_a_router_is_notified_once_of_a_drain_and_not_before_the_answer_starts() -> None:
    client, drains = Client(), asyncio.Event()
    async with EventWriter(client.send, 1000.0, drains=drains) as writer:
        drains.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert client.told == []
        await writer.write(b"a")
        await eventually(lambda: client.parts == [b"a", DRAIN_NOTICE])
        for _ in range(10):
            await asyncio.sleep(0)
        await writer.write(b"b")
        await writer.close()
    assert client.parts == [b"a", DRAIN_NOTICE, b"b", b""]


async def test_silence_is_broken_from_the_start_and_after_a_notice_too() -> None:
    client, drains = Client(), asyncio.Event()
    async with EventWriter(client.send, 0.01, [("x-more", "1")], drains) as writer:
        await eventually(lambda: HEARTBEAT in client.parts)
        assert (b"x-more", b"1") in client.told[0]["headers"]
        drains.set()
        await eventually(lambda: DRAIN_NOTICE in client.parts)
        told = len(client.parts)
        await eventually(lambda: len(client.parts) > told + 1)
        await writer.close()
        told = len(client.parts)
        await asyncio.sleep(0.03)
        assert (len(client.parts), client.parts[-1]) == (told, b""), "nothing follows the end"
    assert client.parts.count(DRAIN_NOTICE) == 1


async def test_clients_without_a_router_see_nothing_of_a_drain() -> None:
    client = Client()
    async with EventWriter(client.send, 1000.0) as writer:
        await writer.write(b"a")
        for _ in range(10):
            await asyncio.sleep(0)
        await writer.close()
    assert client.parts == [b"a", b""]
