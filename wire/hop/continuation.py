"""Messages by which another site continues a stream, on signed hops only: clients never see them.

Router to site: the header `x-pilotlight-answer: SEED.CREATED.NONCE` sets an answer's random numbers and id, the same at every site. For a continued
stream a fourth part gives the size of the delivery, which precedes the client's body: the tokens and text of each choice that the client already has.

Site to router: a header that announces resume points, and the resume points. A resume point is a comment line at the start of an event. It names the
tokens of all events since the previous resume point, including its own event: events without their resume point do not count.
"""

import os
import re
import time
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from pilotlight.wire.chat import FinishReason

ANSWER = "x-pilotlight-answer"  # router -> site
RESUME_POINTS = "x-pilotlight-marks"  # site -> router: "1", this stream has resume points
DRAIN_NOTICE = b":pl draining\n\n"  # site -> router: continue this stream at another site, if there is one
MAX_DELIVERED_BYTES = 16 << 20  # limit of the part before the client's body, enough for two million tokens
MAX_CHOICES = 1024

_POINT = b":pl ["
_DRAINING = DRAIN_NOTICE.rstrip(b"\n")
_ANSWER = re.compile(r"^([0-9]{1,19})\.([0-9]{1,12})\.([0-9a-f]{24})(?:\.([0-9]{1,8}))?\Z")

TokenIds = tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...]


class ContinuationError(ValueError):
    """The other side sent an invalid resume point, answer's name or delivery; the message names it."""


class ResumePoint(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one choice in the events since the previous resume point."""

    choice: Annotated[int, Meta(ge=0, lt=MAX_CHOICES)]
    token_ids: TokenIds
    finish_reason: FinishReason | None = None
    cached_tokens: Annotated[int, Meta(ge=0)] = 0  # cached tokens of the prompt, as in the answer's usage
    num_events: Annotated[int, Meta(ge=0)] = 0  # number of events so far, in a dialect that numbers them
    prompt_tokens: Annotated[int, Meta(ge=0)] = 0  # tokens of all prompts
    reasoning_tokens: Annotated[int, Meta(ge=0)] = 0  # tokens of all choices so far
    drafted_tokens: Annotated[int, Meta(ge=0)] = 0  # drafted tokens of all choices so far, at this site
    accepted_tokens: Annotated[int, Meta(ge=0)] = 0  # accepted tokens of all choices so far, at this site
    device_us: Annotated[int, Meta(ge=0)] = 0  # device time of all choices so far, at this site


class Delivered(msgspec.Struct, frozen=True, array_like=True):
    """The delivered part of one choice."""

    token_ids: TokenIds = ()
    finish_reason: FinishReason | None = None

    @property
    def has_started(self) -> bool:
        return bool(self.token_ids) or self.finish_reason is not None


class Delivery(msgspec.Struct, frozen=True, array_like=True):
    """The delivered parts of an answer. Choices without one may be missing at the end."""

    choices: Annotated[tuple[Delivered, ...], Meta(max_length=MAX_CHOICES)]
    cached_tokens: Annotated[int, Meta(ge=0)] = 0
    num_events: Annotated[int, Meta(ge=0)] = 0


class AnswerName(NamedTuple):
    """The values from which two sites produce the same answer."""

    seed: int  # used if the request has no seed
    created: int
    nonce: str

    @classmethod
    def fresh(cls) -> "AnswerName":
        drawn = os.urandom(20)
        return cls(int.from_bytes(drawn[:8], "big") >> 1, int(time.time()), drawn[8:].hex())

    def item_id(self, choice: int, position: int) -> str:
        """Return 24 characters that identify a part of the answer, the same at every site."""
        return f"{self.nonce[:18]}{choice & 0xFFF:03x}{position & 0xFFF:03x}"


NOTHING_DELIVERED = Delivery(())

_encoder = msgspec.json.Encoder()
_point_decoder = msgspec.json.Decoder(ResumePoint)
_delivery_decoder = msgspec.json.Decoder(Delivery)


def encode_answer(name: AnswerName, delivery: bytes = b"") -> str:
    plain = f"{name.seed}.{name.created}.{name.nonce}"
    return f"{plain}.{len(delivery)}" if delivery else plain


def decode_answer(value: str) -> tuple[AnswerName, int]:
    """Return the answer's name, and the number of bytes of the body that are the delivery.
    Raises ContinuationError."""
    found = _ANSWER.match(value)
    if found is None or int(found[1]) >= 2**63 or int(found[4] or 0) > MAX_DELIVERED_BYTES:
        raise ContinuationError(f"{ANSWER} must be SEED.CREATED.NONCE, or that and a length in bytes")
    return AnswerName(int(found[1]), int(found[2]), found[3]), int(found[4] or 0)


def encode_delivery(delivery: Delivery) -> bytes:
    return _encoder.encode(delivery)


def decode_delivery(data: bytes) -> Delivery:
    try:
        return _delivery_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ContinuationError(f"the delivered part of the answer cannot be read: {error}") from None


def with_resume_point(events: bytes, point: ResumePoint) -> bytes:
    """Return whole events of our own encoding with the resume point at the head of the last one."""
    end_before = events.rfind(b"\n\n", 0, -2)
    start = 0 if end_before < 0 else end_before + 2
    return events[:start] + b":pl " + _encoder.encode(point) + b"\n" + events[start:]


def strip_resume_point(raw: bytes) -> tuple[bytes, ResumePoint | None]:
    """Return one event without its resume point, and the resume point. Raises ContinuationError."""
    if not raw.startswith(_POINT):
        return raw, None
    line, _, event = raw.partition(b"\n")
    if event.startswith(_POINT):
        raise ContinuationError("an event with two resume points")
    try:
        return event, _point_decoder.decode(line[len(b":pl ") :])
    except msgspec.DecodeError as error:
        raise ContinuationError(f"a resume point that cannot be read: {error}") from None


def is_drain_notice(raw: bytes) -> bool:
    return raw.startswith(_DRAINING)
