"""The summary of traces with and without lending, and the tie that explains an answer with another token."""

import json
import math
import random
from pathlib import Path

import pytest

from load_tests.lending_sites import BORROWER, GREEDY, LENDER, Asked, Heard, bursts, steady, tie_margin
from load_tests.scenarios.lending import Pair, _row
from load_tests.scenarios.lending_faults import HOWS, drawn, kept_cases
from load_tests.tables.lending import fault_rows, map_rows, rows, simulated_rows

LENT = f"prompt={LENDER}; here=8000.0; {LENDER}=2000.0 (link 90.0 at 900.0 Mbit/s)"


def heard(text: str, ttft_s: float, route: str = "prompt=here; here=8000.0", margin: float = 1.0) -> Heard:
    return Heard(text, ttft_s, route, tokens=tuple((token, {"a": -0.5, "b": -0.5 - margin}) for token in text))


def test_equal_answers_have_no_margin_and_others_the_one_of_their_first_difference() -> None:
    assert tie_margin(heard("aa", 1.0), heard("aa", 2.0)) is None
    assert tie_margin(heard("aa", 1.0, margin=0.01), heard("ab", 2.0)) == pytest.approx(0.01)
    assert tie_margin(heard("aa", 1.0), heard("ac", 2.0)) == math.inf
    assert tie_margin(heard("aa", 1.0), heard("a", 2.0)) == math.inf, "a shorter answer is no tie"


def test_a_prompt_counts_as_lent_only_if_the_other_site_took_it() -> None:
    assert heard("a", 1.0, LENT).is_lent
    assert not heard("a", 1.0, "prompt=here; here=8000.0").is_lent
    assert heard("a", 1.0, LENT).predicted_s == {"here": 8.0, LENDER: 2.0}


def test_a_table_has_the_gain_of_both_sites_and_the_share_lent() -> None:
    trace = [Asked(0.0, BORROWER, [1], GREEDY), Asked(0.0, BORROWER, [2], GREEDY), Asked(0.0, LENDER, [3], GREEDY)]
    pair = Pair(
        trace,
        [heard("a", 8.0), heard("a", 16.0), heard("a", 1.0)],
        [heard("a", 4.0, LENT), heard("b", 4.0), heard("a", 2.0)],
    )
    row = _row("bursts", [pair])
    assert (row["share_lent"], row["different"], row["farthest_from_tie"]) == (0.5, 1, 1.0)
    assert row[BORROWER]["ratio_slowest_of_traces"] == {"median": 4.0, "least": 4.0, "n": 1}
    _, borrower, lender = rows({"kinds": [row]})
    assert borrower[:2] == ["bursts: borrower", "8.0 → 4.0"]
    assert borrower[-2:] == ["50%", "2.00"]
    assert lender[3:] == ["0.50 / 0.50", "", ""]
    _, link = map_rows({"map": [row]})
    assert link == ["bursts", "50%", "2.0 → 4.0", "8.0 → 4.0", "2.00 / 2.00"]


def test_a_burst_is_the_same_for_the_same_seed() -> None:
    assert bursts(random.Random(3), 2, 10.0) == bursts(random.Random(3), 2, 10.0)


def test_a_steady_load_has_requests_at_a_site_that_is_slow() -> None:
    assert min(len(steady(random.Random(seed), BORROWER, 1.0, 10.0)) for seed in range(20)) == 2


def test_a_run_continues_after_the_cases_that_its_file_has(tmp_path: Path) -> None:
    file = tmp_path / "cases"
    assert kept_cases(file, 1) == kept_cases(None, 1) == []
    file.write_text("".join(json.dumps({"lent": i, "seed": 1 + i % 2}) + "\n" for i in range(5)))
    assert kept_cases(file, 1) == [{"lent": 0}, {"lent": 2}, {"lent": 4}]


def test_every_fault_is_drawn_at_both_sites() -> None:
    cases = [drawn(random.Random(1000 + number)) for number in range(200)]
    counts = [
        sum((case.how, case.site) == (how, site) for case in cases) for how in HOWS for site in (BORROWER, LENDER)
    ]
    assert min(counts) >= 10


def test_a_table_of_faults_counts_the_answers_that_were_wrong() -> None:
    right = {"how": "stop the site", "site": LENDER, "margins": [], "failed": 0, "left_open": {}}
    wrong = {**right, "margins": [0.01], "failed": 1, "left_open": {"fast pinned": 3.0}}
    _, line = fault_rows({"by_fault": {"stop the site, fast": 2}, "rows": [right, wrong]})
    assert line == ["stop the site, lender", "2", "1", "1", "1"]


def test_a_table_of_the_simulation_has_the_share_lent_only_where_sites_lend() -> None:
    times = {name: {"median": ms} for name, ms in (("p50_ms", 900.0), ("p95_ms", 4000.0), ("p99_ms", 8000.0))}
    cell = {"load": "heavy", "arm": "fixed sites", "kv": "", **times}
    lent = {"kv": "dense", "lent": {"median": 0.25}, "outcomes": {"lent": 8, "computed": 6}}
    _, plain, lending = simulated_rows({"cells": [cell, {**cell, **lent, "measured_over_predicted": {"p50": 1.1}}]})
    assert plain == ["heavy, fixed sites", "", "0.9 / 4.0 / 8.0", "", "", ""]
    assert lending[3:] == ["25.0%", "75%", "1.10"]
