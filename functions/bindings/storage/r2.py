"""R2: buckets of objects for functions.

This module checks requests; a store keeps the objects, in files (r2_files.py) or at an S3 endpoint (r2_s3.py). Conditions are those of HTTP (RFC 9110
section 13): an ETag takes precedence over a time. Errors have the platform's codes.
"""

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pilotlight.functions.bindings.binding import Binding, BindingError, Body, Pieces, Services, method
from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.bindings.storage.r2_files import FileStore
from pilotlight.functions.bindings.storage.r2_objects import (
    MAX_KEY_BYTES,
    MAX_METADATA_BYTES,
    MAX_PARTS,
    ByteRange,
    Conditions,
    Details,
    R2Error,
    Range,
    UploadedPart,
)
from pilotlight.functions.bindings.storage.r2_s3 import S3Store
from pilotlight.functions.bindings.storage.s3 import S3Client
from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.functions.manifest import BindingDeclaration
from pilotlight.support.database import storage_word

MAX_KEYS = 1000  # per list or delete
T = TypeVar("T")


class R2Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str


class R2Get(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    only_if: Conditions | None = None
    range: Range | None = None


class R2Put(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    value: bytes | None = None  # None if the value is streamed
    only_if: Conditions | None = None
    details: Details = Details()
    checksum: tuple[str, bytes] | None = None  # algorithm and digest


class R2Delete(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[str]


class R2List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prefix: str = ""
    limit: int = MAX_KEYS
    cursor: str | None = None
    delimiter: str | None = None
    start_after: str | None = None
    include: list[str] = []


class R2CreateUpload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    details: Details = Details()


class R2Upload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    upload_id: str


class R2UploadPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    upload_id: str
    part_number: int
    value: bytes | None = None


class R2CompleteUpload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str
    upload_id: str
    parts: list[UploadedPart]


class R2Bucket(Binding):
    kind = "r2"

    def __init__(self, store: FileStore | S3Store) -> None:
        self._store = store

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "R2Bucket":
        name = declaration.options.get("bucket_name") or declaration.name
        directory = directory_of(state_dir, "r2", name)
        if name in services.r2:
            return cls(services.databases.get(directory, lambda path: S3Store(S3Client(services.r2[name]))))
        return cls(services.databases.get(directory, lambda path: FileStore(path, services.max_bytes)))

    @method
    async def head(self, request: R2Key) -> Any:
        found = await self._done("head", self._store.head(_checked("head", request.key)))
        return None if found is None else found.as_value()

    @method
    async def get(self, request: R2Get) -> Any:
        """Return the object, the range and the bytes as a stream.
        Return None if there is no such object, and the object without bytes if a condition fails."""
        found = await self._done("get", self._store.open(_checked("get", request.key), request.only_if, request.range))
        if found is None:
            return None
        head, span, content = found
        if content is None:
            return {"object": head.as_value()}
        return StreamingReply({"object": head.as_value(), "range": _as_range(span)}, _Told("get", content))

    @method
    async def put(self, request: R2Put, body: Body | None) -> Any:
        """Store an object and return its description; return None, and store nothing, if a condition fails."""
        key = _checked("put", request.key)
        details = _checked_details("put", request.details)
        content = _content("put", request.value, body)
        head = await self._done("put", self._store.put(key, content, details, request.only_if, request.checksum))
        return None if head is None else head.as_value()

    @method
    async def delete(self, request: R2Delete) -> None:
        if len(request.keys) > MAX_KEYS:
            raise _error("delete", R2Error("DeleteObjects takes at most 1000 keys", 10022, 400))
        await self._done("delete", self._store.delete([_checked("delete", key) for key in request.keys]))

    @method
    async def list(self, request: R2List) -> Any:
        if not 1 <= request.limit <= MAX_KEYS:
            sentence = f"MaxKeys params must be positive integer <= {MAX_KEYS}, not {request.limit}"
            raise _error("list", R2Error(sentence, 10022, 400))
        if unknown := set(request.include) - {"httpMetadata", "customMetadata"}:
            raise _error(
                "list", R2Error(f"include takes httpMetadata and customMetadata, not {sorted(unknown)}", 10022, 400)
            )
        listing = self._store.listing(
            request.prefix, request.limit, request.cursor, request.delimiter or "", request.start_after or "",
            with_metadata=bool(request.include),
        )  # fmt: skip
        listed = await self._done("list", listing)
        objects = [head.as_value(set(request.include)) for head in listed.heads]
        value = {"objects": objects, "delimited_prefixes": listed.prefixes, "truncated": listed.cursor is not None}
        return value if listed.cursor is None else {**value, "cursor": listed.cursor}

    @method
    async def create_multipart_upload(self, request: R2CreateUpload) -> Any:
        key, details = _checked("createMultipartUpload", request.key), request.details
        upload_id = await self._done(
            "createMultipartUpload", self._store.create_upload(key, _checked_details("createMultipartUpload", details))
        )
        return {"key": request.key, "upload_id": upload_id}

    @method
    async def upload_part(self, request: R2UploadPart, body: Body | None) -> Any:
        if not 1 <= request.part_number <= MAX_PARTS:
            sentence = f"Part number must be between 1 and {MAX_PARTS}, inclusive."
            raise _error("uploadPart", R2Error(sentence, 10029, 400))
        key, content = _checked("uploadPart", request.key), _content("uploadPart", request.value, body)
        etag = await self._done(
            "uploadPart", self._store.put_part(key, request.upload_id, request.part_number, content)
        )
        return {"part_number": request.part_number, "etag": etag}

    @method
    async def abort(self, request: R2Upload) -> None:
        key = _checked("abortMultipartUpload", request.key)
        await self._done("abortMultipartUpload", self._store.abort_upload(key, request.upload_id))

    @method
    async def complete(self, request: R2CompleteUpload) -> Any:
        verb = "completeMultipartUpload"
        key = _checked(verb, request.key)
        head = await self._done(verb, self._store.complete_upload(key, request.upload_id, request.parts))
        return head.as_value()

    async def _done(self, verb: str, work: Awaitable[T]) -> T:
        try:
            return await work
        except R2Error as error:
            raise _error(verb, error) from None
        except Exception as error:
            if (word := storage_word(error)) is None:
                raise
            raise _error(verb, R2Error(word[2], 10001, word[1], word[0])) from None


class _Told:
    """An object's bytes as a stream that raises the store's errors as BindingErrors."""

    def __init__(self, verb: str, content: Body) -> None:
        self._verb = verb
        self._content = content

    def __aiter__(self) -> "_Told":
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._content)
        except R2Error as error:
            raise _error(self._verb, error) from None

    async def aclose(self) -> None:
        if (aclose := getattr(self._content, "aclose", None)) is not None:
            await aclose()


def _content(verb: str, value: bytes | None, body: Body | None) -> Body:
    if value is not None:
        return Pieces(value)
    if body is None:
        raise BindingError(f"{verb}: there is neither a value nor a stream", name="TypeError")
    return body


def _checked(verb: str, key: str) -> str:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        size = 0
    if not 1 <= size <= MAX_KEY_BYTES:
        sentence = f"The specified object name is not valid: it has 1 to {MAX_KEY_BYTES} bytes of UTF-8."
        raise _error(verb, R2Error(sentence, 10020, 400))
    return key


def _checked_details(verb: str, details: Details) -> Details:
    size = sum(len(name.encode()) + len(value.encode()) for name, value in details.custom_metadata.items())
    if size > MAX_METADATA_BYTES:
        sentence = (
            f"Your metadata headers exceed the maximum allowed metadata size: {size} of {MAX_METADATA_BYTES} bytes."
        )
        raise _error(verb, R2Error(sentence, 10012, 400))
    return details


def _as_range(span: ByteRange) -> dict[str, int]:
    return {"offset": span.start, "length": span.length}


def _error(verb: str, error: R2Error) -> BindingError:
    return BindingError(f"{verb}: {error} ({error.number})", code=error.word or error.number, status=error.status)
