"""Directories for the state of bindings: a manifest's name becomes one directory name, never a path."""

import hashlib
import re
from pathlib import Path

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def directory_of(state_dir: Path, kind: str, id: object) -> Path:
    """Return `<state>/bindings/<kind>/<id>`.
    An id that is not a plain name is replaced by its hash, so that no two ids share a directory."""
    return state_dir / "bindings" / kind / name_of(str(id))


def name_of(id: str) -> str:
    if _PLAIN.fullmatch(id):
        return id
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", id).strip("-")[:40]
    return f"{readable}.{hashlib.sha256(id.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
