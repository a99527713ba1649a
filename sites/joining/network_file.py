"""Add and remove [[sites]] tables in a router's file, and keep everything else in it."""

import tomllib
from pathlib import Path
from typing import Any

from pilotlight.sites import toml_text
from pilotlight.sites.config import ConfigError


def add_site(file: Path, name: str, url: str, place: dict[str, Any]) -> None:
    """Append a site to the file. Raises ConfigError."""
    text, sites = _read(file)
    if any(site.get("name") == name for site in sites):
        raise ConfigError(f"{file} has a site named {name!r} already: choose another name")
    entry = {"name": name, "url": url, "place": place}
    shown = ", ".join(f"{key} = {toml_text.literal(value)}" for key, value in place.items())
    named = f"name = {toml_text.literal(name)}\nurl = {toml_text.literal(url)}"
    table = f"[[sites]]\n{named}\nplace = {{ {shown} }}\n"
    _write(file, toml_text.with_table(text, table), [*sites, entry])


def remove_site(file: Path, name: str) -> None:
    """Remove a site's table. Raises ConfigError."""
    text, sites = _read(file)
    number = next((i for i, site in enumerate(sites) if site.get("name") == name), None)
    if number is None:
        known = ", ".join(str(site.get("name")) for site in sites) or "none"
        raise ConfigError(f"{file} has no site named {name!r}; it has {known}")
    if (found := toml_text.split_at_table(text, "sites", number)) is None:
        raise ConfigError(f"{file} does not write {name} as a [[sites]] table: remove it by hand")
    before, _, after = found
    _write(file, "".join([*before, *after]), [*sites[:number], *sites[number + 1 :]])


def _read(file: Path) -> tuple[str, list[dict[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8")
        sites = tomllib.loads(text).get("sites", [])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be changed: {error}") from None
    return text, sites


def _write(file: Path, text: str, sites: list[dict[str, Any]]) -> None:
    try:
        if tomllib.loads(text).get("sites", []) != sites:
            raise ConfigError(f"{file} does not write its sites as [[sites]] tables: change it by hand")
        toml_text.write(file, text)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be changed: {error}") from None
