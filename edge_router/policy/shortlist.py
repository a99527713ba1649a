"""Which of many sites are worth a price: pricing one takes some 4 us, and a network may have thousands.

Kept are the sites that would answer first by round trip and published queue, and whatever holds a part of the prompt as far as this router knows:
those that it sent it to, and those that publish its longest prefixes.
"""

from collections.abc import Sequence
from heapq import nsmallest
from operator import itemgetter

from edge_router.policy import BackendView, RouteRequest
from edge_router.rtt import seed_rtt_ms

MAX_NEAR = 24  # priced for being near and idle; a request asks five sites at most (three tries, two that decline) before it is ranked anew
MAX_HOLDERS = 8  # priced for what they hold, the longest first
SEARCHED_DIGESTS = 2  # of the prompt, its longest: what a conversation's last turn left. Shorter ones are looked for at the sites that are kept


def shortlist(request: RouteRequest, backends: Sequence[BackendView]) -> Sequence[BackendView]:
    """At most MAX_NEAR + MAX_HOLDERS + 1 of `backends`, in their order; all of them where they are no more than that."""
    if len(backends) <= MAX_NEAR + MAX_HOLDERS:
        return backends
    if request.client is None:
        waits_ms = [backend.rtt_ms + backend.backlog_ms for backend in backends]
    else:
        waits_ms = [seed_rtt_ms(request.client, backend.place) + backend.backlog_ms for backend in backends]
    numbers = range(len(backends))
    kept = set(nsmallest(MAX_NEAR, numbers, key=waits_ms.__getitem__))
    held = {name: tokens for name, tokens in request.held.items() if tokens > 0}
    if request.home is not None:
        held[request.home.site] = request.prompt_tokens + 1  # the conversation's own: before any other holder
    holders = [(held[backend.name], i) for i, backend in enumerate(backends) if backend.name in held]
    for digest, tokens in request.digests[:SEARCHED_DIGESTS]:
        holders += [(tokens, i) for i, backend in enumerate(backends) if digest in backend.prefixes]
    holders.sort(key=lambda pair: (-pair[0], waits_ms[pair[1]]))
    kept.update(map(itemgetter(1), holders[:MAX_HOLDERS]))
    return [backends[number] for number in sorted(kept)]
