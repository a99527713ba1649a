"""`pilotlight usage` and `pilotlight slo`: a router's ledger, and its objectives.

Both print a table, JSON or CSV.
"""

import json
from typing import Any
from urllib.parse import urlencode

from rich.table import Table
from rich.text import Text

from pilotlight.runtime.cli.api import Api
from pilotlight.runtime.cli.tables import print_table

COUNTS = {
    "requests": "requests",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "output_tokens": "output",
    "reasoning_tokens": "reasoning",
    "drafted_tokens": "drafted",
    "accepted_tokens": "accepted",
    "device_s": "device s",
    "cpu_s": "function cpu s",
    "bytes_in": "bytes in",
    "bytes_out": "bytes out",
}


def print_usage(api: Api, asked: dict[str, str], as_json: bool, as_csv: bool) -> None:
    if as_csv:
        print(api.get_text("/usage?" + urlencode({**asked, "format": "csv"})), end="")
        return
    told = api.get_json("/usage?" + urlencode(asked))
    if as_json:
        print(json.dumps(told, indent=2))
        return
    table = Table(*told["by"], box=None, header_style="bold")
    # an older router sends fewer fields
    counts = [name for name in COUNTS if all(name in row for row in told["usage"])]
    for name in (*(COUNTS[name] for name in counts), told["currency"]):
        table.add_column(name, justify="right")
    for row in told["usage"]:
        groups = [Text(str(row[name]) or "-") for name in told["by"]]
        table.add_row(*groups, *(f"{row[name]:,}" for name in counts), _amount(row["cost"]))
    print_table(table)


def _amount(cost: Any) -> str:
    """Return a cost without trailing zeros; a dash if nothing had a price."""
    return "-" if cost is None else str(cost).rstrip("0").rstrip(".")


def print_slo(api: Api, as_json: bool) -> None:
    answer = api.get_json("/slo")
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    states = answer["objectives"]
    if not states:
        print("The router has no objectives, or cannot store counts: see [[objectives]] in its file, and its log.")
        return
    windows = list(states[0]["burn_rate"])
    table = Table("model", "site", "objective", box=None, header_style="bold")
    for name in ("requests", "bad", *(f"burn {window}" for window in windows), "budget left"):
        table.add_column(name, justify="right")
    for state in states:
        rates = [state["burn_rate"][window] for window in windows]
        table.add_row(
            Text(state["model"]), state["site"] or "-", _objective(state), f"{state['requests']:,}", f"{state['bad']:,}",
            *("-" if rate is None else f"{rate:.2f}" for rate in rates), f"{state['budget_left']:.1%}",
        )  # fmt: skip
    print_table(table)
    print(f"Over {answer['period_days']} days. A burn rate of 1 uses up the budget in this time.")


def _objective(state: dict[str, float | str | None]) -> str:
    share = f"{100 * float(state['target'] or 0):.6g}%"
    within_ms = state["within_ms"]
    return f"{share} answered" if within_ms is None else f"{share} first token < {float(within_ms):g} ms"
