"""The deploy token of a network that `pilotlight up --functions` runs.

It is stored for this user under the router's port, and is sent only to this machine.
"""

import secrets
from pathlib import Path
from urllib.parse import urlsplit

from pilotlight.sites.config import state_directory
from pilotlight.sites.rules import is_loopback
from pilotlight.support import atomic_files


def make_local_token(port: int) -> str:
    """Return the token for the router at a port; it stays the same after a restart. Raises OSError."""
    if token := _read(port):
        return token
    token = secrets.token_hex(32)
    atomic_files.write(_file(port), token.encode())
    return token


def local_token(url: str) -> str:
    """Return the token for a router's URL.
    It is empty if none is stored, or the router is on another machine."""
    parts = urlsplit(url)
    if not is_loopback(parts.hostname or "") or parts.port is None:
        return ""
    return _read(parts.port)


def _read(port: int) -> str:
    try:
        return _file(port).read_text()
    except OSError:
        return ""


def _file(port: int) -> Path:
    return state_directory("deploy-tokens") / str(port)
