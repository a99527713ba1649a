"""The relay of one site's stream, without I/O: bytes go in, frozen events come out.

A site's events are forwarded when their resume point has arrived (wire/hop/continuation.py): the next site repeats events that were cut off before
it, so none is sent twice and none is missing.
"""

from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
import orjson

from pilotlight.dialects.table import is_final
from pilotlight.wire.chat import FinishReason
from pilotlight.wire.hop.continuation import (
    MAX_DELIVERED_BYTES,
    ContinuationError,
    Delivered,
    Delivery,
    ResumePoint,
    encode_delivery,
    is_drain_notice,
    strip_resume_point,
)
from pilotlight.wire.hop.meters import MeterSlot
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.sse import DONE, EventDecoder, SSEError, has_data, parse_event

Cause = Literal["closed", "silent", "frozen", "stalled", "error", "draining", "malformed", "router"]

# Limit in bytes of the events that wait for their resume point. A site writes both at once, at most some hundred kB.
MAX_HELD_BYTES = 8 << 20
WORKERS_AI_FULL = 3040
ENGINE_LOST = ("engine_error", 5000)  # code in OpenAI's dialect and in Workers AI's: the engine died or failed
MODEL_LOST = "model_load_failed"  # another site may have intact weights, or memory for them
# Codes of error events after which another site may continue. Other errors concern the request itself.
SITES_OWN_FAULT = (*ENGINE_LOST, MODEL_LOST, "internal_error", "draining", "overloaded", WORKERS_AI_FULL)


class Forward(msgspec.Struct, frozen=True):
    """Bytes for the client: whole events, or any bytes of a function's stream."""

    data: bytes


class SiteDraining(msgspec.Struct, frozen=True):
    """The site asks that its stream continue elsewhere, if possible.
    This event accompanies everything that the site sends from then on."""


class StreamBroken(msgspec.Struct, frozen=True):
    """The stream broke, or the rest cannot be read. The part that the client has is in the delivery log."""

    cause: Cause
    detail: str


class StreamDone(msgspec.Struct, frozen=True):
    """The stream has ended as it should."""


RelayEvent = Forward | SiteDraining | StreamBroken | StreamDone

_SITE_DRAINING, _DONE = SiteDraining(), StreamDone()
_NO_POINT = ResumePoint(0, ())


class DeliveryLog:
    """The delivered tokens of one answer, from all sites that computed it."""

    def __init__(self, max_bytes: int = MAX_DELIVERED_BYTES, *, is_recorded: bool = False) -> None:
        """`max_bytes` is the limit of a delivery to the next site."""
        self._max_bytes = max_bytes
        self.is_recorded = is_recorded  # events are forwarded with their resume points, and stored
        self.num_tokens = 0
        self.num_uncounted = 0  # number of events whose number of tokens is unknown
        self.meter: MeterSlot | None = None  # counts the tokens, if there is a ledger
        self._work_before = (0, 0, 0)  # work of the sites before this one: drafted, accepted, device_us
        self._choices: list[_Choice] = []
        self._last = _NO_POINT

    def count_on(self, meter: MeterSlot | None) -> None:
        """Count the answer's tokens in `meter`, too."""
        self.meter = meter
        if meter is not None and self.has_started:
            meter.count(self.used)

    def add(self, point: ResumePoint) -> None:
        """Add the tokens of a resume point. Raises ContinuationError if its choice has ended."""
        while len(self._choices) <= point.choice:
            self._choices.append(_Choice())
        choice = self._choices[point.choice]
        if choice.finish_reason is not None:
            raise ContinuationError(f"choice {point.choice} continued after its end")
        choice.token_ids.extend(point.token_ids)
        choice.finish_reason = point.finish_reason
        self.num_tokens += len(point.token_ids)
        self._last = point
        if self.meter is not None:
            self.meter.count(self.used)

    @property
    def used(self) -> ResourceUse:
        point = self._last
        drafted, accepted, device_us = self._work_before
        return ResourceUse(
            point.prompt_tokens,
            point.cached_tokens,
            self.num_tokens,
            point.reasoning_tokens,
            drafted + point.drafted_tokens,
            accepted + point.accepted_tokens,
            device_us + point.device_us,
        )

    @property
    def has_started(self) -> bool:
        return bool(self._choices)

    def delivery(self) -> bytes:
        """Return the delivered part for the next site; empty if the client has nothing yet.
        Raises ContinuationError if it is too long."""
        if not self._choices:
            return b""
        choices = tuple(Delivered(tuple(choice.token_ids), choice.finish_reason) for choice in self._choices)
        encoded = encode_delivery(Delivery(choices, self._last.cached_tokens, self._last.num_events))
        if len(encoded) > self._max_bytes:
            raise ContinuationError(f"the answer is too long to be continued: {self.num_tokens} tokens")
        return encoded

    def leave_site(self) -> None:
        """Keep the work of the sites so far, because the next site counts its own from zero."""
        used = self.used
        self._work_before = (used.drafted, used.accepted, used.device_us)
        self._last = msgspec.structs.replace(self._last, drafted_tokens=0, accepted_tokens=0, device_us=0)


@dataclass(eq=False, slots=True)
class _Choice:
    # Four bytes a token, because streams may be open for long.
    token_ids: "array[int]" = field(default_factory=partial(array, "i"))
    finish_reason: FinishReason | None = None


class StreamRelay:
    """One site's stream of server-sent events.
    With `is_resumable` it has resume points, which are not forwarded, and can continue elsewhere."""

    def __init__(self, log: DeliveryLog, *, is_resumable: bool) -> None:
        self.is_resumable = is_resumable
        self.num_events = 0
        self.has_data = False  # an event other than a comment has arrived
        self._log = log
        self._decoder = EventDecoder()
        self._last: bytes | None = None  # last event with data
        self._held: list[bytes] = []  # events that wait for their resume point
        self._held_bytes = 0
        self._is_draining = False

    def feed(self, chunk: bytes) -> list[RelayEvent]:
        """Return the events for some bytes: at most one Forward, then an event that needs a decision.
        Do not feed bytes after an end."""
        try:
            events = self._decoder.split(chunk)
        except SSEError as error:
            return [StreamBroken("malformed", f"it sent {error}")]
        if not events:
            return []
        self.num_events += len(events)
        ready, broken = self._deliverable(events)
        out: list[RelayEvent] = []
        if ready:
            out.append(Forward(ready[0] if len(ready) == 1 else b"".join(ready)))
        if broken is not None:
            out.append(broken)
        elif _may_be_final(events[-1]) and is_final(parse_event(events[-1])):
            out.append(_DONE)
        elif self._is_draining:
            out.append(_SITE_DRAINING)
        return out

    def end(self) -> list[RelayEvent]:
        """Return the last events, after the body of the site's response has ended without an error."""
        if self._decoder.pending_bytes:
            return [StreamBroken("closed", "it closed the connection inside an event")]
        event = parse_event(self._last or b"")
        last = event.data or b""
        error = error_of(last)
        if not (error or is_final(event)):
            return [StreamBroken("closed", "it closed the connection before the end of its answer")]
        if not self._held:
            return [_DONE]
        # An error event without a resume point. Unless the site itself is at fault, another site would fail in the same way.
        if error.get("code") in SITES_OWN_FAULT:
            return [StreamBroken("error", f"it ended with {last[:300].decode(errors='replace')}")]
        return [Forward(self._release()), _DONE]

    def _deliverable(self, events: list[bytes]) -> tuple[list[bytes], StreamBroken | None]:
        """Return the events to forward, without their resume points.
        If the site sends invalid data, StreamBroken follows the valid events before it."""
        ready: list[bytes] = []
        for raw in events:
            is_answer = has_data(raw)
            if is_answer:
                self._last, self.has_data = raw, True
            if not self.is_resumable:
                self._log.num_uncounted += 1
                ready.append(raw)
                continue
            try:
                told, point = strip_resume_point(raw)
                if point is not None:
                    self._log.add(point)
                    told = raw if self._log.is_recorded else told
            except ContinuationError as error:
                return ready, StreamBroken("malformed", f"it sent {error}")
            if point is None and not is_answer:  # comments need no resume point
                if is_drain_notice(told):
                    self._is_draining = True
                else:
                    ready.append(told)
            elif point is not None and not self._held:
                ready.append(told)
            else:
                self._held.append(told)
                self._held_bytes += len(told)
                if point is not None or (_may_be_final(told) and is_final(parse_event(told))):
                    ready.append(self._release())
        if self._held_bytes > MAX_HELD_BYTES:
            return ready, StreamBroken(
                "malformed", f"more than {MAX_HELD_BYTES >> 20} MiB of events without a resume point"
            )
        return ready, None

    def _release(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        self._held_bytes = 0
        return held


def _may_be_final(raw: bytes) -> bool:
    """Tell whether the event may end a stream. This spares most events the parsing."""
    return DONE in raw or b"event: " in raw


class OpaqueRelay:
    """A function's stream. Its content and its end are not checked."""

    is_resumable = False
    has_data = True

    def __init__(self) -> None:
        self.num_events = 0

    def feed(self, chunk: bytes) -> list[RelayEvent]:
        self.num_events += 1
        return [Forward(chunk)]

    def end(self) -> list[RelayEvent]:
        return [_DONE]


def error_of(body: bytes) -> dict[str, Any]:
    """Return the error object of a body in any dialect; empty if it has none."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(fields, dict):
        return {}
    if fields.get("type") == "error" and "error" not in fields:
        return fields
    errors, error = fields.get("errors"), fields.get("error")
    if isinstance(errors, list) and errors:
        error = errors[0]
    elif isinstance(error, str):  # Ollama's form, with Pilotlight's code
        return {"message": error, "code": fields.get("code")}
    return error if isinstance(error, dict) else {}
