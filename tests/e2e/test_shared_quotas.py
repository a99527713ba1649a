"""Three routers enforce an account's limits together, and continue without their store. `make bench-shared-quotas` runs longer."""

import pytest

from load_tests.scenarios.shared_quotas import measure


def test_three_routers_enforce_limits_together_and_continue_without_their_store() -> None:
    try:
        results = measure(seconds=3.0)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert results["faults"] == []
    assert min(results["minute"]["by_router"]) > 0
    assert all(results["refusals"][name] for name in ("minute", "open", "day"))
