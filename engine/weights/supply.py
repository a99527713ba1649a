"""Where one model's weights come from this time: mapped from a bundle in memory, or from the checkpoint itself; or read from disk, into memory of
their own or into a new bundle.

Knows the order of preference and what is done when a bundle cannot be used. Refuses to know families (its caller lays the model out) and KV caches.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from engine.errors import CheckpointError
from engine.layers.weights import Storage, WeightLoader
from engine.phases import Phases
from engine.weights.at_once import PackedReader
from engine.weights.bundle import Bundle, BundleError, Facts, Identity, Wanted, config_digest, difference, lay_out
from engine.weights.bundle_file import BundleFile, new_bundle
from engine.weights.file_system import is_local
from engine.weights.filling import Job, ReadingProgress, Write, fill
from engine.weights.fingerprint import fingerprint
from engine.weights.kept_maps import drop_removed, map_kept
from engine.weights.quantization import Quantization
from engine.weights.reader import Checkpoint, StoredTensor, is_quantized, packed_file
from engine.weights.settling import Unsettled
from engine.weights.storage import (
    META,
    Arena,
    FilePart,
    FromBundle,
    FromCheckpoint,
    InPlace,
    OnBundle,
    Plan,
    on_device,
)
from kernels.cpu import pages

log = logging.getLogger(__name__)

# From here on a checkpoint's own pages are used, where it has them as the model wants them. Less is copied in a tenth of a second, and is then in
# the memory it will stay in.
IN_PLACE_FROM_BYTES = 128 << 20
IN_PLACE_SHARE = 0.5  # of the bytes, at least

DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_NOBODY = Identity("", "", "", "")  # whose memory no other process will see
_AS_STORED = "tensors as the checkpoint has them"  # where other bundles name the type of theirs

ModelT = TypeVar("ModelT", covariant=True)


class LayOut(Protocol[ModelT]):
    def __call__(self, loader: WeightLoader) -> ModelT:
        """The model in the loader's storage: the same requests in the same order every time."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[ModelT]):
    """A model with its weights."""

    model: ModelT
    mapped: bool  # from a bundle that was there
    memory: torch.Tensor | None  # all of them, on a CPU, where they stay
    unsettled: Unsettled[ModelT] | None = None  # they lie in the checkpoint, and may move
    is_proved: bool = False  # an earlier load has computed with these bytes
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # by name
    in_files: Mapping[str, tuple[FilePart, ...]] = field(default_factory=dict)  # those that are files' own pages


class Supply:
    """One load of one directory. Its `facts` and its fingerprint come first, since types and caches depend on them; then `load`. `close` it."""

    def __init__(
        self,
        directory: Path,
        architecture: str,
        weights_file: Path | None,
        phases: Phases,
        on_progress: ReadingProgress | None,
        quantization: Quantization | None = None,
    ) -> None:
        """Raises CheckpointError where the directory holds no weights."""
        self._directory = directory
        self._architecture = architecture
        self._config = config_digest((directory / "config.json").read_bytes())
        self._kept_at = weights_file
        self._phases = phases
        self._quantization = quantization
        self._report = on_progress or (lambda done, total: None)
        self._open = ExitStack()
        self._checkpoint: Checkpoint | None = None
        self._plan_of: tuple[torch.dtype, Plan] | None = None
        self._packed = self._open_packed()
        self._kept = self._open_kept()

    def close(self) -> None:
        self._open.close()

    def forget(self) -> None:
        """The weights make no numbers: no later load shall trust the bundle."""
        if self._kept_at is not None:
            self._kept_at.unlink(missing_ok=True)

    @cached_property
    def fingerprint(self) -> bytes:
        try:
            return fingerprint(self._directory)
        except OSError as error:
            raise CheckpointError(f"{self._directory} cannot be read for its fingerprint: {error}") from error

    @property
    def packed_dtype(self) -> torch.dtype | None:
        """Of a checkpoint that was packed for one type."""
        return None if self._packed is None else DTYPE_NAMES[self._packed.bundle.identity.dtype]

    @property
    def facts(self) -> Facts:
        for file in (self._kept, self._packed):
            if file is not None:
                return file.bundle.facts
        return self._stored().facts

    def num_bytes(self, dtype: torch.dtype, device: torch.device) -> int:
        """What the weights take once they are loaded."""
        return self._stored().num_bytes if self.stays_packed(device) else self.facts.num_parameters * dtype.itemsize

    def load(self, lay_out_model: LayOut[ModelT], dtype: torch.dtype, device: torch.device) -> Loaded[ModelT]:
        """Raises CheckpointError."""
        if self._kept_at is not None:
            load_kept = self._load_copied if self.stays_packed(device) else self._load_shared
            try:
                return load_kept(self._kept_at, lay_out_model, dtype, device)
            except (BundleError, OSError) as error:
                log.warning(
                    "the weights of %s go into the engine host's own memory and are read again after it: %s: %s",
                    self._directory, self._kept_at, error,
                )  # fmt: skip
        return self._load_own(lay_out_model, dtype, device)

    # A bundle in memory

    def _load_shared(
        self, path: Path, lay_out_model: LayOut[ModelT], dtype: torch.dtype, device: torch.device
    ) -> Loaded[ModelT]:
        identity = self._identity(dtype)
        drop_removed()  # whose memory a new one may need
        if self._kept is not None and self._kept.bundle.identity == identity:
            try:
                return replace(self._map(self._kept, lay_out_model, dtype, device, is_new=False), is_proved=True)
            except BundleError as error:
                _refuse(path, str(error))
        elif self._kept is not None:
            _refuse(path, str(difference(self._kept.bundle.identity, identity)))
        in_place = self._load_in_place(lay_out_model, dtype, device, path)
        if in_place is not None:
            return in_place
        self._make(path, identity, lay_out_model, dtype)
        made = self._open.enter_context(BundleFile.open(path))
        return self._map(made, lay_out_model, dtype, device, is_new=True)

    def _map(
        self, file: BundleFile, lay_out_model: LayOut[ModelT], dtype: torch.dtype, device: torch.device, is_new: bool
    ) -> Loaded[ModelT]:
        is_in_place = device.type == "cpu"
        if is_in_place:
            memory = file.map() if file is self._packed else map_kept(file)
            storage = OnBundle(file.bundle, memory)
        else:
            storage = FromBundle(file, on_device(device))
        model = lay_out_model(self._loader(storage, dtype, device))
        self._phases.end("build")
        fill(storage.jobs, storage.works, self._report)
        self._report(file.bundle.data_bytes, file.bundle.data_bytes)
        self._phases.end("weights")
        in_files = {}
        if is_in_place and file is self._packed:
            places = file.bundle.places
            in_files = {wanted.name: (FilePart(file.path, start, wanted.num_bytes),) for wanted, start in places}
        return Loaded(model, not is_new, storage.memory, tensors=storage.taken, in_files=in_files)

    def _make(self, path: Path, identity: Identity, lay_out_model: LayOut[object], dtype: torch.dtype) -> None:
        """Read the checkpoint into a bundle at `path`."""
        bundle = self._plan(identity, lay_out_model, dtype)
        with new_bundle(path, bundle) as new:
            self._read_into(Arena(new.memory, bundle), lay_out_model, dtype, new.write)
            self._expect_no_change()
        self._phases.end("weights")

    def _load_copied(
        self, path: Path, lay_out_model: LayOut[ModelT], dtype: torch.dtype, device: torch.device
    ) -> Loaded[ModelT]:
        """Weights that stay packed. How they are arranged depends on what is in them, so what lies in memory is the checkpoint itself: no disk is
        read again, but they are arranged again."""
        identity = self._identity(dtype)._replace(dtype=_AS_STORED)
        kept = self._kept
        if kept is not None and (wrong := difference(kept.bundle.identity, identity)) is not None:
            _refuse(path, wrong)
            kept = None
        is_new = kept is None
        if kept is None:
            self._copy(path, identity)
            kept = self._open.enter_context(BundleFile.open(path))
        tensors = {
            wanted.name: StoredTensor(path, wanted.dtype, wanted.shape, start, start + wanted.num_bytes)
            for wanted, start in kept.bundle.places
        }
        on_disk, self._checkpoint = self._checkpoint, Checkpoint(tensors)
        try:
            loaded = self._load_own(lay_out_model, dtype, device)
        except OSError:
            self._checkpoint = on_disk
            raise
        return replace(loaded, mapped=not is_new)

    def _copy(self, path: Path, identity: Identity) -> None:
        """The checkpoint's tensors, byte for byte, into a bundle at `path`."""
        tensors = self._stored().tensors
        wanted = [Wanted(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        bundle = lay_out(identity, self._stored().facts, wanted)
        with new_bundle(path, bundle) as new:
            jobs = []
            for place in bundle.places:
                tensor = tensors[place.wanted.name]
                as_bytes = tensor._replace(dtype="U8", shape=(tensor.end - tensor.start,))
                jobs.append(Job(place.wanted.name, (as_bytes,), new.memory[place.start : place.end]))
            fill(jobs, on_progress=self._report, write=new.write)
            self._expect_no_change()
        self._phases.end("weights")

    def _expect_no_change(self) -> None:
        if fingerprint(self._directory) != self.fingerprint:
            raise CheckpointError(f"{self._directory} was changed while it was read; load it again")

    def _open_kept(self) -> BundleFile | None:
        """One of this checkpoint, perhaps in another type."""
        if self._kept_at is None:
            return None
        try:
            file = self._open.enter_context(BundleFile.open(self._kept_at))
        except FileNotFoundError:
            return None
        except (OSError, BundleError) as error:
            _refuse(self._kept_at, str(error))
            return None
        found = file.bundle.identity
        wrong = difference(found, Identity(self._architecture, found.dtype, self._config, self.fingerprint.hex()))
        if wrong is None:
            return file
        _refuse(self._kept_at, wrong)
        return None

    # Memory of the process's own

    def _load_own(self, lay_out_model: LayOut[ModelT], dtype: torch.dtype, device: torch.device) -> Loaded[ModelT]:
        if self._packed is not None:
            # On a CPU from the system's own cache of the file: 0.1 s instead of 0.5 for a GiB, and decode steps at most 3 % slower.
            try:
                return self._map(self._packed, lay_out_model, dtype, device, is_new=False)
            except BundleError as error:
                raise CheckpointError(f"{self._directory}: {error}; pack the model again") from error
        in_place = self._load_in_place(lay_out_model, dtype, device, None)
        if in_place is not None:
            return in_place
        memory: torch.Tensor | None = None
        allocate = on_device(device)
        packed = PackedReader(self._stored(), self._report) if self.stays_packed(device) else None
        if device.type == "cpu" and packed is None:
            plan = self._plan(_NOBODY, lay_out_model, dtype)
            memory = pages.small(plan.size)
            allocate = Arena(memory, plan).take
        storage = FromCheckpoint(self._stored(), allocate)
        model = lay_out_model(self._loader(storage, dtype, device, packed))
        self._stored().refuse_leftovers()
        self._phases.end("build")
        before = 0 if packed is None else packed.done_bytes
        fill(storage.jobs, storage.works, lambda done, total: self._report(before + done, before + total))
        self._phases.end("weights")
        return Loaded(model, mapped=False, memory=memory, tensors=storage.taken)

    # The checkpoint's own pages

    def _load_in_place(
        self, lay_out_model: LayOut[ModelT], dtype: torch.dtype, device: torch.device, path: Path | None
    ) -> Loaded[ModelT] | None:
        """None where that is not worth while: the model is small, or too little of it is stored as it is wanted."""
        if self._packed is not None or device.type != "cpu" or not is_local(self._directory):
            return None
        checkpoint, plan = self._stored(), self._planned(lay_out_model, dtype)
        in_files = plan.in_files
        rest = [wanted for wanted in plan.wanted if wanted.name not in in_files]
        num_bytes, rest_bytes = (sum(wanted.num_bytes for wanted in some) for some in (plan.wanted, rest))
        if num_bytes < IN_PLACE_FROM_BYTES or num_bytes - rest_bytes < IN_PLACE_SHARE * num_bytes:
            return None
        own = lay_out(_NOBODY, self.facts, rest)
        storage = InPlace(checkpoint, in_files, Arena(pages.small(own.size), own).take)
        model = lay_out_model(self._loader(storage, dtype, device))
        checkpoint.refuse_leftovers()
        self._phases.end("build")
        fill(storage.jobs, storage.works, self._report)
        self._expect_no_change()
        self._phases.end("map")

        def renew(memory: torch.Tensor) -> ModelT:
            again = OnBundle(bundle, memory)
            renewed = lay_out_model(self._loader(again, dtype, device))
            for work in again.works:
                work()
            return renewed

        bundle = lay_out(self._identity(dtype), self.facts, plan.wanted)
        unsettled = Unsettled(path, bundle, storage.taken, self._expect_no_change, renew)
        return Loaded(model, False, None, unsettled, tensors=storage.taken, in_files=in_files)

    # All of them

    def _planned(self, lay_out_model: LayOut[object], dtype: torch.dtype) -> Plan:
        if self._plan_of is None or self._plan_of[0] != dtype:
            plan = Plan(self._stored())
            lay_out_model(self._loader(plan, dtype, META))
            self._plan_of = dtype, plan
        return self._plan_of[1]

    def _plan(self, identity: Identity, lay_out_model: LayOut[object], dtype: torch.dtype) -> Bundle:
        if self._packed is not None:
            return lay_out(identity, self.facts, (place.wanted for place in self._packed.bundle.places))
        return lay_out(identity, self.facts, self._planned(lay_out_model, dtype).wanted)

    def _read_into(
        self,
        arena: Arena,
        lay_out_model: LayOut[object],
        dtype: torch.dtype,
        write: Write,
    ) -> None:
        if self._packed is not None:
            jobs = list(arena.jobs_from(self._packed))
        else:
            storage = FromCheckpoint(self._stored(), arena.take)
            lay_out_model(self._loader(storage, dtype, META))
            self._stored().refuse_leftovers()
            jobs = storage.jobs
        fill(jobs, on_progress=self._report, write=write)

    def _loader(
        self, storage: Storage, dtype: torch.dtype, device: torch.device, packed: PackedReader | None = None
    ) -> WeightLoader:
        return WeightLoader(storage, dtype, device, self._quantization, packed)

    def stays_packed(self, device: torch.device) -> bool:
        """Such weights have a bundle of their own kind, or none: others hold what was unpacked."""
        return self._packed is None and keeps_packed(device) and is_quantized(self.facts)

    def _identity(self, dtype: torch.dtype) -> Identity:
        name = str(dtype).removeprefix("torch.")
        return Identity(self._architecture, name, self._config, self.fingerprint.hex())

    def _stored(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = Checkpoint.open(self._directory)
        return self._checkpoint

    def _open_packed(self) -> BundleFile | None:
        path = packed_file(self._directory)
        if path is None:
            return None
        try:
            file = self._open.enter_context(BundleFile.open(path))
        except BundleError as error:
            raise CheckpointError(
                f"{path.name} in {path.parent} cannot be used: {error}; pack the model again"
            ) from error
        found = file.bundle.identity
        if found.config != self._config:
            raise CheckpointError(f"{path.parent} was packed with another config.json; pack the model again")
        return file


def keeps_packed(device: torch.device) -> bool:
    """Where kernels decode weights while they read them. On a CPU they are unpacked once: torch would unpack them for every step."""
    return device.type == "cuda"


def _refuse(path: Path, why: str) -> None:
    """It is made again; meanwhile its memory is free."""
    log.warning("the bundle %s is not used and is made again: %s", path, why)
    with suppress(OSError):
        path.unlink()
