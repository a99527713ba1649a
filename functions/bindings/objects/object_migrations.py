"""`[[migrations]]` of a manifest: rename or delete classes of Durable Objects.

Each migration runs once, in order, when a version goes live. The tags of applied migrations are stored beside the objects, together with the removed
classes: a version that binds a removed class is refused, because its objects would start empty. New classes need no migration; naming one only makes
a removed name usable again.
"""

import json
import logging
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from pilotlight.functions.bindings.binding import BindingError
from pilotlight.functions.bindings.objects.alarms import Alarms
from pilotlight.functions.bindings.place import name_of
from pilotlight.functions.manifest_tables import Migration
from pilotlight.support import atomic_files

log = logging.getLogger("pilotlight.bindings")


class MigrationError(BindingError):
    """A version does not fit the existing objects."""


class MigrationRecord(msgspec.Struct):
    """The applied migrations of one function."""

    done: list[str] = []  # tags of applied migrations
    gone: dict[str, str] = {}  # removed classes, each with the reason: renamed or deleted, and by which migration

    def note(self, migration: Migration, bound: Collection[str]) -> None:
        """Record a migration as applied. A deleted class that the version still binds (`bound`) starts empty."""
        self.done.append(migration.tag)
        for name in (*migration.new_classes, *migration.new_sqlite_classes):
            self.gone.pop(name, None)
        for renamed in migration.renamed_classes:
            self.gone[renamed.from_] = f"renamed to {renamed.to} by the migration {migration.tag}"
            self.gone.pop(renamed.to, None)
        for name in set(migration.deleted_classes).difference(bound):
            self.gone[name] = f"deleted by the migration {migration.tag}"


class ObjectMigrations:
    """The migrations of one version, applied to a directory of objects."""

    def __init__(self, directory: Path, migrations: Sequence[Migration], classes: Collection[str]) -> None:
        """`classes` are the function's own classes that the version binds."""
        self._directory = directory
        self._migrations = migrations
        self._classes = classes

    @property
    def pending(self) -> list[Migration]:
        """Return the migrations that are not recorded as done."""
        done = self.record().done
        return [migration for migration in self._migrations if migration.tag not in done]

    def after(self) -> MigrationRecord:
        """Return the record as it will be after the pending migrations."""
        record = self.record()
        for migration in self.pending:
            record.note(migration, self._classes)
        return record

    def check(self) -> None:
        """Raise MigrationError if a migration is impossible.
        A class cannot be renamed to one that has objects, and the version cannot bind a removed class."""
        there = dict[str, bool]()

        def has_objects(name: str) -> bool:
            return there.get(name, self._of(name).exists())

        for migration in self.pending:
            for renamed in migration.renamed_classes:
                if has_objects(renamed.from_) and has_objects(renamed.to):
                    raise MigrationError(
                        f"the migration {migration.tag} cannot rename the class {renamed.from_} to {renamed.to}, which has objects already"
                    )
                there[renamed.to] = has_objects(renamed.from_) or has_objects(renamed.to)
                there[renamed.from_] = False
            there |= dict.fromkeys(migration.deleted_classes, False)
        gone = self.after().gone
        for name in self._classes:
            if name in gone:
                raise MigrationError(
                    f"the class {name} was {gone[name]}, so its objects would start empty; bind its new name, or add it to "
                    "new_sqlite_classes in a migration with a new tag"
                )

    def move(self, migration: Migration) -> None:
        """Rename and delete the files of a migration's objects, none of which may be open. Raises OSError."""
        for renamed in migration.renamed_classes:
            self._rename(renamed.from_, renamed.to)
        for deleted in migration.deleted_classes:
            shutil.rmtree(self._of(deleted), ignore_errors=True)

    def note(self, migration: Migration) -> None:
        """Record a migration as applied.
        After a crash before this call the migration runs again and finds nothing left to do."""
        record = self.record()
        record.note(migration, self._classes)
        self._directory.mkdir(parents=True, exist_ok=True)
        atomic_files.write(self._directory / "migrations.json", msgspec.json.encode(record))

    def record(self) -> MigrationRecord:
        """Load the record from disk. Its older format is a plain list of tags."""
        path = self._directory / "migrations.json"
        found = json.loads(path.read_bytes()) if path.is_file() else {}
        return msgspec.convert({"done": found} if isinstance(found, list) else found, MigrationRecord)

    def _of(self, name: str) -> Path:
        return self._directory / name_of(name)

    def _rename(self, old: str, new: str) -> None:
        if not self._of(old).is_dir():
            return
        self._of(old).rename(self._of(new))
        atomic_files.sync(self._directory)
        log.info("the objects of the class %s now belong to %s", old, new)


async def move_alarms(alarms: Alarms, migration: Migration) -> None:
    for renamed in migration.renamed_classes:
        await alarms.rename(renamed.from_, renamed.to)
    for deleted in migration.deleted_classes:
        await alarms.forget(deleted)
