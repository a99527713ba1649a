"""The output of `pilotlight keys`: the key on standard output, all other text on standard error."""

import json
import sys
from pathlib import Path

from rich.table import Table

from pilotlight.runtime.cli.tables import print_table
from pilotlight.sites.key_files import NewKey, add_key, keys_of, revoke_key, rotate_key

_WHEN = "servers that use the file apply the change at their next start, or at SIGHUP"


def create(new: NewKey, file: Path | None) -> None:
    """Make a key and print it. Raises ConfigError."""
    key, table = add_key(new, file)
    if file is not None:
        print(f"{file} knows {new.name}; {_WHEN}. The key is shown only now:", file=sys.stderr)
    else:
        print(f"Add this to a router's or site's file:\n\n{table}\nThe key is shown only now:", file=sys.stderr)
    print(key)


def rotate(file: Path, name: str, grace_h: float) -> None:
    """Print a new key that replaces another, which stays valid for a while. Raises ConfigError."""
    key = rotate_key(file, name, grace_h)
    print(f"{file} knows {name} with a new key; the previous one is valid for {grace_h:g} h; {_WHEN}.", file=sys.stderr)
    print("The key is shown only now:", file=sys.stderr)
    print(key)


def revoke(file: Path, name: str) -> None:
    """Revoke a key. Raises ConfigError."""
    revoke_key(file, name)
    print(f"{name} is revoked in {file}; {_WHEN}.", file=sys.stderr)


def list_keys(file: Path, as_json: bool) -> None:
    """Print a file's keys: account, scopes and expiry."""
    found = keys_of(file)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table("name", "account", "scopes", "state", box=None, header_style="bold")
    for each in found:
        table.add_row(each["name"], each["account"], ", ".join(each["scopes"]), each["state"])
    print_table(table)
