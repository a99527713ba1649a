"""Resolution of a model's source to a local directory.

A source is `embedded:NAME`, a directory, a GGUF file, the URL of a packed model, a Hugging Face hub id, or a short name of short_names.py. Local
sources never use the network; runtime/fetching downloads. Independent of the files' contents.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf import SUFFIX as GGUF_SUFFIX
from pilotlight.runtime.fetching.errors import FetchError, Progress
from pilotlight.runtime.fetching.hub import downloaded
from pilotlight.runtime.fetching.short_names import EMBEDDED, ON_HUB, PACKAGED, PREFIX

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class SourceError(Exception):
    """The model's files cannot be obtained; the message names the change to make."""


Download = Callable[[str, Progress | None], Awaitable[Path]]  # downloads a model of the hub by its id


async def directory_of(source: str, on_progress: Progress | None = None, download: Download = downloaded) -> Path:
    """Return the model's directory, after a download if necessary. Raises SourceError.

    Cancellation ends the download; the next one resumes it."""
    local = await asyncio.to_thread(local_directory, source)  # in a thread, because it may read 10 MB of a GGUF file
    if local is not None:
        return local
    try:
        return await (
            _fetched(source, on_progress) if is_url(source) else download(ON_HUB.get(source, source), on_progress)
        )
    except FetchError as error:
        raise SourceError(str(error)) from None


def local_directory(source: str) -> Path | None:
    """Return the directory of a source without a download.
    None for a hub id, and for a URL that has not been fetched yet. Raises SourceError."""
    if source.startswith(PREFIX):
        return _embedded(source.removeprefix(PREFIX))
    if is_url(source):
        return _fetched_before(source)
    # Unlike Path's methods, these of os.path raise nothing for a name that is too long, an unknown user or a folder that may not be read.
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        return path
    if path.suffix == GGUF_SUFFIX and os.path.isfile(path):
        return _of_gguf(path)
    if os.path.exists(path):
        raise SourceError(
            f"{source} is a file; name the directory that holds config.json and the weights, or a file called NAME{GGUF_SUFFIX}"
        )
    if source in PACKAGED:
        return _of_package(source)
    if source in ON_HUB:
        return None
    if not _HUB_ID.fullmatch(source):
        raise SourceError(
            f"there is no directory {source}, nor a file; a hub id looks like org/name, an embedded model like embedded:ember, "
            "a packed model's URL like https://host/folder"
        )
    return None


def source_of(given: str) -> str:
    """Return the source for a command's argument.

    The bare name of an embedded model is accepted, unless a local folder has that name."""
    is_embedded = os.path.isdir(EMBEDDED / given) and not os.path.exists(given)
    return f"{PREFIX}{given}" if is_embedded else given


def name_of(source: str) -> str:
    """Return the default name of a model: the last part of its source's path."""
    place = source.split("#")[0].removeprefix(PREFIX).rstrip("/")
    if place.rsplit("/", 1)[-1] in ("", ".", ".."):
        place = os.path.realpath(source)  # such as the present directory, whose name the text lacks
    return place.rsplit("/", 1)[-1].removesuffix(".packed").removesuffix(GGUF_SUFFIX)


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _fetched_before(source: str) -> Path | None:
    from pilotlight.runtime.fetching.remote import Remote  # loads aiohttp, which only URLs need

    try:
        remote = Remote.parse(source)
    except FetchError as error:
        raise SourceError(str(error)) from None
    return remote.kept() if remote is not None else None


async def _fetched(source: str, on_progress: Progress | None) -> Path:
    from pilotlight.runtime.fetching.remote import Remote, fetch

    remote = Remote.parse(source)
    assert remote is not None
    return await fetch(remote, on_progress)


def _of_gguf(path: Path) -> Path:
    from pilotlight.engine.gguf.directory import directory_of as directory_of_gguf
    from pilotlight.runtime.fetching.store import store

    try:
        return directory_of_gguf(path, store() / "gguf")
    except (CheckpointError, OSError) as error:
        raise SourceError(f"{path} cannot be served: {error}") from None


def _of_package(name: str) -> Path:
    packaged = PACKAGED[name]
    file = packaged.find()
    if file is None:
        raise SourceError(f"{name} is a package that is not installed: run {packaged.installation}")
    return _of_gguf(file)


def _embedded(name: str) -> Path:
    available = sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))
    if name in available:
        return EMBEDDED / name
    known = ", ".join(available) or "none in this installation"
    raise SourceError(f"there is no embedded model {name!r}; embedded models: {known}")
