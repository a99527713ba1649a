"""R2's objects as files: hostile keys, readers of deleted objects, full disks, killed writers, and uploads that are never completed."""

import asyncio
import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from pilotlight.functions.bindings.storage.r2 import R2Bucket as Bucket
from pilotlight.functions.bindings.storage.r2_files import CHUNK_BYTES, STRAY_AFTER_S, FileStore
from pilotlight.functions.bindings.storage.r2_objects import ByteRange, Details, ObjectHead, R2Error
from pilotlight.functions.channel.failure import Failure
from tests.asgi import eventually
from tests.functions.bindings.conftest import Wire
from tests.functions.bindings.r2_bucket import MIB, R2, files, read
from workers.bindings.r2 import R2Bucket, R2ObjectBody


async def part(size: int) -> AsyncIterator[bytes]:
    yield b"x" * size


@pytest.fixture
async def bucket(wire: Wire) -> R2Bucket:
    face: R2Bucket = (await wire(R2)).env["BUCKET"]
    return face


async def test_keys_never_become_paths(bucket: R2Bucket, tmp_path: Path) -> None:
    keys = [
        "../../../etc/passwd", "/etc/passwd", "..", ".", "a\0b", "a\nb", "C:\\x", "x" * 1024, "index.sqlite",
        "a/../b", "~", "%2e%2e/",
    ]  # fmt: skip
    before = {path for path in tmp_path.parent.iterdir()}
    for key in keys:
        await bucket.put(key, key)
    for key in keys:
        assert await read(await bucket.get(key)) == key.encode()
    names = {path.name for path in files(tmp_path)}
    assert len(names) == len(keys)
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in names)
    assert {path for path in tmp_path.parent.iterdir()} == before
    for key in ("", "x" * 1025, "ä" * 513):
        with pytest.raises(Failure, match=r"\(10020\)"):
            await bucket.put(key, "x")


async def test_a_reader_keeps_its_object_while_it_is_replaced_and_deleted(bucket: R2Bucket) -> None:
    data = os.urandom(3 * MIB)
    await bucket.put("k", data)
    found = await bucket.get("k")
    assert isinstance(found, R2ObjectBody)
    chunks = aiter(found.body)
    first = await anext(chunks)
    await bucket.put("k", "new")
    await bucket.delete("k")
    assert first + b"".join([chunk async for chunk in chunks]) == data


async def test_a_full_bucket_says_so_and_keeps_what_it_has(wire: Wire, tmp_path: Path) -> None:
    bucket = (await wire(R2, max_bytes=MIB)).env["BUCKET"]
    await bucket.put("a", bytes(600_000))
    with pytest.raises(Failure, match="the bucket is full") as caught:
        await bucket.put("b", bytes(600_000))
    assert (caught.value.code, caught.value.status) == ("storage_full", 507)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(100_000)

    with pytest.raises(Failure, match="the bucket is full"):
        await bucket.put("b", endless())
    upload = await bucket.createMultipartUpload("c")
    with pytest.raises(Failure, match="the bucket is full"):
        await upload.uploadPart(1, bytes(600_000))
    assert len(files(tmp_path)) == 1
    await bucket.delete("a")
    assert await bucket.put("b", bytes(600_000)) is not None


async def test_an_object_that_is_left_half_read_is_closed() -> None:
    closed: list[bool] = []

    async def content() -> AsyncIterator[bytes]:
        try:
            yield b"some"
            yield b"more"
        finally:
            closed.append(True)

    class Opens:
        async def open(self, *asked: Any) -> Any:
            return head, ByteRange(0, 8), opened

    head, opened = ObjectHead("k", "v", 8, "e", 0, Details(), {}), content()
    told = await Bucket(cast("Any", Opens())).call("get", ["k"], {})
    assert await anext(told.body) == b"some"
    await told.body.aclose()
    assert closed == [True], "closed at once, not by garbage collection"


LIMITED = """
import asyncio, resource, signal, sys
from pathlib import Path
from pilotlight.functions.bindings.storage.r2 import R2Bucket
from pilotlight.functions.bindings.storage.r2_files import FileStore

async def main():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    store = FileStore(Path(sys.argv[1]), 1 << 40)
    bucket = R2Bucket(store)
    await bucket.call("put", ["k"], {"value": b"old"})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    try:
        await bucket.call("put", ["k"], {"value": bytes(2 << 20)})
    except Exception as error:
        print(error.status, error.code, str(error))
    head = await bucket.call("head", ["k"], {})
    print(head["size"], sum(1 for p in Path(sys.argv[1]).rglob("*") if p.is_file() and "index" not in p.name))
    await store.close()

asyncio.run(main())
"""


@pytest.mark.process
def test_a_disk_that_is_full_fails_the_put_and_leaves_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, env=env, check=False
    )
    assert done.stdout.splitlines() == [
        "507 storage_full put: the storage is full; delete something, or ask for more room (10001)",
        "3 1",
    ], done.stderr


KILLED = """
import asyncio, sys
from pathlib import Path
from pilotlight.functions.bindings.storage.r2 import R2Bucket
from pilotlight.functions.bindings.storage.r2_files import FileStore

async def main():
    bucket = R2Bucket(FileStore(Path(sys.argv[1]), 1 << 40))
    for i in range(100000):
        await bucket.call("put", [f"k{i % 7}"], {"value": (b"%06d" % i) * 30000})
        print(i, flush=True)

asyncio.run(main())
"""


def killed_writer(path: Path) -> int:
    """Kill a process while it puts objects; return the number of the last acknowledged put."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    lines = [line for _, line in zip(range(30), process.stdout, strict=False)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    return max(int(line) for line in lines if line.endswith("\n"))


@pytest.mark.process
async def test_acknowledged_objects_survive_kill_9_and_strays_go(tmp_path: Path) -> None:
    last = killed_writer(tmp_path)
    stray = tmp_path / "files" / "ab" / ("ab" * 16)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"nobody knows me")
    old_s = time.time() - STRAY_AFTER_S - 10
    os.utime(stray, (old_s, old_s))
    store = FileStore(tmp_path, 1 << 40)
    try:
        for i in range(7):
            newest = max(n for n in range(last + 1) if n % 7 == i)
            found = await store.open(f"k{i}", None, None)
            assert found is not None
            head, _, content = found
            assert content is not None
            data = b"".join([chunk async for chunk in content])
            number = int(data[:6])
            assert number in (newest, newest + 7)
            assert data == (b"%06d" % number) * 30000
            assert hashlib.md5(data).hexdigest() == head.etag
        assert not stray.exists()
    finally:
        await store.close()


async def test_an_object_whose_file_is_lost_or_cut_says_so(bucket: R2Bucket, tmp_path: Path) -> None:
    await bucket.put("k", "x" * 100)
    (file,) = files(tmp_path)
    file.write_bytes(b"x" * 60)
    with pytest.raises(Failure, match="the object's file is shorter than it was"):
        await read(await bucket.get("k"))
    file.unlink()
    with pytest.raises(Failure, match="the object's file is lost; put it again"):
        await bucket.get("k")
    await bucket.put("k", "again")
    assert await read(await bucket.get("k")) == b"again"


async def test_an_invalid_part_of_an_upload_is_not_even_read(tmp_path: Path) -> None:
    store, was_read = FileStore(tmp_path, 1 << 20), False

    async def content() -> AsyncIterator[bytes]:
        nonlocal was_read
        was_read = True
        yield b"x"

    upload = await store.create_upload("k", Details())
    for key, upload_id in (("k", "0" * 32), ("other", upload)):
        with pytest.raises(R2Error, match="does not exist"):
            await store.put_part(key, upload_id, 1, content())
    assert not was_read
    await store.put_part("k", upload, 1, content())
    assert was_read
    await store.close()


async def test_an_upload_that_cannot_be_entered_in_the_index_leaves_its_parts_and_no_object(
    bucket: R2Bucket, tmp_path: Path
) -> None:
    upload = await bucket.createMultipartUpload("k")
    part = await upload.uploadPart(1, "x" * 100)
    before = files(tmp_path)
    (index,) = await asyncio.to_thread(lambda: [*tmp_path.rglob("index.sqlite")])
    with closing(sqlite3.connect(index)) as other:
        fails = "CREATE TRIGGER fails BEFORE INSERT ON objects BEGIN SELECT RAISE(ABORT, 'it cannot be written'); END"
        other.execute(fails)
        with pytest.raises(Failure, match="it cannot be written"):
            await upload.complete([part])
        other.execute("DROP TRIGGER fails")
    assert files(tmp_path) == before
    assert await bucket.head("k") is None
    assert (await upload.complete([part])).size == 100


async def test_uploads_that_are_never_completed_are_forgotten(tmp_path: Path) -> None:
    async def one() -> AsyncIterator[bytes]:
        yield b"part"

    long_ago = FileStore(tmp_path, 1 << 30, now_s=lambda: time.time() - 8 * 24 * 3600)
    upload_id = await long_ago.create_upload("k", Details())
    await long_ago.put_part("k", upload_id, 1, one())
    await long_ago.close()
    for path in (tmp_path / "files").rglob("*"):
        os.utime(path, (0, 0))
    store = FileStore(tmp_path, 1 << 30)
    try:
        assert await store.head("k") is None
        assert [path for path in (tmp_path / "files").rglob("*") if path.is_file()] == []
    finally:
        await store.close()


async def test_a_part_that_is_sent_again_and_an_upload_that_is_given_up_take_no_more_room(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 10)
    try:
        upload_id = await store.create_upload("k", Details())
        for size in (6, 7, 6):
            await store.put_part("k", upload_id, 1, part(size))
        with pytest.raises(R2Error, match="the bucket is full"):
            await store.put_part("k", upload_id, 2, part(5))
        await store.put_part("k", upload_id, 2, part(4))
        assert sorted(path.stat().st_size for path in (tmp_path / "files").rglob("*") if path.is_file()) == [4, 6]
        await store.abort_upload("k", upload_id)
        assert [path for path in (tmp_path / "files").rglob("*") if path.is_file()] == []
        assert await store.put("other", part(10), Details(), None, None) is not None
        await store.delete(["other"])
        assert await store.put("other", part(10), Details(), None, None) is not None
    finally:
        await store.close()


async def test_files_that_are_still_being_written_count_against_the_bucket(tmp_path: Path) -> None:
    may_end, num_held = asyncio.Event(), 0

    async def held_open() -> AsyncIterator[bytes]:
        nonlocal num_held
        for _ in range(MIB // CHUNK_BYTES):
            yield b"x" * CHUNK_BYTES
        num_held += 1
        await may_end.wait()

    def written() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "files").rglob("*") if path.is_file())

    store = FileStore(tmp_path, 4 * MIB)
    try:
        await store.put("there", part(MIB), Details(), None, None)
        upload_id = await store.create_upload("parts", Details())
        tasks: list[asyncio.Future[object]] = []
        for n in range(10):
            for put in (
                store.put(f"k{n}", held_open(), Details(), None, None),
                store.put_part("parts", upload_id, n, held_open()),
            ):
                tasks.append(asyncio.ensure_future(put))
                await eventually(lambda: num_held + sum(task.done() for task in tasks) == len(tasks))
        assert written() == 4 * MIB
        may_end.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, R2Error)]
        assert (len(refused), {refusal.word for refusal in refused}) == (17, {"storage_full"})
        assert written() == 4 * MIB
    finally:
        await store.close()


async def test_room_of_a_write_that_is_given_up_is_free_again_and_a_replaced_object_gives_its_own_once(
    tmp_path: Path,
) -> None:
    may_end = asyncio.Event()

    async def held_open() -> AsyncIterator[bytes]:
        yield b"x" * 4 * MIB
        await may_end.wait()

    store = FileStore(tmp_path, 4 * MIB)
    try:
        left = asyncio.ensure_future(store.put("k", held_open(), Details(), None, None))
        await eventually(lambda: any(path.stat().st_size for path in (tmp_path / "files").rglob("*.part")))
        with pytest.raises(R2Error, match="the bucket is full"):
            await store.put("other", part(1), Details(), None, None)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await store.put("k", part(4 * MIB), Details(), None, None)
        again = asyncio.ensure_future(store.put("k", held_open(), Details(), None, None))
        await eventually(lambda: any(path.stat().st_size for path in (tmp_path / "files").rglob("*.part")))
        with pytest.raises(R2Error, match="the bucket is full"):
            await store.put("k", part(1), Details(), None, None)
        may_end.set()
        assert await again is not None
    finally:
        await store.close()
