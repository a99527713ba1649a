"""The history of a database: any second of it can be rebuilt, even if its writers are killed or compete."""

import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pilotlight.functions.bindings.storage.wal_archive import Bookmark, HistoryError, WalArchive, WalHistory
from tests.audit_events import observed_calls

DAY_S = 24 * 3600.0


class Owner:
    """A connection and its archive, with a clock that moves only on demand."""

    def __init__(
        self, path: Path, segment_bytes: int = 16_384, kept_s: float = 7 * DAY_S, *, is_lazy: bool = False
    ) -> None:
        self.path, self.now_s = path, 1000.0
        self._segment_bytes, self._kept_s, self._is_lazy = segment_bytes, kept_s, is_lazy
        self.open()

    def open(self) -> None:
        self.connection = sqlite3.connect(self.path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.archive = WalArchive(
            self.path, self._kept_s, lambda: self.now_s, self._segment_bytes, is_lazy=self._is_lazy
        )
        self.archive.attach(self.connection)

    def run(self, *statements: str, after_s: float = 1.0) -> Bookmark:
        """Advance the clock, then run statements in one transaction; return the new bookmark."""
        self.now_s += after_s
        self.connection.execute("BEGIN")
        for statement in statements:
            self.connection.execute(statement)
        self.connection.execute("COMMIT")
        self.archive.committed(self.connection)
        return WalHistory(self.path).now()

    def close(self) -> None:
        self.archive.close(self.connection)
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as last:
            if self._is_lazy:
                last.execute(
                    "SELECT 1 FROM sqlite_master"
                ).fetchone()  # the WAL stays, because this connection is the last
            self.connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "database.sqlite"


@pytest.fixture
def make(path: Path) -> Iterator[Callable[..., Owner]]:
    made: list[Owner] = []

    def owner(**given: float) -> Owner:
        made.append(Owner(path, **given))
        return made[-1]

    yield owner
    for each in made:
        each.close()


def sum_at(path: Path, bookmark: Bookmark, history: WalHistory | None = None) -> int | None:
    """Return the sum of a table's numbers at a bookmark; None if there was no table."""
    built = path.with_name("built.sqlite")
    for end in ("", "-wal", "-shm"):
        Path(f"{built}{end}").unlink(missing_ok=True)
    (history or WalHistory(path)).build(bookmark, built)
    with closing(sqlite3.connect(built)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            return None
        return int(connection.execute("SELECT coalesce(sum(n), 0) FROM t").fetchone()[0])


def test_each_commit_is_built_again_across_segments_and_bases(path: Path, make: Callable[..., Owner]) -> None:
    owner, rng, total = make(), random.Random(1), 0
    owner.run("CREATE TABLE t (n, filler)")
    moments: dict[float, tuple[Bookmark, int]] = {}
    for number in range(1, 40):
        total += number
        bookmark = owner.run(f"INSERT INTO t VALUES ({number}, zeroblob({rng.randrange(1, 20_000)}))")
        moments[owner.now_s] = bookmark, total
    history = WalHistory(path)
    assert len(list(history.folder.glob("*.wal"))) > 5
    for at_s, (bookmark, expected) in rng.sample(sorted(moments.items()), 12):
        assert sum_at(path, bookmark) == expected
        assert sum_at(path, history.at(at_s).bookmark) == sum_at(path, history.at(at_s + 0.9).bookmark) == expected


def test_of_the_commits_of_one_second_the_last_is_found_by_its_time(path: Path, make: Callable[..., Owner]) -> None:
    owner = make()
    owner.run("CREATE TABLE t (n)")
    for number in (1, 2, 3):
        owner.run(f"INSERT INTO t VALUES ({number})", after_s=0.1)
    assert sum_at(path, WalHistory(path).at(owner.now_s).bookmark) == 6
    with pytest.raises(HistoryError, match="begins at 1970-01-01T00:16:40Z"):
        WalHistory(path).at(1.0)


def test_the_history_continues_after_a_close_and_after_a_kill(path: Path, make: Callable[..., Owner]) -> None:
    owner = make()
    first = owner.run("CREATE TABLE t (n)", "INSERT INTO t VALUES (1)")
    owner.close()
    owner.open()
    second = owner.run("INSERT INTO t VALUES (10)")
    killed = path.with_name("killed.sqlite")  # a copy of the files, as a killed process would leave them
    for end in ("", "-wal"):
        shutil.copy2(f"{path}{end}", f"{killed}{end}")
    shutil.copytree(path.with_suffix(".history"), killed.with_suffix(".history"))
    again = Owner(killed)
    again.now_s = owner.now_s
    third = again.run("INSERT INTO t VALUES (100)")
    assert [sum_at(killed, each) for each in (first, second, third)] == [1, 11, 111]
    again.close()
    assert [sum_at(killed, each) for each in (first, second, third)] == [1, 11, 111]
    assert len(list(killed.with_suffix(".history").glob("*.base"))) == 1, "no further base was made"


def test_what_another_program_checkpointed_begins_a_new_base_and_no_wrong_state(
    path: Path, make: Callable[..., Owner]
) -> None:
    owner = make()
    first = owner.run("CREATE TABLE t (n)", "INSERT INTO t VALUES (1)")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("INSERT INTO t VALUES (10)")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        other.execute("INSERT INTO t VALUES (100)")
        third = owner.run("INSERT INTO t VALUES (1000)")
    assert sum_at(path, third) == 1111
    with pytest.raises(HistoryError, match="gap"):
        sum_at(path, first)
    fourth = owner.run("INSERT INTO t VALUES (10000)")
    owner.close()
    assert sum_at(path, third) == 1111
    assert sum_at(path, fourth) == 11111


def test_what_another_process_commits_between_copy_and_checkpoint_is_not_lost(
    path: Path, make: Callable[..., Owner]
) -> None:
    owner = make(segment_bytes=1 << 30)
    first = owner.run("CREATE TABLE t (n)", "INSERT INTO t VALUES (1)")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA wal_autocheckpoint = 0")

        def commits(event: str, arguments: tuple[object, ...]) -> None:
            if event == "os.rename" and str(arguments[1]).endswith(".wal"):  # the copy gets its name
                other.execute("INSERT INTO t VALUES (10)")

        with observed_calls(commits):
            owner.close()
        assert other.execute("SELECT count(*) FROM t").fetchone() == (2,), "nothing was committed meanwhile"
    owner.open()
    second = owner.run("INSERT INTO t VALUES (100)")
    assert (sum_at(path, first), sum_at(path, second)) == (1, 111)


def test_a_second_process_keeps_nothing_and_its_commits_are_in_the_history(
    path: Path, make: Callable[..., Owner]
) -> None:
    owner = make()
    owner.run("CREATE TABLE t (n)")
    other = make()
    other.run("INSERT INTO t VALUES (10)")
    both = owner.run("INSERT INTO t VALUES (1)")
    other.close()
    owner.close()
    assert sum_at(path, both) == 11


def test_what_was_rolled_back_is_in_no_moment(path: Path, make: Callable[..., Owner]) -> None:
    owner = make(segment_bytes=1 << 30)
    owner.run("CREATE TABLE t (n, filler)")
    owner.connection.execute("PRAGMA cache_size = 1")  # makes SQLite write pages before the commit
    owner.connection.execute("BEGIN")
    for number in range(1000):
        owner.connection.execute(f"INSERT INTO t VALUES ({number}, zeroblob(1000))")
    owner.connection.execute("ROLLBACK")
    owner.now_s += 1.0
    owner.archive.committed(owner.connection)
    assert sum_at(path, WalHistory(path).at(owner.now_s).bookmark) == 0
    kept = owner.run("INSERT INTO t VALUES (5, 0)")
    assert sum_at(path, kept) == sum_at(path, WalHistory(path).at(owner.now_s).bookmark) == 5


def test_moments_that_are_too_old_are_deleted_and_the_days_before_now_are_kept(
    path: Path, make: Callable[..., Owner]
) -> None:
    owner = make()
    owner.run("CREATE TABLE t (n, filler)")
    for _ in range(40):
        owner.run("INSERT INTO t VALUES (1, zeroblob(400000))", "DELETE FROM t", after_s=DAY_S)
    history = WalHistory(path)
    first = history.first()
    assert first is not None
    assert 7 * DAY_S <= owner.now_s - first.at_s < 30 * DAY_S
    assert sum_at(path, history.at(owner.now_s - 6.5 * DAY_S).bookmark) == 0


def test_a_lazy_archive_builds_each_commit_again_and_deletes_what_is_too_old(
    path: Path, make: Callable[..., Owner]
) -> None:
    owner, rng, total, marks = make(is_lazy=True), random.Random(2), 0, dict[int, tuple[Bookmark, float]]()
    owner.run("CREATE TABLE t (n, filler)")
    for number in range(40):
        total += number
        mark = owner.run(f"INSERT INTO t VALUES ({number}, zeroblob({rng.randrange(1, 9_000)}))", after_s=0.25)
        marks[total] = mark, owner.now_s
        assert sum_at(path, mark, owner.archive) == total
        if number % 9 == 5:
            owner.close()
            owner.open()
    for expected, (mark, at_s) in rng.sample(sorted(marks.items()), 12):
        assert sum_at(path, mark, owner.archive) == expected
        last = max(total for total, (_, moment_s) in marks.items() if moment_s <= at_s or int(moment_s) == int(at_s))
        assert sum_at(path, owner.archive.at(float(int(at_s)) + 0.99).bookmark, owner.archive) == last
    for _ in range(30):
        owner.run("INSERT INTO t VALUES (0, zeroblob(400000))", "DELETE FROM t WHERE n = 0", after_s=DAY_S)
    first = owner.archive.first()
    assert first is not None
    assert 7 * DAY_S <= owner.now_s - first.at_s < 30 * DAY_S
    assert sum_at(path, owner.archive.at(owner.now_s - 6.5 * DAY_S).bookmark, owner.archive) == total
    with pytest.raises(HistoryError, match="does not reach back"):
        owner.archive.check(marks[0][0])


def test_a_lazy_archive_continues_after_a_kill_and_begins_again_after_a_checkpoint_of_another_program(
    path: Path, make: Callable[..., Owner]
) -> None:
    owner = make(is_lazy=True)
    first = owner.run("CREATE TABLE t (n)", "INSERT INTO t VALUES (1)")
    killed = path.with_name("killed.sqlite")
    for end in ("", "-wal"):
        shutil.copy2(f"{path}{end}", f"{killed}{end}")
    shutil.copytree(path.with_suffix(".history"), killed.with_suffix(".history"))
    again = Owner(killed, is_lazy=True)
    second = again.run("INSERT INTO t VALUES (10)")
    assert [sum_at(killed, each, again.archive) for each in (first, second)] == [1, 11]
    again.close()
    with closing(sqlite3.connect(killed, isolation_level=None)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    again.open()
    third = again.run("INSERT INTO t VALUES (100)")
    assert sum_at(killed, third, again.archive) == 111
    with pytest.raises(HistoryError, match="does not reach back"):
        sum_at(killed, second, again.archive)
    again.close()


def test_a_bookmark_is_read_as_it_is_written() -> None:
    assert Bookmark.parse(str(Bookmark(3, 70_000))) == Bookmark(3, 70_000)
    with pytest.raises(HistoryError, match="is not a bookmark"):
        Bookmark.parse("yesterday")


def test_a_disk_that_cannot_be_written_costs_the_history_and_no_data(path: Path, make: Callable[..., Owner]) -> None:
    owner = make()
    owner.run("CREATE TABLE t (n, filler)")
    folder = WalHistory(path).folder
    away = folder.rename(folder.with_name("away"))
    folder.write_text("not a folder")
    owner.connection.execute("INSERT INTO t VALUES (1, zeroblob(100000))")
    owner.archive.committed(owner.connection)
    folder.unlink()
    away.rename(folder)
    owner.close()
    owner.open()
    kept = owner.run("INSERT INTO t VALUES (10, 0)")
    assert sum_at(path, kept) == 11


READ = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(*connection.execute("SELECT sum(n) FROM t").fetchone())
connection.close()
"""


@pytest.mark.process
def test_a_process_that_opens_and_closes_the_file_does_not_delete_its_log(
    path: Path, make: Callable[..., Owner]
) -> None:
    def read() -> str:
        return subprocess.run(
            [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=60, check=True
        ).stdout

    with closing(sqlite3.connect(path)) as before:
        before.executescript("PRAGMA journal_mode = WAL; CREATE TABLE t (n INTEGER); INSERT INTO t VALUES (1);")
    owner = make()
    assert read() == "1\n"
    owner.run("INSERT INTO t VALUES (2)")
    assert read() == "3\n"
    owner.run("INSERT INTO t VALUES (4)")
    assert read() == "7\n"
