"""`pilotlight usage`: a router's ledger as a table, JSON and CSV."""

import json

import pytest

from pilotlight.runtime.cli.usage import print_usage
from tests.runtime.cli.stored_api import StoredApi

COUNTS = {"requests": 2, "prompt_tokens": 1_234_567, "cached_tokens": 0, "output_tokens": 5, "reasoning_tokens": 0}
SINCE_THEN = {"drafted_tokens": 7, "accepted_tokens": 6, "device_s": 0.5, "bytes_in": 2_000, "bytes_out": 8}
TOLD = {
    "currency": "EUR",
    "by": ["account", "model"],
    "usage": [
        {"account": "acme", "model": "[bold]m", **COUNTS, "cost": "1.500000000"},
        {"account": "", "model": "n", **COUNTS, "cost": None},
    ],
}


def test_usage_is_a_table_json_or_csv(capsys: pytest.CaptureFixture[str]) -> None:
    api = StoredApi(TOLD, "a,b\r\n")
    print_usage(api, {"from": "2026-11-01"}, as_json=False, as_csv=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["account", "model", "requests", "prompt", "cached", "output", "reasoning", "EUR"],
        ["acme", "[bold]m", "2", "1,234,567", "0", "5", "0", "1.5"],
        ["-", "n", "2", "1,234,567", "0", "5", "0", "-"],
    ]
    print_usage(api, {}, as_json=True, as_csv=False)
    assert json.loads(capsys.readouterr().out) == TOLD
    print_usage(api, {}, as_json=False, as_csv=True)
    assert capsys.readouterr().out == "a,b\r\n"
    assert api.asked == ["/usage?from=2026-11-01", "/usage?", "/usage?format=csv"]


def test_a_newer_routers_records_have_columns_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told = {**TOLD, "usage": [{**row, **SINCE_THEN} for row in TOLD["usage"]]}
    print_usage(StoredApi(told), {}, as_json=False, as_csv=False)
    assert capsys.readouterr().out.count("2,000") == 2
