"""Declining: a router says with which queue this site would no longer be its first choice; with a longer one the site refuses at once.

The refusal carries the queue's length, so that the router ranks anew with fresh news instead of waiting behind what it could not know of. Heard on a
genuine hop only, where it can only cost the caller itself. Knows the queue of one model; what else may be full is admission's.
"""

from starlette.types import Scope

from engine.protocol import ModelLoad
from runtime.connection import header
from runtime.middleware.identity import GENUINE_HOP
from wire.errors import ApiError
from wire.headers import MAX_QUEUE_WAIT, QUEUE

RETRY_AFTER_S = 1.0


class Declined(ApiError):
    def __init__(self, queued_tokens: int, queue_ms: float, max_wait_ms: int) -> None:
        message = f"the queue is {queue_ms:.0f} ms long, longer than the {max_wait_ms} ms that {MAX_QUEUE_WAIT} allows"
        super().__init__("overloaded", message, retry_after_s=RETRY_AFTER_S)
        self.queued_tokens = queued_tokens

    def headers(self) -> list[tuple[str, str]]:
        return [*super().headers(), (QUEUE, str(self.queued_tokens))]


def decline_if_too_long(scope: Scope, load: ModelLoad | None) -> None:
    """Raise Declined where the queue is longer than the router allows. A site that has not measured its speed yet takes what comes."""
    max_wait_ms = _max_wait_ms(scope)
    if max_wait_ms is None or load is None or load.prefill_tokens_per_s <= 0:
        return
    queue_ms = 1000 * load.waiting_tokens / load.prefill_tokens_per_s
    if queue_ms > max_wait_ms:
        raise Declined(load.waiting_tokens, queue_ms, max_wait_ms)


def _max_wait_ms(scope: Scope) -> int | None:
    value = header(scope, MAX_QUEUE_WAIT.encode())
    if value is None or not scope.get(GENUINE_HOP, False):
        return None
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else None
