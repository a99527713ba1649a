"""A file that is read once more while its process serves: what can be used of it, and what waits for a restart.

Knows tables; refuses to know what is taken over, and how.
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
    """Read what the file says now, of which the caller takes over `live`; the log names what differs besides. None: it cannot be used, and nothing
    changes."""
    try:
        found = load(file)
    except ConfigError as error:
        log.error("SIGHUP: %s cannot be used, and what was read before goes on: %s", file, error)
        return None
    waiting = [name for name in _differences(running, found) if name not in live]
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
