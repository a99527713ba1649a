"""Placement of a new conversation among equally good sites: rendezvous hashing, bounded by occupancy.

Every router computes the same order from the same key without communication, and losing a site moves only that site's conversations. The policy
decides which sites are equal.
"""

from collections.abc import Sequence

from blake3 import blake3

from pilotlight.edge_router.routing.views import BackendView

BOUND = 1.25  # a site gets no new conversations while its occupancy is above this multiple of the mean
# A site below this occupancy never counts as full, because a mean over a few requests has no meaning.
ALWAYS_FREE = 0.05
MAX_WALK = 16  # the cheapest sites, of which one is chosen by hashing: a 17th would not improve the balance


def placement_order(
    key: bytes, backends: Sequence[BackendView], mean_occupancy: float | None = None
) -> list[BackendView]:
    """Return the sites for a key, highest hash first.

    `backends` are ordered best first; `mean_occupancy` is that of all sites, not only these. Sites above the bound come after the others, and so do
    sites that returned recently and do not take this key yet (`_is_taken_by`). Sites beyond the first MAX_WALK come last, in the given order.
    """
    walked = backends[:MAX_WALK]
    weights = {backend.name: _weight(key, backend.name) for backend in walked}
    hashed = sorted(walked, key=lambda backend: (weights[backend.name], backend.name), reverse=True)
    if mean_occupancy is None:
        mean_occupancy = sum(backend.occupancy or 0.0 for backend in hashed) / max(1, len(hashed))
    bound = max(ALWAYS_FREE, BOUND * mean_occupancy)
    taken = [
        backend
        for backend in hashed
        if (backend.occupancy or 0.0) <= bound and _is_taken_by(backend, weights[backend.name])
    ]
    names = {backend.name for backend in taken}
    return [*taken, *(backend for backend in hashed if backend.name not in names), *backends[MAX_WALK:]]


def _is_taken_by(backend: BackendView, weight: bytes) -> bool:
    """Tell whether a site that has just returned takes this key. Its share of the keys grows from 0 to 1.

    A key that it takes stays with it as the share grows.
    """
    return backend.slow_start >= 1 or weight[-1] < 256 * backend.slow_start


def _weight(key: bytes, name: str) -> bytes:
    return blake3(key + name.encode()).digest(8)
