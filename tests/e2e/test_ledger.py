"""A router, its sites and their engine hosts are killed under load: the ledger counts each token once. `make bench-ledger` kills a hundred times."""

from load_tests.scenarios.ledger import FAULTS, measure
from tests.e2e.conftest import NO_STANDBY


def test_the_ledger_is_right_when_processes_are_killed() -> None:
    results = measure(kills=3, num_clients=3, engine_settings=NO_STANDBY)
    assert {fault: results[fault] for fault in FAULTS if results[fault]} == {}
    assert results["read_to_the_end"] > 10
    assert 0 < results["device_s"] <= 2 * results["took_s"], "two sites with one device each"
    assert results["function_tokens_in_the_ledger"] >= results["function_tokens_received"] > 0
    assert results["tokens_in_the_ledger"] >= results["tokens_received"] > 0
