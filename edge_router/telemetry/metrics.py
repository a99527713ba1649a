"""The router's metrics for Prometheus: requests, attempts, decisions and sites.

A decision's predicted terms can be compared with actual times. Each application has its own registry, so two routers in one process do not count into
each other.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.routing.views import Preference
from pilotlight.page.counters import times_of, totals_by
from pilotlight.page.source import Decision, Move, TimeHistogram

NO_SITE = ""  # the site label of a request that no site answered
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0, 120.0)
ERROR_BUCKETS_MS = (-1000, -300, -100, -30, -10, 0, 10, 30, 100, 300, 1000, 3000)
CONTINUATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2)
RECENT = 100  # number of recent predictions and moves that the page can show
STATES = ("unknown", "healthy", "unhealthy", "draining")

Keys = Callable[[], Iterable[tuple[str, ...]]]


class _Counts(Collector):
    """A counter whose values are collected on request.

    A counter of prometheus_client makes seven calls and takes a lock for each increment, to support threads.
    """

    def __init__(
        self, registry: CollectorRegistry, name: str, meaning: str, labels: tuple[str, ...], always: Keys
    ) -> None:
        """Register the counter.

        `always` returns label values that are collected even at 0, because Prometheus finds no increase in a series that begins at 1."""
        self.by: defaultdict[tuple[str, ...], float] = defaultdict(float)
        self._family, self._always = (name, meaning, labels), always
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        name, meaning, labels = self._family
        family = CounterMetricFamily(name, meaning, labels=labels)
        for key, value in ({key: 0.0 for key in self._always()} | self.by).items():
            family.add_metric(key, value)
        yield family


class RouterMetrics:
    def __init__(self, backends: Collection[Backend]) -> None:
        """`backends` is a view that may change."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_BackendCollector(backends))
        self._requests = self._counts(
            "requests", "Requests by the site that answered and by outcome.", "site", "outcome"
        )
        self._tries = self._counts("tries", "Attempts at sites, by result.", "site", "result")
        self._decisions = self._counts("decisions", "Routing decisions by the reason of the policy.", "reason")
        about = "Routing decisions by the largest term of the predicted cost."
        self._dearest = self._counts("dearest_term", about, "term")
        about = "Sum of predicted times to the first token of streams, by term of the cost."
        self._predicted_ms = self._counts("predicted_ms", about, "site", "term")
        about = "Actual time to the first token of streams; compare its sum with predicted_ms."
        self._ttft = self._times("time_to_first_token_seconds", about, TTFT_BUCKETS_S, "site")
        about = "Actual minus predicted time to the first token."
        self._error_ms = self._times("prediction_error_ms", about, ERROR_BUCKETS_MS, "site")
        about = (
            "Streams that lost their site, by site and cause. Each is then continued or lost, unless its client leaves."
        )
        self._disturbed = self._counts("streams_disturbed", about, "site", "cause")
        self._continued = self._counts(
            "streams_continued", "Streams that continued at another site, by that site.", "site"
        )
        about = "Streams that ended with an error event, by the lost site."
        self._lost = self._counts("streams_lost", about, "site", always=lambda: ((each.name,) for each in backends))
        about = "Time from the last event of the lost site to the first event of the next one."
        self._continuation = self._times("continuation_delay_seconds", about, CONTINUATION_BUCKETS_S)
        self.moves: deque[Move] = deque(maxlen=RECENT)
        self._num_predictions = 0
        # predictions that the page has not read yet
        self._unread: deque[tuple[int, Preference, float]] = deque(maxlen=RECENT)
        self._predictions: deque[Decision] = deque(maxlen=RECENT)
        self._of_site: dict[str, tuple[Histogram, Histogram]] = {}

    def _counts(self, name: str, meaning: str, *labels: str, always: Keys = tuple) -> _Counts:
        return _Counts(self.registry, f"pilotlight_router_{name}", meaning, labels, always)

    def _times(self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"pilotlight_router_{name}", meaning, labels, buckets=buckets, registry=self.registry)

    def watch(self, name: str, meaning: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read when metrics are collected."""
        Gauge(f"pilotlight_router_{name}", meaning, registry=self.registry).set_function(read)

    def ended(self, site: str, outcome: str) -> None:
        self._requests.by[site, outcome] += 1

    def tried(self, site: str, result: str) -> None:
        self._tries.by[site, result] += 1

    def decided(self, preference: Preference) -> None:
        self._decisions.by[(preference.reason,)] += 1
        if terms := preference.terms:
            self._dearest.by[(max(terms, key=terms.__getitem__),)] += 1

    def first_token(self, preference: Preference, actual_s: float) -> None:
        """Record predicted and actual time to first token of a stream from the site that was chosen first."""
        site = preference.backend.name
        for term, value in preference.terms.items():
            self._predicted_ms.by[site, term] += value
        times = self._of_site.get(site)
        if times is None:  # kept for the next call, because `labels` takes 2 us
            times = self._of_site[site] = self._ttft.labels(site), self._error_ms.labels(site)
        times[0].observe(actual_s)
        times[1].observe(1000 * actual_s - preference.cost_ms)
        self._num_predictions += 1
        self._unread.append((self._num_predictions, preference, actual_s))

    def predictions(self) -> tuple[Decision, ...]:
        """Return the last predictions and the actual times."""
        while self._unread:
            self._predictions.append(_decision(*self._unread.popleft()))
        return tuple(self._predictions)

    def stream_disturbed(self, site: str, cause: str) -> None:
        self._disturbed.by[site, cause] += 1

    def stream_continued(self, lost_site: str, cause: str, site: str, delay_s: float) -> None:
        self._continued.by[(site,)] += 1
        self._continuation.observe(delay_s)
        number = self.moves[-1].number + 1 if self.moves else 1
        self.moves.append(Move(number, lost_site, site, cause, round(1000 * delay_s, 1)))

    def stream_lost(self, site: str) -> None:
        self._lost.by[(site,)] += 1

    def requests(self) -> dict[str, int]:
        """Return the numbers of ended requests, by outcome."""
        return totals_by(self._requests, "outcome")

    def first_tokens(self) -> TimeHistogram:
        """Return the times to first token of all sites' streams."""
        return times_of(self._ttft)

    def render(self) -> bytes:
        return generate_latest(self.registry)


def _decision(number: int, preference: Preference, actual_s: float) -> Decision:
    terms = {name: round(value, 3) for name, value in preference.terms.items()}
    site, predicted_ms = preference.backend.name, round(preference.cost_ms, 3)
    return Decision(number, site, preference.reason, terms, predicted_ms, round(1000 * actual_s, 3))


class _BackendCollector:
    """Metrics of sites, which are read when metrics are collected, not updated when they change."""

    def __init__(self, backends: Collection[Backend]) -> None:
        self._backends = backends

    def collect(self) -> Iterator[Metric]:
        def gauge(name: str, about: str, *labels: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"pilotlight_router_site_{name}", about, labels=("site", *labels))

        state = gauge("state", "1 for the state a site is in.", "state")
        rtt = gauge("rtt_ms", "Round-trip time to the site.")
        inflight = gauge("inflight", "Requests of this router in progress at the site.")
        pending = gauge("pending_tokens", "Prompt tokens sent to the site since its last status.")
        fresh = gauge("status_fresh", "1 if the site's status is recent; 0 if decisions rest on estimates.")
        prefixes = gauge("prefixes", "Prefixes that the site publishes as cached.")
        for backend in self._backends:
            view = backend.view()
            for name in STATES:
                state.add_metric([backend.name, name], float(view.state == name))
            rtt.add_metric([backend.name], view.rtt_ms)
            inflight.add_metric([backend.name], view.outstanding)
            pending.add_metric([backend.name], view.pending_tokens)
            fresh.add_metric([backend.name], float(view.status is not None and view.status_is_fresh))
            prefixes.add_metric([backend.name], len(view.prefixes))
        yield from (state, rtt, inflight, pending, fresh, prefixes)
