"""Point-in-time recovery of Durable Objects: bookmarks, restorations, SIGKILL, a full disk, and few files."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.bindings.objects.durable_objects import ObjectStorage
from pilotlight.functions.bindings.objects.object_file import ObjectFile
from pilotlight.functions.bindings.objects.object_history import BOOKMARK
from pilotlight.functions.bindings.objects.object_migrations import ObjectMigrations
from pilotlight.functions.bindings.storage.wal_archive import HistoryError
from pilotlight.functions.manifest import Manifest
from pilotlight.functions.manifest_tables import Migration, Renamed
from pilotlight.runtime.cli.operations.backup import backup, restore
from pilotlight.runtime.cli.operations.state_roots import StateRoot
from pilotlight.support.database import DatabaseError, Databases

DAYS_S = 7 * 24 * 3600.0
ID = "0" * 64


def put(file: ObjectFile, value: Any) -> str:
    file.put({"key": msgspec.msgpack.encode(value)})
    file.commit()
    return file.current_bookmark()


def value(file: ObjectFile) -> Any:
    return file.get(["key"]).get("key")


def restored(file: ObjectFile, bookmark: str) -> str:
    """Restore a bookmark as the object's next instance would; return the bookmark that undoes it."""
    undo = file.restore_next(bookmark)
    assert file.start()
    file.forget_restoration()
    return undo


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "object.sqlite"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[..., ObjectFile]]:
    files: list[ObjectFile] = []

    def make(at: Path = path) -> ObjectFile:
        files.append(ObjectFile(at, 64 << 20, DAYS_S))
        return files[-1]

    yield make
    for file in files:
        file.close()


def test_each_bookmark_is_restored_across_opens_and_checkpoints_and_a_restoration_is_undone(path: Path) -> None:
    marks = {}
    for number in range(24):
        with closing(ObjectFile(path, 64 << 20, DAYS_S)) as file:
            marks[number] = put(file, [number, "x" * 60_000])  # every fifth close checkpoints
    assert list(marks.values()) == sorted(marks.values())
    with closing(ObjectFile(path, 64 << 20, DAYS_S)) as file:
        for number in (3, 20, 0, 11, 23):
            before = value(file)
            undo = restored(file, marks[number])
            assert value(file)[0] == number
            redo = restored(file, undo)
            assert value(file) == before
            restored(file, redo)
            assert value(file)[0] == number


def test_what_is_written_after_the_order_is_restored_by_its_undo(opened: Callable[..., ObjectFile]) -> None:
    file = opened()
    first = put(file, 1)
    put(file, 2)
    undo = file.restore_next(first)
    put(file, 3)
    assert file.start()
    file.forget_restoration()
    assert not file.start()
    assert value(file) == 1
    restored(file, undo)
    assert value(file) == 3


def test_a_time_is_the_last_commit_before_it(path: Path) -> None:
    now_s = 1000.0
    with closing(ObjectFile(path, 1 << 20, DAYS_S, lambda: now_s)) as file:
        for _ in range(5):
            now_s += 1.0
            put(file, now_s)
        with pytest.raises(HistoryError, match="does not reach back"):
            file.bookmark_at(999.0)
        with pytest.raises(HistoryError, match="future"):
            file.bookmark_at(1006.0)
        for at_s in (1001.0, 1002.9, 1005.0):
            now_s += 1.0  # a restoration is a commit of its time
            restored(file, file.bookmark_at(at_s))
            assert value(file) == int(at_s)


def test_bookmarks_that_are_not_the_objects_own_are_refused(tmp_path: Path, opened: Callable[..., ObjectFile]) -> None:
    file, other = opened(), opened(tmp_path / "other.sqlite")
    mark = put(file, 1)
    assert BOOKMARK.fullmatch(mark)
    number, offset, id = mark.split("-")
    for text, sentence in {
        "": "is not a bookmark",
        "yesterday": "is not a bookmark",
        f"{mark}\n": "is not a bookmark",
        f"{number}-{offset}-{'0' * 16}": "belongs to another object",
        put(other, 1): "belongs to another object",
        f"00000000-{offset}-{id}": "does not reach back",
        f"{'f' * 12}-{offset}-{id}": "later than the object's last write",
        file.restore_next(mark): "later than the object's last write",
    }.items():
        with pytest.raises(HistoryError, match=sentence):
            file.restore_next(text)


def test_without_days_there_is_no_history(path: Path) -> None:
    with closing(ObjectFile(path, 1 << 20)) as file:
        with pytest.raises(HistoryError, match="history_days"):
            put(file, 1)
        assert not file.start()
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_an_object_that_is_only_read_has_no_history_and_one_that_is_opened_often_few_files(path: Path) -> None:
    for _ in range(3):
        with closing(ObjectFile(path, 1 << 20, DAYS_S)) as file:
            assert value(file) is None
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    for number in range(30):
        with closing(ObjectFile(path, 1 << 20, DAYS_S)) as file:
            file.put({"key": msgspec.msgpack.encode(number)})
            file.commit()
    assert sorted(each.name for each in path.parent.rglob("*") if each.is_file()) == [
        "00000001.times", "object.sqlite", "object.sqlite-wal", "stamp",
    ]  # fmt: skip


def test_a_file_from_before_the_history_can_be_restored_to_what_it_was(
    path: Path, opened: Callable[..., ObjectFile]
) -> None:
    with closing(ObjectFile(path, 1 << 20)) as file:
        file.put({"key": msgspec.msgpack.encode("old")})
        file.commit()
    at_s = path.stat().st_mtime
    file = opened()
    put(file, "new")
    restored(file, file.bookmark_at(at_s))
    assert value(file) == "old"


def test_an_object_that_was_empty_before_its_first_write_is_restored_to_that(path: Path) -> None:
    now_s = path.parent.stat().st_mtime
    with closing(ObjectFile(path, 1 << 20, DAYS_S, lambda: now_s)) as file:
        empty_s = now_s = now_s + 60.0  # an instance that has only read for a while
        now_s += 60.0
        put(file, 1)
        now_s += 60.0
        undo = restored(file, file.bookmark_at(empty_s))
        assert value(file) is None
        assert file.alarm() is None
        put(file, 2)
        restored(file, undo)
        assert value(file) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_delete_all_in_a_transaction_that_is_rolled_back_leaves_the_history(
    opened: Callable[..., ObjectFile], depth: int
) -> None:
    file = opened()
    mark = put(file, 1)
    put(file, 2)
    for _ in range(depth):
        file.begin()
    file.delete_all()
    for _ in range(depth - 1):
        file.end(keep=True)
    file.end(keep=False)
    put(file, 3)
    restored(file, mark)
    assert value(file) == 1


def test_delete_all_in_a_transaction_that_is_kept_deletes_the_history(opened: Callable[..., ObjectFile]) -> None:
    file = opened()
    mark = put(file, 1)
    file.begin()
    file.delete_all()
    file.begin()
    file.end(keep=False)
    file.end(keep=True)
    put(file, 2)
    with pytest.raises(HistoryError, match="before deleteAll"):
        file.restore_next(mark)


def test_delete_all_deletes_the_history_unless_it_is_rolled_back(path: Path, opened: Callable[..., ObjectFile]) -> None:
    file = opened()
    mark = put(file, 1)
    file.delete_all()
    file.rollback()
    restored(file, mark)
    file.delete_all()
    file.commit()
    assert not path.with_suffix(".history").exists()
    assert Path(f"{path}-wal").stat().st_size == 0
    put(file, 2)
    with pytest.raises(HistoryError, match="before deleteAll"):
        file.restore_next(mark)
    assert value(file) == 2


def test_a_disk_that_cannot_be_written_costs_the_history_and_no_data(path: Path) -> None:
    obstacle = path.with_suffix(".history") / "00000001.part"  # a folder prevents the file
    with closing(ObjectFile(path, 64 << 20, DAYS_S)) as file:
        mark = put(file, 1)
        obstacle.mkdir()
        for number in range(5):
            file.put({f"k{number}": b"\xc0", "big": msgspec.msgpack.encode(str(number) * 1_900_000)})
            file.commit()
        assert sorted(file.get(["k0", "k4"])) == ["k0", "k4"]
        with pytest.raises(HistoryError, match="is not recorded"):
            file.current_bookmark()
    obstacle.rmdir()
    with closing(ObjectFile(path, 64 << 20, DAYS_S)) as file:
        assert value(file) == 1
        with pytest.raises(HistoryError, match="does not reach back"):
            file.restore_next(mark)  # its log was checkpointed without a copy
        second = put(file, 2)
        put(file, 3)
        restored(file, second)
        assert value(file) == 2


def test_a_restoration_on_a_full_disk_fails_and_is_made_later(path: Path, opened: Callable[..., ObjectFile]) -> None:
    file = opened()
    mark = put(file, 1)
    put(file, 2)
    undo = file.restore_next(mark)
    obstacle = path.with_suffix(".history") / "restored"
    obstacle.mkdir()
    with pytest.raises(DatabaseError, match="cannot be restored"):
        file.start()
    assert value(file) == 2
    obstacle.rmdir()
    assert file.start()
    file.forget_restoration()
    assert value(file) == 1
    restored(file, undo)
    assert value(file) == 2


OTHER = """
import sys
from pathlib import Path
import msgspec
from pilotlight.functions.bindings.objects.object_file import ObjectFile
from pilotlight.functions.bindings.storage.wal_archive import HistoryError
file = ObjectFile(Path(sys.argv[1]), 1 << 20, 1e6)
file.put({"other": msgspec.msgpack.encode(10)})
file.commit()
try:
    file.current_bookmark()
except HistoryError as error:
    print(error)
file.close()
"""


@pytest.mark.process
def test_a_second_process_writes_no_history_and_its_commits_are_in_it(
    path: Path, opened: Callable[..., ObjectFile]
) -> None:
    file = opened()
    put(file, 1)
    done = subprocess.run([sys.executable, "-c", OTHER, str(path)], capture_output=True, text=True, check=True)
    assert "another process has the object" in done.stdout
    both = put(file, 2)
    file.delete(["other", "key"])
    file.commit()
    restored(file, both)
    assert file.get(["key", "other"]) == {"key": 2, "other": 10}


DIES = """
import os, signal, sys
from pathlib import Path
from pilotlight.functions.bindings.objects import object_history
from pilotlight.functions.bindings.objects.object_file import ObjectFile
from pilotlight.functions.bindings.objects.object_history import ObjectHistory
from pilotlight.functions.bindings.storage.wal_archive import WalArchive

def dies_in(owner, name, is_after):
    work = getattr(owner, name)
    def dying(*args, **kwargs):
        if is_after:
            work(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, dying)

path, place, is_after = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "after"
file = ObjectFile(path, 64 << 20, 1e6)
if place == "backup":
    connection = type("C", (object_history.sqlite3.Connection,), {})
    dies_in(connection, "backup", is_after)
    connect = object_history.sqlite3.connect
    object_history.sqlite3.connect = lambda *args, **given: connect(*args, factory=connection, **given)
elif place == "forget_restoration":
    dies_in(ObjectHistory, place, is_after)
else:
    dies_in(WalArchive, place, is_after)
file.start()
file.forget_restoration()
"""


@pytest.mark.process
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["build", "restart_at", "_checkpoint", "backup", "committed", "forget_restoration"])
def test_a_process_that_is_killed_while_it_restores_leaves_the_old_content_or_the_restored_one(
    path: Path, opened: Callable[..., ObjectFile], place: str, when: str
) -> None:
    with closing(ObjectFile(path, 64 << 20, DAYS_S)) as file:
        first = put(file, "first")
        put(file, "x" * 100_000)
        put(file, "last")
        undo = file.restore_next(first)
    died = subprocess.run([sys.executable, "-c", DIES, str(path), place, when], check=False)
    assert died.returncode == -9
    file = opened()
    assert value(file) in ("first", "last")
    if (place, when) != ("forget_restoration", "after"):
        assert file.start()
        file.forget_restoration()
    assert value(file) == "first"
    restored(file, undo)
    assert value(file) == "last"


async def test_an_alarm_is_restored_with_the_content(tmp_path: Path) -> None:
    services = Services(databases=Databases(), functions=object(), max_bytes=1 << 20)
    binding = ObjectStorage.of(Manifest("f", tmp_path, tmp_path / "entry.py"), tmp_path, services)
    who: dict[str, Any] = {"class_name": "Counter", "id": ID}

    async def call(method: str, **kwargs: Any) -> Any:
        return await binding.call(method, [], {**who, **kwargs})

    try:
        who["instance"] = await binding.call("start", [], dict(who))
        at_ms = int(time.time() * 1000) + 3_600_000
        await call("set_alarm", at_ms=at_ms)
        await call("commit")
        mark = await call("current_bookmark")
        await call("delete_alarm")
        await call("commit")
        undo = await call("restore_next", bookmark=mark)
        del who["instance"]
        who["instance"] = await binding.call("start", [], dict(who))
        assert await call("get_alarm") == at_ms
        await call("restore_next", bookmark=undo)
        del who["instance"]
        who["instance"] = await binding.call("start", [], dict(who))
        assert await call("get_alarm") is None
    finally:
        await services.databases.close()


def test_a_history_moves_with_its_class_and_is_deleted_with_it(tmp_path: Path) -> None:
    old, new = (tmp_path / name / "00" / f"{ID}.sqlite" for name in ("Old", "New"))
    with closing(ObjectFile(old, 1 << 20, DAYS_S)) as file:
        mark = put(file, 1)
        put(file, 2)
    migration = Migration(tag="v2", renamed_classes=(Renamed(from_="Old", to="New"),))
    ObjectMigrations(tmp_path, [migration], ["New"]).move(migration)
    with closing(ObjectFile(new, 1 << 20, DAYS_S)) as file:
        restored(file, mark)
        assert value(file) == 1
    deletion = Migration(tag="v3", deleted_classes=("New",))
    ObjectMigrations(tmp_path, [deletion], []).move(deletion)
    assert not list(tmp_path.rglob("*.history"))


@pytest.mark.process
@pytest.mark.long
def test_a_backup_has_the_content_of_an_object_and_leaves_its_history_alone(
    tmp_path: Path, opened: Callable[..., ObjectFile]
) -> None:
    place = Path("bindings/durable_object/f/Counter/00") / f"{ID}.sqlite"
    state, new = tmp_path / "state", tmp_path / "new"
    with closing(ObjectFile(state / place, 1 << 20, DAYS_S)) as file:
        mark = put(file, 1)
        put(file, 2)
    backup(tmp_path / "backups", [StateRoot("ams1/state", state)], None)
    restore(tmp_path / "backups", [StateRoot("ams1/state", new)], None)
    assert [each.name for each in new.rglob("*") if each.is_file()] == [place.name]
    assert value(opened(new / place)) == 2
    file = opened(state / place)
    restored(file, mark)
    assert value(file) == 1
