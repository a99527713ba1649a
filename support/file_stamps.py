"""What tells a file that has changed from the one that was read: time, size and inode, so that a renamed file counts, too."""

import os
from pathlib import Path


def stamp(file: Path) -> object:
    """Equal as long as nobody has written or replaced the file; a file that cannot be found has a stamp as well."""
    try:
        found = os.stat(file)
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino
