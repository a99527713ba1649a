"""Where a site's host KV tier lies: shared memory that outlives an engine host and must not outlive its site.

The site owns the directory by a lock for as long as it lives; the engine host of the moment owns the slots in it by a lock of its own. Whoever
stops removes what is his; what a killed site left is taken over by the same site's next life, or removed by the next site of this user that
starts. The module refuses to know what is in the files.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path

log = logging.getLogger("pilotlight.engine")

_SHARED_MEMORY = Path("/dev/shm")  # a file system in memory; only Linux has it


class TierPlace:
    def __init__(self, site: str, root: Path | None = None) -> None:
        self._root = root or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        # The user's number keeps two users of one machine apart, the site's name two sites of one user.
        self._prefix = f"pilotlight-kv-{os.geteuid()}-"
        self._directory = self._root / (self._prefix + site)
        self._lock: int | None = None

    def claim(self) -> Path | None:
        """The site's directory, as long as it lives; None, and a sentence in the log, where another process has it."""
        if self._lock is None:
            try:
                self._directory.mkdir(mode=0o700, exist_ok=True)
                self._lock = _try_lock(self._directory, "site.lock")
                why = "another process serves a site of this name on this machine"
            except OSError as error:
                why = str(error.strerror)
            if self._lock is None:
                log.warning("no host KV tier at %s: %s", self._directory, why)
                return None
        return self._directory

    def remove_dead(self) -> None:
        """What killed sites of this user left behind. This one's own it leaves to `claim`."""
        for directory in self._root.glob(self._prefix + "*"):
            if directory != self._directory or self._lock is None:
                _remove_if_dead(directory)

    def remove(self) -> None:
        """The site ends, and its engine host has ended."""
        if self._lock is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _remove_if_dead(directory: Path) -> None:
    locks = []
    try:
        for name in ("site.lock", "owner.lock"):  # the engine host of a killed site may live for another moment
            lock = _try_lock(directory, name)
            if lock is None:
                return
            locks.append(lock)
        shutil.rmtree(directory)
        log.info("removed the host KV tier of a site that is gone: %s", directory)
    except OSError as error:  # another site is removing it, or it is not ours
        log.debug("%s stays: %s", directory, error)
    finally:
        for lock in locks:
            os.close(lock)


def _try_lock(directory: Path, name: str) -> int | None:
    """None if somebody has it. Whoever had it may have removed the file meanwhile: then there is nothing to be had here any more."""
    path = directory / name
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == os.stat(path).st_ino:
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None
