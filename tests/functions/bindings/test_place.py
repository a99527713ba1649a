"""Directories of bindings' state are separate for each name; classes of objects are renamed and deleted once."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.functions.bindings.objects.object_migrations import MigrationError, ObjectMigrations
from pilotlight.functions.bindings.place import directory_of, name_of
from pilotlight.functions.manifest_tables import Migration


@pytest.mark.parametrize("plain", ["a", "My-KV_1", "0" * 100])
def test_a_plain_name_is_its_own(plain: str) -> None:
    assert name_of(plain) == plain


@pytest.mark.parametrize("other", ["", "a" * 101, "-a", "_a", "a.b", "a/b", "..", "a b", "é", "a\n", "a\0", "\ud800"])
def test_any_other_is_a_readable_part_and_a_hash_and_leads_nowhere_else(tmp_path: Path, other: str) -> None:
    name = name_of(other)
    readable, _, digest = name.rpartition(".")
    assert (len(digest), len(readable) <= 40) == (32, True)
    assert os.fsencode(name).isascii()
    assert not set(name) & set("/\0\n ")
    assert directory_of(tmp_path, "kv", other).parent == tmp_path / "bindings" / "kv"


@given(st.lists(st.text(alphabet="ab.-/_\n é", max_size=4), unique=True, max_size=20))
def test_no_two_names_share_a_directory(names: list[str]) -> None:
    assert len({name_of(name) for name in names}) == len(names)


def migration(tag: str, renamed: dict[str, str] | None = None, deleted: tuple[str, ...] = ()) -> Any:
    renames = [{"from": old, "to": new} for old, new in (renamed or {}).items()]
    return msgspec.convert({"tag": tag, "renamed_classes": renames, "deleted_classes": [*deleted]}, Migration)


def carry_out(made: ObjectMigrations) -> None:
    for each in made.pending:
        made.move(each)
        made.note(each)


def migrate(directory: Path, migrations: Any, classes: tuple[str, ...] = ()) -> None:
    made = ObjectMigrations(directory, migrations, classes)
    made.check()
    carry_out(made)


def classes(directory: Path) -> dict[str, str]:
    return {path.name: (path / "file").read_text() for path in directory.iterdir() if path.is_dir()}


def test_migrations_are_carried_out_once_and_in_order(tmp_path: Path) -> None:
    for name in ("A", "B"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    first = [migration("v1", {"A": "C"}, ("B", "Unknown"))]
    for _ in range(2):
        migrate(tmp_path, first)
        assert classes(tmp_path) == {"C": "A"}
    (tmp_path / "B").mkdir()  # a class of the same name that was created later
    (tmp_path / "B" / "file").write_text("new")
    migrate(tmp_path, [*first, migration("v2", {"C": "A"}), migration("v3", {"Unknown": "D"})])
    assert classes(tmp_path) == {"A": "A", "B": "new"}


def test_a_class_that_has_objects_is_not_overwritten_by_another(tmp_path: Path) -> None:
    for name in ("A", "B"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(MigrationError, match="cannot rename the class A to B, which has objects already"):
        migrate(tmp_path, [migration("v1", {"A": "B"})])
    assert classes(tmp_path) == {"A": "A", "B": "B"}
    (tmp_path / "B" / "file").unlink()
    (tmp_path / "B").rmdir()
    migrate(tmp_path, [migration("v1", {"A": "B"})])
    assert classes(tmp_path) == {"B": "A"}, "a refused migration is not recorded"


def test_a_version_that_binds_a_class_that_is_gone_is_refused_before_anything_is_moved(tmp_path: Path) -> None:
    first = [migration("v1", {"A": "B"}, ("C",))]
    with pytest.raises(MigrationError, match="the class A was renamed to B by the migration v1"):
        migrate(tmp_path, first, ("B", "A"))
    assert not (tmp_path / "migrations.json").exists()
    migrate(tmp_path, first, ("B",))
    for name, became in (("A", "renamed to B by the migration v1"), ("C", "deleted by the migration v1")):
        with pytest.raises(MigrationError, match=f"the class {name} was {became}"):
            ObjectMigrations(tmp_path, [], [name]).check()
    again = msgspec.convert({"tag": "v2", "new_sqlite_classes": ["A"]}, Migration)
    migrate(tmp_path, [*first, again], ("A", "B"))
    ObjectMigrations(tmp_path, first, ["A", "B"]).check()


def test_tags_that_were_noted_before_classes_were_are_still_known(tmp_path: Path) -> None:
    (tmp_path / "migrations.json").write_text('["v1"]')
    made = ObjectMigrations(tmp_path, [migration("v1", {"A": "B"}), migration("v2", {"B": "D"})], ["D"])
    assert [each.tag for each in made.pending] == ["v2"]
    carry_out(made)
    assert (made.record().done, sorted(made.record().gone)) == (["v1", "v2"], ["B"])
