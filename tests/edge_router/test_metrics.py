"""What operators see of the policy's knowledge: whether it rests on news or on guesses, and which term decided."""

from edge_router.discovery import static_backends
from edge_router.metrics import RouterMetrics
from edge_router.policy import RouteRequest
from edge_router.policy.cost import CostPolicy
from tests.edge_router.builders import Clock, model_status, network, site_status
from wire.prefixes import encode_prefixes


def test_a_site_that_falls_silent_is_seen_to_be_guessed_at_and_pays_for_it() -> None:
    clock = Clock()
    backends = static_backends(network({"ams1": "http://127.0.0.1:1"}), clock)
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
