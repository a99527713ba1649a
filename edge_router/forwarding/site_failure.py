"""Why a site did not answer, and which responses say so in the site's own name."""

from typing import Literal

from pilotlight.edge_router.forwarding.relay import error_of
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
FAILING_STATUSES = frozenset(
    {429, 500}
)  # of a site, or of what stands before it; or the request is at fault, and any site says so


class SiteFailed(Exception):
    """This site did not answer: nothing of the answer came from it."""

    def __init__(
        self,
        kind: Failure,
        detail: str,
        retry_after_s: float | None = None,
        queued_tokens: int = 0,
        words: str = "",
    ) -> None:
        """`words`: the site's own about an engine that failed under the request."""
        super().__init__(detail)
        self.words = words
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.queued_tokens = queued_tokens  # of a site that declines: how long its queue is


_KINDS: dict[str, Failure] = {
    "draining": "draining",
    "model_load_failed": "no_model",
    "misdirected_request": "no_model",  # a function's, whose home is elsewhere
    "engine_error": "lost",
    "signature": "untrusted",
    "clock": "untrusted",
}


def plain_failure(response: ResponseParser, body: bytes) -> SiteFailed | None:
    """Return the failure that an answer without a word of the site's own may be; None if it is none. Whose fault it is shows at another site."""
    if response.status not in FAILING_STATUSES or response.header(REFUSAL):
        return None
    return SiteFailed("failing", _detail(response, body), _retry_after_s(response))


def raise_refusal(response: ResponseParser, body: bytes, *, is_for_function: bool) -> None:
    """Raises SiteFailed where the site, and not the request, is at fault. The site's header says so and never a body, which may be a function's; a
    gateway before the site has only a status, which is believed where no function answers."""
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
