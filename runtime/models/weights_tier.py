"""The site's weights in host memory: one file per model, in a directory that outlives engine hosts.

An engine host writes a model's file, or maps the existing one. This module decides which models may have a file, and deletes files. The memory of a
deleted file is free when the last host unmaps it, so only sleeping models' files are worth deleting. A new runtime adopts the files of a killed one.
Independent of the files' contents.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pilotlight.runtime.hosts.memory import gib
from pilotlight.runtime.hosts.memory_budget import AvailableMemory, check_memory_budget, weights_limit
from pilotlight.runtime.hosts.tier_directory import TierDirectory, kv_places
from pilotlight.sites.config import ConfigError
from pilotlight.sites.site import SiteConfig

log = logging.getLogger("pilotlight.models")

_ENDING = ".weights"
_UNFINISHED = ".partial"  # suffix of a file that an engine host is writing (engine/weights/bundles/bundle_file.py)


class WeightsTier:
    def __init__(self, place: TierDirectory, directory: Path, limit_bytes: int) -> None:
        self._place = place
        self._directory = directory
        self.limit_bytes = limit_bytes

    def file_of(self, model: str) -> Path:
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[-40:].strip(".-")
        return self._directory / f"{readable}-{hashlib.sha256(model.encode()).hexdigest()[:12]}{_ENDING}"

    def bytes_of(self, model: str) -> int:
        """Return the size of the model's file; 0 if there is none."""
        return _size(self.file_of(model))

    def held_for(self, model: str) -> int:
        """Return the size of the model's file; a file that is being written counts with its final size."""
        return max([self.bytes_of(model), *(_size(path) for path in self._unfinished(model))])

    def remove(self, model: str) -> None:
        """Remove the model's file. An engine host that is still writing it notices this and stops."""
        for path in (self.file_of(model), *self._unfinished(model)):
            path.unlink(missing_ok=True)

    def _unfinished(self, model: str) -> list[Path]:
        return list(self._directory.glob(f"{self.file_of(model).name}.*{_UNFINISHED}"))

    def adopt(self, models: Iterable[str]) -> None:
        """Keep the files of these models and delete all others. The engine checks a file before use."""
        known = {self.file_of(model) for model in models}
        for path in self._directory.iterdir():
            if path in known:
                log.info("adopted %s, %s", path.name, gib(path.stat().st_size))
            elif path.suffix != ".lock":
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory, after the last engine host has ended."""
        self._place.remove()


def open_tier(
    site: SiteConfig,
    place: TierDirectory | None = None,
    supply_at: Callable[[Sequence[TierDirectory]], AvailableMemory] = AvailableMemory.at,
) -> WeightsTier | None:
    """Return the site's tier; None if its file sets none, or no directory can be used.

    Raises ConfigError if the site's file assigns more host memory than the machine has, or needs a tier whose directory cannot be used."""
    place = place or TierDirectory(site.name, kind="weights")
    supply = supply_at([place, *kv_places(site.name, len(site.engine.all_devices))])
    check_memory_budget(site, supply)
    promised_gib = site.engine.weights_host_gib
    must = any(model.residency == "host" for model in site.models)
    if promised_gib == 0 or (promised_gib is None and not must and not place.is_memory):
        return None
    directory = place.claim()
    place.remove_dead_later()
    if directory is None:
        if promised_gib is None and not must:
            return None  # the claim has logged the reason
        raise ConfigError(
            f"site {site.name!r} cannot keep weights at {place.directory}: {place.why_not}: choose another name, or stop the other process"
        )
    try:
        limit = weights_limit(site, supply)
    except ConfigError:
        place.remove()
        raise
    tier = WeightsTier(place, directory, limit)
    tier.adopt(model.name for model in site.models if model.residency != "disk")
    return tier


def _size(path: Path) -> int:
    """Return a file's size in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
