"""The newest requests of a router, for the page: account, site, outcome and times.

Nothing of prompts and answers is kept.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from pilotlight.edge_router.backends.site_control import SiteControl
from pilotlight.edge_router.forwarding.request_state import RequestState
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.management import REQUESTS_PATH, GenerationTimes

KEPT = 500
MAX_TIMES = 1 << 20


class EndedRequest(msgspec.Struct, frozen=True):
    request_id: str
    at_s: float  # arrival, in seconds since the epoch
    account: str  # empty without a known key
    path: str
    model: str
    site: str  # the site that answered last; empty if none did
    tries: int  # sites that failed or declined before the last one
    moves: int  # moves of the stream to another site
    outcome: str  # `ok`, an error code, or a status
    first_token_ms: float | None  # time to a stream's first token, from its arrival
    took_ms: float
    output_tokens: int


class RecentRequests:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._ended: deque[EndedRequest] = deque(maxlen=KEPT)

    def note(self, proxied: RequestState, error: BaseException | None, took_s: float) -> None:
        request, recovery = proxied.request, proxied.recovery
        holder, first_s = request.head.holder, proxied.first_token_s
        self._ended.append(EndedRequest(
            request.request_id, self._clock() - took_s, holder.account.name if holder is not None else "", request.head.path,
            request.model or "", proxied.site, len(proxied.tries.failures) + len(proxied.tries.declined),
            recovery.num_losses + recovery.num_handovers + recovery.num_moves, _outcome(proxied, error),
            None if first_s is None else 1e3 * first_s, 1e3 * took_s, proxied.delivered_tokens,
        ))  # fmt: skip

    async def described(self, orders: SiteControl) -> bytes:
        """Return the requests as JSON, the oldest first, each with the phases that its site has measured."""
        ended = list(self._ended)
        sites = {each.site for each in ended if each.site}
        found = await asyncio.gather(*(_times_at(orders, site) for site in sites))
        times = {each.request_id: each for answered in found for each in answered}
        rows: list[dict[str, Any]] = [
            {**msgspec.structs.asdict(each), "phases": times.get(each.request_id)} for each in ended
        ]
        return msgspec.json.encode({"requests": rows})


async def _times_at(orders: SiteControl, site: str) -> list[GenerationTimes]:
    """Return the newest generations of a site; empty if it does not answer."""
    if not orders.knows(site):
        return []
    answer = await orders.exchange("GET", site, REQUESTS_PATH, most_bytes=MAX_TIMES)
    try:
        return msgspec.json.decode(answer.body, type=list[GenerationTimes]) if answer.status == 200 else []
    except msgspec.DecodeError:
        return []


def _outcome(proxied: RequestState, error: BaseException | None) -> str:
    if isinstance(error, ApiError):
        return error.word
    if error is not None:
        return "client_gone"
    return "ok" if proxied.is_complete and proxied.status < 400 else str(proxied.status or "lost")
