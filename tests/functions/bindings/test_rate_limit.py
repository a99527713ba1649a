"""Rate limits: how many calls pass in any period, from all callers together."""

from pathlib import Path

import pytest

from pilotlight.functions.bindings.binding import BindingError, Services
from pilotlight.functions.bindings.rate_limit import RateLimit, Window
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.manifest import BindingDeclaration
from tests.clock import Clock
from tests.functions.bindings.conftest import Wire


def allowed(window: Window, key: str, times: int, limit: int = 5) -> int:
    return sum(window.allows(key, limit, 10) for _ in range(times))


def test_a_key_is_let_through_up_to_its_limit_and_again_later() -> None:
    clock = Clock(1000.0)
    window = Window(clock)
    assert allowed(window, "a", 9) == 5
    assert allowed(window, "b", 9) == 5
    clock.now += 10
    assert allowed(window, "a", 9) == 0  # all five were within the last ten seconds
    clock.now += 4
    assert allowed(window, "a", 9) == 2
    clock.now += 30
    assert allowed(window, "a", 9) == 5


def test_a_storm_of_calls_gets_about_its_limit_through_in_any_period() -> None:
    clock = Clock(1000.0)
    window = Window(clock)
    passed = []
    for _ in range(400):
        clock.now += 0.25
        if window.allows("a", 5, 10):
            passed.append(clock.now)
    assert all(sum(start <= at < start + 10 for at in passed) <= 6 for start in passed)
    assert 35 <= len(passed) <= 55  # ideally 50 in 100 seconds; the estimate for the previous period may refuse some


def test_the_least_recently_used_keys_are_forgotten() -> None:
    window = Window(Clock(1000.0), max_keys=10)
    for i in range(100):
        window.allows(f"k{i}", 1, 10)
    assert [window.allows(f"k{i}", 1, 10) for i in range(90, 100)] == [False] * 10
    assert window.allows("k89", 1, 10)


async def test_bindings_of_one_namespace_count_together(wire: Wire) -> None:
    options = {"namespace_id": "1001", "limit": 3, "period": 60}
    wired = await wire(("rate_limit", "A", options), ("rate_limit", "B", options))
    given = [(await wired.env[name].limit({"key": "me"})).success for name in "ABABA"]
    assert given == [True, True, True, False, False]
    assert (await wired.env["A"].limit(key="you")).success
    with pytest.raises(TypeError, match="limit needs a key"):
        await wired.env["A"].limit()
    for key in ("", "x" * 2049):
        with pytest.raises(Failure, match="1 to 2048 bytes"):
            await wired.env["A"].limit(key=key)


def test_a_period_that_is_not_offered_is_refused(tmp_path: Path) -> None:
    declaration = BindingDeclaration("rate_limit", "A", {"limit": 1, "period": 7})
    with pytest.raises(BindingError, match="10 or 60 seconds, not 7"):
        RateLimit.open(declaration, tmp_path, Services())
