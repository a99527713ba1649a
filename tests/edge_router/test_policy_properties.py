"""Properties of the policy for any sites and requests, which hypothesis generates. Only the order is checked."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.discovery import Discovery
from pilotlight.edge_router.routing.cost import MAX_HOLDERS, MAX_NEAR, CostPolicy, NetworkRates, Priced, Scored
from pilotlight.edge_router.routing.placement import MAX_WALK
from pilotlight.edge_router.routing.views import BackendView, Home, RouteRequest
from pilotlight.wire.hop.status import ModelStatus, Place
from tests.edge_router.builders import Clock, model_status, network, site_status, view
from tests.edge_router.plain_cost import plain_costs, plain_scores

NAMES = tuple(f"s{i}" for i in range(8))


@st.composite
def backends(draw: st.DrawFn) -> list[BackendView]:
    return [draw(backend(name)) for name in NAMES[: draw(st.integers(1, len(NAMES)))]]


@st.composite
def backend(draw: st.DrawFn, name: str) -> BackendView:
    model = {
        "residency": draw(st.sampled_from(["device", "host", "loading"])),
        "queued_tokens": draw(st.integers(0, 20_000)),
        "running": draw(st.integers(0, 50)),
        "prefill_tokens_per_s": draw(st.sampled_from([0.0, 500.0, 5000.0])),
        "decode_tokens_per_s": draw(st.sampled_from([0.0, 10.0, 100.0])),
        "wake_ms": draw(st.sampled_from([0.0, 800.0])),
        "kv_store": draw(st.sampled_from(["", "one", "another"])),
        "kv_store_tokens_per_s": draw(st.sampled_from([0.0, 1000.0, 20_000.0])),
        "kv_blocks_total": 100,
        "kv_blocks_free": draw(st.integers(0, 100)),
    }
    return view(
        name,
        model=model,
        site={"inflight": draw(st.integers(0, 256))},
        state=draw(st.sampled_from(["healthy", "unknown", "unhealthy", "draining"])),
        rtt_ms=draw(st.floats(0.3, 300)),
        lateness_ms=draw(st.sampled_from([0.0, 250.0])),
        proven_lateness_ms=draw(st.sampled_from([0.0, 100.0])),
        unanswered_tokens=draw(st.sampled_from([0, 3000])),
        pending_tokens=draw(st.integers(0, 5000)),
        pending_requests=draw(st.integers(0, 5)),
        status_is_fresh=draw(st.booleans()),
        is_ejected=draw(st.booleans()),
        prefixes=draw(st.frozensets(st.integers(0, 3))),
        slow_start=draw(st.sampled_from([0.1, 1.0])),
    )


@st.composite
def requests(draw: st.DrawFn) -> RouteRequest:
    prompt = draw(st.integers(0, 20_000))
    home = draw(st.none() | st.builds(Home, st.sampled_from(NAMES), st.integers(0, prompt), st.booleans()))
    held = draw(st.dictionaries(st.sampled_from(NAMES), st.integers(0, prompt), max_size=3))
    key = draw(st.none() | st.binary(min_size=1, max_size=4))
    return RouteRequest("ember", prompt, key, home, None, held, ((1, prompt), (2, prompt // 2)))


def order(request: RouteRequest, sites: list[BackendView]) -> list[str]:
    return [preference.backend.name for preference in CostPolicy().rank(request, sites)]


@given(requests(), backends())
def test_an_unusable_site_never_stands_before_a_usable_one(request: RouteRequest, sites: list[BackendView]) -> None:
    ranked = CostPolicy().rank(request, sites)
    if any(site.is_usable for site in sites):
        assert ranked
        assert all(preference.backend.is_usable for preference in ranked)
    else:
        unhealthy = {site.name for site in sites if site.state == "unhealthy"}
        assert {p.backend.name for p in ranked} <= unhealthy, "ejected ones may be missing"
        assert bool(ranked) == bool(unhealthy)


@pytest.mark.long
@given(requests(), backends(), st.randoms(use_true_random=False))
def test_the_order_is_total_and_depends_on_nothing_but_its_input(
    request: RouteRequest, sites: list[BackendView], dice: object
) -> None:
    shuffled = list(sites)
    dice.shuffle(shuffled)  # type: ignore[attr-defined]
    ranked = order(request, sites)
    assert len(ranked) == len(set(ranked))
    assert ranked == order(request, sites) == order(request, shuffled)


def _worse(site: BackendView, how: str, much: int) -> BackendView:
    assert site.status is not None
    model = site.status.models[0]
    match how:
        case "rtt":
            return replace(site, rtt_ms=site.rtt_ms + much)
        case "queue":
            models = (model_status(**{**_fields(model), "queued_tokens": model.queued_tokens + 10 * much}),)
            return replace(site, status=site_status(site.name, inflight=site.status.inflight, models=models))
        case "occupancy":
            return replace(
                site, status=site_status(site.name, inflight=site.status.inflight + much, models=site.status.models)
            )
        case "asleep":
            models = (model_status(**{**_fields(model), "residency": "disk", "wake_ms": 60_000.0}),)
            return replace(site, status=site_status(site.name, inflight=site.status.inflight, models=models))
        case "silent":
            return replace(site, status_is_fresh=False)
        case "forgetful":
            return replace(site, prefixes=frozenset())
        case "unhealthy":
            return replace(site, state="unhealthy")
        case _:
            return replace(site, is_ejected=True)


def _fields(model: object) -> dict[str, object]:
    return {name: getattr(model, name) for name in model.__struct_fields__}  # type: ignore[attr-defined]


@pytest.mark.long
@settings(max_examples=300)
@given(
    requests(), backends(), st.integers(0, 7), st.integers(1, 300),
    st.sampled_from(["rtt", "queue", "occupancy", "asleep", "silent", "forgetful", "unhealthy", "ejected"]),
)  # fmt: skip
def test_a_site_that_gets_worse_never_rises(
    request: RouteRequest, sites: list[BackendView], which: int, much: int, how: str
) -> None:
    which %= len(sites)
    name, before = sites[which].name, order(request, sites)
    after = order(request, [*sites[:which], _worse(sites[which], how, much), *sites[which + 1 :]])
    if name in before and name in after:
        assert after.index(name) >= before.index(name)
    elif name not in before:
        usable = any(site.is_usable for i, site in enumerate(sites) if i != which)
        assert name not in after or not usable or how == "ejected"


@pytest.mark.long
@settings(max_examples=150)
@given(requests(), backends(), st.data())
def test_prices_are_the_plain_formulas_to_the_last_bit(
    request: RouteRequest, sites: list[BackendView], data: st.DataObject
) -> None:
    rates = st.fixed_dictionaries({
        "arriving_per_s": st.sampled_from([0.0, 0.7, 13.0, 900.0]), "arriving_tokens_per_s": st.floats(0, 9000),
        "decode_tokens_per_s": st.sampled_from([0.0, 43.0]),
    })  # fmt: skip
    busy = []
    for site in sites:
        assert site.status is not None
        models = tuple(replace(model, **data.draw(rates)) for model in site.status.models)
        status = data.draw(
            st.sampled_from([None, replace(site.status, models=()), replace(site.status, models=models)])
        )
        busy.append(replace(site, status=status))
    where = data.draw(st.sampled_from([None, Place("client", 52.0, 4.0)]))
    asked = replace(request, model=data.draw(st.sampled_from([None, "ember", "other"])), client=where, now_s=7.25)
    lost: dict[str, tuple[float, float]] = {}
    scores: dict[str, float] = {}

    class Listening(CostPolicy):
        def scored(self, priced: list[Priced], usual_ms: float) -> list[Scored]:
            scored = super().scored(priced, usual_ms)
            lost.update({each.backend.name: (each.delay_ms, each.repeat_ms) for each in priced})
            scores.update({each.backend.name: each.score_ms for each in scored})
            return scored

    found = {preference.backend.name: preference.terms for preference in Listening().rank(asked, busy)}
    plain = plain_costs(asked, busy)
    assert found == {name: terms for name, (_, _, terms) in plain.items()}
    if len(found) > 1:
        assert lost == {name: (delay, repeat) for name, (delay, repeat, _) in plain.items()}
        assert scores == plain_scores(asked, busy)


class CountingPolicy(CostPolicy):
    def __init__(self) -> None:
        super().__init__()
        self.priced = 0

    def price(
        self,
        request: RouteRequest,
        backend: BackendView,
        model: ModelStatus | None,
        cached: int,
        most_cached: int,
        repeat_weight: float,
        readable: int,
        rates: NetworkRates,
    ) -> Priced:
        self.priced += 1
        return super().price(request, backend, model, cached, most_cached, repeat_weight, readable, rates)


def test_of_five_thousand_sites_few_are_priced_and_fewer_hashed() -> None:
    hashed = list[str]()

    class Name(str):
        __slots__ = ()

        def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            hashed.append(self)
            return super().encode(encoding, errors)

    policy = CountingPolicy()
    ranked = policy.rank(RouteRequest("ember", 1000, b"key"), [view(Name(f"s{i}")) for i in range(5000)])
    assert MAX_NEAR <= len(ranked) == policy.priced <= MAX_NEAR + MAX_HOLDERS
    assert 0 < len(hashed) <= MAX_WALK


@given(st.integers(0, 299), st.sampled_from(["home", "held", "published"]))
def test_a_site_that_holds_a_conversation_is_priced_however_far_it_is(which: int, how: str) -> None:
    name = f"s{which}"
    sites = [view(f"s{i}", rtt_ms=1.0 + i / 10) for i in range(300)]
    request = RouteRequest("ember", 5000, b"key", digests=((7, 4900), (5, 100)))
    match how:
        case "home":
            request = replace(request, home=Home(name, 4900, by_name=False))
        case "held":
            request = replace(request, held={name: 4900})
        case _:
            sites[which] = replace(sites[which], prefixes=frozenset({7}))
    assert order(request, sites)[0] == name


def test_of_many_near_sites_with_a_queue_the_idle_one_farther_away_is_priced() -> None:
    busy = [view(f"s{i}", rtt_ms=1.0, model={"queued_tokens": 4000}, backlog_ms=2000.0) for i in range(100)]
    assert order(RouteRequest("ember", 1000, b"key"), [*busy, view("idle", rtt_ms=200.0)])[0] == "idle"


@given(
    st.lists(
        st.tuples(st.sampled_from(["jump", "status", "fail", "try", "lost try"]), st.floats(-1e9, 1e9)), max_size=40
    )
)
def test_clocks_that_jump_leave_every_figure_in_its_range(steps: list[tuple[str, float]]) -> None:
    clock = Clock()
    site: Backend = Discovery(network({"ams1": "http://127.0.0.1:1"}), clock).backends["ams1"]
    for sequence, (step, seconds) in enumerate(steps):
        match step:
            case "jump":
                clock.advance(seconds)
            case "status":
                site.answered(site_status("ams1", sequence), clock() - 0.01)
            case "fail":
                site.failed("no answer")
            case "try":
                with site.inflight(100) as ticket:
                    ticket.answering()
            case _:
                with site.inflight(100):
                    pass
        seen = site.view()
        assert seen.status_is_fresh in (True, False)
        assert 0 <= seen.slow_start <= 1
        assert (seen.outstanding, seen.pending_requests, seen.pending_tokens) == (0, 0, 0)
        site.cordon("")  # a change, after which it is looked at anew
        assert seen == site.view()
        CostPolicy().rank(RouteRequest("ember", 10, b"k"), [seen])
