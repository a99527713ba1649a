"""Queues: messages in SQLite, delivered at least once whatever fails.

A message is accepted once it is on disk. Taking a message leases it and counts the attempt before the delivery, so a message that kills its consumer
is counted too. A message that is not acknowledged is delivered again; after its retries it goes to the dead letter queue or, without one, is dropped.
The consumer is an async function passed in.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from pilotlight.functions.bindings.binding import CLOCK, NOT_DELIVERED, Binding, BindingError, Clock, Services, method
from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.manifest import BindingDeclaration
from pilotlight.support.database import Connection, Database, create, storage_word, transaction

log = logging.getLogger("pilotlight.bindings")

MAX_MESSAGE_BYTES = 128_000
MAX_BATCH_BYTES = 256_000
MAX_BATCH = 100
MAX_DELAY_S = 43_200
KEPT_S = 4 * 24 * 3600.0
LEASE_S = 900.0  # how long a message is leased: longer than any handler may run; a new consumer's process ends all earlier leases
FORGET_EVERY_S = 60.0  # pause between deletions of expired messages, because each scans the whole table
MAX_PAUSE_S = 30.0
DEFAULT_CONCURRENCY = 4

SCHEMA = """
CREATE TABLE IF NOT EXISTS messages (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, sent_s REAL NOT NULL,
  visible_s REAL NOT NULL, is_leased INTEGER NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS messages_by_time ON messages (visible_s)
"""

T = TypeVar("T")
Seconds = Annotated[float, Meta(ge=0, le=MAX_DELAY_S)]
Deliver = Callable[[str, list[dict[str, Any]]], Awaitable[Mapping[str, Any]]]


class SentMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    body: Any
    content_type: Literal["json", "text", "bytes", "v8"] = "json"
    delay_seconds: Seconds | None = None


class Send(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: list[SentMessage]
    delay_seconds: Seconds | None = None


class StoredMessage(NamedTuple):
    id: str
    sent_s: float
    attempts: int
    body: bytes


class Settings(NamedTuple):
    """The settings of a consumer; the defaults are the platform's."""

    max_batch_size: int = 10
    max_batch_timeout_s: float = 5.0
    max_retries: int = 3
    retry_delay_s: float = 0.0
    max_concurrency: int = DEFAULT_CONCURRENCY
    pause_after_error_s: float = 1.0


DEFAULT_SETTINGS = Settings()


class Queue:
    """One queue, in one SQLite file.
    Leased messages stay in the table but are not visible until the lease ends."""

    def __init__(self, name: str, path: Path, max_bytes: int, clock: Clock = CLOCK) -> None:
        self.name = name
        self.look_s = clock.look_s
        self.consumer: QueueConsumer | None = None  # at most one per queue
        self.news = asyncio.Event()
        self._database = Database(path, lambda connection: create(connection, SCHEMA), max_bytes=max_bytes)
        self._now_s = clock.now_s
        self._forgotten_s = 0.0
        self._has_recovered = False  # whether the leases of a previous process have ended

    @classmethod
    def of(cls, name: str, state_dir: Path, services: Services) -> "Queue":
        path = directory_of(state_dir, "queue", name) / "messages.sqlite"
        return services.databases.get(path, lambda path: cls(name, path, services.max_bytes, services.clock))

    async def put(self, bodies: list[tuple[bytes, float]]) -> None:
        """Store messages; each is (body, delay in seconds)."""
        now_s = self._now_s()
        rows = [(uuid.uuid4().hex, now_s, now_s + delay_s, body) for body, delay_s in bodies]

        def write(connection: Connection) -> None:
            with transaction(connection):
                if now_s - self._forgotten_s > FORGET_EVERY_S:
                    connection.execute("DELETE FROM messages WHERE sent_s < ?", (now_s - KEPT_S,))
                    self._forgotten_s = now_s
                connection.executemany("INSERT INTO messages (id, sent_s, visible_s, body) VALUES (?, ?, ?, ?)", rows)

        await self._database.run(write)
        self.news.set()

    async def due_in_s(self, size: int, timeout_s: float) -> float | None:
        """Return the seconds until the next batch is ready: 0 if it is, None if the queue is empty.
        A batch is ready with `size` visible messages, or `timeout_s` after the first became visible."""

        def look(connection: Connection) -> float | None:
            self._recover(connection)
            now_s = self._now_s()
            query = "SELECT visible_s FROM messages ORDER BY visible_s LIMIT ?"
            times = [row[0] for row in connection.execute(query, (size,))]
            if not times:
                return None
            if len(times) == size and times[-1] <= now_s:
                return 0.0
            return float(max(0.0, times[0] + timeout_s - now_s))

        return await self._database.run(look)

    async def take(self, size: int) -> list[StoredMessage]:
        """Lease the oldest visible messages, count the attempt, and return them."""

        def work(connection: Connection) -> list[StoredMessage]:
            self._recover(connection)
            now_s = self._now_s()
            with transaction(connection):
                query = "SELECT number FROM messages WHERE visible_s <= ? ORDER BY visible_s, number LIMIT ?"
                numbers = [row[0] for row in connection.execute(query, (now_s, size))]
                statement = (
                    "UPDATE messages SET visible_s = ?, is_leased = 1, attempts = attempts + 1 WHERE number = ? "
                    "RETURNING id, sent_s, attempts, body"
                )
                rows = [connection.execute(statement, (now_s + LEASE_S, number)).fetchall()[0] for number in numbers]
            return [StoredMessage(*row) for row in rows]

        return await self._database.run(work)

    async def settle(self, done: list[str], again: list[tuple[str, float]]) -> None:
        """Delete the messages `done`; make the messages `again` visible after their delays in seconds."""

        def work(connection: Connection) -> None:
            now_s = self._now_s()
            with transaction(connection):
                connection.executemany("DELETE FROM messages WHERE id = ?", [(id,) for id in done])
                statement = "UPDATE messages SET is_leased = 0, visible_s = ? WHERE id = ?"
                connection.executemany(statement, [(now_s + delay_s, id) for id, delay_s in again])

        await self._database.run(work)
        self.news.set()

    async def give_back(self, messages: Iterable[StoredMessage], delay_s: float) -> None:
        """Make messages visible again after a delay, as if they had not been taken.

        The attempt is not counted. A second call for the same messages changes nothing.
        """

        def work(connection: Connection) -> None:
            with transaction(connection):
                statement = (
                    "UPDATE messages SET is_leased = 0, visible_s = ?, attempts = attempts - 1 "
                    "WHERE id = ? AND is_leased AND attempts = ?"
                )
                visible_s = self._now_s() + delay_s
                connection.executemany(statement, [(visible_s, message.id, message.attempts) for message in messages])

        await self._database.run(work)
        self.news.set()

    def attach(self, consumer: "QueueConsumer") -> None:
        """Deliver the queue's messages to this consumer.
        The previous one stops at its next check. Raises BindingError if another function consumes the queue."""
        self.check_consumer(consumer.function)
        self.consumer = consumer
        self.news.set()

    def detach(self, consumer: "QueueConsumer") -> None:
        """Remove the queue's consumer if it is this one."""
        if self.consumer is consumer:
            self.consumer = None
        self.news.set()

    def check_consumer(self, function: str) -> None:
        """Raise BindingError if another function consumes the queue."""
        if self.consumer is not None and self.consumer.function != function:
            raise BindingError(
                f"the queue {self.name!r} is consumed by the function {self.consumer.function!r} already"
            )

    async def depth(self) -> int:
        return await self._database.run(lambda c: int(c.execute("SELECT count(*) FROM messages").fetchone()[0]))

    async def purge(self) -> int:
        """Delete all messages; return how many there were."""
        return await self._database.run(lambda c: c.execute("DELETE FROM messages").rowcount)

    async def close(self) -> None:
        await self._database.close()

    def _recover(self, connection: Connection) -> None:
        """End leases that a previous process left, before the first delivery of this one.
        A process that delivers nothing, such as a command, must not: it may run beside the consumer's."""
        if not self._has_recovered:
            connection.execute("UPDATE messages SET is_leased = 0, visible_s = ? WHERE is_leased", (self._now_s(),))
            self._has_recovered = True


class QueueProducer(Binding):
    kind = "queue_producer"

    def __init__(self, queue: Queue, delay_s: float) -> None:
        self._queue = queue
        self._delay_s = delay_s

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "QueueProducer":
        options = declaration.options
        return cls(Queue.of(options["queue"], state_dir, services), options.get("delivery_delay") or 0)

    @method
    async def send(self, request: Send) -> None:
        if not 1 <= len(request.messages) <= MAX_BATCH:
            raise _refusal(f"a batch has 1 to {MAX_BATCH} messages, not {len(request.messages)}")
        rows = []
        for message in request.messages:
            body = msgspec.msgpack.encode(message.body)
            if len(body) > MAX_MESSAGE_BYTES:
                raise _refusal(f"message length of {len(body)} bytes exceeds limit of {MAX_MESSAGE_BYTES}", 413)
            delays_s = (message.delay_seconds, request.delay_seconds, self._delay_s)
            rows.append((body, next(delay_s for delay_s in delays_s if delay_s is not None)))
        if (size := sum(len(body) for body, _ in rows)) > MAX_BATCH_BYTES:
            raise _refusal(f"batch of {size} bytes exceeds limit of {MAX_BATCH_BYTES}", 413)
        try:
            await self._queue.put(rows)
        except Exception as error:
            if (word := storage_word(error)) is None:
                raise
            raise BindingError(f"Queue send failed: {word[2]}", code=word[0], status=word[1]) from None


class QueueConsumer:
    """Delivers a queue's messages in batches until it is stopped or replaced.
    A newer consumer of the same function replaces it. Batches in progress are then finished."""

    def __init__(
        self,
        queue: Queue,
        deliver: Deliver,
        settings: Settings = DEFAULT_SETTINGS,
        dead_letters: Queue | None = None,
        function: str = "",
    ) -> None:
        """Start to consume. Raises BindingError if another function consumes the queue."""
        self.function = function
        queue.attach(self)
        self._queue = queue
        self._deliver = deliver
        self._settings = settings
        self._dead_letters = dead_letters
        self._room = asyncio.Semaphore(settings.max_concurrency)
        self._deliveries: set[asyncio.Task[None]] = set()
        self._under_way: dict[str, StoredMessage] = {}
        self._task = asyncio.create_task(self._run(), name=f"consumer of {queue.name}")

    def stop(self) -> None:
        """Take no more messages. Batches in progress are finished."""
        self._queue.detach(self)

    async def close(self) -> None:
        """Stop, and cancel batches in progress.
        Their messages are delivered again without counting the attempt, because the site interrupted it."""
        self.stop()
        for task in (self._task, *self._deliveries):
            task.cancel()
        await asyncio.gather(self._task, *self._deliveries, return_exceptions=True)
        if self._under_way:
            try:
                await self._queue.give_back(self._under_way.values(), 0.0)
            except Exception as error:
                log.warning("messages of %s are delivered again only after their lease: %s", self._queue.name, error)

    async def _run(self) -> None:
        while self._queue.consumer is self:
            try:
                await self._room.acquire()
                task = asyncio.create_task(self._handle(await self._due()), name=f"batch of {self._queue.name}")
                self._deliveries.add(task)
                task.add_done_callback(self._over)
            except Exception:
                self._room.release()
                log.exception("the consumer of the queue %s continues after an error", self._queue.name)
                await asyncio.sleep(self._settings.pause_after_error_s)

    async def _due(self) -> list[StoredMessage]:
        """Wait until a batch is ready and lease it; return an empty list if another consumer has taken over."""
        await self._until_due()
        if self._queue.consumer is not self:
            return []
        taking = asyncio.ensure_future(self._queue.take(self._settings.max_batch_size))
        try:
            messages = await asyncio.shield(taking)
        except asyncio.CancelledError:  # the database may lease the messages despite the cancellation
            self._under_way |= {message.id: message for message in await taking}
            raise
        self._under_way |= {message.id: message for message in messages}
        return messages

    async def _until_due(self) -> None:
        while self._queue.consumer is self:
            self._queue.news.clear()
            due_in_s = await self._queue.due_in_s(self._settings.max_batch_size, self._settings.max_batch_timeout_s)
            if due_in_s == 0:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due_in_s is None else min(due_in_s, self._queue.look_s)):
                    await self._queue.news.wait()

    async def _handle(self, messages: list[StoredMessage]) -> None:
        if not messages:
            return
        retried: dict[str, float | None] = {}
        is_seen = True
        try:
            outcome = await self._deliver(self._queue.name, [_as_value(message) for message in messages])
            retried = {each["id"]: each.get("delay_s") for each in outcome.get("retried", ())}
        except Exception as error:
            log.warning("a batch of %d messages of %s failed: %s", len(messages), self._queue.name, error)
            retried = _retried_by_failed(getattr(error, "value", None), messages)
            is_seen = not (isinstance(error, Failure) and error.code in NOT_DELIVERED)
        pause_s = self._settings.pause_after_error_s
        while True:
            try:
                if is_seen:
                    await self._settle(messages, retried)
                else:  # the function was not reached: it is overloaded, closing, or gone
                    await self._queue.give_back(messages, self._settings.pause_after_error_s)
                for message in messages:
                    del self._under_way[message.id]
                return
            except Exception as error:
                if storage_word(error) is None:
                    raise
                log.warning("the outcome of a batch of %s is not stored yet, trying again: %s", self._queue.name, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _settle(self, messages: list[StoredMessage], retried: Mapping[str, float | None]) -> None:
        failed = [message for message in messages if message.id in retried]
        over = [message for message in failed if message.attempts > self._settings.max_retries]
        if over and self._dead_letters is not None:
            await self._dead_letters.put(
                [(message.body, 0.0) for message in over]
            )  # the dead letter queue stores them before this queue deletes them
        elif over:
            log.warning("%d messages of %s are dropped after their retries", len(over), self._queue.name)
        again = {message.id for message in failed} - {message.id for message in over}
        delays = [(id, _delay_s(retried[id], self._settings.retry_delay_s)) for id in again]
        await self._queue.settle([message.id for message in messages if message.id not in again], delays)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._deliveries.discard(task)
        self._room.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a batch of %s failed to store its outcome and is delivered again: %s", self._queue.name, error)


def _as_value(message: StoredMessage) -> dict[str, Any]:
    return {
        "id": message.id,
        "timestamp_ms": int(message.sent_s * 1000),
        "attempts": message.attempts,
        "body": msgspec.msgpack.decode(message.body),
    }


def _retried_by_failed(outcome: Any, messages: list[StoredMessage]) -> dict[str, float | None]:
    """Return the messages to retry after a failed handler, by id, with delays in seconds.
    A delay of None means the default. If the handler's decisions are unknown, all messages are retried."""
    try:
        return {each["id"]: each.get("delay_s") for each in outcome["retried"]}
    except (TypeError, KeyError, AttributeError):
        return dict.fromkeys((message.id for message in messages), None)


def _delay_s(asked: object, default_s: float) -> float:
    """Return the requested delay in seconds, limited to 0 to 12 hours because functions are not trusted."""
    return min(max(0.0, float(asked)), float(MAX_DELAY_S)) if isinstance(asked, (int, float)) else default_s


def _refusal(sentence: str, status: int = 400) -> BindingError:
    return BindingError(f"Queue send failed: {sentence}", status=status)
