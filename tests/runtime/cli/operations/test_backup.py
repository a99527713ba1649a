"""Backups of a running system: the copy is consistent and has every write that was acknowledged before the backup started."""

import os
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from load_tests.scenarios.backup import is_right, measure
from pilotlight.functions.bindings.secrets.secret_store import SecretStore
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.operations.backup import backup, restore
from pilotlight.runtime.cli.operations.snapshots import BackupFolder
from pilotlight.runtime.cli.operations.state_roots import StateRoot, load_files, state_roots
from pilotlight.support.directory_locks import alone_in
from tests.full_disk import files_of_at_most
from tests.waiting import until

PLACE = '{city = "Amsterdam", latitude = 52.31, longitude = 4.76}'
pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.mark.network
def test_what_was_acknowledged_before_the_mark_is_there_elsewhere_and_nothing_is_torn() -> None:
    results = measure(num_writes=150)
    assert is_right(results), results
    assert min(results["acknowledged_before_the_mark"].values()) > 0


class Bucket:
    """A bucket's index and files. A thread replaces one of its objects as fast as it can."""

    def __init__(self, root: Path) -> None:
        self.path = root / "bindings" / "r2" / "bucket"
        self.path.mkdir(parents=True)
        self._count, self._stop, self._thread = 0, threading.Event(), threading.Thread(target=self._run)
        with closing(self._opened()) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("CREATE TABLE objects (key TEXT PRIMARY KEY, version TEXT)")
            connection.execute("CREATE TABLE parts (version TEXT)")
            self.replace(connection)

    def replace(self, connection: sqlite3.Connection) -> None:
        self._count += 1
        new, old = self._file(f"{self._count:08}"), self._file(f"{self._count - 1:08}")
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(new.name)
        connection.execute("INSERT OR REPLACE INTO objects VALUES ('key', ?)", (new.name,))
        old.unlink(missing_ok=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with closing(self._opened()) as connection:
            while not self._stop.is_set():
                self.replace(connection)

    def _file(self, version: str) -> Path:
        return self.path / "files" / version[:2] / version

    def _opened(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path / "index.sqlite", isolation_level=None, timeout=60)


def test_an_object_that_is_replaced_all_the_time_is_there_as_its_index_names_it(tmp_path: Path) -> None:
    with Bucket(tmp_path / "state"):
        for _ in range(10):
            backup(tmp_path / "backups", [StateRoot("ams1/state", tmp_path / "state")], None)
    restore(tmp_path / "backups", [StateRoot("ams1/state", tmp_path / "restored")], None)
    bucket = tmp_path / "restored" / "bindings" / "r2" / "bucket"
    with closing(sqlite3.connect(bucket / "index.sqlite")) as connection:
        ((version,),) = connection.execute("SELECT version FROM objects").fetchall()
    assert (bucket / "files" / version[:2] / version).read_text() == version


@pytest.mark.parametrize("journal_mode", ["DELETE", "WAL", "BROKEN"])
def test_an_object_or_a_functions_file_may_be_a_database_itself(journal_mode: str, tmp_path: Path) -> None:
    Bucket(tmp_path / "state")
    (file,) = (tmp_path / "state").rglob("files/*/*")
    file.unlink()
    asset = tmp_path / "state" / "deployed" / "digest" / "cities.sqlite"
    asset.parent.mkdir(parents=True)
    if journal_mode == "BROKEN":
        file.write_bytes(b"SQLite format 3\0 and nothing else")
    else:
        with closing(sqlite3.connect(file)) as connection:
            connection.execute(f"PRAGMA journal_mode = {journal_mode}")
            connection.execute("CREATE TABLE a (b)")
    content = file.read_bytes()
    asset.write_bytes(content)
    backup(tmp_path / "backups", [StateRoot("ams1/state", tmp_path / "state")], None)
    restore(tmp_path / "backups", [StateRoot("ams1/state", tmp_path / "restored")], None)
    found = [path.read_bytes() for path in (file, asset, *(tmp_path / "restored").rglob("files/*/*"))]
    found.append((tmp_path / "restored" / "deployed" / "digest" / "cities.sqlite").read_bytes())
    assert found == [content] * 4


def test_an_object_whose_file_is_lost_is_named(tmp_path: Path) -> None:
    Bucket(tmp_path / "state")
    (file,) = (tmp_path / "state").rglob("files/*/*")
    file.unlink()
    with pytest.raises(CliError, match=rf"names {file}, which is not there"):
        backup(tmp_path / "backups", [StateRoot("ams1/state", tmp_path / "state")], None)


@pytest.fixture
def state(tmp_path: Path) -> StateRoot:
    root = tmp_path / "state"
    (root / "bindings").mkdir(parents=True)
    (root / "bindings" / "blob").write_bytes(os.urandom(3 << 20))
    (root / "bindings" / "key").write_bytes(b"secret")
    (root / "bindings" / "key").chmod(0o600)
    (root / "scratch").mkdir()
    (root / "scratch" / "rubbish").touch()
    return StateRoot("ams1/state", root, ("scratch",))


def elsewhere(root: StateRoot, folder: Path) -> StateRoot:
    return root._replace(path=folder)


def chunks(folder: Path) -> int:
    return sum(1 for _ in (folder / "chunks").glob("*/*"))


def test_files_come_back_as_they_were_without_what_a_start_makes_again(state: StateRoot, tmp_path: Path) -> None:
    backup(tmp_path / "backups", [state], None)
    restore(tmp_path / "backups", [elsewhere(state, tmp_path / "new")], None)
    found = {path.relative_to(tmp_path / "new").as_posix() for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert found == {"bindings/blob", "bindings/key"}
    assert (tmp_path / "new/bindings/blob").read_bytes() == (state.path / "bindings/blob").read_bytes()
    assert (tmp_path / "new/bindings/key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "backups/snapshots").stat().st_mode & 0o077 == 0


def test_code_of_functions_can_be_read_by_isolates_of_another_user_and_data_cannot(
    state: StateRoot, tmp_path: Path
) -> None:
    for file in ("deployed/abc/src/entry.py", "bindings/kv/counts/entries.sqlite"):
        path = state.path / file
        path.parent.mkdir(parents=True)
        path.touch(mode=0o644)
    backup(tmp_path / "backups", [state], None)
    restore(tmp_path / "backups", [elsewhere(state, tmp_path / "new")], None)

    def mode(folder: str) -> int:
        return (tmp_path / "new" / folder).stat().st_mode & 0o777

    assert [mode(each) for each in ("", "deployed", "deployed/abc", "deployed/abc/src")] == [0o711, *[0o755] * 3]
    assert [mode(each) for each in ("bindings", "bindings/kv", "bindings/kv/counts")] == [0o700] * 3


def test_a_second_backup_stores_what_has_changed(state: StateRoot, tmp_path: Path) -> None:
    backup(tmp_path / "backups", [state], None)
    before = chunks(tmp_path / "backups")
    with open(state.path / "bindings" / "blob", "r+b") as blob:
        blob.write(b"changed")
    assert backup(tmp_path / "backups", [state], None).endswith("2 files of 3.0 MiB, 1.0 MiB of them new.")
    assert chunks(tmp_path / "backups") == before + 1
    assert len(BackupFolder(tmp_path / "backups").names()) == 2


def test_the_oldest_backups_go_with_what_they_alone_have(state: StateRoot, tmp_path: Path) -> None:
    for _ in range(3):
        (state.path / "bindings" / "blob").write_bytes(os.urandom(1 << 20))
        backup(tmp_path / "backups", [state], 1)
    assert len(BackupFolder(tmp_path / "backups").names()) == 1
    assert chunks(tmp_path / "backups") == 2
    restore(tmp_path / "backups", [elsewhere(state, tmp_path / "new")], None)


def test_what_cannot_be_restored_is_said_before_anything_is_written(state: StateRoot, tmp_path: Path) -> None:
    folder, new = tmp_path / "backups", tmp_path / "new"
    with pytest.raises(CliError, match="holds no snapshot"):
        restore(folder, [state], None)
    backup(folder, [state], None)
    with pytest.raises(CliError, match=r"is not empty \(bindings\): move it away"):
        restore(folder, [state], None)
    with pytest.raises(CliError, match=r"the snapshot has ams1/state, but this machine's files name iad1/state"):
        restore(folder, [StateRoot("iad1/state", new)], None)
    with pytest.raises(CliError, match="holds no snapshot yesterday; it has 2"):
        restore(folder, [elsewhere(state, new)], "yesterday")
    next(iter((folder / "chunks").glob("*/*"))).unlink()
    with pytest.raises(CliError, match=r"cannot be restored: chunk .* is missing"):
        restore(folder, [elsewhere(state, new)], None)
    assert not [*new.iterdir()]


def test_secrets_are_restored_with_the_key_that_encrypted_them(state: StateRoot, tmp_path: Path) -> None:
    store = SecretStore(state.path)
    store.put("hello", "TOKEN", "s3cret")
    backup(tmp_path / "backups", [state], None)
    list(store.rotate_key())
    restore(tmp_path / "backups", [elsewhere(state, tmp_path / "older")], None)
    assert SecretStore(tmp_path / "older").values("hello") == {"TOKEN": "s3cret"}


def is_awaited(folder: Path) -> bool:
    """Tell whether something waits for the lock of a folder."""
    inode = f":{folder.stat().st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_a_backup_waits_until_the_key_of_secrets_is_replaced(state: StateRoot, tmp_path: Path) -> None:
    store = SecretStore(state.path)
    for function in ("hello", "other"):
        store.put(function, "TOKEN", "s3cret")
    rotation = store.rotate_key()
    next(rotation)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(backup, tmp_path / "backups", [state], None)
        until(lambda: waiting.done() or is_awaited(store.directory), "the backup waits")
        assert not waiting.done()
        list(rotation)
        waiting.result()
    restore(tmp_path / "backups", [elsewhere(state, tmp_path / "new")], None)
    for function in ("hello", "other"):
        assert SecretStore(tmp_path / "new").values(function) == {"TOKEN": "s3cret"}


def test_a_damaged_chunk_is_never_accepted(state: StateRoot, tmp_path: Path) -> None:
    backup(tmp_path / "backups", [state], None)
    first, second = sorted((tmp_path / "backups/chunks").glob("*/*"))[:2]
    shutil.copy(first, second)
    with pytest.raises(CliError, match="is damaged"):
        restore(tmp_path / "backups", [elsewhere(state, tmp_path / "new")], None)


def test_a_full_disk_is_named_and_the_next_backup_or_restoration_is_whole(state: StateRoot, tmp_path: Path) -> None:
    backups, new = tmp_path / "backups", tmp_path / "new"
    with files_of_at_most(100), pytest.raises(CliError, match=r"the backup was not made: .*File too large"):
        backup(backups, [state], None)
    backup(backups, [state], None)
    (backups / "snapshots" / next(iter(os.listdir(backups / "snapshots")))).unlink()
    with files_of_at_most(100), pytest.raises(CliError, match=r"the backup was not made: .*File too large"):
        backup(backups, [state], None)  # all chunks are there: only the entry of the snapshot is written
    backup(backups, [state], None)
    with files_of_at_most(100), pytest.raises(CliError, match=r"new is incomplete, remove it and restore again"):
        restore(backups, [elsewhere(state, new)], None)
    shutil.rmtree(new)
    restore(backups, [elsewhere(state, new)], None)
    assert (new / "bindings/blob").read_bytes() == (state.path / "bindings/blob").read_bytes()


def test_state_of_a_site_that_runs_is_not_written_over(state: StateRoot, tmp_path: Path) -> None:
    backup(tmp_path / "backups", [state], None)
    (tmp_path / "new").mkdir()
    with alone_in(tmp_path / "new"), pytest.raises(CliError, match=r"a site serves from .*: stop it first"):
        restore(tmp_path / "backups", [elsewhere(state, tmp_path / "new")], None)


def test_a_backup_of_a_later_format_is_refused_by_its_version(state: StateRoot, tmp_path: Path) -> None:
    backup(tmp_path / "backups", [state], None)
    (path,) = (tmp_path / "backups/snapshots").glob("*.json")
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CliError, match="whose backups this version cannot read"):
        restore(tmp_path / "backups", [elsewhere(state, tmp_path / "new")], None)


def test_a_router_and_sites_name_all_that_outlives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    network = tmp_path / "network.toml"
    network.write_text(
        f'place = {PLACE}\nlisten = {{port = 1}}\nledger = {{directory = "{tmp_path}/ledger"}}\n'
        f'[[sites]]\nname = "ams1"\nurl = "http://127.0.0.1:1"\nplace = {PLACE}\n'
    )
    site = tmp_path / "ams1.toml"
    site.write_text(
        f'name = "ams1"\nplace = {PLACE}\nlisten = {{port = 1}}\nfinetunes = {{directory = "{tmp_path}/tunes"}}\n'
        f'[[models]]\nname = "ember"\nsource = "embedded:ember"\nadapters_dir = "{tmp_path}/adapters"\n'
    )
    roots = {root.name: root.path for root in state_roots(*load_files(network, [site]))}
    assert roots == {
        "router/deployments": tmp_path / "pilotlight/router",
        "router/ledger": tmp_path / "ledger",
        "router/responses": tmp_path / "pilotlight/router-1",
        "ams1/state": tmp_path / "pilotlight/ams1",  # includes the stored responses
        "ams1/finetunes": tmp_path / "tunes/ams1",
        "ams1/adapters/ember": tmp_path / "adapters",
    }
