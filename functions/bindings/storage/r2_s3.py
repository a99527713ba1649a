"""A bucket's objects at an S3 endpoint, with the same interface as r2_files.py.

Details that S3 has a header for use that header, so other tools can read what functions wrote. A body is spooled and hashed before it is sent,
because S3 needs its length, and a downloaded body is checked against its ETag if that is an MD5. Versions are ETags, and times have whole seconds, as
in S3.
"""

import asyncio
import base64
import hashlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn
from urllib.parse import unquote_plus
from xml.sax.saxutils import escape

from pilotlight.functions.bindings.storage.r2_headers import described, head_of, listed, time_of
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
)
from pilotlight.functions.bindings.storage.s3 import (
    CREDENTIALS_ARE_WRONG,
    S3Answer,
    S3Client,
    S3CredentialsError,
    S3Error,
    S3Unreachable,
    Spooled,
    local,
    text_of,
)

CURSOR = b"s3:"
MAX_PUT_BYTES = 5 << 30
IN_MEMORY_BYTES = 4 << 20  # a larger body is spooled to a file
HEADS_AT_ONCE = 16
MAX_RACES = 8


class S3Store:
    def __init__(self, client: S3Client) -> None:
        self._client = client

    async def head(self, key: str) -> ObjectHead | None:
        _check_key(key)
        async with _translated():
            try:
                answer = await self._client.ask("HEAD", key)
            except S3Error as error:
                if error.status == 404:
                    await self._check_bucket(error)
                    return None
                raise
            answer.close()
            return head_of(key, answer)

    async def open(
        self, key: str, only_if: Conditions | None, range: Range | None
    ) -> "tuple[ObjectHead, ByteRange, S3Content | None] | None":
        """Return the object, the range and its content; None if there is no such object.
        The content is None if a condition fails."""
        for _ in _races(key):
            head = await self.head(key)
            if head is None:
                return None
            if only_if is not None and not only_if.hold(head):
                return head, ByteRange(0, 0), None
            span = range.within(head.size) if range is not None else ByteRange(0, head.size)
            headers = {"if-match": f'"{head.etag}"'}
            if span.length and span.length < head.size:
                headers["range"] = f"bytes={span.start}-{span.start + span.length - 1}"
            async with _translated():
                try:
                    answer = await self._client.ask("GET", key, headers=headers)
                except S3Error as error:
                    if error.status in (404, 412):
                        continue  # the object has been replaced or deleted meanwhile
                    raise
                return head, span, S3Content(answer, span.length, head)
        raise AssertionError("unreachable")

    async def put(
        self,
        key: str,
        content: AsyncIterator[bytes],
        details: Details,
        only_if: Conditions | None,
        checksum: tuple[str, bytes] | None,
    ) -> ObjectHead | None:
        _check_key(key)
        digests = Digests(checksum)
        async with _spooled(content, digests.update) as body:
            found = digests.checked()
            headers = described(details, {name: each for name, each in found.items() if name != "md5"})
            headers["content-md5"] = base64.b64encode(found["md5"]).decode()
            for _ in _races(key):
                if only_if is not None:
                    before = await self.head(key)
                    if not only_if.hold(before):
                        return None
                    guard = {"if-none-match": "*"} if before is None else {"if-match": f'"{before.etag}"'}
                    headers = {**headers, **guard}
                async with _translated():
                    try:
                        answer = await self._client.ask("PUT", key, headers=headers, body=body)
                    except S3Error as error:
                        if only_if is not None and error.status in (404, 409, 412):
                            headers = {n: v for n, v in headers.items() if not n.startswith("if-")}
                            continue  # another writer was faster: check the condition again
                        raise
                    answer.close()
                etag = answer.headers.get("etag", "").strip('"') or found["md5"].hex()
                written = time_of(answer.headers.get("date"))
                return ObjectHead(key, etag, body.size, etag, written, details, found)
        raise AssertionError("unreachable")

    async def delete(self, keys: list[str]) -> None:
        keys = [key for key in keys if not _leads_away(key)]  # no object can have such a key
        async with _translated():
            if len(keys) == 1:
                (await self._client.ask("DELETE", keys[0])).close()
            elif keys:
                named = "".join(f"<Object><Key>{_escaped(key)}</Key></Object>" for key in keys)
                body = f"<Delete><Quiet>true</Quiet>{named}</Delete>".encode()
                md5 = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
                answer = await self._client.ask("POST", query={"delete": ""}, headers={"content-md5": md5}, body=body)
                for child in await answer.xml():
                    if local(child) == "Error":
                        raise S3Error(text_of(child, "Code"), text_of(child, "Message"), 500)

    async def listing(
        self, prefix: str, limit: int, cursor: str | None, delimiter: str, start_after: str, *, with_metadata: bool
    ) -> R2Listing:
        query = {"list-type": "2", "max-keys": str(limit), "encoding-type": "url"}
        token = _token_of(cursor) if cursor else ""
        wanted = {"prefix": prefix, "delimiter": delimiter, "continuation-token": token, "start-after": start_after}
        query |= {name: value for name, value in wanted.items() if value}
        async with _translated():
            try:
                root = await (await self._client.ask("GET", query=query)).xml()
            except S3Error as error:
                if cursor and error.code in ("InvalidArgument", "InvalidToken", "InvalidContinuationToken"):
                    raise R2Error("the cursor does not come from a list", 10022, 400) from None
                raise
            heads = [listed(child) for child in root if local(child) == "Contents"]
            prefixes = [unquote_plus(text_of(child, "Prefix")) for child in root if local(child) == "CommonPrefixes"]
            more = text_of(root, "NextContinuationToken") if text_of(root, "IsTruncated") == "true" else None
        if with_metadata:
            heads = [found or each for each, found in zip(heads, await self._heads(heads), strict=True)]
        return R2Listing(heads, prefixes, None if more is None else _as_cursor(more))

    async def create_upload(self, key: str, details: Details) -> str:
        _check_key(key)
        async with _translated():
            answer = await self._client.ask("POST", key, {"uploads": ""}, described(details, {}))
            return text_of(await answer.xml(), "UploadId")

    async def put_part(self, key: str, upload_id: str, number: int, content: AsyncIterator[bytes]) -> str:
        _check_key(key)
        digests = Digests(None)
        async with _spooled(content, digests.update) as body, _translated():
            md5 = digests.checked()["md5"]
            query = {"partNumber": str(number), "uploadId": upload_id}
            headers = {"content-md5": base64.b64encode(md5).decode()}
            answer = await self._client.ask("PUT", key, query, headers, body)
            answer.close()
            return answer.headers.get("etag", "").strip('"') or md5.hex()

    async def abort_upload(self, key: str, upload_id: str) -> None:
        _check_key(key)
        async with _translated():
            (await self._client.ask("DELETE", key, {"uploadId": upload_id})).close()

    async def complete_upload(self, key: str, upload_id: str, parts: Sequence[UploadedPart]) -> ObjectHead:
        _check_key(key)
        uploaded = await self._parts(key, upload_id)
        named = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{_escaped(uploaded[number][0])}</ETag></Part>"
            for number in chosen_parts(parts, uploaded)
        )
        body = f"<CompleteMultipartUpload>{named}</CompleteMultipartUpload>".encode()
        async with _translated():
            await (await self._client.ask("POST", key, {"uploadId": upload_id}, body=body)).xml()
        head = await self.head(key)
        if head is None:
            raise R2Error("the object was deleted as soon as it was complete", 10001, 500)
        return head

    async def close(self) -> None:
        await self._client.close()

    async def _parts(self, key: str, upload_id: str) -> dict[int, tuple[str, int]]:
        """Return (etag, size) of each uploaded part, by number."""
        found: dict[int, tuple[str, int]] = {}
        marker = "0"
        while True:
            async with _translated():
                query = {"uploadId": upload_id, "part-number-marker": marker}
                root = await (await self._client.ask("GET", key, query)).xml()
            for child in root:
                if local(child) == "Part":
                    etag, size = text_of(child, "ETag").strip('"'), int(text_of(child, "Size", "0"))
                    found[int(text_of(child, "PartNumber"))] = etag, size
            if text_of(root, "IsTruncated") != "true":
                return found
            marker = text_of(root, "NextPartNumberMarker")

    async def _heads(self, heads: list[ObjectHead]) -> list[ObjectHead | None]:
        room = asyncio.Semaphore(HEADS_AT_ONCE)

        async def one(head: ObjectHead) -> ObjectHead | None:
            async with room:
                return await self.head(head.key)

        return list(await asyncio.gather(*(one(head) for head in heads)))

    async def _check_bucket(self, error: S3Error) -> None:
        """Raise R2Error if the bucket does not exist.
        A 404 to a HEAD does not say whether the object or the bucket is missing."""
        if error.code == "NoSuchBucket":
            raise error
        if not self._has_bucket:
            try:
                (await self._client.ask("HEAD")).close()
            except S3Error as failure:
                if failure.status == 404:
                    raise S3Error("NoSuchBucket", "", 404) from None
                raise
            self._has_bucket = True

    _has_bucket = False


class S3Content:
    """An object's bytes as they arrive, checked against its size, and against its ETag if that is an MD5."""

    def __init__(self, answer: S3Answer, length: int, head: ObjectHead) -> None:
        self._chunks = aiter(answer)
        self._answer = answer
        self._left = length
        is_whole = length == head.size and len(head.etag) == 32
        self._md5 = hashlib.md5(usedforsecurity=False) if is_whole else None
        self._etag = head.etag

    def __aiter__(self) -> "S3Content":
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            await self.aclose()
            self._check()
            raise StopAsyncIteration
        async with _translated():
            try:
                chunk = await anext(self._chunks)
            except StopAsyncIteration:
                sentence = f"the store's answer ends {self._left} bytes too early"
                raise R2Error(sentence, 10001, 502, "store_broke_off") from None
        self._left -= len(chunk)
        if self._md5 is not None:
            self._md5.update(chunk)
        return chunk

    async def aclose(self) -> None:
        aclose: Any = getattr(self._chunks, "aclose", None)
        if aclose is not None:
            await aclose()
        self._answer.close()

    def _check(self) -> None:
        md5, self._md5 = self._md5, None
        if md5 is not None and md5.hexdigest() != self._etag:
            sentence = "the store's bytes differ from the stored object: their MD5 is not its etag"
            raise R2Error(sentence, 10037, 502, "store_corrupt")


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    """Turn failures of the S3 endpoint into R2Errors.
    The function gets the reason, but never the site's credentials."""
    try:
        yield
    except S3Error as error:
        _refuse(error)
    except S3CredentialsError as error:
        raise R2Error(f"{error}; the site's operator has to set them", 10002, 500, "store_unauthorized") from None
    except S3Unreachable as error:
        word = "store_broke_off" if "broke off" in str(error) else "store_unreachable"
        raise R2Error(str(error), 10043, 502, word) from None


def _refuse(error: S3Error) -> NoReturn:
    if error.code in CREDENTIALS_ARE_WRONG or error.status in (401, 403):
        sentence = f"the store refuses the site's credentials for this bucket ({error})"
        raise R2Error(sentence, 10003, 502, "store_unauthorized") from None
    if error.code == "NoSuchBucket":
        raise R2Error("The specified bucket does not exist at the store.", 10006, 404) from None
    if error.code == "NoSuchUpload":
        raise R2Error("The specified multipart upload does not exist.", 10024, 404) from None
    if error.code in ("InvalidPart", "InvalidPartOrder"):
        raise R2Error(f"One or more of the specified parts could not be found: {error}.", 10025, 400) from None
    if error.code == "EntityTooSmall":
        raise R2Error(f"Your proposed upload is smaller than the minimum: {error}.", 10011, 400) from None
    if error.code in ("EntityTooLarge", "MaxMessageLengthExceeded"):
        raise R2Error(f"The object is too large for the store: {error}.", 100100, 400) from None
    if error.code in ("MetadataTooLarge",):
        raise R2Error(f"Your metadata headers exceed the maximum allowed metadata size: {error}.", 10012, 400) from None
    if error.code in ("BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest"):
        raise R2Error(f"The store received other bytes than were sent: {error}.", 10037, 502, "store_corrupt") from None
    if error.status in (429, 503):
        raise R2Error(f"the store is busy: {error}", 10058, 503, "store_busy") from None
    raise R2Error(f"the store answered {error.status}: {error}", 10001, 502, "store_failed") from None


@asynccontextmanager
async def _spooled(content: AsyncIterator[bytes], update: Callable[[bytes], None]) -> AsyncIterator[Spooled]:
    sha256, size = hashlib.sha256(), 0
    with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as file:

        def keep(data: bytes) -> None:
            sha256.update(data)
            update(data)
            file.write(data)

        async for chunk in content:
            size += len(chunk)
            if size > MAX_PUT_BYTES:
                sentence = f"an object may have {MAX_PUT_BYTES >> 30} GiB in one put: upload it in parts"
                raise R2Error(sentence, 100100, 400)
            if size > IN_MEMORY_BYTES:  # from this size on, `file` is on disk, and writing blocks
                await asyncio.to_thread(keep, chunk)
            else:
                keep(chunk)
        yield Spooled(file, size, sha256.hexdigest())


def _races(key: str) -> Iterator[int]:
    yield from range(MAX_RACES)
    raise R2Error(f"others keep replacing {key[:100]!r}: try again", 10043, 503, "store_busy")


def _as_cursor(token: str) -> str:
    return base64.urlsafe_b64encode(CURSOR + token.encode()).decode()


def _token_of(cursor: str) -> str:
    found = decoded_cursor(cursor)
    try:
        if found.startswith(CURSOR):
            return found[len(CURSOR) :].decode()
    except UnicodeDecodeError:
        pass
    raise R2Error("the cursor does not come from a list", 10022, 400)


def _leads_away(key: str) -> bool:
    """Tell whether a proxy that normalizes the URL would send the key to another bucket.
    That request would carry the site's credentials."""
    return any(part in (".", "..") for part in key.split("/"))


def _check_key(key: str) -> None:
    if _leads_away(key):
        sentence = "The specified object name is not valid: at an S3 endpoint no part between slashes is '.' or '..'."
        raise R2Error(sentence, 10020, 400)


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else f"&#{ord(char)};" for char in escape(text))
