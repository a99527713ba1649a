"""The site's weights in host memory: one file per model in a directory that outlives every engine host.

An engine host writes a model's file, or maps the one that is there; this side decides which models may have one, and deletes files. Memory of a
deleted file is free when the last host that has it mapped is done with it: only sleeping models' files are worth deleting. What a killed runtime
left is adopted by the site's next life. Refuses to know what is in the files.
"""

import hashlib
import logging
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from runtime.engines.memory import available_bytes, gib
from runtime.engines.sizes import estimated_bytes
from runtime.engines.sources import SourceError, local_directory
from runtime.engines.tier_place import TierPlace
from sites.config import ConfigError, ModelConfig, SiteConfig

log = logging.getLogger("pilotlight.models")

# Of the memory that is available at start, where the site file names no size: the rest is the KV cache's, the engine's and everybody else's.
SHARE = 0.5
_ENDING = ".weights"
_UNFINISHED = ".partial"  # behind the file's name, where an engine host is writing it (engine/weights/bundle_file.py)


class WeightsTier:
    def __init__(self, place: TierPlace, directory: Path, limit_bytes: int) -> None:
        self._place = place
        self._directory = directory
        self.limit_bytes = limit_bytes

    def file_of(self, model: str) -> Path:
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[-40:].strip(".-")
        return self._directory / f"{readable}-{hashlib.sha256(model.encode()).hexdigest()[:12]}{_ENDING}"

    def bytes_of(self, model: str) -> int:
        """0: there is none."""
        return _size(self.file_of(model))

    def held_for(self, model: str) -> int:
        """What it takes of the tier: its file, or one that an engine host is still writing, which has its full size from the beginning."""
        return max([self.bytes_of(model), *(_size(path) for path in self._unfinished(model))])

    def remove(self, model: str) -> None:
        """An engine host that was still writing it notices, and stops."""
        for path in (self.file_of(model), *self._unfinished(model)):
            path.unlink(missing_ok=True)

    def _unfinished(self, model: str) -> list[Path]:
        return list(self._directory.glob(f"{self.file_of(model).name}.*{_UNFINISHED}"))

    def adopt(self, models: Iterable[str]) -> None:
        """Keeps the files of these models, which the engine checks before it uses them; whatever else a former life left goes."""
        known = {self.file_of(model) for model in models}
        for path in self._directory.iterdir():
            if path in known:
                log.info("adopted %s, %s", path.name, gib(path.stat().st_size))
            elif path.suffix != ".lock":
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """After the last engine host."""
        self._place.remove()


@dataclass(frozen=True, slots=True)
class Supply:
    """What there is to be had where the tier would lie."""

    memory: int  # that could be taken without swapping
    place: int  # free in the file system in memory
    held: int  # by files of the site's former life: they count as used in both

    @classmethod
    def at(cls, place: TierPlace) -> "Supply":
        held = 0
        if place.directory.is_dir():
            held = sum(path.stat().st_size for path in place.directory.iterdir() if path.suffix == _ENDING)
        free = shutil.disk_usage(place.root).free
        available = available_bytes()
        return cls(free if available is None else available, free, held)

    @property
    def most(self) -> int:
        return min(self.memory, self.place) + self.held


def open_tier(
    site: SiteConfig, place: TierPlace | None = None, supply_at: Callable[[TierPlace], Supply] = Supply.at
) -> WeightsTier | None:
    """The site's tier, or None where it has none. Raises ConfigError when the site file promises more than there is."""
    promised_gib = site.engine.weights_host_gib
    must = [model for model in site.models if model.residency == "host"]
    if promised_gib == 0:
        return None
    place = place or TierPlace(site.name, kind="weights")
    if promised_gib is None and not must and not place.is_memory:
        return None
    directory = place.claim()
    place.remove_dead_later()
    if directory is None:
        if promised_gib is None and not must:
            return None  # the log has said why
        raise ConfigError(
            f"site {site.name!r} cannot keep weights at {place.directory}: {place.why_not}; give it another name, or end the other"
        )
    try:
        limit = _limit(site, must, supply_at(place))
    except ConfigError:
        place.remove()
        raise
    tier = WeightsTier(place, directory, limit)
    tier.adopt(model.name for model in site.models if model.residency != "disk")
    return tier


def _limit(site: SiteConfig, must: list[ModelConfig], supply: Supply) -> int:
    promised_gib = site.engine.weights_host_gib
    had = f"{gib(supply.memory)} of memory are available and {gib(supply.place)} of shared memory are free"
    had += f", besides {gib(supply.held)} of its former life" if supply.held else ""
    if promised_gib is None:
        limit, what = int(SHARE * supply.most), f"{SHARE:.0%} of what there is ({had})"
    else:
        limit, what = round(promised_gib * 2**30), f"engine.weights_host_gib = {promised_gib:g}"
        if limit > supply.most:
            raise ConfigError(
                f"site {site.name!r} promises {promised_gib:g} GiB for sleeping weights (engine.weights_host_gib), and {had}: promise less"
            )
    needs = {model.name: _needed(model, site) for model in must}
    if sum(needs.values()) > limit:
        listed = " + ".join(f"{name} {gib(size)}" for name, size in needs.items())
        raise ConfigError(
            f"site {site.name!r}: models with residency host need {listed} = {gib(sum(needs.values()))}, and the tier has {gib(limit)}, "
            f"{what}; raise weights_host_gib, or let some be auto or disk"
        )
    return limit


def _size(path: Path) -> int:
    """0: it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _needed(model: ModelConfig, site: SiteConfig) -> int:
    """Of files that are here. What is still to be downloaded is not known, and counts when it comes."""
    try:
        directory = local_directory(model.source)
    except SourceError:
        return 0
    on_cpu = not site.engine.all_devices[0].startswith("cuda")
    return estimated_bytes(directory, model.dtype, on_cpu=on_cpu) if directory is not None else 0
