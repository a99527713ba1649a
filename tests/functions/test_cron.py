"""Cron expressions: the minutes that they match, and the errors of invalid ones."""

from datetime import UTC, datetime, timedelta

import pytest

from pilotlight.functions import cron

MOMENT = datetime(2026, 11, 21, 14, 53, 30, tzinfo=UTC)  # a Saturday


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("* * * * *", "2026-11-21 14:54"),
        ("*/30 * * * *", "2026-11-21 15:00"),
        ("45 * * * *", "2026-11-21 15:45"),
        ("10/20 3 * * *", "2026-11-22 03:10"),
        ("0 17 * * sun", "2026-11-22 17:00"),
        ("0 17 * * 1", "2026-11-22 17:00"),
        ("0 17 * * MON-FRI", "2026-11-23 17:00"),
        ("0 0 * * FRI-MON", "2026-11-22 00:00"),
        ("10 7 * * mon,WED", "2026-11-23 07:10"),
        ("0 15 1 * *", "2026-12-01 15:00"),
        ("0 18 * * 6L", "2026-11-27 18:00"),
        ("59 23 LW * *", "2026-11-30 23:59"),
        ("0 0 L * *", "2026-11-30 00:00"),
        ("0 0 L-2 * *", "2026-11-28 00:00"),
        ("0 0 * * L", "2026-11-28 00:00"),
        ("0 0 * * 2#1", "2026-12-07 00:00"),
        ("0 0 15W * *", "2026-12-15 00:00"),
        ("0 0 1W AUG *", "2027-08-02 00:00"),
        ("0 0 29 2 *", "2028-02-29 00:00"),
        ("0 0 13 * FRI", "2026-11-27 00:00"),
        ("0 0 ? JAN ?", "2027-01-01 00:00"),
        ("53 14 * * *", "2026-11-22 14:53"),
    ],
)
def test_the_next_minute_is_found(expression: str, expected: str) -> None:
    found = cron.parse(expression).next_after(MOMENT)
    assert found is not None
    assert found.strftime("%Y-%m-%d %H:%M") == expected


def test_a_day_that_never_comes_has_no_next_minute() -> None:
    assert cron.parse("0 0 30 2 *").next_after(MOMENT) is None


@pytest.mark.parametrize("expression", ["*/7 * * * *", "0 17 * * 2-6", "30 4 1,15 * FRI", "0 0 LW * *"])
def test_the_last_minute_until_a_moment_agrees_with_the_next_ones(expression: str) -> None:
    schedule = cron.parse(expression)
    at, minutes = MOMENT - timedelta(days=70), []
    while (found := schedule.next_after(at)) is not None and found <= MOMENT:
        minutes.append(found)
        at = found
    assert schedule.last_until(MOMENT, MOMENT - timedelta(days=70)) == minutes[-1]
    assert schedule.last_until(minutes[-1], minutes[-2]) == minutes[-1]
    assert schedule.last_until(MOMENT, minutes[-1]) is None


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("* * * *", "has 4 fields"),
        ("60 * * * *", "'60' is no minute; it is a number from 0 to 59"),
        ("* * 0 * *", "'0' is no day of the month"),
        ("* * * * 0", "'0' is no weekday; it is a number from 1 to 7 or SUN-SAT"),
        ("* * * 13 *", "'13' is no month"),
        ("*/0 * * * *", "'0' is no minute's step"),
        ("a * * * *", "'A' is no minute"),
        ("* * * * 2#6", "'6' is no weekday's number"),
        ("1,, * * * *", "'' is no minute"),
        ("* * 32W * *", "'32' is no day of the month"),
        ("٣ * * * *", "is no minute"),
    ],
)
def test_what_is_no_expression_is_named(expression: str, sentence: str) -> None:
    with pytest.raises(cron.CronError, match=sentence):
        cron.parse(expression)
