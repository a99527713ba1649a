"""Atomic files: recorded system calls show that content is synced to disk before it gets its name."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pilotlight.functions.bindings.objects.object_migrations import ObjectMigrations
from pilotlight.functions.bindings.place import name_of
from pilotlight.functions.bindings.secrets.secret_store import SecretStore
from pilotlight.functions.deployed import unpack_bundle
from pilotlight.functions.manifest_tables import Migration
from pilotlight.support import atomic_files
from pilotlight.wire.hop.bundles import pack
from tests.audit_events import observed_calls
from tests.full_disk import files_of_at_most


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the name of each synced file or folder in order, and `-> NAME` for each rename."""
    seen: list[str] = []
    fsync = os.fsync

    def recorded(fd: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def renamed(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename":
            seen.append(f"-> {Path(str(arguments[1])).name}")

    monkeypatch.setattr(os, "fsync", recorded)
    with observed_calls(renamed):
        yield seen


def test_a_folder_with_all_its_files_is_on_the_disk_before_it_has_its_name_and_the_name_after(
    synced: list[str], tmp_path: Path
) -> None:
    (made := tmp_path / "made/inner").mkdir(parents=True)
    (made / "file").write_text("text")
    (made / "link").symlink_to("nowhere")
    atomic_files.replace(tmp_path / "made", tmp_path / "whole")
    assert sorted(synced[:3]) == ["file", "inner", "made"]
    assert synced[3:] == ["-> whole", tmp_path.name]


def test_a_file_is_written_whole_or_stays_as_it_was_and_is_its_owners_alone(
    synced: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "folder" / "file"
    for data in (b"first", b"", b"\0second" * 100_000):
        atomic_files.write(path, data)
        assert path.read_bytes() == data
    assert synced[1:3] == ["-> file", "folder"]
    assert synced[0].startswith("."), "it must have another name until it is on the disk"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    with files_of_at_most(3), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        atomic_files.write(path, b"third")
    assert path.read_bytes() == b"\0second" * 100_000
    assert os.listdir(path.parent) == ["file"]


def test_a_secret_is_on_the_disk_before_it_has_its_name_and_the_name_after(synced: list[str], tmp_path: Path) -> None:
    store = SecretStore(tmp_path)
    store.put("hello", "TOKEN", "s3cret")
    assert synced[1:3] == ["-> key", "secret"]
    assert synced[-2:] == ["-> hello.sealed", "secret"]


def test_a_deployed_version_is_on_the_disk_before_it_has_its_name(synced: list[str], tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "entry.py").write_text("")
    unpack_bundle(pack(source), tmp_path / "version")
    assert synced[0] == "entry.py"
    assert synced[-2:] == ["-> version", tmp_path.name]


def test_a_migration_is_on_the_disk_before_it_counts_as_done(synced: list[str], tmp_path: Path) -> None:
    ObjectMigrations(tmp_path, (), ()).note(Migration(tag="v1"))
    _made, *then = synced
    assert then == ["-> migrations.json", tmp_path.name]


def test_a_renamed_class_is_on_the_disk_before_its_migration_is(synced: list[str], tmp_path: Path) -> None:
    (tmp_path / name_of("A")).mkdir()
    migration = msgspec.convert({"tag": "v1", "renamed_classes": [{"from": "A", "to": "B"}]}, Migration)
    migrations = ObjectMigrations(tmp_path, (migration,), ("B",))
    migrations.move(migration)
    assert synced == ["-> B", tmp_path.name]
    migrations.note(migration)
    _renamed, directory, _made, *then = synced
    assert directory == tmp_path.name
    assert then == ["-> migrations.json", tmp_path.name]
