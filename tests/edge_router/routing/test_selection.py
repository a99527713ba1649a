"""The choice of sites, with fake sites: effects of failures and answers, when to leave a site, and the client's error."""

from typing import Any, cast

import pytest
from msgspec.structs import replace

from pilotlight.edge_router.forwarding.relay import DeliveryLog
from pilotlight.edge_router.forwarding.request_state import MAX_HANDOVERS, RequestState
from pilotlight.edge_router.forwarding.site_failure import SiteFailed, StreamLost
from pilotlight.edge_router.requests.request import Head, RequestParser, ValidRequest
from pilotlight.edge_router.requests.session import SessionTable
from pilotlight.edge_router.routing.data_places import DataPlaces
from pilotlight.edge_router.routing.selection import MAX_RETRY_AFTER_S, TRY_AGAIN_S, AttemptPace, SiteSelector
from pilotlight.edge_router.routing.views import BackendView, Policy, Preference, RouteRequest
from pilotlight.edge_router.services.finetune_registry import SiteFinetunes
from pilotlight.sites.network import RelayConfig
from pilotlight.wire.hop.continuation import ResumePoint
from tests.edge_router.builders import PLACES, Clock, model_status, network, view
from tests.edge_router.nearest import NearestPolicy

RELAY = RelayConfig(stall_s=2.0)
INFINITE = float("inf")


class Site:
    """A fake site for the selector, which records calls."""

    def __init__(self, name: str, **fields: Any) -> None:
        self.name = name
        self.seen = view(name, **fields)
        self.told: list[tuple[object, ...]] = []
        self.is_frozen = False
        self.detail = "it is as it is"

    @property
    def state(self) -> str:
        return self.seen.state

    def view(self) -> BackendView:
        return self.seen

    def failed(self, detail: str) -> None:
        self.told.append(("failed", detail))

    def refused_draining(self) -> None:
        self.told.append(("draining",))

    def declined(self, model: str, queued_tokens: int, sent_at: float) -> None:
        self.told.append(("declined", model, queued_tokens, sent_at))

    def first_token(self, expected_ms: float, actual_ms: float) -> None:
        self.told.append(("first token", expected_ms, actual_ms))

    def refused(self) -> None:
        """Record a refusal; this object is also its own ticket."""
        self.told.append(("ticket",))

    sent_at = 7.0


class Metrics:
    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *told: self.told.append((name, *told))


class InOrder:
    """A policy that keeps the order of all healthy sites."""

    def rank(self, request: RouteRequest, backends: list[BackendView]) -> list[Preference]:
        return [
            Preference(each, 1.0 + i, {}, "next", max_queue_ms=5.0)
            for i, each in enumerate(backends)
            if each.state == "healthy"
        ]


def asked(path: str = "/v1/chat/completions", model: str = "ember", **headers: str) -> ValidRequest:
    body = b'{"model": "%s", "stream": true, "messages": [{"role": "user", "content": "hello"}]}' % model.encode()
    head = Head("POST", path, path, [*headers.items()])
    return RequestParser("secret", 4, lambda address, geo, is_hop: None).parse(head, body, "id", "1.2.3.4")


class Hints:
    def __init__(self) -> None:
        self.told: list[tuple[str | None, int]] = []

    def consider(self, model: str | None, preferences: list[Preference]) -> None:
        self.told.append((model, len(preferences)))


def selector(
    *sites: Site,
    clock: Clock | None = None,
    hints: Hints | None = None,
    policy: Policy | None = None,
    metrics: Any = None,
    sessions: SessionTable | None = None,
    try_again_s: float = TRY_AGAIN_S,
    **tables: Any,
) -> SiteSelector:
    clock = clock or Clock()
    sessions = SessionTable(99, 60.0, clock) if sessions is None else sessions
    places = DataPlaces(network({name: "http://x:1" for name in PLACES}, **tables))
    backends: Any = {site.name: site for site in sites}
    order, told = policy or cast(Any, InOrder()), cast(Any, hints or Hints())
    finetunes = SiteFinetunes(backends, places, cast(Any, None))
    return SiteSelector(backends, order, sessions, metrics or Metrics(), clock, places, finetunes, told, try_again_s)


@pytest.mark.parametrize(
    ("kind", "path", "told"),
    [
        ("declined", "/v1/chat/completions", [("ticket",), ("declined", "ember", 9, 7.0)]),
        ("no_model", "/v1/chat/completions", [("ticket",)]),
        ("full", "/v1/chat/completions", []),
        ("full", "/fn/hello", [("ticket",)]),
        ("untrusted", "/v1/chat/completions", [("ticket",)]),
        ("no_files", "/v1/chat/completions", [("ticket",)]),
        ("connect", "/v1/chat/completions", [("failed", "why")]),
        ("draining", "/v1/chat/completions", [("draining",)]),
        ("lost", "/v1/chat/completions", []),
        ("silent", "/v1/chat/completions", []),
    ],
)
def test_a_failure_says_of_a_site_what_it_may_and_no_more(kind: Any, path: str, told: list[tuple[object, ...]]) -> None:
    site, metrics = Site("ams1"), Metrics()
    choosing = selector(site, metrics=metrics)
    choosing.note_failure(cast(Any, site), cast(Any, site), asked(path), SiteFailed(kind, "why", queued_tokens=9))
    assert site.told == told
    assert metrics.told == [("tried", "ams1", kind)]


def test_an_answer_is_a_home_and_a_measure_of_predictions_where_it_is_the_first_try_of_a_stream() -> None:
    class Response:
        def __init__(self, status: int = 200, body: bytes | None = None) -> None:
            self.status, self.body, self.failure = status, body, None

    def told(proxied: RequestState, response: Response) -> tuple[bool, int]:
        site, sessions = Site("ams1"), SessionTable(99, 60.0, Clock())
        choosing = selector(site, sessions=sessions)
        choosing.note_answer(proxied, Preference(site.seen, 30.0, {}, "next"), cast(Any, response), 0.25)
        assert site.told in ([], [("first token", 30.0, 250.0)])
        return sessions.recall(proxied.request.conversation).home is not None, len(site.told)

    assert told(RequestState(asked(), RELAY, 0.0), Response()) == (True, 1)
    assert told(RequestState(asked(), RELAY, 0.0), Response(399)) == (True, 1)
    assert told(RequestState(asked(), RELAY, 0.0), Response(400)) == (False, 0)
    assert told(RequestState(asked(), RELAY, 0.0), Response(body=b"")) == (True, 0)
    tried = RequestState(asked(), RELAY, 0.0)
    tried.tries.failed("iad1", SiteFailed("full", "why"))
    assert told(tried, Response()) == (True, 0)


def test_a_draining_sites_stream_is_asked_for_now_and_then_whether_it_is_wanted_elsewhere() -> None:
    clock = Clock()
    draining, other = Site("ams1", state="draining"), Site("iad1", model={"name": "other"})
    choosing, proxied = selector(draining, other, clock=clock), RequestState(asked(), RELAY, 0.0)
    assert not choosing.is_wanted_elsewhere(proxied, cast(Any, draining)), "the other site has another model"
    other.seen = view("iad1")
    assert not choosing.is_wanted_elsewhere(proxied, cast(Any, draining)), "the last check was a moment ago"
    clock.advance(TRY_AGAIN_S)
    assert choosing.is_wanted_elsewhere(proxied, cast(Any, draining))
    assert draining.told == [("draining",)] * 3
    for _ in range(MAX_HANDOVERS):
        proxied.cut("sin1", StreamLost("draining", "why"), clock.now)
    clock.advance(TRY_AGAIN_S)
    assert not choosing.is_wanted_elsewhere(proxied, cast(Any, draining)), "it has been moved too often"


def test_a_site_that_is_wished_for_comes_first_and_may_not_decline() -> None:
    choosing = selector(Site("ams1"), Site("iad1"), Site("sin1"))
    for wish, order in (
        ("", ["ams1", "iad1", "sin1"]),
        ("iad1", ["iad1", "ams1", "sin1"]),
        ("x", ["ams1", "iad1", "sin1"]),
    ):
        for spelled in (f"site={wish}", f'respond-async, wait=5; foo, SITE = "{wish}"', f"site={wish}; x=y"):
            assert choosing.rank(asked(prefer=spelled))[1][0].backend.name == order[0]
        _, ranking = choosing.rank(asked(prefer=f"site={wish}"))
        assert [each.backend.name for each in ranking] == order
        is_asked = wish == "iad1"
        assert (ranking[0].reason, ranking[0].max_queue_ms) == (("asked for", None) if is_asked else ("next", 5.0))
        assert ranking[1].reason == "next"
    _, ranking = selector(Site("ams1"), Site("iad1", state="unhealthy")).rank(asked(prefer="site=iad1"))
    assert [(each.backend.name, each.reason) for each in ranking] == [("ams1", "next")]


def test_a_model_has_its_own_name_for_an_alias_and_for_an_adapter() -> None:
    choosing = selector(Site("ams1", status=None), Site("iad1", model={"aliases": ("@x/ember",)}))
    names = [choosing.own_names(name) for name in ("ember", "@x/ember", "ember:french", "@x/ember:a", "none", "none:a")]
    assert names == [("ember", ""), ("ember", ""), ("ember", "french"), ("ember", "a"), ("none", ""), ("none:a", "")]
    assert choosing.own_name("@x/ember:a") == "ember"


async def test_a_models_own_name_with_a_colon_is_no_adapter_at_any_site() -> None:
    both = Site("sin1", site={"models": (model_status("qwen"), model_status("qwen:4b"))})
    for sites in ((Site("ams1", model={"name": "qwen"}), Site("iad1", model={"name": "qwen:4b"})), (both,)):
        choosing = selector(*sites)
        names = [choosing.own_names(name) for name in ("qwen:4b", "qwen:4b:french", "qwen:french", "qwen")]
        assert names == [("qwen:4b", ""), ("qwen:4b", "french"), ("qwen", "french"), ("qwen", "")]
    sites = Site("ams1", model={"name": "qwen"}), Site("iad1", model={"name": "qwen:4b"})
    choosing, proxied = selector(*sites, policy=NearestPolicy()), RequestState(asked(model="qwen:4b"), RELAY, 0.0)
    assert await next_name(choosing, proxied) == "iad1"
    failed(proxied, "iad1")
    assert await next_name(choosing, proxied) is None, "the other site would call the model unknown"


def test_a_request_without_a_site_learns_which_were_tried_and_when_to_come_back() -> None:
    sites = Site("ams1", state="unhealthy"), Site("iad1", state="draining")
    error = selector(*sites).nothing_left(asked(), {})
    assert (error.word, error.retry_after_s) == ("no_site_available", 1.0)
    assert "no site is available; ams1 is unhealthy: it is as it is; iad1 is draining" in error.message
    for hints, after_s in (((None, None), 1.0), ((7.0, None), 7.0), ((7.0, 3.0), 3.0), ((900.0,), MAX_RETRY_AFTER_S)):
        failures = {f"s{i}": SiteFailed("full", f"why {i}", hint) for i, hint in enumerate(hints)}
        error = selector(*sites).nothing_left(asked(), failures)
        assert error.retry_after_s == after_s
        assert "tried: s0: why 0" in error.message
    only = {"models": [{"model": "ember", "data": {"sites": ["iad1"]}}]}
    for failures, says in (
        ({}, "iad1 is draining: it is as it is"),
        ({"iad1": SiteFailed("full", "why")}, "iad1: why"),
    ):
        error = selector(*sites, **only).nothing_left(asked(), failures)
        assert error.message == f"data for the model ember may go to iad1 alone: {says}"


def pace(
    proxied: RequestState,
    *others: Site,
    own: dict[str, Any] | None = None,
    retries: int = 9,
    relay: RelayConfig = RELAY,
) -> AttemptPace:
    """Return the pace of a request at ams1, when `others` are the other sites."""
    own_site = Site("ams1", **(own or {}))

    class Budget:
        left = retries

        def withdraw(self, account: str) -> bool:
            self.left -= 1
            return self.left >= 0

    def rank(request: ValidRequest) -> tuple[RouteRequest, list[Preference]]:
        return RouteRequest("ember"), [Preference(each.seen, 1.0, {}, "next") for each in (own_site, *others)]

    return AttemptPace(proxied, cast(Any, own_site), relay, rank, cast(Any, Budget()))


def streaming(request: ValidRequest | None = None, num_tokens: int = 1) -> RequestState:
    proxied = RequestState(request or asked(), RELAY, 0.0)
    if num_tokens:
        proxied.log.add(ResumePoint(0, tuple(range(num_tokens))))
    return proxied


def test_a_stream_leaves_a_site_that_is_slower_than_its_own_pace_where_another_one_may_have_it() -> None:
    assert [pace(streaming(), Site("iad1")).is_stalled(silent_s) for silent_s in (1.9, 2.0, 9.0)] == [False, True, True]
    slow = {"model": {"decode_tokens_per_s": 10.0}}
    assert [pace(streaming(), Site("iad1"), own=slow).is_stalled(silent_s) for silent_s in (4.9, 5.0)] == [False, True]
    assert not pace(streaming()).is_stalled(9.0)
    for other in (
        Site("iad1", state="unhealthy"),
        Site("iad1", state="unknown"),
        Site("iad1", model={"name": "other"}),
    ):
        assert not pace(streaming(), other).is_stalled(9.0)
    assert not pace(streaming(replace(asked(), model=None)), Site("iad1")).is_stalled(9.0)
    unmoved = RequestState(asked(), replace(RELAY, max_losses=0), 0.0)
    assert not pace(unmoved, Site("iad1")).is_stalled(9.0)
    long, draining = streaming(num_tokens=0), Site("ams1", state="draining")
    long.log = DeliveryLog(max_bytes=4)
    long.log.add(ResumePoint(0, tuple(range(99))))
    assert not pace(long, Site("iad1")).is_stalled(9.0), "the answer is too long to be moved"
    assert not selector(draining, Site("iad1")).is_wanted_elsewhere(long, cast(Any, draining))


def test_a_request_leaves_a_site_before_its_first_token_while_it_has_tries_and_one_is_paid_for() -> None:
    assert pace(streaming(num_tokens=0), Site("iad1")).may_leave()
    assert not pace(streaming(num_tokens=0), Site("iad1"), retries=0).may_leave()
    assert not pace(streaming(num_tokens=0)).may_leave()
    tried = streaming(num_tokens=0)
    tried.tries.failed("iad1", SiteFailed("full", "why"))
    assert not pace(tried, Site("iad1")).may_leave(), "it has been there"
    assert pace(tried, Site("sin1")).may_leave()
    assert tried.tries.is_paid
    for max_tries, may_leave in ((2, False), (3, True)):
        tried.tries.is_paid = False
        assert pace(tried, Site("sin1"), relay=replace(RELAY, max_tries=max_tries)).may_leave() == may_leave
    assert not pace(RequestState(asked("/fn/hello"), RELAY, 0.0), Site("iad1")).may_leave(), (
        "the function may be running"
    )
    cut = streaming()
    cut.cut("iad1", StreamLost("closed", "why"), 0.0)
    assert pace(cut, retries=0).may_leave(), "a started stream needs no budget"


def test_only_a_stream_of_a_model_that_is_awake_and_measured_is_held_to_a_first_token() -> None:
    measured = view(model={"prefill_tokens_per_s": 1000.0})
    preference = Preference(measured, 1.0, {"queue_ahead": 1000.0, "lateness": 9999.0}, "next")
    assert pace(streaming(num_tokens=0)).first_stall_s(preference) == 4.0
    whole = RequestParser("secret", 4, lambda *_: None).parse(
        Head("POST", "/v1/completions", "/v1/completions", []), b'{"model": "ember", "prompt": "a"}', "id", "1.2.3.4"
    )
    for other in (whole, asked("/fn/hello")):
        assert pace(RequestState(other, RELAY, 0.0)).first_stall_s(preference) == INFINITE


async def next_name(choosing: SiteSelector, proxied: RequestState) -> str | None:
    choice = await choosing.next_site(proxied)
    return None if choice is None else choice[1].backend.name


def failed(proxied: RequestState, *names: str, kind: Any = "full") -> None:
    for name in names:
        proxied.tries.failed(name, SiteFailed(kind, "why"))


async def test_each_further_try_of_a_new_request_is_paid_for_once_and_the_last_is_the_last() -> None:
    choosing, proxied = selector(Site("ams1"), Site("iad1"), Site("sin1")), RequestState(asked(), RELAY, 0.0)
    before = choosing.retries.left
    assert await next_name(choosing, proxied) == "ams1"
    assert choosing.retries.left == before, "the first costs nothing"
    failed(proxied, "ams1")
    assert (await next_name(choosing, proxied), choosing.retries.left) == ("iad1", before - 1)
    failed(proxied, "iad1")
    proxied.tries.is_paid = True
    assert (await next_name(choosing, proxied), choosing.retries.left) == ("sin1", before - 1)
    assert not proxied.tries.is_paid
    failed(proxied, "sin1")
    assert await next_name(choosing, proxied) is None, "it has used its three tries"
    poor = RequestState(asked(), RELAY, 0.0)
    failed(poor, "ams1")
    while choosing.retries.withdraw():
        pass
    assert await next_name(choosing, poor) is None
    poor.tries.is_paid = True
    assert await next_name(choosing, poor) == "iad1"


async def test_two_sites_that_fail_in_the_same_words_are_the_last_that_a_request_is_given_to() -> None:
    choosing, proxied = selector(Site("ams1"), Site("iad1"), Site("sin1")), RequestState(asked(), RELAY, 0.0)
    for name in ("ams1", "iad1"):
        assert await next_name(choosing, proxied) == name
        proxied.tries.failed(name, SiteFailed("lost", "it answered 500 (a step failed)", words="a step failed"))
    before = choosing.retries.left
    assert await next_name(choosing, proxied) is None
    assert choosing.retries.left == before
    error = choosing.nothing_left(proxied.request, proxied.tries.failures, proxied.tries.repeated)
    assert (error.word, error.message.endswith(": a step failed")) == ("engine_error", True)


async def test_other_words_or_none_are_tried_at_the_next_site() -> None:
    for first, second in (("", ""), ("a step failed", "the host died"), ("a step failed", "")):
        choosing, proxied = selector(Site("ams1"), Site("iad1"), Site("sin1")), RequestState(asked(), RELAY, 0.0)
        for name, words in (("ams1", first), ("iad1", second)):
            proxied.tries.failed(name, SiteFailed("lost", "it failed", words=words))
        assert await next_name(choosing, proxied) == "sin1"


async def test_those_that_declined_are_asked_again_before_those_that_missed_their_probes() -> None:
    choosing = selector(Site("ams1"), Site("iad1", state="unhealthy"), Site("sin1", state="healthy", is_ejected=True))
    proxied = RequestState(asked(), RELAY, 0.0)
    failed(proxied, "ams1", "sin1", kind="declined")
    assert await next_name(choosing, proxied) == "ams1"
    failed(proxied, "ams1", "sin1")
    assert await next_name(choosing, proxied) is None, "the policy ranks no unhealthy site"


async def test_a_stream_that_was_cut_is_asked_of_all_again_and_again_until_its_time_is_over() -> None:
    clock = Clock()
    choosing, proxied = selector(Site("ams1"), Site("iad1"), clock=clock, try_again_s=0.0), streaming()
    while choosing.retries.withdraw():
        pass
    proxied.cut("ams1", StreamLost("closed", "why"), clock.now)
    assert await next_name(choosing, proxied) == "iad1"
    failed(proxied, "iad1")
    assert await next_name(choosing, proxied) == "ams1", (
        "no budget is needed, and the site that lost the stream comes last"
    )
    failed(proxied, "ams1", kind="refused")
    assert await next_name(choosing, proxied) == "iad1"
    failed(proxied, "iad1")
    assert await next_name(choosing, proxied) == "iad1", "a site that refused is not tried again"
    clock.advance(RELAY.continue_within_s)
    assert await next_name(choosing, proxied) is None


async def test_a_sleeping_model_gets_a_hint_at_the_first_try_and_if_there_is_a_choice() -> None:
    for sites, is_first, told in (
        (("ams1", "iad1"), True, [("ember", 2)]),
        (("ams1", "iad1"), False, []),
        (("ams1",), True, []),
    ):
        hints = Hints()
        choosing, proxied = selector(*map(Site, sites), hints=hints), RequestState(asked(), RELAY, 0.0)
        if not is_first:
            failed(proxied, "ams1")
        assert await next_name(choosing, proxied) == ("ams1" if is_first else "iad1")
        assert hints.told == told
