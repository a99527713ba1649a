"""Downloads of models that an operator has started, with their progress.

A download that was interrupted resumes when it is started again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from pilotlight.runtime.fetching.errors import Progress
from pilotlight.runtime.models.sources import SourceError
from pilotlight.support import background
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.management import Download

Fetch = Callable[[str, Progress], Awaitable[object]]

MAX_RUNNING = 4
MAX_KEPT = 50  # number of ended downloads that are listed

log = logging.getLogger(__name__)


class Downloads:
    def __init__(self, fetch: Fetch, on_done: Callable[[str], None]) -> None:
        """`fetch` downloads a source and raises SourceError; `on_done` is called with the source afterwards."""
        self._fetch = fetch
        self._on_done = on_done
        self._known: dict[str, Download] = {}  # source -> download, the newest last
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def statuses(self) -> tuple[Download, ...]:
        return tuple(self._known.values())

    def start(self, source: str) -> None:
        """Start a download. Raises ApiError if it is already in progress, or too many are."""
        if source in self._tasks:
            raise ApiError("conflict", f"{source[:200]} is being downloaded already")
        if len(self._tasks) >= MAX_RUNNING:
            raise ApiError("overloaded", f"{MAX_RUNNING} downloads are in progress: wait for one of them, or cancel it")
        self._known.pop(source, None)
        self._known[source] = Download(source, "running")
        self._tasks[source] = asyncio.create_task(self._run(source), name=f"download {source[:60]}")
        for old in [each for each in self._known if each not in self._tasks][:-MAX_KEPT]:
            del self._known[old]

    def cancel(self, source: str) -> None:
        """Cancel a download; its bytes are kept. Raises ApiError if there is none."""
        if (task := self._tasks.get(source)) is None:
            raise ApiError("not_found", f"{source[:200]} is not being downloaded")
        task.cancel()

    async def close(self) -> None:
        await background.stop(*self._tasks.values())

    async def _run(self, source: str) -> None:
        try:
            await self._fetch(source, lambda done, total: self._note(source, done_bytes=done, total_bytes=total))
            self._on_done(source)
            self._note(source, state="done")
        except SourceError as error:
            self._note(source, state="failed", error=str(error))
        except asyncio.CancelledError:
            self._note(source, state="cancelled")
            raise
        except Exception as error:
            log.exception("downloading %s", source)
            self._note(source, state="failed", error=str(error) or repr(error))
        finally:
            del self._tasks[source]

    def _note(self, source: str, **changes: Any) -> None:
        self._known[source] = replace(self._known[source], **changes)
