"""A router's own words beside the client's request: which answer this is, and what the client has of it already.

Believed on a genuine hop only. From anybody else a name is not heard (a site that has no secret may stand behind a router that has one), and what
is said to have been delivered is refused. Knows the request's headers and the part of
its body that is the router's; refuses to know what is done with either (runtime/resumption.py).
"""

from typing import NamedTuple, TypeVar

from msgspec.structs import replace
from starlette.types import Scope

from runtime.connection import header
from runtime.middleware.identity import GENUINE_HOP
from runtime.validation import ValidGeneration
from wire.continuation import (
    ANSWER,
    MAX_DELIVERED_BYTES,
    NOTHING_DELIVERED,
    AnswerName,
    ContinuationError,
    Delivery,
    decode_answer,
    decode_delivery,
)
from wire.errors import ApiError
from wire.headers import PREFIXES
from wire.prefixes import decode_prompt_prefixes

RequestT = TypeVar("RequestT", bound=ValidGeneration)


class RouterContext(NamedTuple):
    name: AnswerName
    delivery: Delivery

    def applied_to(self, request: RequestT) -> RequestT:
        choices = self.delivery.choices
        if len(choices) > request.n:
            raise ApiError("invalid_request", f"{len(choices)} choices were delivered of {request.n}")
        if choices and not request.stream:
            raise ApiError("invalid_request", "only a stream can be continued")
        if len(choices) == request.n and all(choice.finish_reason is not None for choice in choices):
            raise ApiError("invalid_request", "all of this answer was delivered: nothing is left to continue")
        return replace(request, answer_name=self.name, delivery=self.delivery)


def router_context(scope: Scope, raw: bytes) -> tuple[RouterContext | None, bytes]:
    """Return the router's words, where there are any, and the client's own body. Raises ApiError."""
    value = _value(scope)
    if value is None:
        return None, raw
    try:
        name, length = decode_answer(value)
        if not length:
            return RouterContext(name, NOTHING_DELIVERED), raw
        if length > len(raw):
            raise ContinuationError(f"{ANSWER} announces {length} bytes before a body of {len(raw)}")
        return RouterContext(name, decode_delivery(raw[:length])), raw[length:]
    except ContinuationError as error:
        raise ApiError("invalid_request", str(error)) from None


def named_prefixes(scope: Scope) -> tuple[tuple[int, int], ...]:
    """Return the digests by which the router knows the prompt's beginnings. Invalid ones are no harm: they only say where a cache is."""
    value = header(scope, PREFIXES.encode())
    if value is None or not scope.get(GENUINE_HOP, False):
        return ()
    try:
        return decode_prompt_prefixes(value)
    except ValueError:
        return ()


def body_limit(scope: Scope, limit_bytes: int) -> int:
    """Return the limit of a body whose first part may be the router's: the client's own part has `limit_bytes`."""
    return limit_bytes if _value(scope) is None else limit_bytes + MAX_DELIVERED_BYTES


def _value(scope: Scope) -> str | None:
    value = header(scope, ANSWER.encode())
    if value is None or scope.get(GENUINE_HOP, False):
        return value
    if value.count(".") > 2:
        raise ApiError("forbidden", f"only the network's routers may continue an answer; leave {ANSWER} out")
    return None
