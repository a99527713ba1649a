"""Why a site did not answer, and which responses say so in the site's own name."""

from typing import Literal

from edge_router.relay import error_of
from wire.headers import QUEUE, REFUSAL
from wire.http.client import ResponseParser

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
]

SPENT_STATUSES = frozenset({502, 503, 504})


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


def raise_refusal(response: ResponseParser, body: bytes, *, is_for_function: bool) -> None:
    """Raises SiteFailed where the site, and not the request, is at fault. The site's header says so and never a body, which may be a function's; a
    gateway before the site has only a status, which is believed where no function answers."""
    status, word = response.status, response.header(REFUSAL)
    if not word and (is_for_function or status not in SPENT_STATUSES):
        return
    queue = response.header(QUEUE)
    if word and queue.isascii() and queue.isdigit() and len(queue) < 12:
        raise SiteFailed("declined", f"its queue of {queue} tokens is too long", queued_tokens=int(queue))
    after = response.header("retry-after")
    said = str(error_of(body).get("message", ""))[:200]
    detail = f"it answered {status}" + (f" ({said})" if said else "")
    retry_after_s = float(after) if after.isascii() and after.isdigit() and len(after) < 6 else None
    raise SiteFailed(_KINDS.get(word, "full"), detail, retry_after_s, words=said if word == "engine_error" else "")
