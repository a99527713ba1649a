"""`pilotlight deploy`, `rollback`, `delete`, `versions` and `tail`: manage functions of a network."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.table import Table
from rich.text import Text

from pilotlight.functions.host.dependencies.layers import requirements_of
from pilotlight.functions.manifest import load_manifest
from pilotlight.runtime.cli.api import API_KEY_ENV, Api
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.local_token import local_token
from pilotlight.runtime.cli.tables import print_table
from pilotlight.wire.hop.bundles import BundleError, digest_of, pack
from pilotlight.wire.hop.deployments import PATH
from pilotlight.wire.hop.headers import DEPLOY_TOKEN_ENV

PROGRESS_S = 10.0


def deploy(
    api: Api,
    directory: Path,
    environment: str | None,
    percent: float,
    message: str,
    health: str,
    home: str | None,
    progress_s: float = PROGRESS_S,
) -> None:
    """Deploy a folder as a new version.

    `home` is the only site that runs the function; empty for all sites. With None the previous choice stays; for a new function the kinds of its
    bindings decide.
    """
    if not health.startswith("/"):
        raise CliError(f"--health {health} is not a path: it must start with /.")
    manifest = load_manifest(directory, environment)
    try:
        data = pack(directory)
    except (BundleError, OSError) as error:
        raise CliError(f"{directory}: {error}") from None
    digest = digest_of(data)
    before = _of(api, manifest.name)
    again = _served_now(before, digest, environment)
    if again is not None and again["percent"] == percent and home in (None, before.get("home", "")):
        print(f"{manifest.name}: this is version {again['number']} already, with {percent:g} % of the traffic")
        return
    print(f"{manifest.name}: {len(data)} bytes, SHA-256 {digest[:16]}")
    for note in manifest.notes:
        print(f"  {note}")
    api.send("PUT", f"{PATH}/bundles/{digest}", data, author_token(api), "application/x-tar")
    wanted = {
        "digest": digest,
        "expected_revision": before["revision"],
        "percent": percent,
        "message": message,
        "environment": environment,
        "health_path": health,
        "keeps_data": manifest.keeps_data,
        "services": manifest.services,
        "routes": manifest.routes,
        "has_subdomain": manifest.has_subdomain,
        "home": home,
    }
    packages = requirements_of(directory)
    installing = (
        f"install {len(packages)} package{'' if len(packages) == 1 else 's'} ({', '.join(packages[:3])}{', ...' if packages[3:] else ''}), "
        if packages
        else ""
    )
    with _progress(f"{manifest.name}: its sites {installing}start it and call GET {health}", progress_s):
        after = api.send("POST", f"{PATH}/{manifest.name}", json.dumps(wanted).encode(), author_token(api))
    for line in _shares(after, before if manifest.keeps_data else None):
        print(line)
    for address in (f"{api.url}/fn/{manifest.name}", *after.get("addresses", ())):
        print(f"{manifest.name}: answers at {address}")


def rollback(api: Api, name: str, number: int | None) -> None:
    before = _of(api, name)
    _expect_versions(before)
    wanted = {"expected_revision": before["revision"], "number": number}
    after = api.send("POST", f"{PATH}/{quote(name, safe='')}/rollback", json.dumps(wanted).encode(), author_token(api))
    for line in _shares(after):
        print(line)


def delete(api: Api, name: str) -> None:
    before = _of(api, name)
    path = f"{PATH}/{quote(name, safe='')}"
    after = api.send("DELETE", path, json.dumps({"expected_revision": before["revision"]}).encode(), author_token(api))
    newest = max(version["number"] for version in after["versions"])
    print(
        f"{name}: no longer served; its data is kept, and `pilotlight rollback {name} --version {newest}` brings it back"
    )
    for line in _shares(after):
        print(line)


def versions(api: Api, name: str, as_json: bool) -> None:
    deployment = _of(api, name)
    if as_json:
        print(json.dumps(deployment, indent=2))
        return
    _expect_versions(deployment)
    shares = {share["number"]: share["percent"] for share in deployment["shares"]}
    table = Table("version", "traffic", "deployed", "SHA-256", "message", box=None, header_style="bold")
    for version in reversed(deployment["versions"]):
        share = f"{shares[version['number']]:g} %" if version["number"] in shares else ""
        deployed = time.strftime("%Y-%m-%d %H:%M", time.localtime(version["created_s"]))
        table.add_row(str(version["number"]), share, deployed, version["digest"][:16], Text(version["message"]))
    print_table(table)


def tail(api: Api, name: str, as_json: bool) -> None:
    """Print a function's output until Ctrl-C."""
    if not _of(api, name)["versions"]:
        print(
            f"No function named {name} has been deployed; output of a site's own function with that name is shown here.",
            file=sys.stderr,
        )
    try:
        for event in api.follow(f"{PATH}/{quote(name, safe='')}/tail", author_token(api)):
            print(json.dumps(event) if as_json else f"{event.get('site', '')}  {event.get('line', '')}", flush=True)
    except KeyboardInterrupt:
        sys.exit(130)


def put_secret(api: Api, name: str, secret: str, value: str) -> None:
    after = api.send("PUT", _secret_path(name, secret), value.encode(), author_token(api), "text/plain; charset=utf-8")
    print(f"{name}: {secret} is stored; running versions get it in a few seconds, without a deploy")
    _print_unconfirmed(after)


def delete_secret(api: Api, name: str, secret: str) -> None:
    after = api.send("DELETE", _secret_path(name, secret), b"", author_token(api))
    print(f"{name}: {secret} is deleted; running versions lose it in a few seconds")
    _print_unconfirmed(after)


def secret_names(api: Api, name: str) -> list[str]:
    names: list[str] = api.send("GET", f"{PATH}/{quote(name, safe='')}/secrets", None, author_token(api))
    return names


def _secret_path(name: str, secret: str) -> str:
    return f"{PATH}/{quote(name, safe='')}/secrets/{quote(secret, safe='')}"


def _print_unconfirmed(after: dict[str, Any]) -> None:
    for site, why in after.get("unconfirmed", {}).items():
        print(f"{after['name']}: not confirmed by {site} yet: {why}")


@contextmanager
def _progress(sentence: str, every_s: float) -> Iterator[None]:
    """Print what the command waits for, again every `every_s`; a first installation may take minutes."""
    done, started_at = threading.Event(), time.monotonic()

    def tell() -> None:
        print(sentence, flush=True)
        while not done.wait(every_s):
            print(f"{sentence}: {time.monotonic() - started_at:.0f} s so far", flush=True)

    telling = threading.Thread(target=tell, daemon=True)
    telling.start()
    try:
        yield
    finally:
        done.set()
        telling.join()


def _of(api: Api, name: str) -> dict[str, Any]:
    deployment: dict[str, Any] = api.send("GET", f"{PATH}/{quote(name, safe='')}", None, author_token(api))
    return deployment


def _expect_versions(deployment: dict[str, Any]) -> None:
    if not deployment["versions"]:
        raise CliError(f"No function named {deployment['name']} has been deployed.")


def _served_now(deployment: dict[str, Any], digest: str, environment: str | None) -> dict[str, Any] | None:
    """Return the traffic share of the newest version if it has this digest and environment, else None."""
    newest = deployment["shares"][0] if deployment["shares"] else None
    for version in deployment["versions"]:
        if newest is not None and version["number"] == newest["number"]:
            is_same = version["digest"] == digest and version.get("environment") == environment
            return newest if is_same else None
    return None


def _shares(deployment: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    """Describe a deployment.
    `before` is the previous one of a function with data, from whose home it may have moved."""
    name = deployment["name"]
    lines = [f"{name}: version {share['number']} has {share['percent']:g} %" for share in deployment["shares"]]
    home, left = deployment.get("home", ""), before.get("home", "") if before is not None else ""
    if left and left != home:
        lines.append(
            f"{name}: moved from {left} to {home or 'every site'}; its data stays at {left}, and --home {left} moves it back there"
        )
    elif home:
        lines.append(f"{name}: runs at {home} only, because its data is there")
    return lines + [
        f"{name}: not confirmed to be served by {site} yet: {why}"
        for site, why in deployment.get("unconfirmed", {}).items()
    ]


def author_token(api: Api) -> str:
    """Return the deploy token or API key from the environment, or the token of a network on this machine.
    Such a network is started by `pilotlight up --functions`. Raises CliError."""
    token = os.environ.get(DEPLOY_TOKEN_ENV, "") or os.environ.get(API_KEY_ENV, "") or local_token(api.url)
    if not token:
        raise CliError(
            f"This needs a key with the scope deploy in {API_KEY_ENV}, or in {DEPLOY_TOKEN_ENV} the token that the router was started with. "
            "A network of this machine, started by `pilotlight up --functions`, needs neither."
        )
    return token
