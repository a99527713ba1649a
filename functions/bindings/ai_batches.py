"""Batches of model calls that are answered later.

SQLite keeps them across crashes. Answered batches are deleted one day after they were created. The function that is passed to `serve` runs each
request.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pilotlight.functions.bindings.binding import BindingError, Services
from pilotlight.functions.bindings.place import directory_of
from pilotlight.support.database import Connection, Database, storage_word, transaction

log = logging.getLogger("pilotlight.bindings")

MAX_REQUESTS = 1000  # per batch
MAX_BYTES = 10 << 20
MAX_WAITING = 10_000  # unanswered requests per function
KEPT_S = 24 * 3600
AT_ONCE = 4  # concurrent model calls; few, so that interactive callers find capacity

SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (batch TEXT NOT NULL, position INTEGER NOT NULL, model TEXT NOT NULL, created_s REAL NOT NULL,
  reference TEXT, inputs TEXT NOT NULL, is_success INTEGER, result TEXT, PRIMARY KEY (batch, position));
CREATE INDEX IF NOT EXISTS open_requests ON requests (created_s, batch, position) WHERE result IS NULL
"""

Serve = Callable[[str, dict[str, Any]], Awaitable[tuple[bool, bytes]]]


class Batches:
    def __init__(
        self,
        database: Database,
        now_s: Callable[[], float] = time.time,
        *,
        max_bytes: int = MAX_BYTES,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._database = database
        self._now_s = now_s
        self._serve: Serve | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, state_dir: Path, services: Services) -> "Batches":
        path = directory_of(state_dir, "ai", services.function) / "batches.sqlite"
        return cls(services.database(path, SCHEMA))

    def serve(self, serve: Serve) -> None:
        """Start to call `serve` for each request, first for those that an earlier process left unanswered."""
        self._serve = serve
        self._wake()

    async def put(self, model: str, inputs: dict[str, Any]) -> dict[str, Any]:
        """Store a batch to be answered later; return {status, request_id, model}. Raises BindingError."""
        requests = _valid_requests(inputs, self._max_bytes)
        batch, now_s = uuid.uuid4().hex, self._now_s()
        rows = [(batch, position, model, now_s, *request) for position, request in enumerate(requests)]

        def write(connection: Connection) -> None:
            with transaction(connection):
                connection.execute("DELETE FROM requests WHERE created_s < ? AND result IS NOT NULL", (now_s - KEPT_S,))
                waiting = connection.execute("SELECT count(*) FROM requests WHERE result IS NULL").fetchone()[0]
                if waiting + len(rows) > self._max_waiting:
                    raise BindingError(
                        f"3040: {waiting} requests wait already", code=3040, status=429, name="InferenceUpstreamError"
                    )
                statement = "INSERT INTO requests (batch, position, model, created_s, reference, inputs) VALUES (?, ?, ?, ?, ?, ?)"
                connection.executemany(statement, rows)

        await self._run(write)
        self._wake()
        return {"status": "queued", "request_id": batch, "model": model}

    async def get(self, batch: str) -> dict[str, Any] | None:
        """Return a batch's state, with its responses once all are available; None if there is no such batch."""
        query = "SELECT model, reference, is_success, result FROM requests WHERE batch = ? ORDER BY position"
        rows = await self._run(lambda connection: connection.execute(query, (batch,)).fetchall())
        if not rows:
            return None
        answered = [row for row in rows if row[3] is not None]
        if len(answered) < len(rows):
            return {"status": "running" if answered else "queued", "request_id": batch, "model": rows[0][0]}
        responses = [_response(position, *row[1:]) for position, row in enumerate(rows)]
        return {"status": "complete", "request_id": batch, "model": rows[0][0], "responses": responses}

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._answer_all(), name="ai batches")

    async def _answer_all(self) -> None:
        query = "SELECT batch, position, model, inputs FROM requests WHERE result IS NULL ORDER BY created_s, batch, position LIMIT ?"
        while True:
            try:
                rows = await self._database.run(lambda connection: connection.execute(query, (AT_ONCE,)).fetchall())
                if not rows:
                    return
                await asyncio.gather(*[self._answer(*row) for row in rows])
            except Exception:
                log.exception("batches of model calls stop after an error; the next batch resumes them")
                return

    async def _answer(self, batch: str, position: int, model: str, inputs: str) -> None:
        assert self._serve is not None, "the batches are not served yet"
        is_success, result = await self._serve(model, msgspec.json.decode(inputs))
        row = (is_success, result.decode(), batch, position)
        statement = "UPDATE requests SET is_success = ?, result = ? WHERE batch = ? AND position = ?"
        await self._database.run(lambda connection: connection.execute(statement, row).close())

    async def _run(self, work: Callable[[Connection], Any]) -> Any:
        try:
            return await self._database.run(work)
        except Exception as error:
            if (word := storage_word(error)) is None:
                raise
            code, status, sentence = word
            raise BindingError(f"AI: {sentence}", code=code, status=status) from None


class _QueuedRequest(NamedTuple):
    reference: str | None  # the caller's identifier, returned with the response
    inputs: str  # JSON


def _valid_requests(inputs: dict[str, Any], max_bytes: int) -> list[_QueuedRequest]:
    """Return the requests of a batch as JSON. Raises BindingError.
    `inputs` without `requests` is one request."""
    requests = inputs.get("requests", [inputs])
    if not isinstance(requests, list) or not 1 <= len(requests) <= MAX_REQUESTS:
        raise _refusal(f"a batch is a list of 1 to {MAX_REQUESTS} requests")
    if not all(isinstance(request, dict) for request in requests):
        raise _refusal("every request of a batch is an object")
    valid = [_valid_request(position, request) for position, request in enumerate(requests)]
    if sum(len(request.inputs) for request in valid) > max_bytes:
        raise _refusal(f"a batch has at most {max_bytes} bytes")
    return valid


def _valid_request(position: int, request: dict[str, Any]) -> _QueuedRequest:
    reference = request.get("external_reference")
    given = {key: value for key, value in request.items() if key != "external_reference"}
    if given.get("stream"):
        raise _refusal("a batch is answered as a whole; leave stream out")
    try:
        encoded = msgspec.json.encode(given).decode()
    except (TypeError, UnicodeEncodeError) as error:
        raise _refusal(f"request {position} is not JSON: {error}") from None
    return _QueuedRequest(None if reference is None else str(reference), encoded)


def _response(position: int, reference: str | None, is_success: int, result: str) -> dict[str, Any]:
    decoded = msgspec.json.decode(result)
    response: dict[str, Any] = {"id": position, "success": bool(is_success)}
    response["result" if is_success else "errors"] = decoded if is_success else decoded["errors"]
    if reference is not None:
        response["external_reference"] = reference
    return response


def _refusal(sentence: str) -> BindingError:
    return BindingError(f"5004: {sentence}", code=5004, status=400, name="InferenceUpstreamError")
