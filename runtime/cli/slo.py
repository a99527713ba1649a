"""`pilotlight slo`: a router's service level objectives as a table or JSON."""

import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotlight.runtime.cli.api import Api


def print_slo(api: Api, as_json: bool) -> None:
    answer = api.get_json("/slo")
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    states = answer["objectives"]
    if not states:
        print("The router has no objectives, or could not keep their counts: [[objectives]] of its file, and its log.")
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
    Console().print(table)
    print(f"Over {answer['period_days']} days. A burn rate of 1 uses the budget up in as many.")


def _objective(state: dict[str, float | str | None]) -> str:
    share = f"{100 * float(state['target'] or 0):.6g}%"
    within_ms = state["within_ms"]
    return f"{share} answered" if within_ms is None else f"{share} first token < {float(within_ms):g} ms"
