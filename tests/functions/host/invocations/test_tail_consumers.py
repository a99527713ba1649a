"""Tail consumers: events are delivered despite an internal error, and those that wait take limited memory."""

import asyncio
from typing import Any

import pytest

from pilotlight.functions.channel import frames
from pilotlight.functions.host.invocations.tail_consumers import TailConsumers
from tests.asgi import eventually


def item(number: int, text: str = "") -> dict[str, Any]:
    logs = [{"timestamp": 0, "level": "log", "message": [text]}] if text else []
    return {"number": number, "logs": logs, "exceptions": []}


async def test_an_unexpected_error_is_logged_and_later_events_are_delivered(caplog: pytest.LogCaptureFixture) -> None:
    delivered: list[Any] = []

    async def ask(consumer: str, event: frames.TailEvent) -> None:
        if item(1) in event.events:
            tails.send(consumer, item(2))
            raise ValueError("on purpose")
        delivered.extend(event.events)

    tails = TailConsumers(ask)
    tails.send("consumer", item(1))
    await eventually(lambda: delivered == [item(2)])
    (record,) = caplog.records
    assert record.getMessage() == "1 events for the tail consumer consumer are lost"
    assert record.exc_info is not None
    await tails.close()


async def test_a_slow_consumer_loses_its_oldest_events_when_they_take_too_much_memory() -> None:
    delivered: list[Any] = []
    may_answer = asyncio.Event()

    async def ask(consumer: str, event: frames.TailEvent) -> None:
        await may_answer.wait()
        delivered.extend(each["number"] for each in event.events)

    tails = TailConsumers(ask, max_bytes=1 << 20)
    tails.send("slow", item(0))
    await asyncio.sleep(0)  # it is being delivered
    for number in range(1, 51):
        tails.send("slow", item(number, "x" * (64 << 10)))
    assert tails.num_dropped == 35
    may_answer.set()
    await eventually(lambda: delivered == [0, *range(36, 51)])
    tails.send("slow", item(51, "x" * (900 << 10)))
    await eventually(lambda: delivered[-1] == 51)
    assert tails.num_dropped == 35
    await tails.close()
