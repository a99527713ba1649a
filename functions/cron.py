"""Cloudflare's cron expressions: five fields in UTC, with Sunday as day 1.

Names of months and days, `L`, `W` and `#` are allowed. `parse` is the only parser.
"""

import calendar
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta

MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
# Days that are searched for the next match: from one 29th of February to the next may be eight years.
HORIZON_DAYS = 8 * 366 + 1
Rule = Callable[[date], bool]


class CronError(ValueError):
    """The expression is invalid; the message names the field and its valid values."""


@dataclass(frozen=True)
class Schedule:
    text: str
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    months: frozenset[int]
    days: tuple[Rule, ...]  # day-of-month rules; one must match
    weekdays: tuple[Rule, ...]
    either: bool  # both day fields are restricted; as in every cron, one match is then enough

    def next_after(self, moment: datetime) -> datetime | None:
        """Return the first matching minute after `moment`; None if there is none (30th of February)."""
        moment = moment.astimezone(UTC)
        for day in (moment.date() + timedelta(n) for n in range(HORIZON_DAYS)):
            if not self._fits(day):
                continue
            for hour in self.hours:
                for minute in self.minutes:
                    found = datetime.combine(day, time(hour, minute), UTC)
                    if found > moment:
                        return found
        return None

    def last_until(self, moment: datetime, after: datetime) -> datetime | None:
        """Return the latest matching minute up to `moment` and later than `after`; None if there is none."""
        moment, after = moment.astimezone(UTC), after.astimezone(UTC)
        day = moment.date()
        while day >= after.date():
            if self._fits(day):
                for hour in reversed(self.hours):
                    for minute in reversed(self.minutes):
                        found = datetime.combine(day, time(hour, minute), UTC)
                        if after < found <= moment:
                            return found
            day -= timedelta(1)
        return None

    def _fits(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_day, by_weekday = any(rule(day) for rule in self.days), any(rule(day) for rule in self.weekdays)
        return by_day or by_weekday if self.either else by_day and by_weekday


def parse(text: str) -> Schedule:
    """Parse an expression. Raises CronError."""
    fields = text.split()
    if len(fields) != 5:
        raise CronError(
            f"the cron expression {text!r} has {len(fields)} fields; it has five: minute, hour, day, month, weekday"
        )
    minute, hour, day, month, weekday = (field.upper() for field in fields)
    try:
        return Schedule(
            text,
            tuple(sorted(_numbers(minute, "minute", 0, 59))),
            tuple(sorted(_numbers(hour, "hour", 0, 23))),
            frozenset(_numbers(month, "month", 1, 12, MONTHS)),
            tuple(_day_rules(day)),
            tuple(_weekday_rules(weekday)),
            _is_restricted(day) and _is_restricted(weekday),
        )
    except CronError as error:
        raise CronError(f"the cron expression {text!r}: {error}") from None


def _is_restricted(field: str) -> bool:
    return not field.startswith(("*", "?"))


def _day_rules(field: str) -> Iterator[Rule]:
    plain: list[str] = []
    for item in "*".join(field.split("?")).split(","):
        if item == "L":
            yield lambda day: day.day == _last(day)
        elif item == "LW":
            yield lambda day: day == _nearest_weekday(day, _last(day))
        elif item.startswith("L-") and item[2:].isdigit() and 1 <= int(item[2:]) <= 30:
            yield lambda day, before=int(item[2:]): day.day == _last(day) - before  # type: ignore[misc]
        elif item.endswith("W"):
            wanted = _number(item[:-1], "day of the month", 1, 31, ())
            yield lambda day, wanted=wanted: wanted <= _last(day) and day == _nearest_weekday(day, wanted)  # type: ignore[misc]
        else:
            plain.append(item)
    if plain:
        numbers = _numbers(",".join(plain), "day of the month", 1, 31)
        yield lambda day: day.day in numbers


def _weekday_rules(field: str) -> Iterator[Rule]:
    plain: list[str] = []
    for item in "*".join(field.split("?")).split(","):
        name, mark, count = item.partition("#")
        if item == "L":
            plain.append("7")  # the last day of a week is Saturday
        elif mark:
            wanted, nth = _weekday(name), _number(count, "weekday's number in the month", 1, 5, ())
            yield lambda day, wanted=wanted, nth=nth: _of(day) == wanted and (day.day - 1) // 7 == nth - 1  # type: ignore[misc]
        elif item.endswith("L"):
            wanted = _weekday(item[:-1])
            yield lambda day, wanted=wanted: _of(day) == wanted and day.day > _last(day) - 7  # type: ignore[misc]
        else:
            plain.append(item)
    if plain:
        numbers = _numbers(",".join(plain), "weekday", 1, 7, DAYS)
        yield lambda day: _of(day) in numbers


def _weekday(text: str) -> int:
    return _number(text, "weekday", 1, 7, DAYS)


def _numbers(field: str, what: str, low: int, high: int, names: tuple[str, ...] = ()) -> frozenset[int]:
    found: set[int] = set()
    for item in field.split(","):
        base, slash, step_text = item.partition("/")
        step = _number(step_text, f"{what}'s step", 1, high, ()) if slash else 1
        if base == "*":
            first, last = low, high
        elif "-" in base:
            start, _, end = base.partition("-")
            first, last = _number(start, what, low, high, names), _number(end, what, low, high, names)
        else:
            first = _number(base, what, low, high, names)
            last = high if slash else first
        if first <= last:
            found.update(range(first, last + 1, step))
        else:  # FRI-MON wraps around
            found.update((low + (n - low) % (high - low + 1)) for n in range(first, last + high - low + 2, step))
    return frozenset(found)


def _number(text: str, what: str, low: int, high: int, names: tuple[str, ...]) -> int:
    if text in names:
        return names.index(text) + low
    if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
        named = f" or {names[0]}-{names[-1]}" if names else ""
        raise CronError(f"{text!r} is no {what}; it is a number from {low} to {high}{named}")
    return int(text)


def _of(day: date) -> int:
    return day.isoweekday() % 7 + 1  # Sunday is 1


def _last(day: date) -> int:
    return calendar.monthrange(day.year, day.month)[1]


def _nearest_weekday(day: date, wanted: int) -> date:
    """Return the weekday (Monday to Friday) nearest to day `wanted` within the same month."""
    found = day.replace(day=wanted)
    if found.isoweekday() == 6:
        return found - timedelta(1) if wanted > 1 else found + timedelta(2)
    if found.isoweekday() == 7:
        return found + timedelta(1) if wanted < _last(day) else found - timedelta(2)
    return found
