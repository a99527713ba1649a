"""Metrics of the policy's decisions: whether the status was recent, and which term decided."""

import pytest

from pilotlight.edge_router.backends.discovery import Discovery
from pilotlight.edge_router.routing.cost import CostPolicy
from pilotlight.edge_router.routing.views import Preference, RouteRequest
from pilotlight.edge_router.telemetry.metrics import RouterMetrics
from pilotlight.page.source import Decision, Move
from pilotlight.wire.hop.prefixes import encode_prefixes
from tests.edge_router.builders import Clock, model_status, network, site_status


def test_a_site_that_falls_silent_is_seen_to_be_guessed_at_and_pays_for_it() -> None:
    clock = Clock()
    backends = Discovery(network({"ams1": "http://127.0.0.1:1"}), clock).backends
    backend, metrics = backends["ams1"], RouterMetrics(backends.values())

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"pilotlight_router_{name}", labels)

    assert value("site_status_fresh", site="ams1") == 0.0
    models = (model_status(prefixes=encode_prefixes([4, 5]), prefill_tokens_per_s=1000.0),)
    backend.answered(site_status("ams1", models=models), clock())
    assert value("site_status_fresh", site="ams1") == 1.0
    assert value("site_prefixes", site="ams1") == 2.0
    request = RouteRequest("ember", 10)
    metrics.decided(CostPolicy().rank(request, [backend.view()])[0])
    clock.advance(11.0)
    assert value("site_status_fresh", site="ams1") == 0.0
    guessed = CostPolicy().rank(request, [backend.view()])[0]
    metrics.decided(guessed)
    assert guessed.terms["doubt"] > 1000
    assert value("dearest_term_total", term="doubt") == 1.0
    assert value("decisions_total", reason="only") == 2.0


def test_everything_that_happens_to_requests_is_counted_under_its_own_name() -> None:
    clock = Clock()
    backends = Discovery(network({"ams1": "http://127.0.0.1:1", "iad1": "http://127.0.0.1:2"}), clock).backends
    metrics = RouterMetrics(backends.values())

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"pilotlight_router_{name}", labels)

    assert value("streams_lost_total", site="ams1") == 0.0, "Prometheus finds no increase in a series that begins at 1"
    for _ in range(2):
        metrics.ended("ams1", "ok")
    metrics.ended("iad1", "ok")
    metrics.tried("iad1", "full")
    metrics.stream_disturbed("ams1", "closed")
    metrics.stream_lost("ams1")
    metrics.watch("open_things", "Things that are open.", lambda: 7.0)
    assert (value("requests_total", site="ams1", outcome="ok"), metrics.requests()) == (2.0, {"ok": 3})
    assert value("tries_total", site="iad1", result="full") == 1.0
    assert value("streams_disturbed_total", site="ams1", cause="closed") == 1.0
    assert (value("streams_lost_total", site="ams1"), value("open_things")) == (1.0, 7.0)
    for name, delay_s in (("iad1", 0.25), ("ams1", 0.5)):
        metrics.stream_continued("sin1", "silent", name, delay_s)
    assert value("streams_continued_total", site="iad1") == 1.0
    assert value("continuation_delay_seconds_sum") == 0.75
    assert [*metrics.moves] == [Move(1, "sin1", "iad1", "silent", 250.0), Move(2, "sin1", "ams1", "silent", 500.0)]
    view = backends["ams1"].view()
    for actual_s in (0.03, 0.05):
        metrics.first_token(Preference(view, 40.0, {"rtt": 10.0004, "prefill": 29.9996}, "home"), actual_s)
    metrics.decided(Preference(view, 40.0, {"rtt": 10.0, "prefill": 30.0}, "home"))
    metrics.decided(Preference(view, 40.0, {}, "only"))
    assert value("predicted_ms_total", site="ams1", term="prefill") == pytest.approx(60.0, abs=0.01)
    assert value("time_to_first_token_seconds_sum", site="ams1") == pytest.approx(0.08)
    errors = [value("prediction_error_ms_bucket", site="ams1", le=le) for le in ("-30.0", "0.0", "10.0")]
    assert errors == [0.0, 1.0, 2.0], "10 ms early, and 10 ms late"
    assert (value("dearest_term_total", term="prefill"), value("dearest_term_total", term="rtt")) == (1.0, None)
    assert [*metrics.predictions()] == [
        Decision(n, "ams1", "home", {"rtt": 10.0, "prefill": 30.0}, 40.0, ms) for n, ms in ((1, 30.0), (2, 50.0))
    ]
    assert sum(metrics.first_tokens().counts) == 2
    assert b"pilotlight_router_site_state" in metrics.render()


def test_a_site_is_shown_in_the_one_state_that_it_is_in_with_what_is_under_way_there() -> None:
    clock = Clock()
    backends = Discovery(network({"ams1": "http://127.0.0.1:1"}), clock).backends
    backend, metrics = backends["ams1"], RouterMetrics(backends.values())

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"pilotlight_router_{name}", {"site": "ams1", **labels})

    def states() -> list[str]:
        names = ("unknown", "healthy", "unhealthy", "draining")
        return [name for name in names if value("site_state", state=name) == 1.0]

    assert states() == ["unknown"]
    backend.answered(site_status("ams1"), clock())
    with backend.inflight(300):
        assert (states(), value("site_inflight"), value("site_pending_tokens")) == (["healthy"], 1.0, 300.0)
    backend.refused_draining()
    assert (states(), value("site_inflight"), value("site_pending_tokens")) == (["draining"], 0.0, 0.0)
    assert value("site_rtt_ms") == backend.round_trip.ms
