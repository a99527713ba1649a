"""An account finds what it has cached itself and nothing of another's, by count. `make bench-account-timing` compares the times."""

from load_tests.scenarios.account_timing import measure


def test_an_account_finds_its_own_prompts_and_nobody_elses() -> None:
    cached = measure(count=3, num_sites=1)["cached_tokens"]
    assert cached["others"] == cached["nobodys"] == 0
    assert cached["own"] > 0
