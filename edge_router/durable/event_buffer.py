"""The events of a stream that can be read again. A reader's place is the number of events that it has."""

import asyncio
from collections.abc import AsyncGenerator

from pilotlight.wire.errors import ApiError
from pilotlight.wire.sse import HEARTBEAT, Event, encode_event, parse_event

LAST_EVENT_ID = "last-event-id"
EVENT_BYTES = 200  # memory of an event besides its bytes
HEARTBEAT_S = 10.0


class EventBuffer:
    """One stream's events, numbered from 1 by their ids, for any number of readers."""

    def __init__(self, heartbeat_s: float = HEARTBEAT_S) -> None:
        """`heartbeat_s` is the silence after which readers get a comment."""
        self._heartbeat_s = heartbeat_s
        self.num_bytes = 0
        self.ended_at: float | None = None
        self._events: list[bytes] = []
        self._changed = asyncio.Event()

    @property
    def last(self) -> Event | None:
        return parse_event(self._events[-1]) if self._events else None

    def add(self, event: Event) -> None:
        name = event.name.decode("latin-1") if event.name else None
        self.add_last(encode_event(event.data or b"", len(self._events) + 1, name))

    def add_last(self, raw: bytes) -> None:
        """Add the last event unchanged. It has no id, so readers cannot continue after it."""
        self._events.append(raw)
        self.num_bytes += len(raw) + EVENT_BYTES

    def end(self, now: float) -> None:
        self.ended_at = now
        self.notify()

    def place_after(self, event_id: str) -> int:
        """Return the place after an event; 0 for an empty id. Raises ApiError for an id that no event has."""
        if not event_id:
            return 0
        if event_id.isascii() and event_id.isdigit() and len(event_id) < 10 and int(event_id) <= len(self._events):
            return int(event_id)
        raise ApiError(
            "invalid_request",
            f"this stream has no event {event_id[:100]!r}: leave {LAST_EVENT_ID} out to read it from its beginning",
        )

    async def read(self, place: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from `place` to the end, each time all that are available.

        A comment is yielded after a long silence.
        """
        while True:
            if place < len(self._events):
                batch = b"".join(self._events[place:])
                place = len(self._events)
                yield batch
            elif self.ended_at is not None:
                return
            else:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await self.change()
                except TimeoutError:
                    yield HEARTBEAT

    def notify(self) -> None:
        """Wake all readers."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        await self._changed.wait()
