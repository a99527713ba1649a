"""Durable streams that survive their router: another router with the journals continues, and each token counts once."""

import asyncio
import errno
import os
import signal
import struct
import threading
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import aiohttp
import pytest

from pilotlight.edge_router.app import build_app
from pilotlight.edge_router.durable.journal import (
    AnswerStarted,
    JournalEvents,
    JournalFile,
    Journals,
    StreamEnded,
    StreamStopped,
    TakenOver,
)
from pilotlight.edge_router.durable.streams import DurableStream, DurableStreams
from pilotlight.edge_router.requests.request import Head
from pilotlight.sites.config import ConfigError
from pilotlight.sites.network import DurableConfig
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.continuation import ResumePoint
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import MeteredRequest, UsageRecord
from tests.asgi import eventually
from tests.audit_events import observed_calls
from tests.edge_router.builders import Clock, network
from tests.edge_router.durable.test_streams import ALICE, ASKED, BOB, DURABLE, data, events, read_again
from tests.edge_router.fakes import (
    DONE,
    FakeSite,
    Router,
    continued_stream,
    event,
    fall_silent,
    raw_stream,
    router,
    sites,
)
from tests.edge_router.test_serve import network_file, process, ready
from tests.full_disk import files_of_at_most

SECRET = "sixteen bytes long"
NAME = "0123456789abcdef" * 2
WHOLE = b"".join(event(i) for i in range(6)) + DONE


def points(*token_ids: int) -> tuple[ResumePoint, ...]:
    return (ResumePoint(0, token_ids, None, 3, 0, 7, 0),)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", SECRET)


@asynccontextmanager
async def two_routers(fakes: list[FakeSite], folder: Path, **durable: float) -> AsyncIterator[tuple[Router, Router]]:
    tables = {"durable": {"directory": str(folder), **durable}}
    async with router(fakes, tables=tables) as one, router(fakes, tables=tables) as other:
        yield one, other


async def interrupted(running: Router, site: FakeSite, until: int = 3) -> tuple[str, list[bytes]]:
    """Start a stream that stops after some events; return its name and the ids of these events."""
    site.behave = continued_stream(6, until=until, ending=fall_silent)
    response = await running.chat(headers=ALICE, **DURABLE)
    body = b""
    while body.count(b"\n\n") < until:
        body += await response.content.readany()
    response.close()
    return response.headers["x-pilotlight-stream"], [each.event_id or b"" for each in events(body)]


async def test_a_journal_is_one_routers_until_that_one_ends(tmp_path: Path) -> None:
    one, other = Journals(tmp_path), Journals(tmp_path)
    mine, theirs = await one.begin(NAME, ASKED), await other.find(NAME)
    assert mine is not None
    assert theirs is not None
    await mine.keep(AnswerStarted(200, (("a", "b"),), None), JournalEvents(event(0), points(100)))
    assert await theirs.read() == [ASKED, AnswerStarted(200, (("a", "b"),), None), JournalEvents(event(0), points(100))]
    assert not theirs.is_ours
    await theirs.keep(StreamEnded())  # has no effect, because another router owns the journal
    await mine.keep(JournalEvents(event(1), points(101)))
    mine.release()
    found = []
    while not theirs.is_ours:
        found += await theirs.read()
    assert found == [JournalEvents(event(1), points(101))]
    await theirs.resume()
    assert other.parts(NAME) == [
        [
            ASKED,
            AnswerStarted(200, (("a", "b"),), None),
            JournalEvents(event(0), points(100)),
            JournalEvents(event(1), points(101)),
        ],
        [],
    ]
    for journals in (one, other):
        journals.close()


async def test_what_was_being_written_when_a_router_died_is_cut_off(tmp_path: Path) -> None:
    journals = Journals(tmp_path)
    journal = await journals.begin(NAME, ASKED)
    assert journal is not None
    await journal.keep(JournalEvents(event(0), points(100)))
    journal.release()
    journals.close()
    whole = (tmp_path / NAME).read_bytes()
    after = Journals(tmp_path)
    for torn in (b"\0", b"\0\0\0\x09\0\0\0\0half", whole[:-1]):
        (tmp_path / NAME).write_bytes(whole + torn if torn != whole[:-1] else torn)
        found = await after.find(NAME)
        assert found is not None
        read = await found.read()
        assert read == [ASKED, JournalEvents(event(0), points(100))][: 2 if torn != whole[:-1] else 1]
        await found.resume()
        await found.keep(JournalEvents(event(1), points(101)))
        found.release()
        parts = after.parts(NAME)
        assert parts == [read, [JournalEvents(event(1), points(101))]]
    after.close()


async def test_what_is_over_is_swept_and_what_is_at_work_is_not(tmp_path: Path) -> None:
    clock = Clock()
    journals = Journals(tmp_path, clock)
    names = [f"{i:032x}" for i in range(4)]
    made = [await journals.begin(name, ASKED) for name in names]
    for journal in made[:3]:
        assert journal is not None
        journal.release(StreamEnded())
        await asyncio.sleep(0)
    (tmp_path / "notes.txt").write_text("not ours")
    for i, name in enumerate(names):
        while i < 3 and (journals.parts(name) or [[]])[0][-1:] != [StreamEnded()]:
            await asyncio.sleep(0)
        os.utime(tmp_path / name, (clock.now + i, clock.now + i))
    clock.advance(60)
    size = (tmp_path / names[0]).stat().st_size
    journals.sweep(keep_s=1000, max_bytes=3.5 * size)
    assert sorted(os.listdir(tmp_path)) == [*names[1:], "notes.txt"]
    clock.advance(941.5)
    journals.sweep(keep_s=1000, max_bytes=1e9)
    assert sorted(os.listdir(tmp_path)) == [*names[2:], "notes.txt"]
    clock.advance(9999)
    num_open = len(os.listdir("/proc/self/fd"))
    journals.sweep(keep_s=1000, max_bytes=0)
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert sorted(os.listdir(tmp_path)) == [names[3], "notes.txt"]
    journals.close()


def whole_file(path: Path) -> JournalFile:
    file = JournalFile(path, os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    assert file.take()
    return file


def test_a_disk_that_takes_some_bytes_at_a_time_gets_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [ASKED, JournalEvents(event(0), points(100)), JournalEvents(event(1), points(101)), StreamEnded()]
    whole, slow = whole_file(tmp_path / "whole"), whole_file(tmp_path / "slow")
    for some in (entries[:1], entries[1:3], entries[3:]):
        whole.append(*some)
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    for some in (entries[:1], entries[1:3], entries[3:]):
        slow.append(*some)
    assert (tmp_path / "slow").read_bytes() == (tmp_path / "whole").read_bytes()
    reader = JournalFile(tmp_path / "slow", os.open(tmp_path / "slow", os.O_RDWR))
    assert (reader.read(), reader.read()) == (entries, [])
    for file in (whole, slow, reader):
        file.close()
        file.close()


def test_what_a_full_disk_has_taken_of_an_entry_is_taken_back(tmp_path: Path) -> None:
    file = whole_file(tmp_path / "j")
    file.append(ASKED)
    before = (tmp_path / "j").read_bytes()
    with files_of_at_most(len(before) + 7), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        file.append(JournalEvents(event(0), points(100)))
    assert (tmp_path / "j").read_bytes() == before
    file.append(StreamEnded())
    file.close()
    again = whole_file(tmp_path / "j")
    assert again.read() == [ASKED, StreamEnded()]
    again.resume()
    assert again.read() == [], "its own records are not read again"
    again.remove()
    assert not (tmp_path / "j").exists()


async def test_a_router_that_ends_has_written_records_on_their_way(tmp_path: Path) -> None:
    journals = Journals(tmp_path)
    journal = await journals.begin(NAME, ASKED)
    assert journal is not None
    written = [JournalEvents(event(i), points(100 + i)) for i in range(1000)]
    journal.release(*written, StreamEnded())
    journals.close()
    assert journals.parts(NAME) == [[ASKED, *written, StreamEnded()]]


async def test_what_is_kept_for_a_moment_is_swept_as_often(tmp_path: Path) -> None:
    journals = Journals(tmp_path)
    sweeping = asyncio.create_task(journals.run(keep_s=0.01, max_bytes=1e9))
    async with asyncio.timeout(60):
        for i in range(2):
            journal = await journals.begin(f"{i:032x}", ASKED)
            assert journal is not None
            journal.release(StreamEnded())
            while os.listdir(tmp_path):
                await asyncio.sleep(0.01)
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
    journals.close()


@pytest.mark.parametrize("name", ["../usage", "x" * 32, NAME.upper(), "", NAME + "\n"])
async def test_an_invalid_name_opens_no_file(tmp_path: Path, name: str) -> None:
    journals = Journals(tmp_path / "journals")
    (tmp_path / "usage").write_text("secret")
    assert await journals.find(name) is None
    journals.close()


async def test_a_deleted_journal_is_a_stream_that_was_stopped(tmp_path: Path) -> None:
    journals = Journals(tmp_path)
    journal = await journals.begin(NAME, ASKED)
    assert journal is not None
    (tmp_path / NAME).unlink()
    with pytest.raises(StreamStopped):
        await journal.keep(StreamEnded())
    journals.close()


@pytest.mark.process
async def test_the_disk_gets_no_key(tmp_path: Path) -> None:
    async with sites("ams1") as fakes, router(fakes, tables={"durable": {"directory": str(tmp_path)}}) as running:
        fakes[0].behave = continued_stream(6)
        headers = {**ALICE, "cookie": "c=alice", "x-pilotlight-hop": "alice"}
        async with running.chat(headers=headers, **DURABLE) as response:
            name = response.headers["x-pilotlight-stream"]
            assert data(await response.read()) == WHOLE
        async with asyncio.timeout(60):
            await running.until(lambda: b"StreamEnded" in (tmp_path / name).read_bytes())
        kept = (tmp_path / name).read_bytes()
        assert b"alice" not in kept
        assert b"hello" in kept
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.process
async def test_a_router_that_ends_has_written_what_it_keeps_and_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    async with sites("ams1") as fakes, router(fakes, tables={"durable": {"directory": str(tmp_path)}}) as running:
        fakes[0].behave = continued_stream(6)
        async with running.chat(headers=ALICE, **DURABLE) as response:
            name = response.headers["x-pilotlight-stream"]
            await response.read()
    assert b"StreamEnded" in (tmp_path / name).read_bytes()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("journals")]


@pytest.mark.process
async def test_a_second_router_reads_along_and_does_not_begin_the_answer_again(tmp_path: Path) -> None:
    async with sites("ams1") as fakes, two_routers(fakes, tmp_path) as (one, other):
        fakes[0].behave = raw_stream(event(0), end="on command")
        response = await one.chat(headers=ALICE, **DURABLE)
        name = response.headers["x-pilotlight-stream"]
        assert (await read_again(other, name, headers=BOB))[0] == 404
        again = asyncio.create_task(read_again(other, name))
        await asyncio.sleep(0.3)  # time to read the journal three times
        assert not again.done()
        fakes[0].go_on.set()
        assert await again == (200, body := await response.read())
        assert data(body) == event(0) + event(99) + DONE
        assert len(fakes[0].seen) == 1


@pytest.mark.process
async def test_a_router_that_drains_leaves_its_streams_to_another(tmp_path: Path) -> None:
    async with sites("ams1") as fakes, two_routers(fakes, tmp_path) as (one, other):
        name, ids = await interrupted(one, fakes[0])
        reading = asyncio.create_task(read_again(one, name, ids[1]))
        await asyncio.sleep(0.05)
        fakes[0].behave = continued_stream(6)
        await one.proxy.drain(0.05)
        status, told = await reading
        last = events(told)[-1]
        assert (status, last.event_id, b'"draining"' in (last.data or b"")) == (200, None, True)
        status, rest = await read_again(other, name, ids[-1])
        assert (status, data(rest)) == (200, WHOLE.removeprefix(b"".join(event(i) for i in range(3))))
        assert data((await read_again(other, name))[1]) == WHOLE


@pytest.mark.process
async def test_a_stream_is_stopped_from_any_router(tmp_path: Path) -> None:
    async with sites("ams1") as fakes, two_routers(fakes, tmp_path) as (one, other):
        fakes[0].behave = raw_stream(event(0), end="on command")
        response = await one.chat(headers=ALICE, **DURABLE)
        name = response.headers["x-pilotlight-stream"]
        assert await response.content.readany()
        async with other.http.delete(f"{other.url}/streams/{name}", headers=ALICE) as stopped:
            assert stopped.status == 204
        async with asyncio.timeout(60):
            await one.until(lambda: not os.listdir(tmp_path))
        fakes[0].go_on.set()
        assert b'"aborted"' in await response.read()
        for running in (one, other):
            assert (await read_again(running, name))[0] == 404


@pytest.mark.process
async def test_an_answer_that_cannot_be_made_again_ends_with_its_router(tmp_path: Path) -> None:
    async with sites("ams1") as fakes, two_routers(fakes, tmp_path) as (one, other):
        fakes[0].behave = raw_stream(event(0), end="hang")  # events without resume points
        response = await one.chat(headers=ALICE, **DURABLE)
        name = response.headers["x-pilotlight-stream"]
        assert await response.content.readany()
        await one.proxy.drain(0.0)
        status, body = await read_again(other, name)
        assert (status, data(body)[: len(event(0))]) == (200, event(0))
        assert b'"upstream_lost"' in body
        assert len(fakes[0].seen) == 1


@pytest.mark.process
async def test_a_disk_that_is_full_costs_the_journal_and_not_the_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sites("ams1") as fakes, two_routers(fakes, tmp_path) as (one, other):
        fakes[0].behave = continued_stream(6)
        with files_of_at_most(600):
            async with one.chat(headers=ALICE, **DURABLE) as response:
                name, body = response.headers["x-pilotlight-stream"], await response.read()
        assert data(body) == WHOLE
        assert os.strerror(errno.EFBIG) in caplog.text
        assert (await read_again(one, name))[1] == body
        while os.listdir(tmp_path):  # a thread deletes the file
            await asyncio.sleep(0.01)
        assert (await read_again(other, name))[0] == 404


async def test_a_journal_that_cannot_be_started_leaves_no_file(tmp_path: Path) -> None:
    journals = Journals(tmp_path)
    with files_of_at_most(7):
        assert await journals.begin(NAME, ASKED) is None
    assert os.listdir(tmp_path) == []
    made = await journals.begin(NAME, ASKED)
    assert made is not None
    made.release()
    journals.close()


def of_another_version() -> bytes:
    entry = b'["Later", 1]'
    return struct.pack("!II", len(entry), zlib.crc32(entry)) + entry


async def test_a_journal_of_another_version_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(of_another_version())
    journals = Journals(tmp_path)
    with pytest.raises(OSError, match="was written by another version"):
        journals.parts(NAME)
    journals.close()


async def never_done(recording: DurableStream) -> None:
    raise AssertionError


async def test_a_journal_that_cannot_be_read_costs_only_its_readers_the_stream(tmp_path: Path) -> None:
    streams = DurableStreams(DurableConfig(directory=str(tmp_path)), Clock())
    (tmp_path / NAME).write_bytes(of_another_version())
    with pytest.raises(ApiError, match="there is no such stream"):
        await streams.find(NAME, Head("GET", "/", "/", []), ASKED.tenant, never_done)
    request = MeteredRequest("a.1", "q", "", "", "ember", 1.0, f"{NAME}.1")
    record = UsageRecord(request, "ams1", 1.0, "recovered", ResourceUse(7, 3, 9, 0))
    assert streams.corrected_usage(record) is record, "billed twice rather than not at all"
    await streams.close()


async def test_it_sweeps_again_after_a_sweep_that_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    swept, loop, results = asyncio.Event(), asyncio.get_running_loop(), iter([OSError("a disk that is gone"), None])

    class Failing(Journals):
        def sweep(self, keep_s: float, max_bytes: float) -> None:
            if (error := next(results, None)) is not None:
                raise error
            loop.call_soon_threadsafe(swept.set)

    journals = Failing(tmp_path)
    sweeping = asyncio.create_task(journals.run(0.0, 0.0))
    await asyncio.wait_for(swept.wait(), 60)
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
    assert "a disk that is gone" in caplog.text
    journals.close()


@pytest.mark.parametrize("fault", ["full memory", "an impossible point", "a caller that leaves"])
async def test_a_stream_that_could_not_be_taken_over_is_left_to_the_next_that_asks(tmp_path: Path, fault: str) -> None:
    journals = Journals(tmp_path)
    journal = await journals.begin(NAME, ASKED)
    assert journal is not None
    ended = ResumePoint(0, (100,), "stop")
    written = JournalEvents(
        event(0), (ended, ResumePoint(0, (101,), None)) if fault == "an impossible point" else (ended,)
    )
    await journal.keep(AnswerStarted(200, (), None), written)
    journal.release()
    journals.close()
    before = set(os.listdir("/proc/self/fd"))
    config = DurableConfig(directory=str(tmp_path), max_total_mib=0 if fault == "full memory" else 1)
    streams, head = DurableStreams(config, Clock()), Head("GET", "/", "/", [])
    for _ in range(3):
        asking = asyncio.create_task(streams.find(NAME, head, ASKED.tenant, never_done))
        if fault == "a caller that leaves":
            await asyncio.sleep(0)
            asking.cancel()
        with pytest.raises((ApiError, asyncio.CancelledError)) as refused:
            await asking
        assert fault != "full memory" or cast("ApiError", refused.value).word == "overloaded"
    other = Journals(tmp_path)
    found = await other.find(NAME)
    assert found is not None

    async def is_free() -> bool:
        await found.read()
        return found.is_ours

    await eventually(is_free)
    found.release()
    other.close()
    await streams.close()
    await eventually(lambda: set(os.listdir("/proc/self/fd")) <= before)


def test_a_journal_that_cannot_be_deleted_keeps_no_other_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journals = Journals(tmp_path, lambda: 2e9)
    names = ["0" * 32, "1" * 32, "2" * 32]
    for name in names:
        (tmp_path / name).write_bytes(b"")

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event == "fcntl.flock" and Path(os.readlink(f"/proc/self/fd/{arguments[0]}")).name == names[0]:
            raise OSError("a lock that the disk does not give")

    before = len(os.listdir("/proc/self/fd"))
    with observed_calls(refuse):
        journals.sweep(1.0, 1e9)
    assert [path.name for path in tmp_path.iterdir()] == [names[0]]
    assert len(os.listdir("/proc/self/fd")) == before
    assert "a lock that the disk does not give" in caplog.text
    journals.close()


def test_a_folder_of_journals_needs_the_networks_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for secret, folder, complaint in (
        (SECRET, "file", r"durable\.directory"),
        ("", "streams", "PILOTLIGHT_HOP_SECRET"),
    ):
        monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", secret)
        with pytest.raises(ConfigError, match=complaint):
            build_app(network({"ams1": "http://127.0.0.1:9"}, durable={"directory": str(tmp_path / folder)}))


async def test_a_killed_router_is_billed_for_delivered_tokens_and_no_more(tmp_path: Path) -> None:
    streams = DurableStreams(DurableConfig(directory=str(tmp_path)), Clock())
    assert streams.journals is not None
    journal = await streams.journals.begin(NAME, ASKED)
    assert journal is not None
    await journal.keep(JournalEvents(event(0), points(100, 101)), TakenOver(), JournalEvents(event(1), points(102)))

    def left_by(part: str) -> UsageRecord:
        request = MeteredRequest("a.1", "q", "", "", "ember", 1.0, part)
        return UsageRecord(request, "ams1", 1.0, "recovered", ResourceUse(7, 3, 9, 0))

    assert streams.corrected_usage(left_by(f"{NAME}.1")).use == ResourceUse(7, 3, 2, 0)
    assert streams.corrected_usage(left_by(f"{NAME}.2")).use == ResourceUse(0, 0, 1, 0)
    for part in ("", f"{'0' * 32}.1"):  # no durable stream, and an expired one
        assert streams.corrected_usage(left_by(part)).use == ResourceUse(7, 3, 9, 0)
    await streams.close()


async def used(http: aiohttp.ClientSession, url: str) -> ResourceUse:
    async with http.get(f"{url}/usage") as response:
        rows = (await response.json())["usage"]
    return ResourceUse(*(sum(row[f"{name}_tokens"] for row in rows) for name in ResourceUse._fields[:4]))


@pytest.mark.process
async def test_kill_9_of_a_router_costs_its_durable_streams_nothing(tmp_path: Path) -> None:
    async with sites("ams1") as fakes, aiohttp.ClientSession() as http:
        files = []
        for name in ("a", "b"):
            folder = tmp_path / name
            folder.mkdir()
            extra = f'[durable]\ndirectory = "{tmp_path}/streams"\n[ledger]\ndirectory = "{folder}/ledger"\n'
            files.append(network_file(folder, fakes[0].url, extra=extra))
        async with process(files[1]) as (_, other):
            async with process(files[0]) as (one, url):
                await ready(http, url)
                await ready(http, other)
                running = Router(url, None, http, None, None)
                name, ids = await interrupted(running, fakes[0])
                fakes[0].behave = continued_stream(6)
                elsewhere = Router(other, None, http, None, None)
                one.send_signal(signal.SIGSTOP)
                reading = asyncio.create_task(read_again(elsewhere, name, ids[-1]))
                await asyncio.sleep(0.3)  # time to read the journal three times, while its router may still continue
                assert (len(fakes[0].seen), reading.done()) == (1, False)
                one.kill()
                await one.wait()
            status, rest = await reading
            assert (status, data(rest)) == (200, WHOLE.removeprefix(b"".join(event(i) for i in range(3))))
            whole = await read_again(elsewhere, name)
            assert data(whole[1]) == WHOLE
            assert [each.event_id for each in events(whole[1])][:3] == ids
            assert len(fakes[0].seen) == 2
            assert await used(http, other) == ResourceUse(0, 0, 3, 1)
            async with process(files[0]) as (_, url):
                assert await read_again(Router(url, None, http, None, None), name) == whole
                assert await used(http, url) == ResourceUse(7, 3, 3, 0)
