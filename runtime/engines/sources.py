"""Where a model's files are: `embedded:NAME`, a directory, the URL of a packed one, or a Hugging Face hub id -> a local directory.

Local names never touch the network; what downloads is imported only when something is to be downloaded. The module refuses to know what is in
the files.
"""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine

EMBEDDED = Path(engine.__file__).parent / "embedded"
PREFIX = "embedded:"
Progress = Callable[[int, int], None]  # (bytes done, bytes in total)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What a model needs: never the other frameworks' weights, which can double a download.
_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "additional_chat_templates/*"]
_NOT_NEEDED = ["original/*", "consolidated*", "onnx/*", "*.gguf"]


class SourceError(Exception):
    """The model's files cannot be had; the message says what to change."""


async def directory_of(source: str, on_progress: Progress | None = None) -> Path:
    """A download runs in a worker thread and resumes where an earlier one was cut."""
    local = local_directory(source)
    if local is not None:
        return local
    if is_url(source):
        return await _fetched(source, on_progress)
    return await asyncio.to_thread(_download, source, on_progress)


def local_directory(source: str) -> Path | None:
    """The directory that a source names without a download; None for a hub id, and for a URL of what was not fetched yet."""
    if source.startswith(PREFIX):
        return _embedded(source.removeprefix(PREFIX))
    if is_url(source):
        return _fetched_before(source)
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise SourceError(f"{source} is a file; name the directory that holds config.json and the weights")
    if not _HUB_ID.fullmatch(source):
        raise SourceError(
            f"there is no directory {source}; a hub id looks like org/name, an embedded model like embedded:ember, "
            "a packed model's URL like https://host/folder"
        )
    return None


def is_url(source: str) -> bool:
    return source.startswith(("http://", "https://"))


def _fetched_before(source: str) -> Path | None:
    from runtime.fetching.remote import Remote
    from runtime.fetching.tries import RemoteError

    try:
        remote = Remote.parse(source)
    except RemoteError as error:
        raise SourceError(str(error)) from None
    return remote.kept() if remote is not None else None


async def _fetched(source: str, on_progress: Progress | None) -> Path:
    from runtime.fetching.remote import Remote, fetch
    from runtime.fetching.tries import RemoteError

    remote = Remote.parse(source)
    assert remote is not None
    try:
        return await fetch(remote, on_progress)
    except RemoteError as error:
        raise SourceError(str(error)) from None


def _embedded(name: str) -> Path:
    available = sorted(path.parent.name for path in EMBEDDED.glob("*/config.json"))
    if name in available:
        return EMBEDDED / name
    known = ", ".join(available) or "none in this installation"
    raise SourceError(f"there is no embedded model {name!r}; embedded models: {known}")


def _download(hub_id: str, on_progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        path = snapshot_download(
            hub_id,
            allow_patterns=_PATTERNS,
            ignore_patterns=_NOT_NEEDED,
            tqdm_class=_progress_class(on_progress),
        )
    except GatedRepoError:
        message = f"{hub_id} asks for its terms to be accepted on the hub first, and for HF_TOKEN to be set"
        raise SourceError(message) from None
    except RepositoryNotFoundError:
        raise SourceError(f"there is no model {hub_id} on the hub, and no such directory here") from None
    except LocalEntryNotFoundError:
        raise SourceError(f"{hub_id} is not in the local cache and the hub cannot be reached") from None
    except (HfHubHTTPError, OSError) as error:
        raise SourceError(f"{hub_id} could not be downloaded: {error}") from None
    return Path(path)


def _progress_class(on_progress: Progress | None) -> Any:
    """A tqdm that draws nothing and reports the bytes of all files together."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    done = total = 0

    class Silent(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal total
            self._counts_bytes = options.get("unit") == "B"
            if self._counts_bytes:
                total += int(options.get("total") or 0)
            options["disable"] = True
            options.pop("name", None)
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> None:
            nonlocal done
            if self._counts_bytes:
                done += int(n or 0)
                if on_progress is not None:
                    on_progress(done, max(done, total))
            super().update(n)

    return Silent
