"""Wraps another router's policy so that sites may decline requests, as with ours.

Each choice except the last has a maximum queue length, above which its site declines.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from pilotlight.edge_router.routing.views import BackendView, Policy, Preference, RouteRequest

GUESSED_TOKENS_PER_S = 2000.0


class DecliningPolicy:
    def __init__(self, policy: Policy, slack_ms: float) -> None:
        """Wrap `policy`. A site declines if its queue exceeds the router's estimate by `slack_ms`."""
        self._policy = policy
        self._slack_ms = slack_ms

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        order = self._policy.rank(request, backends)
        for number, each in enumerate(order[:-1]):
            order[number] = replace(each, max_queue_ms=_queue_ms(request, each.backend) + self._slack_ms)
        return order


def _queue_ms(request: RouteRequest, backend: BackendView) -> float:
    model = backend.model(request.model) if request.model is not None else None
    queued = backend.pending_tokens + (model.queued_tokens if model is not None else 0)
    rate = model.prefill_tokens_per_s if model is not None and model.prefill_tokens_per_s > 0 else GUESSED_TOKENS_PER_S
    return 1000 * queued / rate
