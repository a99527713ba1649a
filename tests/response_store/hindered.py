"""A database of responses whose writes a test delays, counts or fails."""

from collections.abc import Awaitable, Callable
from typing import Any

from pilotlight.response_store import response_rows
from pilotlight.response_store.response_database import ResponseDatabase, Result, Work
from pilotlight.response_store.response_rows import ResponseRow


class HinderedDatabase(ResponseDatabase):
    """Awaits `hinder` with the rows before responses are written."""

    def __init__(self, database: ResponseDatabase, hinder: Callable[[list[ResponseRow]], Awaitable[None]]) -> None:
        self.database, self.hinder = database, hinder
        self.is_shared, self.name = database.is_shared, database.name

    async def run(self, work: Work[Result], within_s: float, *, is_write: bool) -> Result:
        if getattr(work, "func", None) is response_rows.add:
            keywords: dict[str, Any] = work.keywords  # type: ignore[attr-defined]
            await self.hinder(keywords["rows"])
        return await self.database.run(work, within_s, is_write=is_write)

    async def tidy(self, keep_s: float) -> None:
        await self.database.tidy(keep_s)

    async def close(self) -> None:
        await self.database.close()
