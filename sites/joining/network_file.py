"""Add and remove [[sites]] tables in a router's file, and keep everything else in it."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from pilotlight.sites.config import ConfigError
from pilotlight.support import atomic_files

_SITE = re.compile(r"^[ \t]*\[\[[ \t]*sites[ \t]*\]\][ \t]*(#.*)?$")
_ANY_TABLE = re.compile(r"^[ \t]*\[")


def add_site(file: Path, name: str, url: str, place: dict[str, Any]) -> None:
    """Append a site to the file. Raises ConfigError."""
    text, sites = _read(file)
    if any(site.get("name") == name for site in sites):
        raise ConfigError(f"{file} has a site named {name!r} already: choose another name")
    entry = {"name": name, "url": url, "place": place}
    shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in place.items())
    table = f"[[sites]]\nname = {json.dumps(name)}\nurl = {json.dumps(url)}\nplace = {{ {shown} }}\n"
    after = text + ("" if not text or text.endswith("\n") else "\n") + "\n" + table
    _write(file, after, [*sites, entry])


def remove_site(file: Path, name: str) -> None:
    """Remove a site's table. Raises ConfigError."""
    text, sites = _read(file)
    number = next((i for i, site in enumerate(sites) if site.get("name") == name), None)
    if number is None:
        known = ", ".join(str(site.get("name")) for site in sites) or "none"
        raise ConfigError(f"{file} has no site named {name!r}; it has {known}")
    lines = text.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if _SITE.match(line.rstrip("\r\n"))]
    if number >= len(starts):
        raise ConfigError(f"{file} does not write {name} as a [[sites]] table: remove it by hand")
    start = starts[number]
    end = next((i for i in range(start + 1, len(lines)) if _ANY_TABLE.match(lines[i])), len(lines))
    _write(file, "".join([*lines[:start], *lines[end:]]), [*sites[:number], *sites[number + 1 :]])


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
        mode = file.stat().st_mode & 0o777
        atomic_files.write(file.resolve(), text.encode())
        file.chmod(mode)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be changed: {error}") from None
