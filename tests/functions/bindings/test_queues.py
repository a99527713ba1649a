"""Queues and their file: each message is delivered, repeatedly if its handler fails, and after SIGKILL."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pilotlight.functions.bindings import queues
from pilotlight.functions.bindings.binding import BindingError, Services
from pilotlight.functions.bindings.queues import Queue, QueueConsumer, Settings
from pilotlight.functions.channel.exchanges import ExchangeResult
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import QueueEvent
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.functions.manifest import BindingDeclaration, Manifest
from pilotlight.functions.manifest_tables import ConsumerDeclaration as Declared
from pilotlight.support.database import DatabaseError, Databases
from tests.asgi import eventually
from tests.functions.bindings.conftest import Wire
from tests.functions.bindings.set_clock import SetClock
from workers.events import MessageBatch

QUEUE = ("queue_producer", "QUEUE", {"queue": "jobs", "delivery_delay": 0})
SOON = Settings(max_batch_timeout_s=0.0)


class Handler:
    """A consumer that records batches and returns what `decide` returns."""

    def __init__(self, decide: Callable[[dict[str, Any]], Any] = lambda message: None) -> None:
        self.batches: list[list[dict[str, Any]]] = []
        self._decide = decide

    async def __call__(self, queue: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        self.batches.append(messages)
        decisions = [(message["id"], self._decide(message)) for message in messages]
        return {
            "acked": [id for id, retried in decisions if retried is None],
            "retried": [{"id": id, "delay_s": retried} for id, retried in decisions if retried is not None],
        }

    @property
    def bodies(self) -> list[Any]:
        return [message["body"] for batch in self.batches for message in batch]


def queue_of(wired: Any, tmp_path: Path, name: str = "jobs") -> Queue:
    return Queue.of(name, tmp_path, wired.services)


async def empty(queue: Queue, but_for: int = 0) -> None:
    """Wait until no more messages are left, because they are deleted only after their delivery."""
    async with asyncio.timeout(60):
        while await queue.depth() != but_for:
            await asyncio.sleep(0.01)


async def test_a_consumer_gets_the_sent_message_unchanged_in_any_form(wire: Wire, tmp_path: Path) -> None:
    wired, handler = await wire(QUEUE), Handler()
    sent = [{"$date": "2026-01-02"}, {"$date": "soon"}, {"$set": [1]}, {"a": [{"$date": "x"}]}]
    for body in sent:
        await wired.env["QUEUE"].send(body)
    queue = queue_of(wired, tmp_path)
    consumer = QueueConsumer(queue, handler, SOON, None, "f")
    await empty(queue)
    await consumer.close()
    fields = [message for batch in handler.batches for message in batch]
    messages = MessageBatch("jobs", fields).messages
    assert [message.body for message in messages] == [message["body"] for message in messages] == sent


async def test_what_is_sent_is_delivered_once_in_order_and_forgotten(wire: Wire, tmp_path: Path) -> None:
    wired = await wire(QUEUE)
    send = wired.env["QUEUE"]
    await send.send({"n": [1, None]})
    await send.send("text", contentType="text")
    await send.sendBatch([{"body": b"\x00\xff", "contentType": "bytes"}, {"body": True}])
    queue, handler = queue_of(wired, tmp_path), Handler()
    consumer = QueueConsumer(queue, handler, SOON)
    await eventually(lambda: len(handler.bodies) == 4)
    assert handler.bodies == [{"n": [1, None]}, "text", b"\x00\xff", True]
    assert {message["attempts"] for batch in handler.batches for message in batch} == {1}
    await empty(queue)
    await consumer.close()


async def test_a_batch_waits_for_its_size_or_its_time(wire: Wire, tmp_path: Path) -> None:
    wired = await wire(QUEUE)
    handler = Handler()
    consumer = QueueConsumer(queue_of(wired, tmp_path), handler, Settings(max_batch_size=3, max_batch_timeout_s=0.3))
    await wired.env["QUEUE"].send_batch([{"body": i} for i in range(4)])
    await eventually(lambda: len(handler.batches) == 1)
    assert [message["body"] for message in handler.batches[0]] == [0, 1, 2]
    await eventually(lambda: len(handler.batches) == 2)
    assert [message["body"] for message in handler.batches[1]] == [3]
    await consumer.close()


async def test_a_delay_is_kept_and_does_not_hold_up_others(wire: Wire, tmp_path: Path) -> None:
    wired = await wire(QUEUE)
    handler = Handler()
    consumer = QueueConsumer(queue_of(wired, tmp_path), handler, SOON)
    await wired.env["QUEUE"].send("late", delaySeconds=0.4)
    await wired.env["QUEUE"].send("now")
    await eventually(lambda: handler.bodies == ["now"])
    await eventually(lambda: handler.bodies == ["now", "late"])
    await consumer.close()


async def test_what_is_retried_comes_again_and_then_goes_to_the_dead_letters(wire: Wire, tmp_path: Path) -> None:
    wired = await wire(QUEUE)
    jobs, dead = queue_of(wired, tmp_path), queue_of(wired, tmp_path, "dead")
    handler, graves = Handler(lambda message: 0.0 if message["body"] == "bad" else None), Handler()
    settings = SOON._replace(max_retries=2)
    consumers = [QueueConsumer(jobs, handler, settings, dead), QueueConsumer(dead, graves, SOON)]
    await wired.env["QUEUE"].sendBatch([{"body": "bad"}, {"body": "good"}])
    await eventually(lambda: graves.bodies == ["bad"])
    assert handler.bodies.count("bad") == 3
    assert handler.bodies.count("good") == 1
    attempts = [message["attempts"] for batch in handler.batches for message in batch if message["body"] == "bad"]
    assert attempts == [1, 2, 3]
    await empty(jobs)
    for consumer in consumers:
        await consumer.close()


async def test_a_message_under_way_comes_again_after_its_consumer_is_closed(wire: Wire, tmp_path: Path) -> None:
    wired = await wire(QUEUE)
    started = asyncio.Event()

    async def never(queue: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    await wired.env["QUEUE"].send("job")
    queue, handler = queue_of(wired, tmp_path), Handler()
    first = QueueConsumer(queue, never, SOON)
    await asyncio.wait_for(started.wait(), 60)
    await first.close()
    second = QueueConsumer(queue, handler, SOON)
    await eventually(lambda: handler.bodies == ["job"])
    assert handler.batches[0][0]["attempts"] == 1  # the interrupted attempt is not counted
    await second.close()


async def test_a_consumer_that_is_stopped_finishes_its_batch_and_takes_no_other(wire: Wire, tmp_path: Path) -> None:
    wired = await wire(QUEUE)
    started, may_end, handler = asyncio.Event(), asyncio.Event(), Handler()

    async def slow(queue: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        started.set()
        await may_end.wait()
        return await handler(queue, messages)

    queue = queue_of(wired, tmp_path)
    consumer = QueueConsumer(queue, slow, SOON)
    await wired.env["QUEUE"].send("job")
    await asyncio.wait_for(started.wait(), 60)
    consumer.stop()
    await wired.env["QUEUE"].send("another")
    may_end.set()
    await eventually(lambda: handler.bodies == ["job"])
    await empty(queue, but_for=1)
    await consumer.close()
    assert [(message.body, message.attempts) for message in await queue.take(9)] == [(b"\xa7another", 1)]


async def test_messages_given_back_twice_are_given_back_once(tmp_path: Path) -> None:
    queue = Queue("jobs", tmp_path / "messages.sqlite", 1 << 20)
    await queue.put([(b"\x01", 0.0)])
    taken = await queue.take(9)
    await queue.give_back(taken, 0.0)
    await queue.give_back(taken, 60.0)
    again = await queue.take(9)
    assert [message.attempts for message in again] == [1]
    await queue.give_back(taken, 0.0)
    await queue.close()


@pytest.mark.parametrize("decided", [None, 7, {"retried": 1}, {"retried": [1]}, {"retried": [{}]}, {"acked": []}])
async def test_a_batch_that_fails_comes_again_where_its_decisions_make_no_sense(tmp_path: Path, decided: Any) -> None:
    queue, seen = Queue("jobs", tmp_path / "messages.sqlite", 1 << 20), list[int]()

    async def fail(queue: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        seen.extend(message["attempts"] for message in messages)
        raise Failure("it fails", value=decided) if decided else RuntimeError("it fails")

    await queue.put([(b"\x01", 0.0), (b"\x02", 0.0)])
    consumer = QueueConsumer(queue, fail, SOON._replace(max_retries=1))
    await eventually(lambda: seen == [1, 1, 2, 2])
    await empty(queue)
    await consumer.close()
    await queue.close()


async def test_what_was_decided_before_a_handler_failed_holds(tmp_path: Path) -> None:
    queue = Queue("jobs", tmp_path / "messages.sqlite", 1 << 20)
    failed = asyncio.Event()

    async def fail(queue: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        failed.set()
        raise Failure("it fails", value={"retried": [{"id": messages[1]["id"], "delay_s": 600}]})

    await queue.put([(b"\x01", 0.0), (b"\x02", 0.0)])
    consumer = QueueConsumer(queue, fail, SOON)
    await asyncio.wait_for(failed.wait(), 60)
    await empty(queue, but_for=1)
    assert 500 < (await queue.due_in_s(1, 0.0) or 0) <= 600
    await consumer.close()
    await queue.close()


async def test_a_function_cannot_delay_or_acknowledge_nonsense(wire: Wire, tmp_path: Path) -> None:
    wired = await wire(QUEUE)
    calls = 0

    async def hostile(queue: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        ids = [message["id"] for message in messages]
        if calls == 1:
            return {"retried": [{"id": "another", "delay_s": 1e300}, {"id": ids[0], "delay_s": -5}]}
        return {"retried": []}

    await wired.env["QUEUE"].send("job")
    queue = queue_of(wired, tmp_path)
    consumer = QueueConsumer(queue, hostile, SOON)
    await eventually(lambda: calls == 2)
    await empty(queue)
    await consumer.close()


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([{"body": "x" * 128_001}], "exceeds limit of 128000"),
        ([{"body": "x" * 100_000}] * 3, "exceeds limit of 256000"),
        ([{"body": 1}] * 101, "1 to 100 messages"),
        ([], "1 to 100 messages"),
        ([{"body": 1, "delaySeconds": -1}], "delay_seconds"),
        ([{"body": 1, "delaySeconds": 43_201}], "delay_seconds"),
    ],
)
async def test_messages_beyond_the_limits_are_refused_whole(
    wire: Wire, tmp_path: Path, messages: list[dict[str, Any]], sentence: str
) -> None:
    wired = await wire(QUEUE)
    with pytest.raises(Failure, match=sentence):
        await wired.env["QUEUE"].send_batch(messages)
    assert await queue_of(wired, tmp_path).depth() == 0


async def test_what_cannot_be_sent_is_named(wire: Wire) -> None:
    send = (await wire(QUEUE)).env["QUEUE"]
    with pytest.raises(TypeError, match="of type 'set', which JSON cannot represent"):
        await send.send({1, 2})
    with pytest.raises(TypeError, match="is a str, not int"):
        await send.send(5, contentType="text")
    with pytest.raises(TypeError, match="messages with a body"):
        await send.send_batch(["text"])


async def test_a_full_queue_says_so(wire: Wire) -> None:
    send = (await wire(QUEUE, max_bytes=1 << 20)).env["QUEUE"]

    async def fill() -> None:
        for _ in range(30):
            await send.send("x" * 100_000)

    with pytest.raises(Failure, match="the storage is full") as caught:
        await fill()
    assert caught.value.status == 507


def asked(handler: Handler) -> Any:
    """Return a stand-in for a version of a function that has this queue handler."""

    async def ask(event: QueueEvent) -> ExchangeResult:
        return ExchangeResult(await handler(event.queue, event.messages), None)

    return ask


async def test_a_version_that_may_not_consume_one_of_its_queues_takes_none_from_the_version_before(
    tmp_path: Path,
) -> None:
    before, after, services = Handler(), Handler(), Services(databases=Databases())
    manifest = Manifest("hello", tmp_path, tmp_path / "main.py", (), consumers=(Declared(queue="jobs"),))
    old = FunctionBindings.open(tmp_path, services, manifest, SimpleNamespace())
    old.start(asked(before))
    other = QueueConsumer(Queue.of("others", tmp_path, services), Handler(), SOON, function="other")
    more = replace(manifest, consumers=(Declared(queue="jobs"), Declared(queue="others")))
    new = FunctionBindings.open(tmp_path, services, more, SimpleNamespace())
    with pytest.raises(BindingError, match="'others' is consumed by the function 'other' already"):
        new.start(asked(after))
    await new.close()
    await Queue.of("jobs", tmp_path, services).put([(b"\x01", 0.0)] * 10)
    await eventually(lambda: len(before.bodies) == 10)
    await other.close()
    await old.close()
    await services.databases.close()


async def test_a_version_that_is_stopped_and_started_at_once_consumes_on(tmp_path: Path) -> None:
    handler, services = Handler(), Services(databases=Databases())
    manifest = Manifest(
        "hello", tmp_path, tmp_path / "main.py", (), consumers=(Declared(queue="jobs", max_batch_timeout=0),)
    )
    bindings = FunctionBindings.open(tmp_path, services, manifest, SimpleNamespace())
    bindings.start(asked(handler))
    bindings.stop()
    bindings.start(asked(handler))
    await Queue.of("jobs", tmp_path, services).put([(b"\x01", 0.0)])
    await eventually(lambda: handler.bodies == [1])
    await bindings.close()
    await services.databases.close()


async def test_the_consumers_of_a_manifest_run_until_its_bindings_close(tmp_path: Path) -> None:
    handler, services = Handler(), Services(databases=Databases())
    declared = Declared(queue="jobs", max_batch_size=2, max_batch_timeout=0)
    producer = BindingDeclaration("queue_producer", "QUEUE", {"queue": "jobs"})
    manifest = Manifest("hello", tmp_path, tmp_path / "main.py", (producer,), consumers=(declared,))
    bindings = FunctionBindings.open(tmp_path, services, manifest, SimpleNamespace())
    bindings.start(asked(handler))
    await Queue.of("jobs", tmp_path, services).put([(b"\x01", 0.0), (b"\x02", 0.0)])
    await eventually(lambda: handler.bodies == [1, 2])
    await bindings.close()
    await services.databases.close()


KILLED = """
import asyncio, sys
from pathlib import Path
import msgspec
from pilotlight.functions.bindings.queues import Queue, QueueConsumer, Settings

async def main():
    queue = Queue("jobs", Path(sys.argv[1]), 1 << 30)

    async def handler(name, messages):
        for message in messages:
            print("got", message["body"], flush=True)
        await asyncio.sleep(0.02)
        return {"retried": []}

    QueueConsumer(queue, handler, Settings(3, 0.0, 100))
    for i in range(100000):
        await queue.put([(msgspec.msgpack.encode(i), 0.0)])
        print("sent", i, flush=True)

asyncio.run(main())
"""


def killed(path: Path) -> tuple[set[int], set[int]]:
    """Kill a process; return the numbers that it had reported as sent and as received."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    lines = [line for _, line in zip(range(120), process.stdout, strict=False)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    words = [line.split() for line in lines if line.endswith("\n")]
    return {int(n) for word, n in words if word == "sent"}, {int(n) for word, n in words if word == "got"}


@pytest.mark.process
async def test_every_acknowledged_message_is_delivered_across_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "messages.sqlite"
    sent, got = killed(path)
    assert sent
    assert got
    queue, handler = Queue("jobs", path, 1 << 30), Handler()
    consumer = QueueConsumer(queue, handler, Settings(100, 0.0, 100))
    try:
        await eventually(lambda: sent <= got | set(handler.bodies), 10)
    finally:
        await consumer.close()
        await queue.close()


async def test_what_a_dead_process_had_taken_comes_at_once_and_counts_as_tried(tmp_path: Path) -> None:
    path = tmp_path / "messages.sqlite"
    before = Queue("jobs", path, 1 << 20)
    await before.put([(b"a", 0.0), (b"b", 3600.0)])
    (taken,) = await before.take(10)
    assert await before.take(10) == [], "the message is leased"
    await before.close()  # like SIGKILL, this leaves the messages leased
    after = Queue("jobs", path, 1 << 20)
    (again,) = await after.take(10)
    assert (again.id, again.body, again.attempts) == (taken.id, b"a", 2)
    await after.close()


async def test_a_process_that_only_sends_and_counts_leaves_the_leases_of_the_consumers_process(tmp_path: Path) -> None:
    consuming, beside = (Queue("jobs", tmp_path / "messages.sqlite", 1 << 20) for _ in range(2))
    await consuming.put([(b"a", 0.0)])
    assert len(await consuming.take(10)) == 1
    await beside.put([(b"b", 0.0)])
    assert await beside.depth() == 2
    assert [message.body for message in await consuming.take(10)] == [b"b"]
    for queue in (consuming, beside):
        await queue.close()


async def test_a_function_that_consumes_anew_takes_over_and_another_one_is_refused(wire: Wire, tmp_path: Path) -> None:
    wired = await wire(QUEUE)
    queue, first, second = queue_of(wired, tmp_path), Handler(), Handler()
    old = QueueConsumer(queue, first, SOON, function="f")
    await wired.env["QUEUE"].send(1)
    await eventually(lambda: first.bodies == [1])
    new = QueueConsumer(queue, second, SOON, function="f")
    for n in range(2, 6):
        await wired.env["QUEUE"].send(n)
    await eventually(lambda: second.bodies == [2, 3, 4, 5])
    assert first.bodies == [1]
    with pytest.raises(BindingError, match="'jobs' is consumed by the function 'f' already"):
        QueueConsumer(queue, first, SOON, function="g")
    await old.close()
    await new.close()
    third = QueueConsumer(queue, first, SOON, function="g")
    await third.close()


@pytest.mark.long
async def test_a_function_that_cannot_be_asked_costs_a_message_no_attempt(wire: Wire, tmp_path: Path) -> None:
    wired = await wire(QUEUE)
    seen: list[int] = []

    async def busy(queue: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(messages[0]["attempts"])
        if len(seen) == 1:
            raise Failure("all isolates are busy", code="overloaded", status=503)
        return {"retried": []}

    await wired.env["QUEUE"].send("job")
    consumer = QueueConsumer(queue_of(wired, tmp_path), busy, SOON._replace(max_retries=0))
    await eventually(lambda: seen == [1, 1])
    await consumer.close()


async def test_nothing_is_kept_of_batches_that_are_over(wire: Wire, tmp_path: Path) -> None:
    wired = await wire(QUEUE)
    batches: list[weakref.ref[asyncio.Task[Any]]] = []

    async def deliver(queue: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
        task = asyncio.current_task()
        assert task is not None
        batches.append(weakref.ref(task))
        return {}

    queue = queue_of(wired, tmp_path)
    consumer = QueueConsumer(queue, deliver, SOON)
    for number in (1, 2):
        await wired.env["QUEUE"].send("job")
        await eventually(lambda number=number: len(batches) == number)
        await empty(queue)
    await eventually(lambda: gc.collect() >= 0 and batches[0]() is None)
    await consumer.close()


async def test_a_queue_that_cannot_be_written_is_settled_when_it_can(tmp_path: Path) -> None:
    failures: list[Any] = []

    class Full(Queue):
        async def settle(self, *args: Any, **kwargs: Any) -> None:
            if len(failures) < 2:
                failures.append(args)
                raise DatabaseError("the disk is full", "storage_full")
            await super().settle(*args, **kwargs)

    queue, handler = Full("jobs", tmp_path / "messages.sqlite", 1 << 20), Handler()
    await queue.put([(b"\x01", 0.0)])
    consumer = QueueConsumer(queue, handler, SOON._replace(pause_after_error_s=0.01))
    await eventually(lambda: len(failures) == 2)
    await empty(queue)
    assert handler.bodies == [1]
    await consumer.close()
    await queue.close()


async def test_messages_come_in_the_order_of_their_times_and_none_before_its_own(tmp_path: Path) -> None:
    clock = SetClock(1000.0)
    queue = Queue("jobs", tmp_path / "messages.sqlite", 1 << 20, clock)
    assert await queue.due_in_s(2, 5.0) is None
    await queue.put([(b"late", 60.0), (b"first", 0.0), (b"second", 0.0)])
    assert await queue.due_in_s(2, 5.0) == 0.0, "a full batch is ready at once"
    assert [message.body for message in await queue.take(1)] == [b"first"]
    assert await queue.due_in_s(2, 5.0) == 5.0, "an incomplete batch waits for its timeout"
    assert [message.body for message in await queue.take(9)] == [b"second"]
    clock.now = 1060.0
    assert await queue.due_in_s(1, 5.0) == 0.0
    (late,) = await queue.take(9)
    assert (late.body, late.sent_s, late.attempts) == (b"late", 1000.0, 1)
    clock.now += queues.LEASE_S - 60.0  # the other messages' leases expire
    assert [(message.body, message.attempts) for message in await queue.take(9)] == [(b"first", 2), (b"second", 2)]
    await queue.close()


async def test_what_is_settled_is_gone_or_comes_again_after_its_delay(tmp_path: Path) -> None:
    clock = SetClock(1000.0)
    queue = Queue("jobs", tmp_path / "messages.sqlite", 1 << 20, clock)
    await queue.put([(b"a", 0.0), (b"b", 0.0), (b"c", 0.0)])
    a, b, c = await queue.take(3)
    queue.news.clear()
    await queue.settle([a.id], [(b.id, 10.0)])
    await queue.give_back([c], 10.0)
    assert queue.news.is_set()
    assert (await queue.depth(), await queue.take(9)) == (2, [])
    clock.now = 1010.0
    assert [(message.body, message.attempts) for message in await queue.take(9)] == [(b"b", 2), (b"c", 1)]
    assert (await queue.purge(), await queue.depth()) == (2, 0)
    await queue.close()


async def test_messages_that_are_not_consumed_for_days_are_forgotten(tmp_path: Path) -> None:
    clock = SetClock(1000.0)
    queue = Queue("jobs", tmp_path / "messages.sqlite", 1 << 20, clock)
    await queue.put([(b"old", 0.0)])
    clock.now += queues.KEPT_S
    await queue.put([(b"new", 0.0)])
    assert await queue.depth() == 2, "no older than KEPT_S"
    clock.now += 1.0
    await queue.put([(b"newer", 0.0)])
    assert await queue.depth() == 3, "expired messages are deleted at most every FORGET_EVERY_S"
    clock.now += queues.FORGET_EVERY_S
    await queue.put([(b"newest", 0.0)])
    assert [message.body for message in await queue.take(9)] == [b"new", b"newer", b"newest"]
    await queue.close()


async def test_a_consumer_continues_after_a_fault_of_its_queue_and_has_its_room_again(tmp_path: Path) -> None:
    class Failing(Queue):
        failures = 0

        async def due_in_s(self, size: int, timeout_s: float) -> float | None:
            self.failures += 1
            if self.failures <= 3:
                raise RuntimeError("a fault")
            return await super().due_in_s(size, timeout_s)

    queue, handler = Failing("jobs", tmp_path / "messages.sqlite", 1 << 20), Handler()
    consumer = QueueConsumer(queue, handler, SOON._replace(max_concurrency=1, pause_after_error_s=0.01))
    await queue.put([(b"\x01", 0.0)])
    await eventually(lambda: handler.bodies == [1])
    await consumer.close()
    await queue.close()


async def test_what_is_being_taken_while_a_consumer_closes_comes_again_at_once(tmp_path: Path) -> None:
    taking, may_go_on = asyncio.Event(), asyncio.Event()

    class Slow(Queue):
        async def take(self, size: int) -> Any:
            taken = await super().take(size)
            taking.set()
            await may_go_on.wait()
            return taken

    queue, handler = Slow("jobs", tmp_path / "messages.sqlite", 1 << 20), Handler()
    await queue.put([(b"\x01", 0.0)])
    consumer = QueueConsumer(queue, handler, SOON)
    await asyncio.wait_for(taking.wait(), 60)
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0)
    may_go_on.set()
    await closing
    assert (handler.bodies, [message.attempts for message in await queue.take(9)]) == ([], [1])
    await queue.close()
