"""Where a model's files are: `embedded:NAME`, a directory, or a Hugging Face hub id -> a local directory.

Local names never touch the network; a download is another process's (runtime/engines/download.py). The module refuses to know what is in the files.
"""

import re
from pathlib import Path

import engine
from runtime.engines.download import DownloadError, Progress, downloaded

EMBEDDED = Path(engine.__file__).parent / "embedded"
PREFIX = "embedded:"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class SourceError(Exception):
    """The model's files cannot be had; the message says what to change."""


async def directory_of(source: str, on_progress: Progress | None = None) -> Path:
    """A download is a process of its own, ended by cancelling this, and resumes where an earlier one was cut."""
    local = local_directory(source)
    if local is not None:
        return local
    try:
        return await downloaded(source, on_progress)
    except DownloadError as error:
        raise SourceError(str(error)) from None


def local_directory(source: str) -> Path | None:
    """The directory that a source names without a download; None for a hub id."""
    if source.startswith(PREFIX):
        return _embedded(source.removeprefix(PREFIX))
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise SourceError(f"{source} is a file; name the directory that holds config.json and the weights")
    if not _HUB_ID.fullmatch(source):
        raise SourceError(
            f"there is no directory {source}; a hub id looks like org/name, an embedded model like embedded:ember"
        )
    return None


def _embedded(name: str) -> Path:
    available = sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))
    if name in available:
        return EMBEDDED / name
    known = ", ".join(available) or "none in this installation"
    raise SourceError(f"there is no embedded model {name!r}; embedded models: {known}")
