"""Headers and fields that a router adds to a client's request.

They are the tenant, the answer's name, the part that was already delivered, and the longest wait allowed here. They count only if a router of the
network has signed the request. From other clients they are ignored (a site without a secret may serve a router that has one), except that a delivered
part is refused. Independent of how an answer is continued.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from msgspec.structs import replace
from starlette.types import Scope

from pilotlight.dialects.requests import ValidGeneration
from pilotlight.engine.api.protocol import ModelLoad
from pilotlight.runtime.api.middleware import ACCOUNT, GENUINE_HOP, HOLDER
from pilotlight.wire.credentials import Key, Tenant, owner_of, tenant_of
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.continuation import (
    ANSWER,
    MAX_DELIVERED_BYTES,
    NOTHING_DELIVERED,
    AnswerName,
    ContinuationError,
    Delivery,
    decode_answer,
    decode_delivery,
)
from pilotlight.wire.hop.headers import MAX_QUEUE_WAIT, PREFIXES, QUEUE, WAITED, milliseconds
from pilotlight.wire.hop.prefixes import decode_prompt_prefixes
from pilotlight.wire.http.asgi import header

RETRY_AFTER_S = 1.0

RequestT = TypeVar("RequestT", bound=ValidGeneration)


class Declined(ApiError):
    """A refusal with the current length of the queue, so that the router can rank the sites again."""

    def __init__(self, queued_tokens: int, queue_ms: float, max_wait_ms: int) -> None:
        message = f"the queue is {queue_ms:.0f} ms long, longer than the {max_wait_ms} ms that {MAX_QUEUE_WAIT} allows"
        super().__init__("overloaded", message, retry_after_s=RETRY_AFTER_S)
        self.queued_tokens = queued_tokens

    def headers(self) -> list[tuple[str, str]]:
        return [*super().headers(), (QUEUE, str(self.queued_tokens))]


class RouterContext(NamedTuple):
    name: AnswerName | None = None  # None if no other site can continue this answer
    delivery: Delivery = NOTHING_DELIVERED
    prefixes: tuple[tuple[int, int], ...] = ()  # prefixes that the router knows: (digest, number of tokens)
    max_queue_wait_ms: int | None = None  # if the queue is longer, the router prefers another site
    waited_ms: int = 0  # how long the request has waited at other sites

    def applied_to(self, request: RequestT, num_bytes: int) -> RequestT:
        """Return the request with the fields that the router sent.

        `num_bytes` is the size of the client's own body. Raises ApiError.
        """
        choices = self.delivery.choices
        if len(choices) > request.num_choices:
            raise ApiError("invalid_request", f"{len(choices)} choices were delivered of {request.num_choices}")
        if choices and not request.stream:
            raise ApiError("invalid_request", "only a stream can be continued")
        if len(choices) == request.num_choices and all(choice.finish_reason is not None for choice in choices):
            raise ApiError("invalid_request", "all of this answer was delivered: nothing is left to continue")
        return replace(
            request,
            num_bytes=num_bytes,
            answer_name=self.name or request.answer_name,
            delivery=self.delivery,
            prefixes=self.prefixes,
            waited_s=self.waited_ms / 1e3,
        )

    def check_queue(self, load: ModelLoad | None) -> None:
        """Raise Declined if the queue is longer than the router allows.

        A site that has not measured its speed yet accepts every request."""
        if self.max_queue_wait_ms is None or load is None or load.prefill_tokens_per_s <= 0:
            return
        queue_ms = 1000 * load.waiting_tokens / load.prefill_tokens_per_s
        if queue_ms > self.max_queue_wait_ms:
            raise Declined(load.waiting_tokens, queue_ms, self.max_queue_wait_ms)


def router_context(scope: Scope, raw: bytes) -> tuple[RouterContext, bytes]:
    """Separate a body into the router's context and the client's own body. Raises ApiError."""
    if not scope.get(GENUINE_HOP, False):
        return RouterContext(), raw
    context = RouterContext(
        prefixes=_prefixes(header(scope, PREFIXES)),
        max_queue_wait_ms=milliseconds(header(scope, MAX_QUEUE_WAIT)),
        waited_ms=milliseconds(header(scope, WAITED)) or 0,
    )
    answer = header(scope, ANSWER)
    if answer is None:
        return context, raw
    try:
        name, length = decode_answer(answer)
        if not length:
            return context._replace(name=name), raw
        if length > len(raw):
            raise ContinuationError(f"{ANSWER} announces {length} bytes before a body of {len(raw)}")
        return context._replace(name=name, delivery=decode_delivery(raw[:length])), raw[length:]
    except ContinuationError as error:
        raise ApiError("invalid_request", str(error)) from None


def tenant_in(scope: Scope) -> Tenant:
    """Return a request's tenant.
    It is the account that a router sent, or that a known key belongs to, or else the key itself."""
    owner = owner_of(header(scope, "authorization"), scope.get(ACCOUNT, ""))
    return tenant_of(owner, scope["path_params"].get("account_id"))


def require_router(scope: Scope, purpose: str) -> None:
    """Raise ApiError unless a router of the network has signed the request."""
    if not scope.get(GENUINE_HOP, False):
        raise ApiError("forbidden", f"only a router that shares a secret with this site may {purpose}")


def may_see(scope: Scope, names: Iterable[str]) -> bool:
    """Tell whether the request's key may use a model that has one of these names.

    True for requests of a router, which checks this itself."""
    holder: Key | None = scope.get(HOLDER)
    return holder is None or holder.account.may_use(*names)


def check_model(scope: Scope, model: str) -> None:
    """Raise ApiError if the request's key may not use the model.

    Requests of a router pass, because it checks this itself."""
    holder: Key | None = scope.get(HOLDER)
    if holder is not None:
        holder.account.check_model(model)


def body_limit(scope: Scope, limit_bytes: int) -> int:
    """Return the size limit of a body, which may start with the part that a router adds.

    `limit_bytes` applies to the client's own part. Raises ApiError if another client sends a part that only routers may add.
    """
    answer = header(scope, ANSWER)
    if answer is None:
        return limit_bytes
    if scope.get(GENUINE_HOP, False):
        return limit_bytes + MAX_DELIVERED_BYTES
    if answer.count(".") > 2:
        raise ApiError("forbidden", f"only the network's routers may continue an answer; leave {ANSWER} out")
    return limit_bytes


def _prefixes(value: str | None) -> tuple[tuple[int, int], ...]:
    """Decode the header of prefix digests.
    Invalid ones are ignored, because they are only hints for caches."""
    try:
        return decode_prompt_prefixes(value) if value is not None else ()
    except ValueError:
        return ()
