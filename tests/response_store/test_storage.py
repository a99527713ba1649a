"""Responses outlive a restart. A disk that is full, hangs or is damaged, or a second process, loses only responses that cannot be stored."""

import asyncio
import logging
import os
import resource
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson
import pytest

from pilotlight.response_store import response_rows
from pilotlight.response_store.conversations import Conversations
from pilotlight.response_store.kept_responses import KeptResponse, failed_event
from pilotlight.response_store.response_database import ResponsesFault, RetentionPolicy
from pilotlight.response_store.response_file import ResponseFile
from pilotlight.response_store.response_rows import ResponseRow
from pilotlight.response_store.storage import ResponseStore, StoreTimings
from pilotlight.wire.errors import ApiError
from tests.asgi import eventually
from tests.response_store.hindered import HinderedDatabase

DAY_S = 86_400.0
MIB = 1 << 20


class Days:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now * DAY_S


@pytest.fixture
def days() -> Days:
    return Days()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "responses.sqlite"


@asynccontextmanager
async def opened(
    path: Path, days: Callable[[], float], max_bytes: int = 100 * MIB, **timings: float
) -> AsyncIterator[ResponseStore]:
    policy, database = RetentionPolicy(path, max_bytes, 30 * DAY_S), ResponseFile(path, max_bytes, days)
    store = ResponseStore(policy, database, StoreTimings(**timings))
    try:
        yield store
    finally:
        await store.close()


def response(name: str, *, status: str = "completed", size: int = 100, tenant: str = "t") -> KeptResponse:
    output = [{"id": f"msg_{name}", "text": "x" * size}] if status == "completed" else []
    return KeptResponse(tenant, {"id": name, "status": status, "output": output, "background": False}, b'{"id":"i"}')


def content_of(path: Path) -> bytes:
    return path.read_bytes()


def modes_in(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()}


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    for old in path.parent.iterdir():
        old.unlink()
    path.write_bytes(content)
    path.chmod(0o644)


async def there(store: ResponseStore, *names: str) -> list[bool]:
    async def is_there(name: str) -> bool:
        try:
            return (await store.find(name, "t")).id == name
        except ApiError as error:
            if error.word != "not_found":
                raise
            return False

    return [await is_there(name) for name in names]


async def ended(store: ResponseStore, name: str) -> KeptResponse:
    """Return a response after its end."""
    async with asyncio.timeout(30):
        while not (found := await store.find(name, "t")).is_ended:
            await asyncio.sleep(0.01)
    return found


async def test_a_response_is_there_after_a_restart_and_its_tenants_alone(path: Path, days: Days) -> None:
    one = response("a")
    one.events = [b"data: 1\n\n", b"data: 2\n\n"]
    async with opened(path, days) as store:
        assert await store.keep(one)
    async with opened(path, days) as store:
        found = await store.find("a", "t")
        assert found.fields == one.fields
        assert await store.after(found, 0) == (one.events, True)
        assert await store.input_items(found) == b'{"id":"i"}'
        assert await store.items(["msg_a"], "t") == {"msg_a": one.output}
        assert (await store.conversation("a", "t", "p")).items == one.input + b"," + one.output
        for ask in (store.find("a", "u", "p"), store.conversation("a", "u", "p")):
            with pytest.raises(ApiError) as refused:
                await ask
            assert (refused.value.word, refused.value.param) == ("not_found", "p")
        assert await store.items(["msg_a"], "u") == {}
        await store.delete(found)
        assert await there(store, "a") == [False]


async def test_no_other_user_of_the_machine_reads_them_in_any_folder(path: Path, days: Days) -> None:
    write(path, b"")
    path.parent.chmod(0o755)
    assert modes_in(path.parent) == {path.name: 0o644}
    async with opened(path, days) as store:
        assert await store.keep(response("a"))
        assert {name: mode for name, mode in modes_in(path.parent).items() if mode != 0o600} == {}
        assert len(modes_in(path.parent)) == 4


@pytest.mark.process
async def test_a_response_that_a_dead_process_was_making_has_failed(path: Path, days: Days) -> None:
    script = """
import asyncio, os, sys
from pathlib import Path
from pilotlight.response_store.kept_responses import KeptResponse, failed_event
from pilotlight.response_store.response_database import RetentionPolicy, ResponsesFault
from pilotlight.response_store.response_file import ResponseFile
from pilotlight.response_store.storage import ResponseStore, StoreTimings

async def main():
    path = Path(sys.argv[1])
    store = ResponseStore(RetentionPolicy(path, 1 << 30, 1e9), ResponseFile(path, 1 << 30, lambda: 1e9))
    fields = {"id": "a", "status": "queued", "output": [], "background": True}
    await store.begin(KeptResponse("t", fields, b'"asked"'))
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""
    command = [sys.executable, "-c", script, str(path)]
    killed = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[2])
    assert await killed.wait() == -9
    async with opened(path, days) as store:
        days.now = 1e9 / DAY_S
        found = await ended(store, "a")
        assert (found.fields["status"], found.fields["error"]["code"]) == ("failed", "aborted")
        assert await store.after(found, 3) == ([failed_event(found.fields, 3)], True)
        assert (await store.conversation("a", "t", "p")).items == b'"asked"', (
            "its input is kept, so that a client can repeat the request"
        )


async def test_what_is_being_made_is_followed_and_ends_with_its_process(path: Path, days: Days) -> None:
    async with opened(path, days) as store:
        made = response("a", status="in_progress")
        await store.begin(made)
        assert await store.find("a", "t") is made
        with pytest.raises(ApiError) as refused:
            await store.conversation("a", "t", "p")
        assert refused.value.word == "conflict"

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await store.settle(made)

        made.make_by(work())
        await asyncio.sleep(0)
    async with opened(path, days) as store:
        found = await store.find("a", "t")
        assert (found.fields["status"], found.fields["error"]["code"]) == ("failed", "aborted")
        assert await store.after(found, 0) == ([failed_event(found.fields, 0)], True)


async def test_a_response_that_is_deleted_while_it_is_made_or_written_does_not_come_back(
    path: Path, days: Days
) -> None:
    async with opened(path, days) as store:
        made = response("a", status="in_progress")
        await store.begin(made)

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                made.end_as("cancelled")
                await store.settle(made)

        made.make_by(work())
        await asyncio.sleep(0)
        await store.delete(made)
        assert await there(store, "a") == [False]
        ended = response("b")
        keeping = [asyncio.create_task(store.keep(one)) for one in (response("c"), ended)]
        await asyncio.sleep(0)
        await store.delete(ended)
        await asyncio.gather(*keeping)
        assert await there(store, "b", "c") == [False, True]


async def test_what_cannot_be_written_can_be_deleted_and_keeps_no_process_from_ending(
    path: Path, days: Days, monkeypatch: pytest.MonkeyPatch
) -> None:

    num_failed = 0

    async def fail(rows: list[ResponseRow]) -> None:
        nonlocal num_failed
        num_failed += 1
        raise ResponsesFault("the disk is full")

    async def work(store: ResponseStore, made: KeptResponse) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            made.end_as("cancelled")
            await store.settle(made)

    async with opened(path, days, retry_s=0.01) as store:
        made = [response(name, status="in_progress") for name in ("deleted", "left")]
        for one in made:
            await store.begin(one)
            one.make_by(work(store, one))
        await asyncio.sleep(0)
        store.database = HinderedDatabase(store.database, fail)
        assert made[0].task is not None
        made[0].task.cancel()
        await eventually(lambda: num_failed >= 3)
        assert not made[0].task.done(), "the end is retried until it is stored"
        await store.delete(made[0])
        assert await there(store, "deleted", "left") == [False, True]
        async with asyncio.timeout(60):
            await store.close()


async def test_a_write_that_fails_by_mistake_keeps_no_caller_waiting(
    path: Path, days: Days, caplog: pytest.LogCaptureFixture
) -> None:
    async def raises(rows: list[ResponseRow]) -> None:
        if rows[0].id == "a":
            raise ValueError("a mistake")

    async with opened(path, days) as store:
        store.database = HinderedDatabase(store.database, raises)
        async with asyncio.timeout(60):
            assert not await store.keep(response("a"))
        assert "a mistake" in caplog.text
        assert await store.keep(response("b"))
        assert await there(store, "a", "b") == [False, True]


async def test_a_response_written_after_its_client_learnt_that_it_is_not_kept_is_removed(
    path: Path, days: Days
) -> None:

    class Late:
        """A database that hangs while it commits: the caller gets an error, but the data is stored."""

        is_shared = False

        def __init__(self, database: Any) -> None:
            self.database, self.name, self.is_late = database, database.name, True

        async def run(self, work: Any, within_s: float, *, is_write: bool) -> Any:
            done = await self.database.run(work, within_s, is_write=is_write)
            if self.is_late and is_write:
                raise ResponsesFault("no answer in time")
            return done

        async def close(self) -> None:
            await self.database.close()

    async with opened(path, days, retry_s=0.01) as store:
        late = store.database = cast("Any", Late(store.database))
        assert not await store.keep(response("a"))
        kept = partial(response_rows.find, tenant="t", name="a")
        assert await late.database.run(kept, 5.0, is_write=False) is not None
        assert await there(store, "a") == [False], "until then no reader may find it"
        late.is_late = False
        assert await store.keep(response("b"))

        async def is_removed() -> bool:
            return await late.database.run(kept, 5.0, is_write=False) is None

        await eventually(is_removed)
        assert await there(store, "a", "b") == [False, True]


async def test_as_many_responses_as_end_in_a_long_outage_are_removed_after_it(path: Path, days: Days) -> None:
    names = [f"r{i}" for i in range(1000)]

    class Slow:
        """A database that loses its answers until it has recovered; then it answers in time only to short work."""

        is_shared = False

        def __init__(self, database: Any) -> None:
            self.database, self.name, self.has_recovered = database, database.name, False

        async def run(self, work: Any, within_s: float, *, is_write: bool) -> Any:
            if self.has_recovered and len(work.keywords.get("names", ())) > len(names) // 2:
                raise ResponsesFault("no answer in time")
            done = await self.database.run(work, within_s, is_write=is_write)
            if is_write and not self.has_recovered:
                raise ResponsesFault("no answer in time")
            return done

        async def close(self) -> None:
            await self.database.close()

    async with opened(path, days, retry_s=0.01) as store:
        slow = store.database = cast("Any", Slow(store.database))
        assert not any(await asyncio.gather(*(store.keep(response(name)) for name in names)))
        slow.has_recovered = True
        async with asyncio.timeout(10):
            for name in names:
                kept = partial(response_rows.find, tenant="t", name=name)
                while await slow.database.run(kept, 5.0, is_write=False) is not None:
                    await asyncio.sleep(0.01)


async def test_what_ends_at_once_is_written_at_once(path: Path, days: Days) -> None:
    batches: list[int] = []

    async def count(rows: list[ResponseRow]) -> None:
        batches.append(len(rows))

    async with opened(path, days) as store:
        store.database = HinderedDatabase(store.database, count)
        assert all(await asyncio.gather(*(store.keep(response(f"r{i}")) for i in range(100))))
        assert batches == [100]
        leaving = asyncio.create_task(store.keep(response("left")))
        await asyncio.sleep(0)
        leaving.cancel()  # as when its client leaves
        assert await store.keep(response("stayed"))
        assert await there(store, "left", "stayed") == [True, True]


async def test_after_its_days_a_response_is_gone_from_the_file_too(path: Path, days: Days) -> None:
    async with opened(path, days) as store:
        for name in ("old", "older"):
            await store.keep(response(name))
        days.now += 29.0
        await store.keep(response("new"))
        assert await there(store, "old", "new") == [True, True]
        days.now += 1.1
        assert await there(store, "old", "new") == [False, True]
        await store.sweep()
    kept = sqlite3.connect(path)
    assert kept.execute("SELECT id FROM responses").fetchall() == [("new",)]
    kept.close()


async def test_no_more_is_kept_than_there_is_room_for(path: Path, days: Days) -> None:
    async with opened(path, days, max_bytes=MIB) as store:
        names = [f"r{i}" for i in range(30)]
        for name in names:
            assert await store.keep(response(name, size=100_000))
        kept = await there(store, *names)
        assert kept == [False] * (30 - sum(kept)) + [True] * sum(kept), "the oldest responses are evicted"
        assert 8 <= sum(kept) <= 10
    assert len(content_of(path)) < 3 * MIB
    assert modes_in(path.parent.parent)[path.parent.name] == 0o700


async def test_where_nothing_is_to_be_kept_no_file_is_made(path: Path, days: Days) -> None:
    async with opened(path, days, max_bytes=0) as store:
        assert not await store.keep(response("a"))
        assert await there(store, "a") == [False]
    assert not path.parent.exists()


class SmallDisk(NamedTuple):
    folder: Path
    fill: Callable[[], None]
    mend: Callable[[], None]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Yield a separate small disk if one can be mounted; otherwise limit the size of files."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if subprocess.run(mount, capture_output=True).returncode:
        limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE)
        yield SmallDisk(tmp_path, partial(limited, (1, limits[1])), partial(limited, limits))
        return
    filler = tmp_path / "filler"
    yield SmallDisk(tmp_path, partial(fill, filler), filler.unlink)
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        for size in (4096, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


@pytest.mark.process
async def test_a_full_disk_costs_records_that_end_meanwhile_and_stored_ones_are_read(
    disk: SmallDisk, days: Days, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(disk.folder / "responses.sqlite", days, retry_s=0.01) as store:
        assert await store.keep(response("before"))
        made = response("made", status="in_progress")
        await store.begin(made)
        disk.fill()
        for name in ("lost", "lost too"):
            assert not await store.keep(response(name, size=200_000))
        assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1, (
            "the fault is logged once"
        )
        with pytest.raises(ApiError) as refused:
            await store.begin(response("not begun", status="queued", size=0))
        assert (refused.value.word, "full" in refused.value.message) == ("overloaded", True)
        assert await there(store, "before", "not begun", "lost") == [True, False, False]
        made.fields = response("made", size=200_000).fields
        settling = asyncio.create_task(store.settle(made))
        await asyncio.sleep(0.1)
        assert not settling.done()
        assert await store.find("made", "t") is made, "an unfinished response stays in memory"
        assert (await store.conversation("made", "t", "p")).items == made.input + b"," + made.output
        disk.mend()
        await settling
        assert await store.keep(response("after"))
        assert (await store.find("made", "t")).fields == made.fields
        assert await store.find("made", "t") is not made


@pytest.mark.process
async def test_a_full_disk_costs_a_conversation_the_change_that_cannot_be_written_and_no_more(
    disk: SmallDisk, days: Days
) -> None:
    item = {"type": "message", "role": "user", "content": "x" * 200_000}
    async with opened(disk.folder / "responses.sqlite", days, retry_s=0.01) as store:
        talks = Conversations(store)
        name = (await talks.create("t", {"items": [{**item, "content": "Hi."}]}))["id"]
        disk.fill()
        for change in (talks.add("t", name, {"items": [item]}), talks.create("t", {"items": [item]})):
            with pytest.raises(ApiError, match="cannot be stored right now"):
                await change
        assert (await talks.find("t", name))["id"] == name
        disk.mend()
        assert await store.keep(response("after"))
        await asyncio.sleep(0.1)  # meanwhile the conversation that could not be created is deleted
        assert len(orjson.loads(b"[" + await talks.items("t", name) + b"]")) == 1
        await talks.add("t", name, {"items": [item]})
        assert len(orjson.loads(b"[" + await talks.items("t", name) + b"]")) == 2


@pytest.mark.parametrize("garbage", [b"no database at all" * 1000, b"SQLite format 3\0" + os.urandom(20_000)])
async def test_a_file_that_is_damaged_is_set_aside_at_the_start_and_for_its_days(
    path: Path, days: Days, garbage: bytes
) -> None:
    write(path, garbage)
    async with opened(path, days) as store:
        assert await there(store, "a") == [False]
        assert await store.keep(response("a"))
        aside = path.with_name("responses.sqlite.damaged")
        assert aside.read_bytes() == garbage
        days.now = aside.stat().st_mtime / DAY_S + 29
        await store.sweep()
        assert aside.exists()
        days.now += 2
        await store.sweep()
        assert not aside.exists()
    async with opened(path, days) as store:
        assert await there(store, "a") == [False], "it has expired"
        assert await store.keep(response("b"))


@pytest.mark.long
@pytest.mark.parametrize("garbage", [b"\xff" * 4096, bytes(4096)])
async def test_whichever_page_is_damaged_new_responses_are_kept_and_no_wrong_one_is_returned(
    path: Path, days: Days, garbage: bytes
) -> None:
    before = [response(name, size=20_000) for name in ("first", "second", "third")]
    async with opened(path, days, answer_after_fault_s=5.0) as store:
        for one in before:
            await store.keep(one)
    content = content_of(path)
    num_found = 0
    for page in range(0, len(content), 4096):
        write(path, content[:page] + garbage + content[page + 4096 :])
        async with opened(path, days, answer_after_fault_s=5.0) as store:
            for one in before:
                with suppress(ApiError):
                    assert (await store.find(one.id, "t")).fields == one.fields
                    num_found += 1
            assert await store.keep(response("new"))
            assert await there(store, "new") == [True]
            later = response("later")
            later.before = await store.conversation("new", "t", "p")
            assert await store.keep(later)
    assert num_found > len(content) // 4096, "a damaged page must lose only its own responses"


async def test_a_file_that_is_damaged_under_way_is_set_aside_by_the_next_that_is_written(
    path: Path, days: Days
) -> None:
    async with opened(path, days, answer_after_fault_s=5.0) as store:
        assert await store.keep(response("a"))

        def spoil(connection: sqlite3.Connection) -> None:
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute("UPDATE sqlite_master SET rootpage = 100000 WHERE type = 'table' AND name = 'responses'")

        await store.database.run(spoil, 60.0, is_write=False)
        await store.database.close()
        with pytest.raises(ApiError) as refused:
            await store.find("a", "t")
        assert refused.value.word == "overloaded"
        assert await store.keep(response("b"))
        assert await there(store, "a", "b") == [False, True]
        assert path.with_name("responses.sqlite.damaged").exists()


async def test_a_row_that_cannot_be_read_at_the_start_keeps_no_process_from_keeping_more(
    path: Path, days: Days
) -> None:
    async with opened(path, days) as store:
        await store.begin(response("a", status="queued"))
        await store.database.run(
            lambda connection: connection.execute("UPDATE responses SET fields = x'00'"), 60.0, is_write=True
        )
    async with opened(path, days, answer_after_fault_s=5.0) as store:
        assert await store.keep(response("b"))

        async def is_gone() -> bool:
            with suppress(ApiError):
                return await there(store, "a") == [False]
            return False

        await eventually(is_gone)
        assert await there(store, "b") == [True]


async def test_the_end_of_a_background_response_is_on_the_disk_before_it_is_sent(path: Path, days: Days) -> None:
    async with opened(path, days) as store:
        made, asked, writes = response("a", status="in_progress"), asyncio.Event(), asyncio.Event()
        await store.begin(made)
        made.untold.append(b"data: 1\n\n")
        await eventually(lambda: not made.untold)
        made.untold.append(b"data: 2\n\n")

        async def wait(rows: list[ResponseRow]) -> None:
            asked.set()
            await writes.wait()

        store.database = HinderedDatabase(store.database, wait)
        ending = asyncio.create_task(store.end(made, response("a").fields))
        await asyncio.wait_for(asked.wait(), 60)
        assert (made.is_ended, made.events) == (False, [b"data: 1\n\n"])
        writes.set()
        await ending
        assert made.is_settled
        assert await made.after(0) == ([b"data: 1\n\n", b"data: 2\n\n"], True)
        await store.settle(made)
        found = await store.find("a", "t")
        assert found is not made
        assert await store.after(found, 0) == (made.events, True)


async def test_a_second_process_is_refused_and_takes_over_when_the_first_has_ended(
    path: Path, days: Days, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(path, days) as second:
        async with opened(path, days) as first:
            made = response("a", status="queued")
            await first.begin(made)
            assert not await second.keep(response("b"))
            with pytest.raises(ApiError, match="another process stores responses in it"):
                await second.find("a", "t")
            made.fields = response("a").fields
            await first.settle(made)
        assert await second.keep(response("b"))
        assert (await second.find("a", "t")).fields["status"] == "completed", (
            "the second process must not mark it failed"
        )
    assert "another process" in caplog.text


async def test_a_disk_that_hangs_delays_no_caller_for_long(path: Path, days: Days) -> None:
    goes_on = threading.Event()
    async with opened(path, days) as store:
        assert await store.keep(response("a"))
        store.timings = store.timings._replace(answer_s=0.1)
        standing = asyncio.create_task(store.database.run(lambda connection: goes_on.wait(20), 60.0, is_write=False))
        await asyncio.sleep(0)
        assert not await store.keep(response("b"))
        store.timings = store.timings._replace(answer_s=1000.0)
        async with asyncio.timeout(60):  # far below answer_s, because after a fault requests wait less
            with pytest.raises(ApiError, match="does not respond in time"):
                await store.find("a", "t")
        goes_on.set()
        await standing
        store.timings = store.timings._replace(answer_after_fault_s=5.0)
        assert await store.keep(response("c"))
        assert await there(store, "a", "b", "c") == [True, False, True], (
            "a response without a waiting caller was not written"
        )
