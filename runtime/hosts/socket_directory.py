"""The directory of an engine host's socket, which only this user can access.

The site locks it for its lifetime and removes it at its end. The directory of a killed site is unlocked, so the next site of this user removes it.
"""

import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from pilotlight.support.directory_locks import remove_if_dead, try_lock

LATER_S = 5.0  # delay after a site's start until dead sites' directories are removed, so that no request waits for that
_PREFIX = "pilotlight-ipc-"  # short, because a socket's path is limited to 107 bytes
_LOCK = "site.lock"


class SocketDirectory:
    def __init__(self, root: Path | None = None, make: Callable[..., str] = tempfile.mkdtemp) -> None:
        """Create the directory, by `make`, and lock it. Raises OSError."""
        while True:
            self.directory = Path(make(prefix=_PREFIX, dir=root))  # with mode 0700
            lock = None
            try:
                lock = try_lock(self.directory, _LOCK)
            except FileNotFoundError:  # another site removed the directory before it was locked
                continue
            except BaseException:
                shutil.rmtree(self.directory, ignore_errors=True)
                raise
            if lock is not None:
                break
        self._lock: int | None = lock

    @property
    def address(self) -> str:
        return f"ipc://{self.directory}/engine"

    @property
    def peer_address(self) -> str:
        """The address at which the host serves its KV blocks to other hosts."""
        return f"ipc://{self.directory}/blocks"

    @property
    def journal(self) -> Path:
        """The file in which the host records its open sequences."""
        return self.directory / "steps"

    def remove(self) -> None:
        """Remove the directory after the host has ended. A second call does nothing."""
        if self._lock is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def remove_dead(root: Path | None = None, user: int | None = None) -> None:
    """Remove the directories that dead sites of a user have left; None for this process's user."""
    user = os.geteuid() if user is None else user
    for directory in (root or Path(tempfile.gettempdir())).glob(_PREFIX + "*"):
        try:
            status = os.lstat(directory)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != user:
                continue  # all users share the parent folder
        except OSError:  # another site removes it at this moment
            continue
        remove_if_dead(directory, [_LOCK], "socket directory")


def remove_dead_later(root: Path | None = None, after_s: float = LATER_S) -> None:
    timer = threading.Timer(after_s, remove_dead, [root])
    timer.daemon = True
    timer.start()
