"""R2 on files and on an S3 server: objects, ranges, conditions, checksums, lists, multipart uploads, broken streams, hostile processes."""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.channel.failure import Failure
from tests.asgi import eventually
from tests.functions.bindings.conftest import Wire
from tests.functions.bindings.r2_bucket import MIB, R2, files, read
from tests.functions.bindings.s3_server import s3_endpoint, s3_place
from workers.bindings.r2 import R2Bucket, R2ObjectBody

__all__ = ["s3_endpoint", "s3_place"]


@pytest.fixture(params=["files", pytest.param("s3", marks=pytest.mark.process)])
async def bucket(wire: Wire, request: pytest.FixtureRequest) -> R2Bucket:
    """Return a bucket on files or at an S3 server."""
    stores = {} if request.param == "files" else {"photos": request.getfixturevalue("s3_place")}
    face: R2Bucket = (await wire(R2, r2=stores)).env["BUCKET"]
    return face


def holds(root: Path, count: int) -> bool:
    """Tell whether there are `count` files; True for a bucket at an S3 server, which has no files here."""
    return not (root / "bindings" / "r2").exists() or len(files(root)) == count


async def test_an_object_that_was_put_is_there_with_all_that_was_said_of_it(bucket: R2Bucket, tmp_path: Path) -> None:
    expiry = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    put = await bucket.put(
        "a/b.txt",
        "wörld",
        {
            "httpMetadata": {"contentType": "text/plain", "cacheControl": "max-age=60", "cacheExpiry": expiry},
            "customMetadata": {"author": "me"},
        },
    )
    assert put is not None
    assert put.etag == hashlib.md5("wörld".encode()).hexdigest()
    found = await bucket.get("a/b.txt")
    assert isinstance(found, R2ObjectBody)
    assert (found["key"], found["httpEtag"], found["bodyUsed"]) == ("a/b.txt", f'"{put.etag}"', False)
    assert (found.key, found.size, found.version, found.httpEtag) == ("a/b.txt", 6, put.version, f'"{put.etag}"')
    assert found.httpMetadata.contentType == "text/plain"
    assert found.http_metadata.cacheExpiry == expiry
    assert found.customMetadata.to_py() == {"author": "me"}
    assert found.checksums.md5.to_bytes() == hashlib.md5("wörld".encode()).digest()
    assert found.checksums.toJSON() == {"md5": put.etag}
    assert abs(found.uploaded.timestamp() - time.time()) < 60
    assert found.storageClass == "Standard"
    headers: dict[str, str] = {}
    found.writeHttpMetadata(headers)
    assert headers == {
        "content-type": "text/plain",
        "cache-control": "max-age=60",
        "expires": "Wed, 02 Jan 2030 03:04:05 GMT",
    }
    assert await found.text() == "wörld"
    assert found.bodyUsed
    with pytest.raises(TypeError, match="read already"):
        await found.text()
    assert (await bucket.head("a/b.txt")).version == put.version
    assert await bucket.get("a") is None
    assert await bucket.head("A/b.txt") is None
    assert holds(tmp_path, 1)
    await bucket.put("a/b.txt", b"")
    assert await read(await bucket.get("a/b.txt")) == b""
    assert holds(tmp_path, 1)
    await bucket.delete(["a/b.txt", "none"])
    assert await bucket.get("a/b.txt") is None
    assert holds(tmp_path, 0)


async def test_streams_of_megabytes_come_back_unchanged(bucket: R2Bucket) -> None:
    data = os.urandom(5 * MIB + 123)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 70_001):
            yield data[start : start + 70_001]

    streamed = await bucket.put("streamed", pieces())
    whole = await bucket.put("whole", data)
    assert streamed is not None
    assert whole is not None
    assert streamed.etag == whole.etag == hashlib.md5(data).hexdigest()
    assert await read(await bucket.get("streamed")) == data


@pytest.mark.parametrize(
    ("wanted", "start", "end"),
    [
        ({"offset": 2, "length": 3}, 2, 5),
        ({"offset": 8}, 8, 10),
        ({"length": 4}, 0, 4),
        ({"suffix": 3}, 7, 10),
        ({"suffix": 99}, 0, 10),
        ({"offset": 9, "length": 99}, 9, 10),
    ],
)
async def test_a_range_is_that_part(bucket: R2Bucket, wanted: dict[str, int], start: int, end: int) -> None:
    await bucket.put("k", b"0123456789")
    found = await bucket.get("k", range=wanted)
    assert await read(found) == b"0123456789"[start:end]
    assert found is not None
    assert found.range == {"offset": start, "length": end - start}
    assert found.size == 10


class Headers(dict[str, str]):
    """The headers of a request, as a dict."""


async def test_ranges_and_conditions_can_be_a_requests_headers(bucket: R2Bucket) -> None:
    put = await bucket.put("k", b"0123456789")
    assert put is not None
    for header, part in (
        ("bytes=2-4", b"234"),
        ("bytes=7-", b"789"),
        ("bytes=-2", b"89"),
        ("lines=1-2", b"0123456789"),
        ("bytes=5-2", b"0123456789"),
        ("bytes=--2", b"0123456789"),
        ("bytes=2-+4", b"0123456789"),
        ("bytes=2-999999999999999999", b"23456789"),
    ):
        assert await read(await bucket.get("k", range=Headers(range=header))) == part
    fresh = await bucket.get("k", onlyIf=Headers({"if-none-match": f'W/"x", {put.httpEtag}'}))
    assert fresh is not None
    assert not isinstance(fresh, R2ObjectBody)
    assert not hasattr(fresh, "body")
    assert await read(await bucket.get("k", onlyIf=Headers({"if-match": put.httpEtag}))) == b"0123456789"


async def test_conditions_decide_what_is_read_and_written(bucket: R2Bucket) -> None:
    first = await bucket.put("k", "1", onlyIf={"etagDoesNotMatch": "*"})
    assert first is not None
    assert await bucket.put("k", "2", onlyIf={"etagDoesNotMatch": "*"}) is None
    assert await bucket.put("k", "2", onlyIf={"etagMatches": "0" * 32}) is None
    assert await bucket.put("new", "2", onlyIf={"etagMatches": "*"}) is None
    assert await bucket.put("k", "2", onlyIf={"etagMatches": first.etag}) is not None
    assert await read(await bucket.get("k")) == b"2"
    past, future = datetime.now(UTC) - timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1)
    for only_if, holds in (
        ({"uploadedAfter": past}, True),
        ({"uploadedAfter": future}, False),
        ({"uploadedBefore": future}, True),
        ({"uploadedBefore": past}, False),
        ({"uploadedBefore": past.timestamp() * 1000}, False),
        ({"etagMatches": first.etag, "uploadedBefore": future}, False),
    ):
        found = await bucket.get("k", {"onlyIf": only_if})
        assert isinstance(found, R2ObjectBody) is holds, only_if


async def test_of_many_writers_with_a_condition_one_wins(bucket: R2Bucket, tmp_path: Path) -> None:
    puts = await asyncio.gather(
        *[bucket.put("k", str(i) * 1000, onlyIf={"etagDoesNotMatch": ["*"]}) for i in range(20)]
    )
    (winner,) = [put for put in puts if put is not None]
    found = await bucket.get("k")
    assert found is not None
    assert found.etag == winner.etag
    assert holds(tmp_path, 1)


@pytest.mark.parametrize("name", ["md5", "sha1", "sha256", "sha384", "sha512"])
async def test_a_checksum_is_kept_and_a_wrong_one_refused(bucket: R2Bucket, tmp_path: Path, name: str) -> None:
    digest = hashlib.new(name, b"data").digest()
    await bucket.put("k", b"data", {name: digest.hex()})
    head = await bucket.head("k")
    assert head is not None
    assert head.checksums[name] == digest
    with pytest.raises(Failure, match=r"did not match what we received.*\(10037\)"):
        await bucket.put("k", b"other", **{name: digest})
    with pytest.raises(Failure, match="bytes, and not 3"):
        await bucket.put("k", b"other", **{name: b"abc"})
    assert await read(await bucket.get("k")) == b"data"
    assert holds(tmp_path, 1)


async def test_two_checksums_at_once_are_refused(bucket: R2Bucket) -> None:
    with pytest.raises(TypeError, match="multiple hashing algorithms"):
        await bucket.put("k", b"", md5="00" * 16, sha1="00" * 20)


async def test_a_list_continues_at_its_cursor_and_groups_by_delimiter(bucket: R2Bucket) -> None:
    keys = [f"photos/{year}/{i}.jpg" for year in (2024, 2025) for i in range(7)] + [
        "photos/readme",
        "photos/x/y/z",
        "zoo",
        "photos\U0001f600",
    ]
    for key in keys:
        await bucket.put(key, key, customMetadata={"k": key}, httpMetadata={"contentType": "x/y"})
    seen: list[str] = []
    page = await bucket.list(limit=4)
    while True:
        seen += [each.key for each in page.objects]
        if not page.truncated:
            break
        page = await bucket.list(limit=4, cursor=page.cursor)
    assert seen == sorted(keys, key=str.encode)
    grouped = await bucket.list({"prefix": "photos/", "delimiter": "/"})
    assert [each.key for each in grouped.objects] == ["photos/readme"]
    assert grouped.delimitedPrefixes == ["photos/2024/", "photos/2025/", "photos/x/"]
    found: list[str] = []
    page = await bucket.list(prefix="photos/", delimiter="/", limit=1)
    while True:
        found += [*page.delimitedPrefixes, *[each.key for each in page.objects]]
        if not page.truncated:
            break
        page = await bucket.list(prefix="photos/", delimiter="/", limit=1, cursor=page.cursor)
    assert found == ["photos/2024/", "photos/2025/", "photos/readme", "photos/x/"]
    assert [each.key for each in (await bucket.list(startAfter="photos/x/y/z")).objects] == ["photos\U0001f600", "zoo"]
    bare, full = (
        (await bucket.list(prefix="zoo")).objects[0],
        (await bucket.list(prefix="zoo", include=["customMetadata"])).objects[0],
    )
    assert (bare.customMetadata, full.customMetadata, full.httpMetadata) == ({}, {"k": "zoo"}, {})
    for wrong in ({"limit": 0}, {"limit": 1001}, {"cursor": "?"}, {"include": ["secrets"]}):
        with pytest.raises(Failure, match=r"\(10022\)"):
            await bucket.list(wrong)


async def test_a_multipart_upload_becomes_one_object(bucket: R2Bucket, tmp_path: Path) -> None:
    await bucket.put("big", "before")
    upload = await bucket.createMultipartUpload("big", {"customMetadata": {"a": "b"}})
    parts = [os.urandom(5 * MIB), os.urandom(5 * MIB), b"end"]
    await upload.uploadPart(2, b"to be replaced")
    second, third = await upload.uploadPart(2, parts[1]), await upload.uploadPart(3, parts[2])
    resumed = bucket.resumeMultipartUpload("big", upload.uploadId)
    first = await resumed.upload_part(1, parts[0])
    assert await read(await bucket.get("big")) == b"before"
    done = await resumed.complete([third, first, second])
    assert done.etag.endswith("-3")
    assert done.etag == hashlib.md5(b"".join(hashlib.md5(part).digest() for part in parts)).hexdigest() + "-3"
    found = await bucket.get("big")
    assert found is not None
    assert found.customMetadata.a == "b"
    assert await read(found) == b"".join(parts)
    assert holds(tmp_path, 1)
    with pytest.raises(Failure, match=r"does not exist\. \(10024\)"):
        await upload.complete([first])
    with pytest.raises(Failure, match=r"\(10024\)|answered 500.*\(10001\)"):  # moto answers with the latter
        await upload.uploadPart(1, b"x")


async def test_an_upload_that_does_not_fit_together_is_refused_and_can_be_aborted(
    bucket: R2Bucket, tmp_path: Path
) -> None:
    upload = await bucket.createMultipartUpload("k")
    small, last = await upload.uploadPart(1, b"small"), await upload.uploadPart(2, b"last")
    with pytest.raises(Failure, match=r"\(10011\)"):
        await upload.complete([small, last])
    for wrong in ([], [small, small], [{"partNumber": 3, "etag": small.etag}], [{"partNumber": 1, "etag": last.etag}]):
        with pytest.raises(Failure, match=r"\(10025\)"):
            await upload.complete(wrong)
    for number in (0, 10_001):
        with pytest.raises(Failure, match=r"\(10029\)"):
            await upload.uploadPart(number, b"x")
    if files(tmp_path):  # moto checks only the id
        with pytest.raises(Failure, match=r"\(10024\)"):
            await bucket.resumeMultipartUpload("other", upload.uploadId).abort()
    await upload.abort()
    assert holds(tmp_path, 0)
    with pytest.raises(Failure, match=r"\(10024\)"):
        await upload.abort()


async def test_metadata_beyond_its_limit_is_refused(wire: Wire) -> None:
    bucket: R2Bucket = (await wire(R2)).env["BUCKET"]
    await bucket.put("k", "x", customMetadata={"a": "x" * 8191})
    with pytest.raises(Failure, match=r"\(10012\)"):
        await bucket.put("k", "x", customMetadata={"a": "x" * 8192})
    with pytest.raises(TypeError, match="must be a str"):
        await bucket.put("k", "x", customMetadata={"a": None})
    with pytest.raises(TypeError, match="did you mean 'content_type'"):
        await bucket.put("k", "x", httpMetadata={"contentTyp": "text/plain"})


async def test_a_hostile_process_gets_refusals_and_no_more(wire: Wire) -> None:
    wired = await wire(R2)
    attempts: list[tuple[str, dict[str, Any]]] = [
        ("get", {"key": "k", "range": {"offset": -1}}),
        ("get", {"key": "k", "range": {"offset": 2**60}}),
        ("put", {"key": "k"}),
        ("put", {"key": "k", "value": b"", "checksum": ["crc32", b"1234"]}),
        ("put", {"key": "k", "value": b"", "details": {"storage_class": "Secret"}}),
        ("complete", {"key": "k", "upload_id": "x", "parts": [{"part_number": "1", "etag": ""}]}),
        ("delete", {"keys": ["k"] * 1001}),
        ("list", {"limit": 2**70 - 2**70 - 1}),
        ("_done", {}),
    ]
    for method, kwargs in attempts:
        with pytest.raises(Failure) as caught:
            await wired.raw("BUCKET", method, **kwargs)
        assert caught.value.status == 400, (method, kwargs)
    assert (await wired.env["BUCKET"].list()).objects == []


async def test_a_stream_that_breaks_or_a_function_that_leaves_keeps_the_old_object(
    bucket: R2Bucket, tmp_path: Path
) -> None:
    await bucket.put("k", "old")

    async def breaks() -> AsyncIterator[bytes]:
        yield bytes(MIB)
        raise ValueError("my stream broke")

    async def never_ends() -> AsyncIterator[bytes]:
        yield bytes(MIB)
        await asyncio.Event().wait()

    with pytest.raises(Failure, match="my stream broke"):
        await bucket.put("k", breaks())
    task = asyncio.ensure_future(bucket.put("k", never_ends()))
    await eventually(lambda: holds(tmp_path, 2))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: holds(tmp_path, 1))
    assert await read(await bucket.get("k")) == b"old"


async def test_readers_and_writers_of_one_key_never_see_half(bucket: R2Bucket) -> None:
    values = [bytes([i]) * (200_000 + i) for i in range(12)]
    await bucket.put("k", values[0])

    async def reads() -> None:
        for _ in range(15):
            found = await bucket.get("k")
            data = await read(found)
            assert data in values
            assert found is not None
            assert hashlib.md5(data).hexdigest() == found.etag

    await asyncio.gather(*[bucket.put("k", value) for value in values], reads(), reads())
