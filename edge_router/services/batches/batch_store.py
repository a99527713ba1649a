"""The store of batches: files, batches, requests and answers in a SQLite file beside the ledger.

Used by one thread. A request waits until it has an answer; its first answer is final. Requests in progress are not marked in the database, so they
start again if the router is killed.
"""

import secrets
import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import orjson

from pilotlight.edge_router.services.batches.lines import AskedLine, Fields, queued_response, written_line
from pilotlight.support.database import claim_version
from pilotlight.wire.errors import ApiError

KEPT_S = 24 * 3600  # lifetime of results after a batch's end, and of a file that no batch has used
WITHIN_S = 24 * 3600  # a batch's time, after which its requests without an answer expire
OUT_OF_TIME, CANCELLED = 0, -1  # stored as the status if there is no answer
INPUT, OUTPUT = "batch", "batch_output"  # files' purposes

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL, created_s INTEGER NOT NULL, expires_s INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL, content BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS files_of ON files (owner, created_s);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, key TEXT NOT NULL, path TEXT NOT NULL, input_file TEXT NOT NULL, created_s INTEGER NOT NULL,
    expires_s INTEGER NOT NULL, cancelled_s INTEGER, ended_s INTEGER, output_file TEXT, error_file TEXT, metadata TEXT, faults TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS batches_of ON batches (owner, created_s);
CREATE TABLE IF NOT EXISTS requests (
    number INTEGER PRIMARY KEY AUTOINCREMENT, batch TEXT NOT NULL, owner TEXT NOT NULL, model TEXT NOT NULL, name TEXT NOT NULL, body BLOB NOT NULL,
    status INTEGER, answer BLOB
);
CREATE INDEX IF NOT EXISTS requests_of ON requests (batch, status);
CREATE INDEX IF NOT EXISTS requests_waiting ON requests (owner, model, number) WHERE status IS NULL;
"""


class BatchLimits(NamedTuple):
    """Limits of one owner's batches, and how they are worked on."""

    num_waiting: int = 100_000  # waiting requests
    num_models: int = 100  # models of waiting requests: each model has its own place in the queue
    num_batches: int = 10_000  # batches, including those that ended within the day
    file_bytes: int = 512 << 20
    part_bytes: int = 1 << 20  # bytes read at once
    num_listed: int = 100  # rows of one page of a list
    first_wait_s: float = 1.0  # pause before the second attempt of a request; doubled before each later attempt


class StoredBatch(NamedTuple):
    """A row of `batches`."""

    id: str
    owner: str
    key: str  # name of the key that created it; empty if unknown
    path: str
    input_file: str  # empty if the requests were in the body
    created_s: int
    expires_s: int
    cancelled_s: int | None = None
    ended_s: int | None = None
    output_file: str | None = None
    error_file: str | None = None
    metadata: str | None = None  # JSON
    faults: str | None = None  # JSON; the errors of an input file that was refused


class StoredFile(NamedTuple):
    id: str
    owner: str
    name: str
    purpose: str
    created_s: int
    expires_s: int
    num_bytes: int


class WaitingRequest(NamedTuple):
    number: int
    body: bytes
    batch: StoredBatch


class BatchCounts(NamedTuple):
    waiting: int
    answered: int
    failed: int
    expired: int
    cancelled: int


Answer = tuple[str, int, str, int, bytes]  # batch, number, name, status, body
_ANSWER = "batch, number, name, status, COALESCE(answer, x'')"
_BATCH = ", ".join(f"batches.{name}" for name in StoredBatch._fields)
_FILE = ", ".join(StoredFile._fields)


class BatchStore:
    """Batches in a SQLite database. Raises sqlite3.Error."""

    def __init__(self, connection: sqlite3.Connection, limits: BatchLimits) -> None:
        """Take over a connection."""
        self.limits = limits
        self._connection = connection
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        claim_version(self._connection)
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        self._connection.close()

    def add_file(
        self, owner: str, name: str, purpose: str, content: bytes, now_s: int, keep_s: int = KEPT_S
    ) -> StoredFile:
        """Store a file. Raises ApiError if the owner's files would be larger than allowed."""
        with self._connection as connection:
            row = connection.execute(
                "SELECT COALESCE(SUM(num_bytes), 0) FROM files WHERE owner = ?", (owner,)
            ).fetchone()
            if row[0] + len(content) > (most := self.limits.file_bytes):
                raise ApiError("quota_exceeded", f"more than {most >> 20} MiB of files: delete some", retry_after_s=60)
            return self._write_file(owner, name, purpose, len(content), content, now_s, keep_s)

    def _write_file(
        self, owner: str, name: str, purpose: str, num_bytes: int, content: bytes, now_s: int, keep_s: int = KEPT_S
    ) -> StoredFile:
        file = StoredFile(f"file-{secrets.token_hex(12)}", owner, name, purpose, now_s, now_s + keep_s, num_bytes)
        self._connection.execute(
            f"INSERT INTO files ({_FILE}, content) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*file, content)
        )
        return file

    def file(self, name: str, owner: str) -> StoredFile:
        """Return a file. Raises ApiError (404) if it does not exist or belongs to another account."""
        row = self._connection.execute(
            f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ?", (name, owner)
        ).fetchone()
        if row is None:
            raise ApiError(
                "not_found",
                f"there is no file {name[:100]!r}: it does not exist, has expired, or belongs to another account",
            )
        return StoredFile(*row)

    def content(self, file: StoredFile) -> bytes:
        """Return the uploaded content."""
        row = self._connection.execute("SELECT content FROM files WHERE id = ?", (file.id,)).fetchone()
        return b"" if row is None else bytes(row[0])

    def part(self, file: StoredFile, behind: int = 0) -> tuple[bytes, int]:
        """Return a part of a file, and the position after it; 0 at the end.
        Answers are stored once: an output file of a batch is put together from them when it is read."""
        if file.purpose != OUTPUT:
            return self.content(file), 0
        chosen = "SELECT id, output_file FROM batches WHERE owner = ? AND ? IN (output_file, error_file)"
        row = self._connection.execute(chosen, (file.owner, file.id)).fetchone()
        batch, wanted = (row[0], "output" if row[1] == file.id else "error") if row is not None else ("", "")
        found = bytearray()
        for answer in self.answers(batch, behind):
            kind, line = _line_of(*answer)
            if kind == wanted:
                found += line
            if len(found) >= self.limits.part_bytes:
                return bytes(found), answer[1]
        return bytes(found), 0

    def responses(self, batch: StoredBatch, behind: int = 0, position: int = 0) -> tuple[bytes, int, int]:
        """Return a part of the responses of a Workers AI batch, as members of a JSON array.

        `behind` and `position` are where the previous part ended. The second result is the next `behind`, 0 at the end; the third is the next
        `position`.
        """
        found = bytearray()
        for _, number, name, status, answer in self.answers(batch.id, behind):
            found += b"," * (position > 0) + orjson.dumps(queued_response(position, name, status, answer))
            position += 1
            if len(found) >= self.limits.part_bytes:
                return bytes(found), number, position
        return bytes(found), 0, position

    def delete_file(self, file: StoredFile) -> None:
        with self._connection as connection:
            connection.execute("DELETE FROM files WHERE id = ?", (file.id,))

    def files(self, owner: str) -> list[StoredFile]:
        """Return the owner's files, the newest first."""
        found = self._connection.execute(
            f"SELECT {_FILE} FROM files WHERE owner = ? ORDER BY created_s DESC, id", (owner,)
        )
        return [StoredFile(*row) for row in found]

    def add(self, batch: StoredBatch, lines: Sequence[AskedLine]) -> StoredBatch:
        """Store a batch. Raises ApiError if the owner has too many batches or waiting requests."""
        most = self.limits
        with self._connection as connection:
            kept = "SELECT COUNT(*) FROM batches WHERE owner = ?"
            if connection.execute(kept, (batch.owner,)).fetchone()[0] >= most.num_batches:
                raise ApiError(
                    "quota_exceeded",
                    f"your account already has {most.num_batches} batches: delete files or wait for them to expire",
                    retry_after_s=60,
                )
            waiting = "SELECT model, COUNT(*) FROM requests WHERE owner = ? AND status IS NULL GROUP BY model"
            numbers = dict(connection.execute(waiting, (batch.owner,)).fetchall())
            if sum(numbers.values()) + len(lines) > most.num_waiting:
                sentence = f"more than {most.num_waiting} requests of your account would wait"
                raise ApiError("quota_exceeded", sentence, retry_after_s=60)
            if len(numbers.keys() | {line.model for line in lines}) > most.num_models:
                sentence = f"requests of your account for more than {most.num_models} models would wait"
                raise ApiError("quota_exceeded", sentence, retry_after_s=60)
            marks = ", ".join("?" * len(batch))
            connection.execute(f"INSERT INTO batches ({', '.join(batch._fields)}) VALUES ({marks})", batch)
            rows = [(batch.id, batch.owner, line.model, line.name, line.body) for line in lines]
            connection.executemany(
                "INSERT INTO requests (batch, owner, model, name, body) VALUES (?, ?, ?, ?, ?)", rows
            )
        return batch

    def batch(self, name: str, owner: str) -> tuple[StoredBatch, BatchCounts]:
        """Return a batch. Raises ApiError (404) if it does not exist or belongs to another account."""
        found = self._connection.execute(
            f"SELECT {_BATCH} FROM batches WHERE id = ? AND owner = ?", (name, owner)
        ).fetchone()
        if found is None:
            raise ApiError(
                "not_found",
                f"there is no batch {name[:100]!r}: it does not exist, has expired, or belongs to another account",
            )
        return (batch := StoredBatch(*found)), self.counts(batch)

    def batches(self, owner: str) -> list[StoredBatch]:
        """Return the owner's batches that were created from a file, the newest first."""
        chosen = f"SELECT {_BATCH} FROM batches WHERE owner = ? AND input_file != '' ORDER BY created_s DESC, id"
        return [StoredBatch(*row) for row in self._connection.execute(chosen, (owner,))]

    def counts(self, batch: StoredBatch) -> BatchCounts:
        sums = (
            "SUM(status IS NULL), SUM(status BETWEEN 200 AND 299), SUM(status >= 300), SUM(status = 0), SUM(status < 0)"
        )
        row = self._connection.execute(f"SELECT {sums} FROM requests WHERE batch = ?", (batch.id,)).fetchone()
        return BatchCounts(*(value or 0 for value in row))

    def answers(self, batch: str, behind: int = 0) -> Iterable[Answer]:
        """Yield the answers after a request's number, in the order of the requests.
        The requests of a batch have consecutive numbers, so they are read in storage order, without sorting."""
        first, last = self._connection.execute(
            "SELECT MIN(number), MAX(number) FROM requests WHERE batch = ?", (batch,)
        ).fetchone()
        chosen = (
            f"SELECT {_ANSWER} FROM requests NOT INDEXED WHERE number BETWEEN ? AND ? AND batch = ? ORDER BY number"
        )
        return self._connection.execute(chosen, (max(first or 0, behind + 1), last or 0, batch))

    def waiting(self) -> list[tuple[str, str]]:
        """Return each owner with waiting requests, with the model of the requests."""
        return self._connection.execute("SELECT DISTINCT owner, model FROM requests WHERE status IS NULL").fetchall()

    def next_waiting(self, owner: str, model: str, behind: int) -> WaitingRequest | None:
        """Return the owner's first waiting request for a model with a number above `behind`, or None."""
        chosen = f"""SELECT requests.number, requests.body, {_BATCH} FROM requests JOIN batches ON batches.id = requests.batch
            WHERE requests.owner = ? AND requests.model = ? AND requests.status IS NULL AND requests.number > ? ORDER BY requests.number LIMIT 1"""
        row = self._connection.execute(chosen, (owner, model, behind)).fetchone()
        return None if row is None else WaitingRequest(row[0], row[1], StoredBatch(*row[2:]))

    def answered(self, request: WaitingRequest, status: int, answer: bytes, now_s: int) -> None:
        """Store an answer, unless the request has one already."""
        with self._connection as connection:
            change = "UPDATE requests SET status = ?, answer = ? WHERE number = ? AND status IS NULL"
            connection.execute(change, (status, answer, request.number))
        self._finish(request.batch.id, now_s)

    def cancel(self, batch: StoredBatch, under_way: Iterable[int], now_s: int) -> None:
        """Cancel a batch. Its requests in progress, `under_way`, are completed."""
        with self._connection as connection:
            connection.execute("UPDATE batches SET cancelled_s = ? WHERE id = ? AND ended_s IS NULL", (now_s, batch.id))
            change = f"UPDATE requests SET status = ? WHERE batch = ? AND status IS NULL AND number NOT IN ({_numbers(under_way)})"
            connection.execute(change, (CANCELLED, batch.id))
        self._finish(batch.id, now_s)

    def sweep(self, under_way: Iterable[int], now_s: int) -> None:
        """Expire requests, end finished batches, and delete old batches and files.

        Late and cancelled requests expire unless they are in progress.
        """
        over = (
            "UPDATE requests SET status = ? WHERE status IS NULL AND batch IN (SELECT id FROM batches WHERE {reason})"
        )
        over += f" AND number NOT IN ({_numbers(under_way)})"
        with self._connection as connection:
            connection.execute(over.format(reason="cancelled_s IS NOT NULL"), (CANCELLED,))
            connection.execute(over.format(reason="expires_s <= ?"), (OUT_OF_TIME, now_s))
        for (name,) in self._connection.execute("SELECT id FROM batches WHERE ended_s IS NULL").fetchall():
            self._finish(name, now_s)
        with self._connection as connection:
            past = (now_s - KEPT_S,)
            connection.execute("DELETE FROM requests WHERE batch IN (SELECT id FROM batches WHERE ended_s <= ?)", past)
            connection.execute("DELETE FROM batches WHERE ended_s <= ?", past)
            connection.execute("DELETE FROM files WHERE expires_s <= ?", (now_s,))

    def _finish(self, name: str, now_s: int) -> None:
        """End a batch if no request is left; create the output files of an OpenAI batch."""
        with self._connection as connection:
            row = connection.execute(
                f"SELECT {_BATCH} FROM batches WHERE id = ? AND ended_s IS NULL", (name,)
            ).fetchone()
            left = "SELECT 1 FROM requests WHERE batch = ? AND status IS NULL LIMIT 1"
            if row is None or connection.execute(left, (name,)).fetchone() is not None:
                return
            batch, sizes = StoredBatch(*row), {"output": 0, "error": 0, "": 0}
            for answer in self.answers(batch.id) if batch.input_file else ():
                kind, line = _line_of(*answer)
                sizes[kind] += len(line)
            files = [
                self._write_file(batch.owner, f"{name}_{kind}.jsonl", OUTPUT, sizes[kind], b"", now_s).id
                if sizes[kind]
                else None
                for kind in ("output", "error")
            ]
            change = "UPDATE batches SET ended_s = ?, output_file = ?, error_file = ? WHERE id = ?"
            connection.execute(change, (now_s, *files, name))


def _line_of(batch: str, number: int, name: str, status: int, answer: bytes) -> tuple[str, bytes]:
    """Return the kind of file that lists an answer, and its line; both empty for a cancelled request."""
    if status == CANCELLED:
        return "", b""
    return "output" if 200 <= status < 300 else "error", written_line(f"{batch}.{number}", name, status, answer)


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def batch_fields(batch: StoredBatch, counts: BatchCounts) -> Fields:
    """Return a batch in OpenAI's form."""
    ended, faults = batch.ended_s, batch.faults
    status = (
        "failed" if faults is not None
        else ("cancelling" if ended is None else "cancelled") if batch.cancelled_s is not None
        else "in_progress" if ended is None
        else "expired" if counts.expired
        else "completed"
    )  # fmt: skip
    return {
        "id": batch.id, "object": "batch", "endpoint": batch.path[batch.path.index("/v1/") :], "input_file_id": batch.input_file,
        "errors": None if faults is None else {"object": "list", "data": orjson.loads(faults)}, "completion_window": "24h", "status": status,
        "output_file_id": batch.output_file, "error_file_id": batch.error_file, "created_at": batch.created_s,
        "in_progress_at": None if faults is not None else batch.created_s, "expires_at": batch.expires_s,
        "finalizing_at": ended if status in ("completed", "expired") else None,
        "completed_at": ended if status == "completed" else None, "failed_at": ended if status == "failed" else None,
        "expired_at": ended if status == "expired" else None, "cancelling_at": batch.cancelled_s,
        "cancelled_at": ended if status == "cancelled" else None,
        "request_counts": {"total": sum(counts), "completed": counts.answered, "failed": counts.failed + counts.expired},
        "metadata": None if batch.metadata is None else orjson.loads(batch.metadata),
    }  # fmt: skip


def file_fields(file: StoredFile) -> Fields:
    """Return a file in OpenAI's form."""
    return {
        "id": file.id, "object": "file", "bytes": file.num_bytes, "created_at": file.created_s, "expires_at": file.expires_s,
        "filename": file.name, "purpose": file.purpose, "status": "processed",
    }  # fmt: skip
