"""What `pilotlight keys` prints: to standard output the key alone, everything else to standard error."""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pilotlight.sites.key_files import NewKey, add_key, keys_of, revoke_key, rotate_key

_WHEN = "what serves by it takes that over at its next start, or at SIGHUP"


def create(new: NewKey, file: Path | None) -> None:
    """Make a key and print it. Raises ConfigError."""
    key, table = add_key(new, file)
    if file is not None:
        print(f"{file} knows {new.name}; {_WHEN}. The key is shown only now:", file=sys.stderr)
    else:
        print(f"Add this to the file that is to know it:\n\n{table}\nThe key is shown only now:", file=sys.stderr)
    print(key)


def rotate(file: Path, name: str, grace_h: float) -> None:
    """Print a new key in the place of another. Raises ConfigError."""
    key = rotate_key(file, name, grace_h)
    print(f"{file} knows {name} by a new key, and by the one before for {grace_h:g} h; {_WHEN}.", file=sys.stderr)
    print("The key is shown only now:", file=sys.stderr)
    print(key)


def revoke(file: Path, name: str) -> None:
    """Refuse a key from now on. Raises ConfigError."""
    revoke_key(file, name)
    print(f"{name} is refused by {file}; {_WHEN}.", file=sys.stderr)


def list_keys(file: Path, as_json: bool) -> None:
    """Print a file's keys: whose they are, what they open, and until when."""
    found = keys_of(file)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table("name", "account", "scopes", "state", box=None, header_style="bold")
    for each in found:
        table.add_row(each["name"], each["account"], ", ".join(each["scopes"]), each["state"])
    Console().print(table)
