"""Locks of folders that other processes may remove at the same time."""

import fcntl
import os
from pathlib import Path

from pilotlight.support.directory_locks import try_lock


def test_a_lock_has_one_owner_and_one_removed_meanwhile_is_no_lock(tmp_path: Path) -> None:
    fd = try_lock(tmp_path, "site.lock")
    assert fd is not None
    assert try_lock(tmp_path, "site.lock") is None
    os.close(fd)
    is_made_again = True

    def removed(fd: int, operation: int) -> None:
        (tmp_path / "site.lock").unlink()
        if is_made_again:
            (tmp_path / "site.lock").touch()  # created by the next site
        fcntl.flock(fd, operation)

    assert try_lock(tmp_path, "site.lock", removed) is None
    is_made_again = False
    assert try_lock(tmp_path, "site.lock", removed) is None
