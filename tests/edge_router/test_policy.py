"""Policies are pure functions of snapshots: they return an order of sites, with reasons."""

import pytest
from msgspec.structs import replace

from load_tests.sim.policies.least_outstanding import LeastOutstandingPolicy
from load_tests.sim.policies.llm_d import WeightedScoresPolicy
from load_tests.sim.policies.round_robin import RoundRobinPolicy
from pilotlight.edge_router.routing.cost import Assumptions, CostPolicy
from pilotlight.edge_router.routing.placement import placement_order
from pilotlight.edge_router.routing.views import BackendView, Home, Policy, Preference, RouteRequest
from pilotlight.wire.hop.status import Place
from tests.edge_router.builders import PLACES, view
from tests.edge_router.nearest import NearestPolicy

ALL_POLICIES = [CostPolicy, NearestPolicy, RoundRobinPolicy, LeastOutstandingPolicy, WeightedScoresPolicy]
ASK = RouteRequest(model="ember", prompt_tokens=1000)


def rank(request: RouteRequest, *backends: BackendView) -> list[Preference]:
    return CostPolicy().rank(request, backends)


def names(preferences: list[Preference]) -> list[str]:
    return [preference.backend.name for preference in preferences]


def term(request: RouteRequest, backend: BackendView, name: str) -> float:
    return rank(request, backend)[0].terms[name]


def test_the_cost_is_the_sum_of_its_terms() -> None:
    backend = view(
        rtt_ms=7.0, model={"prefill_tokens_per_s": 1000.0, "queued_tokens": 500, "residency": "disk", "wake_ms": 80.0}
    )
    preference = rank(ASK, backend)[0]
    assert preference.terms == pytest.approx(
        {"rtt": 7.0, "queue_ahead": 500.0, "prefill": 1000.0, "wake": 80.0}
        | dict.fromkeys(("decode_step", "full", "doubt", "lateness"), 0.0)
    )
    assert preference.cost_ms == pytest.approx(1587.0)


def test_the_nearer_of_two_idle_sites_is_chosen() -> None:
    assert names(rank(ASK, view("iad1", rtt_ms=90.0), view("ams1", rtt_ms=2.0))) == ["ams1", "iad1"]


def at(store: str, queued_tokens: int = 0, rate: float = 20_000.0) -> dict[str, object]:
    """Return the fields of a model whose site reads from the KV store `store`."""
    return {"queued_tokens": queued_tokens, "kv_store": store, "kv_store_tokens_per_s": rate}


def test_beside_a_store_a_conversation_leaves_a_home_that_is_busy_for_less_than_it_would_without() -> None:
    at_home = replace(ASK, prompt_tokens=4000, home=Home("home", 3900, by_name=False))
    for store, first in ("one", "same"), ("", "home"):
        ranked = rank(at_home, view("home", model=at(store, 1000)), view("same", model=at(store)))
        assert names(ranked)[0] == first


def test_a_long_conversation_goes_to_its_far_home_and_a_short_one_does_not() -> None:
    near, far = view("ams1", rtt_ms=2.0), view("iad1", rtt_ms=102.0)
    long = RouteRequest("ember", 1000, b"k", Home("iad1", 950, by_name=False))
    short = RouteRequest("ember", 30, b"k", Home("iad1", 20, by_name=False))
    assert next((p.backend.name, p.reason) for p in rank(long, near, far)) == ("iad1", "home")
    assert next((p.backend.name, p.reason) for p in rank(short, near, far)) == ("ams1", "home_too_dear")


def test_a_client_that_named_its_session_stays_through_small_differences() -> None:
    home, other = view("ams1", rtt_ms=40.0), view("iad1", rtt_ms=1.0)
    asked = RouteRequest("ember", 10, b"k", Home("ams1", 0, by_name=True))
    guessed = RouteRequest("ember", 10, b"k", Home("ams1", 0, by_name=False))
    assert names(rank(asked, home, other)) == ["ams1", "iad1"]
    assert names(rank(guessed, home, other)) == ["iad1", "ams1"]


def test_an_overloaded_home_is_left_and_a_lost_one_is_named_in_the_reason() -> None:
    asked = RouteRequest("ember", 1000, b"k", Home("ams1", 1000, by_name=True))
    overloaded = view("ams1", model={"queued_tokens": 8000})
    assert next((p.backend.name, p.reason) for p in rank(asked, overloaded, view("iad1"))) == ("iad1", "home_too_dear")
    lost = view("ams1", state="unhealthy")
    order = rank(asked, lost, view("iad1"), view("sin1"))
    assert order[0].reason == "home_lost"
    assert "ams1" not in names(order)


def test_new_conversations_spread_over_equal_sites_and_each_key_keeps_its_site() -> None:
    sites = [view("ams1"), view("iad1", rtt_ms=2.0), view("sin1", rtt_ms=3.0)]
    chosen = {}
    for i in range(300):
        request = RouteRequest("ember", 10, f"conversation {i}".encode())
        first, again = rank(request, *sites)[0], rank(request, *reversed(sites))[0]
        assert first.backend.name == again.backend.name
        assert first.reason == "placed"
        chosen[i] = first.backend.name
    for name in ("ams1", "iad1", "sin1"):
        assert 60 < sum(site == name for site in chosen.values()) < 140


def test_losing_a_site_moves_only_its_own_conversations() -> None:
    sites = [view("ams1"), view("iad1"), view("sin1")]
    for i in range(200):
        key = f"conversation {i}".encode()
        before = placement_order(key, sites)
        after = placement_order(key, sites[:2])
        assert [backend.name for backend in after] == [backend.name for backend in before if backend.name != "sin1"]


def test_a_site_far_above_the_mean_occupancy_takes_no_new_conversations() -> None:
    busy = view("ams1", site={"inflight": 200})
    sites = [busy, view("iad1", site={"inflight": 20}), view("sin1", site={"inflight": 20})]
    assert all(placement_order(f"{i}".encode(), sites)[-1] is busy for i in range(50))


def test_a_far_site_is_not_within_reach_of_placement() -> None:
    sites = [view("ams1"), view("iad1", rtt_ms=90.0)]
    assert {rank(RouteRequest("ember", 10, f"{i}".encode()), *sites)[0].backend.name for i in range(50)} == {"ams1"}


def test_a_site_without_a_free_permit_is_nearly_the_last_resort() -> None:
    full = view("ams1", site={"inflight": 255}, pending_requests=1)
    assert names(rank(ASK, full, view("iad1", rtt_ms=900.0))) == ["iad1", "ams1"]


def test_the_queue_that_a_full_first_choice_may_have_is_no_longer_for_its_being_full() -> None:
    full = view("ams1", site={"inflight": 256})
    first = rank(ASK, full, view("iad1", site={"inflight": 256}, rtt_ms=301.0))[0]
    assert (first.backend.name, first.terms["full"]) == ("ams1", Assumptions().full_ms)
    assert first.max_queue_ms == pytest.approx(300.0 + Assumptions().queue_slack_ms)


def test_a_client_place_ranks_by_its_distance_plus_the_excess_we_measured() -> None:
    client = Place("client", 1.3, 103.9)
    near_us, near_client = view("ams1"), view("sin1", rtt_ms=216.0, seed_rtt_ms=216.0)
    request = replace(ASK, client=client)
    assert names(rank(request, near_us, near_client)) == ["sin1", "ams1"]
    slow = view("sin1", rtt_ms=266.0, seed_rtt_ms=216.0)
    assert term(request, slow, "rtt") == pytest.approx(term(request, near_client, "rtt") + 50.0)


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_every_policy_leaves_out_sites_that_cannot_answer(policy: type[Policy]) -> None:
    sites = [
        view("ams1", state="unhealthy"),
        view("iad1", state="draining"),
        view("sin1", model={"name": "other"}),
        view("fra1", model={"residency": "failed"}),
        view("lhr1", model={"name": "big", "aliases": ("ember",)}),
        view("cdg1", state="unknown", status=None),
    ]
    assert sorted(names(policy().rank(ASK, sites))) == ["cdg1", "lhr1"]


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_model_that_no_site_has_still_goes_to_a_site_which_will_say_so(policy: type[Policy]) -> None:
    assert sorted(names(policy().rank(RouteRequest("nobody-has-it", 5), [view("ams1"), view("iad1")]))) == [
        "ams1",
        "iad1",
    ]


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_a_name_with_a_colon_is_a_models_before_it_is_an_adapters(policy: type[Policy]) -> None:
    base, own = view("ams1", model={"name": "qwen"}), view("iad1", model={"name": "big", "aliases": ("qwen:4b",)})
    away = replace(own, state="unhealthy")
    for name, sites, ranked in (
        ("qwen:4b", [base, own], ["iad1"]),
        ("qwen:4b", [base, away], ["iad1"]),
        ("qwen:4b", [base, view("sin1", status=None)], ["ams1", "sin1"]),
        ("qwen:french", [base, own], ["ams1"]),
        ("qwen:4b:french", [base, own], ["iad1"]),
    ):
        assert sorted(names(policy().rank(RouteRequest(name, 5), sites))) == ranked


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_where_no_site_is_usable_the_unhealthy_are_the_last_resort_and_a_draining_one_is_not(
    policy: type[Policy],
) -> None:
    sites = [view("ams1", state="draining"), view("iad1", state="unhealthy")]
    assert names(policy().rank(ASK, sites)) == ["iad1"]
    assert policy().rank(ASK, sites[:1]) == []


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_an_ejected_site_is_left_out_until_too_few_would_be_left(policy: type[Policy]) -> None:
    ejected = [view("ams1", is_ejected=True), view("iad1", is_ejected=True), view("sin1")]
    assert sorted(names(policy().rank(ASK, ejected[1:]))) == ["sin1"]
    assert sorted(names(policy().rank(ASK, ejected))) == ["ams1", "iad1", "sin1"]


def test_a_site_that_has_just_come_back_takes_its_share_of_new_conversations_and_always_the_same_ones() -> None:
    back, other = view("ams1", slow_start=0.25), view("iad1")
    keys = [f"{i}".encode() for i in range(400)]
    quarter = {key for key in keys if placement_order(key, [back, other])[0] is back}
    half = {key for key in keys if placement_order(key, [replace(back, slow_start=0.5), other])[0].name == "ams1"}
    assert 20 < len(quarter) < 90
    assert quarter < half


def test_the_baselines_do_what_their_names_say() -> None:
    sites = [
        view("ams1", rtt_ms=9.0, outstanding=0),
        view("iad1", rtt_ms=1.0, outstanding=5),
        view("sin1", rtt_ms=5.0, outstanding=0),
    ]
    assert names(NearestPolicy().rank(ASK, sites)) == ["iad1", "sin1", "ams1"]
    assert names(LeastOutstandingPolicy().rank(ASK, sites)) == ["sin1", "ams1", "iad1"]
    turns = RoundRobinPolicy()
    assert [names(turns.rank(ASK, sites))[0] for _ in range(4)] == ["ams1", "iad1", "sin1", "ams1"]


def test_nearest_can_stand_where_the_client_stands() -> None:
    request = replace(ASK, client=PLACES["sin1"])
    assert names(NearestPolicy().rank(request, [view("ams1"), view("sin1", rtt_ms=216.0)])) == ["sin1", "ams1"]


def test_a_loading_model_serves_nothing_until_its_wake_is_over() -> None:
    loading = {"residency": "loading", "wake_ms": 4000.0, "loaded": 0.5, "queued_tokens": 4000}
    backend = view(status_at_s=100.0, model={**loading, "prefill_tokens_per_s": 2000.0})
    for now_s, wake_ms, queue_ms in ((100.0, 2000.0, 2000.0), (101.5, 500.0, 2000.0), (103.0, 0.0, 1000.0)):
        terms = rank(replace(ASK, now_s=now_s), backend)[0].terms
        assert (terms["wake"], terms["queue_ahead"]) == (pytest.approx(wake_ms), pytest.approx(queue_ms))


def test_a_model_that_this_router_has_woken_costs_only_the_rest_of_the_wake() -> None:
    asleep = view(
        model={"residency": "host", "wake_ms": 4000.0}, pending_requests=1, pending_tokens=10, pending_since_s=100.0
    )
    assert term(replace(ASK, now_s=103.0), asleep, "wake") == pytest.approx(1000.0)


def test_a_site_whose_answers_come_late_is_as_much_dearer_and_expected_no_later() -> None:
    late, other = view("ams1", lateness_ms=400.0), view("iad1", rtt_ms=90.0)
    order = rank(ASK, late, other)
    assert names(order) == ["iad1", "ams1"]
    assert order[1].cost_ms == pytest.approx(901.0)
    assert order[1].expected_ms == pytest.approx(501.0)  # lateness does not extend the time limit


def test_a_site_beside_the_client_is_expected_to_answer_as_late_as_it_is_far_from_the_router() -> None:
    far = view("sin1", rtt_ms=216.0, seed_rtt_ms=216.0)
    preference = rank(replace(ASK, client=PLACES["sin1"]), far)[0]
    assert preference.terms["rtt"] < 1
    assert preference.expected_ms == pytest.approx(216.0 + 500.0)


def test_a_published_queue_is_worked_off_while_its_news_ages() -> None:
    queue = {"queued_tokens": 4000, "prefill_tokens_per_s": 2000.0}
    backend = view(status_at_s=100.0, model=queue)
    assert term(replace(ASK, now_s=100.0), backend, "queue_ahead") == pytest.approx(2000.0)
    assert term(replace(ASK, now_s=101.5), backend, "queue_ahead") == pytest.approx(500.0)
    assert term(replace(ASK, now_s=109.0), backend, "queue_ahead") == 0.0
    assert term(replace(ASK, now_s=-5.0), backend, "queue_ahead") == pytest.approx(2000.0)  # a clock that was set back


def test_what_this_router_sent_a_moment_ago_is_still_ahead_however_old_the_status_is() -> None:
    backend = view(
        status_at_s=100.0, pending_tokens=2000, pending_since_s=108.9, model={"prefill_tokens_per_s": 2000.0}
    )
    assert term(replace(ASK, now_s=109.0), backend, "queue_ahead") == pytest.approx(900.0)


def test_a_long_prompt_leaves_a_busy_site_to_later_requests() -> None:
    """Both sites would answer at the same time. At one of them, four other requests per second would wait for it."""
    quiet = view("iad1", rtt_ms=5.0, model={"queued_tokens": 1000})
    busy = view(
        "ams1", rtt_ms=1.0, model={"queued_tokens": 1000, "arriving_per_s": 4.0, "arriving_tokens_per_s": 500.0}
    )
    assert names(rank(replace(ASK, prompt_tokens=4000), quiet, busy)) == ["iad1", "ams1"]


@pytest.mark.parametrize(("queued", "chosen"), [(8000, "iad1"), (0, "ams1")])
def test_a_client_with_an_unusual_wait_owes_less_to_later_requests(queued: int, chosen: str) -> None:
    """The client would wait 2.5 s at the busy site and 3.5 s at the quiet one. The third site determines the usual wait."""
    rate = {"prefill_tokens_per_s": 2000.0}
    quiet = view("iad1", rtt_ms=1000.0, model={"queued_tokens": 1000, **rate})
    some, many = ({"arriving_per_s": each, "arriving_tokens_per_s": 500.0, **rate} for each in (4.0, 40.0))
    busy = view("ams1", rtt_ms=1.0, model={"queued_tokens": 1000, **some})
    far = view("syd1", rtt_ms=9000.0, model={"queued_tokens": queued, **many})
    assert names(rank(replace(ASK, prompt_tokens=4000), quiet, busy, far))[0] == chosen


def test_patience_is_the_predicted_queue_and_what_the_next_site_costs_more() -> None:
    first, second = rank(ASK, view("ams1", rtt_ms=1.0, model={"queued_tokens": 200}), view("iad1", rtt_ms=301.0))
    assert first.backend.name == "ams1"
    assert first.max_queue_ms == pytest.approx(100.0 + (second.cost_ms - first.cost_ms) + Assumptions().queue_slack_ms)
    assert second.max_queue_ms is None
    assert rank(ASK, view("ams1"))[0].max_queue_ms is None  # no other site is left, so it must accept


def test_each_choice_but_the_last_says_how_long_its_queue_may_be() -> None:
    sites = [view(f"s{i}", rtt_ms=100.0 * i, model={"queued_tokens": 100 * i}) for i in range(1, 5)]
    order, slack_ms = rank(ASK, *reversed(sites)), Assumptions().queue_slack_ms
    assert names(order) == ["s1", "s2", "s3", "s4"]
    assert [each.max_queue_ms for each in order] == [
        *(pytest.approx(50.0 * i + 150 + slack_ms) for i in (1, 2, 3)),
        None,
    ]


def test_what_another_site_holds_is_left_to_it_for_longer_the_busier_the_network_is() -> None:
    """Home has a queue of 800 ms; another site needs 500 ms to compute what home has cached."""
    at_home = RouteRequest("ember", 1100, b"k", Home("ams1", 1000, by_name=False))

    def chosen(arriving: float, queued: int = 1600) -> str:
        rates = {"prefill_tokens_per_s": 2000.0, "arriving_tokens_per_s": arriving}
        return rank(at_home, view("ams1", model={"queued_tokens": queued, **rates}), view("iad1", model=rates))[
            0
        ].backend.name

    assert chosen(arriving=0.0) == "iad1"
    assert chosen(arriving=1000.0) == "ams1"
    assert chosen(arriving=1000.0, queued=8000) == "iad1"  # no request waits 4 s to save 0.5 s


def test_a_prefix_that_several_sites_hold_is_computed_at_another_sooner_than_one_of_a_single_conversation() -> None:
    """12,000 tokens take 6 s; the sites that have cached them have a queue of 12 s."""
    rates = {"prefill_tokens_per_s": 2000.0, "arriving_tokens_per_s": 1000.0}
    holders = [view(name, model={"queued_tokens": 24_000, **rates}) for name in ("ams1", "fra1", "lhr1")]
    other = view("iad1", model=rates)
    for at_others, chosen in ((0, "ams1"), (5999, "ams1"), (6000, "iad1"), (12_000, "iad1")):
        held = {"ams1": 12_000, "fra1": at_others, "lhr1": at_others}
        assert rank(RouteRequest("ember", 12_100, b"k", held=held), *holders, other)[0].backend.name == chosen


@pytest.mark.parametrize("prompt_tokens", [1000, 20_000, 100_000])
def test_a_client_waits_for_others_sake_no_longer_than_its_own_wait_allows(prompt_tokens: int) -> None:
    """The fast site gets ten short requests a second, which a long prompt would delay. The slow one is idle and ten times slower."""
    rates = {"prefill_tokens_per_s": 5000.0, "arriving_per_s": 10.0, "arriving_tokens_per_s": 4000.0}
    fast = view("ams1", model=rates)
    slow = view("iad1", model={"prefill_tokens_per_s": 500.0})
    order = rank(replace(ASK, prompt_tokens=prompt_tokens), fast, slow)
    assert order[0].cost_ms <= (1 + Assumptions().delay_share) * min(each.cost_ms for each in order)


def test_the_network_s_load_counts_a_fast_site_for_more_than_a_slow_one() -> None:
    """A fully used slow site and an idle one that is 100 times as fast count as an idle network."""
    slow = view("ams1", model={"prefill_tokens_per_s": 100.0, "arriving_tokens_per_s": 100.0})
    fast = view("iad1", rtt_ms=30.0, model={"prefill_tokens_per_s": 10_000.0})
    home = replace(ASK, home=Home("ams1", 990, by_name=False))
    assert names(rank(home, replace(slow, rtt_ms=160.0), fast)) == ["iad1", "ams1"]
