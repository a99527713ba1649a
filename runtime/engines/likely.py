"""What a site's file says of its first engine host's work, before the site's own reader (sites/config.py) has been imported and judges the file.

Standard library alone. A file that is wrong says nothing here.
"""

import tomllib
from pathlib import Path
from typing import Any

_EMBEDDED = "embedded:"


def likely_work(site_file: Path) -> dict[str, object]:
    """As engine/early.py wants it."""
    try:
        site = tomllib.loads(site_file.read_text())
        engine, models = site.get("engine", {}), site.get("models", [])
        work: dict[str, object] = {"threads": _threads(engine), "device": engine.get("device", "auto")}
        first = _first(models)
        if first is not None and "devices" not in engine and (directory := _directory(first["source"])) is not None:
            work |= {"model": directory, "dtype": first.get("dtype", "auto")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return work


def _threads(engine: dict[str, Any]) -> int | None:
    found = engine.get("threads")
    return found if type(found) is int and found > 0 else None


def _first(models: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The model that is loaded at start; of those that wait for a request the only one, since looking at its weights costs nobody else anything."""
    at_once = [model for model in models if model.get("residency", "device") in ("device", "host")]
    return next(iter(at_once or (models if len(models) == 1 else [])), None)


def _directory(source: str) -> str | None:
    """As the site's own reader finds it (sources.py). None for what lies elsewhere."""
    name = source.removeprefix(_EMBEDDED)
    path = Path(__file__).parents[2] / "engine" / "embedded" / name if name != source else Path(source).expanduser()
    return str(path) if path.is_dir() else None
