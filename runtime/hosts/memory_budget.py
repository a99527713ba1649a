"""Check a site file's host memory against the machine's, and open the tier of weights.

Host memory has KV blocks and sleeping weights. If it is too much, the site does not start and shows the sums: otherwise the kernel would kill an
engine host with its requests. Files of the site's previous run count as available. Independent of the files' contents.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pilotlight.engine.planning.model_plan import planned_weights_bytes
from pilotlight.engine.planning.parallelism import Parallelism
from pilotlight.runtime.hosts.memory import GIB, available_bytes, gib
from pilotlight.runtime.hosts.tier_directory import TierDirectory, kv_places
from pilotlight.runtime.models.sources import SourceError, local_directory
from pilotlight.runtime.models.weights_tier import WeightsTier
from pilotlight.sites.config import ConfigError
from pilotlight.sites.site import EngineConfig, ModelConfig, SiteConfig

# Share of the free memory for weights if the site's file sets no size; the rest is for the KV cache, the engine and other processes.
SHARE = 0.5


class AvailableMemory(NamedTuple):
    """The available memory for the tiers, in bytes."""

    memory: int  # available without swapping
    place: int  # free bytes in the file system of the tiers
    held: int  # size of the files of the site's previous run; `memory` and `place` count them as used

    @classmethod
    def at(cls, places: Sequence[TierDirectory]) -> "AvailableMemory":
        """Measure the memory for all the site's tier directories, which share one file system."""
        free = shutil.disk_usage(places[0].root).free
        available = available_bytes()
        return cls(free if available is None else available, free, sum(_taken(place.directory) for place in places))

    @property
    def most(self) -> int:
        return min(self.memory, self.place) + self.held

    def __str__(self) -> str:
        said = f"{gib(self.memory)} of memory are available and {gib(self.place)} of shared memory are free"
        return said + (f", besides {gib(self.held)} in files of its previous run" if self.held else "")


def open_tier(
    site: SiteConfig,
    place: TierDirectory | None = None,
    supply_at: Callable[[Sequence[TierDirectory]], AvailableMemory] = AvailableMemory.at,
) -> WeightsTier | None:
    """Return the site's tier; None if its file sets none, or no directory can be used.

    Raises ConfigError if the site's file assigns more host memory than the machine has, or needs a tier whose directory cannot be used."""
    place = place or TierDirectory(site.name, kind="weights")
    supply = supply_at([place, *kv_places(site.name, len(site.engine.all_devices))])
    _check_memory_budget(site, supply)
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
        limit = _weights_limit(site, supply)
    except ConfigError:
        place.remove()
        raise
    tier = WeightsTier(place, directory, limit)
    tier.adopt(model.name for model in site.models if model.residency != "disk")
    return tier


def _check_memory_budget(site: SiteConfig, supply: AvailableMemory) -> None:
    """Check the memory that the site's file assigns to tiers.

    Raises ConfigError if the tiers of KV blocks on all devices and of weights need more than is available."""
    promised = []
    if kv := _kv_bytes(site.engine):
        devices = len(site.engine.all_devices)
        times = f"{devices} devices x " if devices > 1 else ""
        promised.append((kv, f"{times}{site.engine.kv_host_gib:g} GiB for KV blocks (engine.kv_host_gib)"))
    if weights_gib := site.engine.weights_host_gib:
        weights = round(weights_gib * GIB)
        promised.append((weights, f"{weights_gib:g} GiB for sleeping weights (engine.weights_host_gib)"))
    total = sum(size for size, _ in promised)
    if total > supply.most:
        sums = f" = {gib(total)}" if len(promised) > 1 else ""
        listed = " + ".join(said for _, said in promised)
        raise ConfigError(f"site {site.name!r} promises {listed}{sums}, and {supply}: promise less")


def _weights_limit(site: SiteConfig, supply: AvailableMemory) -> int:
    """Return the size limit of the tier of weights in bytes.

    Raises ConfigError if it is too small for the models that must sleep in host memory."""
    promised_gib = site.engine.weights_host_gib
    if promised_gib is None:
        left = max(0, supply.most - _kv_bytes(site.engine))
        limit, what = int(SHARE * left), f"{SHARE:.0%} of the memory that is not assigned ({supply})"
    else:
        limit, what = round(promised_gib * GIB), f"engine.weights_host_gib = {promised_gib:g}"
    needs = {model.name: _needed(model, site) for model in site.models if model.residency == "host"}
    if sum(needs.values()) > limit:
        listed = " + ".join(f"{name} {gib(size)}" for name, size in needs.items())
        raise ConfigError(
            f"site {site.name!r}: models with residency host need {listed} = {gib(sum(needs.values()))}, and the tier has {gib(limit)}, "
            f"{what}; raise weights_host_gib, or set the residency of some to auto or disk"
        )
    return limit


def model_bytes(site: SiteConfig, ranks: int) -> tuple[int, ...]:
    """Return each model's planned weights in bytes per rank of a GPU; 0 if it is not downloaded yet."""
    return tuple(_needed(model, site, ranks) for model in site.models)


def _needed(model: ModelConfig, site: SiteConfig, ranks: int = 1) -> int:
    """Return the size of a model's weights in bytes.

    It is 0 if its files are not downloaded yet; they count later."""
    try:
        directory = local_directory(model.source)
    except SourceError:
        return 0
    on_cpu = not site.engine.all_devices[0].startswith("cuda")
    if directory is None:
        return 0
    engine = site.engine
    degrees = Parallelism.of_group(
        ranks, engine.stages, engine.expert_parallel, engine.redundant_experts, engine.data_parallel
    )
    return planned_weights_bytes(directory, model.dtype, on_cpu=on_cpu, degrees=degrees)


def _kv_bytes(engine: EngineConfig) -> int:
    return len(engine.all_devices) * round(engine.kv_host_gib * GIB)


def _taken(directory: Path) -> int:
    """Return the memory that a directory's files occupy in bytes, which may be less than their sizes."""
    taken = 0
    for path in directory.glob("*"):
        try:
            taken += 512 * path.stat().st_blocks
        except OSError:
            continue  # the file was removed meanwhile
    return taken
