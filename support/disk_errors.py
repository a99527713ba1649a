"""Errors of the system that mean that a file cannot be written."""

import errno

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def is_disk_full(error: BaseException) -> bool:
    """Return True if a write failed for lack of room.

    The disk is full, or a quota or the limit of a file's size is reached.
    """
    return isinstance(error, OSError) and error.errno in _FULL


def is_unwritable(error: BaseException) -> bool:
    """Return True if the disk is full, or a file may not be written."""
    is_refused = isinstance(error, OSError) and error.errno in _REFUSED and error.filename is not None
    return is_refused or is_disk_full(error)
