"""The directory in shared memory of a site's host tier, of KV blocks or of weights.

It outlives an engine host but not its site. The site locks it for its lifetime, and the present engine host holds a second lock. Each removes its
files at its end. The files of a killed site are used by the same site when it restarts. Another site of this user removes them if they are unlocked
when that site starts, and still a minute later.
"""

import logging
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Literal

from pilotlight.support.directory_locks import is_dead, remove_if_dead, try_lock

log = logging.getLogger("pilotlight.engine")

COMING_BACK_S = 60.0  # wait for a killed site's restart; `pilotlight up` and systemd need seconds
LOOKS, LOOK_S = 5, 0.02  # attempts at a lock, and their interval: a site that looks for dead owners holds it briefly
_SHARED_MEMORY = Path("/dev/shm")  # a file system in memory; only Linux has it

LOCKS = ("site.lock", "owner.lock")  # lock files of the site and of its engine host

Kind = Literal["kv", "weights"]
_TITLES: dict[Kind, str] = {"kv": "host KV tier", "weights": "host tier of weights"}


class TierDirectory:
    def __init__(
        self, site: str, root: Path | None = None, kind: Kind = "kv", coming_back_s: float = COMING_BACK_S
    ) -> None:
        """`coming_back_s` is the wait for the restart of killed sites."""
        self._coming_back_s = coming_back_s
        self.root = root or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        self._title = _TITLES[kind]
        # The user's number separates the users of a machine, the site's name separates a user's sites.
        self._prefix = f"pilotlight-{kind}-{os.geteuid()}-"
        self.directory = self.root / (self._prefix + site)
        self._lock: int | None = None
        self.why_not = ""  # reason of the last failed claim

    @property
    def is_memory(self) -> bool:
        """Tell whether the directory is in memory.
        On a disk it would be no faster than the files that it caches."""
        return self.root == _SHARED_MEMORY

    def claim(self) -> Path | None:
        """Lock the site's directory for its lifetime and return it.
        If it is in use, log a warning and return None."""
        if self._lock is None:
            why = "another process serves a site of this name on this machine"
            try:
                for _ in range(LOOKS):
                    self.directory.mkdir(mode=0o700, exist_ok=True)
                    if (lock := try_lock(self.directory, "site.lock")) is not None:
                        self._lock = lock
                        break
                    time.sleep(LOOK_S)
            except OSError as error:
                why = str(error.strerror)
            if self._lock is None:
                self.why_not = why
                log.warning("no %s at %s: %s", self._title, self.directory, why)
                return None
        return self.directory

    def remove_dead_later(self) -> None:
        """Remove directories that are unlocked now and still in a minute.
        The pause lets a killed site restart and use its own."""
        dead = [directory for directory in self._others() if is_dead(directory, LOCKS)]

        def remove() -> None:
            for directory in dead:
                remove_if_dead(directory, LOCKS, self._title)

        timer = threading.Timer(self._coming_back_s, remove)
        timer.daemon = True
        timer.start()

    def _others(self) -> list[Path]:
        found = self.root.glob(self._prefix + "*")
        return [directory for directory in found if directory != self.directory or self._lock is None]

    def remove(self) -> None:
        """Remove the directory at the site's end, after its engine host has ended."""
        if self._lock is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def kv_places(site: str, num_devices: int) -> list[TierDirectory]:
    """Return one directory for each of the site's devices.

    The first one has the site's name, so that a site keeps its tier if it gets a second device.
    """
    return [TierDirectory(owner) for owner in owners_of(site, num_devices)]


def owners_of(site: str, num_devices: int) -> list[str]:
    """Return the owners of state that outlives an engine host: the site, and one per further device."""
    return [site if index == 0 else f"{site}@{index}" for index in range(num_devices)]
