"""`pilotlight manage`: send requests to the management API, and show the progress of operations."""

import json
import sys
import time
from typing import Any
from urllib.parse import quote, urlencode

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from pilotlight.engine.planning.devices import GIB
from pilotlight.runtime.cli.api import Api
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.status import published
from pilotlight.runtime.cli.tables import print_table

POLL_S = 0.3


class Manager:
    """A client for the management API. All methods raise CliError with the sentence of a refusal."""

    def __init__(self, api: Api, poll_s: float = POLL_S) -> None:
        self._api = api
        self._poll_s = poll_s

    def print_catalogue(self, as_json: bool) -> None:
        found = self._catalogue()
        if as_json:
            print(json.dumps(found, indent=2))
            return
        table = Table(
            "site", "source", "here", "size", "context", "KV tokens", "tokens/s", "licence", "served as", "", box=None
        )
        for site, one in found["sites"].items():
            for model in one["models"]:
                table.add_row(*_row(site, model))
        print_table(table)
        for site, reason in found["unread"].items():
            print(f"{site}: {reason}", file=sys.stderr)

    def search(self, words: str, site: str | None, as_json: bool) -> None:
        """Search the Hugging Face hub for these words and print the models."""
        query = urlencode({"site": self._site(site), "words": words})
        found = self._api.get_json(f"/manage/hub?{query}")["models"]
        if as_json:
            print(json.dumps(found, indent=2))
            return
        table = Table("source", "architecture", "parameters", "licence", "downloads a month", "", box=None)
        for one in found:
            size = f"{one['parameters'] / 1e9:.2f} G" if one["parameters"] else ""
            terms = "its terms must be accepted first" if one["is_gated"] else ""
            architecture = one["architecture"] or "not supported"
            table.add_row(Text(one["source"]), architecture, size, Text(one["license"]), f"{one['downloads']:,}", terms)
        print_table(table)

    def pull(self, source: str, site: str | None) -> None:
        site = self._site(site)
        self._operate(site, {"action": "pull", "source": source})
        columns = TextColumn(source, markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(source, total=None)
            while (download := self._download(site, source))["state"] == "running":
                bar.update(task, completed=download["done_bytes"], total=download["total_bytes"] or None)
                time.sleep(self._poll_s)
        if download["state"] != "done":
            raise CliError(download["error"] or f"the download was {download['state']}")
        print(f"{source} is at {site}")

    def run(self, site: str | None, fields: dict[str, Any]) -> None:
        """Add a model, and wait until it is awake."""
        site = self._site(site)
        before = {name for name, _ in self._models(site)}
        self._operate(site, {"action": "run", **fields})
        console, said = Console(stderr=True), ""
        while True:
            added = [model for name, model in self._models(site) if name not in before]
            if added and added[0]["residency"] == "failed":
                raise CliError(f"{added[0]['name']} cannot be loaded: {added[0]['detail']}")
            if added and added[0]["residency"] != "loading":
                print(f"{site} serves {added[0]['name']}")
                return
            if added and added[0]["detail"] != said:
                said = added[0]["detail"]
                console.print(said, markup=False, highlight=False)
            time.sleep(self._poll_s)

    def change(self, site: str | None, action: str, model: str = "") -> None:
        site = self._site(site)
        self._operate(site, {"action": action, "model": model})
        print(f"{action} {model or site}: started" if not model else f"{action} {model} at {site}: started")

    def create_key(self, fields: dict[str, Any]) -> None:
        made = self._api.send("POST", "/manage/keys", json.dumps(fields).encode(), "")
        print(f"{made['name']} is valid at once. The key is shown only now:", file=sys.stderr)
        print(made["key"])

    def revoke_key(self, name: str) -> None:
        self._api.send("DELETE", f"/manage/keys/{quote(name, safe='')}", None, "")
        print(f"{name} is refused from now on")

    def print_join_line(self, minutes: float) -> None:
        made = self._api.send("POST", "/manage/join", json.dumps({"minutes": minutes}).encode(), "")
        print(f"On the next machine, once, within {minutes:g} minutes:", file=sys.stderr)
        print(made["line"])

    def print_stores(self) -> None:
        found, table = self._api.get_json("/manage/stores"), Table("site", "kind", "name", "of", "size", box=None)
        for site, stores in found["sites"].items():
            for one in stores:
                size = f"{one['bytes'] / 2**20:,.2f} MiB"
                table.add_row(site, one["kind"], Text(one["name"]), Text(one["owner"]), size)
        print_table(table)
        for site, reason in found["unread"].items():
            print(f"{site}: {reason}", file=sys.stderr)

    def print_page(self, site: str | None, query: dict[str, Any], as_json: bool) -> None:
        """Print a page of a database's table, or of the keys in a namespace."""
        page = self._api.get_json(f"/manage/stores/{quote(self._site(site), safe='')}?{urlencode(query)}")
        if as_json:
            print(json.dumps(page, indent=2))
            return
        table = Table(box=None)
        for column in page["columns"]:
            table.add_column(Text(column))
        for row in page["rows"]:
            table.add_row(*(Text("NULL", "dim") if cell is None else Text(cell) for cell in row))
        print_table(table)
        if page["tables"]:
            print(f"table {page['table']}, of: {', '.join(page['tables'])}", file=sys.stderr)
        if page["next"]:
            print(f"More: --after {page['next']}", file=sys.stderr)

    def _operate(self, site: str, fields: dict[str, Any]) -> None:
        self._api.send("POST", f"/manage/sites/{quote(site, safe='')}", json.dumps(fields).encode(), "")

    def _catalogue(self) -> dict[str, Any]:
        found: dict[str, Any] = self._api.get_json("/manage/catalogue")
        return found

    def _download(self, site: str, source: str) -> dict[str, Any]:
        catalogue = self._catalogue()
        if (reason := catalogue["unread"].get(site)) is not None:
            raise CliError(
                f"The progress at {site} cannot be read ({reason}). The download may continue: start it again to see."
            )
        found = catalogue["sites"].get(site, {"downloads": []})["downloads"]
        ours: dict[str, Any] | None = next((each for each in found if each["source"] == source), None)
        if ours is None:
            raise CliError(f"{site} was restarted and lost the download. Start it again; it resumes.")
        return ours

    def _models(self, site: str) -> list[tuple[str, dict[str, Any]]]:
        statuses = published(self._api.get_json("/status"))
        return [(model["name"], model) for each in statuses if each["site"] == site for model in each["models"]]

    def _site(self, named: str | None) -> str:
        if named is not None:
            return named
        sites = [each["site"] for each in published(self._api.get_json("/status"))]
        if len(sites) != 1:
            raise CliError(f"Name one of the sites by --site: {', '.join(sites) or 'none has published its status'}.")
        return str(sites[0])


def _row(site: str, model: dict[str, Any]) -> tuple[str | Text, ...]:
    fit = model["fit"]
    figures = ["", ""] if not fit or not fit["fits"] else [f"{fit['kv_tokens']:,}", f"{fit['tokens_per_s']:,.0f}"]
    why = model["how"] or ("" if not fit or fit["fits"] else fit["reason"])
    size = f"{model['file_bytes'] / GIB:.2f} GiB" if model["file_bytes"] else ""
    context = f"{model['context_length']:,}" if model["context_length"] else ""
    here = "yes" if model["is_here"] else "no"
    served = Text(", ".join(model["served_as"]))
    return site, Text(model["source"]), here, size, context, *figures, Text(model["license"]), served, Text(why)
