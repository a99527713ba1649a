"""Tail consumers still get events after an internal error in one delivery."""

from typing import Any

import pytest

from pilotlight.functions.channel import frames
from pilotlight.functions.host.invocations.tail_consumers import TailConsumers
from tests.asgi import eventually


async def test_an_unexpected_error_is_logged_and_later_events_are_delivered(caplog: pytest.LogCaptureFixture) -> None:
    delivered: list[Any] = []

    async def ask(consumer: str, event: frames.TailEvent) -> None:
        if {"number": 1} in event.events:
            tails.send(consumer, {"number": 2})
            raise ValueError("on purpose")
        delivered.extend(event.events)

    tails = TailConsumers(ask)
    tails.send("consumer", {"number": 1})
    await eventually(lambda: delivered == [{"number": 2}])
    (record,) = caplog.records
    assert record.getMessage() == "1 events for the tail consumer consumer are lost"
    assert record.exc_info is not None
    await tails.close()
