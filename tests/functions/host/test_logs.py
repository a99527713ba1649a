"""Output of functions: lines as printed, of limited length and number, without control characters, at a limited rate."""

import asyncio
import os
from pathlib import Path

import pytest

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.host.author_reports import AuthorReports
from pilotlight.functions.host.faults import Fault, authors_frames, fault_of, manner_of
from pilotlight.functions.host.logs import KEPT_LINES, MAX_LINE, READ_BYTES, FunctionLog
from pilotlight.functions.sandbox.zygotes.control_messages import Died
from pilotlight.support.logs import printable
from tests.asgi import eventually


def log_of(kib_per_s: int = 1 << 20) -> tuple[FunctionLog, list[str]]:
    followed: list[str] = []
    return FunctionLog("f", kib_per_s, followed.append), followed


async def test_lines_come_as_they_were_printed_wherever_they_are_cut_and_the_last_needs_no_end() -> None:
    log, followed = log_of()
    for piece in (b"one\ntw", b"o\n\nthr", b"ee"):
        before = len(log.lines)
        os.write(log.write_fd, piece)
        await eventually(lambda before=before, piece=piece: len(log.lines) == before + piece.count(b"\n"))
    assert [*log.lines] == followed == ["one", "two", ""]
    os.write(log.write_fd, b"!\nlast\nhalf")
    log.close()
    log.close()
    assert followed == ["one", "two", "", "three!", "last"]
    assert log.write_fd == -1


async def test_a_line_without_an_end_is_cut_and_no_more_lines_are_kept_than_was_said() -> None:
    log, followed = log_of()
    os.write(log.write_fd, b"x" * (MAX_LINE - 1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert followed == []
    os.write(log.write_fd, b"yz" + b"\n" + b"a" * 10 + b"\n")
    await eventually(lambda: len(followed) == 2)
    assert followed == ["x" * (MAX_LINE - 1) + "y", "a" * 10]
    os.write(log.write_fd, b"".join(b"%d\n" % i for i in range(KEPT_LINES + 5)))
    await eventually(lambda: len(followed) == KEPT_LINES + 7)
    assert [log.lines[0], log.lines[-1], len(log.lines)] == ["5", str(KEPT_LINES + 4), KEPT_LINES]
    log.close()


async def test_a_line_that_never_ends_takes_no_more_memory_than_a_line() -> None:
    log, followed = log_of()
    for _ in range(3):
        os.write(log.write_fd, b"x" * READ_BYTES)
        await asyncio.sleep(0)
    await eventually(lambda: len(followed) >= 1)
    assert {len(line) for line in followed} == {MAX_LINE}
    log.close()


async def test_what_is_printed_faster_than_may_be_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    log, followed = log_of(kib_per_s=1)  # one read every four seconds
    os.write(log.write_fd, b"a\n" * READ_BYTES)
    await eventually(lambda: len(followed) > 0)
    assert len(followed) == READ_BYTES // 2
    log.close()
    assert len(followed) == READ_BYTES, "close() reads the rest"


def open_files(target: str) -> list[int]:
    files = Path("/proc/self/fd").iterdir()
    return [int(file.name) for file in files if file.is_symlink() and os.readlink(file) == target]


async def test_the_end_of_the_process_ends_the_reading() -> None:
    log, _ = log_of()
    pipe = os.readlink(f"/proc/self/fd/{log.write_fd}")
    log.close_write_end()
    log.close_write_end()
    (fd,) = open_files(pipe)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asyncio.get_running_loop().remove_reader(fd)
    log.close()


@pytest.mark.parametrize(
    ("text", "keep", "shown"),
    [
        ("plain \u00e9\u4e2d", "\t", "plain \u00e9\u4e2d"),
        ("a\tb\nc\x1b[2J", "\t", "a\tb\\nc\\x1b[2J"),
        ("a\tb\nc\r", "\n\t", "a\tb\nc\\r"),
        ("a\tb", "", "a\\tb"),
        ("\x7f\x9f\u2028\u202e\u2066", "\t", "\\x7f\\x9f\\u2028\\u202e\\u2066"),
    ],
)
def test_what_would_move_a_cursor_is_written_out(text: str, keep: str, shown: str) -> None:
    assert printable(text, keep) == shown


def test_an_author_hears_of_faults_by_their_detail_and_of_no_client_that_left() -> None:
    told: list[str] = []
    reports = AuthorReports("f", 64, told.append)
    for fault in (Fault("short", detail="long"), Fault("short"), Fault("left", code="cancelled")):
        reports.tell(fault)
    AuthorReports("f", 64).tell(Fault("nobody follows"))
    assert told == ["long", "short"]


def test_the_end_of_a_process_is_put_into_words() -> None:
    assert "for an unknown reason" in manner_of(None)
    assert "signal 9 (Killed)" in manner_of(Died(1, 9, 0.0, 0))
    assert "exit status 3" in manner_of(Died(1, 3 << 8, 0.0, 0))


def test_what_an_isolate_says_of_itself_is_a_fault_of_the_function_with_its_code() -> None:
    told = fault_of(Failure("a\nb", code="c", status=418, name="N\x1b", detail="d\n\te\x1b"))
    assert told.message == "a\\nb"
    assert told.code == "c"
    assert told.status == 500
    assert told.name == "N\\x1b"
    assert told.detail == "d\n\te\\x1b"


def test_of_each_thread_the_frames_above_the_loop_are_the_authors() -> None:
    text = "\n".join([
        "Thread 1 (most recent call first):",
        '  File "/f/src/entry.py", line 3 in work',
        '  File "/usr/lib/python3/asyncio/events.py", line 80 in _run',
        '  File "/f/src/entry.py", line 9 in never_shown',
        "",
        "Thread 2 (most recent call first):",
        '  File "/f/src/entry.py", line 5 in other',
        '  File "/site/pilotlight/functions/sandbox/zygotes/isolate_main.py", line 1 in main',
    ])  # fmt: skip
    assert authors_frames(text).splitlines() == [
        "Thread 1 (most recent call first):",
        '  File "/f/src/entry.py", line 3 in work',
        "Thread 2 (most recent call first):",
        '  File "/f/src/entry.py", line 5 in other',
    ]
