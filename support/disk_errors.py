"""Errors of the system that mean that a disk has no room."""

import errno

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_disk_full(error: BaseException) -> bool:
    """Return True if a write failed for lack of room.

    The disk is full, or a quota or the limit of a file's size is reached.
    """
    return isinstance(error, OSError) and error.errno in _FULL
