"""Where a new conversation goes when several sites are equally good: rendezvous hashing, bounded by occupancy.

Every router computes the same order from the same key without talking to another, and losing a site moves only that site's conversations.
Knows keys and names; what makes sites equal is the policy's business.
"""

from collections.abc import Sequence

from blake3 import blake3

from edge_router.policy import BackendView

BOUND = 1.25  # a site may hold so many times the mean occupancy before newcomers pass it by
ALWAYS_FREE = (
    0.05  # and below this occupancy it never counts as full: with three requests in the house, means mean nothing
)


def placement_order(key: bytes, backends: Sequence[BackendView]) -> list[BackendView]:
    """Highest hash first; sites above the bound follow, in the same order. The second is where the conversation spills."""
    hashed = sorted(backends, key=lambda backend: (_weight(key, backend.name), backend.name), reverse=True)
    occupancies = {backend.name: backend.occupancy or 0.0 for backend in hashed}
    bound = max(ALWAYS_FREE, BOUND * sum(occupancies.values()) / max(1, len(hashed)))
    free = [backend for backend in hashed if occupancies[backend.name] <= bound]
    return free + [backend for backend in hashed if occupancies[backend.name] > bound]


def _weight(key: bytes, name: str) -> bytes:
    return blake3(key + name.encode()).digest(8)
