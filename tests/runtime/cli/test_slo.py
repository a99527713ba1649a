"""`pilotlight slo`: the state of objectives, as a table and as JSON."""

import json

import pytest

from pilotlight.runtime.cli.usage import print_slo
from tests.runtime.cli.stored_api import StoredApi

RATES = {"1h": None, "6h": 1.0, "3d": 14.4}
STATE = {"model": "[bold]m", "requests": 12_345, "bad": 7, "burn_rate": RATES, "budget_left": -0.25}
TOLD = {
    "period_days": 30,
    "objectives": [
        {**STATE, "site": "*", "objective": "answered", "target": 0.9995, "within_ms": None},
        {**STATE, "site": "", "objective": "first_token", "target": 0.95, "within_ms": 500.0},
    ],
}


def test_objectives_are_a_table_or_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    api = StoredApi(TOLD)
    print_slo(api, as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    numbers = ["12,345", "7", "-", "1.00", "14.40", "-25.0%"]
    assert lines[1] == ["[bold]m", "*", "99.95%", "answered", *numbers]
    assert lines[2] == ["[bold]m", "-", "95%", "first", "token", "<", "500", "ms", *numbers]
    print_slo(api, as_json=True)
    assert json.loads(capsys.readouterr().out) == TOLD
    assert api.asked == ["/slo", "/slo"]


def test_a_router_without_counts_says_where_they_would_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    print_slo(StoredApi({**TOLD, "objectives": []}), as_json=False)
    assert "[[objectives]]" in capsys.readouterr().out
