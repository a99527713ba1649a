"""The user ids that a site's functions run under.

Each function has its own id, unique on this machine: the kernel limits processes per user, and lets processes of one user signal each other. Ids are
reserved in blocks. A lock on a file marks a block as taken; the kernel releases it however the site's process ends.
"""

import fcntl
import os
from collections import deque
from pathlib import Path

from pilotlight.sites.config import ConfigError

FIRST_UID = 231_072  # above the ids of people's accounts
BLOCK_IDS = 256
NUM_BLOCKS = 2048
LOCKS = Path("/run/pilotlight/user-ids")


class UserIds:
    """The user ids of one site."""

    def __init__(self, locks: Path = LOCKS, *, is_root: bool = os.getuid() == 0) -> None:
        """The first `take` reserves ids. Without `is_root` there are none: only root can set a process's user."""
        self._locks = locks
        self._is_root = is_root
        self._files: list[int] = []
        self._fresh: deque[int] = deque()
        self._freed: deque[int] = deque()  # reused oldest first, because processes with a freed id may still be ending

    def take(self) -> int | None:
        """Return an unused id; None without root. Raises ConfigError if none can be reserved."""
        if not self._is_root:
            return None
        if not self._fresh and len(self._freed) < BLOCK_IDS // 2:
            self._fresh.extend(self._next_block())
        return (self._fresh or self._freed).popleft()

    def give_back(self, uid: int) -> None:
        self._freed.append(uid)

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()
        self._fresh.clear()
        self._freed.clear()

    def _next_block(self) -> range:
        try:
            self._locks.mkdir(parents=True, exist_ok=True, mode=0o700)
            for block in range(NUM_BLOCKS):
                if (file := _locked(self._locks / str(block))) is not None:
                    self._files.append(file)
                    first = FIRST_UID + block * BLOCK_IDS
                    return range(first, first + BLOCK_IDS)
        except OSError as error:
            raise ConfigError(
                f"user ids for functions cannot be reserved in {self._locks}: {error}; make that folder writable for the site"
            ) from None
        raise ConfigError(f"all user ids for functions are in use on this machine ({self._locks}); stop a site")


class FunctionUser:
    """The user id of one version of a function, assigned when its first process needs it."""

    def __init__(self, ids: UserIds) -> None:
        self._ids = ids
        self._id: int | None = None

    @property
    def id(self) -> int | None:
        """The user id; None if functions run as the site's own user."""
        if self._id is None:
            self._id = self._ids.take()
        return self._id

    def release(self) -> None:
        """Make the id available again; call this once no process uses it."""
        if self._id is not None:
            self._ids.give_back(self._id)
            self._id = None


def _locked(path: Path) -> int | None:
    """Return a descriptor with the file's lock; None if another site holds it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file
