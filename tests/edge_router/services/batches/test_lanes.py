"""The turns of waiting requests, and the sites that have capacity for them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.edge_router.services.batches.lanes import IDLE_BELOW, Lanes, is_idle
from tests.edge_router.builders import model_status, site_status


def backend(state: str = "healthy", *, serves: bool = True, outstanding: int = 0) -> Any:
    view = SimpleNamespace(model=lambda name: name if serves else None)
    return SimpleNamespace(state=state, status=site_status(), outstanding=outstanding, view=lambda: view)


@pytest.mark.parametrize(
    ("sites", "num_open", "has_room"),
    [
        ((), 0, False),
        ((backend("draining"),), 0, False),
        ((backend(),), IDLE_BELOW - 1, True),
        ((backend(),), IDLE_BELOW, False),
        ((backend(), backend()), IDLE_BELOW, True),
        ((backend(), backend(serves=False)), IDLE_BELOW, False),  # a site without the model does not count
        ((backend(outstanding=99), backend(serves=False)), 0, False),
        ((backend(serves=False),), 0, True),  # the site will refuse it as unknown
    ],
)
def test_there_is_room_where_a_site_that_serves_the_model_is_idle(
    sites: tuple[Any, ...], num_open: int, has_room: bool
) -> None:
    backends = {"ams1": backend()}
    lanes = Lanes(backends)
    lanes.add("bob", ["ember"])
    bobs = lanes.next()
    assert bobs is not None
    for number in range(num_open):
        lanes.begin(bobs, number)
    lanes.add("acme", ["ember"])
    backends.clear()
    backends.update({str(i): site for i, site in enumerate(sites)})
    lane = lanes.next()
    assert (lane is not None) is has_room
    assert lane is None or lane.owner == ("acme" if num_open else "bob")


def test_owners_take_turns_and_so_do_the_models_of_one_owner() -> None:
    lanes, turns = Lanes({"ams1": backend()}), []
    lanes.add("acme", ["ember", "other"])
    lanes.add("bob", ["ember"])
    for number in range(6):
        lane = lanes.next()
        assert lane is not None
        lanes.begin(lane, number)
        turns.append((lane.owner, lane.model))
    once = [("acme", "ember"), ("bob", "ember"), ("acme", "other"), ("bob", "ember")]
    assert turns == [*once, *once[:2]]


def test_a_lane_is_forgotten_when_nothing_waits_and_nothing_is_open() -> None:
    lanes = Lanes({"ams1": backend()})
    lanes.add("acme", ["ember"])
    lane = lanes.next()
    assert lane is not None
    lanes.begin(lane, 1)
    lanes.exhaust(lane)
    assert (lanes.next(), len(lanes)) == (None, 1)
    lanes.add("acme", ["ember"])
    assert (lanes.next(), lane.last) == (lane, 1), "the next request is looked for after the last one"
    lanes.exhaust(lane)
    lanes.end(lane)
    assert len(lanes) == 0


def test_sites_are_looked_at_once_for_each_model_however_many_wait_for_it() -> None:
    site, looks = backend(), []
    view = site.view()
    site.view = lambda: looks.append(view) or view
    lanes = Lanes({"ams1": site})
    for owner in ("acme", "bob", "carol"):
        lanes.add(owner, ["ember", "other"])
    assert lanes.next() is not None
    assert len(looks) == 2


@pytest.mark.parametrize(
    ("status", "outstanding", "expected"),
    [
        (None, 0, False),  # without a status
        (site_status(), 0, True),
        (site_status(inflight=IDLE_BELOW - 1), IDLE_BELOW - 1, True),
        (site_status(inflight=IDLE_BELOW), 0, False),
        (site_status(), IDLE_BELOW, False),
        (site_status(models=(model_status(), model_status("other", waiting=1))), 0, False),
        (site_status(models=(model_status(queued_tokens=1),)), 0, False),
    ],
)
def test_a_site_is_idle_without_a_queue_and_with_few_open_requests(
    status: Any, outstanding: int, expected: bool
) -> None:
    assert is_idle(cast("Any", SimpleNamespace(status=status, outstanding=outstanding))) is expected
