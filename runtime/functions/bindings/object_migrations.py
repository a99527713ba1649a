"""`[[migrations]]` of a manifest: classes of Durable Objects that were renamed or deleted, carried out once, in order, before any object is opened.

What has been done is kept by tag beside the objects. Classes need not be announced here; naming new ones is taken and changes nothing.
"""

import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from runtime.functions.bindings.place import name_of
from runtime.functions.manifest_tables import Migration
from wire import durable

log = logging.getLogger("pilotlight.bindings")


def migrate(directory: Path, migrations: Iterable[Migration]) -> None:
    """Carry migrations out. Raises OSError, and ValueError where a class would be renamed to one that has objects."""
    record = directory / "migrations.json"
    done: list[str] = json.loads(record.read_text()) if record.is_file() else []
    for migration in migrations:
        if migration.tag in done:
            continue
        for renamed in migration.renamed_classes:
            _rename(directory / name_of(renamed.from_), directory / name_of(renamed.to))
        for deleted in migration.deleted_classes:
            shutil.rmtree(directory / name_of(deleted), ignore_errors=True)
        done.append(migration.tag)
        # A crash before this repeats the tag, which then finds nothing to do.
        durable.write(record, json.dumps(done).encode())


def _rename(old: Path, new: Path) -> None:
    if not old.is_dir():
        return
    if new.exists():
        raise ValueError(f"the class {old.name} cannot be renamed to {new.name}, which has objects already")
    old.rename(new)
    durable.sync(old.parent)
    log.info("the objects of the class %s are %s's now", old.name, new.name)
