"""Locks of directories, also of those that other processes may remove at the same time.

A process locks a file in such a directory for its lifetime. The locks of a killed process are free, so another one can remove the directory.
"""

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

log = logging.getLogger("pilotlight.engine")


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Open a scope that holds the lock of a directory that stays.

    Raises BlockingIOError if another process has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def is_dead(directory: Path, names: Sequence[str]) -> bool:
    """Tell whether no process holds one of these locks of the directory."""
    with suppress(OSError), _owned(directory, names) as is_ours:
        return is_ours
    return False  # another process removes it, or it belongs to another user


def remove_if_dead(directory: Path, names: Sequence[str], title: str) -> None:
    """Remove a directory if all of these locks are free; `title` names it in the log.

    The engine host of a killed site may live for a moment longer.
    """
    try:
        with _owned(directory, names) as is_ours:
            if is_ours:
                shutil.rmtree(directory)
                log.info("removed the %s of a site that is gone: %s", title, directory)
    except OSError as error:  # another process removes it, or it belongs to another user
        log.debug("%s stays: %s", directory, error)


def try_lock(directory: Path, name: str, lock: Callable[[int, int], None] = fcntl.flock) -> int | None:
    """Return the lock's descriptor; None if another process has the lock, or has removed its file."""
    path = directory / name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == os.stat(path).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


@contextmanager
def _owned(directory: Path, names: Sequence[str]) -> Iterator[bool]:
    """Open a scope that holds a directory's locks; its value is False if another process holds one.
    Raises OSError."""
    with ExitStack() as locks:
        for name in names:
            if (lock := try_lock(directory, name)) is None:
                yield False
                return
            locks.callback(os.close, lock)
        yield True
