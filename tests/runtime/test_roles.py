"""Hosts that take on both roles for a while, with a fake clock: a long wait of one role causes it, and a long calm ends it."""

from pilotlight.runtime.dispatch.roles import HostWaits, RolePolicy, RoleShift
from pilotlight.runtime.timings import SiteTimings
from pilotlight.sites.site import Role

HOT_FOR_S = SiteTimings().hot_for_s
ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode")
IDLE = HostWaits(0.0, 0.0)
ANSWERS_WAIT = HostWaits(0.0, 2.0)
PROMPTS_WAIT = HostWaits(2.0, 0.0)


def judge(
    policy: RolePolicy, waits: list[HostWaits | None], from_s: float, to_s: float
) -> list[tuple[float, RoleShift]]:
    """Call `judge` every half second; return the shifts."""
    times = [from_s + i / 2 for i in range(round((to_s - from_s) * 2) + 1)]
    return [(now, shift) for now in times if (shift := policy.judge(now, waits)) is not None]


def test_a_host_for_prompts_answers_as_well_once_answers_have_waited_for_some_seconds() -> None:
    policy = RolePolicy(ROLES, 1.0, HOT_FOR_S, 30.0)
    waits: list[HostWaits | None] = [HostWaits(0.2, 0.0), IDLE, ANSWERS_WAIT]
    assert judge(policy, waits, 0.0, HOT_FOR_S - 0.5) == []
    assert judge(policy, [IDLE, IDLE, IDLE], HOT_FOR_S, HOT_FOR_S) == [], "the burst is over"
    later = HOT_FOR_S + 0.5
    assert judge(policy, waits, later, later + HOT_FOR_S) == [(later + HOT_FOR_S, RoleShift(1, "both"))], (
        "the idler one"
    )


def test_a_side_that_still_waits_with_the_host_that_it_was_lent_gets_another() -> None:
    policy = RolePolicy(ROLES, 1.0, HOT_FOR_S, 30.0)
    shifts = judge(policy, [IDLE, ANSWERS_WAIT, ANSWERS_WAIT], 0.0, 20.0)
    assert [shift for _, shift in shifts] == [RoleShift(0, "both")], "one that helps at once is enough"
    shifts = judge(policy, [ANSWERS_WAIT, ANSWERS_WAIT, ANSWERS_WAIT], 20.5, 40.0)
    assert [shift for _, shift in shifts] == [RoleShift(1, "both")], "and then no other host is left"


def test_prompts_are_lent_a_host_that_answers() -> None:
    assert judge(RolePolicy(ROLES, 1.0, HOT_FOR_S, 30.0), [PROMPTS_WAIT, PROMPTS_WAIT, IDLE], 0.0, 20.0) == [
        (HOT_FOR_S, RoleShift(2, "both"))
    ]
    assert judge(RolePolicy(ROLES, 1.0, HOT_FOR_S, 30.0), [PROMPTS_WAIT, IDLE, IDLE], 0.0, 20.0) == [], (
        "another one is idle"
    )


def test_it_goes_back_after_a_long_calm_in_which_it_was_not_needed() -> None:
    policy = RolePolicy(ROLES, 1.0, HOT_FOR_S, 10.0)
    judge(policy, [IDLE, IDLE, ANSWERS_WAIT], 0.0, HOT_FOR_S)
    busy: list[HostWaits | None] = [HostWaits(0.0, 0.2), IDLE, HostWaits(0.0, 0.2)]
    assert judge(policy, busy, 4.0, 30.0) == [], (
        "without it the other would lose 0.4 s, above a quarter of the threshold"
    )
    assert judge(policy, [IDLE, IDLE, ANSWERS_WAIT], 30.5, 31.0) == []
    calm: list[HostWaits | None] = [HostWaits(0.0, 0.1), IDLE, HostWaits(0.0, 0.1)]
    assert judge(policy, calm, 31.5, 60.0) == [(31.5 + 10.0, RoleShift(0, "prefill"))]


def test_waits_between_the_thresholds_change_nothing_either_way() -> None:
    policy = RolePolicy(ROLES, 1.0, HOT_FOR_S, 5.0)
    judge(policy, [IDLE, IDLE, ANSWERS_WAIT], 0.0, HOT_FOR_S)
    wavering: list[HostWaits | None] = [HostWaits(0.0, 0.5), IDLE, HostWaits(0.0, 0.9)]
    assert judge(policy, wavering, 4.0, 100.0) == []


def test_a_host_that_is_down_is_neither_lent_nor_counted() -> None:
    policy = RolePolicy(ROLES, 1.0, HOT_FOR_S, 5.0)
    assert judge(policy, [IDLE, None, ANSWERS_WAIT], 0.0, 4.0) == [(HOT_FOR_S, RoleShift(0, "both"))]
    assert judge(policy, [IDLE, IDLE, None], 5.0, 30.0) == [], "it is the only one that answers"


def test_hosts_that_do_both_have_nothing_to_lend() -> None:
    policy = RolePolicy(("both", "both"), 1.0, HOT_FOR_S, 5.0)
    assert judge(policy, [ANSWERS_WAIT, ANSWERS_WAIT], 0.0, 100.0) == []
