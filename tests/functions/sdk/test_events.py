"""Queue handlers in real isolates: decisions about messages hold even if the handler fails afterwards."""

from typing import Any

import pytest

from pilotlight.functions.channel.frames import UNNUMBERED, QueueEvent
from pilotlight.functions.host.faults import Fault
from tests.functions.conftest import Served, ServedMaker
from workers.face import as_record

SOURCE = """
import sys
from workers import WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def queue(self, batch):
        for message in batch.messages:
            for word in message.body.split():
                if word == "ack":
                    message.ack()
                elif word == "retry":
                    message.retry(delaySeconds=30)
                elif word == "all":
                    batch.ack_all()
                elif word == "raise":
                    raise ValueError("after the decisions")
                elif word == "exit":
                    sys.exit(3)
"""


@pytest.fixture
async def served(make_served: ServedMaker) -> Any:
    async with make_served(tier=1) as made:
        made.add(SOURCE)
        yield made


def batch(*bodies: str) -> QueueEvent:
    return QueueEvent(
        UNNUMBERED, "jobs", [{"id": str(n), "timestamp_ms": 0, "attempts": 1, "body": b} for n, b in enumerate(bodies)]
    )


@pytest.mark.parametrize("end", ["raise", "exit"])
async def test_decisions_hold_though_the_handler_fails_and_the_undecided_come_again(served: Served, end: str) -> None:
    with pytest.raises(Fault) as failed:
        await served.functions.ask("f", batch("ack retry", "retry ack", "", end))
    outcome = failed.value.value
    assert outcome["acked"] == ["0"]
    assert [(each["id"], each["delay_s"]) for each in outcome["retried"]] == [("1", 30), ("2", None), ("3", None)]


async def test_a_batch_that_was_acknowledged_as_a_whole_does_not_come_again(served: Served) -> None:
    with pytest.raises(Fault, match="after the decisions") as failed:
        await served.functions.ask("f", batch("all", "retry", "raise"))
    assert failed.value.value == {"acked": ["0", "2"], "retried": [{"id": "1", "delay_s": 30}]}


def test_a_missing_key_of_a_body_is_named_beside_the_keys_that_are_there() -> None:
    body = as_record({"wrong": 1, "note": 2})
    with pytest.raises(AttributeError, match="there is no 'note_id' here; the keys are 'wrong', 'note'"):
        _ = body.note_id
