"""The router's activity, as its page shows it (page/source.py).
Reads counters of other modules, once a second."""

from collections.abc import Callable

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.forwarding.request_state import RequestState
from pilotlight.page.source import Counts, Decision, Move, SiteRow, TimeHistogram, in_steps, shown
from pilotlight.wire.hop.status import Place

TOKEN_GAPS_MS = (1, 2, 3, 5, 7.5, 10, 15, 20, 30, 40, 60, 80, 120, 160, 250, 400, 700, 1200, 2500)


class RouterActivity:
    name = "router"

    def __init__(self, place: Place, version: str, proxy: Proxy, clock: Callable[[], float]) -> None:
        self.place = place
        self.version = version
        self._proxy = proxy
        self._clock = clock
        # time and number of tokens of each open answer at the last look
        self._seen: dict[RequestState, tuple[float, int]] = {}
        self._gaps = [0] * (len(TOKEN_GAPS_MS) + 1)

    def counts(self) -> Counts:
        proxy = self._proxy
        self._look_at_streams()
        statuses = [backend.status for backend in proxy.selector.backends.values() if backend.status is not None]
        models = [model for status in statuses for model in status.models]
        return Counts(
            requests=proxy.metrics.requests(),
            tokens=proxy.ended_tokens + sum(proxied.delivered_tokens for proxied in proxy.under_way),
            prompt_tokens=sum(model.prompt_tokens for model in models),
            cached_tokens=sum(model.cached_tokens for model in models),
            first_token=proxy.metrics.first_tokens(),
            token_gaps=TimeHistogram(TOKEN_GAPS_MS, tuple(self._gaps)),
            running=len(proxy.under_way),
            waiting=sum(model.waiting for model in models),
        )

    def sites(self) -> tuple[SiteRow, ...]:
        return tuple(_row(backend) for backend in self._proxy.selector.backends.values())

    def moves(self) -> tuple[Move, ...]:
        return tuple(self._proxy.metrics.moves)

    def decisions(self) -> tuple[Decision, ...]:
        return self._proxy.metrics.predictions()

    def _look_at_streams(self) -> None:
        """Record the mean time per token of each open stream since the last look, once for each of its tokens."""
        now, seen = self._clock(), {}
        for proxied in self._proxy.under_way:
            tokens = proxied.delivered_tokens
            before_at, before = self._seen.get(proxied, (now, tokens))
            if before and tokens > before:
                gap_ms = 1000 * (now - before_at) / (tokens - before)
                place = next((i for i, bound in enumerate(TOKEN_GAPS_MS) if gap_ms <= bound), len(TOKEN_GAPS_MS))
                self._gaps[place] += tokens - before
            seen[proxied] = (now, tokens) if tokens != before or proxied not in self._seen else self._seen[proxied]
        self._seen = seen


def _row(backend: Backend) -> SiteRow:
    view = backend.published_view()
    if (status := view.status) is None:
        return SiteRow(
            backend.name, view.state, backend.detail, rtt_ms=round(view.rtt_ms, 1), open_requests=view.inflight
        )
    return SiteRow(
        backend.name, view.state, backend.detail, status.version, status.place, round(view.rtt_ms, 1), view.inflight,
        status.inflight, status.max_inflight, tuple(map(shown, status.models)), status.processes,
        status.functions, in_steps(status.uptime_s),
    )  # fmt: skip
