"""Read a configuration file again while its process serves, and log which changes need a restart.

The caller applies the changes.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

from pilotlight.sites.config import ConfigError
from pilotlight.sites.table import Table

log = logging.getLogger("pilotlight.reload")

TableT = TypeVar("TableT", bound=Table)


def read_again(running: TableT, file: Path, load: Callable[[Path], TableT], live: Collection[str]) -> TableT | None:
    """Read `file` again; return the new configuration, or None (logged) if the file is invalid.
    Log the changed keys that need a restart because they are not in `live`."""
    try:
        found = load(file)
    except ConfigError as error:
        log.error("SIGHUP: %s is invalid, so the previous configuration stays in use: %s", file, error)
        return None
    waiting = [name for name in _differences(running, found) if name not in live and name.split(".")[0] not in live]
    if waiting:
        log.warning("SIGHUP: %s was read again; a restart is needed for %s", file, ", ".join(waiting))
    else:
        log.warning("SIGHUP: %s was read again", file)
    return found


def _differences(old: Table, new: Table) -> Iterator[str]:
    for name in old.__struct_fields__:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        if isinstance(before, Table) and type(before) is type(after):
            yield from (f"{name}.{inner}" for inner in _differences(before, after))
        else:
            yield name
