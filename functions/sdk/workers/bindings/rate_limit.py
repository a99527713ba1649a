"""Rate limits in functions."""

from typing import Any

from workers.face import Face, Record, options_of


class RateLimit(Face):
    async def limit(self, options: Any = None, **named: Any) -> Record:
        """Count a call: `limit({"key": key})` or `limit(key=key)`; return {success}."""
        given = options_of(options, named, ("key",), "limit")
        if "key" not in given:
            raise TypeError("limit needs a key: limit({'key': ...})")
        return Record(await self._call("limit", key=str(given["key"])))
