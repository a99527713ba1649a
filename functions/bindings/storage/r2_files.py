"""A bucket's objects as files with random names; an index in SQLite maps each key to its file.

A key is never used as a path.

A new file is written under a temporary name, synced, renamed to its version, and its directory synced; then one transaction puts it into the index,
and the file that it replaces is deleted. A crash in between leaves a file that is not in the index; a later start deletes it once it is an hour old.
"""

import asyncio
import base64
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pilotlight.functions.bindings.storage.r2_objects import (
    ByteRange,
    Conditions,
    Details,
    Digests,
    ObjectHead,
    R2Error,
    R2Listing,
    Range,
    UploadedPart,
    chosen_parts,
    decoded_cursor,
    multipart_etag,
)
from pilotlight.functions.bindings.storage.r2_quota import BucketQuota, OpenWrite
from pilotlight.support import atomic_files
from pilotlight.support.database import Connection, Database, Work, create, prefix_end, transaction

CHUNK_BYTES = 256 << 10
STRAY_AFTER_S = 3600.0  # files that are not in the index are deleted at this age; a younger one may belong to a write of another process
UPLOAD_KEPT_S = 7 * 24 * 3600.0
NO_UPLOAD = "The specified multipart upload does not exist."

SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (key BLOB PRIMARY KEY NOT NULL, version TEXT NOT NULL, size INTEGER NOT NULL, etag TEXT NOT NULL,
  uploaded_ms INTEGER NOT NULL, details TEXT NOT NULL, checksums BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS uploads (id TEXT PRIMARY KEY NOT NULL, key BLOB NOT NULL, created_s REAL NOT NULL, details TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS parts (upload TEXT NOT NULL, number INTEGER NOT NULL, version TEXT NOT NULL, size INTEGER NOT NULL, etag TEXT NOT NULL,
  PRIMARY KEY (upload, number));
CREATE TABLE IF NOT EXISTS used (bytes INTEGER NOT NULL);
INSERT INTO used SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM used)
"""
_COLUMNS = "key, version, size, etag, uploaded_ms, details, checksums"

T = TypeVar("T")


class FileStore:
    def __init__(self, directory: Path, max_bytes: int, now_s: Callable[[], float] = time.time) -> None:
        self._directory = directory
        self._quota = BucketQuota(max_bytes)
        self._now_s = now_s
        self._index = Database(directory / "index.sqlite", self._prepare)

    async def head(self, key: str) -> ObjectHead | None:
        return await self._index.run(lambda connection: _head(connection, key))

    async def open(
        self, key: str, only_if: Conditions | None, range: Range | None
    ) -> "tuple[ObjectHead, ByteRange, FileContent | None] | None":
        """Return the object, the range and its content; None if there is no such object.
        The content is None if a condition fails."""
        while True:
            head = await self.head(key)
            if head is None:
                return None
            if only_if is not None and not only_if.hold(head):
                return head, ByteRange(0, 0), None
            span = range.within(head.size) if range is not None else ByteRange(0, head.size)
            try:
                return (
                    head,
                    span,
                    FileContent(await asyncio.to_thread(self._open_file, head.version, span.start), span.length),
                )
            except FileNotFoundError:
                if (await self.head(key)) == head:
                    raise R2Error("the object's file is lost; put it again", 10001, 500) from None

    async def put(
        self,
        key: str,
        content: AsyncIterator[bytes],
        details: Details,
        only_if: Conditions | None,
        checksum: tuple[str, bytes] | None,
    ) -> ObjectHead | None:
        digests = Digests(checksum)
        with await self._open_write(key, lambda connection: _size_of(connection, key)) as write:
            version, size = await self._written(content, digests.update, write)
            try:
                found = digests.checked()
                uploaded_ms = int(self._now_s() * 1000)
                head = ObjectHead(key, version, size, found["md5"].hex(), uploaded_ms, details, found)
                replaced = await self._commit(lambda connection: self._replace(connection, head, only_if), write)
            except BaseException:
                await self._removed([version])
                raise
        if replaced is None:
            await self._removed([version])
            return None
        await self._removed(replaced)
        return head

    async def delete(self, keys: list[str]) -> None:
        def work(connection: Connection) -> list[str]:
            versions = []
            with transaction(connection):
                for key in keys:
                    statement = "DELETE FROM objects WHERE key = ? RETURNING version, size"
                    for version, size in connection.execute(statement, (key.encode(),)).fetchall():
                        versions.append(version)
                        self._use(connection, -size)
            return versions

        await self._removed(await self._commit(work))

    async def listing(
        self,
        prefix: str,
        limit: int,
        cursor: str | None,
        delimiter: str,
        start_after: str,
        *,
        with_metadata: bool = True,
    ) -> R2Listing:
        """List objects; `with_metadata` changes nothing, because the index has all metadata."""
        start = decoded_cursor(cursor) if cursor else b""
        if not cursor and start_after:
            start = start_after.encode() + b"\0"
        first = prefix.encode("utf-8", "replace")
        return await self._index.run(lambda c: _listing(c, first, limit, max(start, first), delimiter.encode()))

    async def create_upload(self, key: str, details: Details) -> str:
        upload_id = uuid.uuid4().hex
        row = (upload_id, key.encode(), self._now_s(), msgspec.json.encode(details).decode())
        await self._index.run(lambda c: c.execute("INSERT INTO uploads VALUES (?, ?, ?, ?)", row).close())
        return upload_id

    async def put_part(self, key: str, upload_id: str, number: int, content: AsyncIterator[bytes]) -> str:
        def before(connection: Connection) -> list[tuple[str, int]]:
            _upload(connection, key, upload_id)  # checked again: the upload may have been completed meanwhile
            query = "SELECT version, size FROM parts WHERE upload = ? AND number = ?"
            return connection.execute(query, (upload_id, number)).fetchall()

        def work(connection: Connection) -> list[str]:
            with transaction(connection):
                replaced = before(connection)
                self._use(connection, size - sum(old_size for _, old_size in replaced))
                row = (upload_id, number, version, size, etag)
                connection.execute("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?)", row)
            return [version for version, _ in replaced]

        digests = Digests(None)
        with await self._open_write((upload_id, number), lambda c: sum(old_size for _, old_size in before(c))) as write:
            version, size = await self._written(content, digests.update, write)
            etag = digests.checked()["md5"].hex()
            try:
                await self._removed(await self._commit(work, write))
            except BaseException:
                await self._removed([version])
                raise
        return etag

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._removed(await self._commit(lambda connection: _forget(connection, key, upload_id)))

    async def complete_upload(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> ObjectHead:
        details, rows = await self._index.run(lambda connection: _chosen(connection, key, upload_id, parts))
        etag = multipart_etag([row[2] for row in rows])

        def work(connection: Connection) -> list[str]:
            _upload(connection, key, upload_id)
            return (self._replace(connection, head, None) or []) + _forget(connection, key, upload_id)

        with await self._open_write(key, lambda connection: _size_of(connection, key)) as write:
            version, size = await self._written(self._joined([row[0] for row in rows]), lambda data: None, write)
            head = ObjectHead(key, version, size, etag, int(self._now_s() * 1000), details, {})
            try:
                replaced = await self._commit(work, write)
            except BaseException:
                await self._removed([version])
                raise
        await self._removed(replaced)
        return head

    async def close(self) -> None:
        await self._index.close()

    def _replace(self, connection: Connection, head: ObjectHead, only_if: Conditions | None) -> list[str] | None:
        """Put the object into the index and return the versions that it replaces; None if a condition fails."""
        with transaction(connection):
            before = _head(connection, head.key)
            if only_if is not None and not only_if.hold(before):
                return None
            self._use(connection, head.size - (before.size if before is not None else 0))
            details, checksums = msgspec.json.encode(head.details).decode(), msgspec.msgpack.encode(head.checksums)
            row = (head.key.encode(), head.version, head.size, head.etag, head.uploaded_ms, details, checksums)
            connection.execute(f"INSERT OR REPLACE INTO objects ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return [before.version] if before is not None else []

    def _use(self, connection: Connection, size: int) -> None:
        """Count bytes inside a transaction.
        Raises R2Error if the bucket is full, which rolls the transaction back."""
        used = connection.execute("UPDATE used SET bytes = bytes + ? RETURNING bytes", (size,)).fetchone()[0]
        if size > 0 and used > self._quota.max_bytes:
            raise self._quota.full()

    async def _commit(self, work: Work[T], write: OpenWrite | None = None) -> T:
        """Run `work`, which changes the index, in the index's thread.
        The quota then counts the index's bytes instead of those reserved for `write`."""

        def counted(connection: Connection) -> T:
            result = work(connection)
            self._quota.refresh(_used(connection), write)
            return result

        return await self._index.run(counted)

    async def _open_write(self, place: Hashable, size_of_replaced: Work[int]) -> OpenWrite:
        def look(connection: Connection) -> int:
            self._quota.refresh(_used(connection))  # another process may have written
            return size_of_replaced(connection)

        return self._quota.open_write(place, await self._index.run(look))

    async def _written(
        self, content: AsyncIterator[bytes], update: Callable[[bytes], None], write: OpenWrite
    ) -> tuple[str, int]:
        """Write the content to a new file; return its version and size in bytes."""
        version, size = uuid.uuid4().hex, 0
        temporary = self._directory / "files" / f"{version}.part"
        try:
            file = await asyncio.to_thread(_created, temporary)
            try:
                buffer = bytearray()
                async for chunk in content:
                    size += len(chunk)
                    write.add(len(chunk))
                    buffer += chunk
                    if len(buffer) >= CHUNK_BYTES:
                        await asyncio.to_thread(_write, file, bytes(buffer), update)
                        buffer.clear()
                await asyncio.to_thread(_finish, file, bytes(buffer), update, self._file_of(version))
            finally:
                file.close()
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        return version, size

    async def _joined(self, versions: list[str]) -> AsyncIterator[bytes]:
        for version in versions:
            content = FileContent(await asyncio.to_thread(self._open_file, version, 0), None)
            async for chunk in content:
                yield chunk

    def _open_file(self, version: str, offset: int) -> FileIO:
        file = FileIO(self._file_of(version))
        file.seek(offset)
        return file

    def _file_of(self, version: str) -> Path:
        return self._directory / "files" / version[:2] / version

    async def _removed(self, versions: Iterable[str]) -> None:
        for version in versions:
            await asyncio.shield(asyncio.to_thread(self._file_of(version).unlink, missing_ok=True))

    def _prepare(self, connection: Connection) -> None:
        create(connection, SCHEMA)
        self._sweep(connection)

    def _sweep(self, connection: Connection) -> None:
        """Delete expired uploads, and files that are not in the index."""
        old = connection.execute(
            "SELECT key, id FROM uploads WHERE created_s < ?", (self._now_s() - UPLOAD_KEPT_S,)
        ).fetchall()
        for key, upload_id in old:
            _forget(connection, key.decode(), upload_id)
        known = {
            row[0] for row in connection.execute("SELECT version FROM objects UNION ALL SELECT version FROM parts")
        }
        for path in (self._directory / "files").rglob("*"):
            with suppress(OSError):
                is_old = path.stat().st_mtime < self._now_s() - STRAY_AFTER_S
                if path.is_file() and path.name not in known and is_old:
                    path.unlink()


class FileContent:
    """A span of an open file as a stream. The file stays readable if its object is replaced meanwhile."""

    def __init__(self, file: FileIO, length: int | None) -> None:
        self._file = file
        self._left = length

    def __aiter__(self) -> "FileContent":
        return self

    async def __anext__(self) -> bytes:
        size = CHUNK_BYTES if self._left is None else min(CHUNK_BYTES, self._left)
        chunk = await asyncio.to_thread(self._file.read, size) if size and not self._file.closed else b""
        if not chunk:
            is_short = bool(self._left) and not self._file.closed
            self._file.close()
            if is_short:
                raise R2Error("the object's file is shorter than it was", 10001, 500)
            raise StopAsyncIteration
        if self._left is not None:
            self._left -= len(chunk)
        return chunk

    async def aclose(self) -> None:
        self._file.close()


def _created(path: Path) -> FileIO:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return FileIO(path, "x")


def _write(file: FileIO, data: bytes, update: Callable[[bytes], None]) -> None:
    update(data)
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _finish(file: FileIO, data: bytes, update: Callable[[bytes], None], path: Path) -> None:
    """Write the last bytes, sync the file, and give it its final name."""
    _write(file, data, update)
    os.fsync(file.fileno())
    path.parent.mkdir(exist_ok=True, mode=0o700)
    os.rename(str(file.name), path)
    for directory in (path.parent, path.parent.parent):
        atomic_files.sync(directory)


def _head(connection: Connection, key: str) -> ObjectHead | None:
    row = connection.execute(f"SELECT {_COLUMNS} FROM objects WHERE key = ?", (key.encode(),)).fetchone()
    return None if row is None else _as_head(row)


def _size_of(connection: Connection, key: str) -> int:
    head = _head(connection, key)
    return 0 if head is None else head.size


def _used(connection: Connection) -> int:
    size: int = connection.execute("SELECT bytes FROM used").fetchone()[0]
    return size


def _as_head(row: tuple[Any, ...]) -> ObjectHead:
    key, version, size, etag, uploaded_ms, details, checksums = row
    return ObjectHead(
        key.decode(), version, size, etag, uploaded_ms,
        msgspec.json.decode(details, type=Details), msgspec.msgpack.decode(checksums, type=dict[str, bytes]),
    )  # fmt: skip


def _listing(connection: Connection, prefix: bytes, limit: int, start: bytes, delimiter: bytes) -> R2Listing:
    """List objects with one index lookup per object or common prefix.
    A common prefix of a million keys is thus skipped at once."""
    heads: list[ObjectHead] = []
    prefixes: list[str] = []
    end = prefix_end(prefix)
    condition, bound = ("AND key < ?", [end]) if end is not None else ("", [])
    many = f"SELECT {_COLUMNS} FROM objects WHERE key >= ? {condition} ORDER BY key LIMIT ?"
    while True:
        wanted = 1 if delimiter else limit + 1 - len(heads)
        rows = connection.execute(many, (start, *bound, wanted)).fetchall()
        for row in rows:
            if len(heads) + len(prefixes) == limit:
                return R2Listing(heads, prefixes, base64.urlsafe_b64encode(start).decode())
            cut = row[0].find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                group = row[0][: cut + len(delimiter)]
                prefixes.append(group.decode())
                after = prefix_end(group)
                if after is None:
                    return R2Listing(heads, prefixes, None)
                start = after
            else:
                heads.append(_as_head(row))
                start = row[0] + b"\0"
        if len(rows) < wanted:
            return R2Listing(heads, prefixes, None)


def _upload(connection: Connection, key: str, upload_id: str) -> Details:
    row = connection.execute(
        "SELECT details FROM uploads WHERE id = ? AND key = ?", (upload_id, key.encode())
    ).fetchone()
    if row is None:
        raise R2Error(NO_UPLOAD, 10024, 404)
    return msgspec.json.decode(row[0], type=Details)


def _chosen(
    connection: Connection, key: str, upload_id: str, parts: Sequence[UploadedPart]
) -> tuple[Details, list[tuple[str, int, str]]]:
    """Return the upload's details, and (version, size, etag) of each chosen part, in order."""
    details = _upload(connection, key, upload_id)
    query = "SELECT number, version, size, etag FROM parts WHERE upload = ?"
    rows = {number: (version, size, etag) for number, version, size, etag in connection.execute(query, (upload_id,))}
    numbers = chosen_parts(parts, {number: (etag, size) for number, (_, size, etag) in rows.items()})
    return details, [rows[number] for number in numbers]


def _forget(connection: Connection, key: str, upload_id: str) -> list[str]:
    """Delete an upload; return the versions of its parts."""
    with transaction(connection):
        _upload(connection, key, upload_id)
        rows = connection.execute("DELETE FROM parts WHERE upload = ? RETURNING version, size", (upload_id,)).fetchall()
        connection.execute("UPDATE used SET bytes = bytes - ?", (sum(size for _, size in rows),))
        connection.execute("DELETE FROM uploads WHERE id = ?", (upload_id,))
    return [version for version, _ in rows]
