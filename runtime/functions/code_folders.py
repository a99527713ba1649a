"""Folders with code of functions: written by the site, read by the users that functions run as."""

from pathlib import Path


def let_others_read(folder: Path) -> None:
    """Open a folder with code of functions to the users that they run as, whatever the site's own umask is."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
