"""The models that a site could serve, with a plan of each on its devices.

They are the embedded models, installed packages, the files of the site's directories, earlier downloads, and short names of the hub. Only
descriptions are read, not weights; results are cached until a file changes.
"""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.gpu_state import read_states
from pilotlight.engine.gguf import SUFFIX
from pilotlight.engine.gguf.directory import license_of
from pilotlight.engine.planning.devices import GIB, DeviceSet, cpu
from pilotlight.engine.planning.model_plan import read_model
from pilotlight.engine.planning.planner import SplitPlan, Workload, make_plan
from pilotlight.runtime.fetching.short_names import EMBEDDED, ON_HUB, PACKAGED, PREFIX
from pilotlight.runtime.hosts.devices import is_surely_cpu, this_machine
from pilotlight.runtime.hosts.memory import available_bytes
from pilotlight.runtime.models.sources import SourceError, is_url, local_directory, name_of
from pilotlight.sites.site import SiteConfig
from pilotlight.wire.hop.management import CatalogueModel, DeviceReading, Fit, ModelKind

MAX_MODELS = 500
MAX_README = 64 << 10
_CPU_KV_GIB = 0.25  # the default of engine hosts on CPUs if the site's file sets no size
_LICENSE = re.compile(r"^(?:license:[ \t]*|\|[ \t]*licen[cs]e[ \t]*\|[ \t]*)[\"']?([^\"'\n|,]{1,60})", re.MULTILINE)


def device_readings() -> tuple[DeviceReading, ...]:
    """Return the state of the machine's GPUs, else of its memory."""
    gpus = tuple(
        DeviceReading(
            f"cuda:{number}", int(state.get("memory_used_bytes", 0)), int(state.get("memory_total_bytes", 0)),
            state.get("power_watts", 0.0), state.get("temperature_celsius", 0.0),
        )
        for number, state in enumerate(read_states())
    )  # fmt: skip
    total = cpu().memory_bytes
    return gpus or (DeviceReading("cpu", max(0, total - (available_bytes() or total)), total),)


class _Description(NamedTuple):
    file_bytes: int
    context_length: int
    architecture: str
    license: str
    fit: Fit


class LocalCatalogue:
    def __init__(self, site: SiteConfig) -> None:
        self._engine = site.engine
        self._folders = tuple(Path(each).expanduser() for each in site.catalogue.directories)
        self._read: dict[tuple[str, int, int], _Description] = {}
        self._reading = threading.Lock()

    def models(self, served: Mapping[str, str], downloaded: Sequence[str]) -> tuple[CatalogueModel, ...]:
        """List the models. Takes seconds for new files, so call it in a thread.
        `served` maps the names of the models that the site serves to their sources; `downloaded` are URLs."""
        sources = dict.fromkeys((*self._sources(), *downloaded, *served.values()))
        return tuple(self._model(source, served) for source in [*sources][:MAX_MODELS])

    def describe(self, source: str) -> Fit | None:
        """Return the plan of a source, or None if its files are not on this machine.
        Raises SourceError if the source names no model."""
        directory = local_directory(source)
        return None if directory is None else self._description(source, directory).fit

    def _sources(self) -> Iterator[str]:
        yield from (f"{PREFIX}{path.parent.name}" for path in sorted(EMBEDDED.glob("*/config.json")))
        yield from PACKAGED
        for folder in self._folders:
            if (folder / "config.json").is_file():
                yield str(folder)
            yield from (str(path.parent) for path in sorted(folder.glob("*/config.json")))
            yield from (str(path) for path in sorted(folder.glob(f"**/*{SUFFIX}")))
        yield from ON_HUB

    def _model(self, source: str, served: Mapping[str, str]) -> CatalogueModel:
        names = tuple(name for name, of in served.items() if of == source)
        model = CatalogueModel(source, name_of(source), _kind(source), is_here=False, served_as=names)
        try:
            directory = local_directory(source)
        except SourceError as error:
            return replace(model, how=str(error))
        if directory is None:
            return replace(model, how="it has to be downloaded first")
        return replace(model, is_here=True, **self._description(source, directory)._asdict())

    def _description(self, source: str, directory: Path) -> _Description:
        config = directory / "config.json"
        try:
            state = config.stat()
        except OSError as error:
            return _Description(0, 0, "", "", Fit(False, f"its config.json cannot be read: {error.strerror}"))
        key = (str(directory), state.st_size, state.st_mtime_ns)
        with self._reading:
            if (known := self._read.get(key)) is None:
                known = self._read[key] = self._read_description(source, directory)
        return known

    def _read_description(self, source: str, directory: Path) -> _Description:
        num_bytes = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
        license = _license(directory)
        try:
            devices = self._devices()
            model = read_model(directory, on_cpu=devices.device.is_cpu)
            workload = Workload.of(model, batch=self._engine.max_num_seqs)
            split = make_plan(model, devices, workload).best
        except (CheckpointError, OSError) as error:
            return _Description(num_bytes, 0, "", license, Fit(False, str(error)))
        context_length = model.config.context_length
        return _Description(
            num_bytes, context_length, model.architecture, license, self._fit(split, devices, model.dtype)
        )

    def _fit(self, split: SplitPlan, devices: DeviceSet, dtype: str) -> Fit:
        weights = sum(rank.weights_bytes for rank in split.ranks)
        if not split.fits:
            reason = f"it does not fit: {split.missing_bytes / GIB:.1f} GiB are missing"
            return Fit(False, reason, str(devices), dtype, weights)
        speed = split.speed
        assert speed is not None, "a plan that fits has a predicted speed"
        return Fit(
            True, "it fits", str(devices), dtype, weights, self._kv_tokens(split, is_cpu=devices.device.is_cpu),
            speed.tokens_per_s, speed.batch, 1e3 * speed.ttft_s, split.workload.prompt_tokens,
        )  # fmt: skip

    def _kv_tokens(self, split: SplitPlan, *, is_cpu: bool) -> int:
        """Return the number of tokens in the site's KV cache, or in the memory that the plan leaves."""
        layout, kv_gib = split.ranks[0].layout, self._engine.kv_gib
        if layout is None or (kv_gib is None and not is_cpu):
            return split.kv_tokens
        kv_bytes = round((_CPU_KV_GIB if kv_gib is None else kv_gib) * GIB)
        return kv_bytes // layout.block_bytes * layout.block_size

    def _devices(self) -> DeviceSet:
        """Return the devices of one engine host. Raises CheckpointError for a GPU of unknown speed."""
        group = self._engine.device_groups[0]
        return DeviceSet(len(group), cpu()) if is_surely_cpu(group[0]) else this_machine()._replace(number=len(group))


def _kind(source: str) -> ModelKind:
    if source.startswith(PREFIX):
        return "embedded"
    if source in PACKAGED:
        return "package"
    if is_url(source):
        return "packed"
    if source.endswith(SUFFIX):
        return "gguf"
    return "directory" if Path(source).expanduser().is_dir() else "hub"


def _license(directory: Path) -> str:
    """Return the license in a GGUF file's metadata, or at the top of a checkpoint's README.md."""
    if (stated := license_of(directory)) is not None:
        return stated[:60]
    try:
        with (directory / "README.md").open(encoding="utf-8", errors="replace") as opened:
            found = _LICENSE.search(opened.read(MAX_README))
    except OSError:
        return ""
    return found[1].strip() if found else ""
