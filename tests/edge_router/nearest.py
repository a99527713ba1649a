"""A baseline policy: the site with the shortest round trip, regardless of load."""

from collections.abc import Sequence

from pilotlight.edge_router.backends.rtt import seed_rtt_ms
from pilotlight.edge_router.routing.views import BackendView, Preference, RouteRequest, eligible


class NearestPolicy:
    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        priced = [(_rtt_ms(request, backend), backend.name, backend) for backend in eligible(request, backends)]
        return [
            Preference(backend, rtt, {"rtt": rtt}, "nearest") for rtt, _, backend in sorted(priced, key=lambda p: p[:2])
        ]


def _rtt_ms(request: RouteRequest, backend: BackendView) -> float:
    return backend.rtt_ms if request.client is None else seed_rtt_ms(request.client, backend.place)
