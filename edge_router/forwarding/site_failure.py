"""Reasons why a site did not answer or stopped, and which responses come from the site itself."""

from typing import Literal

from pilotlight.edge_router.forwarding.relay import Cause, error_of
from pilotlight.wire.hop.headers import QUEUE, REFUSAL
from pilotlight.wire.http.client import ResponseParser

Failure = Literal[
    "connect",
    "lost",
    "silent",
    "full",
    "draining",
    "malformed",
    "refused",
    "declined",
    "no_model",
    "untrusted",
    "no_files",
    "failing",
]

SPENT_STATUSES = frozenset({502, 503, 504})
# The cause may be the site, a proxy in front of it, or an error in the request that every site would report.
FAILING_STATUSES = frozenset({429, 500})


class SiteFailed(Exception):
    """The site sent no part of the answer."""

    def __init__(
        self,
        kind: Failure,
        detail: str,
        retry_after_s: float | None = None,
        queued_tokens: int = 0,
        words: str = "",
    ) -> None:
        """`words` is the site's own error message if an engine failed during the request, else empty."""
        super().__init__(detail)
        self.words = words
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.queued_tokens = queued_tokens  # length of the queue of a site that declines


class StreamLost(Exception):
    """The site stopped in the middle of its stream."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause


_KINDS: dict[str, Failure] = {
    "draining": "draining",
    "model_load_failed": "no_model",
    "misdirected_request": "no_model",  # sent by a site that is not the function's home
    "engine_error": "lost",
    "signature": "untrusted",
    "clock": "untrusted",
}


def plain_failure(response: ResponseParser, body: bytes) -> SiteFailed | None:
    """Return the failure of a response that has no error code of Pilotlight; None if it is not a failure.
    The answer of another site shows whether the request is at fault."""
    if response.status not in FAILING_STATUSES or response.header(REFUSAL):
        return None
    return SiteFailed("failing", _detail(response, body), _retry_after_s(response))


def raise_refusal(response: ResponseParser, body: bytes, *, is_for_function: bool) -> None:
    """Raise SiteFailed if the site, and not the request, is at fault.

    The site marks such a response by a header, not in the body, which may come from a function. A gateway in front of the site sends only a status;
    it counts unless the response comes from a function.
    """
    status, word = response.status, response.header(REFUSAL)
    if not word and (is_for_function or status not in SPENT_STATUSES):
        return
    queue = response.header(QUEUE)
    if word and queue.isascii() and queue.isdigit() and len(queue) < 12:
        raise SiteFailed("declined", f"its queue of {queue} tokens is too long", queued_tokens=int(queue))
    words = _said(body) if word == "engine_error" else ""
    raise SiteFailed(_KINDS.get(word, "full"), _detail(response, body), _retry_after_s(response), words=words)


def _detail(response: ResponseParser, body: bytes) -> str:
    said = _said(body)
    return f"it answered {response.status}" + (f" ({said})" if said else "")


def _said(body: bytes) -> str:
    return str(error_of(body).get("message", ""))[:200]


def _retry_after_s(response: ResponseParser) -> float | None:
    after = response.header("retry-after")
    return float(after) if after.isascii() and after.isdigit() and len(after) < 6 else None
