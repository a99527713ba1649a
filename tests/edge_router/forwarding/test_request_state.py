"""The state of a request: how often it is tried, cut and moved, and the limits of its next attempt."""

import pytest
from msgspec.structs import replace

from pilotlight.edge_router.forwarding.relay import Cause
from pilotlight.edge_router.forwarding.request_state import (
    MAX_HANDOVERS,
    RequestState,
    SiteTries,
    StreamRecovery,
)
from pilotlight.edge_router.forwarding.site_failure import Failure, SiteFailed, StreamLost
from pilotlight.edge_router.routing.views import MAX_DECLINES, Preference
from pilotlight.sites.network import RelayConfig
from pilotlight.support.time_limits import NO_PAUSES, Pauses
from pilotlight.wire.hop.continuation import ResumePoint
from pilotlight.wire.hop.usage import ResourceUse
from tests.edge_router.builders import view
from tests.edge_router.test_pace import request

RELAY = RelayConfig(max_losses=2, max_tries=3, continue_within_s=30.0, first_byte_timeout_s=60.0)


def failed(kind: Failure) -> SiteFailed:
    return SiteFailed(kind, "so it is")


def proxied() -> RequestState:
    return RequestState(request(), RELAY, 0.0)


def cut(recovery: StreamRecovery, cause: Cause, times: int) -> None:
    for _ in range(times):
        recovery.cut("ams1", StreamLost(cause, "it was"), 0.0)


@pytest.mark.parametrize("draining", [(), ("ams1",), ("iad1",), ("ams1", "iad1")])
def test_two_errors_alike_blame_the_request_unless_a_site_was_draining(draining: tuple[str, ...]) -> None:
    tries = SiteTries()
    for site in ("ams1", "iad1"):
        tries.failed(site, SiteFailed("lost", "it answered 500", words="no more"), is_draining=site in draining)
    assert tries.repeated == ("" if draining else "no more")
    assert tries.failures.keys() == {"ams1", "iad1"}


def test_losses_and_hand_overs_of_a_stream_are_counted_apart() -> None:
    recovery = StreamRecovery(RELAY, NO_PAUSES)
    cut(recovery, "closed", 2)
    assert recovery.may_be_cut_again
    cut(recovery, "draining", MAX_HANDOVERS)
    assert recovery.may_be_cut_again
    cut(recovery, "draining", 1)
    assert not recovery.may_be_cut_again, "a stream is not moved without limit"
    recovery = StreamRecovery(RELAY, NO_PAUSES)
    cut(recovery, "closed", 3)
    assert not recovery.may_be_cut_again


def test_a_wait_is_reported_once_and_from_the_last_event_before_the_cut() -> None:
    recovery = StreamRecovery(RELAY, NO_PAUSES)
    assert recovery.delivered(10.0) is None
    recovery.cut("ams1", StreamLost("closed", "it was"), 11.0)
    assert recovery.left_s(14.0) == 27.0
    assert recovery.delivered(14.0) == 4.0
    assert recovery.delivered(15.0) is None


def test_a_cut_stream_may_be_asked_of_all_but_the_site_that_lost_it() -> None:
    one = proxied()
    one.tries.failed("iad1", failed("silent"))
    one.tries.failed("sin1", failed("full"))
    one.cut("ams1", StreamLost("closed", "it was"), 5.0)
    assert (one.tries.excluded, one.tries.failures, one.tries.num_silent) == ({"ams1"}, {}, 0)
    assert (one.recovery.lost_site, one.is_at_first_try) == ("ams1", False)


def test_another_round_leaves_out_those_that_cannot() -> None:
    tries = SiteTries()
    for site, kind in (("a", "refused"), ("b", "full"), ("c", "lost")):
        tries.failed(site, failed(kind))
    tries.try_again()
    assert tries.excluded == {"a"}


def test_a_site_that_declined_and_then_failed_is_not_asked_again() -> None:
    tries = SiteTries()
    tries.failed("a", failed("declined"))
    assert (tries.excluded, tries.failures, tries.is_paid) == ({"a"}, {}, True)
    assert tries.readmit_declined()
    assert not tries.excluded
    tries.failed("a", failed("declined"))  # a readmitted site must not decline, so this counts as a failure
    assert list(tries.failures) == ["a"]
    assert not tries.readmit_declined()
    assert tries.excluded == {"a"}


def test_the_last_that_may_decline_makes_all_of_them_askable() -> None:
    tries = SiteTries()
    for number in range(MAX_DECLINES):
        assert len(tries.excluded) == number
        tries.failed(f"{number}", failed("declined"))
    assert not tries.excluded
    assert len(tries.declined) == MAX_DECLINES


def test_a_site_that_may_decline_gets_the_longest_queue() -> None:
    one = proxied()
    assert one.ask(100.0, 0.0).max_queue_ms == 100.0
    for number in range(MAX_DECLINES):
        one.tries.failed(f"{number}", failed("declined"))
    assert one.ask(100.0, 0.0).max_queue_ms is None, "now the best site must accept it"
    other = proxied()
    other.cut("ams1", StreamLost("closed", "it was"), 0.0)
    assert other.ask(100.0, 0.0).max_queue_ms is None, "and whatever is continued"


def test_the_next_site_learns_how_long_a_request_has_waited() -> None:
    one = RequestState(request(), RELAY, 100.0)
    assert one.ask(None, 100.5).waited_ms == 0, "no site has had it"
    assert one.ask(None, 125.25).waited_ms == 25_250
    other = RequestState(replace(request(), waited_ms=1500), RELAY, 100.0)
    assert other.ask(None, 100.5).waited_ms == 1500, "it waited at sites of another router"
    assert other.ask(None, 125.25).waited_ms == 26_750


def test_a_new_request_has_tries_and_a_stream_has_time() -> None:
    one = proxied()
    for number in range(3):
        assert not one.is_out_of_tries(1e9)
        one.tries.failed(f"{number}", failed("lost"))
    assert one.is_out_of_tries(0.0)
    assert one.attempt_limits(7.0, 0.0)[:2] == (60.0, 7.0)
    one.cut("ams1", StreamLost("closed", "it was"), 100.0)
    assert not one.is_out_of_tries(129.9)
    assert one.is_out_of_tries(130.0)
    limits = one.attempt_limits(7.0, 110.0)
    assert (limits[0], limits.is_continuation) == (10.0, True), "half of the remaining time is left for another site"
    assert one.attempt_limits(7.0, 999.0)[0] == 0.0


def test_a_pause_of_the_router_does_not_count_as_time_of_a_cut_stream() -> None:
    pauses = Pauses(0.5)
    one = RequestState(request(), RELAY, 0.0, pauses=pauses)
    pauses.check(99.9)
    one.cut("ams1", StreamLost("closed", "it was"), 100.0)
    assert not one.is_out_of_tries(140.0), "first read after a pause of 40 s"
    assert one.attempt_limits(7.0, 140.2)[0] > 14.0


@pytest.mark.parametrize(
    ("fields", "is_held"), [({}, True), ({"wants_stream": False}, False), ({"model": None}, False)]
)
def test_a_site_is_held_only_to_predictions_of_new_streams(fields: dict[str, object], is_held: bool) -> None:
    predicted = Preference(view(), 5.0, {}, "cheapest")
    one = RequestState(replace(request(), **fields), RELAY, 0.0)
    assert one.expected_ms(predicted) == (5.0 if is_held else None)
    assert one.expected_ms(Preference(view(status=None), 5.0, {}, "cheapest")) is None, "it has promised nothing"
    one.recovery.cut("ams1", StreamLost("closed", "it was"), 0.0)
    assert one.expected_ms(predicted) is None


def test_a_client_learns_which_site_was_lost_and_which_could_not_continue() -> None:
    one = proxied()
    one.recovery.cut("ams1", StreamLost("closed", "it was reset"), 0.0)
    assert str(one.end_of_stream().message) == "the site ams1 was lost before the end of its answer: it was reset"
    assert one.end_of_stream().word == "upstream_lost"
    one.tries.failed("iad1", SiteFailed("full", "it is full"))
    assert one.end_of_stream().message.endswith("; no other site could continue it: iad1: it is full")


def test_a_first_try_is_one_before_which_no_site_has_said_or_lost_anything() -> None:
    assert proxied().is_at_first_try
    for kind in ("full", "declined"):
        one = proxied()
        one.tries.failed("ams1", failed(kind))
        assert not one.is_at_first_try


def test_a_clients_tokens_are_counted_once() -> None:
    one = proxied()
    one.log.add(ResumePoint(0, (1, 2, 3)))
    one.log.num_uncounted = 2
    assert one.delivered_tokens == 5
    one = proxied()
    one.answered_whole(ResourceUse(7, 0, 4))
    assert one.delivered_tokens == 4


def test_the_site_that_answers_is_known_and_when_its_stream_began() -> None:
    one = proxied()
    one.answered_by("ams1", 200, is_stream=False, elapsed_s=1.0)
    assert (one.site, one.status, one.first_token_s) == ("ams1", 200, None)
    one.answered_by("iad1", 203, is_stream=True, elapsed_s=2.0)
    one.answered_by("sin1", 200, is_stream=True, elapsed_s=3.0)
    assert (one.site, one.status, one.first_token_s) == ("sin1", 200, 2.0)
