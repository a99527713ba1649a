"""One load of a model's weights: into shared memory, maps of the checkpoint, or private memory.

Later loads reuse shared memory. This module knows the order of preference, and the fallbacks if a bundle cannot be used. This module is independent
of KV caches and model families, because its caller lays the model out.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import Lossless
from pilotlight.engine.core.phases import Phases
from pilotlight.engine.weights.bundles.bundle import Bundle, BundleIdentity, TensorSpec, WeightBundleError, lay_out
from pilotlight.engine.weights.bundles.bundle_file import BundleFile, new_bundle
from pilotlight.engine.weights.bundles.bundle_maps import MAPS
from pilotlight.engine.weights.bundles.lossless import CodedTensors, Matrix, plain_bytes
from pilotlight.engine.weights.checkpoint import Checkpoint, is_local, weight_files
from pilotlight.engine.weights.filling import ReadingProgress, fill
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.relocation import Coding, PendingRelocation
from pilotlight.engine.weights.shard import WHOLE, Shard
from pilotlight.engine.weights.source import WeightSource
from pilotlight.engine.weights.storage import (
    META,
    Allocate,
    BundleMemory,
    BundleStorage,
    CheckpointStorage,
    Job,
    LayoutPlan,
    MappedTensors,
    WeightStorage,
    on_device,
)
from pilotlight.engine.weights.stored_tensor import StoredTensor
from pilotlight.engine.weights.weight_limits import USUAL_LIMITS, WeightLimits
from pilotlight.kernels.cpu import pages
from pilotlight.kernels.dispatch import takes_triton
from pilotlight.kernels.matrices.lossless_speed import speed_here

log = logging.getLogger(__name__)

_PRIVATE = BundleIdentity("", "", "", "")  # identity of layouts in private memory, which no other process sees

ModelT = TypeVar("ModelT", covariant=True)


class LayOut(Protocol[ModelT]):
    def __call__(self, loader: WeightLoader) -> ModelT:
        """Lay the model out in the loader's storage; every call makes the same requests in the same order."""


@dataclass(frozen=True, slots=True)
class FilledModel(Generic[ModelT]):
    """A model with its weights."""

    model: ModelT
    is_mapped: bool  # whether the weights come from an existing bundle
    memory: torch.Tensor | None  # on a CPU, the memory of the weights; None if `pending` will move them
    pending: PendingRelocation[ModelT] | None = None  # how to move the weights to other memory, if they should not stay
    is_proved: bool = False  # whether an earlier load has computed with these bytes
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # all tensors, by name
    in_files: tuple[torch.Tensor, ...] = ()  # tensors that are maps of a file, whose pages outlive this process
    saved_bytes: int = 0  # bytes saved by matrices in 12 bits


class WeightLoad(Generic[ModelT]):
    """The load of a model in one type on one device."""

    def __init__(
        self,
        source: WeightSource,
        lay_out_model: LayOut[ModelT],
        dtype: torch.dtype,
        device: torch.device,
        phases: Phases,
        on_progress: ReadingProgress | None = None,
        shard: Shard = WHOLE,
        lossless: Lossless = "off",
        limits: WeightLimits = USUAL_LIMITS,
    ) -> None:
        """Prepare a load. `lossless`: whether to keep matrices in 12 bits if possible."""
        self._source = source
        self._shard = shard
        self._matrices: Mapping[str, Matrix] = {}
        # A packed bundle with plain tensors is mapped as it is.
        is_mapped = source.packed is not None and not source.packed.bundle.coded
        # On a GPU matrices in 12 bits are only used on request, because products of many rows have not been measured; they come from a shared bundle.
        has_products = device.type == "cpu" or (
            lossless == "always" and source.shared_path is not None and takes_triton()
        )
        can_be_coded = has_products and dtype == torch.bfloat16 and source.format is None and not is_mapped
        self._lossless: Lossless = lossless if can_be_coded else "off"
        if lossless == "always" and not can_be_coded:
            log.info(
                "lossless = always has no effect on %s: it needs plain bf16 weights, and on a GPU shared memory for weights",
                source.directory,
            )
        self._lay_out_model = lay_out_model
        self._dtype = dtype
        self._device = device
        self._phases = phases
        self._report = on_progress or (lambda done, total: None)
        self._limits = limits
        self._planned: LayoutPlan | None = None

    def run(self) -> FilledModel[ModelT]:
        """Lay the model out and fill it. Raises CheckpointError."""
        source = self._source
        if source.lies_as_stored(self._device):  # the mapped file itself outlives this process
            return self._load_in_place(None) or self._load_own(source.checkpoint)
        if source.shared_path is not None:
            try:
                if source.stays_packed(self._device):
                    return self._load_copied(source.shared_path)
                return self._load_shared(source.shared_path)
            except (WeightBundleError, OSError) as error:
                log.warning(
                    "the weights of %s are loaded into private memory, and the next engine host must read them again: %s: %s",
                    source.directory, source.shared_path, error,
                )  # fmt: skip
        if source.packed is None:
            return self._load_in_place(None) or self._load_own(source.checkpoint)
        try:
            if source.packed.bundle.coded:
                return self._load_chunks(source.packed, None)
            # On a CPU this maps the page cache: 0.1 s instead of 0.5 s per GiB, with decode steps that are at most 3 % slower.
            return self._load_bundle(source.packed)
        except WeightBundleError as error:
            raise CheckpointError(f"{source.directory}: {error}; pack the model again") from error

    # Loads from a bundle in shared memory, which outlives this process

    def _load_shared(self, path: Path) -> FilledModel[ModelT]:
        source, identity = self._source, self._source.identity(self._dtype, bool(self._codes()))
        MAPS.drop_removed_maps()  # free memory, because a new bundle may need it
        if (shared := source.shared(identity)) is not None:
            try:
                return replace(self._load_bundle(shared), is_proved=True)
            except WeightBundleError as error:
                source.refuse_shared(str(error))
        if source.packed is None and (in_place := self._load_in_place(path)) is not None:
            return in_place
        if (
            source.packed is not None
            and self._device.type == "cpu"
            and source.packed.bundle.coded
            and self._codes() is not False
        ):
            return self._load_chunks(source.packed, path)
        if self._codes():
            self._write_coded(path)
        else:
            self._write_shared(path, source.identity(self._dtype))
        return replace(self._load_bundle(source.reopen_shared()), is_mapped=False)

    def _write_shared(self, path: Path, identity: BundleIdentity) -> None:
        source = self._source
        bundle = lay_out(identity, source.facts, self._wanted)
        with new_bundle(path, bundle) as new:
            storage = self._lay_out_stored(BundleMemory(new.memory, bundle).take, META)
            fill(storage.jobs, on_progress=self._report, write=new.write)
            source.check_unchanged()
        self._phases.end("weights")

    def _write_coded(self, path: Path) -> None:
        """Write the shared bundle with coded matrices, for a GPU or a model too small to be mapped."""
        source = self._source
        storage = self._lay_out_stored(self._private(self._wanted)[1], torch.device("cpu"))
        fill(storage.jobs, storage.tasks, self._report)
        # The GPU kernels for experts cannot read codes.
        matrices = {
            name: matrix for name, matrix in self._matrices.items() if self._device.type == "cpu" or matrix.experts == 1
        }
        coded = CodedTensors(storage.tensors, matrices, self._limits.coded_share)
        list(coded.survey())
        bundle = lay_out(source.identity(self._dtype, is_coded=True), source.facts, coded.specs)
        with new_bundle(path, bundle) as new:
            for _ in coded.write(bundle, new.write):
                pass
            source.check_unchanged()
        self._phases.end("weights")

    def _lay_out_stored(self, allocate: Allocate, device: torch.device) -> BundleStorage | CheckpointStorage:
        """Lay the model out, and return the storage with jobs that fill it from the packed file or checkpoint."""
        if (packed := self._source.packed) is not None:
            storage = BundleStorage(packed.bundle, allocate, packed.path)
            self._lay_out(storage, device)
            return storage
        own = CheckpointStorage(self._source.checkpoint, allocate)
        self._lay_out(own, device)
        self._source.checkpoint.refuse_unrequested()
        return own

    def _load_bundle(self, file: BundleFile) -> FilledModel[ModelT]:
        memory: torch.Tensor | None = None
        if self._device.type == "cpu":
            is_packed = file is self._source.packed
            memory = file.map() if is_packed else MAPS.map_cached(file)
            storage = BundleStorage(file.bundle, BundleMemory(memory, file.bundle).take)
        else:
            storage = BundleStorage(file.bundle, on_device(self._device), file.path)
        model = self._lay_out(storage)
        self._phases.end("build")
        is_shared = self._device.type == "cuda" and file is not self._source.packed
        is_copied = is_shared and MAPS.copy_registered(file, storage.tensors, self._device)
        fill([] if is_copied else storage.jobs, storage.tasks, self._report)
        self._report(file.bundle.data_bytes, file.bundle.data_bytes)
        self._phases.end("weights")
        if is_shared:
            MAPS.register(file, self._device)  # for later loads
        saved = plain_bytes(storage.tensors, self._matrices) - sum(part.nbytes for part in storage.tensors.values())
        return FilledModel(model, True, memory, tensors=storage.tensors, saved_bytes=saved)

    def _load_copied(self, path: Path) -> FilledModel[ModelT]:
        """Load packed weights whose layout depends on their content, from a copy of the checkpoint in memory.

        Later loads do not read the disk again, but rearrange the weights again.
        """
        identity = self._source.identity(None)
        shared = self._source.shared(identity)
        is_mapped = shared is not None
        if shared is None:
            self._copy(path, identity)
            shared = self._source.reopen_shared()
        copied = {
            spec.name: StoredTensor(path, spec.dtype, spec.shape, start, start + spec.num_bytes)
            for spec, start in shared.bundle.tensors
        }
        return replace(self._load_own(Checkpoint(copied)), is_mapped=is_mapped)

    def _copy(self, path: Path, identity: BundleIdentity) -> None:
        source, tensors = self._source, self._source.checkpoint.tensors
        specs = [TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        bundle = lay_out(identity, source.facts, specs)
        with new_bundle(path, bundle) as new:
            jobs = []
            for placed in bundle.tensors:
                tensor = tensors[placed.spec.name]
                as_bytes = tensor._replace(dtype="U8", shape=(tensor.end - tensor.start,))
                jobs.append(Job(placed.spec.name, (as_bytes,), new.memory[placed.start : placed.end]))
            fill(jobs, on_progress=self._report, write=new.write)
            source.check_unchanged()
        self._phases.end("weights")

    # Loads into private memory

    def _load_own(self, checkpoint: Checkpoint) -> FilledModel[ModelT]:
        memory: torch.Tensor | None = None
        allocate = on_device(self._device)
        if self._device.type == "cpu":
            memory, allocate = self._private(self._plan(checkpoint).tensors)
        storage = CheckpointStorage(checkpoint, allocate)
        model = self._lay_out(storage)
        checkpoint.refuse_unrequested()
        self._phases.end("build")
        fill(storage.jobs, storage.tasks, self._report)
        self._phases.end("weights")
        return FilledModel(model, False, memory, tensors=storage.tensors)

    def _load_chunks(self, packed: BundleFile, path: Path | None) -> FilledModel[ModelT]:
        """Load the output of `pack --lossless`, decoded.

        `path`: the bundle to which the weights move later if some are kept in 12 bits, which is decided from the plain weights.
        """
        memory: torch.Tensor | None = None
        allocate = on_device(self._device)
        if self._device.type == "cpu":
            memory, allocate = self._private(packed.bundle.specs)
        storage = BundleStorage(packed.bundle, allocate, packed.path)
        model = self._lay_out(storage)
        self._phases.end("build")
        fill(storage.jobs, storage.tasks, self._report)
        self._phases.end("weights")
        if self._codes() is False:
            return FilledModel(model, False, memory, tensors=storage.tensors)
        pending = self._pending(path, packed.bundle.specs, storage.tensors)
        return FilledModel(model, False, None, pending, tensors=storage.tensors)

    # Loads that map the checkpoint

    def _load_in_place(self, path: Path | None) -> FilledModel[ModelT] | None:
        """Map tensors stored in the model's form; return None if that is impossible or not worth it.

        Mapping needs a CPU, files on local disks, and enough bytes in the model's form. `path`: the bundle to which the weights move later; None for
        private memory.
        """
        source = self._source
        if (
            self._device.type != "cpu"
            or (source.stays_packed(self._device) and not source.lies_as_stored(self._device))
            or not all(map(is_local, weight_files(source.directory)))
        ):
            return None
        plan = self._plan(source.checkpoint)
        wanted, in_files = plan.tensors, plan.in_files
        rest = [spec for spec in wanted if spec.name not in in_files]
        num_bytes, rest_bytes = (sum(spec.num_bytes for spec in some) for some in (wanted, rest))
        limits = self._limits
        if num_bytes < limits.in_place_from_bytes or num_bytes - rest_bytes < limits.in_place_share * num_bytes:
            return None
        memory, allocate = self._private(rest)
        mapped = MappedTensors(in_files, allocate)
        storage = CheckpointStorage(source.checkpoint, mapped.take, mapped)
        model = self._lay_out(storage)
        source.checkpoint.refuse_unrequested()
        self._phases.end("build")
        fill(storage.jobs, [*mapped.tasks, *storage.tasks], self._report)
        source.check_unchanged()
        self._phases.end("map")
        if source.lies_as_stored(self._device):
            stay = tuple(tensor for tensor in storage.tensors.values() if mapped.holds(tensor))
            return FilledModel(model, False, memory, tensors=storage.tensors, in_files=stay)
        pending = self._pending(path, wanted, storage.tensors)
        return FilledModel(model, False, None, pending, tensors=storage.tensors)

    def _pending(
        self, path: Path | None, wanted: list[TensorSpec], tensors: Mapping[str, torch.Tensor]
    ) -> PendingRelocation[ModelT]:
        source = self._source
        bundle = lay_out(source.identity(self._dtype), source.facts, wanted)
        coding = None
        if self._codes() is not False:
            coding = Coding(source.identity(self._dtype, is_coded=True), dict(self._matrices), self._measured)

        def rebuild(memory: torch.Tensor, bundle: Bundle) -> ModelT:
            moved = BundleStorage(bundle, BundleMemory(memory, bundle).take)
            rebuilt = self._lay_out(moved)
            for task in moved.tasks:
                task()
            return rebuilt

        return PendingRelocation(path, bundle, tensors, source.check_unchanged, rebuild, coding)

    # Helpers of all loads

    def _codes(self) -> bool | None:
        """Return whether to keep matrices in 12 bits; None if their speed has not been measured yet."""
        return speed_here().known() if self._lossless == "auto" else self._lossless == "always"

    def _measured(self) -> bool:
        found = self._codes()
        return speed_here().measure() if found is None else found

    def _plan(self, checkpoint: Checkpoint) -> LayoutPlan:
        if self._planned is None:
            self._planned = LayoutPlan(checkpoint, self._limits.least_part_bytes)
            self._lay_out(self._planned, META)
        return self._planned

    @property
    def _wanted(self) -> list[TensorSpec]:
        packed = self._source.packed
        return self._plan(self._source.checkpoint).tensors if packed is None else packed.bundle.specs

    def _private(self, specs: list[TensorSpec]) -> tuple[torch.Tensor, Allocate]:
        bundle = lay_out(_PRIVATE, self._source.facts, specs)
        memory = pages.small(bundle.size)
        return memory, BundleMemory(memory, bundle).take

    def _lay_out(self, storage: WeightStorage, device: torch.device | None = None) -> ModelT:
        format, keeps_packed = self._source.format, self._source.stays_packed(self._device)
        reads_codes = isinstance(storage, BundleStorage)
        loader = WeightLoader(
            storage, self._dtype, device or self._device, format, keeps_packed, self._shard, reads_codes
        )
        self._matrices = loader.matrices
        return self._lay_out_model(loader)
