"""A stored response: its input and output, and a background response's events for readers.

It is independent of HTTP and of the storage (storage.py).
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple

import orjson

from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.continuation import strip_resume_point
from pilotlight.wire.sse import encode_event

LOST = ApiError("aborted", "the process that computed this response has stopped: send the request again")
_FAILED = "response.failed"
CONVERSATION = "conv_"  # prefix of a conversation's id


class PreviousResponse(NamedTuple):
    """A stored response that a new one continues, with the conversation up to its end."""

    number: int  # number of its row; 0 if it is not written yet
    id: str
    items: bytes  # the conversation's items as JSON objects, separated by commas
    is_ended: bool = True  # only an ended response can be continued


class KeptResponse:
    """A response to be stored; while it runs in the background, the part that is computed so far."""

    def __init__(
        self, tenant: str, fields: dict[str, Any], own: bytes = b"", before: PreviousResponse | None = None
    ) -> None:
        """`fields` are the response as clients see it.
        `own` are the input items of this request, as JSON objects separated by commas; those of `before` come first."""
        self.tenant = tenant
        self.fields = fields
        self.own = own
        self.before = before
        self.events: list[bytes] = []  # stored, so that a process that continues the response repeats none of them
        self.untold: list[bytes] = []  # later events with their resume points, not stored yet
        self.request: bytes | None = None  # stored at the start, so that another process can continue; None if none can
        self.task: asyncio.Task[None] | None = None
        self.is_started = False  # its start is in a shared database, where other processes may end or delete it
        self.is_settled = False  # its final state is stored
        self.is_deleted = False
        self.replaces_another = False  # an earlier state is stored, and stays if this one cannot be written
        self.is_left = False  # another process continues it
        self.told_fields: Any = None  # the fields in the database so far
        self._changed = asyncio.Event()

    def make_by(self, making: Coroutine[Any, Any, None]) -> None:
        """Start the task that computes the response."""
        self.task = asyncio.create_task(making, name="background response")

    @property
    def id(self) -> str:
        return str(self.fields["id"])

    @property
    def is_ended(self) -> bool:
        return self.fields["status"] not in ("queued", "in_progress")

    @property
    def input(self) -> bytes:
        return joined(b"" if self.before is None else self.before.items, self.own)

    @property
    def output(self) -> bytes:
        return orjson.dumps(self.fields["output"])[1:-1]

    @property
    def all_events(self) -> list[bytes]:
        return [*self.events, *map(plain_event, self.untold)]

    def record(self, request: bytes) -> None:
        """Let another process continue the response."""
        self.request = request

    def reported(self, number: int, fields: dict[str, Any]) -> None:
        """Note that the next events and the fields are stored."""
        self.told_fields = fields
        self.publish(number)

    def publish(self, number: int) -> None:
        """Give the next events to readers."""
        self.events += map(plain_event, self.untold[:number])
        del self.untold[:number]
        self.notify()

    def leave(self) -> None:
        """Compute no more of it here, because another process continues it."""
        self.is_left = True
        self.notify()

    def end_as(self, status: str, error: ApiError | None = None) -> None:
        """End the response with a status, unless it has ended."""
        self.end_with(ended_fields(self.fields, status, error))

    def end_with(self, fields: dict[str, Any]) -> None:
        if not (self.is_ended or self.is_left):
            self.fields = fields
            self.publish(len(self.untold))
            if fields["status"] == "failed":
                self.events.append(failed_event(fields, len(self.events)))
        self.notify()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, place: int) -> tuple[list[bytes], bool]:
        """Wait for events from number `place` on; return them, and whether they include the last one.
        Raises ApiError if another process has the later ones, or if the response was cancelled."""
        while len(self.events) <= place and not self.is_ended:
            if self.is_left:
                sentence = "another process continues this response: read on after the last event"
                raise ApiError("draining", sentence, retry_after_s=1)
            await self._changed.wait()
        return self.page(self.events[place:])

    def page(self, events: list[bytes]) -> tuple[list[bytes], bool]:
        """Return the latest events, and whether they include the last one.
        Raises ApiError after the latest event of a cancelled response, which has no last one."""
        is_cancelled = self.fields["status"] == "cancelled"
        if is_cancelled and not events:
            raise cancelled()
        return events, self.is_ended and not is_cancelled


def cancelled() -> ApiError:
    return ApiError("aborted", "the response was cancelled or deleted")


def ended_fields(fields: dict[str, Any], status: str, error: ApiError | None) -> dict[str, Any]:
    told = None if error is None else {"code": error.word, "message": error.message}
    return {**fields, "status": status, "error": told}


def failed_event(fields: dict[str, Any], number: int) -> bytes:
    """Return the last event of a response that has failed."""
    return encode_event(orjson.dumps({"type": _FAILED, "sequence_number": number, "response": fields}), name=_FAILED)


def is_failed_event(event: bytes) -> bool:
    return event.startswith(f"event: {_FAILED}\n".encode())


def plain_event(event: bytes) -> bytes:
    """Return an event without its resume point."""
    return strip_resume_point(event)[0]


def joined(*items: bytes) -> bytes:
    return b",".join(part for part in items if part)


def conversation_id(given: Any) -> str | None:
    """Return the id in a request's `conversation`; None if the request names none.

    `given` is an id or an object. Raises ApiError.
    """
    name = given.get("id") if isinstance(given, dict) else given
    if name is None:
        return None
    if not isinstance(name, str) or not name.startswith(CONVERSATION):
        raise ApiError(
            "invalid_request", f"conversation: must be an id that begins with {CONVERSATION}", param="conversation"
        )
    return name
