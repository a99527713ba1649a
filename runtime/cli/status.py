"""`pilotlight status` and `pilotlight models`: what runs where, as a table or as JSON."""

import json
from datetime import timedelta
from typing import Any

from rich.table import Table
from rich.text import Text

from pilotlight.runtime.cli.api import Api
from pilotlight.runtime.cli.tables import print_table


def print_status(api: Api, as_json: bool) -> None:
    """Print the /status of a router, or of a site without one."""
    status = api.get_json("/status")
    processes = list_processes(status, api.url)
    if as_json:
        print(json.dumps(processes, indent=2))
        return
    table = Table("role", "site", "pid", "url", "state", box=None, header_style="bold")
    for process in processes:
        table.add_row(*(str(process[key] or "") for key in ("role", "site", "pid", "url", "state")))
    print_table(table)
    print_sites(status)
    print_residency(status)
    for site, isolation in isolations(status):
        why = f" ({isolation['why_not_more']})" if isolation["why_not_more"] else ""
        print(
            f"functions of {site}: isolation tier {isolation['isolation_tier']}{why}, {len(isolation['functions'])} served"
        )


def print_sites(status: dict[str, Any]) -> None:
    """Print the version, age and load of each site."""
    table = Table("site", "version", "up", "requests", "of", box=None, header_style="bold")
    for site in published(status):
        age = timedelta(seconds=round(site.get("uptime_s", 0.0)))
        table.add_row(site["site"], site["version"], str(age), str(site["inflight"]), str(site["max_inflight"]))
    print_table(table)


def print_residency(status: dict[str, Any]) -> None:
    """Print where each site's models are, and why any has failed."""
    table = Table(
        "model", "site", "residency", "sleeps on", "running", "waiting", "detail", box=None, header_style="bold"
    )
    for site in published(status):
        for model in site["models"]:
            sleeps_on = "host" if model.get("in_host_memory") else "disk"
            load = str(model.get("running", 0)), str(model.get("waiting", 0))
            table.add_row(
                Text(model["name"]), site["site"], model["residency"], sleeps_on, *load, Text(model["detail"])
            )
    if table.row_count:
        print_table(table)


def published(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the newest status of each site that has published one."""
    return [view["status"] for view in status["sites"] if view["status"]] if "sites" in status else [status]


def isolations(status: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the isolation of functions at each site that serves some."""
    return [(site["site"], site["functions"]) for site in published(status) if site.get("functions")]


def list_processes(status: dict[str, Any], url: str) -> list[dict[str, Any]]:
    """List every process with its role, site, pid, url and state.

    For a site that cannot be reached, the entries are from its router."""
    if "sites" not in status:
        return site_processes(status, "ready" if status["ready"] else "starting")
    router = status["process"]
    found = [{"role": "router", "site": None, "pid": router["pid"], "url": router["url"] or url, "state": "ready"}]
    for view in status["sites"]:
        if view["status"] is None or view["state"] == "unhealthy":
            found.append(
                {"role": "site", "site": view["site"], "pid": None, "url": view["url"], "state": view["state"]}
            )
        else:
            found += site_processes(view["status"], view["state"])
    return found


def site_processes(status: dict[str, Any], state: str) -> list[dict[str, Any]]:
    return [
        {key: process.get(key) for key in ("role", "site", "pid", "url")} | {"state": state}
        for process in status["processes"]
    ]


def print_models(api: Api, as_json: bool) -> None:
    models = api.get_json("/v1/models")["data"]
    if as_json:
        print(json.dumps(models, indent=2))
        return
    table = Table("model", "type", "context", "weights", "saved", "owned by", box=None, header_style="bold")
    for model in models:
        context = str(model.get("context_length") or "")
        sizes = [f"{model[key] / 2**20:,.0f} MiB" if model.get(key) else "" for key in ("weights_bytes", "saved_bytes")]
        table.add_row(model["id"], model.get("type", ""), context, *sizes, model.get("owned_by", ""))
    print_table(table)
